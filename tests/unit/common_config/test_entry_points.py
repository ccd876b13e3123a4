"""Every process publishes before anything in it reads."""

from __future__ import annotations

import pytest
from unit.common_config.entry_points import entry_points, reads_at_import, reads_before_publish
from unit.common_config.sources import modules, parse, scripts

PROJECT = modules(without=("common_config",))


def test_nothing_is_read_at_import() -> None:
    assert reads_at_import(PROJECT) == []


@pytest.mark.parametrize("entry_point", sorted(entry_points(PROJECT, scripts())))
def test_no_entry_point_reads_before_it_publishes(entry_point: str) -> None:
    assert reads_before_publish(PROJECT, entry_point) == []


@pytest.mark.parametrize(
    "text",
    [
        "PAGE = get_schedule().page_size",
        "class A:\n    page = get_schedule().page_size",
        "def f(page=get_schedule().page_size):\n    pass",
        "def f(*, page=get_schedule().page_size):\n    pass",
        "@limit(get_schedule().page_size)\ndef f():\n    pass",
        "if True:\n    PAGES = [get_schedule() for _ in range(2)]",
        "f = lambda page=get_schedule().page_size: page",
        "get_context().override('x', page_size=1)",
        "def h():\n    return get_schedule()\nX = h()",
        "def a():\n    return get_schedule()\ndef b():\n    return a()\nclass A:\n    page = b().page_size",
        "class A:\n    def __init__(self):\n        get_schedule()\nX = A()",
        "class A:\n    def m(self):\n        get_schedule()\na = A()\nX = a.m()",
    ],
)
def test_a_planted_read_at_import_is_found(text: str) -> None:
    assert len(reads_at_import(parse(planted=text))) == 1


def test_a_planted_read_at_import_through_another_module_is_found() -> None:
    planted = parse(a="def h():\n    get_schedule()", b="from diptych.a import h as k\nX = k()")
    assert reads_at_import(planted) == ["diptych.a:2: get_schedule() before publish"]


def test_a_program_that_starts_under_its_main_guard_reads_nothing_at_import() -> None:
    text = "def main():\n    get_schedule()\nif __name__ == '__main__':\n    main()"
    assert reads_at_import(parse(planted=text)) == []


def test_reads_inside_functions_are_not_reads_at_import() -> None:
    text = "def f():\n    get_schedule()\nclass A:\n    def m(self):\n        get_schedule()\n"
    text += "g = lambda: get_schedule()"
    assert reads_at_import(parse(planted=text)) == []


PUBLISH = "\n    publish(r, role=R)"
EARLY = {
    "direct": "def main():\n    get_schedule()" + PUBLISH,
    "argument": "def main():\n    publish(make(get_schedule()), role=R)",
    "helper": "def helper():\n    return get_schedule()\ndef main():\n    helper()" + PUBLISH,
    "deeper": "def a():\n    get_schedule()\ndef b():\n    a()\ndef main():\n    b()" + PUBLISH,
    "constructor": "class A:\n    def __init__(s):\n        get_schedule()\ndef main():\n    A()" + PUBLISH,
    "method": "class A:\n    def m():\n        get_schedule()\ndef main():\n    A.m()" + PUBLISH,
    "object": "class A:\n    def m(s):\n        get_schedule()\ndef main():\n    a = A()\n    a.m()"
    + PUBLISH,
    "new object": "class A:\n    def m(s):\n        get_schedule()\ndef main():\n    A().m()" + PUBLISH,
    "own method": "class A:\n    def __init__(self):\n        self.m()\n    def m(s):\n        get_memory()\n"
    "def main():\n    A()" + PUBLISH,
    "alias": "def h():\n    get_schedule()\nk = h\ndef main():\n    k()" + PUBLISH,
    "bag alias": "def main():\n    bag = get_schedule()\n    bag.page_size" + PUBLISH,
    "coroutine": "async def a():\n    get_schedule()\ndef main():\n    asyncio.run(a())" + PUBLISH,
    "never published": "def main():\n    if x:\n        return get_schedule()",
}


@pytest.mark.parametrize("text", EARLY.values(), ids=EARLY)
def test_a_planted_read_before_publish_is_found(text: str) -> None:
    assert len(reads_before_publish(parse(planted=text), "diptych.planted:main")) == 1


@pytest.mark.parametrize(
    ("imports", "call"),
    [
        ("from diptych.other import helper", "helper()"),
        ("from diptych.other import helper as h", "h()"),
        ("from diptych import other", "other.helper()"),
    ],
)
def test_a_planted_read_in_another_module_is_found(imports: str, call: str) -> None:
    planted = parse(
        main=f"{imports}\ndef main():\n    {call}\n    publish(r, role=R)",
        other="def helper():\n    return get_memory()",
    )
    assert reads_before_publish(planted, "diptych.main:main") == [
        "diptych.other:2: get_memory() before publish"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "def main():\n    publish(r, role=R)\n    get_schedule()",
        "def first():\n    publish(r, role=R)\ndef main():\n    first()\n    get_schedule()",
        "def g():\n    get_schedule()\ndef main():\n    later.append(g)\n    publish(r, role=R)\n    g()",
    ],
)
def test_reads_after_publish_are_fine(text: str) -> None:
    assert reads_before_publish(parse(planted=text), "diptych.planted:main") == []


def test_entry_points_are_commands_and_main_blocks() -> None:
    block = '\nif __name__ == "__main__":\n    sys.exit(run())'
    planted = parse(a="def run():\n    pass" + block, b="def run():\n    pass")
    assert entry_points(planted, {"x": "diptych.b:run"}) == {"diptych.a:run", "diptych.b:run"}
    assert reads_before_publish(planted, "diptych.b:missing") == ["diptych.b:missing: no such function"]
