"""Background work that runs when it is told to."""

from __future__ import annotations

from collections.abc import Callable

from diptych.engine.background import BackgroundPool, Wakeup


class ToldWakeup(Wakeup):
    """Needs no pipe: nobody polls."""

    def __init__(self) -> None:
        return

    def clear(self) -> None:
        return


class ToldPool(BackgroundPool):
    """Runs a piece of work when told to."""

    def __init__(self) -> None:
        self.wakeup = ToldWakeup()
        self.work: list[Callable[[], None]] = []
        self.finished = False

    def submit(self, work, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        self.work.append(lambda: work(*args, **kwargs))

    def run(self, index: int) -> None:
        self.work.pop(index)()
        self.finished = True

    def close(self) -> None:
        return
