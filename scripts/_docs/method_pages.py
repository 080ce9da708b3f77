"""What a page of docs/methods tells from the code: settings, options, rows, bytes. A table is a head and its rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from unmask import METHODS, Method, SamplingParams
from unmask.cache.drift import Drift
from unmask.cache.pool import kv_planes
from unmask.cli import catalog
from unmask.cli.options import field_docs
from unmask.config import FALLBACK
from unmask.core import layout
from unmask.core.canvas import Canvas
from unmask.decoding.params import DecodeParams, SeatParams, seat_params
from unmask.engine.axes import Axes
from unmask.errors import MethodError
from unmask.methods import _ALLOWED, check_weights, leads
from unmask.models.config import ModelConfig

Table = tuple[list[str], list[list[str]]]
PROMPT, ANSWER = 512, 256
"""Positions of the canvas whose rows are counted."""
RULES = ("steps", "threshold", "factor", "entropy_bound")
OF_A_SCHEDULE = ("steps", "alg", "remasking")
DTYPE = torch.bfloat16
NAMES = re.compile(r"<!-- begin method-settings((?: [\w-]+)+) -->")


def pages(folder: Path) -> dict[str, Path]:
    """The page of each method: the one whose table of settings names it."""
    found = {page: NAMES.search(page.read_text(encoding="utf-8")) for page in sorted(folder.glob("*.md"))}
    return {name: page for page, names in found.items() if names for name in names[1].split()}


def rows_of(names: Sequence[str]) -> list[Method]:
    """The rows with these names; a page may name none that is gone."""
    if gone := [name for name in names if name not in METHODS]:
        raise SystemExit(f"no method is called {', '.join(gone)}; a page of docs/methods names it")
    return [METHODS[name] for name in names]


# --- what may be said


def settings(methods: Sequence[Method]) -> Table:
    """The request fields that decide how these methods run, and what each row recommends."""
    wanted = {name for method in methods for name in _fields(method)}
    docs = field_docs(SamplingParams)
    names = [field.name for field in fields(SamplingParams) if field.name in wanted]
    rows = [[f"`{name}`", *(_default(method, name) for method in methods), docs[name]] for name in names]
    return ["field", *_columns(methods), "what it does"], rows


def _fields(method: Method) -> set[str]:
    """What its members read, what it recommends, and what its schedule reads if it has no rule."""
    scheduled = not any(name in method.sampling for name in RULES)
    more = (*OF_A_SCHEDULE, *(() if method.schedule == "even" else ("eps",))) if scheduled else ()
    return {*method.reads, *method.sampling, *more}


def _default(method: Method, name: str) -> str:
    if name not in _fields(method):
        return "not read"
    return f"`{method.sampling[name]}`" if name in method.sampling else "-"


def _columns(methods: Sequence[Method]) -> list[str]:
    return ["default"] if len(methods) == 1 else [f"`{method.name}`" for method in methods]


def options(methods: Sequence[Method]) -> Table:
    """What a row sets for all its requests; no rows, if there is nothing to set."""
    names = list(dict.fromkeys(name for method in methods for name in method.all_options))
    rows = [[f"`{name}`", *(_option(method, name) for method in methods), _allowed(name)] for name in names]
    return ["option", *_columns(methods), "may be"], rows


def _option(method: Method, name: str) -> str:
    return f"`{method.all_options[name]}`" if name in method.all_options else "not read"


def _allowed(name: str) -> str:
    allowed = _ALLOWED[name]
    if isinstance(allowed, tuple):
        return ", ".join(f"`{word}`" for word in allowed)
    return f"{allowed:g} to 1" if isinstance(allowed, float) else f"an integer from {allowed} on"


# --- what a pass costs


@dataclass(frozen=True)
class Network:
    """Sizes of a network, under the name that a table has for it."""

    name: str
    config: ModelConfig


@cache
def networks() -> tuple[Network, ...]:
    """The one that ships, and the published ones by their sizes."""
    directory = catalog.shipped_dir()
    assert directory is not None, "the model that ships is not in this checkout"
    ours = replace(ModelConfig.from_pretrained(directory), generation={})
    llada = replace(ours, **vars(catalog.LLADA))
    dream = replace(ours, **vars(catalog.DREAM), family="dream", logit_shift=1)
    return Network(catalog.SHIPPED, ours), Network("LLaDA-8B", llada), Network("Dream-7B", dream)


def costs(methods: Sequence[Method]) -> Table:
    """Rows of LLaDA-8B's passes, and bytes that are kept of a position on each network."""
    every = networks()
    head = ["method", "first pass", "others, at most", "rows of drafts", *(f"KiB, {each.name}" for each in every)]
    return head, [
        [f"`{method.name}`", *_rows(method, every[1].config), *(_kept(method, each.config) for each in every)]
        for method in methods
    ]


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
