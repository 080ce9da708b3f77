"""`LLM`: the door. Prompts in, answers out, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unmask import ops
from unmask.config import EngineConfig, SamplingParams
from unmask.engine.engine import Engine
from unmask.engine.outputs import RequestOutput, StreamChunk
from unmask.engine.prompts import Messages, Params, Prompt, Prompts, listed, spread
from unmask.engine.request import Request
from unmask.engine.scoring import Model
from unmask.engine.stepper import Stepper
from unmask.errors import ConfigError
from unmask.methods import Method, method_named
from unmask.models.config import ModelConfig
from unmask.models.loading import BUILT_IN, load_model, resolve_checkpoint
from unmask.models.tokenizer import Tokenizer

SHIPPED_MODEL = "unmask-mini"
FAMILY_METHOD = {"llada": "confidence", "dream": "dream"}
BLOCK_CAUSAL_METHOD = "d2f"


def default_method(config: ModelConfig) -> str:
    """The method of a model for which nobody names one: what its checkpoint recommends, else one that its attention
    was trained for, else its family's."""
    if recommended := config.generation.get("method"):
        return str(recommended)
    if config.attention == "block_causal":
        return BLOCK_CAUSAL_METHOD
    return FAMILY_METHOD.get(config.family, "confidence")


def _device(device: str | torch.device) -> torch.device:
    """The device, proven to be there.

    Raises:
        ConfigError: torch does not know it, or finds none of its kind.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {str(device)!r} cannot be used ({reason}); use 'cpu', 'cuda' or 'auto'") from error
    return found


class LLM:
    """A diffusion language model, ready to write.

    >>> llm = LLM()                                  # the model that ships with the package
    >>> llm = LLM("GSAI-ML/LLaDA-1.5", dtype="bfloat16", device="cuda")
    >>> llm.generate("...", SamplingParams(max_tokens=64))[0].outputs[0].text

    ``model`` is a hub id, a directory, or a network that is already there; ``method`` a name of `unmask.methods` or a
    `Method` of your own; None takes what the checkpoint recommends. Further keywords are `EngineConfig`'s. Safe to call
    from several threads: their requests share the batch.

    Raises:
        CheckpointError: the model cannot be loaded.
        ConfigError: an unknown method or option.
    """

    def __init__(
        self,
        model: str | Path | Model | None = None,
        *,
        method: str | Method | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        revision: str | None = None,
        tokenizer: Any = None,
        **engine: Any,
    ) -> None:
        self.engine_config = EngineConfig(**engine)
        quantization = self.engine_config.quantization
        self.model, self.tokenizer, checkpoint = _load(model, tokenizer, dtype, _device(device), revision, quantization)
        config = self.model.config
        chosen = method or default_method(config)
        self.method = chosen if isinstance(chosen, Method) else method_named(chosen)
        self.max_model_len = self.engine_config.max_model_len or config.max_positions
        if self.max_model_len > config.max_positions:
            raise ConfigError(f"max_model_len {self.max_model_len} is over the model's limit of {config.max_positions}")
        known = self.tokenizer is not None and hasattr(self.tokenizer, "unknown_ids")
        unknown = self.tokenizer.unknown_ids(config.vocab_size) if known else []
        with ops.on(self.model.head.device):
            self.engine = Engine(
                self.model,
                self.method,
                self.engine_config,
                max_model_len=self.max_model_len,
                decoder=self.tokenizer,
                unknown_ids=list(unknown),
                checkpoint=checkpoint,
            )
        self.stepper = Stepper(self.engine)
        self.prompts = Prompts(
            self.engine,
            self.tokenizer,
            max_model_len=self.max_model_len,
            max_seats=self.engine_config.max_num_seqs,
        )

    # --- what users call

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> list[RequestOutput]:
        """Answers to text prompts, or to ``{"prompt_token_ids": [...]}``; results in the order of the prompts.

        Text is encoded as it is: no chat template (see `chat`), and special tokens written in it are plain text.

        Raises:
            RequestError: a prompt is empty, too long, holds MASK or ids outside the vocabulary; nothing has run.
            ConfigError: parameters that contradict each other or the method.
        """
        several = [prompts] if isinstance(prompts, (str, Mapping)) else listed(prompts, "prompts")
        params = spread(sampling_params, len(several))
        return self._run([self.prompts.request(*pair, at) for at, pair in enumerate(zip(several, params))])

    def chat(self, messages: Messages | Sequence[Messages], sampling_params: Params = None) -> list[RequestOutput]:
        """The assistant's next message to one conversation, or to each of a list of them.

        A conversation is a list of ``{"role": ..., "content": ...}``; message text is never parsed for special tokens.

        Raises:
            TokenizerError: the model has no chat template.
        """
        given = listed(messages, "messages")
        several = bool(given) and not isinstance(given[0], Mapping)
        conversations = given if several else [given]
        return self.generate([{"messages": each} for each in conversations], sampling_params)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, canvas: bool = False
    ) -> Iterator[StreamChunk]:
        """One answer as it settles. ``prompt`` is text, ``{"prompt_token_ids": ...}`` or ``{"messages": ...}``.

        Deltas are append-only and join to the final text; with ``canvas`` there is a chunk for every pass, with the
        whole answer as it stands. The last chunk carries the `RequestOutput`. Closing the iterator frees the seat.
        """
        request = self.prompts.request(prompt, spread(sampling_params, 1)[0])
        self.prompts.watch(request, canvas=canvas)
        return self._chunks(request)

    def infill(
        self,
        text: str | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
    ) -> RequestOutput:
        """``text`` with its holes filled. ``[[6]]`` is a hole of six tokens; everything else stays as it is.

        With ``messages`` the text is the assistant's answer to that conversation. ``{"token_ids": [...]}`` takes ids,
        MASK marking the holes. Ends of text are never predicted: the length is given.

        Raises:
            RequestError: no hole, or a canvas over the limit.
        """
        return self._run([self.prompts.infill(text, spread(sampling_params, 1)[0], messages=messages)])[0]

    # --- running

    def _run(self, requests: list[Request]) -> list[RequestOutput]:
        try:
            self.stepper.add(requests)
            for request in requests:
                while self.stepper.step([request]):
                    pass
            return [request.output() for request in requests]
        finally:
            self.stepper.drop(requests)

    def _chunks(self, request: Request) -> Iterator[StreamChunk]:
        try:
            self.stepper.add([request])
            finished = False
            while not finished:
                self.stepper.step([request])
                for chunk in request.news():
                    finished = chunk.finished
                    yield chunk
        finally:
            self.stepper.drop([request])


def _load(
    model: str | Path | Model | None,
    tokenizer: Any,
    dtype: str | torch.dtype,
    device: torch.device,
    revision: str | None,
    quantization: str | None,
) -> tuple[Model, Any, Path | None]:
    """The network, its tokenizer if there is one, and its directory if that is its user's and not the package's."""
    if model is not None and not isinstance(model, (str, Path)):
        if quantization is not None:
            raise ConfigError(
                f"quantization={quantization!r} is for a checkpoint that is loaded; a network that is already there is "
                "quantised with unmask.models.quantization.quantize_"
            )
        return model, tokenizer, None
    source = model or SHIPPED_MODEL
    directory = resolve_checkpoint(source, revision)
    with ops.on(device):
        network = load_model(directory, dtype=dtype, device=device, quantization=quantization)
    if isinstance(tokenizer, (str, Path)):
        tokenizer = Tokenizer.from_pretrained(resolve_checkpoint(tokenizer, None))
    tokenizer = tokenizer if tokenizer is not None else Tokenizer.from_pretrained(directory)
    return network, tokenizer, None if source in BUILT_IN else directory
