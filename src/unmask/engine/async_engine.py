"""`AsyncEngine`: the door for servers. Streams that join and leave the batch at any step."""

from __future__ import annotations

import asyncio
import atexit
import math
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from unmask.config import SamplingParams
from unmask.engine.llm import LLM
from unmask.engine.outputs import StreamChunk
from unmask.engine.prompts import Prompt, spread
from unmask.engine.request import Request
from unmask.errors import EngineError, RequestError

_EXIT_SECONDS = 10.0
"""How long a forgotten engine may hold up the interpreter's exit: a step takes less, and one that hangs must not."""


@dataclass(frozen=True)
class EngineStats:
    """What an engine is doing, and has done since it was made."""

    num_running: int
    """Answers that are seated."""
    num_waiting: int
    """Answers that wait for a seat, for memory, or for the step to end."""
    kv_cache_usage: float
    """Share of the pages that somebody holds; prompts that are kept for reuse are among them."""
    num_passes: int
    num_rows: int
    num_prefix_queries: int
    num_prefix_hits: int
    seconds: dict[str, float]
    """By part of a step."""


class AsyncEngine:
    """An `LLM` for asyncio.

    >>> async with AsyncEngine(LLM()) as engine:
    ...     async for chunk in engine.generate({"messages": [...]}, SamplingParams(max_tokens=64)):
    ...         print(chunk.delta, end="")

    A thread of its own steps while a request waits or runs, and sleeps otherwise. Any number of event loops and threads
    may call; none of them ever waits for a step. The `LLM` stays usable, and its calls share the batch.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._stepper = llm.stepper
        self._inboxes: dict[str, _Inbox] = {}
        self._closing = False
        self._deadline = math.inf
        self._thread = threading.Thread(target=self._serve, name="unmask-engine", daemon=True)
        self._thread.start()
        atexit.register(self._exit)

    # --- what users call

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        canvas: bool = False,
    ) -> AsyncGenerator[StreamChunk, None]:
        """One prompt's answer as it settles: ``async for chunk in engine.generate(...)``.

        Checked at once, queued when the first chunk is asked for. Chunks are those of `LLM.stream`, except that what a
        slow reader has not read yet is merged: deltas join, and of several canvases the newest is kept. Closing the
        iterator, or cancelling the task that reads it, frees the seat, at the latest after the step that is running.

        Raises:
            RequestError: a prompt that cannot be served, or an id that is in use.
            ConfigError: parameters that contradict each other or the method.
            EngineError: the engine is shut down; while reading: the step that served this request failed.
        """
        with self._stepper.changed:
            self._check_open()
        request = self.llm.prompts.request(prompt, spread(sampling_params, 1)[0], request_id=request_id)
        self.llm.prompts.watch(request, canvas=canvas)
        return self._stream(request)

    async def abort(self, request_id: str) -> None:
        """End a request: its stream ends with what has settled and ``finish_reason`` "abort".

        Nothing happens if no such request is in flight.
        """
        with self._stepper.changed:
            inbox = self._inboxes.get(request_id)
            if inbox is not None:
                self._stepper.drop([inbox.request])

    async def shutdown(self, timeout: float | None = None) -> None:
        """Take no more requests, finish those in flight, and end the thread. More than once does no harm.

        Requests that are unfinished after ``timeout`` seconds are aborted; None waits for all of them, 0 for none.
        """
        self._close(timeout)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Requests in flight are finished, unless the block was left through an exception."""
        await self.shutdown(None if kind is None else 0)

    @property
    def num_running(self) -> int:
        """Answers that are seated."""
        return self._stepper.num_running

    @property
    def num_waiting(self) -> int:
        """Answers that wait for a seat, for memory, or for the step to end."""
        return self._stepper.num_waiting

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pages that somebody holds, 0 to 1."""
        pool = self.llm.engine.pool
        return pool.num_used / pool.num_pages

    def stats(self) -> EngineStats:
        """All counters; cheap, from any thread."""
        stats, prefixes = self.llm.engine.stats, self.llm.engine.prefixes
        return EngineStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            kv_cache_usage=self.kv_cache_usage,
            num_passes=stats.num_passes,
            num_rows=stats.num_rows,
            num_prefix_queries=prefixes.num_queries if prefixes is not None else 0,
            num_prefix_hits=prefixes.num_hits if prefixes is not None else 0,
            seconds=dict(stats.seconds),
        )

    # --- the reader's side

    async def _stream(self, request: Request) -> AsyncGenerator[StreamChunk, None]:
        inbox = _Inbox(request)
        self._enter(inbox)
        try:
            finished = False
            while not finished:
                for chunk in await inbox.take():
                    finished = chunk.finished
                    yield chunk
        finally:
            self._leave(inbox)

    def _enter(self, inbox: _Inbox) -> None:
        with self._stepper.changed:
            self._check_open()
            request_id = inbox.request.request_id
            if request_id in self._inboxes:
                raise RequestError(f"request_id {request_id!r} is in use; give each request its own, or none")
            self._stepper.add([inbox.request])
            self._inboxes[request_id] = inbox

    def _leave(self, inbox: _Inbox) -> None:
        with self._stepper.changed:
            if self._inboxes.get(inbox.request.request_id) is inbox:
                del self._inboxes[inbox.request.request_id]
                self._stepper.drop([inbox.request])

    def _check_open(self) -> None:
        if self._closing:
            raise EngineError("the engine is shut down and takes no more requests")

    def _close(self, timeout: float | None) -> None:
        with self._stepper.changed:
            self._closing = True
            if timeout is not None:
                self._deadline = min(self._deadline, time.monotonic() + timeout)
            self._stepper.changed.notify_all()

    def _exit(self) -> None:
        """The interpreter ends: a daemon thread that is inside torch then would bring it down with SIGABRT."""
        self._close(0)
        self._thread.join(_EXIT_SECONDS)

    # --- the engine's side

    def _serve(self) -> None:
        try:
            while inboxes := self._wait():
                with suppress(Exception):  # everybody whom it hit learns of it from `_Inbox.take`
                    self._stepper.step([inbox.request for inbox in inboxes])
                self._deliver(inboxes)
        finally:
            self._end()

    def _wait(self) -> list[_Inbox]:
        """Whoever is to be served, as soon as somebody is; nobody once the engine is shut down."""
        with self._stepper.changed:
            while not self._inboxes and not self._closing:
                self._stepper.changed.wait()
            inboxes = list(self._inboxes.values())
            if time.monotonic() >= self._deadline:
                self._stepper.drop([inbox.request for inbox in inboxes])
            return inboxes

    def _deliver(self, inboxes: Sequence[_Inbox]) -> None:
        for inbox in inboxes:
            if not inbox.put_news():
                self._leave(inbox)

    def _end(self) -> None:
        """Nobody may wait for a thread that is gone, whatever ended it."""
        atexit.unregister(self._exit)
        with self._stepper.changed:
            self._closing = True
            for inbox in list(self._inboxes.values()):
                self._leave(inbox)
                inbox.put([], EngineError("the engine's thread broke off; please report"))


class _Inbox:
    """What a reader has not read: never more than a chunk an answer, so a slow reader costs no steps and no memory."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._loop = asyncio.get_running_loop()
        self._filled = asyncio.Event()
        self._lock = threading.Lock()
        self._unread: dict[int, StreamChunk] = {}
        self._error: EngineError | None = None
        self._told = False
        """The reader was told and has not looked yet."""

    def put_news(self) -> bool:
        """Put what the last step brought; whether there may be more."""
        try:
            chunks = self.request.news()
        except EngineError as error:
            self.put([], error)
            return False
        return self.put(chunks) and not any(chunk.finished for chunk in chunks)

    def put(self, chunks: Sequence[StreamChunk], error: EngineError | None = None) -> bool:
        """Called by the engine's thread; False if the reader's event loop is closed."""
        if self._loop.is_closed():
            return False
        with self._lock:
            for chunk in chunks:
                self._unread[chunk.index] = _merged(self._unread.get(chunk.index), chunk)
            self._error = error
            if self._told or not (chunks or error):
                return True
            self._told = True
        try:
            self._loop.call_soon_threadsafe(self._filled.set)
        except RuntimeError:  # closed just now
            return False
        return True

    async def take(self) -> list[StreamChunk]:
        """What is unread, once there is something; the last chunk of a request comes last.

        Raises:
            EngineError: the request failed, and all that came before is read.
        """
        while True:
            with self._lock:
                unread, self._unread = list(self._unread.values()), {}
                error, self._told = self._error, False
                self._filled.clear()
            if unread:
                return sorted(unread, key=lambda chunk: chunk.finished)
            if error is not None:
                raise error
            await self._filled.wait()


def _merged(old: StreamChunk | None, new: StreamChunk) -> StreamChunk:
    if old is None:
        return new
    return StreamChunk(
        index=new.index,
        delta=old.delta + new.delta,
        token_ids=old.token_ids + new.token_ids,
        num_passes=new.num_passes,
        canvas=new.canvas if new.canvas is not None else old.canvas,
        output=new.output,
    )
