"""What a person meets: help, the resolved tree, and one message for all that is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from unit.common_config.samples import EVERY_LEAF, texts

from diptych.common_config import Program, parse_command_line
from diptych.common_config.declare import Leaf
from diptych.common_config.record import leaves_of

ROUTER_ARGUMENTS = ["--prefill", "http://a:1", "--decode", "http://b:1"]


def stop(program: Program, argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a command line that doesn't get as far as a record."""
    with pytest.raises(SystemExit) as caught:
        parse_command_line(program, argv)
    assert isinstance(caught.value.code, int)
    return caught.value.code, *capsys.readouterr()


@pytest.mark.parametrize("program", Program)
def test_help_has_every_flag_of_the_program_and_no_other(
    program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = stop(program, ["--help"], capsys)
    assert code == 0
    shown = {line.split()[0].rstrip(",") for line in out.splitlines() if line.startswith("  --")}
    flags = {leaf.flag for leaf in leaves_of(program).values() if program not in leaf.refused_by}
    assert shown == flags | {"--config", "--print-config"}
    assert max(map(len, out.splitlines())) <= 110


def test_help_groups_by_namespace_and_gives_units_ranges_and_defaults(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = stop(Program.PREFILL, ["-h", "--nonsense"], capsys)
    lines = out.splitlines()
    assert "schedule: How requests share steps, and the pages they occupy." in lines
    assert "exec.kernel: Which kernels run." in lines
    assert lines.index("schedule: How requests share steps, and the pages they occupy.") < lines.index(
        "  --page-size N"
    )
    assert "(a whole number from 1 to 4096; default: 16 tokens)" in " ".join(out.split())


def test_router_flags_are_repeatable_and_the_bootstrap_port_is_optional() -> None:
    record = parse_command_line(
        Program.ROUTER,
        [
            *("--prefill", "http://a:1", "8", "--prefill=http://b:1 none", "--prefill", "http://c:1"),
            *("--decode", "http://d:1", "--decode", "http://e:1", "--port", "0"),
        ],
    )
    assert [(p.url, p.bootstrap_port) for p in record.prefill] == [
        ("http://a:1", 8),
        ("http://b:1", None),
        ("http://c:1", 8998),
    ]
    assert record.decode == ("http://d:1", "http://e:1")


def test_switches_negative_numbers_and_attached_values() -> None:
    record = parse_command_line(
        Program.LOCAL,
        [
            "--chunked-prefill-size",
            "-1",
            "--disable-radix-cache",
            "--no-log-requests",
            "--port=1",
            "--port",
            "2",
        ],
    )
    assert (record.chunked_prefill_size, record.disable_radix_cache, record.log_requests) == (-1, True, False)
    assert record.port == 2


@pytest.mark.parametrize("leaf", EVERY_LEAF)
def test_every_flag_works_on_the_command_line(leaf: Leaf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.common_config.resolution.CHECKS", [])
    text = texts(leaf)[0]
    words = [leaf.flag] if leaf.kind is bool else [leaf.flag, *text.split()]
    record = parse_command_line(Program.LOCAL, words)
    assert record.provenance[leaf.name].origin == leaf.flag


def test_print_config_shows_value_and_origin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_MAX_N", "4")
    code, out, _ = stop(Program.LOCAL, ["--page-size", "32", "--print-config"], capsys)
    shown = {line.split()[0].removesuffix(":"): line for line in out.splitlines()}
    assert code == 0
    assert shown["page_size"].split()[1:] == ["32", "#", "flag:", "--page-size"]
    assert shown["max_n"].split()[1:] == ["4", "#", "env:", "DIPTYCH_MAX_N"]
    assert shown["max_queued_requests"].split()[1:] == ["1024", "#", "default"]
    assert "resolved: named after the model path" in shown["served_model_name"]


ARGUMENTS = {
    "plain": ["--log-requests", "--port", "7"],
    # What YAML readers take for something else: a number without a point, odd spaces, another type's words.
    "awkward": [
        "--shutdown-timeout",
        "0.00001",
        "--host",
        "null: #é\u2028\x7f\u0085\ufeff😀 1e5 'x'",
        "--port",
        "0",
    ],
}


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("program", Program)
def test_the_printed_tree_is_a_configuration_file_with_the_same_outcome(
    program: Program, arguments: str, form: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = list(ARGUMENTS[arguments])
    if program is Program.ROUTER:
        argv += ["--prefill", "http://a:1", "none", "--prefill", "http://c:1", "--decode", "http://b:1"]
    else:
        argv += ["--model-path", "m", "--disable-chunked-prefix-cache", "--attention-backend", "torch_native"]
    code, out, _ = stop(program, [*argv, "--print-config", form], capsys)
    assert code == 0
    path = tmp_path / "tree"
    path.write_text(out)
    again = parse_command_line(program, ["--config", str(path)])
    assert again.values() == parse_command_line(program, argv).values()
    assert {where.origin for where in again.provenance.values()} == {str(path)}
    if form == "json":
        assert json.loads(out)["provenance"]["port"] == "flag: --port"


@pytest.mark.parametrize("form", ["text", "json"])
def test_secrets_are_hidden_and_a_hidden_one_is_not_taken_for_none(
    form: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, out, _ = stop(Program.LOCAL, ["--api-key", "s3cret", "--print-config", form], capsys)
    assert "s3cret" not in out
    assert "<redacted>" in out
    path = tmp_path / "tree"
    path.write_text(out)
    code, _, err = stop(Program.LOCAL, ["--config", str(path)], capsys)
    assert (code, err) == (
        2,
        f"launch-local: {path}: api_key is hidden here; give --api-key or DIPTYCH_API_KEY too\n",
    )
    assert parse_command_line(Program.LOCAL, ["--config", str(path), "--api-key", "k"]).api_key == "k"


def test_a_bad_secret_is_not_printed_either(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_API_KEY", " s3cret")
    code, _, err = stop(Program.LOCAL, [], capsys)
    assert code == 2
    assert "s3cret" not in err
    assert "DIPTYCH_API_KEY" in err


def test_importing_and_parsing_for_the_router_is_quick_and_needs_no_torch() -> None:
    program = (
        "import sys; from diptych.common_config import Program, parse_command_line\n"
        f"parse_command_line(Program.ROUTER, {ROUTER_ARGUMENTS!r})\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'zmq', 'aiohttp') if m in sys.modules])"
    )
    before = os.times()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    after = os.times()
    assert sum(after[2:4]) - sum(before[2:4]) < 0.5  # processor time of children, user and system


def test_a_real_process_exits_with_2_and_no_traceback() -> None:
    program = "from diptych.common_config import *; parse_command_line(Program.ROUTER)"
    flags = ["--prot", "1", "--max-retries", "-1", "--decode", "nowhere"]
    done = subprocess.run([sys.executable, "-c", program, *flags], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[:2] == [
        "launch-router: 3 problems in the configuration:",
        "  - unknown flag --prot; did you mean --port?",
    ]
