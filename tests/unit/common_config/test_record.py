"""The record: frozen, derived from, and handed to another process."""

from __future__ import annotations

import copy

import pytest
from unit.common_config.samples import WORKERS

from diptych.common_config import (
    ConfigError,
    FrozenRecordError,
    LaunchConfig,
    Program,
    Role,
    get_schedule,
    publish,
    resolve,
)
from diptych.common_config.namespaces import LEAVES


@pytest.fixture
def record() -> LaunchConfig:
    return resolve(Program.LOCAL, flags={"page_size": 32, "api_key": "s3cret"}, env={})


def test_assigning_says_what_to_do_instead(record: LaunchConfig) -> None:
    with pytest.raises(
        FrozenRecordError, match=r"record\.derive\(source, page_size=…\).*get_context\(\)\.override"
    ):
        record.page_size = 64
    with pytest.raises(FrozenRecordError, match="can't be assigned"):
        record.parked_group = object()  # type: ignore[attr-defined]
    with pytest.raises(FrozenRecordError, match="can't be deleted"):
        del record.page_size
    with pytest.raises(FrozenRecordError, match="derive a changed copy"):
        record.override(page_size=64)
    assert record.page_size == 32


def test_its_provenance_is_read_only(record: LaunchConfig) -> None:
    with pytest.raises(TypeError):
        record.provenance["page_size"] = record.provenance["port"]  # type: ignore[index]


def test_deriving_touches_neither_the_record_nor_the_bags(record: LaunchConfig) -> None:
    publish(record, role=Role.LOCAL)
    before = record.values()
    derived = record.derive("port chooser", page_size=64, served_model_name="n")
    assert (derived.page_size, derived.served_model_name) == (64, "n")
    assert str(derived.provenance["page_size"]) == "derived: port chooser"
    assert derived.provenance["port"] == record.provenance["port"]
    assert record.values() == before
    assert get_schedule().page_size == 32


def test_deriving_does_not_resolve_again(record: LaunchConfig) -> None:
    assert record.derive("x", model_path="other").served_model_name == record.served_model_name


def test_deriving_names_everything_that_is_wrong(record: LaunchConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        record.derive("x", pagesize=1, page_size="16", cpu_threads=None, port=70000)
    assert caught.value.problems == (
        "derive by x: no field pagesize; did you mean page_size?",
        "derive by x: page_size: '16' is not a whole number from 1 to 4096",
        "derive by x: cpu_threads: can't be left empty; accepted: a whole number from 1 to 4096",
        "derive by x: port: 70000 is not a whole number from 0 to 65535",
    )


@pytest.mark.parametrize("program", Program)
def test_it_survives_the_way_to_another_process(program: Program) -> None:
    flags: dict[str, object] = {"api_key": "s3cret"}
    flags |= WORKERS if program is Program.ROUTER else {"model_path": "m", "page_size": "32"}
    record = resolve(program, flags=flags, env={}).derive("x", port=5)
    again = LaunchConfig.from_bytes(record.to_bytes())
    assert again == record
    assert again.api_key == "s3cret"
    assert {name: type(value) for name, value in again.values().items()} == {
        name: type(value) for name, value in record.values().items()
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: b"[]",
        lambda data: data[:-5],
        lambda data: data.replace(b'"page_size":32', b'"page_size":0'),
        lambda data: data.replace(b'"page_size"', b'"page_sise"'),
        lambda data: data.replace(b"launch-local", b"launch-else"),
        lambda data: data.replace(b'{"program"', b'{"more":1,"program"'),
    ],
)
def test_bytes_that_are_no_record_are_refused(record: LaunchConfig, change: object) -> None:
    with pytest.raises(ConfigError):
        LaunchConfig.from_bytes(change(record.to_bytes()))  # type: ignore[operator]


def test_secrets_are_hidden_from_every_account_of_it(record: LaunchConfig) -> None:
    for text in (repr(record), str(record), str(record.redacted()), str(record.redacted_provenance())):
        assert "s3cret" not in text
    assert record.redacted()["api_key"] == "<redacted>"
    changed = record.derive("x", api_key="0ther")
    assert "0ther" not in repr(changed) + str(changed.redacted_provenance())


def test_an_unset_secret_is_seen_to_be_unset() -> None:
    assert resolve(Program.LOCAL, env={}).redacted()["api_key"] is None


def test_reading_a_field_that_is_not_there_says_why(record: LaunchConfig) -> None:
    with pytest.raises(AttributeError, match="no field 'pagesize'; did you mean page_size"):
        _ = record.pagesize  # type: ignore[attr-defined]
    router = resolve(Program.ROUTER, flags=WORKERS, env={})
    with pytest.raises(
        AttributeError, match="page_size belongs to the namespace schedule, which launch-router"
    ):
        _ = router.page_size


def test_a_copy_can_not_lose_what_it_copies(record: LaunchConfig) -> None:
    with pytest.raises(FrozenRecordError):
        copy.copy(record)


def test_fields_and_declared_leaves_are_the_same_set(record: LaunchConfig) -> None:
    assert set(record.values()) == set(record.provenance) == set(LEAVES)
