from collections.abc import Iterator

import pytest
from support.byte_tokenizer import END, VOCABULARY, KeptLink, save_byte_tokenizer

from diptych.engine.grammar.compiler_link import JobHandle
from diptych.engine.grammar.vocabulary import Text
from diptych.engine.wire import Grammar


@pytest.fixture(scope="session")
def grammar_link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptLink]:
    """A compiler for the tokenizer of single bytes."""
    directory = save_byte_tokenizer(tmp_path_factory.mktemp("byte_tokenizer"))
    link = KeptLink(directory, vocab_size=VOCABULARY, end_ids=[END])
    link.start()
    # Loaded in both processes before a test looks at the clock.
    import xgrammar  # noqa: F401

    link.compile(Grammar("regex", "a"), Text(), timeout=60, handle=JobHandle())
    yield link
    link.end()
