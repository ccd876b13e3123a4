"""The fields of `/v1/completions`."""

from __future__ import annotations

from .chat_rows import LONG
from .rows import Rows, no
from .shared_rows import LENGTH, SAMPLING, STREAMING

COMPLETIONS: Rows = {
    **SAMPLING,
    **STREAMING,
    **LENGTH,
    "prompt": [
        {"prompt": [504, 2365, 282, 253]},
        {"prompt": ["The sea", "A ship", "The harbour at night"]},
        {"prompt": [[504, 2365], [253, 4512, 282]]},
        {"prompt": ["The sea", "A ship"], "n": 2},
        no({"prompt": ""}),
        no({"prompt": []}),
        no({"prompt": [5, -1]}),
        no({"prompt": [10**9]}),
        no({"prompt": [5, "a"]}),
        no({"prompt": LONG}),
        no({"prompt": None}),
    ],
    "logprobs": [
        {"logprobs": 0},
        {"logprobs": 3},
        {"logprobs": 2, "max_tokens": 1},
        {"logprobs": 2, "stop": "e"},
        no({"logprobs": 21}),
        no({"logprobs": True}),
    ],
    "echo": [
        {"echo": True},
        {"echo": True, "logprobs": 2},
        # What evaluation harnesses send: prompts scored, alone and in batches.
        {"echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0},
        {"echo": True, "logprobs": 1, "max_tokens": 1, "prompt": [[504, 2365, 282], [253, 4512]]},
        {"echo": True, "prompt": [504, 2365], "n": 2},
        no({"echo": 1}),
    ],
    "best_of": [
        {"best_of": 1},
        {"best_of": 4, "n": 2},
        {"best_of": 3, "logprobs": 1, "prompt": ["The sea", "A ship"]},
        no({"best_of": 1, "n": 2}),
        no({"best_of": 0}),
    ],
}
COMPLETIONS = {**COMPLETIONS, "max_tokens": [*COMPLETIONS["max_tokens"], {"max_tokens": 0}]}
