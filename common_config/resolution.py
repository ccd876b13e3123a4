"""One pass from what was asked to a frozen record; of four layers, default < file < environment < flag."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from diptych.common_config import yaml_file
from diptych.common_config.declare import REQUIRED, Leaf
from diptych.common_config.errors import ConfigError
from diptych.common_config.namespaces import LEAVES
from diptych.common_config.programs import Program
from diptych.common_config.record import LaunchConfig, Provenance, did_you_mean, leaves_of
from diptych.common_config.role_sets import FILE_VARIABLE, MODE_VARIABLE
from diptych.common_config.rules import CHECKS, RULES, Draft
from diptych.common_config.values import REDACTED, BadValue, check, parse_text, plain

logger = logging.getLogger("diptych.config")

ENV_PREFIX = "DIPTYCH_"
_OTHER_VARIABLES = (MODE_VARIABLE, FILE_VARIABLE)
_TYPO_CUTOFF = 0.85
"""How alike an unknown variable and a leaf's must be to be refused as a slip. Less alike ones get a warning
only: orchestrators put variables of their own, such as DIPTYCH_ROUTER_SERVICE_HOST, beside ours."""


class _Layers:
    """Values by leaf, each from the highest layer that has it, and every problem on the way."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.leaves = leaves_of(program)
        self.values: dict[str, object] = {}
        self.provenance: dict[str, Provenance] = {}
        self.given: dict[str, str] = {}
        """Leaves that a layer above the defaults sets, with its origin."""
        self.bad: set[str] = set()
        self.problems: list[str] = []
        self.redacted: dict[str, str] = {}
        """Secrets that the file only hides, with the file."""
        for name, leaf in self.leaves.items():
            self.values[name] = leaf.default_for(program)
            self.provenance[name] = Provenance("default")

    def put(self, name: str, value: object, source: str, origin: str) -> None:
        self.values[name] = value
        self.provenance[name] = Provenance(source, origin)
        self.given[name] = origin
        self.redacted.pop(name, None)

    def refuse(self, name: str, problem: str) -> None:
        self.bad.add(name)
        self.problems.append(problem)

    def add_file(self, document: Mapping[str, object], where: str) -> None:
        for name, value in yaml_file.flatten(document, self.problems, where).items():
            leaf = LEAVES[name]
            if leaf.secret and value == REDACTED:
                self.redacted[name] = where
                continue
            try:
                value = check(leaf, value)
            except BadValue as error:
                self.refuse(name, f"{where}: {name}: {error}")
                continue
            # One file may serve several programs: what this one lacks is checked, then left aside.
            if name in self.leaves:
                self.put(name, value, "file", where)

    def add_env(self, env: Mapping[str, str]) -> None:
        known = {leaf.env: leaf for leaf in LEAVES.values()}
        for variable, text in env.items():
            if not variable.startswith(ENV_PREFIX) or variable in _OTHER_VARIABLES:
                continue
            leaf = known.get(variable)
            if leaf is None:
                hint = did_you_mean(variable, (*known, *_OTHER_VARIABLES), _TYPO_CUTOFF)
                if hint:
                    self.problems.append(f"environment: unknown variable {variable}{hint}")
                else:
                    logger.warning("environment variable %s sets nothing of Diptych's", variable)
            elif leaf.name in self.leaves:
                try:
                    self.put(leaf.name, parse_text(leaf, text), "env", variable)
                except BadValue as error:
                    self.refuse(leaf.name, f"environment variable {variable}: {error}")

    def add_flags(self, flags: Mapping[str, object]) -> None:
        for name, value in flags.items():
            leaf = self.leaves.get(name)
            if leaf is None:
                self.problems.append(unknown_flag(self.program, "--" + name.replace("_", "-")))
                continue
            try:
                value = parse_text(leaf, value) if isinstance(value, str) else check(leaf, value)
            except BadValue as error:
                self.refuse(name, f"{leaf.flag}: {error}")
                continue
            self.put(name, value, "flag", leaf.flag)

    def finish(self) -> None:
        for name, value in self.values.items():
            if value is REQUIRED and name not in self.bad:
                self.refuse(name, f"{self.leaves[name].flag} is missing: {self.leaves[name].help}")
        for name, where in self.redacted.items():
            if name in self.leaves and name not in self.bad:
                leaf = self.leaves[name]
                self.refuse(name, f"{where}: {name} is hidden here; give {leaf.flag} or {leaf.env} too")

    def draft(self, env: Mapping[str, str]) -> Draft:
        return Draft(self.program, self.values, env, frozenset(self.given))

    def usable(self, needs: tuple[str, ...]) -> bool:
        return all(name in self.leaves and name not in self.bad for name in needs)

    def apply_rules(self, env: Mapping[str, str]) -> None:
        for rule in RULES:
            if not self.usable(rule.needs):
                continue
            asked = self.values[rule.leaf]
            value = rule.compute(self.draft(env))
            if value != asked:
                self._resolved(self.leaves[rule.leaf], asked, value, rule.name)

    def run_checks(self, env: Mapping[str, str]) -> None:
        draft = self.draft(env)
        for rule_check in CHECKS:
            if self.usable(rule_check.needs):
                for problem in rule_check.find(draft):
                    self.problems.append(problem + self._sources(problem, rule_check.needs))

    def _sources(self, problem: str, needs: tuple[str, ...]) -> str:
        """Where the flags that a problem names really came from, when not from the command line."""
        elsewhere = [
            f"{name} comes from {self.given[name]}"
            for name in needs
            if name in self.given
            and self.given[name] != self.leaves[name].flag
            and self.leaves[name].flag in problem.replace(":", " ").split()
        ]
        return f" ({', '.join(elsewhere)})" if elsewhere else ""

    def _resolved(self, leaf: Leaf, asked: object, value: object, rule_name: str) -> None:
        before = self.provenance[leaf.name]
        replaced = asked is not None and before.source != "default"
        self.values[leaf.name] = value
        self.provenance[leaf.name] = Provenance(
            "resolved",
            rule_name,
            plain(leaf, asked) if replaced else None,
            f"{before.source}: {before.origin}" if replaced else "",
        )


def unknown_flag(program: Program, flag: str) -> str:
    """The problem with a flag that this program doesn't have."""
    name = flag.removeprefix("--").replace("-", "_")
    if name in LEAVES and flag == LEAVES[name].flag:
        others = ", ".join(p.value for p in Program if name in leaves_of(p))
        return f"{flag} is not a flag of {program.value}, only of {others}"
    options = [*(leaf.flag for leaf in leaves_of(program).values()), "--config", "--print-config", "--help"]
    return f"unknown flag {flag}{did_you_mean(flag, options)}"


def resolve(
    program: Program,
    *,
    flags: Mapping[str, object] | None = None,
    file: Mapping[str, object] | Path | None = None,
    env: Mapping[str, str] | None = None,
    problems: Sequence[str] = (),
    unreadable: Collection[str] = (),
) -> LaunchConfig:
    """The record of a launch. `flags`: by leaf name, as text or typed (repeatable ones a list); `file`: a
    path, or a mapping as it would hold; `env`: the environment, None for this process's own; `problems`: what
    the caller found already, and `unreadable` the leaves that those are about, so that each is told once.

    Raises `ConfigError` with every problem found."""
    env = os.environ if env is None else env
    layers = _Layers(program)
    layers.problems += problems
    layers.bad |= set(unreadable)
    lost = False
    if file is not None:
        document: Mapping[str, object]
        where = "file"
        if isinstance(file, Path):
            where = str(file)
            document, unread = yaml_file.load(file)
            layers.problems += unread
            lost = bool(unread)
        else:
            document = file
        layers.add_file(document, where)
    layers.add_env(env)
    layers.add_flags(flags or {})
    if lost:  # what nothing else gives may be in there
        layers.bad |= set(layers.leaves) - set(layers.given)
    layers.finish()
    layers.apply_rules(env)
    layers.run_checks(env)
    if layers.problems:
        raise ConfigError(layers.problems)
    # A rule that leaves a field empty, or fills it with a wrong value, is a mistake of ours: it fails here.
    values = {name: check(layers.leaves[name], value, final=True) for name, value in layers.values.items()}
    return LaunchConfig(program, values, layers.provenance)
