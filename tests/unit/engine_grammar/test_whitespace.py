"""How much white space JSON may have between its elements."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar
from support.byte_tokenizer import END, VOCABULARY, save_byte_tokenizer

from diptych.engine.grammar.compiler_process import compile_grammar
from diptych.engine.grammar.structural_tag import with_little_whitespace
from diptych.engine.grammar.vocabulary import Text, Vocabulary, tokenizer_info
from diptych.engine.wire import Grammar

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a", "b"],
}
CONTENT = {"type": "json_schema", "json_schema": SCHEMA}
TAG = {"type": "tag", "begin": "<t>", "content": CONTENT, "end": "</t>"}
NESTED = {
    "type": "sequence",
    "elements": [{"type": "or", "elements": [TAG, {"type": "const_string", "value": "x"}]}],
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> xgrammar.GrammarCompiler:
    vocabulary = Vocabulary.from_dir(save_byte_tokenizer(tmp_path_factory.mktemp("bytes")), VOCABULARY)
    return xgrammar.GrammarCompiler(tokenizer_info(vocabulary, [END], Text()), max_threads=1)


def tag(form: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


GRAMMARS = [
    (Grammar("json_schema", json.dumps(SCHEMA)), ""),
    (Grammar("json_object"), ""),
    (Grammar("structural_tag", tag(TAG)), "<t>"),
    (Grammar("structural_tag", tag(NESTED)), "<t>"),
]


def accepts(compiler: xgrammar.GrammarCompiler, grammar: Grammar, text: str, *, any_whitespace: bool) -> bool:
    compiled = compile_grammar(compiler, grammar, any_whitespace=any_whitespace)
    matcher = xgrammar.GrammarMatcher(compiled)
    return all(matcher.accept_token(byte) for byte in text.encode())


@pytest.mark.parametrize(("grammar", "before"), GRAMMARS, ids=lambda value: getattr(value, "kind", None))
def test_as_much_as_the_model_likes_unless_that_is_turned_off(
    compiler: xgrammar.GrammarCompiler, grammar: Grammar, before: str
) -> None:
    for text, always in (('{"a": 1, "b": [1, 2]}', True), ('{\n\n\n"a":1', False), ('{"a":1   ,"b":', False)):
        assert accepts(compiler, grammar, before + text, any_whitespace=True)
        assert accepts(compiler, grammar, before + text, any_whitespace=False) == always, text


def test_of_a_structural_tag_nothing_else_changes() -> None:
    odd = CONTENT | {"json_schema": {"const": {"type": "json_schema", "ü": 1}}}
    changed = json.loads(with_little_whitespace(tag(TAG | {"content": odd})))
    assert changed["format"] == TAG | {"content": odd | {"max_whitespace_cnt": 1}}
    assert with_little_whitespace("[" * 100_000) == "[" * 100_000
