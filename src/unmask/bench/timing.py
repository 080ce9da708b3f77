"""How long a call takes: captured and replayed on a GPU, with a clock elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

MAX_REPLAYS, MIN_REPLAYS = 30, 5
SECONDS = 0.25
"""About as long as the replays of one measurement may take together."""
WARMUPS = 3


@dataclass(frozen=True)
class Captured:
    """A graph, and what the captured call returned."""

    graph: torch.cuda.CUDAGraph
    result: Any


def capture(call: Callable[[], Any]) -> Captured:
    """Compiled and warm before it is captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return Captured(graph, result)


def median_seconds(run: Callable[[], Any], device: torch.device | str, *, replays: int = MAX_REPLAYS) -> float:
    """Median time of ``run``, which is warm. At least `MIN_REPLAYS`, at most ``replays``, for about `SECONDS`."""
    timer = _on_gpu if torch.device(device).type == "cuda" else _on_cpu
    took = [timer(run) for _ in range(WARMUPS)]
    count = min(replays, max(MIN_REPLAYS, int(SECONDS / max(took[-1], 1e-7))))
    return statistics.median(timer(run) for _ in range(count))


def seconds_a_call(call: Callable[[int], Any], num_calls: int, device: torch.device | str) -> float:
    """``call`` of 0 .. num_calls - 1, one after the other in one graph; its median time over their number.

    Let the calls go through enough tensors that none finds its own in the cache.
    """

    def all_calls() -> None:
        for number in range(num_calls):
            call(number)

    if torch.device(device).type != "cuda":
        all_calls()
        return median_seconds(all_calls, device, replays=MIN_REPLAYS) / num_calls
    captured = capture(all_calls)
    return median_seconds(captured.graph.replay, device) / num_calls


def _on_cpu(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _on_gpu(run: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def peak_bytes(call: Callable[[], Any], device: torch.device | str) -> int | None:
    """Most memory that ``call``, which is warm, holds beyond what is there before; None where nobody counts."""
    if torch.device(device).type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
