"""Publishing, reading, overriding."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys

import pytest
from unit.common_config.samples import WORKERS

from diptych.common_config import (
    AttentionPair,
    ConfigError,
    NotPublishedError,
    Program,
    Role,
    SealedBagError,
    accessors,
    as_dict,
    get_context,
    get_exec,
    get_memory,
    get_model,
    get_parallel,
    get_schedule,
    get_serving,
    override_config,
    publish,
    readback,
    reset_for_tests,
    resolve,
    turn_off_chunked_prefix_cache,
)
from diptych.common_config.declare import Namespace
from diptych.common_config.namespaces import DERIVED, LEAVES, NAMESPACES, PATHS, declarations

ACCESSORS = {name: getattr(accessors, f"get_{name}") for name in NAMESPACES}


def every_bag() -> dict[str, Namespace]:
    bags = {}
    for namespace, accessor in ACCESSORS.items():
        for path, _ in declarations(namespace):
            bag = accessor()
            for group in path.split(".")[1:]:
                bag = getattr(bag, group)
            bags[path] = bag
    return bags


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_reading_before_publish_names_the_namespace_the_place_and_the_fix(namespace: str) -> None:
    with pytest.raises(NotPublishedError) as caught:
        ACCESSORS[namespace]()
    assert f"get_{namespace}()" in str(caught.value)
    assert f"{__file__}:" in str(caught.value)
    assert "publish(record, role=Role.…)" in str(caught.value)
    with pytest.raises(NotPublishedError):
        get_context()
    with pytest.raises(NotPublishedError):
        readback()


def test_a_program_publishes_its_own_namespaces_only() -> None:
    publish(resolve(Program.ROUTER, flags=WORKERS, env={}), role=Role.ROUTER)
    assert get_serving().port == 8000
    with pytest.raises(NotPublishedError, match="launch-router has no namespace schedule; it has router, "):
        get_schedule()


def wrong_leaves() -> list[str]:
    """What the bags and the declarations don't have in common, and leaves that are functions."""
    found = []
    with override_config() as record:
        bags = every_bag()
        leaves = {name: path for path, bag in bags.items() for name in (*bag.leaves, *bag.derived)}
        found += [f"{name}: declared or in a bag, not both" for name in dict(leaves.items() ^ PATHS.items())]
        found += [f"{name}: declared twice or nowhere" for name in set(leaves) ^ (set(LEAVES) | set(DERIVED))]
        found += [
            f"{name}: in the record or declared, not both" for name in set(record.values()) ^ set(LEAVES)
        ]
        for path, bag in bags.items():
            names = (*bag.leaves, *bag.derived)
            found += [
                f"{path}.{name}: a slot of its own" for name in {*type(bag).__slots__} ^ {*names, *bag.groups}
            ]
            found += [f"{path}.{name}: is callable" for name in names if callable(getattr(bag, name))]
            found += [f"{path}: takes any attribute"] if hasattr(bag, "__dict__") else []
    return found


def test_leaves_are_exactly_what_is_declared_and_none_is_callable() -> None:
    assert wrong_leaves() == []


def test_a_leaf_without_its_declaration_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = NAMESPACES["memory"]
    rest = {name: leaf for name, leaf in memory.leaves.items() if name != "max_total_tokens"}
    monkeypatch.setattr(memory, "leaves", rest)
    assert any("max_total_tokens" in line for line in wrong_leaves())


def test_a_leaf_that_is_a_function_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    function = dataclasses.replace(DERIVED["world_size"], compute=lambda view: lambda: view.tp_size)
    monkeypatch.setitem(DERIVED, "world_size", function)
    assert wrong_leaves() == ["parallel.world_size: is callable"]


def test_the_configured_width_answers_in_a_process_that_builds_no_groups() -> None:
    program = (
        "import sys; from diptych.common_config import *\n"
        "publish(resolve(Program.DECODE, flags={'model_path': 'm'}, env={}), role=Role.DECODE_FRONTEND)\n"
        "print(get_parallel().tp_size, get_parallel().world_size, 'torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "1 1 False\n"


def test_bags_hold_what_the_record_holds() -> None:
    with override_config(page_size=32, attention_backend="cpu") as record:
        bags = every_bag()
        assert {name: getattr(bags[PATHS[name]], name) for name in LEAVES} == record.values()


def test_bags_are_sealed() -> None:
    with override_config():
        bag = get_schedule()
        with pytest.raises(SealedBagError, match=r"get_context\(\)\.override\(source, page_size=…\)"):
            bag.page_size = 8
        with pytest.raises(SealedBagError):
            bag.undeclared = 8  # type: ignore[attr-defined]
        with pytest.raises(SealedBagError):
            del bag.page_size
        assert bag.page_size == 16


def test_override_reaches_readers_of_before_and_after_and_leaves_the_record() -> None:
    with override_config() as record:
        held = get_schedule()
        get_context().override("gate", page_size=64, max_total_tokens=None)
        assert held.page_size == get_schedule().page_size == 64
        assert record.page_size == 16
        shown = readback()
        assert (shown["bags"]["schedule"]["page_size"], shown["record"]["page_size"]) == (64, 16)
        assert shown["overrides"][0] == {"source": "gate", "leaf": "page_size", "old": 16, "new": 64}


@pytest.mark.parametrize(
    "bad",
    [{"page_sise": 1}, {"page_size": 0}, {"page_size": "16"}, {"cpu_threads": None}, {"kernel": 1},
     {"attention_backends": ("a", "b")}, {"chunked_prefill_enabled": 1}],
)  # fmt: skip
def test_an_override_is_all_or_nothing(bad: dict[str, object]) -> None:
    with override_config():
        before = readback()
        with pytest.raises(ConfigError, match="override by gate"):
            get_context().override("gate", max_running_requests=1, **bad)
        with pytest.raises(ConfigError), get_schedule().override(max_running_requests=1, **bad):
            raise AssertionError
        assert readback() == before


def test_overrides_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with override_config(api_key="s3cret"):
        get_context().override("gate", page_size=64, api_key="0ther")
        assert "gate overrides page_size: 16 → 64" in caplog.text
        assert not {"s3cret", "0ther"} & set(caplog.text.replace("'", " ").split())
        assert get_serving().api_key == "0ther"
        assert "0ther" not in json.dumps(readback())


def test_a_scoped_override_ends_with_its_block_however_that_ends() -> None:
    with override_config():
        with get_model().override(load_format="dummy"):
            assert get_model().load_format == "dummy"
            assert readback()["scoped_overrides"] == ["load_format"]
        assert get_model().load_format == "auto"
        with pytest.raises(KeyError), get_model().override(load_format="gguf"):
            raise KeyError
        assert get_model().load_format == "auto"
        assert readback()["scoped_overrides"] == []


def test_scoped_overrides_nest_and_a_permanent_one_shows_when_they_end() -> None:
    with override_config():
        with get_schedule().override(page_size=2):
            with get_schedule().override(page_size=3, max_running_requests=5):
                get_context().override("gate", page_size=4)
                assert (get_schedule().page_size, get_schedule().max_running_requests) == (3, 5)
            assert (get_schedule().page_size, get_schedule().max_running_requests) == (2, 64)
        assert get_schedule().page_size == 4


def test_a_scoped_override_takes_leaves_of_its_own_bag_only() -> None:
    with override_config():
        with pytest.raises(ConfigError, match="port is a leaf of serving"), get_schedule().override(port=1):
            raise AssertionError
        with (
            pytest.raises(ConfigError, match=r"leaf of exec\.kernel"),
            get_exec().override(linear_backend="plain"),
        ):
            raise AssertionError
        with get_exec().kernel.override(linear_backend="plain"):
            assert get_exec().kernel.linear_backend == "plain"


def test_a_bag_of_an_earlier_publication_can_not_be_overridden() -> None:
    with override_config():
        old = get_schedule()
        with (
            override_config(),
            pytest.raises(ConfigError, match="earlier publication"),
            old.override(page_size=1),
        ):
            raise AssertionError


def test_publishing_again_wins_and_names_what_it_drops(caplog: pytest.LogCaptureFixture) -> None:
    record = resolve(Program.LOCAL, env={})
    publish(record, role=Role.LOCAL)
    get_context().override("gate", page_size=64, max_n=2)
    publish(record.derive("x", page_size=8), role=Role.LOCAL)
    assert get_schedule().page_size == 8
    assert "published again; overrides dropped: page_size, max_n" in caplog.text
    reset_for_tests()
    with pytest.raises(NotPublishedError):
        get_schedule()


def test_override_config_gives_back_what_was_published_before() -> None:
    publish(resolve(Program.LOCAL, flags={"page_size": 8}, env={}), role=Role.LOCAL)
    with pytest.raises(ZeroDivisionError), override_config(page_size=4):
        get_context().override("test", page_size=1 // (get_schedule().page_size - 4))
    assert get_schedule().page_size == 8


def test_only_records_and_roles_can_be_published() -> None:
    with pytest.raises(TypeError, match="LaunchConfig, not dict"):
        publish({}, role=Role.LOCAL)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Role, not 'local'; the roles are Role.PREFILL_FRONTEND"):
        publish(resolve(Program.LOCAL, env={}), role="local")  # type: ignore[arg-type]


# ---- derived leaves ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "pair"),
    [
        ({}, (None, None)),
        ({"attention_backend": "cpu"}, ("cpu", "cpu")),
        ({"prefill_attention_backend": "cpu"}, ("cpu", None)),
        ({"attention_backend": "cpu", "decode_attention_backend": "torch_native"}, ("cpu", "torch_native")),
    ],
)
def test_the_attention_pair_falls_back_to_the_base(
    fields: dict[str, object], pair: tuple[str | None, str | None]
) -> None:
    with override_config(**fields):
        assert get_exec().kernel.attention_backends == AttentionPair(*pair)


@pytest.mark.parametrize(
    ("fields", "enabled", "budget"),
    [
        ({}, True, 512),
        ({"chunked_prefill_size": -1}, False, 16384),
        ({"chunked_prefill_size": -1, "context_length": 100}, False, 100),
        ({"disable_chunked_prefix_cache": True}, False, 16384),
    ],
)
def test_chunked_prefill_needs_a_size_and_a_prefix_cache(
    fields: dict[str, object], enabled: bool, budget: int
) -> None:
    with override_config(**fields):
        assert (get_schedule().chunked_prefill_enabled, get_schedule().prefill_token_budget) == (
            enabled,
            budget,
        )


def test_overriding_an_input_leaves_the_derived_leaf_where_it_is_and_a_restamp_moves_it() -> None:
    with override_config():
        get_context().override("rescale", tp_size=2)
        assert (get_parallel().tp_size, get_parallel().world_size) == (2, 1)
        get_context().restamp("rescale", tp_size=4, dp_size=2)
        assert (get_parallel().tp_size, get_parallel().world_size) == (4, 8)
        with get_parallel().override(tp_size=1):
            assert (get_parallel().tp_size, get_parallel().world_size) == (1, 8)
        assert get_parallel().tp_size == 4
        assert get_schedule().prefill_token_budget == 512
        assert [entry["leaf"] for entry in readback()["overrides"]] == [
            *("tp_size", "tp_size", "dp_size", "world_size"),
        ]  # fmt: skip


def test_only_inputs_of_parallel_can_be_restamped() -> None:
    with override_config():
        for leaves in ({"page_size": 2}, {"world_size": 2}, {"tp_size": 2, "page_size": 2}, {"tp_size": 0}):
            with pytest.raises(ConfigError):
                get_context().restamp("rescale", **leaves)
        assert readback()["overrides"] == []


def test_the_chunked_prefix_gate_is_seen_by_every_reader_at_once() -> None:
    with override_config() as record:
        turn_off_chunked_prefix_cache("attention backend x", context_length=2048)
        schedule = get_schedule()
        assert (schedule.disable_chunked_prefix_cache, schedule.chunked_prefill_enabled) == (True, False)
        assert (schedule.chunked_prefill_size, schedule.prefill_token_budget) == (-1, 2048)
        assert record.disable_chunked_prefix_cache is False


def test_the_readback_is_json_with_every_leaf_and_no_secret() -> None:
    with override_config(api_key="s3cret"):
        shown = json.loads(json.dumps(readback()))
        assert shown["bags"]["exec"]["kernel"]["attention_backends"] == [None, None]
        assert shown["bags"]["memory"] == as_dict(get_memory())
        assert set(shown["bags"]) == set(NAMESPACES)
        assert shown["provenance"]["api_key"] == "flag: --api-key"
        assert "s3cret" not in json.dumps(shown)
