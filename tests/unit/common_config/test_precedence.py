"""default < file < environment < flag, for every leaf there is."""

from __future__ import annotations

import pytest
from unit.common_config.samples import EVERY_LEAF, needed, program_with, texts, typed

from diptych.common_config import ConfigError, Program, resolve
from diptych.common_config.declare import REQUIRED, Leaf
from diptych.common_config.namespaces import LEAVES, PATHS
from diptych.common_config.record import leaves_of


@pytest.fixture(autouse=True)
def _layers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the layers are the subject: combinations (TP of 2, say) are refused elsewhere."""
    monkeypatch.setattr("diptych.common_config.resolution.CHECKS", [])


@pytest.mark.parametrize("leaf", EVERY_LEAF)
def test_each_layer_beats_the_one_below(leaf: Leaf) -> None:
    program = program_with(leaf)
    in_file, in_env, in_flag = texts(leaf)
    others = {name: value for name, value in needed(program).items() if name != leaf.name}

    def resolved(**layers: object) -> tuple[object, str, str]:
        flags = {**others, **layers.get("flags", {})}  # type: ignore[dict-item]
        record = resolve(program, flags=flags, file=layers.get("file"), env=layers.get("env", {}))  # type: ignore[arg-type]
        where = record.provenance[leaf.name]
        return getattr(record, leaf.name), where.source, where.origin

    namespace, *group = PATHS[leaf.name].split(".")
    nested: object = {leaf.name: _as_in_a_file(leaf, in_file)}
    for name in reversed(group):
        nested = {name: nested}
    file = {namespace: nested}
    env = {leaf.env: in_env}
    flags = {leaf.name: in_flag}
    assert resolved(file=file) == (typed(leaf, in_file), "file", "file")
    assert resolved(file=file, env=env) == (typed(leaf, in_env), "env", leaf.env)
    assert resolved(file=file, env=env, flags=flags) == (typed(leaf, in_flag), "flag", leaf.flag)
    assert resolved(file=file, flags=flags) == (typed(leaf, in_flag), "flag", leaf.flag)


def _as_in_a_file(leaf: Leaf, text: str) -> object:
    return [text] if leaf.element is not None else typed(leaf, text)


@pytest.mark.parametrize("leaf", EVERY_LEAF)
def test_without_any_layer_the_default_of_the_program_holds(leaf: Leaf) -> None:
    for program in Program:
        if leaf.name not in leaves_of(program):
            continue
        default = leaf.default_for(program)
        if default is REQUIRED:
            with pytest.raises(ConfigError, match=f"{leaf.flag} is missing"):
                resolve(program, env={})
            continue
        record = resolve(program, flags=needed(program), env={})
        if leaf.name in needed(program):
            continue
        source = record.provenance[leaf.name].source
        if leaf.resolved:
            assert (source, getattr(record, leaf.name) is not None) == ("resolved", True)
        else:
            assert (source, getattr(record, leaf.name)) == ("default", default)


def test_programs_may_differ_in_a_default() -> None:
    worker = resolve(Program.DECODE, flags={"model_path": "m"}, env={})
    assert (worker.port, resolve(Program.LOCAL, env={}).port) == (30000, 8000)


def test_a_switch_of_the_file_can_be_turned_off_by_the_opposite_flag() -> None:
    record = resolve(Program.LOCAL, file={"disable_radix_cache": True}, flags={"disable_radix_cache": False})
    assert record.disable_radix_cache is False


def test_an_open_number_can_be_opened_again_above_the_file() -> None:
    record = resolve(Program.LOCAL, file={"context_length": 100}, flags={"context_length": "none"}, env={})
    assert record.context_length is None
    assert record.provenance["context_length"].origin == "--context-length"


def test_settings_of_other_programs_in_a_shared_file_are_checked_and_left_aside() -> None:
    router = needed(Program.ROUTER)
    assert "page_size" not in resolve(Program.ROUTER, flags=router, file={"page_size": 32}, env={}).values()
    with pytest.raises(ConfigError, match="file: page_size: 'x' is not a whole number"):
        resolve(Program.ROUTER, flags=router, file={"page_size": "x"}, env={})


def test_variables_of_other_programs_are_none_of_this_ones_business() -> None:
    record = resolve(Program.ROUTER, flags=needed(Program.ROUTER), env={"DIPTYCH_PAGE_SIZE": "32"})
    assert "page_size" not in record.provenance


def test_every_leaf_belongs_to_a_program() -> None:
    assert {name for program in Program for name in leaves_of(program)} == set(LEAVES)
