"""Steps of fixed shape, each captured once and replayed, and the message that each replay sends to the host.

S seats
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unmask.decoding.params import Needs
from unmask.engine.step import Budgets, Step
from unmask.errors import ConfigError

MAX_STEPS = 64
"""Captured steps that are kept. They share one memory pool; what each adds is its list of kernels, a few MB."""


class CapturedStep:
    """A step as a CUDA graph.

    The step must work on tensors that stay where they are, and leave inactive seats as they are: warming up and
    capturing run it on the canvas as it stands, so do both before the first request is placed.

    Raises:
        ConfigError: there is no CUDA device.
    """

    def __init__(self, step: Callable[[], None], *, num_warmups: int = 3, memory: Any = None) -> None:
        """``memory`` is a pool (`torch.cuda.graph_pool_handle`) that steps share which never run at the same time."""
        if not torch.cuda.is_available():
            raise ConfigError("capturing needs a CUDA device; call the step itself on the CPU")
        self._graph = torch.cuda.CUDAGraph()
        with torch.inference_mode():
            self._warm_up(step, num_warmups)
            # Other threads may use the device meanwhile: what they do is not part of the step.
            with torch.cuda.graph(self._graph, pool=memory, capture_error_mode="thread_local"):
                step()

    @staticmethod
    def _warm_up(step: Callable[[], None], num_warmups: int) -> None:
        """Libraries allocate and choose on their first calls; on a side stream, as capture demands."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(num_warmups):
                step()
        torch.cuda.current_stream().wait_stream(side)

    def __call__(self) -> None:
        """One step."""
        self._graph.replay()


@dataclass(frozen=True)
class Key:
    """What a captured step depends on, besides the engine's own choices."""

    num_seats: int
    budgets: Budgets
    needs: Needs


class FixedSteps:
    """The fixed forms of a ragged step, made when they are first needed.

    ``capture`` makes a program of a step; tests run the step itself. They work on the tensors that the ragged step has
    at the time: `clear` when those are replaced.
    """

    def __init__(
        self, base: Step, capture: Callable[[Step], Callable[[], None]] | None = None, *, compiled: bool = False
    ) -> None:
        self._base, self._compiled = base, compiled
        self._memory: Any = None
        self._capture = capture or self._capture_on_gpu
        self._programs: OrderedDict[Key, Callable[[], None]] = OrderedDict()
        if compiled:  # each key is one more specialisation of the same functions
            torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, 8 * MAX_STEPS)

    def clear(self) -> None:
        """Forget all. A pool of memory ends with its last program: the next one begins a new pool."""
        if self._programs and self._memory is not None:
            torch.cuda.synchronize()  # the last replay may still run
        self._programs.clear()
        self._memory = None

    def _capture_on_gpu(self, step: Step) -> CapturedStep:
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        return CapturedStep(step, memory=self._memory)

    def get(self, num_seats: int, budgets: Budgets) -> Callable[[], None]:
        """The program for the first seats and what their requests need now."""
        key = Key(num_seats, budgets, self._base.params.needs)
        if key not in self._programs:
            self._programs[key] = self._make(key)
            if len(self._programs) > MAX_STEPS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return self._programs[key]

    def _make(self, key: Key) -> Callable[[], None]:
        """Warming up runs the step: nobody takes part meanwhile."""
        step = self._base.fixed(key.num_seats, key.budgets, compiled=self._compiled)
        active_S = self._base.canvas.active_S.clone()
        self._base.canvas.active_S.zero_()
        program = self._capture(step)
        self._base.canvas.active_S.copy_(active_S)
        return program


class Messages:
    """What replays tell the host, read one step late: the device copies into one of two sets of pinned buffers while
    the host reads the other."""

    def __init__(self) -> None:
        self._buffers: list[dict[tuple[Any, ...], Tensor]] = [{}, {}]
        self._on_the_way: deque[tuple[Any, list[Tensor], torch.cuda.Event | None]] = deque()
        self._num_sent = 0

    def __len__(self) -> int:
        """Messages that were sent and not received: two at most."""
        return len(self._on_the_way)

    def send(self, about: Any, sources: Sequence[Tensor]) -> None:
        """Copy the sources as they are when the device gets here, without waiting."""
        buffers = self._buffers[self._num_sent % 2]
        copies = []
        for place, source in enumerate(sources):
            key = (place, source.shape, source.dtype)
            if key not in buffers:
                buffers[key] = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            copies.append(buffers[key].copy_(source, non_blocking=True))
        event = None
        if sources[0].is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._on_the_way.append((about, copies, event))
        self._num_sent += 1

    def receive(self) -> tuple[Any, list[Tensor]]:
        """The oldest message, once it has arrived."""
        about, copies, event = self._on_the_way.popleft()
        if event is not None:
            event.synchronize()
        return about, copies


class Readback:
    """A step's `readback`, one step late: the message of a step that tells nothing else."""

    def __init__(self, source: Tensor) -> None:
        self._source, self._messages = source, Messages()

    def send(self) -> None:
        """Copy what the last step wrote, without waiting."""
        self._messages.send(None, [self._source])

    def receive(self) -> Tensor | None:
        """The message before the last one, once its copy has arrived; None before there are two."""
        return self._messages.receive()[1][0] if len(self._messages) > 1 else None
