"""A tokenizer of single bytes, so that what a grammar allows can be read off token ids."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from diptych.engine.grammar import CompilerLink

END, CONTROL = 256, 257
"""Token ids: the end of a sequence, and a control token, written `<|control|>`. Below are the bytes."""
VOCABULARY = 300
"""Of the model: padded."""


def save_byte_tokenizer(directory: Path) -> Path:
    """As `tokenizer.json`. Token i is byte i."""
    alphabet = dict(zip(sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte), range(256), strict=True))
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken("<|end|>", special=True), AddedToken("<|control|>", special=True)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def _byte(char: str) -> int:
    """Byte-level BPE's alphabet: printable bytes are themselves, the others follow from 256 on in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return ord(char) if ord(char) < 256 else others[ord(char) - 256]


class KeptLink(CompilerLink):
    """Its process outlives what uses it: loading the library takes seconds, once for a session of tests.

    It ends with the thread that calls `start`."""

    def close(self) -> None:
        return

    def end(self) -> None:
        super().close()
