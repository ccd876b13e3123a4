"""One forward step over requests' pages, with a tiny model of random weights."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diptych.engine.kv_pool import KVPool
from diptych.engine.request import Request
from diptych.engine.runner import Chunk, ModelRunner, RunnerFacts
from diptych.engine.weights.loader import load_model
from diptych.kernels.registry import make_attention_backend, resolve_attention_backend

CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = load_model(tmp_path, dtype=torch.float32, device=CPU, load_format="dummy", seed=3)
    pool = KVPool(model.config.kv_layout(4, "float32"), 256, device=CPU, cache=True)
    backend = make_attention_backend(
        resolve_attention_backend(None, CPU), pool.slab, num_q_heads=4, scale=model.config.scale
    )
    facts = RunnerFacts(backend.name, backend.name, "float32", "float32", 256, "dummy", "plain", True, False)
    return ModelRunner(model, pool, prefill_backend=backend, decode_backend=backend, device=CPU, facts=facts)


@pytest.fixture
def start(runner: ModelRunner, make_request: Callable[..., Request]) -> Callable[..., Request]:
    def start(length: int, **sampling: object) -> Request:
        request = make_request([(7 * i + length) % 300 for i in range(length)], **sampling)
        request.add_pages(runner.pool.allocate(runner.pool.layout.pages_for(length + 8)))
        return request

    return start


def test_chunks_of_several_prompts_in_one_step_give_each_its_own_logits(
    runner: ModelRunner, start: Callable[..., Request]
) -> None:
    alone = [runner.prefill([Chunk(start(n), n)])[0] for n in (5, 9)]
    first, unfinished, second = start(5), start(13), start(9)
    together = runner.prefill([Chunk(first, 5), Chunk(unfinished, 6), Chunk(second, 9)])
    assert together.shape == (2, 300)
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-5, rtol=1e-5)
    assert (first.num_computed, unfinished.num_computed, second.num_computed) == (5, 6, 9)


def test_a_step_that_completes_no_prompt_has_no_logits(
    runner: ModelRunner, start: Callable[..., Request]
) -> None:
    request = start(12)
    assert runner.prefill([Chunk(request, 7)]).shape == (0, 300)
    rest = runner.prefill([Chunk(request, 5)])
    torch.testing.assert_close(rest, runner.prefill([Chunk(start(12), 12)]), atol=1e-5, rtol=1e-5)


def test_prompt_logprobs_do_not_depend_on_chunks_or_company(
    runner: ModelRunner, start: Callable[..., Request]
) -> None:
    whole = start(12, prompt_logprobs=2)
    logits = runner.prefill([Chunk(whole, 12)])
    assert whole.prompt_logprobs[0] is None
    assert len(whole.prompt_logprobs) == 12

    pieces, plain = start(12, prompt_logprobs=2), start(5)
    runner.prefill([Chunk(plain, 5), Chunk(pieces, 7)])
    last = runner.prefill([Chunk(pieces, 5)])
    torch.testing.assert_close(last, logits, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(pieces.prompt_logprobs[1:], whole.prompt_logprobs[1:], strict=True):
        assert ours is not None
        assert theirs is not None
        assert (ours.token_id, len(ours.top)) == (theirs.token_id, 2)
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


def test_decode_continues_where_prefill_would_have_gone(
    runner: ModelRunner, start: Callable[..., Request]
) -> None:
    longer = start(9)
    expected = runner.prefill([Chunk(longer, 9)])
    request = start(9)
    request.prompt_ids = longer.prompt_ids[:8]
    runner.prefill([Chunk(request, 8)])
    request.accept(longer.prompt_ids[8])
    torch.testing.assert_close(runner.decode([request]), expected, atol=1e-5, rtol=1e-5)
    assert request.num_computed == 9


def test_a_request_gets_the_same_bits_alone_and_in_company(
    runner: ModelRunner, start: Callable[..., Request]
) -> None:
    """A seed then draws the same tokens whatever else runs."""
    for length in (1, 2, 40):
        alone, together = start(length), [start(length), start(7), start(length)]
        expected = runner.prefill([Chunk(alone, length)])
        logits = runner.prefill([Chunk(request, request.num_prompt) for request in together])
        assert torch.equal(logits[0], expected[0])
        assert torch.equal(logits[2], expected[0])
        for request in (alone, *together):
            request.accept(5)
        expected = runner.decode([alone])
        logits = runner.decode(together)
        assert torch.equal(logits[0], expected[0])
        assert torch.equal(logits[2], expected[0])
