"""A GGUF file as a model directory: config, tokenizer, safetensors.

Values are kept exactly: unquantised tensors in their own dtype, dequantised ones in float32, since a product
of a float16 scale and a small integer fits neither float16 nor bfloat16. So float32 serving gives what
`transformers` gives from the same GGUF file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diptych.engine.models.errors import InvalidModelError, UnsupportedModelError
from diptych.engine.weights.gguf_config import config_from_gguf

if TYPE_CHECKING:
    import numpy

CONVERTER_VERSION = 1
"""Part of the cache key: raise it when the output changes."""

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}

_TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(source: Path, target: Path, report: Callable[[str], None]) -> None:
    """Fills the empty directory `target`. Raises `InvalidModelError`, `UnsupportedModelError`."""
    # Imported here: a worker whose model is already converted must not pay for this (about two seconds).
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
    except (ValueError, OSError, IndexError) as error:
        raise InvalidModelError(f"{source} can't be read as GGUF: {error}") from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    fields = {name: field.contents() for name, field in reader.fields.items() if _is_scalar_metadata(name)}
    config, generation = config_from_gguf(fields, _shapes(tensors), _rope_factors(tensors))
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", generation)
    _write_weights(tensors, config, target / "model.safetensors", report)
    report("converting the tokenizer")
    _write_tokenizer(source, target)


def _is_scalar_metadata(name: str) -> bool:
    """The tokenizer's arrays are long, and converted elsewhere."""
    return not name.startswith("tokenizer.") or name.endswith(("_token_id", ".chat_template"))


def _shapes(tensors: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """GGUF lists dimensions innermost first."""
    return {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in tensors.items()}


def _rope_factors(tensors: dict[str, Any]) -> list[float] | None:
    """Per-frequency divisors, as files of Llama 3.1 and later carry them."""
    tensor = tensors.get("rope_freqs.weight")
    return None if tensor is None else [float(value) for value in tensor.data]


def _write_weights(
    tensors: dict[str, Any], config: dict[str, Any], path: Path, report: Callable[[str], None]
) -> None:
    """Writes the safetensors format (an 8-byte header length, a JSON header, the data) tensor by tensor, so
    that memory holds one of them: dtypes and shapes are known before anything is dequantised."""
    import numpy as np

    weights = {name: tensor for name, tensor in tensors.items() if name != "rope_freqs.weight"}
    shapes = _shapes(weights)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in weights.items():
        dtype = _stored_dtype(tensor)
        start, end = end, end + math.prod(shapes[name]) * _ITEM_BYTES[dtype]
        header[_hf_name(name)] = {"dtype": dtype, "shape": shapes[name], "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for number, (name, tensor) in enumerate(weights.items(), 1):
            array = _values(tensor).reshape(shapes[name])
            heads = _heads_to_unpermute(name, config)
            if heads is not None:
                halves = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
                array = halves.swapaxes(1, 2).reshape(array.shape)
            file.write(np.ascontiguousarray(array).data)
            if number % 64 == 0 or number == len(weights):
                report(f"converting weights: {number} of {len(weights)} tensors")
        if file.tell() != 8 + len(encoded) + end:
            raise InvalidModelError("the GGUF file's tensors don't have the sizes it declares")


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_LEVEL:
        return f"{_TOP_LEVEL[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _IN_LAYER:
        return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.{kind}"
    raise UnsupportedModelError(f"the GGUF file holds a tensor this model family doesn't have: {name}")


def _heads_to_unpermute(name: str, config: dict[str, Any]) -> int | None:
    """GGUF files of the `llama` architecture interleave the two halves of each q and k head."""
    if config["model_type"] != "llama":
        return None
    if ".attn_q." in name:
        return int(config["num_attention_heads"])
    if ".attn_k." in name:
        return int(config["num_key_value_heads"])
    return None


def _stored_dtype(tensor: Any) -> str:
    """In safetensors' names."""
    kind = str(tensor.tensor_type.name)
    return kind if kind in ("F16", "BF16") else "F32"


def _values(tensor: Any) -> numpy.ndarray[Any, Any]:
    """Flat values in the stored dtype; bfloat16 as raw 16-bit words, which numpy has no type for."""
    import numpy as np
    from gguf import dequantize

    kind = tensor.tensor_type.name
    values: numpy.ndarray[Any, Any]
    if kind in ("F32", "F16"):
        values = tensor.data
    elif kind == "BF16":
        values = tensor.data.view(np.uint16)
    else:
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModelError(f"GGUF quantisation {kind} of {tensor.name}: {error}") from error
    return values.reshape(-1)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(source: Path, target: Path) -> None:
    """tokenizer.json and tokenizer_config.json, the chat template inside the latter."""
    # Slow to import and to run (many seconds): this is most of a conversion, and the reason for the cache.
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    if not tokenizer.is_fast:
        raise UnsupportedModelError(f"the tokenizer in {source.name} has no fast (tokenizer.json) form")
    tokenizer.save_pretrained(str(target), save_jinja_files=False)
