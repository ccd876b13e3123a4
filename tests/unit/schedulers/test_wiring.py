"""The flags of both schedulers reach what they bound."""

from __future__ import annotations

import pytest
from unit.schedulers.cell import Cell

from diptych.common_config import Role, override_config
from diptych.engine.models.decoder import DecoderLM
from diptych.launch import assemble


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (64, 16), (9, 3)])
def test_num_reserved_decode_tokens_is_what_admission_leaves_free(
    cell: Cell, model: DecoderLM, tokens: int, pages: int
) -> None:
    runner = cell.decode().scheduler.runner
    with override_config(role=Role.DECODE_SCHEDULER, num_reserved_decode_tokens=tokens):
        batch = assemble.build_running_batch(runner)
    assert batch.keep_free(joining=1) == pages
