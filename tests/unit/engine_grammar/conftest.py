from collections.abc import Callable, Iterator

import pytest
from support.byte_tokenizer import KeptLink
from unit.engine_grammar.following import matcher_of

from diptych.engine.grammar import Grammars, Matcher
from diptych.engine.wire import Grammar


@pytest.fixture
def grammars(grammar_link: KeptLink) -> Iterator[Grammars]:
    made = Grammars(grammar_link, timeout=20)
    yield made
    made.close()


@pytest.fixture
def follow(grammars: Grammars) -> Callable[..., Matcher]:
    """A matcher at the beginning of a grammar."""

    def follow(kind: str, text: str = "", **options: object) -> Matcher:
        return matcher_of(grammars, Grammar(kind, text, "field"), **options)  # type: ignore[arg-type]

    return follow
