"""What is wrong with a configuration is said without a word that may be a secret; the role mode is looked at
before anything slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.common_config import Program, parse_command_line

SECRET = "S3KRET"


def message(program: Program, argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        parse_command_line(program, argv)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        f'api_key: "{SECRET}',
        f"api_key: a\napi_key: {SECRET}",
        f"{SECRET}: a\n{SECRET}: b",
        f"api_key: @{SECRET}",
        f"api_key: {SECRET}: x",
        f"api_key: [{SECRET}",
        f'api_key: "{SECRET}\\q"',
        f"api_key: !{SECRET} x",
        f"api_key: *{SECRET}",
        f"serving: {SECRET}",
        f"api_key={SECRET}",
    ],
    ids=[f"file{i}" for i in range(11)],
)
def test_a_broken_file(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    said = message(Program.COLOCATED, ["--model-path", "m", "--config", str(file)], capsys)
    assert SECRET not in said
    assert "c.yaml" in said
    if "not valid YAML" in said:
        assert "line " in said


@pytest.mark.parametrize(
    "argv",
    [
        ["--prefill", f"http://u:{SECRET}@h:1", "--decode", "http://b:1"],
        ["--prefill", "http://a:1", "--decode", f"http://h:2?token={SECRET}"],
        ["--prefill", f"http://u:{SECRET}@h:1", "8998", "more", "--decode", "http://b:1"],
        ["--prefill", "http://a:1", "--decode", "http://b:1", f"api-key={SECRET}"],
    ],
)
def test_urls_and_stray_words(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert SECRET not in message(Program.ROUTER, argv, capsys)


@pytest.mark.parametrize(
    ("mode", "file", "words"),
    [
        ("enfroce", None, "did you mean enforce"),
        ("", None, "off, record, enforce"),
        ("record", None, "DIPTYCH_ROLE_NAMESPACES_FILE"),
        ("record", "/proc/none/file", "can't be written"),
    ],
)
def test_a_role_mode_that_can_not_be_is_a_configuration_problem(
    mode: str,
    file: str | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DIPTYCH_ROLE_NAMESPACES", mode)
    if file is not None:
        monkeypatch.setenv("DIPTYCH_ROLE_NAMESPACES_FILE", file)
    said = message(Program.COLOCATED, ["--model-path", "m", "--print-config"], capsys)
    assert words in said
