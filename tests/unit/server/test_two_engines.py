"""Two engines in one process: each with its own tokenizer manager, scheduler link and HTTP surface."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from aiohttp.test_utils import TestClient, TestServer

from diptych.common_config import override_config, readback
from diptych.engine import wire
from diptych.server.app import make_app
from diptych.server.chat_template import ChatTemplate
from diptych.server.config_overlay import ConfigOverlay
from diptych.server.errors import Unavailable
from diptych.server.frontend import Frontend, ModelFacts, WorkerKind
from diptych.server.manager import TokenizerManager
from diptych.server.metrics import FrontendMetrics
from diptych.server.sampling_options import Limits
from diptych.server.scheduler_link import SchedulerLink
from diptych.server.tokenizer import Tokenizer

KEY = {"Authorization": "Bearer s3cret-of-two"}
READY = wire.SchedulerReady(pid=1, context_length=64, vocab_size=9, max_total_tokens=64, eos_token_ids=[2])


@pytest.fixture
def root_level() -> Iterator[None]:
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


async def answer_as_scheduler(address: str, heard: list[str]) -> None:
    """Answers what an engine asks about its state, and keeps what else it hears."""
    with zmq.asyncio.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.linger = 0
        socket.connect(address)
        await socket.send(wire.encode(READY))
        while True:
            match wire.decode_from_frontend(await socket.recv()):
                case wire.GetState(call_id=call_id):
                    reply = wire.StateReply(call_id=call_id, metrics="", load={}, config=readback())
                    await socket.send(wire.encode(reply))
                case wire.SetLogLevel(level=level):
                    heard.append(level)


class Engine:
    def __init__(self, client: TestClient, manager: TokenizerManager, heard: list[str]) -> None:
        self.manager, self.heard, self._client = manager, heard, client

    async def ask(self, path: str, body: object = None) -> dict:
        call = self._client.get(path) if body is None else self._client.post(path, json=body)
        async with call as response:
            assert response.status == 200, await response.text()
            assert "s3cret" not in await response.text()
            return await response.json()


@asynccontextmanager
async def engine(tokenizer: Tokenizer, template: str | None = None) -> AsyncIterator[Engine]:
    link = SchedulerLink()
    manager = TokenizerManager(link, tokenizer, FrontendMetrics(), ConfigOverlay(), prefill=False)
    facts = ModelFacts(
        tokenizer_path="/models/m",
        model_type="llama",
        architectures=[],
        max_total_tokens=64,
        limits=Limits(context_length=64, vocab_size=9),
    )
    frontend = Frontend(
        kind=WorkerKind.COLOCATED,
        model=facts,
        manager=manager,
        chat_template=None if template is None else ChatTemplate(template, {}),
        created=0,
        find_weights=lambda path, load_format: Path(path),
    )
    frontend.detect_parsers()
    heard: list[str] = []
    tasks = [
        asyncio.create_task(manager.receive()),
        asyncio.create_task(answer_as_scheduler(link.address, heard)),
    ]
    try:
        await manager.ready
        async with TestClient(TestServer(make_app(frontend)), headers=KEY) as client:
            yield Engine(client, manager, heard)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        link.close()


async def test_changes_of_one_engine_are_not_seen_by_the_other(
    tokenizer: Tokenizer, root_level: None
) -> None:
    with override_config(model_path="/models/m", api_key="s3cret-of-two"):
        async with engine(tokenizer) as one, engine(tokenizer) as other:
            untouched = await other.ask("/server_info")
            bags = readback()["bags"]
            changes = {"served_model_name": "renamed", "weight_version": "7", "log_level": "error"}
            assert await one.ask("/update_config", changes) == changes

            info = await one.ask("/server_info")
            assert info["engine_overlay"]["values"] == changes
            assert (info["served_model_name"], info["weight_version"]) == ("renamed", "7")
            assert one.manager.resolved_config_dict()["served_model_name"] == "renamed"
            assert (await one.ask("/v1/models"))["data"][0]["id"] == "renamed"
            # The same bags and the same record are shown by both: they are the process's.
            assert (info["frontend"], info["record"]) == (untouched["frontend"], untouched["record"])

            assert await other.ask("/server_info") == untouched
            assert (await other.ask("/v1/models"))["data"][0]["id"] == "m"
            assert await other.ask("/update_config", {}) == {
                "served_model_name": "m",
                "weight_version": "default",
                "log_level": "info",
            }
            # Only its own scheduler is told, and no bag has moved.
            assert (one.heard, other.heard) == (["error"], [])
            assert readback()["bags"] == bags
            # A process has one level for its log, whoever asked last.
            assert logging.getLogger().level == logging.ERROR

            await one.ask("/update_config", {"served_model_name": None, "log_level": None})
            info = await one.ask("/server_info")
            assert (info["served_model_name"], info["weight_version"]) == ("m", "7")
            assert one.heard == ["error", "info"]
            assert logging.getLogger().level == logging.INFO


async def parsers(one: Engine) -> tuple[str, str]:
    info = await one.ask("/server_info")
    return info["tool_call_parser"], info["reasoning_parser"]


async def test_each_engine_reads_answers_as_its_own_template_says(tokenizer: Tokenizer) -> None:
    qwen, mistral = "{{ tools }}<tool_call></tool_call><think></think>", "{{ tools }}[TOOL_CALLS]"
    with override_config(model_path="/models/m", api_key="s3cret-of-two"):
        bags = readback()["bags"]
        async with engine(tokenizer, qwen) as one, engine(tokenizer, mistral) as other:
            assert await parsers(one) == ("hermes", "qwen3")
            assert await parsers(other) == ("mistral", "none")
            detected = (await one.ask("/server_info"))["engine_overlay"]["values"]
            assert detected == {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
        async with engine(tokenizer) as plain:
            assert await parsers(plain) == ("none", "none")
        assert readback()["bags"] == bags
    told = {"tool_call_parser": "pythonic", "reasoning_parser": "none"}
    with override_config(model_path="/models/m", api_key="s3cret-of-two", **told):
        async with engine(tokenizer, qwen) as one:
            assert await parsers(one) == ("pythonic", "none")


async def test_without_its_scheduler_an_engine_changes_nothing(
    tokenizer: Tokenizer, root_level: None
) -> None:
    logging.getLogger().setLevel(logging.WARNING)
    with override_config(model_path="/models/m"):
        link = SchedulerLink()
        manager = TokenizerManager(link, tokenizer, FrontendMetrics(), ConfigOverlay(), prefill=False)
        try:
            with pytest.raises(Unavailable, match="scheduler is gone"):
                manager.set_log_level("debug")
            manager.scheduler_died("it died")
            with pytest.raises(Unavailable, match="it died"):
                manager.set_log_level("debug")
            assert logging.getLogger().level == logging.WARNING
        finally:
            link.close()
