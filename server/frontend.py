"""What the routes share: the model's facts, the tokenizer manager, and which kind of worker this is."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from aiohttp import web

from diptych.server.chat_template import ChatTemplate
from diptych.server.errors import BadRequest, ModelNotFound
from diptych.server.manager import TokenizerManager
from diptych.server.reasoning import REASONING_FORMATS, ReasoningFormat, detect_reasoning
from diptych.server.sampling_options import Limits
from diptych.server.tokenizer import Tokenizer
from diptych.server.tools.parser import ToolParser
from diptych.server.tools.registry import TOOL_PARSERS, detect_tool_parser


class WorkerKind(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What clients are told about the model, and can't change. Its name and weights can: see `Frontend`."""

    tokenizer_path: str
    model_type: str
    architectures: list[str]
    max_total_tokens: int
    limits: Limits


@dataclass(slots=True)
class Frontend:
    kind: WorkerKind
    model: ModelFacts
    manager: TokenizerManager
    chat_template: ChatTemplate | None
    created: int
    """Unix seconds of the start."""
    find_weights: Callable[[str, str], Path]
    """From (model path, load format) to what the scheduler can load; blocks. Raises `BadRequest`."""
    bootstrap_port: int | None = None
    """Prefill: where its bootstrap service listens."""
    fault_injection: bool = False
    """Whether the scheduler can be told to inject faults."""

    @property
    def tokenizer(self) -> Tokenizer:
        return self.manager.tokenizer

    @property
    def served_name(self) -> str:
        """The name of the model for clients, now."""
        return cast("str", self.manager.config_value("served_model_name"))

    @property
    def weight_version(self) -> str:
        """The label of the weights, now."""
        return cast("str", self.manager.config_value("weight_version"))

    @property
    def model_path(self) -> str:
        """Where the weights came from, as it was asked for."""
        return cast("str", self.manager.config_value("model_path"))

    @property
    def tool_parser(self) -> type[ToolParser] | None:
        """How this engine's model writes tool calls; None if it doesn't, or nobody knows."""
        return TOOL_PARSERS.get(cast("str", self.manager.config_value("tool_call_parser")))

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """How this engine's model thinks before it answers; None if it doesn't, or nobody knows."""
        return REASONING_FORMATS.get(cast("str", self.manager.config_value("reasoning_parser")))

    def detect_parsers(self) -> None:
        """Record, for this engine alone, what its chat template says where the operator left it open. What it
        doesn't say stays `auto`, which is then none."""
        source = self.chat_template.source if self.chat_template else ""
        found: dict[str, str | None] = {}
        if self.manager.config_value("tool_call_parser") == "auto":
            found["tool_call_parser"] = detect_tool_parser(source)
        if self.manager.config_value("reasoning_parser") == "auto":
            found["reasoning_parser"] = detect_reasoning(source)
        self.manager.record_config_updates(
            "the chat template", **{name: value for name, value in found.items() if value is not None}
        )

    def check_model(self, name: str | None) -> None:
        """Raises `ModelNotFound` for another model's name; no name means ours."""
        if name is not None and name not in (self.served_name, self.model_path, "default"):
            raise ModelNotFound(
                f"the model {name!r} is not served here; {self.served_name!r} is", param="model"
            )

    def require_chat_template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise BadRequest(
                "the model has no chat template; use /v1/completions or start with --chat-template",
                param="messages",
            )
        return self.chat_template


FRONTEND = web.AppKey("frontend", Frontend)
