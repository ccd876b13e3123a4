"""`--speculative-algorithm` decides what takes a scheduler's steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import zmq
from prometheus_client import CollectorRegistry
from unit.engine.tiny_llama import LLAMA

from diptych.common_config import ConfigError, Program, Role, get_schedule, get_spec, override_config, resolve
from diptych.common_config.namespaces.spec import SPECULATIVE_ALGORITHMS
from diptych.engine.colocated import ColocatedScheduler
from diptych.engine.frontend_link import FrontendLink
from diptych.engine.scheduler import SchedulerParts
from diptych.engine.stepper import STEPPERS, Stepper
from diptych.launch.assemble import build_prompt_queue, build_runner, build_running_batch, weights_loader


def test_every_algorithm_that_the_flag_takes_has_a_stepper_and_no_other() -> None:
    assert set(STEPPERS) == set(SPECULATIVE_ALGORITHMS)


def test_another_algorithm_is_refused_with_those_that_exist() -> None:
    flags = {"model_path": "m", "speculative_algorithm": "eagle"}
    with pytest.raises(ConfigError, match="--speculative-algorithm: 'eagle' is not one of none"):
        resolve(Program.DECODE, flags=flags, env={})


def test_a_scheduler_takes_the_stepper_of_its_algorithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(Stepper):
        pass

    monkeypatch.setitem(STEPPERS, "none", Other)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    fields = {"load_format": "dummy", "device": "cpu", "max_total_tokens": 64}
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = FrontendLink(context, "inproc://nobody")
    try:
        threads = torch.get_num_threads()
        with override_config(role=Role.COLOCATED_SCHEDULER, cpu_threads=threads, **fields):
            runner = build_runner(tmp_path, lambda line: None)
            batch = build_running_batch(runner)
            parts = SchedulerParts(
                runner=runner,
                frontend=link,
                registry=CollectorRegistry(),
                parent_fd=0,
                max_requests=1,
                speculative_algorithm=get_spec().speculative_algorithm,
                load_weights=weights_loader(runner),
            )
            queue = build_prompt_queue(runner, keep_free=batch.keep_free)
            running = get_schedule().max_running_requests
            scheduler = ColocatedScheduler(parts, queue, batch, max_running=running)
            scheduler.close()
            assert type(scheduler.stepper) is Other
    finally:
        link.close()
        context.term()
