from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diptych.engine.wire import Finish

STOP = Finish(kind="stop", matched=2)
LENGTH = Finish(kind="length")


@pytest.mark.parametrize(
    ("options", "output", "expected"),
    [
        ({}, [], None),
        ({}, [4, 5], None),
        ({}, [4, 2], STOP),
        ({}, [2, 4], None),
        ({"max_new_tokens": 0}, [], LENGTH),
        ({"max_new_tokens": 1}, [4], LENGTH),
        ({"max_new_tokens": 1}, [2], STOP),
        ({"max_new_tokens": 2}, [4, 2], STOP),
        ({"max_new_tokens": 3}, [4, 5], None),
        ({"stop_token_ids": (4,)}, [4], Finish(kind="stop", matched=4)),
        ({"stop_token_ids": (4,)}, [2], STOP),
        ({"ignore_eos": True}, [2], None),
        ({"ignore_eos": True, "max_new_tokens": 1}, [2], LENGTH),
        ({"ignore_eos": True, "stop_token_ids": (4,)}, [4], Finish(kind="stop", matched=4)),
        ({"ignore_eos": True, "stop_token_ids": (2,)}, [2], STOP),
        ({"min_new_tokens": 2}, [4, 2], None),
        ({"min_new_tokens": 2}, [4, 5, 2], STOP),
        ({"min_new_tokens": 2, "max_new_tokens": 2}, [4, 2], LENGTH),
        ({"stop_token_ids": (10**7,)}, [10**7], Finish(kind="stop", matched=10**7)),
    ],
)
def test_finish_reason(
    options: dict[str, Any], output: list[int], expected: Finish | None, state: Callable[..., Any]
) -> None:
    grown = state(50, **options)
    for token in output:
        grown.append(token)
    assert grown.finish_reason() == expected
    rebuilt = state(50, output_ids=output, **options)
    assert rebuilt.finish_reason() == expected
    assert rebuilt.num_output == grown.num_output == len(output)


def test_bias_outside_the_vocabulary_is_refused_by_name(state: Callable[..., Any]) -> None:
    for token in (50, -1):
        with pytest.raises(ValueError, match=f"token {token} is outside the vocabulary of 50"):
            state(50, logit_bias={token: 1.0})


def test_dense_counts_exist_only_for_penalties(state: Callable[..., Any]) -> None:
    plain = state(50, top_k=3, logit_bias={1: 1.0})
    assert plain.seen is None
    assert plain.counts is None
    assert state(50, repetition_penalty=1.1).seen is not None
    assert state(50, frequency_penalty=0.1).counts is not None
