"""Finding stop strings in text that arrives piece by piece, without ever showing part of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Feed text; get back what may be shown.

    The match is the one that *ends* first (the longest of those that end together), so it doesn't depend
    on how the text was cut into pieces. Text that could still become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """Text that is now known not to belong to a stop string. After a match: the text before it, and
        `matched` is set; feeding on returns nothing."""
        if not self._stops:
            return piece
        if self.matched is not None:
            return ""
        text = self._held + piece
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                if best is None or candidate[:2] < best[:2]:
                    best = candidate
        if best is not None:
            self._held = ""
            self.matched = best[2]
            return text[: best[1]]
        keep = self._partial(text)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep] if keep else text

    def flush(self) -> str:
        """The end: what was held back is ordinary text."""
        held, self._held = self._held, ""
        return held

    def _partial(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
