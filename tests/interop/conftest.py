"""Clients that others wrote, run by an interpreter of their own against `launch-local`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.client import Client
from support.cluster import MODEL
from support.oracle import GreedyOracle, greedy_oracle
from support.processes import MARKER, RUN_ID, Launched, eventually_no_processes

from diptych.engine.weights.cache import default_cache_dir
from diptych.engine.weights.source import prepare_model

ENVIRONMENT = Path(__file__).parents[2] / "build" / "interop"
SCRIPTS = Path(__file__).parent / "scripts"
NOWHERE = "http://127.0.0.1:1"
"""Where a client that looks for something on the internet finds nobody."""


class ClientEnvironment:
    """The virtual environment that `make interop` makes."""

    def __init__(self) -> None:
        self.bin = ENVIRONMENT / "venv" / "bin"
        # Guidellm's alone: with torch at hand every other client takes seconds longer to start.
        self.torch = ENVIRONMENT / "torch"
        assert (ENVIRONMENT / ".installed").exists(), (
            f"the clients' environment {ENVIRONMENT} is missing or half made: run `make interop`"
        )

    def run(
        self,
        command: str,
        *arguments: str | Path,
        cwd: Path,
        seconds: float = 180.0,
        stdin: str = "",
        **environment: str,
    ) -> str:
        """Standard output of a command of the environment; AssertionError with all it printed if it fails or
        takes longer."""
        process = subprocess.Popen(
            [self.bin / command, *arguments],
            cwd=cwd,
            env=self.variables(**environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(stdin, timeout=seconds)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        assert process.returncode == 0, f"{command} exited with {process.returncode}:\n{output}\n{errors}"
        return output

    def script(self, name: str, url: str, asked: Any, cwd: Path) -> Any:
        """What a file of `scripts/` prints, which is JSON; it gets the address and `asked`, JSON too."""
        return json.loads(self.run("python", SCRIPTS / name, url, cwd=cwd, stdin=json.dumps(asked)))

    def variables(self, **environment: str) -> dict[str, str]:
        ours = ("DIPTYCH_", "PYTHON")
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
            MARKER: RUN_ID,
            "HF_ENDPOINT": NOWHERE,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENAI_API_KEY": "not checked",
            "TOKENIZERS_PARALLELISM": "false",
            **environment,
        }


class Local:
    """`launch-local`, as `make serve` starts it, in float32: only there `transformers` judges exactly."""

    def __init__(self) -> None:
        self.launched = Launched(
            *("launch-local", "--model-path", MODEL, "--port", "0"),
            *("--dtype", "float32", "--max-total-tokens", "32768", "--tool-call-parser", "hermes"),
        )
        try:
            self.url = self.launched.ready().url
            self.prefill_url, self.decode_url = (
                self.launched.wait_for_line(rf"^  {role} +(http\S+)").group(1)
                for role in ("prefill", "decode")
            )
        except BaseException:
            self.launched.kill()
            raise
        self.client = Client(self.url)

    def close(self) -> None:
        try:
            self.launched.stop()
        finally:
            self.launched.kill()


@pytest.fixture(scope="session")
def clients() -> ClientEnvironment:
    return ClientEnvironment()


@pytest.fixture(scope="session")
def local() -> Iterator[Local]:
    local = Local()
    yield local
    local.close()
    assert eventually_no_processes() == []


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return prepare_model(MODEL, cache_dir=default_cache_dir(), report=print)


@pytest.fixture(scope="session")
def oracle(model_dir: Path) -> GreedyOracle:
    return greedy_oracle(model_dir)
