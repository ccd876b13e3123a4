"""The model's tokens as the bytes that each adds to running text: what a grammar is matched against."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import tokenizers

from diptych.engine.wire import Grammar

if TYPE_CHECKING:
    import xgrammar

_BYTE_PIECE = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokens: list[bytes]
    """One for every id that the model has logits for; ids that the tokenizer lacks are empty."""
    special: dict[int, str]
    """Control tokens, which stand for no text in an answer, with how a prompt would write them."""

    @classmethod
    def from_dir(cls, folder: Path, vocab_size: int) -> Vocabulary:
        """From `tokenizer.json`. `vocab_size` is the model's, which may be padded, or smaller than the
        tokenizer's."""
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        added = tokenizer.get_added_tokens_decoder()
        decoder = tokenizer.decoder
        alphabet: dict[str, bytes] = {}
        if decoder is not None and b"ByteLevel" in decoder.__getstate__():
            alphabet = _byte_level_alphabet()
        tokens = [b""] * vocab_size
        for piece, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
            if token_id < vocab_size:
                tokens[token_id] = piece.encode() if token_id in added else _spell(piece, alphabet)
        special = {i: token.content for i, token in added.items() if token.special and i < vocab_size}
        return cls(tokens, special)

    def spelled_in(self, text: str) -> frozenset[int]:
        """The special tokens that a grammar's text writes out: it may ask for those."""
        return frozenset(token_id for token_id, content in self.special.items() if content in text)


class Text(msgspec.Struct, frozen=True):
    """Which tokens are text to a grammar."""

    spelled: frozenset[int] = frozenset()
    """Special tokens that are. The detokeniser would drop others, from inside a JSON string, say, and what is
    left need not match any more."""
    controls: str | None = None
    """Of the control characters below a blank, those that may occur; None is all."""


def text_of(vocabulary: Vocabulary, grammar: Grammar) -> Text:
    """The library lets strings of limited length hold control characters, which JSON forbids."""
    controls = {"json_schema": "\n\r", "json_object": "\n\r", "structural_tag": "\t\n\r"}
    return Text(vocabulary.spelled_in(grammar.text), controls.get(grammar.kind))


def tokenizer_info(vocabulary: Vocabulary, end_ids: Sequence[int], text: Text) -> xgrammar.TokenizerInfo:
    import xgrammar

    tokens = list(vocabulary.tokens)
    for token_id in vocabulary.special:
        if token_id not in text.spelled:
            tokens[token_id] = b""
    if text.controls is not None:
        forbidden = re.compile(b"[%b]" % bytes(set(range(0x20)) - set(text.controls.encode())))
        tokens = [b"" if forbidden.search(token) else token for token in tokens]
    return xgrammar.TokenizerInfo(
        tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=list(end_ids)
    )


def _spell(piece: str, alphabet: dict[str, bytes]) -> bytes:
    """`alphabet` is empty for vocabularies that are not byte-level."""
    if alphabet:
        return b"".join(alphabet.get(char) or char.encode() for char in piece)
    byte = _BYTE_PIECE.match(piece)
    if byte:
        return bytes([int(byte[1], 16)])
    return piece.replace("\u2581", " ").encode()


def _byte_level_alphabet() -> dict[str, bytes]:
    """Byte-level BPE's printable stand-in for each byte (Radford et al., GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = {chr(byte): bytes([byte]) for byte in printable}
    others = sorted(set(range(256)) - set(printable))
    return stand_ins | {chr(256 + position): bytes([byte]) for position, byte in enumerate(others)}
