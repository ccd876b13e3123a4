"""Text or a file's value → a leaf's value, with the reason when it can't be one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from diptych.common_config.declare import Leaf

REDACTED = "<redacted>"
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}\Z")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?\Z")
_BOOLEANS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
MAX_TEXT = 1 << 16
"""Characters of a text value: it is logged and shown in one line."""
MAX_WHOLE = 2**53
"""Beyond this a whole number doesn't survive JSON readers that use doubles."""


class BadValue(ValueError):
    """Why a value can't be this leaf's; the message names neither the leaf nor its source."""


def accepted(leaf: Leaf) -> str:
    """What a leaf accepts, for error messages and help: `a whole number of at least 1, or -1`."""
    if leaf.choices:
        text = "one of " + ", ".join(leaf.choices)
    elif leaf.element is not None:
        text = "entries of the form " + leaf.element.metavar
    else:
        text = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[leaf.kind]
        bounds = []
        if leaf.ge is not None and leaf.le is not None:
            bounds.append(f"from {show_number(leaf.ge)} to {show_number(leaf.le)}")
        elif leaf.ge is not None:
            bounds.append(f"of at least {show_number(leaf.ge)}")
        elif leaf.le is not None:
            bounds.append(f"of at most {show_number(leaf.le)}")
        if leaf.gt is not None:
            bounds.insert(0, f"above {show_number(leaf.gt)}")
            bounds[1:] = [f"up to {show_number(leaf.le)}"] if leaf.le is not None else []
        text = " ".join([text, *bounds])
        if leaf.also:
            text += ", or " + " or ".join(map(str, leaf.also))
    return text


def show_number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def shown(leaf: Leaf, value: object) -> str:
    """A value for a message: quoted, short, and never a secret."""
    if leaf.secret:
        return REDACTED
    text = repr(value)
    return text if len(text) <= 80 else text[:76] + " …" + text[0]


def parse_text(leaf: Leaf, text: str) -> object:
    """The value of a flag's or a variable's text. Raises `BadValue`."""
    if leaf.kind is not str and text != text.strip():
        raise BadValue(f"{shown(leaf, text)} has spaces around it; accepted: {accepted(leaf)}")
    if not text:
        raise BadValue(f"is empty; leave it out or give {accepted(leaf)}")
    if leaf.element is not None:
        return check(leaf, text.split(","))
    if leaf.optional and leaf.kind is not str and text.lower() == "none":
        return None
    value: object = text
    if leaf.kind is bool:
        value = _BOOLEANS.get(text.lower(), text)
    elif leaf.kind is int and _WHOLE.match(text):
        value = int(text)
    elif leaf.kind is float and _NUMBER.match(text):
        value = float(text)
    return check(leaf, value)


def check(leaf: Leaf, value: object, *, final: bool = False) -> object:
    """The value itself, in the leaf's own type, once it passes type and range. Raises `BadValue`.

    `final`: the value is for a record or a bag, where a leaf that resolution fills can't be None."""
    if value is None:
        if leaf.optional and not (final and leaf.resolved):
            return None
        raise BadValue(f"can't be left empty; accepted: {accepted(leaf)}")
    if leaf.element is not None:
        return _entries(leaf, value)
    if leaf.kind is float and type(value) is int and abs(value) <= MAX_WHOLE:
        value = float(value)
    if type(value) is not leaf.kind:
        raise BadValue(f"{shown(leaf, value)} is not {accepted(leaf)}")
    if isinstance(value, str):
        if value != value.strip():
            raise BadValue(f"{shown(leaf, value)} has spaces around it; accepted: {accepted(leaf)}")
        if len(value) > MAX_TEXT:
            raise BadValue(f"is {len(value)} characters long; at most {MAX_TEXT} are accepted")
        if not value or any(ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in value):
            raise BadValue(f"{shown(leaf, value)} is empty or holds characters that can't be printed")
        if leaf.choices and value not in leaf.choices:
            raise BadValue(f"{shown(leaf, value)} is not {accepted(leaf)}")
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not _in_range(leaf, value):
        raise BadValue(f"{shown(leaf, value)} is not {accepted(leaf)}")
    return value


def _in_range(leaf: Leaf, value: float) -> bool:
    if value in leaf.also:
        return True
    if not math.isfinite(value) or abs(value) > MAX_WHOLE:
        return False
    return (
        (leaf.ge is None or value >= leaf.ge)
        and (leaf.gt is None or value > leaf.gt)
        and (leaf.le is None or value <= leaf.le)
    )


def _entries(leaf: Leaf, value: object) -> tuple[object, ...]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise BadValue(f"{shown(leaf, value)} is not a list of {accepted(leaf)}")
    return tuple(_entry(leaf, entry) for entry in value)


def _entry(leaf: Leaf, entry: object) -> object:
    element = leaf.element
    assert element is not None
    try:
        if isinstance(entry, msgspec.Struct):
            entry = msgspec.to_builtins(entry)
        words: Sequence[str]
        if isinstance(entry, str):
            words = entry.split()
        elif isinstance(entry, Mapping) and element.words is not None:
            words = element.words(entry)
        elif isinstance(entry, (list, tuple)):
            words = [str(word) for word in entry]
        else:
            raise BadValue(f"entry {entry!r} is not {element.metavar}")
        if not 1 <= len(words) <= element.max_words:
            raise BadValue(f"{' '.join(words)!r} is not {element.metavar}")
        return element.parse(words)
    except ValueError as error:
        raise BadValue(without_credentials(str(error))) from None


def without_credentials(message: str) -> str:
    """The message with what a URL in it may hide: user and password, and the query."""
    return re.sub(r"\?[^\s'\"]+", f"?{REDACTED}", re.sub(r"//[^/\s'\"]*@", f"//{REDACTED}@", message))


def as_text(leaf: Leaf, value: object) -> str:
    """What `parse_text` reads as this value, which is not None."""
    if leaf.element is not None:
        assert isinstance(value, tuple)
        entries = [msgspec.to_builtins(entry) for entry in value]
        words = leaf.element.words
        return ",".join(entry if words is None else " ".join(words(entry)) for entry in entries)
    return str(value).lower() if leaf.kind is bool else str(value)


def plain(leaf: Leaf | None, value: object, *, redact: bool = True) -> object:
    """A JSON-able form of a value; secrets that are set become `<redacted>`."""
    if leaf is not None and leaf.secret and redact and value is not None:
        return REDACTED
    return msgspec.to_builtins(value)
