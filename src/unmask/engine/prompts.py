"""From what users write to requests: prompts become ids, ids a canvas, parameters numbers; what cannot be served is
refused here, before anything runs."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unmask.config import FALLBACK, SamplingParams
from unmask.core import layout
from unmask.decoding.params import seat_params
from unmask.engine.engine import Engine
from unmask.engine.request import Answer, Request
from unmask.engine.text import TextTracker
from unmask.errors import ConfigError, RequestError, TokenizerError
from unmask.methods import leads

HOLE = re.compile(r"\[\[(\d+)\]\]")

Prompt = str | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None


class Prompts:
    """Makes requests for one engine. Safe to call from several threads; nothing is queued here.

    Args:
        tokenizer: None if the model has none; then prompts are ids.
        max_model_len: most positions of a canvas.
        max_seats: a guided request takes two.
    """

    def __init__(self, engine: Engine, tokenizer: Any, *, max_model_len: int, max_seats: int) -> None:
        self.engine, self.model, self.method = engine, engine.model, engine.method
        self.tokenizer, self.max_model_len, self.max_seats = tokenizer, max_model_len, max_seats
        self._counter = itertools.count()

    def request(self, prompt: Prompt, params: SamplingParams, at: int = 0, *, request_id: str | None = None) -> Request:
        """A request for one prompt. ``at`` is its place among the prompts, for messages.

        Raises:
            RequestError: it is empty, too long, holds MASK or ids outside the vocabulary.
            ConfigError: parameters that contradict each other or the method.
            TokenizerError: it is text and there is no tokenizer, or a conversation and there is no template.
        """
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
        text = prompt if isinstance(prompt, str) else None
        return self._make(text, ids, answer, said.replace(max_tokens=len(answer)), at, request_id)

    def infill(
        self, text: str | Mapping[str, Any], params: SamplingParams, *, messages: Messages | None = None
    ) -> Request:
        """A request for the holes of a text, or of ``{"token_ids": [...]}``, in the answer to ``messages``.

        Raises:
            RequestError: no hole, a canvas over the limit, or parameters that could end it early.
        """
        ids = self._infill_ids(text)
        prompt_ids = self._chat_ids(messages, 0) if messages is not None else []
        params = params.replace(suppress_eos=True, ignore_eos=True)
        if params.stop or params.stop_token_ids:
            raise RequestError("infilling fills every hole and cannot stop early; leave stop and stop_token_ids out")
        shown = text if isinstance(text, str) else None
        return self._make(shown, prompt_ids, ids, self._complete(params.replace(max_tokens=len(ids))), 0, None)

    def watch(self, request: Request, *, canvas: bool) -> None:
        """Have its settled text told as it comes, with the whole canvas if that is asked for."""
        for answer in request.answers:
            answer.watch, answer.watch_canvas = True, canvas
            answer.tracker = answer.tracker or self._tracker(answer.params)

    # --- canvases

    def _complete(self, params: SamplingParams) -> SamplingParams:
        return self.method.complete(params, self.model.config.generation, FALLBACK)

    def _make(
        self,
        text: str | None,
        prompt_ids: list[int],
        answer_ids: list[int],
        said: SamplingParams,
        at: int,
        request_id: str | None,
    ) -> Request:
        """A request with its answers, each a canvas of its own. ``said`` is complete."""
        length = len(prompt_ids) + len(answer_ids)
        if length > self.max_model_len:
            raise RequestError(f"request {at} needs {length} positions, the limit is {self.max_model_len}")
        for name in ("suppress_token_ids", "stop_token_ids"):
            self._check_ids(list(getattr(said, name)), f"request {at}, {name}")
        if said.cfg_scale > 0 and not prompt_ids:
            raise RequestError(
                f"request {at}: cfg_scale {said.cfg_scale} compares with a masked prompt and there is none"
            )
        if said.cfg_scale > 0 and self.max_seats < 2:
            raise ConfigError("cfg_scale needs two seats; use max_num_seqs of at least 2")
        base = secrets.randbits(62) if said.seed is None else said.seed
        answers = [self._answer(index, prompt_ids, answer_ids, said, base) for index in range(said.n)]
        self.engine.check(answers[0])
        return Request(request_id or f"request-{next(self._counter)}", text, prompt_ids, answers)

    def _answer(self, index: int, prompt: list[int], answer: list[int], params: SamplingParams, seed: int) -> Answer:
        config = self.model.config
        block_N = layout.blocks(len(prompt) + len(answer), len(prompt), params.block_length or 0)[len(prompt) :]
        undecided_N = torch.tensor(answer) == config.mask_token_id
        rule = seat_params(
            params,
            kind=self.method.schedule_for(config),
            masks_per_block=block_N[undecided_N].unique_consecutive(return_counts=True)[1].tolist()
            if self.method.kinds[0] in ("blocks", "block-window")
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

    # --- prompts to ids

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
            sizes = [int(size) for size in pieces[1::2]]
            if sum(sizes) > self.max_model_len:
                raise RequestError(f"infill got holes of {sum(sizes)} tokens, the limit is {self.max_model_len}")
            ids = []
            for before, size in zip(pieces[::2], sizes):
                ids += _before_hole(tokenizer, before) + [mask] * size
            ids += list(tokenizer.encode(last)) if last else []
        self._check_ids(ids, "infill")
        if mask not in ids:
            raise RequestError("infill found no hole; write [[6]] where six tokens are to be found")
        return ids


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


def listed(given: Any, what: str) -> list[Any]:
    """``given`` as a list; RequestError if it is none."""
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise RequestError(f"{what} must be a list, got {_shown(given)}")
    return list(given)


def spread(params: Params, count: int) -> list[SamplingParams]:
    """The parameters of each of ``count`` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise ConfigError(f"sampling_params must be SamplingParams or a list of them, got {_shown(params)}")
    if len(params) != count:
        raise ConfigError(f"{len(params)} sampling_params for {count} prompts; give one, or one for each")
    return list(params)


def _ids(given: Any, what: str) -> list[int]:
    ids = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else None
    if ids is None or not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise RequestError(f"{what} must be a list of token ids (integers), got {_shown(given)}")
    return ids


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
