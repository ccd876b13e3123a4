"""What a command prints about its configuration: help, the resolved tree, problems."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from diptych.common_config.declare import REQUIRED, Leaf
from diptych.common_config.namespaces import NAMESPACES, PATHS, declarations
from diptych.common_config.programs import Program
from diptych.common_config.record import LaunchConfig
from diptych.common_config.values import accepted, show_number
from diptych.common_config.yaml_file import PROVENANCE_KEY

WIDTH = 100
INDENT = 10

SUMMARIES = {
    Program.PREFILL: "Run prompts and hand their KV pages to decode workers.",
    Program.DECODE: "Receive KV pages from prefill workers and stream tokens.",
    Program.COLOCATED: "Run prompts and stream tokens in one worker, without a transfer.",
    Program.ROUTER: "Pair a prefill and a decode worker for each request.",
    Program.LOCAL: "Start prefill, decode and router on this machine.",
}


def help_text(program: Program) -> str:
    """`--help`: the flags by namespace, with units, ranges and defaults."""
    lines = [f"usage: {program.value} [--flag VALUE ...]", "", SUMMARIES[program], "", "common:"]
    lines += _entry("--config FILE", "YAML file of the settings below, flat or under their namespace.")
    lines += _entry("--print-config [text|json]", "Print every setting with where it came from, and exit.")
    lines += _entry("-h, --help", "Print this and exit.")
    for namespace in program.namespaces:
        for path, declaration in declarations(namespace):
            leaves = [leaf for leaf in declaration.leaves.values() if program not in leaf.refused_by]
            if leaves:
                lines += ["", f"{path}: {_first_line(declaration.__doc__)}"]
                for leaf in leaves:
                    lines += _entry(_usage(leaf), f"{leaf.help} {_facts(leaf, program)}")
    lines += [
        "",
        "Precedence: default < --config file < environment (DIPTYCH_ and the name: DIPTYCH_PORT) < flag.",
    ]
    return "\n".join(lines)


def _usage(leaf: Leaf) -> str:
    if leaf.kind is bool:
        return f"{leaf.flag}, --no-{leaf.flag[2:]}"
    if leaf.choices:
        return f"{leaf.flag} {{{','.join(leaf.choices)}}}"
    if leaf.element is not None:
        return f"{leaf.flag} {leaf.element.metavar}"
    return f"{leaf.flag} {leaf.metavar or {int: 'N', float: 'X', str: 'TEXT'}[leaf.kind]}"


def _facts(leaf: Leaf, program: Program) -> str:
    facts = []
    if leaf.kind in (int, float):
        facts.append(accepted(leaf))
    facts.append(f"default: {default_text(leaf, leaf.default_for(program))}")
    return f"({'; '.join(facts)})"


def default_text(leaf: Leaf, default: object) -> str:
    """A default as people read it: with its unit, or with what leaving it open means."""
    if default is REQUIRED:
        return "none, must be given"
    if default is None:
        return leaf.open_means
    if leaf.kind is tuple:
        return "none"
    if leaf.kind is bool:
        return "on" if default else "off"
    text = show_number(default) if isinstance(default, (int, float)) else str(default)
    unit = leaf.unit.removesuffix("s") if text == "1" else leaf.unit
    return f"{text} {unit}".strip()


def _entry(usage: str, text: str) -> list[str]:
    return [
        f"  {usage}",
        *textwrap.wrap(text, WIDTH, initial_indent=" " * INDENT, subsequent_indent=" " * INDENT),
    ]


def _first_line(doc: str | None) -> str:
    return (doc or "").strip().splitlines()[0]


def config_text(record: LaunchConfig) -> str:
    """`--print-config`: every field by namespace with its origin as a comment; YAML that `--config` takes."""
    values, origins = record.redacted(), record.redacted_provenance()
    shown = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
    wide = max(len(name) + 2 * PATHS[name].count(".") for name in values) + 3
    value_wide = min(40, max(len(text) for text in shown.values()))
    lines: list[str] = []
    opened = {""}
    for name in values:
        path = ""
        for part in PATHS[name].split("."):
            depth = path.count(".") + 1 if path else 0
            path = f"{path}.{part}".lstrip(".")
            if path not in opened:
                opened.add(path)
                lines.append(f"{'  ' * depth}{part}:")
        indent = "  " * (path.count(".") + 1)
        lines.append(f"{indent + name + ':':<{wide}}  {shown[name]:<{value_wide}}  # {origins[name]}")
    return "\n".join(_readable_as_yaml(line) for line in lines)


def config_json(record: LaunchConfig) -> str:
    """`--print-config json`: a file that `--config` accepts, with the provenance beside the values."""
    values = record.redacted()
    tree: dict[str, object] = {}
    for namespace in NAMESPACES:
        if namespace in record.program.namespaces:
            tree[namespace] = _branch(namespace, values)
    tree[PROVENANCE_KEY] = record.redacted_provenance()
    lines = json.dumps(tree, indent=2, ensure_ascii=False).split("\n")
    return "\n".join(_readable_as_yaml(line) for line in lines)


def _readable_as_yaml(line: str) -> str:
    """YAML readers take U+0085, U+2028 and their like for ends of lines even in quotes, and refuse others."""
    return "".join(c if c.isprintable() or ord(c) > 0xFFFF else f"\\u{ord(c):04x}" for c in line)


def _branch(namespace: str, values: dict[str, object]) -> dict[str, object]:
    branch: dict[str, object] = {}
    for path, declaration in declarations(namespace):
        at = branch
        for group in path.split(".")[1:]:
            nested = at.setdefault(group, {})
            assert isinstance(nested, dict)
            at = nested
        at.update({name: values[name] for name in declaration.leaves})
    return branch


def problem_text(program: Program, problems: Sequence[str]) -> str:
    """All problems in one message."""
    if len(problems) == 1:
        return f"{program.value}: {problems[0]}"
    head = f"{program.value}: {len(problems)} problems in the configuration:"
    return "\n".join([head, *(f"  - {problem}" for problem in problems)])


__all__ = ["accepted", "config_json", "config_text", "default_text", "help_text", "problem_text"]
