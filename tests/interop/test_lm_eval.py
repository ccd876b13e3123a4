"""`lm_eval` over `local-completions`: its log-likelihoods are those of `transformers`, its text greedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.cluster import MODEL
from support.oracle import GreedyOracle
from tokenizers import Tokenizer

from .conftest import ClientEnvironment, Local

TASKS = Path(__file__).parent / "evaluation"
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def samples(
    clients: ClientEnvironment, local: Local, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """By task, as `--log_samples` writes them."""
    folder = tmp_path_factory.mktemp("lm_eval")
    server = {
        "model": MODEL,
        "base_url": f"{local.url}/v1/completions",
        "tokenizer": str(model_dir),
        "num_concurrent": 2,
        "max_retries": 1,
    }
    clients.run(
        "lm_eval",
        *("run", "--model", "local-completions"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in server.items())),
        *("--tasks", "local_choices,local_continuations,local_documents", "--include_path", TASKS),
        *("--batch_size", "2", "--log_samples", "--output_path", folder),
        # The data files' names are relative.
        cwd=TASKS,
        HF_DATASETS_OFFLINE="1",
        HF_HUB_OFFLINE="1",
        HF_HOME=str(folder / "cache"),
    )
    found = {}
    for file in folder.rglob("samples_*.jsonl"):
        task = file.name.removeprefix("samples_").rpartition("_")[0]
        found[task] = [json.loads(line) for line in file.read_text().splitlines()]
    return found


def continuation_logprob(
    oracle: GreedyOracle, tokenizer: Tokenizer, context: str, continuation: str
) -> tuple[float, bool]:
    """Its log-likelihood after the context, and whether it is what greedy decoding gives."""
    ids = tokenizer.encode(context + continuation, add_special_tokens=False).ids
    start = len(tokenizer.encode(context, add_special_tokens=False).ids)
    logprobs = oracle.logprobs(ids)
    rows = range(start, len(ids))
    total = sum(float(logprobs[i - 1, ids[i]]) for i in rows)
    return total, all(int(logprobs[i - 1].argmax()) == ids[i] for i in rows)


def test_loglikelihoods_of_choices_are_those_of_transformers(
    samples: dict[str, list[dict[str, Any]]], oracle: GreedyOracle, tokenizer: Tokenizer
) -> None:
    """Each request is a batch of token-id lists with `echo`, `logprobs` and one token of output."""
    answered = samples["local_choices"]
    assert len(answered) == 3
    for sample in answered:
        for arguments, ((logprob, greedy),) in zip(
            sample["arguments"].values(), sample["resps"], strict=True
        ):
            expected = continuation_logprob(oracle, tokenizer, arguments["arg_0"], arguments["arg_1"])
            assert float(logprob) == pytest.approx(expected[0], abs=TOLERANCE), arguments
            assert greedy == str(expected[1])
    assert [sample["acc"] for sample in answered[:2]] == [1, 1]


def test_loglikelihoods_of_documents_are_those_of_transformers(
    samples: dict[str, list[dict[str, Any]]], oracle: GreedyOracle, tokenizer: Tokenizer
) -> None:
    answered = samples["local_documents"]
    assert len(answered) == 3
    for sample in answered:
        ids = tokenizer.encode(sample["target"], add_special_tokens=False).ids
        # The document comes after the token that begins texts.
        ids = [tokenizer.token_to_id("<|im_start|>"), *ids]
        logprobs = oracle.logprobs(ids)
        expected = sum(float(logprobs[i - 1, ids[i]]) for i in range(1, len(ids)))
        ((logprob,),) = sample["resps"]
        assert float(logprob) == pytest.approx(expected, abs=TOLERANCE)


def test_generated_text_is_greedy_and_ends_at_the_stop_string(
    samples: dict[str, list[dict[str, Any]]], oracle: GreedyOracle, tokenizer: Tokenizer
) -> None:
    answered = samples["local_continuations"]
    assert len(answered) == 3
    for sample in answered:
        ((text,),) = sample["resps"]
        assert text
        assert "\n" not in text
        question = sample["doc"]["question"]
        assert continuation_logprob(oracle, tokenizer, question, text)[1], f"{question!r} → {text!r}"
