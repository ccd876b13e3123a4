"""Reading a configuration file: YAML (so JSON too), keys flat or under their namespace."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from diptych.common_config.namespaces import LEAVES, NAMESPACES, PATHS, declarations
from diptych.common_config.record import did_you_mean

PROVENANCE_KEY = "provenance"
"""In the output of `--print-config json`; skipped when that output is read back."""


class _Loader(yaml.SafeLoader):
    """Safe, and refuses a key that is given twice (plain YAML readers keep the last without a word)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: list[object] = []
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if key in keys:
                known = key in LEAVES or key in NAMESPACES
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"the key {key} is given twice" if known else "a key is given twice",
                    key_node.start_mark,
                )
            keys.append(key)
        return super().construct_mapping(node, deep)


# As in JSON and YAML 1.2: this reader alone would take 1e-05, with no point in it, for text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+\Z"), list("-+0123456789")
)


def load(path: Path) -> tuple[Mapping[str, object], list[str]]:
    """The file's top mapping, and the problems when there is none."""
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        return {}, [f"--config {path}: can't be read: {error.strerror}"]
    except UnicodeDecodeError:
        return {}, [f"--config {path}: is not UTF-8 text"]
    except RecursionError:
        return {}, [f"--config {path}: is nested too deeply"]
    except (yaml.YAMLError, ValueError, TypeError) as error:
        return {}, [f"--config {path}: is not valid YAML: {_what_is_wrong(error)}"]
    if document is None:
        return {}, []
    if not isinstance(document, dict):
        return {}, [f"--config {path}: must be a mapping of keys to values, not {type(document).__name__}"]
    return document, []


def _what_is_wrong(error: Exception) -> str:
    """Where, and what, without a word of the file's text: it may be a secret."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return "it holds a value that can't be read"
    problem = re.sub(r"(['\"]).{2,}\1", "…", error.problem or "it can't be read", flags=re.DOTALL)
    mark = error.problem_mark or error.context_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else problem


def flatten(document: Mapping[Any, object], problems: list[str], where: str) -> dict[str, object]:
    """Leaf name → value. Unknown, repeated and misplaced keys go to `problems`."""
    values: dict[str, object] = {}
    for key, path, value in _walk(document, "", problems, where):
        name = key.replace("-", "_")
        if name not in LEAVES:
            known = [*LEAVES, *NAMESPACES] if not path else _names_under(path)
            inside = f" in {path}" if path else ""
            problems.append(f"{where}: unknown key {key!r}{inside}{did_you_mean(name, known)}")
        elif path and PATHS[name] != path:
            problems.append(f"{where}: {name} belongs to {PATHS[name]}, not to {path}")
        elif name in values:
            problems.append(f"{where}: {name} is given twice")
        else:
            values[name] = value
    return values


def _walk(
    document: Mapping[Any, object], path: str, problems: list[str], where: str
) -> Iterator[tuple[str, str, object]]:
    for key, value in document.items():
        if not isinstance(key, str):
            problems.append(f"{where}: the key {key!r} is not text")
            continue
        nested = f"{path}.{key}" if path else key
        if _is_path(nested) and (isinstance(value, dict) or key not in LEAVES):
            if isinstance(value, dict):
                yield from _walk(value, nested, problems, where)
            elif value is not None:
                problems.append(f"{where}: {nested} is a namespace and holds keys, not a value")
        elif path or key != PROVENANCE_KEY:
            yield key, path, value


def _is_path(path: str) -> bool:
    return path.partition(".")[0] in NAMESPACES and any(
        path == known for known, _ in declarations(path.partition(".")[0])
    )


def _names_under(path: str) -> list[str]:
    return [name for name in LEAVES if PATHS[name] == path]
