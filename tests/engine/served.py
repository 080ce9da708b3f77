"""The served engine step by step: requests that come and go when a test says so, and what they were told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from oracles.golden import tiny_model
from unmask import LLM, SamplingParams
from unmask.cache.pool import bytes_per_page, kv_planes
from unmask.engine.outputs import CompletionOutput
from unmask.engine.request import Answer
from unmask.engine.scoring import Model
from unmask.methods import METHODS, Method

GOLDEN = ("tiny-llada", "tiny-llada-gqa", "tiny-dream")
COMMON = {"tiny-llada": (113, 54), "tiny-llada-gqa": (272, 30), "tiny-dream": (180, 200)}
"""Tokens that a golden checkpoint likes to predict: as ends of text they do occur."""


class Ids:
    """A tokenizer whose text is ids: what a prompt before an infilled answer needs, which is a conversation."""

    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:  # noqa: ARG002
        return " ".join(map(str, ids))

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool = True) -> list[int]:  # noqa: ARG002
        return self.encode(messages[0]["content"])


@dataclass(frozen=True)
class Ask:
    """One request, and when it comes and goes."""

    prompt: tuple[int, ...]
    params: SamplingParams
    given: tuple[int | None, ...] | None = None
    """Infilling: the answer, None in its holes."""
    arrives: int = 0
    """Steps that are over when it is queued."""
    leaves: int | None = None
    """Steps that are over when it is cancelled; None: it stays."""


def bare(name: str, **changes: Any) -> Method:
    """A row of the table without its recommended sampling."""
    row = METHODS[name]
    said = {name: value for name, value in row.sampling.items() if name == "alg"}
    return Method(**{**vars(row), "sampling": said, **changes})


def load(model: str | Model, method: str | Method, **options: Any) -> LLM:
    """An engine on the CPU; a golden checkpoint, by its name, in fp64. Any attention may meet any weights."""
    network = tiny_model(model, None, torch.float64) if isinstance(model, str) else model
    said = {"max_num_seqs": 3, "allow_attention_mismatch": True, "max_model_len": 112} | options
    return LLM(model=network, method=method, tokenizer=Ids(), device="cpu", **said)


def pages(model: str, count: int) -> dict[str, int]:
    """Options of an engine whose pool has ``count`` pages (more than its seats can use it never has)."""
    config = tiny_model(model, None, torch.float64).config
    planes = kv_planes(config, torch.float64)
    return {"kv_cache_memory_bytes": (count + 1) * bytes_per_page(planes, config.num_layers)}  # and the trash page


def answer_of(llm: LLM, ask: Ask) -> Answer:
    """The request's only answer, as the door makes it."""
    if ask.given is None:
        return llm.prompts.request({"prompt_token_ids": list(ask.prompt)}, ask.params).answers[0]
    return llm.prompts.infill(text_of(llm, ask), ask.params, messages=messages_of(ask)).answers[0]


def text_of(llm: LLM, ask: Ask) -> dict[str, list[int]]:
    """What `LLM.infill` takes."""
    mask = llm.model.config.mask_token_id
    return {"token_ids": [mask if token is None else token for token in ask.given or ()]}


def messages_of(ask: Ask) -> list[dict[str, str]] | None:
    """The conversation whose template is the prompt."""
    return [{"role": "user", "content": " ".join(map(str, ask.prompt))}] if ask.prompt else None


def drive(
    llm: LLM, asks: Sequence[Ask], each_step: Callable[[list[Answer]], None] | None = None, limit: int = 2000
) -> list[Answer]:
    """Step until everybody who does not leave is done. ``each_step`` is called after every step, with all answers."""
    answers, engine, number = [answer_of(llm, ask) for ask in asks], llm.engine, 0
    coming = dict(zip(answers, asks))
    while coming or engine.busy:
        for answer, ask in list(coming.items()):
            if ask.arrives == number:
                engine.add(answer)
            if ask.leaves is not None and ask.leaves <= number:
                engine.abort(answer)
            if number >= max(ask.arrives, ask.leaves or 0):
                del coming[answer]
        engine.step()
        number += 1
        if each_step is not None:
            each_step(answers)
        assert number < limit, "somebody starves"
    return answers


def serve(llm: LLM, asks: Sequence[Ask]) -> list[CompletionOutput]:
    """The outputs of requests that all stay."""
    outputs = [answer.output for answer in drive(llm, asks)]
    return [output for output in outputs if output is not None]


def without_rows(out: CompletionOutput | None) -> tuple[Any, ...]:
    """The same tokens, committed in the same steps of as many passes."""
    assert out is not None
    return facts(replace(out, num_rows=0))


def facts(out: CompletionOutput | None) -> tuple[Any, ...]:
    """All that must not depend on how a request was served. Ask for the trajectory to have its commits among it."""
    assert out is not None
    commits = [(event.position, event.token_id, event.num_pass) for event in out.trajectory or ()]
    return (out.token_ids, out.finish_reason, out.num_forward_passes, out.num_steps, out.num_rows, commits)
