"""Loads that fill every bucket of seats: steps are captured for 1, 2, 4 .. 64 of them, each a program of its own.

Short requests, all there from the first step, so that as many seats are taken as the bucket has; every answer is
compared with the one that the same request gets alone, in eager steps of plain torch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from unmask.cache.pool import num_pages_for
from unmask.config import SamplingParams
from unmask.engine.axes import Axes
from unmask.engine.llm import LLM
from unmask.engine.memory import bytes_for
from unmask.eval.continuous import Asked, Way, alone, engine, facts, network, together
from unmask.methods import METHODS

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
FILLED = (
    ("confidence", "llada"),
    ("fast-dllm-dual", "llada-gqa"),
    ("flash-cache", "llada"),
    ("flash-verify", "llada-gqa"),
    ("one-pass-cache", "llada"),
    ("d2f", "llada"),
    ("spa-cache", "llada-gqa"),
)
"""Methods with policies, frontiers and drafters of every kind that is captured, and the network of each."""
NUM_REQUESTS = 24
"""Different ones. Larger buckets have some of them again, 24 seats away: alone each is asked once."""
NUM_PAGES = 2
"""Of a canvas: at most 12 positions of a prompt and 12 of an answer."""


@dataclass
class Filled:
    """What a method's loads showed, by bucket."""

    method: str
    network: str
    captured: bool
    """Whether the method's passes have a fixed shape at all."""
    num_replays: dict[int, int] = field(default_factory=dict)
    """Passes of that many seats while the load of the bucket ran."""
    different: dict[int, list[int]] = field(default_factory=dict)
    """Requests whose answer is not the one they get alone."""

    @property
    def full(self) -> bool:
        """Whether each bucket ran."""
        return self.captured and all(self.num_replays.values())

    @property
    def num_different(self) -> int:
        return sum(map(len, self.different.values()))


def requests(method: str) -> list[Asked]:
    """Short ones of several lengths; canvases are longer than what a cache keeps running."""
    r, reads = random.Random(method), METHODS[method].reads
    small = {"block_length": 4, "decode_window": 4, "refresh_window": 6, "track": 4, "search": 3}
    said: dict[str, Any] = {name: value for name, value in small.items() if name in reads}
    out = []
    for number in range(NUM_REQUESTS):
        prompt = [r.randrange(94) for _ in range(r.randint(1, 12))]
        more: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9} if number % 6 == 5 else {}
        params = SamplingParams(
            seed=number, max_tokens=r.randint(4, 12), threshold=0.4, trajectory=True, **said, **more
        )
        out.append(Asked(prompt, params, arrives=0, cancelled=None))
    return out


def fill(method: str, network_name: str, way: Way, buckets: tuple[int, ...] = BUCKETS) -> Filled:
    """One engine with seats for the largest bucket, and a load for each."""
    seats, model = max(buckets), network(network_name, way=way)
    num_pages = max(NUM_PAGES * seats, num_pages_for(model.config.max_positions))
    memory = bytes_for(model, Axes.of(METHODS[method], model.config), num_pages=num_pages, num_seats=seats)
    options: dict[str, Any] = {"max_num_batched_tokens": 64 * seats, "kv_cache_memory_bytes": memory}
    llm = engine(method, network_name, seats, way, enable_prefix_caching=False, **options)
    out = Filled(method, network_name, captured=llm.engine.fixed is not None)
    if not out.captured:
        return out
    replays, asked = _counted(llm), requests(method)
    eager = Way(way.device, way.dtype, head_dim=way.head_dim)
    solo = engine(method, network_name, 2, eager, enable_prefix_caching=False, kernels="reference")
    wanted = [facts(alone(solo, each)) for each in asked[: max(buckets)]]
    for bucket in buckets:
        replays.clear()
        found = dict(together(llm, [asked[number % NUM_REQUESTS] for number in range(bucket)]))
        out.num_replays[bucket] = replays[bucket]
        out.different[bucket] = [
            number for number, each in found.items() if each is None or facts(each) != wanted[number % NUM_REQUESTS]
        ]
    return out


def _counted(llm: LLM) -> Counter[int]:
    """Passes in fixed shape, by their number of seats."""
    fixed, counts = llm.engine.fixed, Counter[int]()
    assert fixed is not None
    get = fixed.get

    def counted(num_seats: int, *rest: Any) -> Callable[[], None]:
        counts[num_seats] += 1
        return get(num_seats, *rest)

    fixed.get = counted  # type: ignore[method-assign,assignment]
    return counts
