"""Every route of a worker that takes more than GET is of a kind: who may use it was thought about."""

from __future__ import annotations

from pathlib import Path

from unit.httpserver.test_access import unclassified

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


async def test_every_route_that_takes_more_than_get_has_a_kind(tokenizer: Tokenizer) -> None:
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
            fault_injection=True,
        )
        app = make_app(frontend)
        assert unclassified(app, KINDS) == []
        assert set(KINDS) <= {resource.canonical for resource in app.router.resources()}
    link.close()
