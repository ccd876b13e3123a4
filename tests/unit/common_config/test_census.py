"""Nothing outside `common_config` reads, keeps or changes a record, or reads a bag by a made-up name."""

from __future__ import annotations

import pytest
from unit.common_config.census import census, reads, unread
from unit.common_config.sources import modules, parse

from diptych.common_config import Program, resolve
from diptych.common_config.namespaces import DERIVED, LEAVES


def test_the_project_reads_bags_and_builds_from_records_only_where_it_says_so() -> None:
    assert census(modules(without=("common_config",))) == []


IMPORTS = "from diptych.common_config import *\nimport copy, diptych.common_config as common_config\n"

READS = {
    "direct": "def f():\n    return parse_command_line(P).page_size",
    "alias": "def f(record: LaunchConfig):\n    args = record\n    return args.page_size",
    "alias of an alias": "def f(r: LaunchConfig):\n    a = r\n    b = a if a else None\n    return b.port",
    "walrus": "def f():\n    if (args := resolve(P)):\n        return args.port",
    "module": "def f():\n    return common_config.resolve(P).port",
    "optional": "def f(record: 'LaunchConfig | None'):\n    return record.port",
    "bytes": "def f(data):\n    return LaunchConfig.from_bytes(data).port",
    "derived": "def f(record: LaunchConfig):\n    return record.derive('x', port=1).port",
    "copy": "def f(record: LaunchConfig):\n    return copy.copy(record).port",
    "field": "class A:\n    conf: LaunchConfig\ndef f(a):\n    return a.conf.port",
    "helper": "def g(args):\n    return args.port\ndef f(record: LaunchConfig):\n    return g(record)",
    "keyword": "def g(*, args):\n    return args.port\ndef f(r: LaunchConfig):\n    return g(args=r)",
    "method": "class A:\n    def m(self, x):\n        return x.port\ndef f(a, r: LaunchConfig):\n    a.m(r)",
    "returned": "def make():\n    return resolve(P)\ndef f():\n    return make().port",
    "twice": "def a():\n    return resolve(P)\ndef b():\n    return a()\ndef f():\n    return b().port",
    "property": "class A:\n    @property\n    def c(s):\n        return resolve(P)\ndef f(a):\n    a.c.port",
    "closure": "def f(record: LaunchConfig):\n    def g():\n        return record.port\n    return g",
    "lambda": "def f(record: LaunchConfig):\n    return lambda: record.port",
    "test helper": "def f():\n    with override_config() as record:\n        return record.port",
    "constructor": "class A:\n    def __init__(self, x):\n        x.port\ndef f(r: LaunchConfig):\n    A(r)",
    "dataclass": "class A:\n    conf: object\ndef f(r: LaunchConfig):\n    return A(conf=r).conf.port",
    "tuple": "def f(r: LaunchConfig):\n    a, b = r, 1\n    return a.port",
    "returned tuple": "def g(r: LaunchConfig):\n    return r, 1\ndef f():\n    a, _ = g(x)\n    a.port",
    "iteration": "def f(r: LaunchConfig):\n    return [a.port for a in (r,)]",
    "dictionary": "def f(d, r: LaunchConfig):\n    d['x'] = r\n    return d['x'].port",
    "nonlocal": "def f(r: LaunchConfig):\n    def g():\n        nonlocal a\n        a = r\n    return a.port",
    "partial": "def g(x):\n    return x.port\ndef f(r: LaunchConfig):\n    return functools.partial(g, r)",
    "default": "def f(r: LaunchConfig):\n    def g(x=r):\n        return x.port",
    "helper's alias": "def g(x):\n    return x.port\nh = g\ndef f(r: LaunchConfig):\n    return h(r)",
    "star": "def g(*a):\n    return a[0].port\ndef f(r: LaunchConfig):\n    return g(r)",
    "with": "def f(r: LaunchConfig):\n    with contextlib.nullcontext(r) as a:\n        return a.port",
    "generator": "def g():\n    yield resolve(P)\ndef f():\n    with g() as a:\n        return a.port",
    "fields": "def f(r: LaunchConfig):\n    return r.values()['port']",
    "account": "def f(r: LaunchConfig):\n    return r.redacted().get('port')",
    "readback": "def f():\n    return readback()['record']['port']  # from a record",
    "pattern": "def f(x):\n    match x:\n        case LaunchConfig(port=p):\n            return p",
    "loop": "async def f(record: LaunchConfig):\n    for _ in range(record.max_n):\n        pass",
}


@pytest.mark.parametrize("text", READS.values(), ids=READS)
def test_a_planted_read_of_a_record_is_found(text: str) -> None:
    found = census(parse(planted=IMPORTS + text))
    assert len([line for line in found if "from a record" in line]) == 1, found


def test_a_module_level_record_is_found_and_so_are_its_readers() -> None:
    text = "RECORD = resolve(P)\ndef f():\n    return RECORD.port"
    assert census(parse(planted=IMPORTS + text)) == [
        "diptych.planted:3: keeps a record in a module",
        "diptych.planted:5: reads port from a record; read the bag, or mark the function @builds_from_record",
    ]


def test_a_record_that_a_function_puts_into_a_module_is_found_and_so_are_its_readers() -> None:
    text = "R = None\ndef f(r: LaunchConfig):\n    global R\n    R = r\ndef g():\n    return R.port"
    assert [line.partition(";")[0] for line in census(parse(planted=IMPORTS + text))] == [
        "diptych.planted:6: keeps a record in a module",
        "diptych.planted:8: reads port from a record",
    ]


@pytest.mark.parametrize(
    "parking",
    [
        "class A:\n    def __init__(self, r: LaunchConfig):\n        self.args = r",
        "class A:\n    def __init__(self, x):\n        self.args = x\ndef f(r: LaunchConfig):\n    A(r)",
        "def f(a, r: LaunchConfig):\n    a.args = r",
        "def f(a, r: LaunchConfig):\n    a.args['x'] = r",
    ],
)
def test_a_parked_record_is_found_however_it_got_there(parking: str) -> None:
    reader = "def f(runner):\n    args = runner.args\n    return args.page_size"
    parked, read = census(parse(a=IMPORTS + parking, b=reader))
    assert "parks a record on an object" in parked
    assert "reads page_size from a record" in read


def test_a_parked_record_is_found_and_so_are_its_readers_in_other_files() -> None:
    parked = "class A:\n    def __init__(self, r: LaunchConfig):\n        self.args = r"
    reader = "def f(runner):\n    args = runner.args\n    return args.page_size"
    assert [line.partition(";")[0] for line in census(parse(a=IMPORTS + parked, b=reader))] == [
        "diptych.a:5: parks a record on an object",
        "diptych.b:3: reads page_size from a record",
    ]


WRITES = {
    "assign": "def f(r: LaunchConfig):\n    r.port = 1",
    "augment": "def f(r: LaunchConfig):\n    r.port += 1",
    "delete": "def f(r: LaunchConfig):\n    del r.port",
    "alias": "def f(r: LaunchConfig):\n    args = r\n    args.undeclared = 1",
    "setattr": "def f(r: LaunchConfig):\n    setattr(r, 'port', 1)",
    "object": "def f(r: LaunchConfig):\n    object.__setattr__(r, 'port', 1)",
    "helper": "def g(x):\n    x.port = 1\ndef f(r: LaunchConfig):\n    g(r)",
    "module": "R = resolve(P)\ndef f():\n    R.port = 1",
    "parked": "def f(a, r: LaunchConfig):\n    a.conf = r\ndef g(a):\n    a.conf.port = 1",
    "bag": "def f():\n    get_schedule().page_size = 1",
    "bag helper": "def g(bag):\n    bag.page_size = 1\ndef f():\n    g(get_schedule())",
    "bag alias": "def f():\n    bag = get_schedule()\n    bag.page_size = 1",
    "group": "def f():\n    get_exec().kernel.linear_backend = 'plain'",
    "bag object": "def f():\n    object.__setattr__(get_schedule(), 'page_size', 1)",
}


@pytest.mark.parametrize("text", WRITES.values(), ids=WRITES)
def test_a_planted_assignment_is_found(text: str) -> None:
    found = census(parse(planted=IMPORTS + text))
    assert any("assigns to" in line or "__setattr__ on" in line or "setattr on" in line for line in found), (
        found
    )


DYNAMIC = {
    "literal": "def f(r: LaunchConfig):\n    return getattr(r, '_never_existed', False)",
    "computed": "def f(r: LaunchConfig, name):\n    return getattr(r, name)",
    "alias": "def f(r: LaunchConfig):\n    a = r\n    return hasattr(a, 'port')",
    "vars": "def f(r: LaunchConfig):\n    return vars(r)",
    "dict": "def f(r: LaunchConfig):\n    return r.__dict__",
    "bag": "def f(name):\n    return getattr(get_schedule(), name)",
    "bag alias": "def f():\n    schedule = get_schedule()\n    return getattr(schedule, 'page_size', 16)",
    "group": "def f():\n    return getattr(get_exec().kernel, 'attention_backend')",
    "helper": "def g(bag, n):\n    return getattr(bag, n)\ndef f():\n    return g(get_schedule(), 'a')",
}


@pytest.mark.parametrize("text", DYNAMIC.values(), ids=DYNAMIC)
def test_a_planted_dynamic_read_is_found(text: str) -> None:
    found = census(parse(planted=IMPORTS + text))
    assert len(found) == 1, found


@pytest.mark.parametrize(
    "text",
    [
        "from diptych.common_config import get_schedule as gs\ndef f():\n    return gs().page_size",
        "from diptych.common_config import resolve as r\ndef f():\n    return r(P).page_size",
        "from diptych.common_config.record import LaunchConfig as LC\ndef f(r: LC):\n    return r.page_size",
        "def f():\n    bag = get_schedule\n    return bag().page_size",
        "PAGES = {'a': get_schedule}",
        "def f():\n    return (common_config.get_schedule if x else y)().page_size",
        "def f():\n    return list(map(resolve, Program))",
        "def f(bag=get_schedule):\n    return bag().page_size",
    ],
)
def test_an_accessor_or_maker_under_another_name_is_found(text: str) -> None:
    (found,) = census(parse(planted=IMPORTS + text))
    assert "under another name" in found or "instead of calling it" in found


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    return get_schedule().page_sise",
        "def f():\n    bag = get_memory()\n    return bag.page_size",
        "def f():\n    return get_exec().kernel.page_size",
    ],
)
def test_a_planted_read_of_an_undeclared_leaf_is_found(text: str) -> None:
    (found,) = census(parse(planted=IMPORTS + text))
    assert "doesn't declare" in found


@pytest.mark.parametrize(
    "text",
    [
        "@builds_from_record\ndef f(r: LaunchConfig):\n    return r.port, r.derive('x', port=1).port",
        "def f(record: LaunchConfig):\n    publish(record, role=R)\n    return record.to_bytes()",
        "def f():\n    bag = get_schedule()\n    return bag.page_size, get_exec().kernel.linear_backend",
        "def f():\n    with get_model().override(load_format='dummy'):\n        pass",
        "def f(record):\n    return record.port  # some other record\nP = pathlib.Path().resolve()",
    ],
)
def test_what_is_allowed_is_not_reported(text: str) -> None:
    assert census(parse(planted=IMPORTS + text)) == []


def test_every_declared_leaf_is_used_by_something() -> None:
    record = resolve(Program.LOCAL, env={})
    assert unread(modules(without=("common_config",)), record) == set()


def test_a_leaf_that_nothing_reads_is_found() -> None:
    record = resolve(Program.LOCAL, env={})
    text = "def f():\n    bag = get_schedule()\n    return bag.prefill_token_budget, get_router().prefill\n"
    text += "def g(r: LaunchConfig):\n    return r.derive('x', port=1)  # sets, does not read\n"
    text += "@builds_from_record\ndef h(r: LaunchConfig):\n    return r.host\n"
    used = {*LEAVES, *DERIVED} - unread(parse(planted=IMPORTS + text), record)
    assert used == {
        *("prefill_token_budget", "chunked_prefill_size", "disable_chunked_prefix_cache"),
        *("prefill", "default_bootstrap_port", "host"),
    }


def test_flags_that_lose_their_only_reader_are_found() -> None:
    left = modules(without=("common_config",))
    del left["diptych.server.sampling_options"]
    assert unread(left, resolve(Program.LOCAL, env={})) == {"max_n", "default_max_tokens"}


ATTENTION = {"attention_backend", "prefill_attention_backend", "decode_attention_backend"}
"""What a launch may name one of; only the pair derived from them, fallback applied, may decide anything."""


def test_no_decision_reads_one_of_the_three_attention_flags() -> None:
    found = reads(modules(without=("common_config",)))
    assert "attention_backends" in found
    assert not found & ATTENTION


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    return get_exec().kernel.attention_backend",
        "def f():\n    kernel = get_exec().kernel\n    return kernel.prefill_attention_backend",
        "def g(bag):\n    return bag.decode_attention_backend\ndef f():\n    g(get_exec().kernel)",
    ],
)
def test_a_planted_read_of_one_of_them_is_found(text: str) -> None:
    assert reads(parse(planted=IMPORTS + text)) & ATTENTION
