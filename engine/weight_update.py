"""Other weights of the model that is served, loaded beside those in use and then put in their place.

Loading runs in a thread, so that the scheduler goes on answering. Both sets are in memory until the swap.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diptych.engine.background import BackgroundPool
from diptych.engine.kv_layout import Fingerprint
from diptych.engine.models.decoder import DecoderLM

log = logging.getLogger(__name__)


class WeightsRefused(Exception):
    """These can't be served in the place of the others; the message says why."""


@dataclass(frozen=True, slots=True)
class NewWeights:
    model: DecoderLM
    fingerprint: Fingerprint
    """Of this worker with them."""


LoadWeights = Callable[[Path, str], NewWeights]
"""From (directory, load format). Runs in a thread. Raises `WeightsRefused`."""


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """How an update ended."""

    call_id: int
    weights: NewWeights | None
    problem: str = ""
    """Why there are none."""


class WeightUpdates:
    """At most one at a time. All calls from the scheduler's thread."""

    def __init__(self, load: LoadWeights) -> None:
        self._load = load
        self._pool = BackgroundPool(threads=1, name="weights")
        self._loaded: LoadedWeights | None = None
        self.pending = False

    def fileno(self) -> int:
        """Readable once weights are loaded, or couldn't be."""
        return self._pool.wakeup.fileno()

    def start(self, call_id: int, model_dir: str, load_format: str) -> None:
        """`take` will have the outcome."""
        assert not self.pending
        self.pending = True
        self._pool.submit(self._run, call_id, Path(model_dir), load_format)

    def take(self) -> LoadedWeights | None:
        """The outcome, once; the update is then over."""
        self._pool.wakeup.clear()
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self.pending = False
        return loaded

    def close(self) -> None:
        """Waits for what loads."""
        self._pool.close()

    def _run(self, call_id: int, model_dir: Path, load_format: str) -> None:
        # Said even if loading breaks in a way that nobody foresaw: requests are refused until then.
        outcome = LoadedWeights(call_id, None, "loading broke off; the worker's log says more")
        try:
            outcome = LoadedWeights(call_id, self._load(model_dir, load_format))
        except WeightsRefused as error:
            outcome = LoadedWeights(call_id, None, str(error))
        finally:
            if outcome.weights is None:
                log.error("weights from %s are not served: %s", model_dir, outcome.problem)
            self._loaded = outcome
