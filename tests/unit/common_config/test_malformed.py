"""Configurations that can't be used: always one message, exit code 2, no other exception."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common_config import Program, parse_command_line
from diptych.common_config.namespaces import LEAVES


def refusal(program: Program, argv: list[str]) -> str:
    """What the refused command line says on stderr: one line, since one thing is wrong."""
    err = io.StringIO()
    with pytest.raises(SystemExit) as caught, contextlib.redirect_stderr(err):
        parse_command_line(program, argv)
    assert caught.value.code == 2
    assert "Traceback" not in err.getvalue()
    (line,) = err.getvalue().splitlines()
    assert line.startswith(f"{program.value}: ")
    return line


FLAGS = [
    (["--page-size"], "--page-size needs a value: a whole number from 1 to 4096"),
    (["--page-size", "--port", "1"], "--page-size needs a value"),
    (["--page-size="], "--page-size: is empty; leave it out or give a whole number from 1 to 4096"),
    (["--page-size", "0"], "--page-size: 0 is not a whole number from 1 to 4096"),
    (["--page-size", "-1"], "--page-size: -1 is not"),
    (["--page-size", "4097"], "--page-size: 4097 is not"),
    (["--page-size", "1.5"], "--page-size: '1.5' is not a whole number"),
    (["--page-size", "1e3"], "--page-size: '1e3' is not"),
    (["--page-size", "0x10"], "--page-size: '0x10' is not"),
    (["--page-size", "1_6"], "--page-size: '1_6' is not"),
    (["--page-size", "١٦"], "--page-size: '١٦' is not"),
    (["--page-size", " 16"], "--page-size: ' 16' has spaces around it"),
    (["--page-size", "none"], "--page-size: 'none' is not"),
    (["--page-size", "9" * 5000], "--page-size: '999"),
    (["--page-size", "16", "32"], "unexpected argument '32'"),
    (["--chunked-prefill-size", "0"], "--chunked-prefill-size: 0 is not a whole number of at least 1, or -1"),
    (["--chunked-prefill-size", "-2"], "--chunked-prefill-size: -2 is not"),
    (["--mem-fraction-static", "0"], "--mem-fraction-static: 0.0 is not a number above 0 up to 0.95"),
    (["--mem-fraction-static", "nan"], "--mem-fraction-static: 'nan' is not"),
    (["--mem-fraction-static", "inf"], "--mem-fraction-static: 'inf' is not"),
    (["--mem-fraction-static", "1e999"], "--mem-fraction-static: inf is not"),
    (["--mem-fraction-static", "30%"], "--mem-fraction-static: '30%' is not"),
    (["--handshake-timeout", "10s"], "--handshake-timeout: '10s' is not"),
    (["--random-seed", str(2**63)], "--random-seed: '9223372036854775808' is not"),
    (["--dtype", "fp16"], "--dtype: 'fp16' is not one of auto, bfloat16, float16, float32"),
    (["--dtype", "BFLOAT16"], "--dtype: 'BFLOAT16' is not one of"),
    (["--attention-backend", "flashattention"], "--attention-backend: 'flashattention' is not one of"),
    (["--log-requests=maybe"], "--log-requests: 'maybe' is not true or false"),
    (["--no-log-requests=true"], "--no-log-requests takes no value"),
    (["--no-port"], "unknown flag --no-port; did you mean --port?"),
    (["--log-requests", "true"], "unexpected argument 'true'"),
    (["--port", "65536"], "--port: 65536 is not a whole number from 0 to 65535"),
    (["--port", "http"], "--port: 'http' is not"),
    (["--model-path", "   "], "--model-path: '   ' has spaces around it"),
    (["--model-path", "a\x00b"], "--model-path: 'a\\x00b' is empty or holds characters"),
    (["--model-path", "a\udc80"], "--model-path: 'a\\udc80' is empty or holds characters"),
    (["--model-paht", "x"], "unknown flag --model-paht; did you mean --model-path?"),
    (["--page_size", "16"], "unknown flag --page_size; did you mean --page-size?"),
    (["--zzz"], "unknown flag --zzz"),
    (["--"], "unknown flag --"),
    (["-p", "1"], "unexpected argument '-p'"),
    (["m"], "unexpected argument 'm'; every option is a --flag"),
    ([""], "unexpected argument ''"),
    (["--config"], "--config needs a file"),
    (["--config", "/dev/null", "--config", "b"], "--config is given twice: /dev/null and b"),
    (["--config", "/nonexistent/c.yaml"], "--config /nonexistent/c.yaml: can't be read: No such file"),
    (["--config", "/"], "--config /: can't be read: Is a directory"),
    (["--print-config", "xml"], "--print-config: 'xml' is not one of text, json"),
    (["--tp-size", "2"], "tensor parallelism is not supported yet"),
    (["--prefill", "http://a:1"], "--prefill: launch-local starts its own workers"),
    (["--disaggregation-bootstrap-port", "1"], "launch-local gives its workers free ports"),
    (["--default-bootstrap-port", "1"], "launch-local tells its router the ports itself"),
]


@pytest.mark.parametrize(("argv", "message"), FLAGS, ids=[str(i) for i in range(len(FLAGS))])
def test_malformed_flags(argv: list[str], message: str) -> None:
    assert message in refusal(Program.LOCAL, argv)


ROUTER = [
    (["--prefill"], "--prefill needs URL [BOOTSTRAP_PORT]"),
    (["--prefill", "a:1"], "--prefill: 'a:1' is not a URL such as http://127.0.0.1:30000"),
    (["--prefill", "http://a:99999"], "is not a URL: Port out of range"),
    (["--prefill", "http://[::1"], "is not a URL"),
    (["--prefill", "http://a:1/v1"], "must be only scheme, host and port"),
    (["--prefill", "http://u:p@a:1"], "'http://<redacted>@a:1' must be only scheme, host and port"),
    (["--prefill", "http://a:1", "0"], "bootstrap port '0' is neither a port from 1 to 65535 nor none"),
    (["--prefill", "http://a:1", "http://b:1"], "bootstrap port 'http://b:1' is neither"),
    (["--prefill", "http://a:1", "1", "2"], "unexpected argument '2'"),
    (["--prefill=http://a:1 1 2"], "'http://a:1 1 2' is not URL [BOOTSTRAP_PORT]"),
    (["--decode", "ftp://a:1"], "--decode: 'ftp://a:1' is not a URL such as"),
    (["--policy", "cache"], "--policy: 'cache' is not one of cache_aware, power_of_two, round_robin, random"),
    (["--model-path", "m"], "--model-path is not a flag of launch-router, only of launch-prefill"),
    (["--disable-radix-cache"], "--disable-radix-cache is not a flag of launch-router"),
]


@pytest.mark.parametrize(("argv", "message"), ROUTER, ids=[str(i) for i in range(len(ROUTER))])
def test_malformed_router_flags(argv: list[str], message: str) -> None:
    workers = {"--prefill": "http://y:1", "--decode": "http://z:1"}
    rest = [word for flag, url in workers.items() if flag not in str(argv) for word in (flag, url)]
    assert message in refusal(Program.ROUTER, [*argv, *rest])


FILES = [
    ("page_size: [", "is not valid YAML"),
    ("page_size: 1\npage_size: 2", "the key page_size is given twice"),
    ("page_size: 1\nschedule: {page_size: 2}", "page_size is given twice"),
    ("page_size: 1\npage-size: 2", "page_size is given twice"),
    ("- page_size", "must be a mapping of keys to values, not list"),
    ("just text", "must be a mapping of keys to values, not str"),
    ("page_size: '16'", "page_size: '16' is not a whole number"),
    ("page_size: true", "page_size: True is not a whole number"),
    ("page_size: 16.0", "page_size: 16.0 is not a whole number"),
    ("page_size: 1e999999", "page_size: inf is not"),
    ("page_size: 1e2", "page_size: 100.0 is not a whole number"),
    ("page_size: {a: 1}", "page_size: {'a': 1} is not"),
    ("page_size: null", "page_size: can't be left empty; accepted: a whole number from 1 to 4096"),
    ("page_size: 2026-01-01", "page_size: datetime.date(2026, 1, 1) is not"),
    ("schedule: 3", "schedule is a namespace and holds keys, not a value"),
    ("schedule: {port: 3}", "port belongs to serving, not to schedule"),
    ("exec: {attention_backend: cpu}", "attention_backend belongs to exec.kernel, not to exec"),
    ("exec: {kernal: {linear_backend: plain}}", "unknown key 'kernal' in exec"),
    ("schedule: {pagesize: 3}", "unknown key 'pagesize' in schedule; did you mean page_size?"),
    ("shedule: {page_size: 3}", "unknown key 'shedule'; did you mean schedule?"),
    ("disable_radix_cache: 'yes it is'", "disable_radix_cache: 'yes it is' is not true or false"),
    ("mem_fraction_static: .nan", "mem_fraction_static: nan is not"),
    ("mem_fraction_static: half", "mem_fraction_static: 'half' is not"),
    ("model_path: 7", "model_path: 7 is not text"),
    ("model_path: ''", "model_path: '' is empty"),
    ("1: 2", "the key 1 is not text"),
    ("[1, 2]: 2", "is not valid YAML"),
    ("? {a: b}\n: 2", "is not valid YAML"),
    ("&a page_size: *b", "is not valid YAML"),
    ("page_size: !!python/object/apply:os.system ['true']", "is not valid YAML"),
    ("page_size: &a [*a]", "page_size: [[...]] is not"),
    ("\x00", "is not valid YAML"),
    ("tab:\n\t- x", "is not valid YAML"),
    ("router: {prefill: http://a:1}", "'http://a:1' is not a list of entries of the form URL"),
    ("router: {prefill: [3]}", "entry 3 is not URL [BOOTSTRAP_PORT]"),
    ("router: {prefill: [{uri: x}]}", "must have the keys url and, if need be, bootstrap_port"),
    ("--- 1\n--- 2", "is not valid YAML"),
    ("[" * 3000, "nested too deeply"),
]


@pytest.mark.parametrize(("text", "message"), FILES, ids=[str(i) for i in range(len(FILES))])
def test_malformed_files(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    said = refusal(Program.LOCAL, ["--config", str(path)])
    assert message in said
    assert str(path) in said


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"model_path: \xff\xfe")
    assert "is not UTF-8 text" in refusal(Program.LOCAL, ["--config", str(path)])


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("DIPTYCH_PAGE_SIZE", "1 6", "DIPTYCH_PAGE_SIZE: '1 6' is not a whole number"),
        ("DIPTYCH_PAGE_SIZE", "16 ", "DIPTYCH_PAGE_SIZE: '16 ' has spaces around it"),
        ("DIPTYCH_PAGE_SIZE", "", "DIPTYCH_PAGE_SIZE: is empty"),
        ("DIPTYCH_PORT", "tcp://10.0.0.1:80", "DIPTYCH_PORT: 'tcp://10.0.0.1:80' is not"),
        ("DIPTYCH_LOG_REQUESTS", "ja", "DIPTYCH_LOG_REQUESTS: 'ja' is not true or false"),
        ("DIPTYCH_PAGESIZE", "3", "unknown variable DIPTYCH_PAGESIZE; did you mean DIPTYCH_PAGE_SIZE?"),
        ("DIPTYCH_ROLE_NAMESPACE", "off", "did you mean DIPTYCH_ROLE_NAMESPACES?"),
    ],
)
def test_malformed_variables(variable: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, text)
    assert message in refusal(Program.LOCAL, [])


@pytest.mark.parametrize("program", [Program.PREFILL, Program.ROUTER])
@pytest.mark.parametrize("argv", [["--config", "/nonexistent/c.yaml"], ["--config", "{broken}"]])
def test_a_file_that_can_not_be_read_is_all_that_is_said(
    program: Program, argv: list[str], tmp_path: Path
) -> None:
    """Not also that what it may hold is missing."""
    (broken := tmp_path / "c.yaml").write_text("page_size: [")
    flag, path = argv
    assert flag in refusal(program, [flag, path.replace("{broken}", str(broken))])


@pytest.mark.parametrize(
    ("program", "argv"),
    [(Program.PREFILL, ["--model-path"]), (Program.ROUTER, ["--decode", "http://z:1", "--prefill"])],
)
def test_a_flag_without_its_value_is_not_missing_too(program: Program, argv: list[str]) -> None:
    assert f"{argv[-1]} needs " in refusal(program, argv)


@pytest.mark.parametrize(
    ("argv", "env", "message"),
    [
        (["--prot", "1"], {}, "unknown flag --prot; did you mean --port?"),
        (["--log-level", "loud"], {}, "--log-level: 'loud' is not one of debug, info"),
        (["--config", "{broken}"], {}, "is not valid YAML"),
        ([], {"DIPTYCH_PORT": "80 80"}, "environment variable DIPTYCH_PORT: '80 80' is not"),
    ],
)  # fmt: skip
def test_the_commands_themselves_say_one_thing_and_exit_with_2(
    argv: list[str], env: dict[str, str], message: str, tmp_path: Path
) -> None:
    (broken := tmp_path / "c.yaml").write_text("page_size: [")
    argv = [word.replace("{broken}", str(broken)) for word in argv]
    running = {}
    for program in Program:
        own = ["--model-path", "m"]
        if program is Program.ROUTER:
            own = ["--prefill", "http://y:1", "--decode", "http://z:1"]
        module = f"diptych.launch.{program.value.removeprefix('launch-')}"
        running[program] = subprocess.Popen(
            [sys.executable, "-m", module, *own, *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )
    for program, process in running.items():
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (2, ""), (out, err)
        (line,) = err.splitlines()
        assert line.startswith(f"{program.value}: ")
        assert message in line


NAMES = st.sampled_from([leaf.flag for leaf in LEAVES.values()]) | st.text(max_size=12).map("--{}".format)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(SCALARS, inner, max_size=2)
)


def parses_or_refuses(argv: list[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            parse_command_line(Program.LOCAL, argv)
        except SystemExit as stop:
            code = stop.code
    assert (code, bool(err.getvalue())) in ((0, False), (2, True))


@settings(max_examples=100, deadline=None)
@given(st.lists(NAMES | st.text(max_size=10), max_size=6))
def test_any_words_are_parsed_or_refused(argv: list[str]) -> None:
    parses_or_refuses(argv)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(list(LEAVES)) | SCALARS, VALUES, max_size=4))
def test_any_file_content_is_parsed_or_refused(
    tmp_path_factory: pytest.TempPathFactory, document: dict[object, object]
) -> None:
    path = tmp_path_factory.mktemp("any") / "c.yaml"
    path.write_text(yaml.safe_dump(document, allow_unicode=True), errors="surrogatepass")
    parses_or_refuses(["--config", str(path)])
