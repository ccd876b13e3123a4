"""Rotary position embedding: frequencies of each scaling type, and cos/sin for one step's positions.

Types: `default` (Su et al. 2021), `linear`, `llama3` (Llama 3.1 model card), `yarn` (Peng et al. 2023).
`dynamic` equals `default` up to the trained context, which is where this engine stops for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diptych.engine.models.errors import InvalidModelError, UnsupportedModelError

if TYPE_CHECKING:  # the configuration is read by processes that have no use for torch
    import torch

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The fields that one type doesn't use keep their defaults."""

    theta: float
    type: str = "default"
    factor: float = 1.0
    original_context: int = 0
    """Trained context in tokens, for `llama3` and `yarn`."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cos and sin (`yarn`)."""
    truncate: bool = True
    """`yarn`: round the ramp's ends to whole dimensions."""


def rope_from_json(config: Mapping[str, object], max_position_embeddings: int) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before).

    Raises `UnsupportedModelError` for a type not in `SUPPORTED_ROPE_TYPES`, `InvalidModelError` for a
    missing or malformed field.
    """
    merged: dict[str, object] = {}
    if config.get("rope_theta") is not None:
        merged["rope_theta"] = config["rope_theta"]
    for key in ("rope_scaling", "rope_parameters"):
        block = config.get(key)
        if block is None:
            continue
        if not isinstance(block, Mapping):
            raise InvalidModelError(f"config.json: {key} must be an object, got {block!r}")
        merged.update(block)

    def number(name: str, default: float | None = None) -> float:
        value = merged.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidModelError(f"config.json: rope parameter {name!r} must be a number, got {value!r}")
        return float(value)

    kind = merged.get("rope_type") or merged.get("type") or "default"
    if kind not in SUPPORTED_ROPE_TYPES:
        raise UnsupportedModelError(
            f"rope type {kind!r} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    if number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor other than 1 is not supported")
    theta = number("rope_theta", 10_000.0)
    if kind in ("default", "dynamic"):
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, type="linear", factor=number("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            type="llama3",
            factor=number("factor"),
            original_context=int(number("original_max_position_embeddings")),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
        )
    factor = number("factor")
    return RopeConfig(
        theta=theta,
        type="yarn",
        factor=factor,
        original_context=int(number("original_max_position_embeddings", float(max_position_embeddings))),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(
            factor,
            number("attention_factor", 0.0),
            number("mscale", 0.0),
            number("mscale_all_dim", 0.0),
        ),
        truncate=merged.get("truncate") is not False,
    )


def _yarn_attention_factor(factor: float, given: float, mscale: float, mscale_all_dim: float) -> float:
    def scaled(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    if given:
        return given
    if mscale and mscale_all_dim:
        return scaled(mscale) / scaled(mscale_all_dim)
    return scaled(1.0)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32, on the CPU."""
    import torch

    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    inv_freq = 1.0 / (rope.theta**exponent)
    if rope.type == "linear":
        return inv_freq / rope.factor
    if rope.type == "llama3":
        return _llama3(rope, inv_freq)
    if rope.type == "yarn":
        return _yarn(rope, inv_freq, head_dim)
    return inv_freq


def _llama3(rope: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    import torch

    wavelength = 2 * math.pi / inv_freq
    low = rope.original_context / rope.low_freq_factor
    high = rope.original_context / rope.high_freq_factor
    smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    scaled = torch.where(wavelength > low, inv_freq / rope.factor, inv_freq)
    return torch.where((wavelength <= low) & (wavelength >= high), between, scaled)


def _yarn(rope: RopeConfig, inv_freq: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Dimensions that rotate often keep their frequency, slow ones are divided by `factor`."""
    import torch

    def dimension_of(rotations: float) -> float:
        turns = rope.original_context / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = (high - low) or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)


class RotaryEmbedding:
    """cos and sin of a step's positions, computed once per step and shared by all layers."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._inv_freq = inverse_frequencies(rope, head_dim).to(device)
        self._scale = rope.attention_factor

    def table(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`positions` [N] → cos and *signed* sin, each [N, 1, head_dim] float32.

        The sign of rotate-half is in the sine, so that rotating is
        `x * cos + roll(x, head_dim / 2) * sin` (`PointwiseOps.rotate`).
        """
        import torch

        angles = positions.to(torch.float32).unsqueeze(1) * self._inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self._scale != 1.0:
            cos, sin = cos * self._scale, sin * self._scale
        cos = torch.cat((cos, cos), 1).unsqueeze(1)
        sin = torch.cat((-sin, sin), 1).unsqueeze(1)
        return cos, sin
