"""What may change for one engine has one source, the engine's overlay. A reader of the bag would go on with
what was launched."""

from __future__ import annotations

import pytest
from unit.common_config.census import overlaid_reads, readers
from unit.common_config.sources import modules, parse

from diptych.server.update_config import CHANGEABLE

WITHOUT_AN_ENGINE = {
    # At the start of a process, before there is an engine.
    ("diptych.launch.scheduler", "log_level"),
    ("diptych.launch.worker", "log_level"),
    # Processes that have none.
    ("diptych.launch.local", "served_model_name"),
    ("diptych.router.process", "log_level"),
}


def bag_readers(trees) -> set[tuple[str, str]]:
    return {(module, name) for module, name in readers(trees) if name in CHANGEABLE}


def test_no_bag_is_asked_for_what_an_engine_may_have_changed() -> None:
    project = modules(without=("common_config",))
    assert bag_readers(project) == WITHOUT_AN_ENGINE
    assert overlaid_reads(project) >= {"served_model_name", "weight_version"}


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    return get_model().served_model_name",
        "def f():\n    model = get_model()\n    return model.weight_version",
        "def g(bag):\n    return bag.served_model_name\ndef f():\n    g(get_model())",
        "LEVEL = get_observability().log_level",
        "def make():\n    return get_model()\ndef f():\n    return make().served_model_name",
    ],
)
def test_a_planted_read_of_the_bag_is_found(text: str) -> None:
    assert [module for module, _ in bag_readers(parse(planted=text))] == ["diptych.planted"]
