"""Where a model's tensors come from, by name: safetensors files, or random numbers."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from diptych.engine.models.config import read_json
from diptych.engine.models.errors import InvalidModelError

INDEX_FILE = "model.safetensors.index.json"


class TensorSource(ABC):
    """A context manager: files are open inside `with`."""

    @abstractmethod
    def names(self) -> set[str] | None:
        """All tensors there are; None if any that is asked for exists."""

    @abstractmethod
    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor, in the dtype it is stored in, on the CPU. Raises `InvalidModelError` if its shape is
        another one."""

    def __enter__(self) -> TensorSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class SafetensorsSource(TensorSource):
    """One file or shards with an index. Files are mapped, so only what is read takes memory."""

    def __init__(self, model_dir: Path) -> None:
        self._files = safetensors_files(model_dir)
        self._open: dict[str, Any] = {}

    def __enter__(self) -> TensorSource:
        for path in self._files:
            try:
                handle = safe_open(path, framework="pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise InvalidModelError(f"{path} can't be read as safetensors: {error}") from error
            for name in handle.keys():  # noqa: SIM118 (not a dict: it has no iterator)
                self._open[name] = handle
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Dropping the last reference unmaps the files.
        self._open.clear()

    def names(self) -> set[str]:
        return set(self._open)

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor: torch.Tensor = self._open[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise InvalidModelError(f"tensor {name} is {list(tensor.shape)}, not {list(shape)}")
        return tensor


class DummySource(TensorSource):
    """Random weights of a trained model's scale; each tensor depends on (seed, its name) alone, so that two
    workers, or two TP ranks, draw the same model."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def names(self) -> None:
        return None

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.empty(shape).normal_(0.0, 0.02, generator=generator)


def safetensors_files(model_dir: Path) -> list[Path]:
    """The weight files of a directory, shards in name order. Raises `InvalidModelError`."""
    index = model_dir / INDEX_FILE
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise InvalidModelError(f"{index} has no weight_map")
        files = [model_dir / name for name in sorted(set(weight_map.values()))]
    else:
        single = model_dir / "model.safetensors"
        files = [single] if single.exists() else sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise InvalidModelError(f"{model_dir} holds no safetensors files")
    missing = [path.name for path in files if not path.exists()]
    if missing:
        raise InvalidModelError(f"{model_dir} lacks {', '.join(missing)}, which {INDEX_FILE} names")
    return files
