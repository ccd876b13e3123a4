"""Gates that are known only once a model is loaded, and must reach every reader of the bags alike."""

from __future__ import annotations

from diptych.common_config.accessors import get_context


def turn_off_chunked_prefix_cache(source: str, *, context_length: int) -> None:
    """For a target runner whose prefill attention can't attend to tokens of earlier steps: chunked prefill is
    off from here on, and a step takes whole prompts of up to `context_length` (the runner's own) tokens.

    An override moves no derived leaf, so the two that follow from the gate move in the same transaction."""
    get_context().override(
        source,
        disable_chunked_prefix_cache=True,
        chunked_prefill_size=-1,
        chunked_prefill_enabled=False,
        prefill_token_budget=context_length,
    )
