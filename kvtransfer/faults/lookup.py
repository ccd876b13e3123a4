"""Look-ups of prefill workers that get no answer, or a late one."""

from __future__ import annotations

from collections.abc import Callable

from diptych.engine.background import BackgroundPool
from diptych.kvtransfer.bootstrap.client import LookupFailed, RouteLookup, fetch_route
from diptych.kvtransfer.bootstrap.route import Route
from diptych.kvtransfer.faults.injector import Injector


class FaultyLookup(RouteLookup):
    """Cached routes are held back too, so that a handshake can be held whenever a request comes."""

    def __init__(
        self, pool: BackgroundPool, faults: Injector, fetch: Callable[[str, int], Route] = fetch_route
    ) -> None:
        super().__init__(pool, fetch)
        self._faults = faults
        self._released: list[tuple[str, int]] = []

    def get(self, host: str, port: int) -> Route | None:
        rule = self._faults.decide("lookup")
        if rule is None:
            return super().get(host, port)
        if rule.action != "drop":
            self._faults.hold(rule, lambda: self._released.append((host, port)), peer=_name((host, port)))
        return None

    def take(self) -> list[tuple[tuple[str, int], Route | LookupFailed]]:
        self._faults.run_due()
        # An answer is for all who wait for it: one that another request got in the meantime waits as well.
        answers = [answer for answer in super().take() if not self._faults.holds("lookup", _name(answer[0]))]
        released, self._released = self._released, []
        for key in dict.fromkeys(released):
            route = super().get(*key)
            if route is not None:
                answers.append((key, route))
        return answers


def _name(service: tuple[str, int]) -> str:
    host, port = service
    return f"{host}:{port}"
