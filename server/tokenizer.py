"""The model's tokenizer as the frontend needs it: `tokenizer.json` through the `tokenizers` library.

`transformers` would do the same and import torch for it, which costs seconds of start-up and memory in a
process that computes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

import tokenizers

_BYTE_PIECE = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


class TokenizerError(Exception):
    """The tokenizer files are missing or unusable."""


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE's printable stand-in for each byte (Radford et al., GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return stand_ins | {chr(256 + i): byte for i, byte in enumerate(others)}


class Decoder(Protocol):
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def is_silent(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Whether `decode` leaves the token out, whatever stands around it."""
        ...


class Tokenizer:
    """Thread-safe: tokenising a long prompt may happen off the event loop."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"no tokenizer.json in {folder}")
        self._inner = tokenizers.Tokenizer.from_file(str(path))
        self._inner.no_truncation()
        self._inner.no_padding()
        self.config: dict[str, object] = _read_json(folder / "tokenizer_config.json")
        templates = _chat_templates(folder, self.config)
        self.chat_template = templates.get("default")
        self.tool_chat_template = templates.get("tool_use")
        """For conversations with tools, if the model has another one for those."""
        self.vocab_size: int = self._inner.get_vocab_size(with_added_tokens=True)
        added = self._inner.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        decoder = self._inner.decoder
        self._byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()
        self._alphabet = _byte_level_alphabet() if self._byte_level else {}
        self._token_bytes: dict[int, bytes] = {}
        self.longest_token = max(map(len, self._inner.get_vocab(with_added_tokens=True)))
        """Characters: n tokens can't stand for more than n times as many."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids; special tokens written out in the text become themselves."""
        # The batch form releases the interpreter lock; `encode` holds it for as long as it takes.
        return self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def is_silent(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        if token_id in self._special_ids:
            return skip_special_tokens
        # Models are often wider than their vocabulary.
        return self._inner.id_to_token(token_id) is None

    def showing(self, texts: Collection[str]) -> Decoder:
        """A decoder that shows those special tokens even where special tokens are skipped."""
        shown = {token_id for token_id in self._special_ids if self._added[token_id] in texts}
        return _ShowingDecoder(self, self._special_ids - shown) if shown else self

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to running text, as bytes: a token may hold part of a character."""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._spell(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """The token as text, or `bytes:\\xNN…` when it isn't whole characters (as OpenAI writes it)."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._inner.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            return b"".join(
                bytes([self._alphabet[char]]) if char in self._alphabet else char.encode() for char in piece
            )
        byte = _BYTE_PIECE.match(piece)
        if byte:
            return bytes([int(byte[1], 16)])
        return piece.replace("\u2581", " ").encode()

    def special(self, name: str) -> str | None:
        """`bos_token`, `eos_token`, … as text, from tokenizer_config.json."""
        value = self.config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else None


class _ShowingDecoder:
    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        if skip_special_tokens:
            ids = [token_id for token_id in ids if token_id not in self._hidden]
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def is_silent(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        hidden = skip_special_tokens and token_id in self._hidden
        return hidden or self._tokenizer.is_silent(token_id, skip_special_tokens=False)


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} does not hold a JSON object")
    return value


def _chat_templates(folder: Path, config: dict[str, object]) -> dict[str, str]:
    """By name: `default`, `tool_use`. In files, or in the configuration, alone or in a list of named ones."""
    value = config.get("chat_template")
    if not isinstance(value, list):
        value = [{"name": "default", "template": value}]
    found = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    found |= {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    return {name: text for name, text in found.items() if isinstance(name, str) and isinstance(text, str)}
