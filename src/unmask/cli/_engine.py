"""The one place where the command line meets the engine; tests put a fake here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console

from unmask.config import EngineConfig
from unmask.errors import ConfigError
from unmask.methods import Method, method_named

if TYPE_CHECKING:
    from unmask.config import SamplingParams
    from unmask.engine.outputs import RequestOutput, StreamChunk

Message = dict[str, str]
Prompt = str | dict[str, Any]


class Engine(Protocol):
    """What the verbs use of `unmask.LLM`."""

    tokenizer: Any
    model: Any
    method: Method

    def generate(self, prompts: list[str], params: SamplingParams, /) -> list[RequestOutput]: ...
    def chat(self, messages: list[list[Message]], params: SamplingParams, /) -> list[RequestOutput]: ...
    def stream(self, prompt: Prompt, params: SamplingParams, /, *, canvas: bool = False) -> Iterator[StreamChunk]: ...
    def infill(
        self, text: str, params: SamplingParams, /, *, messages: list[Message] | None = None
    ) -> RequestOutput: ...


def make_llm(options: dict[str, Any]) -> Engine:
    """`unmask.LLM(**options)`; torch is imported here, and only here."""
    import torch

    from unmask import LLM

    if str(options.get("device")).startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {options['device']!r}: torch sees no CUDA GPU; `unmask doctor` says why")
    return LLM(**options)


def load_llm(options: dict[str, Any], quiet: bool = False) -> Engine:
    """The engine, with a spinner on a terminal's stderr while it loads."""
    if options.get("method") is not None:
        method_named(options["method"])  # a typo is told before anything large is imported
    EngineConfig(quantization=options.get("quantization"))  # so is this one
    console = Console(stderr=True)
    label = options.get("model") or "the model that ships"
    with nullcontext() if quiet or not console.is_terminal else console.status(f"loading {label}"):
        return make_llm(options)


def end_ids(llm: Engine, params: SamplingParams) -> frozenset[int]:
    """The ids that a viewer draws as the end of the answer."""
    if params.ignore_eos:
        return frozenset(params.stop_token_ids)
    return frozenset(llm.model.config.eos_token_ids) | frozenset(params.stop_token_ids)


def has_chat_template(llm: Engine) -> bool:
    """Whether prompts can be put into the model's own conversation format."""
    return bool(getattr(llm.tokenizer, "has_chat_template", False))


def need_chat_template(llm: Engine) -> None:
    """Raises ConfigError for a model without a conversation format."""
    if not has_chat_template(llm):
        raise ConfigError("this model has no chat template; use `unmask generate`, which takes plain text")


def as_user(text: str, before: Sequence[Message] = ()) -> list[Message]:
    """A conversation that ends with this message of the user's."""
    return [*before, {"role": "user", "content": text}]
