"""The whole captured step of a network of random weights, beside what the device could do at best.

Nothing is decided by the weights: every seat commits a fixed number of tokens a pass, by a schedule, while all scores
are computed. So a step of any published shape can be measured without its weights. Seats stand in the middle of a
decode; refreshes, which run other shapes, are left out here and are part of the measurements from end to end: the
policies ask whether one is due in every pass, and the seats stand where none is.

S seats, N positions, b first positions of blocks
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unmask import ops
from unmask.bench.floor import Ceilings, Cost, measure_ceilings, step_cost
from unmask.bench.names import PARTS
from unmask.bench.results import Results
from unmask.bench.shapes import ordinary_ids, random_network
from unmask.bench.timing import WARMUPS, median_seconds
from unmask.cache.policy import CachePolicy, Dual, Limits, Recompute, Tracked
from unmask.cache.pool import PagePool, kv_planes, num_pages_for
from unmask.config import SamplingParams
from unmask.core import layout
from unmask.core.canvas import Canvas
from unmask.decoding.drafter import Drafter, TwoPass
from unmask.decoding.frontier import Blocks, Frontier, Whole, Window
from unmask.decoding.params import DecodeParams, seat_params
from unmask.engine.graphs import CapturedStep
from unmask.engine.step import READBACK, Budgets, Step
from unmask.models.config import ModelConfig
from unmask.models.quantization import is_fp8, quantize_
from unmask.models.transformer import Transformer

PROMPT, ANSWER = 1024, 512
WINDOW = 16
"""Candidates of a window, and so rows that are scored."""
REPLAYS = 24


@dataclass(frozen=True)
class Kind:
    """A step that is measured: the members of its axes, and the rows of a seat."""

    name: str
    rows: int
    frontier: Callable[[], Frontier]
    policy: Callable[[int], CachePolicy]
    """For a network whose scores are shifted by so many rows."""
    drafter: Callable[[], Drafter] = Drafter
    scored: int = WINDOW
    block: int = 0
    tracks: bool = False
    """Half of its rows are tracked ones."""
    begun: bool = False
    """A position of every block is committed from the start: where nothing is, a block's first pass is a refresh."""
    undecided: int = 0
    """Positions without which there are fewer rows: it is measured before an answer has less."""

    @property
    def second_rows(self) -> int:
        """Rows of the drafter's own pass."""
        drafter = self.drafter()
        return drafter.num_second if isinstance(drafter, TwoPass) else 0


class FixedRows(CachePolicy):
    """So many rows in every pass: those that score the leftmost undecided positions."""

    def __init__(self, num_rows: int, shift: int = 0) -> None:
        self.num_rows, self.shift = num_rows, shift

    def due(self, canvas: Canvas, limits: Limits) -> Tensor:  # noqa: ARG002
        return torch.zeros_like(canvas.active_S)

    def rows(self, canvas: Canvas, candidate_SN: Tensor, limits: Limits) -> Tensor:  # noqa: ARG002
        undecided_SN = canvas.undecided_SN()
        scored_SN = undecided_SN & (undecided_SN.cumsum(1) <= self.num_rows)
        return torch.nn.functional.pad(scored_SN[:, self.shift :], (0, self.shift)) & canvas.visible_SN()


def fixed(rows: int) -> Kind:
    """A window decoded with so many rows, whichever they are: no tracking, no drafts."""
    return Kind(
        f"{rows} rows", rows, Window, lambda shift: FixedRows(rows, shift), scored=min(rows, WINDOW), undecided=rows
    )


def kinds(capacity: int = PROMPT + ANSWER, answer: int = ANSWER) -> dict[str, Kind]:
    """The steps of the named methods, by name; a canvas has ``capacity`` positions, ``answer`` of them undecided."""

    def recompute(shift: int) -> CachePolicy:  # noqa: ARG001
        return Recompute()

    def dual(shift: int) -> CachePolicy:  # noqa: ARG001
        return Dual()

    def tracked(shift: int) -> CachePolicy:
        return Tracked(shift=shift)

    named = (
        Kind("vanilla", capacity, Whole, recompute, scored=answer),
        Kind("vanilla in blocks", capacity, Blocks, recompute, scored=32, block=32),
        Kind("dual", 32, Blocks, dual, scored=32, block=32, begun=True),
        Kind("flash-cache", 128, Window, tracked, tracks=True, undecided=64),
        Kind("flash-dllm", 128, Window, tracked, TwoPass, tracks=True, undecided=64),
        fixed(142),
        fixed(128),
    )
    return {kind.name: kind for kind in named}


def cost(kind: Kind, config: ModelConfig, seats: int, keys: int, size: int, weight_size: int | None = None) -> Cost:
    """Both passes, where there are two: the second reads the weights again and scores what it searches."""
    shared: dict[str, Any] = {"seats": seats, "keys": keys, "size": size, "weight_size": weight_size}
    first = step_cost(config, rows=kind.rows, scored=kind.scored, **shared)
    drafter = kind.drafter()
    if not isinstance(drafter, TwoPass):
        return first
    rows, searched = drafter.num_second, drafter.num_search
    return first + step_cost(config, rows=rows, scored=searched, **shared)


# Seats in the middle of a decode


def make_pool(model: Transformer, seats: int, capacity: int, *, num_scratch: int = 0) -> PagePool:
    """Pages for every seat, with random numbers in them: zeros would draw less power."""
    pool = PagePool(
        kv_planes(model.config, model.head.dtype),
        num_layers=model.config.num_layers,
        num_pages=seats * num_pages_for(capacity),
        num_seats=seats,
        max_positions=capacity,
        num_scratch=num_scratch,
        device=model.head.device,
    )
    for plane in pool.planes.values():
        for layer in plane:
            layer.normal_()
    for seat in range(seats):
        pool.reserve(seat, capacity)
    return pool


def make_step(
    kind: Kind, model: Transformer, pool: PagePool, seats: int, capacity: int, *, compiled: bool = False
) -> Step:
    """A step of this kind, for the first ``seats`` of the pool; nobody sits there yet."""
    torch._dynamo.reset()  # steps share their code, and a process may compile one function for eight of them only
    drafter, device = kind.drafter(), model.head.device
    num_blocks = capacity // max(kind.block or capacity, 1) + 3
    canvas = Canvas.empty(seats, capacity, model.config.mask_token_id, device, num_blocks, drafter.num_pending)
    params = DecodeParams(seats, capacity, device)
    model.rope.reserve(capacity, device)
    policy = kind.policy(model.config.logit_shift)
    axes: dict[str, Any] = {"frontier": kind.frontier(), "policy": policy, "drafter": drafter}
    budgets = Budgets(most_rows(kind, model.config), kind.scored, refreshes=False)
    return Step(model, canvas, params, pool, budgets=budgets, **axes, compiled=compiled)


def most_rows(kind: Kind, config: ModelConfig) -> int:
    """Of a seat in the first pass: with shifted scores, rows that score candidates come to the tracked ones."""
    return kind.rows + (kind.scored if kind.tracks and config.logit_shift else 0)


def seat_all(step: Step, kind: Kind, prompt: int, answer: int, per_pass: float) -> None:
    """A request in every seat, behind its first pass. ``per_pass`` tokens are committed in each of the next ones, and
    no refresh is due in any of them."""
    config, canvas = step.model.config, step.canvas
    starts = range(0, answer, kind.block or answer)
    sizes = [min(kind.block or answer, answer - start) - kind.begun for start in starts]
    num_steps = max(math.ceil(sum(sizes) / per_pass), len(sizes))
    first_b = torch.tensor([prompt + start for start in starts]) if kind.begun else torch.zeros(0, dtype=torch.int64)
    said = SamplingParams(max_tokens=answer, decode_window=kind.scored, ignore_eos=True, steps=num_steps, gamma=0.8)
    rule = seat_params(said, kind="even", masks_per_block=sizes, model_eos=config.eos_token_ids, seed=1)
    rule = replace(rule, refresh=kind.rows // 2, track=kind.rows // 2, search=8, interval=0)
    block_N = layout.blocks(prompt + answer, prompt, kind.block)
    for seat in range(canvas.num_seats):
        token_N = ordinary_ids(config, prompt + answer, seat).int()
        begun_b = token_N[first_b]
        token_N[prompt:] = config.mask_token_id
        token_N[first_b] = begun_b
        canvas.place(seat, token_N, prompt=prompt, block_N=block_N)
        step.params.write(seat, rule)
    canvas.commit_pass_SN[:, first_b.to(canvas.device)] = 1
    canvas.pass_S.fill_(1)
    if kind.tracks:
        canvas.mass_SN.normal_()


# Measuring


def same_as_eager(step: Step, run: Callable[[], None]) -> bool:
    """Whether ``run``, a replay, decides and tells the host what the step does that is launched from the same state.

    The step stands afterwards where it stood. K and V are not put back: a pass writes those of its rows before it reads
    them, and no others.
    """
    tensors = [value for value in vars(step.canvas).values() if isinstance(value, Tensor)]
    tensors += [step.readback, step.saved_SD, step.run_SN]
    before = [value.clone() for value in tensors]
    found = []
    for each in (run, step):
        each()
        found.append([value.clone() for value in tensors if not value.is_floating_point()])
        for value, old in zip(tensors, before):
            value.copy_(old)
    return all(map(torch.equal, *found))


@torch.inference_mode()
def measure(
    kind: Kind,
    model: Transformer,
    pool: PagePool,
    ceilings: Ceilings,
    *,
    seats: int,
    prompt: int = PROMPT,
    answer: int = ANSWER,
    per_pass: float = 2.8,
    compiled: bool = False,
    kernels: str = "auto",
) -> dict[str, Any]:
    """Milliseconds of a step and of its floor, and what the seats did meanwhile, as they tell it.

    A step that did something else than it was to do (rows, commits, nobody due for a refresh), or something else than
    the same step launched eagerly, is no measurement: the row says so in ``ok``.
    """
    device, capacity = model.head.device, prompt + answer
    with ops.kernels(kernels):
        step = make_step(kind, model, pool, seats, capacity, compiled=compiled)
        run: Callable[[], None] = CapturedStep(step) if device.type == "cuda" else step
        seat_all(step, kind, prompt, answer, per_pass)
        undecided = int(step.canvas.undecided_SN().sum())
        same = same_as_eager(step, run)
        room = (answer - kind.undecided) // math.ceil(per_pass) - WARMUPS - 1
        replays = max(1, min(REPLAYS, room))
        seconds = median_seconds(run, device, replays=replays)
    told = {name: step.readback[:, column].tolist() for column, name in enumerate(READBACK)}
    weight_size = 1 if is_fp8(model) else None
    floor = cost(kind, model.config, seats, capacity, model.head.element_size(), weight_size)
    rows = sum(told["num_rows"]) / seats
    passes = int(step.canvas.pass_S[0]) - 1
    committed = (undecided - sum(told["num_undecided"])) / seats
    right = not any(told["overflow"] + told["due"]) and all(told["active"]) and committed >= 0.8 * per_pass * passes
    right &= kind.rows <= rows <= most_rows(kind, model.config) + kind.second_rows
    return {
        "kind": kind.name,
        "seats": seats,
        "rows": kind.rows,
        "second_rows": kind.second_rows,
        "scored": kind.scored,
        "keys": capacity,
        "compiled": compiled,
        "ok": bool(right and same),
        "same_as_eager": same,
        "rows_run": rows,
        "tokens_per_pass": committed / max(passes, 1),
        "ms": 1e3 * seconds,
        "floor_ms": 1e3 * floor.seconds(ceilings),
        "over_floor": seconds / floor.seconds(ceilings),
        "bound_by": floor.bound_by(ceilings),
        "bytes": floor.num_bytes,
        "flops": floor.num_flops,
        "seat_steps_per_second": seats / seconds,
    }


@torch.inference_mode()
def memory(
    kind: Kind, model: Transformer, *, seats: int, capacity: int, kernels: str = "auto", compiled: bool = False
) -> dict[str, Any]:
    """Most memory of building a pool, capturing a step and running it: weights included."""
    answer = capacity // 3
    on_gpu = model.head.is_cuda
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with ops.kernels(kernels):
        pool = make_pool(model, seats, capacity, num_scratch=kind.drafter().num_scratch)
        step = make_step(kind, model, pool, seats, capacity, compiled=compiled)
        run: Callable[[], None] = CapturedStep(step) if on_gpu else step
        seat_all(step, kind, capacity - answer, answer, 2.8)
        for _ in range(3):
            run()
    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    planes = sum(each.numel() * each.element_size() for each in pool.planes.values())
    out: dict[str, Any] = {"kind": kind.name, "seats": seats, "keys": capacity, "compiled": compiled}
    out |= {"weights_GB": weights / 1e9, "pool_GB": planes / 1e9}
    if on_gpu:
        torch.cuda.synchronize()
        out["allocated_GB"] = torch.cuda.max_memory_allocated() / 1e9
        out["reserved_GB"] = torch.cuda.max_memory_reserved() / 1e9
    return out


MEMORY = ((16, 768), (64, PROMPT + ANSWER))
"""Seats, and positions of their canvases."""
GRID_ROWS = (128, 16, 32, 64)


def cells(
    seats: Sequence[int], capacity: int, answer: int, *, compiled: bool, parts: Sequence[str]
) -> Iterator[tuple[Kind, int, bool]]:
    """What is measured, the most wanted first: kind, seats, compiled."""
    named = kinds(capacity, answer)
    targets = [("128 rows", 1), ("flash-dllm", 1), ("142 rows", 1), ("flash-cache", 1), ("128 rows", 32)]
    more = [("dual", 1), ("vanilla in blocks", 1), ("vanilla", 1), ("flash-dllm", 32)]
    if "targets" in parts:
        for name, number in targets:
            yield named[name], number, False
        for name, number in targets if compiled else ():
            yield named[name], number, True
        for name, number in more:
            yield named[name], number, False
    if "grid" in parts:
        done = targets if "targets" in parts else []
        for number in sorted(seats, key=lambda each: (each not in (1, 32), each)):
            for rows in GRID_ROWS:
                if (f"{rows} rows", number) not in done:
                    yield fixed(rows), number, False


def run(
    results: Results,
    device: torch.device | str,
    *,
    shape: str = "llada-8b",
    seats: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    prompt: int = PROMPT,
    answer: int = ANSWER,
    per_pass: float = 2.8,
    compiled: bool = False,
    kernels: str = "auto",
    quantization: str | None = None,
    seconds: float = 600,
    parts: Sequence[str] = PARTS,
    ceiling_sizes: dict[str, Any] | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Ceilings, then cell by cell. What does not fit ``seconds`` is left out, and said."""
    ends, device = time.monotonic() + seconds, torch.device(device)
    capacity = prompt + answer
    ceilings = measure_ceilings(device, **(ceiling_sizes or {}))
    results.note(ceilings=vars(ceilings), shape=shape, prompt=prompt, answer=answer, kernels=kernels, memory=[])
    model = random_network(shape, device, max_positions=capacity)
    if quantization is not None:
        quantize_(model, quantization)
        results.note(quantization=quantization)
    # Where scores are shifted no second pass verifies, and a block's first position is scored in its refresh alone.
    wanted = [
        cell
        for cell in cells(seats, capacity, answer, compiled=compiled, parts=parts)
        if not (model.config.logit_shift and (cell[0].second_rows or cell[0].name == "dual"))
    ]
    pool: PagePool | None = None
    num_scratch = TwoPass().num_scratch
    for kind, number, with_compile in wanted:
        name = f"{kind.name}, {number} seats" + (", compiled" if with_compile else "")
        if time.monotonic() > ends:
            results.leave_out(name)
            continue
        try:
            if pool is None or len(pool.page_table_SP) < number:
                del pool
                pool = make_pool(model, number, capacity, num_scratch=num_scratch)
            options: dict[str, Any] = {"prompt": prompt, "answer": answer, "per_pass": per_pass, "kernels": kernels}
            row = measure(kind, model, pool, ceilings, seats=number, compiled=with_compile, **options)
            tell(f"{name}: {row['ms']:.3f} ms, {row['over_floor']:.2f} x floor" + ("" if row["ok"] else " NOT OK"))
        except Exception as failure:  # what else there is can still be measured
            row = {
                "kind": kind.name,
                "seats": number,
                "ok": False,
                "failed": f"{type(failure).__name__}: {failure}"[:500],
            }
            tell(f"{name}: {row['failed'].splitlines()[0][:200]}")
        results.add(row)
        _tidy(device)
    del pool
    for number, length in MEMORY if "memory" in parts and time.monotonic() < ends else ():
        _tidy(device)
        length = min(length, capacity)
        found = memory(kinds(length)["flash-cache"], model, seats=number, capacity=length, kernels=kernels)
        results.note(memory=[*results.data["memory"], found])
        tell(f"memory, {number} seats of {length}: {found}")


def _tidy(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
