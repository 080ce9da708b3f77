"""`LLM`: the door. Prompts in, answers out, in vLLM's shapes."""

from __future__ import annotations

import itertools
import re
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from unmask.config import FALLBACK, EngineConfig, SamplingParams
from unmask.core import layout
from unmask.decoding.params import seat_params
from unmask.engine.engine import Engine
from unmask.engine.outputs import RequestOutput, StreamChunk
from unmask.engine.request import Answer
from unmask.engine.scoring import Model
from unmask.engine.text import TextTracker
from unmask.errors import ConfigError, EngineError, RequestError, TokenizerError
from unmask.methods import Method, leads, method_named
from unmask.models.loading import load_model, resolve_checkpoint
from unmask.models.tokenizer import Tokenizer

SHIPPED_MODEL = "unmask-mini"
FAMILY_METHOD = {"llada": "confidence", "dream": "dream"}
HOLE = re.compile(r"\[\[(\d+)\]\]")

Prompt = str | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None


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


@dataclass
class _Request:
    """One prompt on its way through the engine."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    answers: list[Answer]

    @property
    def done(self) -> bool:
        return all(answer.done for answer in self.answers)

    def output(self) -> RequestOutput:
        """The result.

        Raises:
            EngineError: a step failed in another thread; its exception is the cause.
        """
        for answer in self.answers:
            if answer.error is not None:
                raise EngineError("the pass that served this request failed; it can be sent again") from answer.error
        outputs = [answer.output for answer in self.answers if answer.output is not None]
        return RequestOutput(self.request_id, self.prompt, list(self.prompt_ids), outputs)


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
        self.model, self.tokenizer = _load(model, tokenizer, dtype, _device(device), revision)
        config = self.model.config
        chosen = method or config.generation.get("method") or FAMILY_METHOD.get(config.family, "confidence")
        self.method = chosen if isinstance(chosen, Method) else method_named(chosen)
        self.max_model_len = self.engine_config.max_model_len or config.max_positions
        if self.max_model_len > config.max_positions:
            raise ConfigError(f"max_model_len {self.max_model_len} is over the model's limit of {config.max_positions}")
        known = self.tokenizer is not None and hasattr(self.tokenizer, "unknown_ids")
        unknown = self.tokenizer.unknown_ids(config.vocab_size) if known else []
        self.engine = Engine(
            self.model,
            self.method,
            self.engine_config,
            max_model_len=self.max_model_len,
            decoder=self.tokenizer,
            unknown_ids=list(unknown),
        )
        self._lock = threading.RLock()
        self._counter = itertools.count()

    # --- what users call

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> list[RequestOutput]:
        """Answers to text prompts, or to ``{"prompt_token_ids": [...]}``; results in the order of the prompts.

        Text is encoded as it is: no chat template (see `chat`), and special tokens written in it are plain text.

        Raises:
            RequestError: a prompt is empty, too long, holds MASK or ids outside the vocabulary; nothing has run.
            ConfigError: parameters that contradict each other or the method.
        """
        listed = [prompts] if isinstance(prompts, (str, Mapping)) else _listed(prompts, "prompts")
        params = _spread(sampling_params, len(listed))
        return self._run([self._request(*pair, at) for at, pair in enumerate(zip(listed, params))])

    def chat(self, messages: Messages | Sequence[Messages], sampling_params: Params = None) -> list[RequestOutput]:
        """The assistant's next message to one conversation, or to each of a list of them.

        A conversation is a list of ``{"role": ..., "content": ...}``; message text is never parsed for special tokens.

        Raises:
            TokenizerError: the model has no chat template.
        """
        listed = _listed(messages, "messages")
        several = bool(listed) and not isinstance(listed[0], Mapping)
        conversations = listed if several else [listed]
        return self.generate([{"messages": each} for each in conversations], sampling_params)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, canvas: bool = False
    ) -> Iterator[StreamChunk]:
        """One answer as it settles. ``prompt`` is text, ``{"prompt_token_ids": ...}`` or ``{"messages": ...}``.

        Deltas are append-only and join to the final text; with ``canvas`` there is a chunk for every pass, with the
        whole answer as it stands. The last chunk carries the `RequestOutput`. Closing the iterator frees the seat.
        """
        request = self._request(prompt, sampling_params or SamplingParams(), 0)
        for answer in request.answers:
            answer.watch, answer.watch_canvas = True, canvas
            answer.tracker = answer.tracker or self._tracker(answer.params)
        return self._chunks(request, every=canvas)

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
        ids = self._infill_ids(text)
        prompt_ids = self._chat_ids(messages, 0) if messages is not None else []
        params = (sampling_params or SamplingParams()).replace(suppress_eos=True, ignore_eos=True)
        if params.stop or params.stop_token_ids:
            raise RequestError("infilling fills every hole and cannot stop early; leave stop and stop_token_ids out")
        shown = text if isinstance(text, str) else None
        said = self._complete(params.replace(max_tokens=len(ids)))
        return self._run([self._admit(shown, prompt_ids, ids, said, 0)])[0]

    # --- prompts to canvases

    def _request(self, prompt: Prompt, params: SamplingParams, at: int) -> _Request:
        text = prompt if isinstance(prompt, str) else None
        ids = self._prompt_ids(prompt, at)
        self._check_prompt(ids, at)
        room = self.max_model_len - len(ids)
        if room < 1:
            raise RequestError(
                f"prompt {at} has {len(ids)} tokens and the limit is {self.max_model_len} for prompt and answer "
                "together; shorten it or raise max_model_len"
            )
        said = self._complete(params)
        wanted = said.max_tokens or room
        if params.max_tokens is not None and wanted > room:
            raise RequestError(
                f"prompt {at} has {len(ids)} tokens and max_tokens is {wanted}: {len(ids) + wanted} positions, "
                f"the limit is {self.max_model_len}; ask for at most {room}"
            )
        answer = [self.model.config.mask_token_id] * min(wanted, room)
        return self._admit(text, ids, answer, said.replace(max_tokens=len(answer)), at)

    def _complete(self, params: SamplingParams) -> SamplingParams:
        return self.method.complete(params, self.model.config.generation, FALLBACK)

    def _admit(
        self, text: str | None, prompt_ids: list[int], answer_ids: list[int], said: SamplingParams, at: int
    ) -> _Request:
        """A request with its answers, each a canvas of its own; nothing is queued yet. ``said`` is complete."""
        length = len(prompt_ids) + len(answer_ids)
        if length > self.max_model_len:
            raise RequestError(f"request {at} needs {length} positions, the limit is {self.max_model_len}")
        for name in ("suppress_token_ids", "stop_token_ids"):
            self._check_ids(list(getattr(said, name)), f"request {at}, {name}")
        if said.cfg_scale > 0 and not prompt_ids:
            raise RequestError(
                f"request {at}: cfg_scale {said.cfg_scale} compares with a masked prompt and there is none"
            )
        if said.cfg_scale > 0 and self.engine_config.max_num_seqs < 2:
            raise ConfigError("cfg_scale needs two seats; use max_num_seqs of at least 2")
        base = secrets.randbits(62) if said.seed is None else said.seed
        make = [self._answer(index, prompt_ids, answer_ids, said, base) for index in range(said.n)]
        return _Request(f"request-{next(self._counter)}", text, prompt_ids, make)

    def _answer(self, index: int, prompt: list[int], answer: list[int], params: SamplingParams, seed: int) -> Answer:
        config = self.model.config
        block_N = layout.blocks(len(prompt) + len(answer), len(prompt), params.block_length or 0)[len(prompt) :]
        undecided_N = torch.tensor(answer) == config.mask_token_id
        rule = seat_params(
            params,
            kind=self.method.schedule_for(config),
            masks_per_block=block_N[undecided_N].unique_consecutive(return_counts=True)[1].tolist()
            if self.method.frontier == "blocks"
            else [int(undecided_N.sum())],
            model_eos=config.eos_token_ids,
            lead=leads(self.method, config.logit_shift),
            seed=(seed + index * 0x9E3779B9) % (1 << 62),
        )
        tracker = self._tracker(params) if params.stop else None
        return Answer(index, prompt, answer, params.block_length or 0, params, rule, tracker)

    def _tracker(self, params: SamplingParams) -> TextTracker | None:
        if self.tokenizer is None:
            if params.stop:
                raise TokenizerError("stop strings need a tokenizer and this model has none; use stop_token_ids")
            return None
        return TextTracker(
            self.tokenizer,
            params.stop,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def _prompt_ids(self, prompt: Any, at: int) -> list[int]:
        if isinstance(prompt, str):
            return list(self._need_tokenizer(f"prompt {at} is text").encode(prompt))
        if not isinstance(prompt, Mapping) or len(prompt) != 1 or not set(prompt) <= {"prompt_token_ids", "messages"}:
            raise RequestError(
                f"prompt {at} must be text, {{'prompt_token_ids': [...]}} or {{'messages': [...]}}, "
                f"got {_shown(prompt)}"
            )
        if "messages" in prompt:
            return self._chat_ids(prompt["messages"], at)
        return _ids(prompt["prompt_token_ids"], f"prompt {at}")

    def _chat_ids(self, messages: Messages, at: int) -> list[int]:
        tokenizer = self._need_tokenizer(f"conversation {at} is text")
        if not tokenizer.has_chat_template:
            raise TokenizerError("this model has no chat template; use generate() with the text it expects")
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))

    def _need_tokenizer(self, why: str) -> Any:
        if self.tokenizer is None:
            raise TokenizerError(f"{why} and this model has no tokenizer; give {{'prompt_token_ids': [...]}}")
        return self.tokenizer

    def _check_prompt(self, ids: list[int], at: int) -> None:
        if not ids:
            raise RequestError(f"prompt {at} is empty; give at least one token")
        self._check_ids(ids, f"prompt {at}")
        if (mask := self.model.config.mask_token_id) in ids:
            raise RequestError(
                f"prompt {at} holds the MASK token ({mask}) at position {ids.index(mask)}; use infill() to fill holes"
            )

    def _check_ids(self, ids: list[int], what: str) -> None:
        vocab_size = self.model.config.vocab_size
        bad = next((place for place, token in enumerate(ids) if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise RequestError(f"{what}: id {ids[bad]} at position {bad} is outside the vocabulary of {vocab_size}")

    def _infill_ids(self, text: str | Mapping[str, Any]) -> list[int]:
        mask = self.model.config.mask_token_id
        if isinstance(text, Mapping):
            ids = _ids(text.get("token_ids"), "infill token_ids")
        else:
            tokenizer = self._need_tokenizer("infill() got text")
            *pieces, last = HOLE.split(text)  # text, hole size, text, hole size, ..., text
            ids = []
            for before, size in zip(pieces[::2], pieces[1::2]):
                ids += _before_hole(tokenizer, before) + [mask] * int(size)
            ids += list(tokenizer.encode(last)) if last else []
        self._check_ids(ids, "infill")
        if mask not in ids:
            raise RequestError("infill found no hole; write [[6]] where six tokens are to be found")
        return ids

    # --- running

    def _queue(self, requests: list[_Request]) -> None:
        with self._lock:
            for request in requests:
                for answer in request.answers:
                    self.engine.add(answer)

    def _run(self, requests: list[_Request]) -> list[RequestOutput]:
        self._queue(requests)
        try:
            for request in requests:
                while self._advance(request):
                    pass
            return [request.output() for request in requests]
        finally:
            self._forget(requests)

    def _advance(self, request: _Request) -> bool:
        """One step, unless the request is done; whether a step was taken.

        The step serves everybody who is seated, so threads that wait for their own requests carry each other's.
        """
        with self._lock:
            if request.done:
                return False
            try:
                self.engine.step()
            except BaseException as error:
                self._fail(error)
                raise
            return True

    def _fail(self, error: BaseException) -> None:
        """A step broke off in the middle: nobody's canvas can be trusted, so everybody is told."""
        for answer in [*self.engine.scheduler.running, *self.engine.scheduler.waiting]:
            answer.error = error
            self.engine.abort(answer)

    def _forget(self, requests: list[_Request]) -> None:
        with self._lock:
            for request in requests:
                for answer in request.answers:
                    if not answer.done:
                        self.engine.abort(answer)

    def _chunks(self, request: _Request, *, every: bool) -> Iterator[StreamChunk]:
        self._queue([request])
        held: StreamChunk | None = None  # the last chunk carries the result, so one is kept back
        try:
            while self._advance(request):
                for chunk in _drain(request):
                    if chunk.delta or chunk.token_ids or every:
                        if held is not None:
                            yield held
                        held = chunk
            yield replace(held or StreamChunk(0, ""), output=request.output())
        finally:
            self._forget([request])


def _before_hole(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text that a hole follows, cut as they would be if a number or a word came next.

    What follows can decide where a token ends: a space may belong to the token before a digit, and then the text alone
    gives tokens that the model never saw. Of the cuts that end where the text ends, the one with the fewest tokens.
    """
    if not text:
        return []
    cuts = [list(tokenizer.encode(text))]
    for probe in ("0", "a"):
        *head, last = tokenizer.encode(text + probe)
        whole = tokenizer.decode(head, skip_special_tokens=False) == text
        if whole and tokenizer.decode([last], skip_special_tokens=False) == probe:
            cuts.append(head)
    return min(cuts, key=len)


def _drain(request: _Request) -> Iterator[StreamChunk]:
    for answer in request.answers:
        while answer.chunks:
            yield answer.chunks.popleft()


def _load(
    model: str | Path | Model | None,
    tokenizer: Any,
    dtype: str | torch.dtype,
    device: torch.device,
    revision: str | None,
) -> tuple[Model, Any]:
    """The network, and its tokenizer if there is one."""
    if model is not None and not isinstance(model, (str, Path)):
        return model, tokenizer
    directory = resolve_checkpoint(model or SHIPPED_MODEL, revision)
    network = load_model(directory, dtype=dtype, device=device)
    if isinstance(tokenizer, (str, Path)):
        tokenizer = Tokenizer.from_pretrained(resolve_checkpoint(tokenizer, None))
    return network, tokenizer if tokenizer is not None else Tokenizer.from_pretrained(directory)


def _listed(given: Any, what: str) -> list[Any]:
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise RequestError(f"{what} must be a list, got {_shown(given)}")
    return list(given)


def _spread(params: Params, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise ConfigError(f"sampling_params must be SamplingParams or a list of them, got {_shown(params)}")
    if len(params) != count:
        raise ConfigError(f"{len(params)} sampling_params for {count} prompts; give one, or one for each")
    return list(params)


def _ids(given: Any, what: str) -> list[int]:
    listed = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else None
    if listed is None or not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
        raise RequestError(f"{what} must be a list of token ids (integers), got {_shown(given)}")
    return listed


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
