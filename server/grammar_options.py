"""From the request fields that say what an answer must match to a `Grammar`.

Clients of OpenAI, vLLM and SGLang spell it differently; each field is a source here, and at most one may ask
for something. Whether the grammar itself can be used is known once the scheduler has compiled it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal, TypeVar

import msgspec

from diptych.engine.wire import Grammar
from diptych.server.errors import BadRequest
from diptych.server.requests import ABSENT, GrammarFields
from diptych.server.schema_check import problem

MAX_GRAMMAR_BYTES = 1 << 20
MAX_CHOICES = 4096

T = TypeVar("T")


class _ResponseFormat(msgspec.Struct, kw_only=True):
    type: str
    regex: str | None = None
    pattern: str | None = None
    """Another name of `regex`."""
    grammar: str | None = None
    value: str | None = None
    """Another name of `grammar`."""


class _SchemaFormat(msgspec.Struct, kw_only=True):
    """OpenAI's wrapper. `name` and `strict` are not read: the schema is always kept."""

    schema: msgspec.Raw = ABSENT


class _WithSchema(msgspec.Struct, kw_only=True):
    json_schema: _SchemaFormat | None = None


class _Structure(msgspec.Struct, kw_only=True):
    begin: str
    end: str
    schema: msgspec.Raw = msgspec.Raw(b"{}")


class _StructuralTag(msgspec.Struct, kw_only=True):
    structures: list[_Structure] | None = None
    triggers: list[str] = []


def grammar_option(fields: GrammarFields, prefix: str = "") -> Grammar | None:
    """The one grammar that the fields ask for, or None. Raises `BadRequest` naming the field (with `prefix`,
    which says where in the body the fields are)."""
    found: Grammar | None = None
    for grammar in _asked(fields, prefix):
        if found is not None:
            raise BadRequest(f"{grammar.param} can't be combined with {found.param}", param=grammar.param)
        found = grammar
    if found is not None and len(found.text.encode()) > MAX_GRAMMAR_BYTES:
        raise BadRequest(
            f"{found.param} is larger than the {MAX_GRAMMAR_BYTES} bytes that work", param=found.param
        )
    return found


def refuse_outside_sampling_params(body: bytes) -> None:
    """`/generate` reads these fields inside `sampling_params` only. Raises `BadRequest` for one beside it."""
    for grammar in _asked(msgspec.json.decode(body, type=GrammarFields), ""):
        raise BadRequest(f"{grammar.param} belongs into sampling_params here", param=grammar.param)


def response_format(given: msgspec.Raw, param: str = "response_format") -> Grammar | None:
    """What OpenAI's `response_format` object asks for; None for `{"type": "text"}` and null. `given` is its
    JSON; `param` its name in error messages. Raises `BadRequest`."""
    if _absent(given):
        return None
    form = _decode(given, _ResponseFormat, param)
    match form.type:
        case "text":
            return None
        case "json_object":
            return Grammar("json_object", param=param)
        case "json_schema":
            return _openai_schema(given, param)
        case "structural_tag":
            return _structural_tag(given, param)
        case "regex":
            return Grammar("regex", _required(form.regex or form.pattern, f"{param}.regex"), param)
        case "grammar" | "ebnf":
            return free_grammar(_required(form.grammar or form.value, f"{param}.grammar"), param)
    raise BadRequest(
        f"{param}.type must be text, json_object, json_schema, structural_tag, regex or grammar, "
        f"got {form.type[:40]!r}",
        param=f"{param}.type",
    )


def free_grammar(text: str, param: str) -> Grammar:
    """A grammar in whichever of two notations: in GBNF every rule has `::=`, in Lark's none has."""
    return Grammar("ebnf" if "::=" in text else "lark", text, param)


def choice_grammar(choices: list[str] | None, param: str) -> Grammar | None:
    """Exactly one of the texts; None asks for nothing. Raises `BadRequest`."""
    if choices is None:
        return None
    if not choices:
        raise BadRequest(f"{param} has no choices", param=param)
    if len(choices) > MAX_CHOICES:
        raise BadRequest(f"{param} has {len(choices)} choices; at most {MAX_CHOICES} work", param=param)
    if "" in choices:
        raise BadRequest(f"{param} contains an empty string", param=param)
    # JSON's escapes are those of a GBNF string too, but for pairs of surrogates.
    quoted = [json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices)]
    return Grammar("ebnf", "root ::= " + " | ".join(quoted), param)


def _asked(fields: GrammarFields, prefix: str) -> Iterator[Grammar]:
    outputs = fields.structured_outputs
    found = [
        response_format(fields.response_format, f"{prefix}response_format"),
        schema_grammar(fields.guided_json, f"{prefix}guided_json"),
        _text("regex", fields.guided_regex, f"{prefix}guided_regex"),
        choice_grammar(fields.guided_choice, f"{prefix}guided_choice"),
        _free(fields.guided_grammar, f"{prefix}guided_grammar"),
        schema_grammar(fields.json_schema, f"{prefix}json_schema"),
        _text("regex", fields.regex, f"{prefix}regex"),
        _text("ebnf", fields.ebnf, f"{prefix}ebnf"),
        _structural_tag(fields.structural_tag, f"{prefix}structural_tag"),
    ]
    if outputs is not None:
        inside = f"{prefix}structured_outputs."
        if outputs.whitespace_pattern is not None:
            raise BadRequest(
                f"`{inside}whitespace_pattern` is not supported", param=f"{inside}whitespace_pattern"
            )
        inner = [
            schema_grammar(outputs.json, f"{inside}json"),
            _text("regex", outputs.regex, f"{inside}regex"),
            choice_grammar(outputs.choice, f"{inside}choice"),
            _free(outputs.grammar, f"{inside}grammar"),
            Grammar("json_object", param=f"{inside}json_object") if outputs.json_object else None,
            _structural_tag(outputs.structural_tag, f"{inside}structural_tag"),
        ]
        if outputs.json_object is None and not any(inner):
            kinds = "json, regex, choice, grammar, json_object or structural_tag"
            raise BadRequest(
                f"{prefix}structured_outputs needs one of {kinds}", param=f"{prefix}structured_outputs"
            )
        found += inner
    return (grammar for grammar in found if grammar is not None)


def _text(kind: Literal["regex", "ebnf"], given: str | None, param: str) -> Grammar | None:
    return None if given is None else Grammar(kind, _required(given, param), param)


def _free(given: str | None, param: str) -> Grammar | None:
    return None if given is None else free_grammar(_required(given, param), param)


def schema_grammar(given: msgspec.Raw, param: str) -> Grammar | None:
    """A JSON schema, as itself or inside a string."""
    text = _unquoted(given, param)
    if text is None:
        return None
    _require_schema(text, param)
    return Grammar("json_schema", text, param)


def _openai_schema(given: msgspec.Raw, param: str) -> Grammar:
    form = _decode(given, _WithSchema, param)
    inside = form.json_schema
    if inside is None or inside.schema == ABSENT:
        raise BadRequest(f"{param}.json_schema.schema is missing", param=f"{param}.json_schema")
    grammar = schema_grammar(inside.schema, f"{param}.json_schema.schema")
    assert grammar is not None
    return grammar


def _structural_tag(given: msgspec.Raw, param: str) -> Grammar | None:
    """xgrammar's structural tag, or the older form with `structures` and `triggers`, which is translated."""
    text = _unquoted(given, param)
    if text is None:
        return None
    tag = _decode(text, _StructuralTag, param)
    if tag.structures is None:
        return Grammar("structural_tag", text, param)
    tags = [
        {
            "begin": structure.begin,
            "content": {"type": "json_schema", "json_schema": structure.schema},
            "end": structure.end,
        }
        for structure in tag.structures
    ]
    form = {"type": "triggered_tags", "triggers": tag.triggers, "tags": tags}
    translated = msgspec.json.encode({"type": "structural_tag", "format": form}).decode()
    return Grammar("structural_tag", translated, param)


def _unquoted(given: msgspec.Raw, param: str) -> str | None:
    """JSON text, taken out of the string that it may have come in; None for null."""
    if _absent(given):
        return None
    text = bytes(given).decode()
    return _required(msgspec.json.decode(text, type=str), param) if text.startswith('"') else text


def _require_schema(text: str, param: str) -> None:
    schema = _decode(text, object, param)
    if not isinstance(schema, dict | bool):
        raise BadRequest(f"{param} must hold a JSON schema, which is an object", param=param)
    found = problem(schema)
    if found is not None:
        raise BadRequest(f"{param}: {found}", param=param)


def _absent(given: msgspec.Raw) -> bool:
    return given == ABSENT


def _required(given: str | None, param: str) -> str:
    if not given:
        raise BadRequest(f"{param} is empty", param=param)
    return given


def _decode(text: str | bytes | msgspec.Raw, kind: type[T], param: str) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{param}: {error}", param=param) from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"{param} is not valid JSON: {error}", param=param) from None
    except RecursionError:
        raise BadRequest(f"{param} is nested too deeply", param=param) from None
