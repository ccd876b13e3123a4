"""What the control plane changes for one engine: seen there, nowhere else, and never a secret."""

from __future__ import annotations

import json
import logging

import pytest

from diptych.common_config import get_model, override_config, readback
from diptych.server.config_overlay import ConfigOverlay


def test_two_engines_in_one_process_do_not_see_each_others_updates() -> None:
    with override_config(model_path="m", served_model_name="asked") as record:
        one, other = ConfigOverlay(), ConfigOverlay()
        one.record_config_updates("weights update", weight_version="7", served_model_name="renamed")
        assert (one.config_value("weight_version"), one.config_value("served_model_name")) == ("7", "renamed")
        assert other.config_value("served_model_name") == "asked"
        assert other.readback() == {"values": {}, "updates": []}
        with pytest.raises(KeyError):
            other.config_value("weight_version")
        # Neither the bags nor the record moved.
        assert get_model().served_model_name == "asked"
        assert readback()["overrides"] == []
        assert record.redacted()["served_model_name"] == "asked"


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


def test_a_secret_is_hidden_in_log_readback_and_values(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with override_config(api_key="first-s3cret"):
        overlay = ConfigOverlay()
        overlay.record_config_updates("rotation", api_key="second-s3cret")
        shown = caplog.text + json.dumps([overlay.readback(), dict(overlay.resolved_config_dict())])
        assert "s3cret" not in shown
        assert "<redacted>" in shown
