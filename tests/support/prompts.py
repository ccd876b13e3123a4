"""Prompts that reach every edge: sizes around page and chunk boundaries, scripts, code, one token."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

_TEXTS = [
    "The",
    "What is the capital of France?",
    "Once upon a time, in a village by the sea,",
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot =",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "Das Schiff fährt über den großen Fluss und",
    "日本の首都は東京です。フランスの首都は",
    "Привет! Расскажи мне о",
    "مرحبا، كيف",
    "🎉🚀 emoji 👩‍👩‍👧‍👦 and more:",
    "\n\n\t  \n",
    '{"name": "Ada", "born": 1815, "known_for": [',
    "1 2 3 4 5 6 7 8 9 10 11",
    "∀x ∈ ℝ: x² ≥ 0, therefore",
    "<|im_start|>user\nName three rivers.<|im_end|>\n<|im_start|>assistant\n",
]

# Page sizes are 1, 16 and 64, chunk sizes 16, 64 and 512: each boundary exactly and by one.
BOUNDARY_LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1025, 2000]


def equality_prompts(model_dir: Path) -> list[list[int]]:
    """34 prompts of 1 to 2,000 tokens."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    texts = [tokenizer.encode(text, add_special_tokens=False).ids for text in _TEXTS]
    # Real text of any length: the words of these prompts, shuffled anew for each.
    words = [word for text in _TEXTS[1:6] for word in text.split()]
    sized = []
    for length in BOUNDARY_LENGTHS:
        rng = random.Random(length)
        ids: list[int] = []
        while len(ids) < length:
            ids += tokenizer.encode(" " + " ".join(rng.sample(words, 12)), add_special_tokens=False).ids
        sized.append(ids[:length])
    return texts + sized
