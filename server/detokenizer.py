"""Text of a growing token sequence, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from diptych.server.tokenizer import Decoder

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


class IncrementalDetokenizer:
    """Decodes a short window per token: the tokens since the last clean cut and a few before it. The cost
    per token doesn't grow with the output. Characters whose bytes are still incomplete are held back.

    The pieces add up to what decoding prompt and output at once adds to the prompt's text. Only where a
    byte-fallback decoder would take back characters, because stray bytes follow theirs, do they stay."""

    def __init__(self, tokenizer: Decoder, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window, self._context = self._end_of(prompt_ids)
        """Window tokens whose text has been given out completely."""
        self._given = self._decode(self._window[: self._context])
        """The start of the window's text that has been given out."""
        self._prompt_end = self._decode(self._window)[len(self._given) :]
        """A broken character at the prompt's end. If the output completes it, it belongs to the output."""

    def _end_of(self, prompt_ids: Sequence[int]) -> tuple[list[int], int]:
        """The prompt's last tokens, from the start of a character on if that can be found, and how many of
        them are whole characters. Silent ones are no context: a decoder that trims the first word's space
        would trim the next one's."""
        heard = (token_id for token_id in reversed(prompt_ids) if not self._is_silent(token_id))
        tokens = list(islice(heard, _CONTEXT_TOKENS + 2 * _UNFINISHED))[::-1]
        fair: tuple[list[int], int] | None = None
        for end in range(len(tokens), max(-1, len(tokens) - _UNFINISHED - 1), -1):
            if self._decode(tokens[end:]).strip(REPLACEMENT):
                break
            latest = max(0, end - _CONTEXT_TOKENS)
            for start in range(latest, max(-1, latest - _UNFINISHED - 1), -1):
                text = self._decode(tokens[start:end])
                if not text.endswith(REPLACEMENT):
                    fair = fair or (tokens[start:], end - start)
                    if not text.startswith(REPLACEMENT):
                        return tokens[start:], end - start
        tokens = tokens[-_CONTEXT_TOKENS:]
        return fair or (tokens, len(tokens))

    def _is_silent(self, token_id: int) -> bool:
        return self._tokenizer.is_silent(token_id, skip_special_tokens=self._skip)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; often its own, sometimes empty."""
        if self._is_silent(token_id):
            return ""
        self._window.append(token_id)
        text = self._text()
        held = len(text) - len(text.rstrip(REPLACEMENT))
        oversize = len(self._window) > _WINDOW_TOKENS
        if oversize:
            held = min(held, _UNFINISHED)
        end = max(len(self._given), len(text) - held)
        piece = self._take(text, end)
        if piece and not held:
            self._cut(self._context, held)
        elif oversize:
            self._cut(len(self._window) - _CONTEXT_TOKENS, held)
        return piece

    def flush(self) -> str:
        """The end: what is still incomplete will stay so."""
        text = self._text()
        return self._take(text, len(text))

    def _take(self, text: str, end: int) -> str:
        """What is new of `text` up to `end`."""
        start = len(self._given)
        if end > start:
            for broken in self._prompt_end:  # what nothing completed stays the prompt's
                start += start < end and text[start] == broken
            self._prompt_end = ""
        self._given = text[:end]
        return text[start:end]

    def _text(self) -> str:
        """Of the window, beginning with what has been given out of it."""
        text = self._decode(self._window)
        if text.startswith(self._given):
            return text
        # A byte-fallback decoder shows a whole run of bytes as broken for one that is; what was whole stays.
        return self._given + self._decode(self._window[self._context :])

    def _cut(self, start: int, held: int) -> None:
        """Drop window tokens before `start`; the rest is context for what comes."""
        self._window = self._window[start:]
        self._context = len(self._window)
        text = self._decode(self._window)
        self._given = text[: max(0, len(text) - held)]
