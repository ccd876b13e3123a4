"""Why a grammar can't be used."""

from __future__ import annotations


class GrammarRefused(Exception):
    """The grammar of one request can't be used; the message is a sentence for the client.

    `status` is 400 where the grammar is at fault, 429 or 503 where another try may succeed. `param`: the
    request field."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
