from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from diptych.server.detokenizer import IncrementalDetokenizer
from diptych.server.tokenizer import Tokenizer

TRICKY = "Naïve 世界, 😀👩‍👩‍👧 e\u0301 ﷽ \u2028 tabs\t\tand  spaces\n\n  done 𝔘𝔫𝔦"


class SentencePiece:
    """A byte-fallback vocabulary with Metaspace pieces, as Llama 2's: what SmolLM2's isn't."""

    def __init__(self) -> None:
        pieces = [
            "<unk>",
            "<s>",
            *(f"<0x{byte:02X}>" for byte in range(256)),
            "▁Hello",
            "▁world",
            "lo",
            "▁",
            "!",
        ]
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        self._inner = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
        self._inner.add_special_tokens(["<s>"])
        self._inner.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(content=" ", left=1, right=0),
            ]
        )
        self.ids = vocabulary

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def spell(self, text: str) -> list[int]:
        return [self.ids[f"<0x{byte:02X}>"] for byte in text.encode()]


def pieces(tokenizer, prompt: list[int], ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def test_text_comes_whole_and_never_with_broken_characters(tokenizer: Tokenizer):
    ids = tokenizer.encode(TRICKY, add_special_tokens=False)
    given_out = pieces(tokenizer, [], ids)
    assert "".join(given_out) == TRICKY
    assert not any("\ufffd" in piece for piece in given_out)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60))
def test_any_text_survives(text: str):
    tokenizer = _tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pieces(tokenizer, [], ids)) == whole


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(min_value=0, max_value=49151), max_size=40))
def test_any_tokens_give_what_decoding_them_at_once_gives(ids: list[int]):
    tokenizer = _tokenizer()
    for skip in (True, False):
        assert "".join(pieces(tokenizer, [], ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_replacement_character_in_the_text_itself_is_kept(tokenizer: Tokenizer):
    text = "a\ufffdb\ufffd\ufffd"
    assert "".join(pieces(tokenizer, [], tokenizer.encode(text, add_special_tokens=False))) == text


def test_output_that_completes_the_prompts_last_character_includes_it(tokenizer: Tokenizer):
    ids = tokenizer.encode("界", add_special_tokens=False)
    assert len(ids) > 1
    assert "".join(pieces(tokenizer, ids[:1], ids[1:])) == "界"


def test_special_tokens_are_left_out_or_written_as_asked(tokenizer: Tokenizer):
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    ids = [*tokenizer.encode("one", add_special_tokens=False), *end]
    assert "".join(pieces(tokenizer, [], ids, skip=True)) == "one"
    assert "".join(pieces(tokenizer, [], ids, skip=False)) == "one<|im_end|>"


def test_a_leading_space_stays_inside_running_text_and_goes_at_the_start():
    model = SentencePiece()
    hello, world = model.ids["▁Hello"], model.ids["▁world"]
    assert pieces(model, [hello], [world]) == [" world", ""]
    assert pieces(model, [], [hello, world]) == ["Hello", " world", ""]


def test_a_space_after_a_skipped_special_token_stays():
    model = SentencePiece()
    ids = [model.ids["▁Hello"], model.ids["<s>"], model.ids["▁world"]]
    assert "".join(pieces(model, [], ids)) == "Hello world"


@pytest.mark.parametrize("text", ["你好世界", "é", "😀😀", "a你b"])
def test_byte_fallback_characters_come_whole(text: str):
    model = SentencePiece()
    given_out = pieces(model, [model.ids["▁Hello"]], [*model.spell(text), model.ids["!"]])
    assert "".join(given_out) == text + "!"
    assert not any("\ufffd" in piece for piece in given_out)


def test_the_window_stays_small_whatever_the_model_emits(tokenizer: Tokenizer):
    stray = tokenizer.encode("界", add_special_tokens=False)[0]
    longest = 0

    class Counting:
        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    text = "".join(pieces(Counting(), [], [stray] * 2000))
    assert longest < 64
    assert set(text) == {"\ufffd"}
    assert len(text) == 2000


_CACHED: list[Tokenizer] = []


def _tokenizer() -> Tokenizer:
    return _CACHED[0]


@pytest.fixture(autouse=True)
def _share(tokenizer: Tokenizer) -> None:
    """Hypothesis draws examples inside one call; the fixture is read once."""
    _CACHED[:] = [tokenizer]
