"""Values of the configuration reach the code through bags only, so that overrides and roles hold for all."""

from __future__ import annotations

import pytest
from unit.common_config.internals import BY_NAME, CONTEXT, internals
from unit.common_config.sources import modules, parse

from diptych.common_config import get_context, override_config

ALLOWED = {
    # Shows engines, which may have values of their own, what every leaf is: names come from a readback.
    ("diptych.server.config_overlay", f"imports {BY_NAME} of common_config"),
    ("diptych.server.config_overlay", f"uses {BY_NAME}; read the bag"),
}


def test_nothing_reaches_past_the_accessors() -> None:
    found = internals(modules(without=("common_config",)))
    without_lines = {(module, text.partition(": ")[2]) for module, text in found}
    assert [one for one in found if (one[0], one[1].partition(": ")[2]) not in ALLOWED] == []
    assert ALLOWED - without_lines == set(), "listed, but not there any more"


PLANTED = {
    "record": "def f():\n    return get_context()._record.page_size",
    "bags": "def f():\n    return get_context().bags['memory'].mem_fraction_static",
    "private bags": "def f():\n    return get_context()._bags['memory'].mem_fraction_static",
    "context by another name": "def f():\n    c = get_context()\n    return c.bags",
    "parked context": "class A:\n    def f(self):\n        return self.context._published['port']",
    "by name of the context": "def f():\n    return get_context().effective('port')",
    "declarations of the package": "def f():\n    return common_config.namespaces",
    "declarations": "def f():\n    return LEAVES['page_size'].default",
    "import of declarations": "from diptych.common_config.namespaces import LEAVES as L",
    "import of a package": "from diptych.common_config import namespaces as n",
    "import of a module": "import diptych.common_config.namespaces as n",
    "import of the store": "from diptych.common_config.accessors import _published",
    "relative import": "from ..common_config.namespaces import LEAVES as L",
    "variable": "import os\ndef f():\n    return os.environ['DIPTYCH_PAGE_SIZE']",
    "getenv": "import os\ndef f():\n    return os.getenv('DIPTYCH_PAGE_SIZE', '16')",
    "constant": "NAME = 'DIPTYCH_PAGE_SIZE'\ndef f(env):\n    return env.get(NAME)",
    "made-up variable": "def f(env, name):\n    return env[f'DIPTYCH_{name}']",
    "value by name": "def f():\n    return effective_value('attention_backend')",
    "value by another name": "from diptych.common_config import effective_value as e",
    "value of the module": "def f():\n    return common_config.effective_value('port')",
}


@pytest.mark.parametrize("text", PLANTED.values(), ids=PLANTED)
def test_what_is_planted_is_found(text: str) -> None:
    assert len(internals(parse(planted=text))) == 1


def test_public_imports_and_texts_about_variables_are_fine() -> None:
    text = '"""DIPTYCH_PORT sets it."""\nfrom diptych.common_config import get_schedule, publish\n'
    text += (
        "def f(c):\n    c.override('x', port=1)\n    print('set $DIPTYCH_API_KEY', get_schedule().page_size)"
    )
    assert internals(parse(planted=text)) == []


def test_the_attributes_that_are_looked_for_are_those_of_a_context() -> None:
    with override_config():
        has = set(dir(get_context()))
    assert CONTEXT - has == {"_bags"}
