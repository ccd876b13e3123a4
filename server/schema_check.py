"""What a JSON schema may not ask for, because no grammar that we can make would keep it.

The library behind `--grammar-backend` skips such keywords, alone or in these combinations. An answer that
merely happens to be valid is no answer to "must match": the request is refused instead, naming the place.
"""

from __future__ import annotations

from collections.abc import Iterator

NEVER = frozenset(
    {
        *("not", "if", "then", "else", "contains", "minContains", "maxContains"),
        *("dependentRequired", "dependentSchemas", "dependencies"),
        *("$dynamicRef", "$recursiveRef"),
    }
)
NEED_TYPE = frozenset(
    {
        *("minLength", "maxLength", "pattern"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
)
_ALTERNATIVES = ("anyOf", "oneOf")
_CONSTRAINTS = NEED_TYPE | {
    *("type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties"),
    *("propertyNames", "minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems"),
    *("anyOf", "oneOf", "allOf", "$ref"),
}
_EXCLUSIVE = (
    ({"pattern"}, {"minLength", "maxLength", "format"}),
    ({"format"}, {"minLength", "maxLength"}),
    ({"patternProperties"}, {"properties"}),
)
"""Of each pair, a keyword of the first and one of the second can't be kept together."""
_IN_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions")
_IN_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ALONE = ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties")


def problem(schema: object) -> str | None:
    """A sentence about the first place in the schema that can't be kept, or None."""
    pending: list[tuple[str, object]] = [("#", schema)]
    while pending:
        place, value = pending.pop()
        if isinstance(value, dict):
            found = _problem_at(value)
            if found is not None:
                return f"{found} (at {place[:200]})"
            pending += _inside(place, value)
    return None


def _problem_at(schema: dict[str, object]) -> str | None:
    keys = schema.keys()
    for keyword in sorted(keys & NEVER):
        return f"the keyword {keyword} can't be enforced"
    if schema.get("uniqueItems") is True:
        return "uniqueItems can't be enforced"
    needy = sorted(keys & NEED_TYPE)
    if needy and "type" not in keys:
        return f"{needy[0]} can only be enforced beside a type"
    if "multipleOf" in keys and schema["type"] != "integer":
        return "multipleOf can only be enforced for integers"
    for some, others in _EXCLUSIVE:
        if keys & some and keys & others:
            first, second = sorted(keys & some)[0], sorted(keys & others)[0]
            return f"{first} together with {second} can't be enforced"
    return _combination_problem(schema) or _required_problem(schema)


def _combination_problem(schema: dict[str, object]) -> str | None:
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return "a $ref to outside the schema can't be followed"
    alternatives = schema.get("allOf")
    if isinstance(alternatives, list) and len(alternatives) > 1:
        return "allOf with several schemas can't be enforced"
    for keyword in ("$ref", "allOf", *_ALTERNATIVES):
        beside = sorted(schema.keys() & _CONSTRAINTS - {keyword})
        if keyword in schema and beside:
            return f"{keyword} together with {beside[0]} can't be enforced"
    return None


def _required_problem(schema: dict[str, object]) -> str | None:
    required, properties = schema.get("required"), schema.get("properties", {})
    if isinstance(required, list) and isinstance(properties, dict):
        for name in required:
            if name not in properties:
                return f"required names {name!r}, for which properties has no schema"
    return None


def _inside(place: str, schema: dict[str, object]) -> Iterator[tuple[str, object]]:
    for keyword in _IN_MAPPINGS:
        values = schema.get(keyword)
        if isinstance(values, dict):
            yield from ((f"{place}/{keyword}/{name}", value) for name, value in values.items())
    for keyword in _IN_LISTS:
        values = schema.get(keyword)
        if isinstance(values, list):
            yield from ((f"{place}/{keyword}/{position}", value) for position, value in enumerate(values))
    for keyword in _ALONE:
        yield f"{place}/{keyword}", schema.get(keyword)
