"""A step captured once and replayed, and the small message that each replay sends to the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from unmask.errors import ConfigError


class CapturedStep:
    """A step as a CUDA graph.

    The step must work on tensors that stay where they are, and leave inactive seats as they are: warming up and
    capturing run it on the canvas as it stands, so do both before the first request is placed.

    Raises:
        ConfigError: there is no CUDA device.
    """

    def __init__(self, step: Callable[[], None], *, num_warmups: int = 3) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("capturing needs a CUDA device; call the step itself on the CPU")
        self._graph = torch.cuda.CUDAGraph()
        with torch.inference_mode():
            self._warm_up(step, num_warmups)
            with torch.cuda.graph(self._graph):
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


class Readback:
    """The host's view, one step late: the device copies into one of two pinned buffers while the host reads the other.

    ``source`` int32 [S, 8] is what the step writes.
    """

    def __init__(self, source: Tensor) -> None:
        pin = source.is_cuda
        self._source = source
        self._buffers = [torch.zeros(source.shape, dtype=source.dtype, pin_memory=pin) for _ in range(2)]
        self._ready = [torch.cuda.Event() if pin else None for _ in range(2)]
        self._num_sent = 0

    def send(self) -> None:
        """Copy what the last step wrote, without waiting."""
        slot = self._num_sent % 2
        self._buffers[slot].copy_(self._source, non_blocking=True)
        event = self._ready[slot]
        if event is not None:
            event.record()
        self._num_sent += 1

    def receive(self) -> Tensor | None:
        """The message before the last one, once its copy has arrived; None before there are two."""
        if self._num_sent < 2:
            return None
        slot = self._num_sent % 2
        event = self._ready[slot]
        if event is not None:
            event.synchronize()
        return self._buffers[slot]
