"""Each format of tool calls: what is a call, what is content, and that it doesn't matter how text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.server.reading import assert_cuts_do_not_matter, made, places, read

from diptych.server.message import Arguments, CallStart, Content
from diptych.server.tools.registry import TOOL_PARSERS

TOOLS = ("f", "get_weather", "to-do")


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


WEATHER = '{"city": "Zürich \\"世\\" }</tool_call>", "days": [1, {"x": null}], "e": -1.5e3, "ok": true}'

ANSWERS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    # Qwen 2.5 and 3, Hermes.
    ("hermes", hermes("f", "{}"), "", [("f", "{}")]),
    ("hermes", "Let me see.\n" + hermes("get_weather", WEATHER), "Let me see.", [("get_weather", WEATHER)]),
    ("hermes", hermes("f", "{}") + "\n" + hermes("to-do", "{}"), "", [("f", "{}"), ("to-do", "{}")]),
    ("hermes", hermes("f", "{}") + "\n\nDone. ", "Done.", [("f", "{}")]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (
        "hermes",
        '<tool_call>{"id": 7, "name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "id": "x"}</tool_call>', "", [("f", "{}")]),
    (
        "hermes",
        '<tool_call>[{"name": "f", "arguments": {}}, {"name": "f", "arguments": {"a": 2}}]</tool_call>',
        "",
        [("f", "{}"), ("f", '{"a": 2}')],
    ),
    # What small models get wrong: a missing bracket, a missing tag, a line break in a string.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>x', "x", [("f", '{"a": 1}')]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "to-do"}',
        "",
        [("f", "{}"), ("to-do", "{}")],
    ),
    ("hermes", hermes("f", '{"a": "one\ntwo\x01"}'), "", [("f", '{"a": "one\\ntwo\\u0001"}')]),
    # Llama 3.
    ("llama3_json", '{"name": "f", "parameters": {"a": "}"}}', "", [("f", '{"a": "}"}')]),
    (
        "llama3_json",
        ' {"name": "f", "parameters": {}}; {"name": "to-do", "parameters": {"a": 1}}',
        "",
        [("f", "{}"), ("to-do", '{"a": 1}')],
    ),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("llama3_json", 'So:<|python_tag|>{"name": "f", "parameters": {}}', "So:", [("f", "{}")]),
    ("llama3_json", '{"name": "f", "parameters": {}}; so', "; so", [("f", "{}")]),
    # Mistral, old and new.
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}, {"name": "to-do", "arguments": {}}]',
        "",
        [("f", '{"a": "]"}'), ("to-do", "{}")],
    ),
    (
        "mistral",
        'Hm.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]to-do[CALL_ID]abc123456[ARGS]{}',
        "Hm.",
        [("f", '{"a": 1}'), ("to-do", "{}")],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
    # Llama 3.2 and 4.
    (
        "pythonic",
        '[get_weather(city="Zü)]rich\\n", days=[1, {"x": None}], e=-1.5, ok=True), to-do()]',
        "",
        [
            ("get_weather", '{"city": "Zü)]rich\\n", "days": [1, {"x": null}], "e": -1.5, "ok": true}'),
            ("to-do", "{}"),
        ],
    ),
    ("pythonic", "<|python_start|>[f(a='x', b=true, c=null)]<|python_end|>", "", [
        ("f", '{"a": "x", "b": true, "c": null}'),
    ]),
    ("pythonic", "[f(a=(1, 2)),\n f()]", "", [("f", '{"a": [1, 2]}'), ("f", "{}")]),
    (
        "pythonic",
        "[f(from='a, b', user-id = [1, (2, 3)],), f( )]",
        "",
        [("f", '{"from": "a, b", "user-id": [1, [2, 3]]}'), ("f", "{}")],
    ),
    ("pythonic", "[f()] []", "[]", [("f", "{}")]),
    ("pythonic", "[f(a=1), nope()]", ", nope()]", [("f", '{"a": 1}')]),
    ("pythonic", '[f(a="\\ud800")]', "", [("f", '{"a": "\\ud800"}')]),
]  # fmt: skip

CONTENT: list[tuple[str, str]] = [
    ("hermes", " plain text \n"),
    ("hermes", "a < b, <tool>, <tool_call and <tool_call> as such"),
    ("hermes", "<tool_call>{}</tool_call>"),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": NaN}</tool_call>'),
    ("hermes", '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "argu'),
    ("hermes", '<tool_call>{"name": "f", "x": ' + "[" * 5_000),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", '{"name": "other", "parameters": {}}'),
    ("llama3_json", 'Text {"name": "f", "parameters": {}}'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS] f and g"),
    ("mistral", "[TOOL_CALLS]other[ARGS]{}"),
    ("mistral", "[1, 2] [TOOL"),
    ("mistral", "[TOOL_CALLS][]"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[]"),
    ("pythonic", "[f](https://example.org)"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=)]"),
    ("pythonic", "[f(a=1]"),
    ("pythonic", "[f(a=*x)]"),
    ("pythonic", "[f(a=b:=1)]"),
    ("pythonic", "[f(a=open)]"),
    ("pythonic", "[f(**{})]"),
    ("pythonic", "[f(a={1: 2})]"),
    ("pythonic", "[f(a=1e999)]"),
    ("pythonic", "[f(a=f'{x}')]"),
    ("pythonic", "Text [f()]"),
    ("pythonic", "[f(a=" + "-" * 50_000 + "1)]"),
    ("pythonic", "[f(a=1" + "+1" * 20_000 + ")]"),
    ("pythonic", "[f(a=" + "[" * 5_000),
    ("pythonic", "[f(a=" + "9" * 5_000 + ")]"),
]


def parser(name: str, **options: bool):
    return TOOL_PARSERS[name](TOOLS, **options)


@pytest.mark.parametrize(("name", "text", "content", "calls"), ANSWERS)
def test_calls_are_told_from_content(name: str, text: str, content: str, calls: list) -> None:
    message = read(parser(name), [text])
    assert (message.content, made(message)) == (content, calls)
    assert read(parser(name), list(text)) == message
    for _, arguments in calls:
        json.loads(arguments)


@pytest.mark.parametrize(("name", "text"), CONTENT)
def test_what_is_no_call_is_content_to_the_letter(name: str, text: str) -> None:
    message = read(parser(name), [text])
    assert (message.content, message.calls) == (text, [])
    assert read(parser(name), list(text)) == message


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut o', '{"a": "cut o'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": x}}</tool_call>', '{"a": x}}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": x}</tool', '{"a": x}</tool'),
        ("llama3_json", '{"name": "f", "parameters": {"a": 01}}', '{"a": 01}}'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a" 1}', '{"a" 1}'),
    ],
)
def test_arguments_that_have_begun_are_passed_on_as_they_are(name: str, text: str, arguments: str) -> None:
    """They may have been streamed; a client that parses them sees what went wrong."""
    message = read(parser(name), [text])
    assert (message.content, made(message)) == ("", [("f", arguments)])
    assert read(parser(name), list(text)) == message


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
def test_arguments_are_streamed_while_they_come(name: str) -> None:
    text = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "lo',
        "llama3_json": '{"name": "f", "parameters": {"a": "lo',
        "mistral": '[TOOL_CALLS]f[ARGS]{"a": "lo',
    }[name]
    reading = parser(name)
    first = reading.feed(text)
    assert isinstance(first[0], CallStart)
    assert first[0].name == "f"
    assert first[1:] == [Arguments(0, '{"a": "lo')]
    assert reading.feed("ng") == [Arguments(0, "ng")]


def test_content_comes_at_once_but_for_what_may_be_a_call() -> None:
    reading = parser("hermes")
    assert reading.feed("Hello there") == [Content("Hello there")]
    assert reading.feed(" <tool") == []
    assert reading.feed("box>") == [Content(" <toolbox>")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", hermes("f", "{}") + hermes("to-do", '{"a": 1}')),
        ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "to-do", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]to-do[ARGS]{}"),
        ("pythonic", "[f(), to-do(a=1)]"),
    ],
)
def test_without_parallel_calls_there_is_one(name: str, text: str) -> None:
    message = read(parser(name, parallel=False), [text])
    assert (message.content, made(message)) == ("", [("f", "{}")])
    assert read(parser(name, parallel=False), list(text)) == message


def test_ids_are_the_kind_that_the_models_templates_take() -> None:
    for name in TOOL_PARSERS:
        text = next(text for format_, text, _, calls in ANSWERS if format_ == name and len(calls) == 2)
        ids = [piece.id for piece in parser(name).feed(text) if isinstance(piece, CallStart)]
        assert len(set(ids)) == 2
        for call_id in ids:
            assert len(call_id) == 9 if name == "mistral" else call_id.startswith("call_")


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "<|python_start|>",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
    '{"name": "f", "arguments": ',
    '{"name": "to-do", "parameters": ',
    '{"a": "\\"}", ',
    '"b": [1, {"c": null}]',
    "f(a=",
    "[f(",
    "'x'",
    "true",
    *'{}[]()"\\,;: \n<=1éé世',
    "😀",
]


@pytest.mark.parametrize("name", TOOL_PARSERS)
@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14), where=places)
@settings(max_examples=150, deadline=None)
def test_any_text_reads_the_same_however_it_is_cut(name: str, fragments: list[str], where: list[int]) -> None:
    text = "".join(fragments)
    message = assert_cuts_do_not_matter(lambda: parser(name), text, where)
    if not message.calls:
        assert message.content == text
    json.dumps([message.content, made(message)], ensure_ascii=False).encode()


NAMES = st.sampled_from(TOOLS)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(st.sampled_from(["a", "b_c", "_d", "from"]), VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)


def written(name: str, calls: list[tuple[str, dict]], ascii_only: bool) -> str:
    texts = [(function, json.dumps(arguments, ensure_ascii=ascii_only)) for function, arguments in calls]
    match name:
        case "hermes":
            return "\n".join(hermes(*call) for call in texts)
        case "llama3_json":
            return "; ".join(f'{{"name": "{function}", "parameters": {text}}}' for function, text in texts)
        case "mistral":
            return "".join(f"[TOOL_CALLS]{function}[ARGS]{text}" for function, text in texts)
    keywords = [
        (function, ", ".join(f"{k}={v!r}" for k, v in arguments.items())) for function, arguments in calls
    ]
    return "[" + ", ".join(f"{function}({text})" for function, text in keywords) + "]"


@pytest.mark.parametrize("name", TOOL_PARSERS)
@given(calls=CALLS, ascii_only=st.booleans(), where=places)
@settings(max_examples=100, deadline=None)
def test_calls_come_out_as_they_were_written(
    name: str, calls: list[tuple[str, dict]], ascii_only: bool, where: list[int]
) -> None:
    message = assert_cuts_do_not_matter(lambda: parser(name), written(name, calls, ascii_only), where)
    assert message.content == ""
    assert [(function, json.loads(arguments)) for function, arguments in made(message)] == calls


SCHEMAS = [
    {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/word"}},
            "required": ["a"],
            "$defs": {"word": {"enum": ["x", "y"]}},
        },
    },
    {"name": "to-do", "parameters": {"type": "object", "properties": {"c": {"type": "boolean"}}}},
]

FORCED = {
    "hermes": [hermes("f", '{"a": 1, "b": "y"}'), hermes("to-do", "{}")],
    "llama3_json": ['{"name": "f", "parameters": {"a": 1}}', '{"name": "to-do", "parameters": {"c": true}}'],
    "mistral": ['[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]'],
    "pythonic": ["[f(a=1)]", '[f(a=1, b="x")]', "[to-do()]", "[to-do(c=true)]"],
}
SEVERAL = {
    "hermes": hermes("f", '{"a": 1}') + "\n" + hermes("to-do", "{}"),
    "llama3_json": '{"name": "f", "parameters": {"a": 1}}; {"name": "to-do", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "to-do", "arguments": {}}]',
    "pythonic": "[f(a=1), to-do()]",
}


def accepts(form: dict, text: str) -> bool:
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.testing import _is_grammar_accept_string

    tag = json.dumps({"type": "structural_tag", "format": form})
    return _is_grammar_accept_string(xgrammar.Grammar.from_structural_tag(tag), text)


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_what_the_grammar_makes_the_parser_reads(name: str) -> None:
    for parallel in (True, False):
        form = TOOL_PARSERS[name].structure(SCHEMAS, parallel=parallel)
        for text in FORCED[name]:
            assert accepts(form, text)
            message = read(parser(name), [text])
            assert (message.content, len(message.calls)) == ("", 1)
        assert accepts(form, SEVERAL[name]) is parallel
        for text in (
            "",
            "Hello",
            FORCED[name][0].replace("1", '"one"'),
            FORCED[name][0].replace("f", "other"),
        ):
            assert not accepts(form, text)
    assert len(read(parser(name), [SEVERAL[name]]).calls) == 2


def test_a_function_of_many_arguments_has_no_endless_grammar() -> None:
    properties = {f"a{number}": {"type": "integer"} for number in range(60)}
    many = [{"name": "f", "parameters": {"type": "object", "properties": properties}}]
    for parser_ in TOOL_PARSERS.values():
        assert len(json.dumps(parser_.structure(many, parallel=True))) < 500_000
    form = TOOL_PARSERS["pythonic"].structure(many, parallel=True)
    assert accepts(form, "[f(a1=1, a7=2, a59=3)]")
    assert not accepts(form, "[f(a7=1, a1=2)]")


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_strict_schemas_hold_calls_but_not_other_answers(name: str) -> None:
    form = TOOL_PARSERS[name].free_structure(SCHEMAS, parallel=True)
    assert accepts(form, "Hello, world.")
    assert accepts(form, SEVERAL[name])
    assert not accepts(form, FORCED[name][0].replace("1", '"one"'))


def test_one_call_alone_where_strict_calls_are_not_parallel() -> None:
    form = TOOL_PARSERS["hermes"].free_structure(SCHEMAS, parallel=False)
    assert not accepts(form, SEVERAL["hermes"])
