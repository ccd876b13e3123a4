"""What the control plane changes for one engine: seen there, nowhere else, and never a secret."""

from __future__ import annotations

import json
import logging

import pytest

from diptych.common_config import get_context, get_memory, get_model, override_config, readback
from diptych.server.config_overlay import LOG_LENGTH, ConfigOverlay


def test_two_engines_in_one_process_do_not_see_each_others_updates() -> None:
    with override_config(model_path="m", served_model_name="asked") as record:
        one, other = ConfigOverlay(), ConfigOverlay()
        one.record_config_updates("weights update", weight_version="7", served_model_name="renamed")
        assert (one.config_value("weight_version"), one.config_value("served_model_name")) == ("7", "renamed")
        assert other.config_value("served_model_name") == "asked"
        assert other.readback() == {"values": {}, "updates": []}
        assert other.config_value("weight_version") == "default"
        # Neither the bags nor the record moved.
        assert get_model().served_model_name == "asked"
        assert readback()["overrides"] == []
        assert record.redacted()["served_model_name"] == "asked"


def test_each_value_in_effect_is_the_update_or_what_the_process_has_now() -> None:
    with override_config(served_model_name="asked"):
        overlay = ConfigOverlay()
        overlay.record_config_updates("rename", served_model_name="renamed")
        get_context().override("test", served_model_name="overridden", log_level="error")
        resolved = overlay.resolved_config_dict()
        assert {name: overlay.config_value(name) for name in resolved} == resolved
        assert (resolved["served_model_name"], resolved["log_level"]) == ("renamed", "error")
        assert overlay.launch_value("served_model_name") == "overridden"
        with pytest.raises(KeyError):
            overlay.config_value("never_declared")


def test_detaching_undoes_what_attaching_recorded_and_both_stay_in_the_log() -> None:
    with override_config():
        overlay = ConfigOverlay()
        overlay.record_config_updates("attach", cache_tier="host", log_level="debug")
        with pytest.raises(KeyError):
            overlay.withdraw_config_updates("detach", "cache_tier", "never_attached")
        assert overlay.config_value("cache_tier") == "host"
        overlay.withdraw_config_updates("detach", "cache_tier", "log_level")
        assert overlay.config_value("log_level") == "info"
        assert overlay.readback()["values"] == {}
        assert [(u["source"], u["name"]) for u in overlay.readback()["updates"]] == [
            *(("attach", "cache_tier"), ("attach", "log_level")),
            *(("detach", "cache_tier"), ("detach", "log_level")),
        ]


def test_an_attached_cache_shows_in_the_bags_and_in_its_engine_and_detaching_undoes_both() -> None:
    """Both halves of a cache tier: what the whole process then does, by override, and which engine has it."""
    with override_config(disable_radix_cache=True) as record:
        engine, other = ConfigOverlay(), ConfigOverlay()

        def shown() -> tuple[dict, dict, dict]:
            return dict(engine.resolved_config_dict()), readback()["bags"], engine.readback()["values"]

        before = shown()
        asked = record.redacted()

        get_context().override("attach host tier", disable_radix_cache=False)
        engine.record_config_updates("attach host tier", cache_tier="host")
        assert get_memory().disable_radix_cache is False
        assert readback()["bags"]["memory"]["disable_radix_cache"] is False
        assert engine.resolved_config_dict() == before[0] | {
            "disable_radix_cache": False,
            "cache_tier": "host",
        }
        assert other.resolved_config_dict() == before[0] | {"disable_radix_cache": False}

        get_context().override("detach host tier", disable_radix_cache=True)
        engine.withdraw_config_updates("detach host tier", "cache_tier")
        assert (
            dict(engine.resolved_config_dict()),
            readback()["bags"],
            engine.readback()["values"],
        ) == before
        assert record.redacted() == asked
        logs = readback()["overrides"], engine.readback()["updates"]
        for log in logs:
            assert [entry["source"] for entry in log] == ["attach host tier", "detach host tier"]


def test_the_log_keeps_the_latest_updates_only() -> None:
    with override_config():
        overlay = ConfigOverlay()
        for step in range(LOG_LENGTH + 5):
            overlay.record_config_updates("training", weight_version=str(step))
        updates = overlay.readback()["updates"]
        assert [update["value"] for update in updates] == [str(n + 5) for n in range(LOG_LENGTH)]


def test_a_secret_is_hidden_in_log_readback_and_values(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with override_config(api_key="first-s3cret"):
        overlay = ConfigOverlay()
        assert overlay.config_value("api_key") == "<redacted>"
        overlay.record_config_updates("rotation", api_key="second-s3cret")
        shown = caplog.text + json.dumps([overlay.readback(), dict(overlay.resolved_config_dict())])
        assert "s3cret" not in shown
        assert "<redacted>" in shown
