"""Every route of a worker that takes more than GET is of a kind: who may use it was thought about. And every
one is in the OpenAPI document, and the document names no other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from unit.httpserver.test_access import unclassified
from unit.httpserver.test_openapi import documented, served

from diptych.common_config import override_config
from diptych.server.app import make_app
from diptych.server.config_overlay import ConfigOverlay
from diptych.server.frontend import Frontend, ModelFacts, WorkerKind
from diptych.server.manager import TokenizerManager
from diptych.server.metrics import FrontendMetrics
from diptych.server.middleware import KINDS
from diptych.server.sampling_options import Limits
from diptych.server.scheduler_link import SchedulerLink
from diptych.server.tokenizer import Tokenizer


@pytest.fixture(params=[True, False], ids=["with faults", "without"])
async def app(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> AsyncIterator[web.Application]:
    link = SchedulerLink()
    with override_config(model_path="/models/m"):
        frontend = Frontend(
            kind=WorkerKind.PREFILL,
            model=ModelFacts(
                tokenizer_path="/models/m",
                model_type="llama",
                architectures=[],
                max_total_tokens=64,
                limits=Limits(context_length=64, vocab_size=9),
            ),
            manager=TokenizerManager(link, tokenizer, FrontendMetrics(), ConfigOverlay(), prefill=True),
            chat_template=None,
            created=0,
            find_weights=lambda path, load_format: Path(path),
            fault_injection=request.param,
        )
        yield make_app(frontend)
    link.close()


async def test_every_route_that_takes_more_than_get_has_a_kind(app: web.Application) -> None:
    assert unclassified(app, KINDS) == []
    assert set(KINDS) - {"/faults"} <= {resource.canonical for resource in app.router.resources()}


async def test_the_document_has_every_route_and_no_other(app: web.Application) -> None:
    async with TestClient(TestServer(app)) as client:
        document: dict[str, Any] = await (await client.get("/openapi.json")).json()
    assert documented(document) == served(app)
    assert ("POST", "/v1/chat/completions") in documented(document)


async def test_the_document_asks_for_the_key_that_other_reading_routes_ask_for(app: web.Application) -> None:
    with override_config(api_key="secret"):
        async with TestClient(TestServer(app)) as client:
            assert (await client.get("/openapi.json")).status == 401
            key = {"Authorization": "Bearer secret"}
            assert (await client.get("/openapi.json", headers=key)).status == 200
