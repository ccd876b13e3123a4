"""Log-probabilities in the shapes of the three generating routes."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from diptych.engine.wire import TokenLogprob
from diptych.server.tokenizer import Tokenizer

LOWEST = -9999.0
"""What OpenAI writes for a logprob too small to say; JSON has no infinity."""

_utf8 = codecs.getincrementaldecoder("utf-8")


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprob]) -> dict[str, object]:
    """The `logprobs` object of a chat choice or chunk."""

    def entry(token_id: int, logprob: float) -> dict[str, object]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": max(logprob, LOWEST),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = [
        entry(token.token_id, token.logprob)
        | {"top_logprobs": [entry(*alternative) for alternative in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


class TextOffset:
    """Where in a choice's text the next token begins."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decoder = _utf8("ignore")
        self.characters = 0

    def pass_over(self, token_id: int) -> None:
        """A character counts with the token that completes it."""
        if not self._tokenizer.is_silent(token_id, skip_special_tokens=self._skip):
            self.characters += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def jump(self, characters: int) -> None:
        """To where the text is known to continue, since some decoders trim it."""
        self._decoder.reset()
        self.characters = characters


class CompletionLogprobs:
    """The legacy `logprobs` object: four parallel lists. Add prompt tokens first for `echo`."""

    def __init__(self, tokenizer: Tokenizer, offset: TextOffset) -> None:
        self._tokenizer = tokenizer
        self._offset = offset
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """`logprob` is None where there is none: the first prompt token, or a prompt run elsewhere."""
        text = self._tokenizer.token_text(token_id)
        self._tokens.append(text)
        self._offsets.append(self._offset.characters)
        self._offset.pass_over(token_id)
        if logprob is None:
            self._logprobs.append(None)
            self._top.append(None)
            return
        self._logprobs.append(max(logprob.logprob, LOWEST))
        top = {self._tokenizer.token_text(other): max(value, LOWEST) for other, value in logprob.top}
        top.setdefault(text, max(logprob.logprob, LOWEST))
        self._top.append(top)

    def extend(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None] | None) -> None:
        for position, token_id in enumerate(token_ids):
            self.add(token_id, logprobs[position] if logprobs else None)

    def result(self) -> dict[str, object]:
        return {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }


def native_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[TokenLogprob], *, with_text: bool
) -> list[tuple[float, int, str | None]]:
    """`[logprob, token id, text or null]` per token."""
    return [
        (
            max(token.logprob, LOWEST),
            token.token_id,
            tokenizer.token_text(token.token_id) if with_text else None,
        )
        for token in tokens
    ]


def native_top(
    tokenizer: Tokenizer, tokens: Sequence[TokenLogprob | None], *, with_text: bool
) -> list[list[tuple[float, int, str | None]] | None]:
    """The alternatives of each token, best first; null where there are none."""
    return [
        None
        if token is None
        else [
            (max(value, LOWEST), other, tokenizer.token_text(other) if with_text else None)
            for other, value in token.top
        ]
        for token in tokens
    ]
