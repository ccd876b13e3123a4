"""The command line of every program: words → flags → record; or help, the resolved tree, the problems."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from diptych.common_config import printing
from diptych.common_config.declare import Leaf
from diptych.common_config.errors import ConfigError
from diptych.common_config.namespaces import LEAVES
from diptych.common_config.programs import Program
from diptych.common_config.record import LaunchConfig, leaves_of
from diptych.common_config.resolution import resolve, unknown_flag
from diptych.common_config.role_sets import mode_problems

PRINT_FORMATS = ("text", "json")


@dataclass(slots=True)
class Words:
    """What the words of a command line say."""

    flags: dict[str, object] = field(default_factory=dict)
    config: Path | None = None
    print_config: str | None = None
    help: bool = False
    problems: list[str] = field(default_factory=list)
    valueless: set[str] = field(default_factory=set)
    """Leaves whose flag came without the value that it needs; among the problems."""


def read_words(program: Program, argv: Sequence[str]) -> Words:
    """Sort words into flags. Values stay text; of a flag given twice the last one counts."""
    words, rest = Words(), list(argv)
    leaves = {leaf.flag: leaf for leaf in leaves_of(program).values()}
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            words.help = True
            continue
        if not word.startswith("--"):
            name, equals, _ = word.partition("=")
            words.problems.append(
                f"unexpected argument {name + equals + '…' * bool(equals)!r}; every option is a --flag"
            )
            if word.startswith("-"):  # an option of another program, with its value
                _drop(_values(rest), rest, False, 1)
            continue
        flag, equals, attached = word.partition("=")
        values = [attached] if equals else _values(rest)
        leaf = leaves.get(flag)
        if flag == "--config":
            _config(words, values, rest, bool(equals))
        elif flag == "--print-config":
            _print_config(words, values, rest, bool(equals))
        elif leaf is not None:
            _leaf(words, leaf, values, rest, bool(equals))
        elif flag.startswith("--no-") and (leaf := leaves.get("--" + flag[5:])) and leaf.kind is bool:
            if equals:
                words.problems.append(f"{flag} takes no value")
            words.flags[leaf.name] = False
        else:
            words.problems.append(unknown_flag(program, flag))
            _drop(values, rest, bool(equals), _words_of(flag))
    return words


def _values(rest: list[str]) -> list[str]:
    """The words up to the next flag. A negative number is a value."""
    values: list[str] = []
    for word in rest:
        if word.startswith("--") or word == "-h":
            break
        values.append(word)
    return values


def _drop(values: list[str], rest: list[str], attached: bool, most: int) -> list[str]:
    """Take up to `most` of the values out of `rest`."""
    if attached:
        return values[:most]
    taken = values[:most]
    del rest[: len(taken)]
    return taken


def _words_of(flag: str) -> int:
    """How many values at most go with a flag that this program doesn't have."""
    leaf = LEAVES.get(flag.removeprefix("--").removeprefix("no-").replace("-", "_"))
    if leaf is None:
        return 1
    if leaf.element is not None:
        return leaf.element.max_words
    return 0 if leaf.kind is bool else 1


def _config(words: Words, values: list[str], rest: list[str], attached: bool) -> None:
    taken = _drop(values, rest, attached, 1)
    if not taken or not taken[0]:
        words.problems.append("--config needs a file")
    elif words.config is not None:
        words.problems.append(f"--config is given twice: {words.config} and {taken[0]}")
    else:
        words.config = Path(taken[0])


def _print_config(words: Words, values: list[str], rest: list[str], attached: bool) -> None:
    taken = _drop(values, rest, attached, 1)
    words.print_config = taken[0] if taken else "text"
    if words.print_config not in PRINT_FORMATS:
        words.problems.append(f"--print-config: {taken[0]!r} is not one of {', '.join(PRINT_FORMATS)}")


def _leaf(words: Words, leaf: Leaf, values: list[str], rest: list[str], attached: bool) -> None:
    if leaf.kind is bool:
        words.flags[leaf.name] = values[0] if attached else True
    elif leaf.element is not None:
        taken = _drop(values, rest, attached, leaf.element.max_words)
        if not taken:
            words.problems.append(f"{leaf.flag} needs {leaf.element.metavar}")
            words.valueless.add(leaf.name)
            return
        entries = words.flags.setdefault(leaf.name, [])
        assert isinstance(entries, list)
        entries.append(taken[0] if attached else taken)
    else:
        taken = _drop(values, rest, attached, 1)
        if taken:
            words.flags[leaf.name] = taken[0]
        else:
            words.problems.append(f"{leaf.flag} needs a value: {printing.accepted(leaf)}")
            words.valueless.add(leaf.name)


def parse_command_line(program: Program, argv: Sequence[str] | None = None) -> LaunchConfig:
    """The record that a command line (None: this process's own), its file and the environment ask for.

    `--help` and `--print-config` print and exit with 0; problems go to stderr, all in one message, with 2."""
    words = read_words(program, sys.argv[1:] if argv is None else argv)
    if words.help:
        _print_and_exit(printing.help_text(program))
    try:
        record = resolve(
            program,
            flags=words.flags,
            file=words.config,
            env=os.environ,
            problems=[*words.problems, *mode_problems(os.environ)],
            unreadable=words.valueless,
        )
    except ConfigError as error:
        print(printing.problem_text(program, error.problems), file=sys.stderr)
        raise SystemExit(2) from None
    if words.print_config is not None:
        as_json = words.print_config == "json"
        _print_and_exit(printing.config_json(record) if as_json else printing.config_text(record))
    return record


def _print_and_exit(text: str) -> NoReturn:
    """Also when the reader has seen enough (`| head`)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What is left in the buffer would raise again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(0)
