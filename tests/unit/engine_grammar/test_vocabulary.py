"""Tokens as bytes, of both kinds of vocabulary that models have."""

from __future__ import annotations

from pathlib import Path

from support.byte_tokenizer import save_byte_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from diptych.engine.grammar.vocabulary import Text, Vocabulary, tokenizer_info


def test_byte_level_tokens_are_the_bytes_that_their_stand_ins_stand_for(tmp_path: Path) -> None:
    vocabulary = Vocabulary.from_dir(save_byte_tokenizer(tmp_path), 300)
    assert vocabulary.tokens[:256] == [bytes([byte]) for byte in range(256)]
    assert vocabulary.special == {256: "<|end|>", 257: "<|control|>"}


def byte_fallback(directory: Path) -> Path:
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581the", "é", "{"]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken("<unk>"), AddedToken("</s>")])
    tokenizer.add_tokens([AddedToken("\u2581<tool>", special=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def test_byte_fallback_tokens_are_their_text_or_their_byte(tmp_path: Path) -> None:
    vocabulary = Vocabulary.from_dir(byte_fallback(tmp_path), 270)
    assert vocabulary.tokens[2:258] == [bytes([byte]) for byte in range(256)]
    assert vocabulary.tokens[258:263] == [b" ", b" the", "é".encode(), b"{", "\u2581<tool>".encode()]
    assert vocabulary.special == {0: "<unk>", 1: "</s>"}


def test_the_size_is_the_models(tmp_path: Path) -> None:
    padded = Vocabulary.from_dir(save_byte_tokenizer(tmp_path), 300)
    assert padded.tokens[258:] == [b""] * 42
    cut = Vocabulary.from_dir(tmp_path, 257)
    assert len(cut.tokens) == 257
    assert list(cut.special) == [256]


def test_special_tokens_are_text_where_they_are_spelled_out(tmp_path: Path) -> None:
    vocabulary = Vocabulary.from_dir(save_byte_tokenizer(tmp_path), 300)
    spelled = vocabulary.spelled_in('root ::= "<|control|>"')
    assert spelled == {257}
    assert tokenizer_info(vocabulary, [256], Text(spelled)).decoded_vocab[256:258] == [b"", b"<|control|>"]
    plain = tokenizer_info(vocabulary, [256], Text())
    assert plain.decoded_vocab[257] == b""
    assert plain.stop_token_ids == [256]
    assert plain.vocab_size == 300
