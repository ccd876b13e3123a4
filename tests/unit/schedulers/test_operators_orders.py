"""Pausing a scheduler, and giving it other weights while its peers have the old ones."""

from __future__ import annotations

import json

import pytest
import torch
from unit.schedulers.cell import CPU, Cell, DecodeSide, PrefillSide, Side, fingerprint, prompt
from unit.schedulers.conftest import CONFIG

from diptych.engine.models.decoder import DecoderLM
from diptych.engine.weight_update import NewWeights
from diptych.engine.weights.loader import load_model
from diptych.engine.wire import ContinueGeneration, Finish, FlushCache, PauseGeneration, UpdateWeights

OTHER = "/weights/other"


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> DecoderLM:
    directory = tmp_path_factory.mktemp("other")
    # With a head of its own: a tied one of random weights repeats the last token, as the first model does.
    (directory / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": False}))
    return load_model(directory, dtype=torch.float32, device=CPU, load_format="dummy", seed=4)


@pytest.fixture
def sides(cell: Cell, other_model: DecoderLM) -> tuple[PrefillSide, DecodeSide]:
    prefill, decode = cell.prefill(), cell.decode()
    for side in (prefill, decode):
        side.other_weights[OTHER] = NewWeights(other_model, fingerprint(side.pool.layout, "other"))
    cell.introduce(prefill, decode)
    return prefill, decode


def update(cell: Cell, side: Side, path: str = OTHER) -> None:
    side.replies.clear()
    side.send(UpdateWeights(call_id=1, model_dir=path, load_format="auto"))
    cell.until(lambda: bool(side.replies))


def serve(cell: Cell, prefill: PrefillSide, decode: DecodeSide, ids: list[int]) -> tuple[list[int], Finish]:
    """Tokens, and how both legs ended if they ended alike."""
    rid = cell.request(ids, prefill, decode, of=prefill)
    cell.until(lambda: bool(decode.samples[rid].finish and prefill.samples[rid].finish))
    cell.settle()
    finish = decode.samples[rid].finish
    assert finish is not None
    return decode.samples[rid].tokens, finish


@pytest.mark.parametrize("at", ["prefill", "decode"])
def test_a_paused_worker_takes_requests_and_computes_them_when_told_to_continue(
    cell: Cell, sides: tuple[PrefillSide, DecodeSide], at: str
) -> None:
    prefill, decode = sides
    held: Side = prefill if at == "prefill" else decode
    held.send(PauseGeneration(call_id=1))
    rid = cell.request(prompt(20), prefill, decode, of=prefill)
    cell.settle()
    assert held.replies[-1].ok
    assert len(decode.samples[rid].tokens) == (0 if at == "prefill" else 1)
    assert decode.samples[rid].finish is None
    held.send(ContinueGeneration(call_id=2))
    cell.until(lambda: decode.samples[rid].finish is not None)
    assert decode.samples[rid].tokens == cell.answer(prompt(20))


def test_new_weights_on_both_sides_give_the_new_models_tokens_and_none_of_the_old_cache(
    cell: Cell, sides: tuple[PrefillSide, DecodeSide], other_model: DecoderLM
) -> None:
    prefill, decode = sides
    ids = prompt(30)
    before, _ = serve(cell, prefill, decode, ids)
    assert before == cell.answer(ids)
    update(cell, prefill)
    prefill.register(prefill.other_weights[OTHER].fingerprint)
    update(cell, decode)
    assert prefill.replies[-1].ok
    assert decode.replies[-1].ok
    assert decode.replies[-1].message == "other"
    after, finish = serve(cell, prefill, decode, ids)
    assert finish.kind == "length"
    assert after == Cell(other_model).answer(ids) != before
    assert prefill.at_baseline()
    assert decode.at_baseline()


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_between_the_two_updates_requests_fail_with_the_difference_and_never_mix_weights(
    cell: Cell, sides: tuple[PrefillSide, DecodeSide], first: str
) -> None:
    prefill, decode = sides
    if first == "prefill":
        update(cell, prefill)
        prefill.register(prefill.other_weights[OTHER].fingerprint)
        cell.settle()
    else:
        update(cell, decode)
    tokens, finish = serve(cell, prefill, decode, prompt(30))
    assert tokens == []
    assert finish.kind == "error"
    assert "other" in finish.message
    assert "tiny" in finish.message
    if first == "prefill":
        update(cell, decode)
    else:
        update(cell, prefill)
        prefill.register(prefill.other_weights[OTHER].fingerprint)
        cell.settle()
    assert serve(cell, prefill, decode, prompt(30))[1].kind == "length"


def test_weights_are_not_replaced_under_a_running_request(
    cell: Cell, sides: tuple[PrefillSide, DecodeSide]
) -> None:
    prefill, decode = sides
    decode.send(PauseGeneration(call_id=9))
    rid = cell.request(prompt(20), prefill, decode, of=prefill)
    cell.settle()
    update(cell, decode)
    assert not decode.replies[-1].ok
    assert decode.replies[-1].status == 409
    assert "1 requests are running" in decode.replies[-1].message
    decode.send(ContinueGeneration(call_id=10))
    cell.until(lambda: decode.samples[rid].finish is not None)
    assert decode.samples[rid].tokens == cell.answer(prompt(20))


def test_weights_that_cannot_be_loaded_leave_the_old_ones_serving(
    cell: Cell, sides: tuple[PrefillSide, DecodeSide]
) -> None:
    prefill, decode = sides
    update(cell, decode, "/weights/none")
    assert not decode.replies[-1].ok
    assert "/weights/none" in decode.replies[-1].message
    tokens, _ = serve(cell, prefill, decode, prompt(20))
    assert tokens == cell.answer(prompt(20))
    decode.send(FlushCache(call_id=3))
    cell.settle()
    assert decode.replies[-1].ok


def test_requests_that_come_while_weights_load_are_refused_as_worth_another_try(
    cell: Cell, sides: tuple[PrefillSide, DecodeSide]
) -> None:
    prefill, decode = sides
    decode.send(UpdateWeights(call_id=1, model_dir=OTHER, load_format="auto"))
    rid = cell.request(prompt(5), decode, of=prefill)
    cell.until(lambda: decode.samples[rid].finish is not None)
    finish = decode.samples[rid].finish
    assert finish is not None
    assert (finish.kind, finish.status) == ("error", 503)
