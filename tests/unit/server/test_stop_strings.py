from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diptych.server.stop_strings import StopStringMatcher

LETTERS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4, unique=True)


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopStringMatcher(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        if matcher.matched is not None:
            return shown, matcher.matched
        # Nothing shown so far may turn out to be part of a stop string.
        text = "".join(pieces[: pieces.index(piece) + 1]) if pieces.count(piece) == 1 else None
        assert text is None or text.startswith(shown)
    return shown + matcher.flush(), None


def first_stop(stops: list[str], text: str) -> tuple[str, str | None]:
    """By definition: the shortest beginning of the text that ends with a stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(STOPS, LETTERS)
def test_character_by_character_finds_the_stop_that_ends_first(stops: list[str], text: str):
    assert run(stops, list(text)) == first_stop(stops, text)


@given(STOPS, st.lists(LETTERS, max_size=6))
def test_the_result_does_not_depend_on_how_the_text_is_cut(stops: list[str], pieces: list[str]):
    assert run(stops, pieces) == first_stop(stops, "".join(pieces))


@given(STOPS, LETTERS)
def test_no_part_of_a_stop_string_is_ever_shown(stops: list[str], text: str):
    matcher = StopStringMatcher(stops)
    shown = ""
    for character in text:
        shown += matcher.feed(character)
    assert first_stop(stops, text)[0].startswith(shown)


def test_held_text_is_shown_once_it_cannot_match():
    matcher = StopStringMatcher(["END"])
    assert [matcher.feed(piece) for piece in ("an E", "N", "O")] == ["an ", "", "ENO"]


def test_held_text_is_shown_at_the_end():
    matcher = StopStringMatcher(["END"])
    assert matcher.feed("an EN") == "an "
    assert matcher.flush() == "EN"


def test_without_stop_strings_text_passes():
    assert StopStringMatcher([]).feed("anything") == "anything"
