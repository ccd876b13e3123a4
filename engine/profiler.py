"""What the scheduler's thread spends its time on: a trace by PyTorch's profiler, in Chrome's format."""

from __future__ import annotations

import logging

import torch

log = logging.getLogger(__name__)


class NotProfiling(Exception):
    """Nothing is being recorded."""


class StepProfiler:
    """At most one recording at a time; none costs nothing."""

    def __init__(self) -> None:
        self._profile: torch.profiler.profile | None = None
        self._path = ""
        self._steps_left: int | None = None

    @property
    def running(self) -> bool:
        return self._profile is not None

    def start(self, path: str, *, num_steps: int | None, record_shapes: bool, with_stack: bool) -> None:
        """Record from now on; with `num_steps` until that many steps have been computed."""
        assert self._profile is None
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(
            activities=activities, record_shapes=record_shapes, with_stack=with_stack
        )
        self._path, self._steps_left = path, num_steps
        self._profile.start()

    def step(self) -> None:
        """A step was computed."""
        if self._profile is None or self._steps_left is None:
            return
        self._steps_left -= 1
        if self._steps_left == 0:
            self.stop()

    def stop(self) -> str:
        """Write the trace and return its path. The scheduler does nothing else meanwhile. Raises
        `NotProfiling`, and `OSError` or `RuntimeError` when the file can't be written; the recording is over
        then, too."""
        if self._profile is None:
            raise NotProfiling("no profile is being recorded")
        profile, self._profile = self._profile, None
        profile.stop()
        profile.export_chrome_trace(self._path)
        log.info("profile written to %s", self._path)
        return self._path
