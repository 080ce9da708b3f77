"""Requests from end to end through the engine: one at a time (latency), and many (throughput).

With random weights every pass commits a fixed number of tokens, so that published shapes can be timed without their
weights; with real ones the method decides. Before an engine is timed, its captured steps are compared with the same
steps launched one by one: without that no time is set against another.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from unmask.bench.floor import Ceilings, Cost, measure_ceilings, pass_cost
from unmask.bench.results import Results
from unmask.bench.shapes import ordinary_ids, random_network
from unmask.config import SamplingParams
from unmask.engine.graphs import FixedSteps
from unmask.engine.llm import LLM
from unmask.engine.outputs import CompletionOutput, RequestOutput
from unmask.engine.request import Answer, Request
from unmask.eval.word_problems import held_out
from unmask.methods import method_named
from unmask.models.quantization import is_fp8

MOST_TOKENS = 16
"""That a step commits: those of a decode window."""
WARM_STEPS, TRACED_STEPS = 8, 40
"""Steps before anything is measured (refresh, captures, compilation), and steps that are traced."""
NEUTRAL: Mapping[str, Any] = {
    "enforce_eager": False,
    "enable_torch_compile": False,
    "kernels": "auto",
    "quantization": None,
}
"""Engine options that a row tells, and their defaults."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked of the engine."""

    method: str | None = None
    """None takes the checkpoint's own."""
    shape: str = "llada-8b"
    model: str | None = None
    """Real weights, which then also say the shape."""
    prompt: int = 1024
    answer: int = 512
    per_pass: float | None = 2.8
    """Tokens a pass, by a fixed schedule; a step of two passes commits twice as many. None leaves it to the method."""
    seats: int = 1
    requests: int = 1
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Further `EngineConfig` fields."""

    def params(self) -> SamplingParams:
        """Of every request."""
        if self.per_pass is None:
            return SamplingParams(max_tokens=self.answer, seed=0)
        a_step = min(self.per_pass * self._passes_a_step(), MOST_TOKENS)
        steps = min(self.answer, max(math.ceil(self.answer / a_step), self._num_blocks()))
        return SamplingParams(max_tokens=self.answer, steps=steps, ignore_eos=True, seed=0)

    def _passes_a_step(self) -> int:
        return 2 if self.method and method_named(self.method).drafter == "two-pass" else 1

    def _num_blocks(self) -> int:
        """Twice, since a network with shifted scores needs two passes a block."""
        length = method_named(self.method).sampling.get("block_length") if self.method else None
        return 2 * -(-self.answer // length) if length else 1


class Bench:
    """Networks and engines for one device; a network is made once."""

    def __init__(self, device: torch.device | str, ceilings: Ceilings) -> None:
        self.device, self.ceilings = torch.device(device), ceilings
        self._networks: dict[tuple[str, Any], Any] = {}

    def llm(self, load: Load) -> LLM:
        """An engine for this load."""
        length = load.prompt + load.answer
        if load.model is not None:
            return LLM(load.model, method=load.method, device=self.device, max_num_seqs=load.seats, **load.engine)
        options = {**load.engine, "max_num_seqs": load.seats, "max_model_len": length}
        network = self._network(load.shape, options.pop("quantization", None), length)
        return LLM(network, method=load.method, device=self.device, **options)

    def _network(self, shape: str, quantization: str | None, length: int) -> Any:
        key = (shape, quantization)
        if key not in self._networks:
            self._networks.clear()
            _tidy(self.device)
            network = random_network(shape, self.device, max_positions=length)
            if quantization is not None:
                from unmask.models.quantization import quantize_

                network = quantize_(network, quantization)
            self._networks[key] = network
        return self._networks[key]

    # --- measuring

    def measure(self, load: Load, *, one_by_one: bool, idle: bool = True) -> dict[str, Any]:
        """One row. ``one_by_one`` asks for an answer only when the one before it is there."""
        _tidy(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        llm = self.llm(load)
        prompts = make_prompts(llm, load)
        first = prompts[: load.seats]
        with underway(llm, asked(llm, first, load.params())) as go:
            go(WARM_STEPS)
        same = same_as_eager(llm, first, load.params())
        llm.engine.stats.reset()
        groups = [[each] for each in prompts] if one_by_one else [prompts]
        seconds, outputs = 0.0, []
        for group in groups:
            start = time.perf_counter()
            outputs += llm.generate(group, load.params())
            self._wait()
            seconds += time.perf_counter() - start
        row = self._row(load, llm, outputs, seconds) | {"same_as_eager": same}
        with underway(llm, asked(llm, first, load.params())) as go:
            go(WARM_STEPS)
            row |= trace(lambda: go(TRACED_STEPS), self.device) if idle else {"idle_share": None}
        if self.device.type == "cuda":
            row["allocated_GB"] = torch.cuda.max_memory_allocated() / 1e9
            row["reserved_GB"] = torch.cuda.max_memory_reserved() / 1e9
        return row

    def _row(self, load: Load, llm: LLM, outputs: Sequence[RequestOutput], seconds: float) -> dict[str, Any]:
        answers = [each.outputs[0] for each in outputs]
        tokens = sum(len(each.token_ids) for each in answers)
        passes = llm.engine.stats.num_passes * (2 if llm.method.drafter == "two-pass" else 1)
        own_passes, rows = (sum(getattr(each, name) for each in answers) for name in ("num_forward_passes", "num_rows"))
        lengths = [len(each.prompt_token_ids) + load.answer for each in outputs]
        floor = self._floor(llm, answers, lengths, passes)
        floor_seconds = None if floor is None else floor.seconds(self.ceilings)
        return {
            "method": llm.method.name,
            "model": load.model or load.shape,
            "weights": "real" if load.model else "random",
            "seats": load.seats,
            "requests": len(outputs),
            "prompt": load.prompt if load.model is None else max(len(each.prompt_token_ids) for each in outputs),
            "answer": load.answer,
            "asked_tokens_per_pass": load.per_pass,
            **{name: load.engine.get(name, value) for name, value in NEUTRAL.items()},
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "passes": passes,
            "ms_per_pass": 1e3 * seconds / max(passes, 1),
            "tokens_per_pass": tokens / max(own_passes, 1),
            "rows_per_pass": rows / max(own_passes, 1),
            "floor_seconds": floor_seconds,
            "over_floor": None if floor_seconds is None else seconds / floor_seconds,
        }

    def _floor(self, llm: LLM, answers: Sequence[CompletionOutput], lengths: Sequence[int], passes: int) -> Cost | None:
        """Weights once a pass, every request's canvas once for each of its passes, every token scored once. None where
        rows see only what lies before them."""
        if llm.method.policy == "block-causal" or llm.method.frontier == "pipeline":
            return None
        each = list(zip(answers, lengths))
        fp8 = isinstance(llm.model, torch.nn.Module) and is_fp8(llm.model)
        size = llm.model.head.element_size()
        return pass_cost(
            llm.model.config,
            passes=passes,
            rows=sum(answer.num_rows for answer in answers),
            scored=sum(answer.num_committed for answer in answers),
            keys_read=sum(answer.num_forward_passes * length for answer, length in each),
            row_keys=sum(answer.num_rows * length for answer, length in each),
            weight_size=1 if fp8 else size,
            size=size,
        )

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def make_prompts(llm: LLM, load: Load) -> list[dict[str, Any]]:
    """Random ids for random weights; held-out problems as conversations for real ones that can hold one."""
    if load.model is not None and getattr(llm.tokenizer, "has_chat_template", False):
        problems = held_out(load.requests)
        return [{"messages": [{"role": "user", "content": each["question"]}]} for each in problems]
    config = llm.model.config
    return [{"prompt_token_ids": ordinary_ids(config, load.prompt, seed).tolist()} for seed in range(load.requests)]


def same_as_eager(llm: LLM, prompts: Sequence[dict[str, Any]], params: SamplingParams) -> bool | None:
    """Whether `WARM_STEPS` captured steps decide what the same steps decide that are launched one by one, and not
    compiled. None: nothing is captured here.

    The engine has served these prompts before: what it keeps of them is there for both.
    """
    engine, captured = llm.engine, llm.engine.fixed
    if captured is None:
        return None
    found = []
    try:
        for fixed in (captured, FixedSteps(engine.step_program, capture=lambda step: step)):
            engine.fixed = fixed
            requests = asked(llm, prompts, params)
            with underway(llm, requests) as go:
                go(WARM_STEPS)
                found.append([_decided(llm, answer) for request in requests for answer in request.answers])
    finally:
        engine.fixed = captured
    return found[0] == found[1]


def _decided(llm: LLM, answer: Answer) -> list[list[int]]:
    """Tokens of an answer, and while it runs the passes that committed them."""
    if answer.output is not None:
        return [list(answer.output.token_ids)]
    canvas = llm.engine.canvas
    return [each[seat].tolist() for seat in answer.seats for each in (canvas.token_SN, canvas.commit_pass_SN)]


def asked(llm: LLM, prompts: Sequence[dict[str, Any]], params: SamplingParams) -> list[Request]:
    """Requests as the engine takes them."""
    return [llm.prompts.request(prompt, params, at) for at, prompt in enumerate(prompts)]


@contextmanager
def underway(llm: LLM, requests: Sequence[Request]) -> Iterator[Callable[[int], None]]:
    """Requests that take as many steps as they are told (fewer if one of them ends), and are dropped afterwards."""

    def go(num_steps: int) -> None:
        for _ in range(num_steps):
            if not llm.stepper.step(requests):
                break

    llm.stepper.add(requests)
    try:
        yield go
    finally:
        llm.stepper.drop(requests)


# How long the device had nothing to do


def busy_share(spans: Iterable[tuple[float, float]]) -> float:
    """Share of the time from the first start to the last end in which something ran; 1 if there is nothing."""
    ordered = sorted(spans)
    if not ordered:
        return 1.0
    first, reached, busy = ordered[0][0], ordered[0][0], 0.0
    for start, end in ordered:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy / (reached - first) if reached > first else 1.0


def trace(call: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Of `TRACED_STEPS` steps: ``idle_share``, 1 - busy / span over everything that ran on the device, and ``trace``,
    the kinds of kernels with their number and microseconds a step. None and nothing without a GPU."""
    if device.type != "cuda":
        return {"idle_share": None}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    events = [event for event in profile.events() or () if event.device_type == on_gpu]
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    kinds: dict[str, list[float]] = {}
    for event, (start, end) in zip(events, spans):
        kind = kinds.setdefault(kernel_kind(event.name), [0, 0.0])
        kind[0] += 1 / TRACED_STEPS
        kind[1] += (end - start) / TRACED_STEPS
    ordered = sorted(kinds.items(), key=lambda each: -each[1][1])
    return {
        "idle_share": 1.0 - busy_share(spans),
        "trace": [{"kind": kind, "calls": calls, "us": us} for kind, (calls, us) in ordered],
    }


def kernel_kind(name: str) -> str:
    """Our kernels by name, those of others by what they are for."""
    if name.startswith("_") and name.endswith("_kernel"):
        return name
    if name.startswith(("Memcpy", "Memset")) or "memcpy" in name:
        return "copies"
    if name.startswith("triton_"):
        return "around the network, compiled"
    if any(word in name for word in ("nvjet", "gemm", "cutlass", "splitKreduce")):
        return "library products"
    return "around the network"


def _tidy(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# The runs


def latency(
    results: Results,
    device: torch.device | str,
    load: Load,
    methods: Sequence[str | None],
    *,
    compare: bool = True,
    seconds: float = 600,
    ceiling_sizes: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """One request at a time, method by method. With ``compare`` two yardsticks too, both of them `vanilla` over the
    whole canvas in our own engine: at one token a pass, and at as many as the methods commit."""
    loads = [replace(load, method=method, seats=1) for method in methods]
    if compare and load.per_pass is not None:
        vanilla = replace(load, method="vanilla", seats=1, requests=1)
        loads += [vanilla, replace(vanilla, per_pass=1.0)]
    _run(results, device, loads, one_by_one=True, seconds=seconds, ceiling_sizes=ceiling_sizes, tell=tell)
    compared(results)


def throughput(
    results: Results,
    device: torch.device | str,
    load: Load,
    methods: Sequence[str | None],
    seats: Sequence[int],
    *,
    waves: int = 1,
    seconds: float = 600,
    ceiling_sizes: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Many requests at a time, over seats: ``waves`` requests for each of them."""
    loads = [
        replace(load, method=method, seats=number, requests=waves * number) for number in seats for method in methods
    ]
    _run(results, device, loads, one_by_one=False, seconds=seconds, ceiling_sizes=ceiling_sizes, tell=tell)


def _run(
    results: Results,
    device: torch.device | str,
    loads: Sequence[Load],
    *,
    one_by_one: bool,
    seconds: float,
    ceiling_sizes: Mapping[str, Any] | None,
    tell: Callable[[str], None],
) -> None:
    """Row by row. What does not fit ``seconds`` is left out, and said."""
    ends = time.monotonic() + seconds
    ceilings = measure_ceilings(device, **(ceiling_sizes or {}))
    results.note(ceilings=vars(ceilings))
    bench = Bench(device, ceilings)
    for load in loads:
        name = f"{load.method or 'own method'}, {load.seats} seats, {load.per_pass or 'its own'} tokens a pass"
        if time.monotonic() > ends:
            results.leave_out(name)
            continue
        try:
            row = bench.measure(load, one_by_one=one_by_one)
        except torch.OutOfMemoryError as failure:
            results.leave_out(f"{name}: {str(failure)[:200]}")
            tell(f"{name}: out of memory")
            continue
        results.add(row)
        idle = "" if row["idle_share"] is None else f", idle {row['idle_share']:.1%}"
        wrong = ", NOT AS EAGER" if row["same_as_eager"] is False else ""
        tell(f"{name}: {row['tokens_per_second']:.1f} tokens/s, {row['ms_per_pass']:.2f} ms a pass{idle}{wrong}")


def compared(results: Results) -> None:
    """Each method's speed over that of the yardsticks, if those were measured, and none of the two decided anything
    else than its steps do eagerly."""
    rows = results.rows
    right = [row for row in rows if row["same_as_eager"] is not False]
    speed = {row["asked_tokens_per_pass"]: row["tokens_per_second"] for row in right if row["method"] == "vanilla"}
    for row in rows:
        for name, asked in (("one", 1.0), ("equal", row["asked_tokens_per_pass"])):
            told = row in right and asked in speed
            row[f"over_vanilla_{name}"] = row["tokens_per_second"] / speed[asked] if told else None
    results.write()
