"""Text of a growing token sequence, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 8
"""Prompt tokens decoded before the first output token, so that a leading space is kept or dropped as it
would be in running text."""
_WINDOW_TOKENS = 48
"""A window that never becomes clean (a model that emits stray bytes) is cut at this size."""
_UNFINISHED = 3
"""Bytes an incomplete UTF-8 character can have. Byte-level decoders show one replacement character for all
of them, byte-fallback decoders one for each byte of the whole run, complete characters included: so the
whole run of replacement characters is held back, and this many of an endless one."""


class Decodes(Protocol):
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class IncrementalDetokenizer:
    """Decodes a short window per token: the tokens since the last clean cut and a few before it. The cost
    per token doesn't grow with the output. Characters whose bytes are still incomplete are held back."""

    def __init__(self, tokenizer: Decodes, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._prompt_text = self._decode()
        self._context = len(self._window)
        """Window tokens whose text has been given out completely."""
        self._given = len(self._prompt_text)
        """Characters of the window's text given out."""
        self._open_prompt = self._prompt_text.endswith(REPLACEMENT)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip)

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; often its own, sometimes empty."""
        self._window.append(token_id)
        text = self._decode()
        if self._open_prompt and not text.startswith(self._prompt_text):
            # The prompt ended inside a character, which the output has completed: it belongs to the output.
            self._given = len(self._prompt_text.rstrip(REPLACEMENT))
            self._open_prompt = False
        held = len(text) - len(text.rstrip(REPLACEMENT))
        oversize = len(self._window) > _WINDOW_TOKENS
        if oversize:
            held = min(held, _UNFINISHED)
        end = len(text) - held
        piece = text[self._given : end]
        self._given = max(self._given, end)
        if piece:
            self._open_prompt = False
        if piece and not held:
            self._cut(self._context, held)
        elif oversize:
            self._cut(len(self._window) - _CONTEXT_TOKENS, held)
        return piece

    def flush(self) -> str:
        """The end: what is still incomplete will stay so."""
        text = self._decode()
        piece = text[self._given :]
        self._given = len(text)
        return piece

    def _cut(self, start: int, held: int) -> None:
        """Drop window tokens before `start`; the rest is context for what comes. Tokens without text of
        their own are no context: a decoder that trims the first word's space would trim the next one's."""
        self._window = self._window[start:]
        self._context = len(self._window)
        self._given = max(0, len(self._decode()) - held)
