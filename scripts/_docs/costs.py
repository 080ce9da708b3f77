"""What a pass of a method costs: rows, and bytes that are kept. It needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from _docs.text import markdown
from unmask import Method, SamplingParams
from unmask.cache.drift import Drift
from unmask.cache.pool import kv_planes
from unmask.cli import catalog
from unmask.config import FALLBACK
from unmask.core import layout
from unmask.core.canvas import Canvas
from unmask.decoding.params import DecodeParams, SeatParams, seat_params
from unmask.engine.axes import Axes
from unmask.errors import MethodError
from unmask.methods import check_weights, leads
from unmask.models.config import ModelConfig

PROMPT, ANSWER = 512, 256
"""Positions of the canvas whose rows are counted."""
LARGE = "LLaDA-8B"
DTYPE = torch.bfloat16


@cache
def networks() -> dict[str, ModelConfig]:
    """The one that ships, and the published ones by their sizes, under the names that a table has for them."""
    directory = catalog.shipped_dir()
    assert directory is not None, "the model that ships is not in this checkout"
    ours = replace(ModelConfig.from_pretrained(directory), generation={})
    llada = replace(ours, **vars(catalog.LLADA))
    dream = replace(ours, **vars(catalog.DREAM), family="dream", logit_shift=1)
    return {catalog.SHIPPED: ours, LARGE: llada, "Dream-7B": dream}


def table(methods: Sequence[Method]) -> str:
    """Rows of a large network's passes, and bytes that are kept of a position on each network."""
    head = ["method", "first pass", "others, at most", "rows of drafts", *(f"KiB, {name}" for name in networks())]
    rows = [
        [f"`{method.name}`", *_rows(method, networks()[LARGE]), *(_kept(method, each) for each in networks().values())]
        for method in methods
    ]
    canvas = f"Rows of {LARGE}, {PROMPT} positions of prompt and {ANSWER} of answer, as recommended"
    return f"{markdown(head, rows)}\n\n{canvas}; KiB in bf16, a position in all layers."


def _rows(method: Method, config: ModelConfig) -> list[str]:
    axes, request, block_length = Axes.of(method, config), _request(method, config), _complete(method).block_length or 0
    reach = axes.frontier.reach(ANSWER, block_length, request)
    most = axes.policy.most_rows(PROMPT, ANSWER, reach, request)
    if isinstance(axes.policy, Drift):  # all of the answer goes through the first layer, and a share through the others
        shares = [max(1, int(ANSWER * ratio)) for ratio in axes.policy.ratios[1:]]
        most = round((most + sum(shares)) / config.num_layers)
    drafts = axes.drafter.num_second or axes.drafter.num_scratch
    where = " in a second pass" if axes.drafter.num_second else ""
    return [str(_first_pass(axes, request, config, block_length)), str(most), f"{drafts}{where}" if drafts else "-"]


def _complete(method: Method) -> SamplingParams:
    return method.complete(SamplingParams(max_tokens=ANSWER), {}, FALLBACK)


def _request(method: Method, config: ModelConfig) -> SeatParams:
    params = _complete(method)
    blocks_N = layout.blocks(PROMPT + ANSWER, PROMPT, params.block_length or 0)[PROMPT:]
    by_block = blocks_N.unique_consecutive(return_counts=True)[1].tolist()
    return seat_params(
        params,
        kind=method.schedule_for(config),
        masks_per_block=by_block if method.kinds[0] in ("blocks", "block-window") else [ANSWER],
        model_eos=config.eos_token_ids,
        lead=leads(method, config.logit_shift),
        seed=0,
    )


def _first_pass(axes: Axes, request: SeatParams, config: ModelConfig, block_length: int) -> int:
    """Rows that the policy wants of a canvas which nobody has looked at."""
    length, mask = PROMPT + ANSWER, config.mask_token_id
    block_N = layout.blocks(length, PROMPT, block_length)
    canvas = Canvas.empty(1, length, mask, "cpu", int(block_N.max()) + 1, axes.drafter.num_pending)
    token_N = torch.full((length,), mask, dtype=torch.int32)
    token_N[:PROMPT] = 0 if mask else 1
    canvas.place(0, token_N, prompt=PROMPT, block_N=block_N)
    params = DecodeParams(1, max(len(request.quota), len(request.fill), 1), "cpu")
    params.write(0, request)
    view = axes.frontier.advance(canvas, params)
    return int(axes.policy.rows(canvas, view.candidate_SN, params).sum())


def _kept(method: Method, config: ModelConfig) -> str:
    """KiB of one position in all layers, K and V included."""
    try:
        check_weights(method, config, allow=True)
    except MethodError:
        return "refused"
    planes: dict[str, Any] = kv_planes(config, DTYPE) | Axes.of(method, config).policy.planes(config, DTYPE)
    return f"{config.num_layers * sum(spec.num_bytes for spec in planes.values()) / 2**10:.4g}"
