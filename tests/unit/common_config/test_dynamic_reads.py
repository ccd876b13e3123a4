"""No object of ours is read by a name that the code doesn't show."""

from __future__ import annotations

import pytest
from unit.common_config.dynamic_reads import dynamic_reads
from unit.common_config.sources import modules, parse

RECORD = "the record's fields by their declared names"
TORCH = "torch's dtype of that name"
ARGPARSE = "argparse's object has its options for attributes"
ALLOWED = {
    # The mechanism of records and bags itself.
    ("diptych.common_config.record:LaunchConfig.__init__", "__setattr__"): "fills a frozen record",
    ("diptych.common_config.record:LaunchConfig.__setattr__", "__setattr__"): "refuses",
    ("diptych.common_config.record:LaunchConfig.__delattr__", "__delattr__"): "refuses",
    ("diptych.common_config.record:LaunchConfig.__getattr__", "__getattr__"): "says why a field isn't there",
    ("diptych.common_config.record:LaunchConfig.values", "getattr"): RECORD,
    ("diptych.common_config.record:environment_of", "getattr"): RECORD,
    ("diptych.common_config.declare:Namespace.__setattr__", "__setattr__"): "refuses",
    ("diptych.common_config.declare:Namespace.__delattr__", "__delattr__"): "refuses",
    (
        "diptych.common_config.derivation:_View.__getattr__",
        "__getattr__",
    ): "the view that Derived computes from",
    ("diptych.common_config.derivation:derive_all", "__getattr__"): "the same, by a declared name",
    ("diptych.common_config.rules:Draft.__getattr__", "__getattr__"): "the view that rules compute from",
    ("diptych.common_config.context:", "__setattr__"): "fills a sealed bag",
    ("diptych.common_config.context:as_dict", "getattr"): "a bag's leaves by their declared names",
    ("diptych.common_config.accessors:effective_value", "getattr"): "a leaf by its declared name",
    ("diptych.common_config.context:Context.effective", "getattr"): "a leaf by its declared name",
    ("diptych.common_config.accessors:install", "setattr"): "the slot of each declared namespace",
    ("diptych.common_config.accessors:_missing", "setattr"): "the same",
    # Objects of others.
    ("diptych.engine.slab:allocate_slab", "getattr"): TORCH,
    ("diptych.launch.assemble:_torch_dtype", "getattr"): TORCH,
    (
        "diptych.kvtransfer.backends.nixl_agent:NixlAgent.__init__",
        "vars",
    ): "all error types of NIXL's binding",
    ("diptych.bench.serving:main", "vars"): ARGPARSE,
    ("diptych.bench.baseline:main", "vars"): ARGPARSE,
    ("diptych.bench.echo_worker:main", "vars"): ARGPARSE,
}


def test_only_what_is_listed_reads_by_name() -> None:
    found = dynamic_reads(modules())
    assert {where: lines for where, lines in found.items() if where not in ALLOWED} == {}
    assert set(ALLOWED) - set(found) == set(), "listed, but not there any more"


PLANTED = {
    "a name nobody sets": "def f(x):\n    return getattr(x, '_never_existed', False)",
    "a computed name": "def f(x, name):\n    return getattr(x, 'get_' + name)()",
    "asking first": "def f(x):\n    return x.page_size if hasattr(x, 'page_size') else 16",
    "dict": "def f(x):\n    return x.__dict__.get('page_size', 16)",
    "vars": "def f(x):\n    return vars(x)['page_size']",
    "alias": "read = getattr\ndef f(x):\n    return read(x, 'page_size')",
    "argument": "def f(xs):\n    return list(map(getattr, xs, ['a']))",
    "builtins": "import builtins\ndef f(x):\n    return builtins.getattr(x, 'a')",
    "helper": "def read(x, n, d):\n    return getattr(x, n, d)\ndef f(x):\n    return read(x, 'a', 1)",
    "module level": "import torch\nPAGE = getattr(torch, 'page', 16)",
    "class body": "class A:\n    page = getattr(B, 'page', 16)",
    "attrgetter": "from operator import attrgetter as a\ndef f(x):\n    return a('page')(x)",
    "operator": "import operator\ndef f(x):\n    return operator.attrgetter('page')(x)",
    "method": "def f(x):\n    return x.__getattribute__('page')",
    "write": "def f(x):\n    object.__setattr__(x, 'page', 1)",
    "answers anything": "class A:\n    def __getattr__(self, name):\n        return 0",
    "eval": "def f(x):\n    return eval('x.page')",
}


@pytest.mark.parametrize("text", PLANTED.values(), ids=PLANTED)
def test_a_planted_dynamic_read_is_found(text: str) -> None:
    assert set(dynamic_reads(parse(planted=text))) - set(ALLOWED)


def test_what_is_allowed_in_one_function_is_not_allowed_beside_it() -> None:
    text = "def allocate_slab(x):\n    return getattr(torch, x)\ndef g(x):\n    return getattr(x, 'a', 1)"
    found = dynamic_reads(parse(**{"engine.slab": text}))
    assert set(found) - set(ALLOWED) == {("diptych.engine.slab:g", "getattr")}


def test_plain_attributes_and_settings_of_the_same_names_are_fine() -> None:
    assert (
        dynamic_reads(
            parse(planted="def f(x):\n    x.executor.run(x.eval(), 'getattr')\n    exec = get_exec()")
        )
        == {}
    )
