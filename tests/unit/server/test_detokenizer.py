"""Text piece by piece is the text of the whole, for byte-level and for byte-fallback vocabularies."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from diptych.server.detokenizer import REPLACEMENT, IncrementalDetokenizer
from diptych.server.tokenizer import Tokenizer

TRICKY = [
    "Naïve 世界, 😀👩‍👩‍👧 e\u0301 ﷽ \u2028 tabs\t\tand  spaces\n\n  done 𝔘𝔫𝔦",
    "👍🏽👩🏿‍🚀🏴󠁧󠁢󠁳󠁣󠁴󠁿🇩🇪🇫🇷 ❤️‍🔥",
    "   leading, trailing   ",
    "你好，世界。こんにちは 안녕하세요",
    "a\u0300\u0301\u0302 ö ǆ \u200d\u200b\u202e",
    "\ufffd in the text itself \ufffd\ufffd",
]

PIECES = ["▁Hello", "▁world", "lo", "▁", "▁▁", "!", "你", "▁世", "\n", "e", "\u0301", "👩", "\u200d"]
DECODERS = {
    "llama": [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(content=" ", left=1, right=0),
    ],
    "metaspace": [decoders.ByteFallback(), decoders.Metaspace()],
}


@pytest.fixture(scope="session", params=list(DECODERS))
def fallback(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-fallback vocabulary with Metaspace pieces, as Llama 2's: what SmolLM2's isn't."""
    vocabulary = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    ids = {piece: number for number, piece in enumerate(vocabulary)}
    inner = tokenizers.Tokenizer(models.BPE(ids, [], byte_fallback=True, unk_token="<unk>"))
    inner.add_special_tokens(["<s>"])
    inner.decoder = decoders.Sequence(DECODERS[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    inner.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


SPECIAL, FIRST_BYTE, FIRST_PIECE = 1, 2, 258


def piece(text: str) -> int:
    return FIRST_PIECE + PIECES.index(text)


def spelled(text: str) -> list[int]:
    """By bytes alone."""
    return [FIRST_BYTE + byte for byte in text.encode()]


def pieces(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def added(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool = True) -> str:
    """What the output's bytes add to the prompt's, as text. A character that the prompt only begins is the
    output's if that ends it."""

    def spelling(tokens: list[int]) -> bytes:
        heard = [token for token in tokens if not tokenizer.is_silent(token, skip_special_tokens=skip)]
        return b"".join(map(tokenizer.token_bytes, heard))

    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(spelling(prompt))
    begun = bool(decoder.getstate()[0])
    text = decoder.decode(spelling(ids), final=True)
    return text.removeprefix(REPLACEMENT) if begun else text


@pytest.mark.parametrize("text", TRICKY)
def test_text_comes_whole_and_never_with_broken_characters(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text, add_special_tokens=False)
    given_out = pieces(tokenizer, [], ids)
    assert "".join(given_out) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in given_out)


@settings(max_examples=100, deadline=None)
@given(prompt=st.text(max_size=20), text=st.text(max_size=60))
def test_any_text_survives_after_any_prompt(tokenizer: Tokenizer, prompt: str, text: str):
    before, ids = (tokenizer.encode(part, add_special_tokens=False) for part in (prompt, text))
    # Which is the text itself but for what the vocabulary lacks.
    assert "".join(pieces(tokenizer, before, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.lists(st.integers(min_value=0, max_value=49151), max_size=12),
    ids=st.lists(st.integers(min_value=0, max_value=49160), max_size=40),
    skip=st.booleans(),
)
def test_any_tokens_give_what_decoding_them_at_once_gives(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool
):
    assert "".join(pieces(tokenizer, prompt, ids, skip)) == added(tokenizer, prompt, ids, skip)


whole_characters = st.one_of(
    st.just([SPECIAL]),
    st.sampled_from(PIECES).map(lambda text: [piece(text)]),
    st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT + "▁").map(spelled),
    st.sampled_from(["👩🏿‍🚀", "e\u0301", "안녕"]).map(spelled),
)


@settings(max_examples=150, deadline=None)
@given(
    prompt=st.lists(whole_characters, max_size=12),
    output=st.lists(whole_characters, max_size=30),
    skip=st.booleans(),
    cut=st.integers(min_value=0, max_value=3),
)
def test_byte_fallback_gives_what_decoding_at_once_gives(
    fallback: Tokenizer, prompt: list[list[int]], output: list[list[int]], skip: bool, cut: int
):
    before, after = [token for part in prompt for token in part], [token for part in output for token in part]
    ids = before + after
    border = min(len(before) + cut, len(ids))  # inside a character, sometimes
    given_out = pieces(fallback, ids[:border], ids[border:], skip)
    # The decoder trims a space from the whole text, which is the output's if the prompt has no text.
    whole = fallback.decode(ids, skip_special_tokens=skip)
    expected = added(fallback, ids[:border], ids[border:], skip)
    assert "".join(given_out) == whole[max(0, len(whole) - len(expected)) :]
    assert not any(REPLACEMENT in piece for piece in given_out)


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(min_value=0, max_value=FIRST_PIECE + len(PIECES) - 1), max_size=40))
def test_of_stray_bytes_only_whole_characters_and_replacements_come(fallback: Tokenizer, ids: list[int]):
    text = "".join(pieces(fallback, [], ids))
    spelling = b"".join(fallback.token_bytes(token_id) for token_id in ids if token_id != SPECIAL)
    rest = iter(spelling.decode("utf-8", errors="replace"))
    assert all(char in rest for char in text if char != REPLACEMENT)


def test_a_character_that_was_shown_stays_when_a_stray_byte_follows(fallback: Tokenizer):
    """Decoded at once the three bytes before would be broken as well."""
    stray = spelled("世")[0]
    assert pieces(fallback, [], [*spelled("你"), stray]) == ["", "", "你", "", REPLACEMENT]
    assert "".join(pieces(fallback, [], [*spelled("你"), stray, piece("!")])) == f"你{REPLACEMENT}!"


def test_output_that_completes_the_prompts_last_character_includes_it(tokenizer: Tokenizer):
    ids = tokenizer.encode("界", add_special_tokens=False)
    assert len(ids) > 1
    assert "".join(pieces(tokenizer, ids[:1], ids[1:])) == "界"


def test_special_tokens_are_left_out_or_written_as_asked(tokenizer: Tokenizer):
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    ids = [*tokenizer.encode("one", add_special_tokens=False), *end]
    assert "".join(pieces(tokenizer, [], ids, skip=True)) == "one"
    assert "".join(pieces(tokenizer, [], ids, skip=False)) == "one<|im_end|>"


def test_a_leading_space_stays_inside_running_text_and_goes_at_the_start(fallback: Tokenizer):
    hello, world = piece("▁Hello"), piece("▁world")
    assert pieces(fallback, [hello], [world]) == [" world", ""]
    assert pieces(fallback, [], [hello, world]) == ["Hello", " world", ""]


@pytest.mark.parametrize("between", [1, 100])
def test_a_space_after_skipped_special_tokens_stays(fallback: Tokenizer, between: int):
    ids = [piece("▁Hello"), *[SPECIAL] * between, piece("▁world")]
    assert "".join(pieces(fallback, [], ids)) == "Hello world"
    assert "".join(pieces(fallback, ids[:-1], ids[-1:])) == " world"


def test_the_window_stays_small_whatever_the_model_emits(tokenizer: Tokenizer):
    stray = tokenizer.encode("界", add_special_tokens=False)[0]
    longest = 0

    class Counting:
        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

        is_silent = tokenizer.is_silent

    text = "".join(pieces(Counting(), [], [stray] * 2000))
    assert longest < 64
    assert set(text) == {"\ufffd"}
    assert len(text) == 2000
