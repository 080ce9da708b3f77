"""Builds fixed-shape steps for tests: requests in the rule's terms, placed into the seats of one canvas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from unmask.cache.policy import BlockCausal, CachePolicy, Dual, Recompute
from unmask.cache.pool import PagePool, kv_planes, num_pages_for
from unmask.config import SamplingParams
from unmask.core import layout
from unmask.core.canvas import Canvas
from unmask.decoding.drafter import Drafter, Nested, TwoPass
from unmask.decoding.frontier import Blocks, Frontier, Pipeline, Whole
from unmask.decoding.params import DecodeParams, Needs, SeatParams, seat_params
from unmask.engine.step import READBACK, Budgets, Step
from unmask.models.transformer import Transformer


@dataclass(frozen=True)
class Case:
    """One request of fixed shape."""

    prompt: Sequence[int]
    length: int
    block_length: int
    params: SeatParams

    @property
    def size(self) -> int:
        return len(self.prompt) + self.length


def case(prompt: Sequence[int], params: SamplingParams, eos: tuple[int, ...] = (), **more: Any) -> Case:
    """A request from sampling parameters; ``more`` sets the rule's own fields."""
    assert params.max_tokens is not None
    block = params.block_length or params.max_tokens
    sizes = [min(block, params.max_tokens - start) for start in range(0, params.max_tokens, block)]
    rule = seat_params(params, kind="even", masks_per_block=sizes, model_eos=eos, seed=params.seed or 0)
    return Case(prompt, params.max_tokens, params.block_length or 0, replace(rule, **more))


def d2f(prompt: Sequence[int], settings: dict[str, Any]) -> Case:
    """A D2F request as the reference runs it: whole blocks only, a strict threshold."""
    block = settings["block_size"]
    alg = {"neg_entropy": "entropy", "margin_confidence": "topk_margin"}.get(settings.get("sampling_strategy"))
    said = SamplingParams(
        max_tokens=settings["max_new_tokens"] // block * block,
        block_length=block,
        threshold=settings["skip_threshold"],
        alg=alg,
    )
    return case(
        prompt,
        said,
        (settings["eos_token_id"],),
        strict=True,
        drains=True,
        tau_add=settings["block_add_threshold"],
        tau_act=settings["decoded_token_threshold"],
    )


def make_step(
    model: Transformer,
    cases: Sequence[Case],
    *,
    seats: int | None = None,
    frontier: Frontier | None = None,
    policy: CachePolicy | None = None,
    drafter: Drafter | None = None,
    needs: Needs | None = None,
    fixed: bool = True,
) -> Step:
    """A step with the cases in seats 0, 1, ...; further seats stay empty."""
    seats = seats or len(cases) + sum(each.params.guidance > 0 for each in cases)
    device = model.head.device
    capacity = max(each.size for each in cases)
    num_blocks = 2 + max(each.length // max(each.block_length, 1) for each in cases) + 1
    mask = model.config.mask_token_id
    drafter = drafter or Drafter()
    canvas = Canvas.empty(seats, capacity, mask, device, num_blocks, drafter.num_pending)
    params = DecodeParams(
        seats, max(1, *(max(len(each.params.quota), len(each.params.fill)) for each in cases)), device
    )
    pool = make_pool(model, seats, capacity, drafter.num_scratch)
    model.rope.reserve(capacity, device)
    step = Step(
        model,
        canvas,
        params,
        pool,
        budgets=Budgets(capacity, capacity) if fixed else None,
        frontier=frontier or Blocks(),
        policy=policy or Recompute(),
        drafter=drafter,
    )
    for seat, each in zip(seats_of(cases), cases):
        place(step, seat, each)
    if needs is not None:
        params.needs = needs
    return step


def make_pool(model: Transformer, seats: int, capacity: int, num_scratch: int = 0) -> PagePool:
    """A pool in which every seat has all its pages, and its neighbours' lie between them."""
    planes, pages = kv_planes(model.config, model.head.dtype), num_pages_for(capacity)
    pool = PagePool(
        planes,
        num_layers=model.config.num_layers,
        num_pages=seats * pages,
        num_seats=seats,
        max_positions=capacity,
        num_scratch=num_scratch,
        device=model.head.device,
    )
    for seat in range(seats):
        assert pool.reserve(seat, capacity)
    shuffled = torch.randperm(seats * pages, generator=torch.Generator().manual_seed(capacity)) + 1
    pool.page_table_SP.copy_(shuffled.view(seats, pages))
    return pool


def seats_of(cases: Sequence[Case]) -> list[int]:
    """Where each request sits: one after the other, a guided one beside its twin."""
    seats, free = [], 0
    for each in cases:
        seats.append(free)
        free += 2 if each.params.guidance > 0 else 1
    return seats


def place(step: Step, seat: int, each: Case) -> None:
    """Admit a request into a free seat, in place."""
    needs = step.params.needs
    length = each.size
    token_N = torch.tensor([*each.prompt, *[step.canvas.mask_token_id] * each.length], dtype=torch.int32)
    block_N = layout.blocks(length, len(each.prompt), each.block_length)
    step.canvas.place(seat, token_N, prompt=len(each.prompt), block_N=block_N)
    if each.params.guidance > 0:  # the twin sits in the next seat
        step.canvas.place(seat + 1, token_N, prompt=len(each.prompt), block_N=block_N, leader=seat)
    step.params.write(seat, each.params, twin=seat + 1 if each.params.guidance > 0 else -1)
    step.params.needs |= needs


@dataclass(frozen=True)
class Result:
    """An answer, its steps, and the own pass of every commit."""

    token_ids: list[int]
    num_passes: int
    commit_pass: list[int]


def result(step: Step, seat: int, each: Case) -> Result:
    start, end = len(each.prompt), int(step.canvas.end_S[seat])
    row = step.canvas.token_SN[seat, start:end].tolist()
    return Result(row, int(step.canvas.pass_S[seat]), step.canvas.commit_pass_SN[seat, start:end].tolist())


@torch.inference_mode()
def run(step: Step, cases: Sequence[Case], limit: int = 400) -> list[Result]:
    """Step until every seat is done."""
    for _ in range(limit):
        if not bool(step.canvas.active_S.any()):
            return [result(step, seat, each) for seat, each in zip(seats_of(cases), cases)]
        step()
        assert not step.readback[:, READBACK.index("overflow")].any(), "a budget overflowed"
    raise AssertionError(f"unfinished after {limit} steps")


__all__ = ["BlockCausal", "Blocks", "Case", "Dual", "Nested", "Pipeline", "Result", "TwoPass", "Whole", "case", "d2f"]
__all__ += ["make_step", "place", "result", "run", "seats_of"]
