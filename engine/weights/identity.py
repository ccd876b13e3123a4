"""Which model a directory holds, as both sides of a pair must agree on it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from diptych.engine.models.config import read_json

_SAMPLE_BYTES = 64 << 10
_NOT_THE_MODEL = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")
"""Who saved it, and in what dtype it is best served (the fingerprint has the dtype served)."""


def dummy_identity(model_dir: Path | str, seed: int) -> str:
    """The same for random weights: what the configuration and the seed make of them."""
    digest = _configuration_digest(Path(model_dir))
    digest.update(f"\0dummy\0{seed}".encode())
    return digest.hexdigest()[:32]


def model_identity(model_dir: Path | str) -> str:
    """32 hex digits over config.json and the weight files' names, sizes and a sample of their contents (the
    beginning, where safetensors lists its tensors, the middle and the end). The same on every machine that
    holds the same files, wherever they lie.

    Raises `InvalidModelError` without a readable config.json.
    """
    directory = Path(model_dir)
    digest = _configuration_digest(directory)
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for offset in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _configuration_digest(directory: Path) -> hashlib._Hash:
    config = {k: v for k, v in read_json(directory / "config.json").items() if k not in _NOT_THE_MODEL}
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode())
