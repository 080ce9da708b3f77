"""The engine's GPU is the current one wherever a kernel may be launched: Triton, streams and captures ask for no other.

There is no second GPU here: what is shown is that it would be made the current one, in every thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from unmask import LLM, SamplingParams, ops
from unmask.cache.pool import PagePool
from unmask.engine import llm as door
from unmask.engine.async_engine import AsyncEngine
from unmask.engine.engine import Engine
from unmask.engine.step import Step

SECOND = torch.device("cuda", 1)


class Current:
    """Which device was made the current one, by thread."""

    def __init__(self) -> None:
        self._local = threading.local()
        self.seen: list[tuple[str, torch.device | None]] = []

    @contextmanager
    def __call__(self, device: torch.device) -> Iterator[None]:
        before, self._local.device = self.now, device
        yield
        self._local.device = before

    @property
    def now(self) -> torch.device | None:
        return getattr(self._local, "device", None)

    def watch(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.seen.append((name, self.now))
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)


def test_loading_and_making_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are quantised, and proxies computed, on the device that was asked for."""
    current = Current()
    monkeypatch.setattr(ops, "on", current)
    current.watch(monkeypatch, door, "load_model")
    current.watch(monkeypatch, Engine, "__init__")
    LLM(device="cpu", method="spa-cache")
    assert current.seen == [("load_model", torch.device("cpu")), ("__init__", torch.device("cpu"))]
    assert current.now is None


def test_steps_and_aborts_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, current = LLM(device="cpu"), Current()
    llm.engine.device = SECOND
    monkeypatch.setattr(torch.cuda, "device", current)
    current.watch(monkeypatch, Step, "run")
    current.watch(monkeypatch, PagePool, "reserve")
    current.watch(monkeypatch, PagePool, "release")
    llm.generate("One", SamplingParams(max_tokens=4))

    async def one_that_leaves() -> None:
        async with AsyncEngine(llm) as engine:
            async for _ in engine.generate("Two", SamplingParams(max_tokens=64, steps=64)):
                break

    asyncio.run(one_that_leaves())
    assert {name for name, _ in current.seen} == {"run", "reserve", "release"}
    assert {device for _, device in current.seen} == {SECOND}
    assert current.now is None
    assert llm.engine.pool.num_used == 0
