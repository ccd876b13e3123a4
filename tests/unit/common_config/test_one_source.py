"""A value has one source and a decision one place: nothing computes what is derived once more, and what a
runner has resolved for itself is asked of the runner."""

from __future__ import annotations

import ast
from collections.abc import Mapping

import pytest
from unit.common_config.census import readers, reads_by_function
from unit.common_config.sources import modules, parse

from diptych.common_config import Program, resolve
from diptych.common_config.derivation import derive_all
from diptych.common_config.namespaces import DERIVED

PROJECT = modules(without=("common_config",))


def computed_again(tree: Mapping[str, ast.Module]) -> list[str]:
    """Functions that read several inputs of one derived leaf: they compute what it says already."""
    record = resolve(Program.LOCAL, env={})
    _, inputs = derive_all(record.program, record.values())
    return [
        f"{where} reads {', '.join(sorted(names & inputs[name]))}: read {name}"
        for where, names in reads_by_function(tree).items()
        for name in DERIVED
        if len(names & inputs[name]) > 1
    ]


def test_nothing_computes_what_a_derived_leaf_says() -> None:
    assert computed_again(PROJECT) == []


@pytest.mark.parametrize(
    "text",
    [
        "def f(s=get_schedule()):\n    return s.disable_chunked_prefix_cache or s.chunked_prefill_size",
        "def g(p):\n    return p.tp_size * p.pp_size\ndef f():\n    return g(get_parallel())",
        "def f():\n    k = get_exec().kernel\n    return k.prefill_attention_backend or k.attention_backend",
        "class A:\n    def f(self):\n        self.s = get_parallel()\n    def g(self):\n"
        "        return self.s.tp_size // self.s.dp_size",
    ],
)
def test_a_planted_computation_is_found(text: str) -> None:
    assert computed_again(parse(planted="from diptych.common_config import *\n" + text))


OWN = {"context_length", "dtype", "kv_cache_dtype", "linear_backend", "attention_backends"}
"""What is asked of every runner and resolved by each for itself; `RunnerFacts` says what became of it."""
BUILDS_RUNNERS = "diptych.launch.assemble"


def asked_instead_of_the_runner(tree: Mapping[str, ast.Module]) -> list[str]:
    return sorted(
        f"{module}: {name}" for module, name in readers(tree) if name in OWN and module != BUILDS_RUNNERS
    )


def test_only_what_builds_runners_reads_what_they_resolve() -> None:
    assert asked_instead_of_the_runner(PROJECT) == []
    assert {name for module, name in readers(PROJECT) if module == BUILDS_RUNNERS} >= OWN


@pytest.mark.parametrize(
    "text",
    [
        "def cap():\n    return get_model().context_length",
        "def cap(model):\n    return model.context_length\ndef f():\n    return cap(get_model())",
        "def f():\n    kernel = get_exec().kernel\n    return kernel.attention_backends.decode == 'cpu'",
    ],
)
def test_a_planted_read_beside_the_runner_is_found(text: str) -> None:
    assert asked_instead_of_the_runner(
        parse(**{"engine.graphs": "from diptych.common_config import *\n" + text})
    )


def rebound(tree: Mapping[str, ast.Module]) -> list[str]:
    """Functions that bind a module's names: state that a second engine of the process would swap."""
    return [
        f"{name}:{node.lineno}: global {', '.join(node.names)}"
        for name, module in tree.items()
        for node in ast.walk(module)
        if isinstance(node, ast.Global)
    ]


def test_no_function_rebinds_a_name_of_its_module() -> None:
    assert rebound(modules()) == []


def test_a_planted_global_is_found() -> None:
    assert rebound(parse(planted="TABLE = {}\ndef f():\n    global TABLE\n    TABLE = {1: 2}"))
