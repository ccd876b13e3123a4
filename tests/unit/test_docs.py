"""What the documentation says and a machine can check: links, files, flags, commands, states, metrics."""

from __future__ import annotations

import enum
import re
import shlex
from collections.abc import Mapping, Set
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from unit.common_config.sources import ROOT

from diptych.common_config.command_line import read_words
from diptych.common_config.namespaces import LEAVES
from diptych.common_config.programs import Program
from diptych.decode import request as decode_request
from diptych.engine.metrics import EngineMetrics
from diptych.kvtransfer import states
from diptych.kvtransfer.stats import TransferStats
from diptych.prefill import request as prefill_request
from diptych.router import breaker
from diptych.router.metrics import RouterMetrics
from diptych.server import requests
from diptych.server.metrics import FrontendMetrics
from diptych.server.responses_request import REFUSED, ResponsesRequest

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
OPERATIONS = ROOT / "docs" / "operations.md"
API = ROOT / "docs" / "api.md"

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
CODE = re.compile(r"`([^`\n]+)`")
SUFFIXES = (".py", ".cpp", ".h", ".md", ".toml", ".so")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """The ids that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pages
def test_every_relative_link_resolves(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One thing\n[a](page.md#one-thing) [b](#gone) [c](gone.md) [d](https://example.org/x)\n"
    )
    assert broken_links(page) == ["#gone", "gone.md"]


def known_flags() -> set[str]:
    flags = {"--config", "--print-config", "--help"}
    for leaf in LEAVES.values():
        flags.add(leaf.flag)
        if leaf.kind is bool:
            flags.add("--no-" + leaf.flag.removeprefix("--"))
    names = ("serving", "compare", "transfer", "routing", "router")
    programs = [ROOT / "bench" / f"{name}.py" for name in names]
    # Other people's clients, which a test runs with them.
    for program in [*programs, *(ROOT / "tests" / "interop").glob("*.py")]:
        flags |= set(re.findall(r'"(--[a-z-]+)', program.read_text()))
    return flags


@pages
def test_every_flag_named_exists(page: Path) -> None:
    assert set(FLAG.findall(page.read_text())) - known_flags() == set()


def commands(page: Path) -> list[list[str]]:
    """The `launch-…` lines of a page's shell examples, as words."""
    lines = [
        line
        for language, body in FENCE.findall(page.read_text())
        if language == "sh"
        for line in body.replace("\\\n", " ").splitlines()
    ]
    words = [shlex.split(line, comments=True) for line in lines]
    return [line for line in words if line and line[0].startswith("launch-")]


@pages
def test_every_command_shown_is_understood(page: Path) -> None:
    for program, *arguments in commands(page):
        assert read_words(Program(program), arguments).problems == []


def test_the_readme_shows_every_part_on_its_own() -> None:
    shown = {program for program, *_ in commands(ROOT / "README.md")}
    assert shown == {"launch-prefill", "launch-decode", "launch-router", "launch-colocated"}


def named_paths(page: Path) -> set[str]:
    """Files and folders of the repository that a page names in code quotes."""
    top = {entry.name for entry in ROOT.iterdir()}
    found = set()
    for text in CODE.findall(FENCE.sub("", page.read_text())):
        is_path = re.fullmatch(r"[\w.-]+(/[\w.-]*)*", text)
        if is_path and (text.endswith((*SUFFIXES, "/")) or ("/" in text and text.split("/")[0] in top)):
            found.add(text)
    return found


def test_every_file_and_folder_named_in_the_architecture_exists() -> None:
    named = named_paths(ARCHITECTURE)
    assert len(named) > 60
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def table_rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    section = text.split(f"\n### {heading}", 1)[1].split("\n#", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize(
    ("heading", "moves"),
    [
        ("PrefillState", prefill_request.LEGAL_MOVES),
        ("DecodeState", decode_request.LEGAL_MOVES),
        ("SenderState", states.SENDER_MOVES),
        ("ReceiverState", states.RECEIVER_MOVES),
        ("BreakerState", breaker.LEGAL_MOVES),
    ],
)
def test_the_state_tables_are_those_of_the_code(
    heading: str, moves: Mapping[enum.Enum, Set[enum.Enum]]
) -> None:
    rows = table_rows(ARCHITECTURE.read_text(), heading)
    documented = {CODE.findall(state)[0]: set(CODE.findall(to)) for state, _, to in rows}
    assert documented == {state.name: {to.name for to in targets} for state, targets in moves.items()}


def real_metrics() -> set[str]:
    registries = [
        CollectorRegistry(),
        CollectorRegistry(),
        FrontendMetrics().registry,
        RouterMetrics().registry,
    ]
    EngineMetrics(registries[0])
    TransferStats(registries[1], backend="nixl")
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for registry in registries
        for family in registry.collect()
        if family.name.startswith("diptych_")
    }


def test_operations_lists_every_metric_and_no_other() -> None:
    named = set(re.findall(r"\bdiptych_[a-z_]+", OPERATIONS.read_text()))
    assert named == real_metrics()


STRUCTS = (
    *(requests.ChatRequest, requests.CompletionRequest, ResponsesRequest),
    *(requests.GenerateRequest, requests.NativeSampling, requests.StreamOptions),
)


def test_every_field_of_a_request_is_on_the_api_page() -> None:
    fields = {field.encode_name for struct in STRUCTS for field in msgspec.structs.fields(struct)}
    fields |= requests.UNSUPPORTED.keys() | REFUSED.names
    named = {text.partition(":")[0] for text in CODE.findall(API.read_text())}
    assert fields - named == set()
