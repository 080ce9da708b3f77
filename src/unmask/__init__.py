"""unmask: an engine for diffusion language models.

>>> from unmask import LLM, SamplingParams
>>> LLM().chat([{"role": "user", "content": "..."}])[0].outputs[0].text
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unmask._version import __version__
from unmask.config import EngineConfig, SamplingParams
from unmask.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    MethodError,
    MissingDependencyError,
    RequestError,
    TokenizerError,
    UnmaskError,
)
from unmask.methods import METHODS, Method

if TYPE_CHECKING:
    from unmask.engine.async_engine import AsyncEngine
    from unmask.engine.llm import LLM
    from unmask.engine.outputs import CanvasCell, CommitEvent, CompletionOutput, RequestOutput, StreamChunk

__all__ = [
    "LLM",
    "METHODS",
    "AsyncEngine",
    "CanvasCell",
    "CheckpointError",
    "CommitEvent",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineError",
    "Method",
    "MethodError",
    "MissingDependencyError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StreamChunk",
    "TokenizerError",
    "UnmaskError",
    "__version__",
]

# These need torch, whose import takes seconds; `unmask --help` must not pay for it.
_LAZY = {
    "LLM": "unmask.engine.llm",
    "AsyncEngine": "unmask.engine.async_engine",
    "CanvasCell": "unmask.engine.outputs",
    "CommitEvent": "unmask.engine.outputs",
    "CompletionOutput": "unmask.engine.outputs",
    "RequestOutput": "unmask.engine.outputs",
    "StreamChunk": "unmask.engine.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'unmask' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
