"""Is a step one program? Capture it, compare replay with eager step by step, count its kernels and time its parts.

S seats, N positions
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unmask.bench.environment import environment
from unmask.cache.policy import BlockCausal, CachePolicy, Dual, Recompute, Tracked
from unmask.cache.pool import PagePool, kv_planes, num_pages_for
from unmask.config import SamplingParams
from unmask.core import layout
from unmask.core.canvas import Canvas
from unmask.core.rows import RowPlan
from unmask.decoding.drafter import Drafter, Nested, TwoPass
from unmask.decoding.frontier import Blocks, Frontier, Pipeline, Window
from unmask.decoding.one_pass import OnePass
from unmask.decoding.params import DecodeParams, Needs, seat_params
from unmask.engine.graphs import CapturedStep, Readback
from unmask.engine.step import READBACK, Budgets, Step
from unmask.models.config import ModelConfig
from unmask.models.transformer import Transformer
from unmask.ops import LogitStats

BLOCK = 16
ALL_NEEDS = Needs(**dict.fromkeys(vars(Needs()), True) | {"guided": False})  # drafters refuse guidance
LEAN = Needs()


@dataclass(frozen=True)
class Kind:
    """One composition of the axes."""

    name: str
    frontier: Callable[[], Frontier]
    policy: Callable[[], CachePolicy]
    drafter: Callable[[], Drafter] = Drafter


KINDS = (
    Kind("blocks", Blocks, Recompute),
    Kind("window", Window, Recompute),
    Kind("pipeline", Pipeline, BlockCausal),
    Kind("nested", Blocks, Dual, lambda: Nested(num_drafts=3, block_width=BLOCK)),
    Kind("two-pass", Blocks, Recompute, TwoPass),
    Kind("tracked", Window, Tracked),
    Kind("flash", Window, Tracked, TwoPass),
    Kind("one-pass", Window, Recompute, OnePass),
    Kind("one-pass-cache", Window, Tracked, OnePass),
)


def random_model(num_layers: int, hidden: int, vocab_size: int, dtype: torch.dtype, device: str) -> Transformer:
    """A network of LLaDA's shape with random weights; sharp enough that thresholds are met now and then."""
    heads = hidden // 64
    config = ModelConfig(
        family="llada",
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=64,
        intermediate_size=3 * hidden,
        rope_theta=500000.0,
        norm_eps=1e-5,
        qkv_bias=False,
        tie_embeddings=False,
        max_positions=4096,
        logit_shift=0,
        mask_token_id=vocab_size - 1,
        eos_token_ids=(vocab_size - 2,),
        pad_token_id=vocab_size - 2,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = Transformer(config, device=device, dtype=dtype)
    model.init_weights(std=0.08)
    return model


def build(
    kind: Kind,
    model: Transformer,
    seats: int,
    capacity: int,
    budgets: Budgets,
    needs: Needs,
    cls: type[Step] = Step,
    *,
    compiled: bool = False,
) -> Step:
    """An empty step of this kind; every seat has its pages."""
    torch._dynamo.reset()  # steps share their code, and a process may compile one function for eight of them only
    drafter, device = kind.drafter(), model.head.device
    canvas = Canvas.empty(
        seats, capacity, model.config.mask_token_id, device, capacity // BLOCK + 3, drafter.num_pending
    )
    params = DecodeParams(seats, 512, device)
    params.needs = needs
    pool = PagePool(
        kv_planes(model.config, model.head.dtype),
        num_layers=model.config.num_layers,
        num_pages=seats * num_pages_for(capacity),
        num_seats=seats,
        max_positions=capacity,
        num_scratch=drafter.num_scratch,
        device=device,
    )
    for seat in range(seats):
        pool.reserve(seat, capacity)
    model.rope.reserve(capacity, device)
    axes: dict[str, Any] = {"frontier": kind.frontier(), "policy": kind.policy(), "drafter": drafter}
    return cls(model, canvas, params, pool, budgets=budgets, **axes, compiled=compiled)


def admit(step: Step, seat: int, number: int, prompt: int, answer: int) -> None:
    """Request ``number`` takes a seat; requests cycle through the rules, or through the ways of verification."""
    rules: tuple[dict[str, Any], ...] = (
        {"threshold": 0.3},
        {"steps": answer},
        {"factor": 1.2},
        {"entropy_bound": 0.5},
        {"steps": max(answer // 3, -(-answer // BLOCK)), "temperature": 0.8, "top_p": 0.95},
    )
    rule = rules[1] if step.drafter.num_scratch else rules[number % len(rules)]
    needs = step.params.needs
    params = SamplingParams(max_tokens=answer, block_length=BLOCK, decode_window=BLOCK, seed=number, **rule)
    sizes = [min(BLOCK, answer - start) for start in range(0, answer, BLOCK)]
    eos = step.model.config.eos_token_ids
    generator = torch.Generator().manual_seed(number)
    token = torch.randint(0, step.model.config.vocab_size - 2, (prompt + answer,), generator=generator).int()
    token[prompt:] = step.canvas.mask_token_id
    block = layout.blocks(prompt + answer, prompt, BLOCK)
    step.canvas.place(seat, token, prompt=prompt, block_N=block)
    rule_params = seat_params(params, kind="even", masks_per_block=sizes, model_eos=eos, seed=number)
    rule_params = replace(rule_params, refresh=2 * BLOCK, track=BLOCK, gamma=0.0, search=8 - number % 4)
    step.params.write(seat, replace(rule_params, isolated=number % 2 == 0, product=number % 3 == 0))
    step.params.needs = needs


@contextmanager
def no_sync() -> Iterator[None]:
    """Any wait for the GPU inside is an error."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _told(readback: Tensor, name: str) -> Tensor:
    return readback[:, READBACK.index(name)]


def _finished(readback: Tensor) -> Tensor:
    return _told(readback, "num_undecided") == 0


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _state(step: Step) -> dict[str, Tensor]:
    tensors = {name: value.clone() for name, value in vars(step.canvas).items() if isinstance(value, Tensor)}
    return tensors | {"readback": step.readback.clone()}


@torch.inference_mode()
def scenario(step: Step, run: Callable[[], None], num_steps: int) -> list[dict[str, Tensor]]:
    """Four seats, the last empty: a short request ends, another takes its seat, the host looks one step late."""
    readback = Readback(step.readback)
    for seat, (prompt, answer) in enumerate(((9, 12), (17, 48), (30, 40))):
        admit(step, seat, seat, prompt, answer)
    history, next_number, resting = [], 3, 0
    _synchronize()
    for _ in range(num_steps):
        with no_sync():
            run()
            readback.send()
            seen = readback.receive()
        history.append(_state(step))
        free = [] if seen is None else [s for s in range(3) if not _told(seen, "active")[s] or _finished(seen)[s]]
        resting = resting + 1 if free else 0
        if free and resting > 2 and next_number < 12:  # the seat stays empty for two steps first
            admit(step, free[0], next_number, 5 + next_number, 24)
            next_number, resting = next_number + 1, 0
            _synchronize()
    return history


def check_replay(
    kind: Kind, model: Transformer, num_steps: int = 50, *, capture: bool = True, compiled: bool = False
) -> dict[str, Any]:
    """An eager scenario and one that is captured and replayed, compared tensor by tensor after every step.

    ``compiled`` and ``capture`` say what is done to the second one.
    """
    histories = []
    for second in (False, True):
        step = build(kind, model, 4, 80, Budgets(80, 80), ALL_NEEDS, compiled=second and compiled)
        run = CapturedStep(step) if second and capture else step
        histories.append(scenario(step, run, num_steps))
    eager, replayed = histories
    wrong = [
        (number, name)
        for number, (a, b) in enumerate(zip(eager, replayed))
        for name in a
        if not torch.equal(a[name], b[name])
    ]
    finished = sum(int(_finished(a["readback"]).sum()) for a in eager)
    final = eager[-1]
    return {
        "kind": kind.name,
        "dtype": str(model.head.dtype).removeprefix("torch."),
        "captured": capture,
        "compiled": compiled,
        "num_steps": num_steps,
        "differences": [f"step {number}: {name}" for number, name in wrong[:5]],
        "equal": not wrong,
        "seat_steps_finished": finished,
        "passes_per_seat": final["pass_S"].tolist(),
        "drafts_accepted": sum(int(_told(a["readback"], "num_accepted").sum()) for a in eager),
    }


class _NoMass:
    """What `_NoNetwork` shows a policy: all rows ran, and nobody was looked at."""

    gate = None

    def mass_SN(self, num_counted_S: Tensor, capacity: int) -> Tensor:
        return torch.zeros(len(num_counted_S), capacity, device=num_counted_S.device)


class _NoNetwork(Step):
    """The step without the network and the head: what is left is rules, packing and state."""

    def _forward(self, plan: RowPlan, counts_M: Tensor | None = None) -> tuple[Tensor, Any]:  # noqa: ARG002
        return torch.zeros(len(plan.token_M), 1, device=plan.token_M.device), _NoMass()

    def _predict(self, rows_MD: Tensor, row_SC: Tensor, pos_SC: Tensor, *args: Any, **options: Any) -> LogitStats:  # noqa: ARG002
        prob_C = (pos_SC.flatten() % 7).float() / 8
        return LogitStats(pos_SC.flatten(), *[prob_C] * 5)


def _count_kernels(run: Callable[[], None]) -> int:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA)


def _median_us(run: Callable[[], None], repeats: int = 200) -> float:
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return float(statistics.median(times))


@torch.inference_mode()
def measure(kind: Kind, model: Transformer, seats: int, needs: Needs, *, compiled: bool) -> dict[str, Any]:
    """Kernels and time of a captured step, whole and without the network."""
    label = "greedy" if needs == LEAN else "all"
    out: dict[str, Any] = {"kind": kind.name, "seats": seats, "needs": label, "compiled": compiled}
    out |= {"capacity": 1536, "num_rows": 128, "num_scored": 64}
    for name, cls in (("whole", Step), ("rules", _NoNetwork)):
        step = build(kind, model, seats, 1536, Budgets(128, 64), needs, cls, compiled=compiled)
        run = CapturedStep(step)
        for seat in range(seats):
            admit(step, seat, seat, 1000, 512)
        torch.cuda.synchronize()
        out[f"kernels_{name}"] = _count_kernels(run)
        out[f"us_{name}"] = _median_us(run)
    return out


def step_program() -> Iterator[dict[str, Any]]:
    """Everything, on one GPU; the result so far after every measurement."""
    torch.backends.cuda.matmul.allow_tf32 = False
    result: dict[str, Any] = {"environment": environment("cuda"), "checks": [], "times": []}
    models = {dtype: random_model(4, 512, 2048, dtype, "cuda") for dtype in (torch.float32, torch.bfloat16)}
    for model in models.values():
        for kind in KINDS:
            result["checks"].append(check_replay(kind, model))
            yield result
    cells = [(kind, seats, LEAN) for seats in (1, 4, 32) for kind in KINDS] + [(KINDS[0], 4, ALL_NEEDS)]
    for compiled in (False, True):
        for kind, seats, needs in cells:
            result["times"].append(measure(kind, models[torch.bfloat16], seats, needs, compiled=compiled))
            yield result
    for kind in KINDS:
        result["checks"].append(check_replay(kind, models[torch.float32], compiled=True))
        yield result
