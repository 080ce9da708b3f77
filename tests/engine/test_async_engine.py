"""Requests come and go at any moment, from any event loop, and nobody else's answer, seat or page is touched by it."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from decoding.helpers import engine as stub_llm
from decoding.helpers import facts as all_facts
from oracles.golden import tiny_model
from stubs import Stub, TableTokenizer, View
from unmask import (
    LLM,
    AsyncEngine,
    ConfigError,
    EngineError,
    RequestError,
    RequestOutput,
    SamplingParams,
    StreamChunk,
    TokenizerError,
)
from unmask.engine import async_engine
from unmask.engine.engine import Engine
from unmask.engine.stepper import Stepper

METHODS = ("confidence", "flash-verify", "d2f")
VOCAB, MASK = 320, 319
TEXT = TableTokenizer({i: chr(0x3B1 + i % 24).encode() + b" " * (i % 3 == 0) for i in range(VOCAB)})
PROMPT = {"prompt_token_ids": [1, 2, 3]}
SECONDS = 60.0

Asked = tuple[Mapping[str, Any], SamplingParams]


# --- short words


def tiny_llm(method: str, seats: int = 3) -> LLM:
    """A golden model in float64, where company changes no bit; its tokens spell Greek letters of two bytes."""
    model = tiny_model("tiny-llada", dtype=torch.float64)
    return LLM(model, method=method, tokenizer=TEXT, device="cpu", max_num_seqs=seats, allow_attention_mismatch=True)


def mixed(seed: int, count: int) -> list[Asked]:
    """Requests of all kinds: lengths, temperatures, several answers, stop strings."""
    r = random.Random(seed)
    out = []
    for number in range(count):
        said: dict[str, Any] = {"max_tokens": r.randint(4, 40), "seed": number, "trajectory": True}
        said |= {"temperature": r.choice([0.0, 1.0, 1.5]), "ignore_eos": r.random() < 0.5, "n": r.choice([1, 1, 1, 2])}
        said |= {"stop": r.choice([(), (), ("αβ", "γ δ"), ("ω",)])}
        prompt = [r.randrange(VOCAB - 2) for _ in range(r.randint(1, 30))]
        out.append(({"prompt_token_ids": prompt}, SamplingParams(**said)))
    return out


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    """The work in an event loop of its own; a hang is a failure."""

    async def bounded() -> Any:
        return await asyncio.wait_for(work(), SECONDS)

    return asyncio.run(bounded())


async def read(stream: AsyncIterator[StreamChunk]) -> tuple[list[StreamChunk], RequestOutput]:
    """All chunks and the result; what holds for every stream is checked here."""
    chunks = [chunk async for chunk in stream]
    assert [chunk.finished for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    output = chunks[-1].output
    assert output is not None
    for answer in output.outputs:
        own = [chunk for chunk in chunks if chunk.index == answer.index]
        assert "".join(chunk.delta for chunk in own) == answer.text
        told = [token for chunk in own for token in chunk.token_ids]
        assert told[: len(answer.token_ids)] == answer.token_ids, "more only behind a stop string"
        passes = [chunk.num_passes for chunk in own]
        assert passes == sorted(passes)
    return chunks, output


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread does."""
    limit = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < limit, "it never came"
        await asyncio.sleep(0.001)


def assert_whole(llm: LLM) -> None:
    """Nobody is inside, and everything that requests hold was given back, once."""
    scheduler, pool, prefixes = llm.engine.scheduler, llm.engine.pool, llm.engine.prefixes
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert sorted(scheduler._free) == list(range(scheduler.max_seats))
    assert all(not pool.pages(seat) for seat in range(scheduler.max_seats))
    assert pool.num_used == (prefixes.num_pages if prefixes is not None else 0)
    assert len(set(pool._free)) == pool.num_free
    assert not llm.engine.canvas.active_S.any()
    assert not llm.engine._found


async def quiet(engine: AsyncEngine) -> None:
    """Wait until nobody is served, and the last step is over."""

    def nobody() -> bool:
        with engine.llm.stepper.changed:
            return not engine._inboxes and not engine.llm.stepper._stepping

    await until(nobody)


def facts(output: RequestOutput) -> list[tuple[Any, ...]]:
    """All that must not depend on company. Rows may, where a prompt that somebody else had is kept."""
    return [(index, ids, passes, *rest) for index, ids, passes, _, *rest in all_facts(output)]


def finish_reasons(output: RequestOutput) -> list[str]:
    return [answer.finish_reason for answer in output.outputs]


def each(length: int, **said: Any) -> SamplingParams:
    """One token a pass."""
    return SamplingParams(**{"max_tokens": length, "steps": length, "block_length": 0} | said)


def spelling(before: Callable[[int], None] | None = None, seats: int = 4) -> tuple[LLM, Stub]:
    """Every answer is a, b, c, ... from left to right."""

    def script(view: View) -> Mapping[int, float]:
        return {(view.position - 3) % 26: 0.9 - 0.001 * view.position} if view.position >= 3 else {0: 0.1}

    stub = Stub(script, before=before)
    tokenizer = TableTokenizer({i: bytes([97 + i]) for i in range(26)})
    return stub_llm(stub, tokenizer=tokenizer, max_num_seqs=seats), stub


class Gate:
    """Holds a step until it is opened; `before` of a stub."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.closed_at = -1

    def __call__(self, number: int) -> None:
        if number == self.closed_at:
            self.reached.set()
            self.opened.wait(SECONDS / 4)

    def close(self, at: int) -> None:
        """Before the pass of this number, counted from the first."""
        self.closed_at = at


# --- streams are what `LLM.generate` says


@pytest.mark.parametrize("method", METHODS)
def test_streams_equal_generate(method: str) -> None:
    asked = mixed(1, 20)
    want = tiny_llm(method).generate([prompt for prompt, _ in asked], [params for _, params in asked])
    assert len({out.outputs[0].text for out in want}) > 15

    async def work() -> list[RequestOutput]:
        r = random.Random(2)
        async with AsyncEngine(tiny_llm(method)) as engine:

            async def one(prompt: Any, params: SamplingParams) -> RequestOutput:
                await asyncio.sleep(r.random() * 0.5)
                return (await read(engine.generate(prompt, params, canvas=r.random() < 0.3)))[1]

            outputs = await asyncio.gather(*(one(*each) for each in asked))
            await quiet(engine)
            assert_whole(engine.llm)
            return outputs

    got = run(work)
    for have, wanted in zip(got, want, strict=True):
        assert facts(have) == facts(wanted)
        assert [answer.text for answer in have.outputs] == [answer.text for answer in wanted.outputs]


def test_several_event_loops_and_the_llm_itself() -> None:
    """Four threads with a loop each, and one that calls `LLM.generate`: all in one batch."""
    asked, llm = mixed(3, 12), tiny_llm("confidence", seats=5)
    want = tiny_llm("confidence").generate([prompt for prompt, _ in asked], [params for _, params in asked])
    engine, got = AsyncEngine(llm), dict[int, RequestOutput]()

    def served(number: int) -> None:
        async def work() -> None:
            streams = [read(engine.generate(*asked[at])) for at in range(number, 12, 6)]
            got.update(zip(range(number, 12, 6), [output for _, output in await asyncio.gather(*streams)]))

        run(work)

    def called(number: int) -> None:
        prompts, params = zip(*(asked[at] for at in range(number, 12, 6)))
        got.update(zip(range(number, 12, 6), llm.generate(prompts, params)))

    threads = [threading.Thread(target=served if n < 4 else called, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert [facts(got[n]) for n in range(12)] == [facts(each) for each in want]
    assert_whole(llm)
    run(engine.shutdown)


def test_messages_and_text() -> None:
    llm, _ = spelling()

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            _, output = await read(engine.generate("cab", each(3)))
            assert (output.prompt, output.prompt_token_ids, output.outputs[0].text) == ("cab", [2, 0, 1], "abc")
            assert output.request_id == "request-0"
            _, output = await read(engine.generate("cab", each(3), request_id="mine"))
            assert output.request_id == "mine"

    run(work)


# --- leaving


class Turns:
    """One step at a time: each is held before it begins until all who read, leave or come have done so.

    What is seated and what is queued when somebody leaves then hangs on steps alone, not on the machine's speed.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine, self._step = engine, engine.llm.engine.step
        self._held, self._may = threading.Event(), threading.Semaphore(0)
        self._turn = asyncio.Event()
        engine.llm.engine.step = self._hold  # type: ignore[method-assign]

    def _hold(self) -> None:
        self._held.set()
        self._may.acquire(timeout=SECONDS / 4)
        self._step()

    async def wait(self, count: int) -> None:
        for _ in range(count):
            await self._turn.wait()

    async def enter(self, count: int) -> None:
        """Wait among others: whether the second of two gets into a step that the first sets off, time decides."""
        await self.wait(count)
        assert self._held.is_set()

    @staticmethod
    async def _settle() -> None:
        """More rounds of the event loop than lie between the engine's word and all that follows from it."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def give(self, everybody: asyncio.Future[Any]) -> None:
        """Turns, from the first request on until everybody is done; then steps are free."""
        try:
            await until(self._held.is_set)
            while not everybody.done():
                await until(lambda: self._held.is_set() or not self._engine._inboxes)
                held = self._held.is_set()
                await self._settle()  # what the last step brought is read
                self._turn.set()
                self._turn = asyncio.Event()
                await self._settle()
                if held:
                    self._held.clear()
                    self._may.release()
        finally:
            self._engine.llm.engine.step = self._step  # type: ignore[method-assign]
            self._may.release()


Pause = Callable[[], Awaitable[Any]]


async def leave_somehow(
    engine: AsyncEngine, asked: Asked, r: random.Random, number: int, pause: Pause, moment: Pause
) -> None:
    """Begin a request and end it in one of the ways that there are: after a pause, or a moment after some chunk."""
    request_id, way = f"leaver-{number}", r.choice(["abort", "cancel", "close", "cancel at once"])

    async def follow() -> None:
        async for chunk in engine.generate(*asked, request_id=request_id):
            if chunk.output is not None:
                assert all(reason in ("abort", "stop", "length") for reason in finish_reasons(chunk.output))

    if way == "close":
        stream = engine.generate(*asked, request_id=request_id)
        async for _ in stream:
            if r.random() < 0.3:
                break
        await moment()
        await stream.aclose()
        return
    task = asyncio.create_task(follow())
    await (asyncio.sleep(0) if way == "cancel at once" else pause())
    if way == "abort":
        await engine.abort(request_id)
        await engine.abort(request_id)
        await task
    else:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def leavers_and_stayers(method: str, gone: list[int]) -> tuple[int, int]:
    """50 requests that leave at random moments, many while queued, among 12 that stay; then one more.

    40 leave at steps that are drawn, the other 10 when the clock says, so that any part of a step may be running.
    Returns how many answers of the 40 ended in the queue and in a seat, from ``gone``, the seats of all who ended.
    """
    stay, go = mixed(4, 12), mixed(5, 50)
    want = tiny_llm(method).generate([prompt for prompt, _ in stay], [params for _, params in stay])

    async def work() -> tuple[int, int]:
        async with AsyncEngine(tiny_llm(method, seats=6)) as engine:
            turns = Turns(engine)

            async def one(number: int, pause: Pause) -> None:
                await pause()
                assert facts((await read(engine.generate(*stay[number])))[1]) == facts(want[number])

            async def leaver(number: int, enter: Pause, leave: Pause, moment: Pause) -> None:
                await enter()
                await leave_somehow(engine, go[number], random.Random(number), number, leave, moment)

            def steps(how: Callable[[int], Awaitable[None]], most: int) -> Pause:
                count = r.randint(1, most)
                return lambda: how(count)

            def seconds(most: float) -> Pause:
                length = r.random() * most
                return lambda: asyncio.sleep(length)

            r = random.Random(6)
            stayers = [one(number, steps(turns.enter, 10)) for number in range(1, 7)]
            stayers.append(one(0, lambda: turns.wait(0)))
            leavers = [
                leaver(n, steps(turns.enter, 10), steps(turns.wait, 40), lambda: turns.wait(1)) for n in range(40)
            ]
            everybody = asyncio.gather(*stayers, *leavers)
            await turns.give(everybody)
            await everybody
            await quiet(engine)
            queued, seated = sum(seat < 0 for seat in gone), sum(seat >= 0 for seat in gone)
            stayers = [one(number, seconds(0.3)) for number in range(7, 12)]
            leavers = [leaver(n, seconds(0.3), seconds(0.2), lambda: asyncio.sleep(0)) for n in range(40, 50)]
            await asyncio.gather(*stayers, *leavers)
            await quiet(engine)
            stats = engine.stats()
            assert (stats.num_running, stats.num_waiting) == (0, 0)
            assert_whole(engine.llm)
            await one(0, lambda: asyncio.sleep(0))
            return queued, seated

    counts: tuple[int, int] = run(work)
    return counts


@pytest.mark.parametrize("method", METHODS)
def test_b35_fifty_random_leavers(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[int] = []
    so_far = Stepper._so_far
    monkeypatch.setattr(Stepper, "_so_far", lambda self, answer: gone.append(answer.seat) or so_far(self, answer))
    queued, seated = leavers_and_stayers(method, gone)
    assert queued > 5, "too few were queued"
    assert seated > 5, "too few were seated"


def one_leaves() -> None:
    """The iterator is closed after its first chunk; nobody else is there who would step."""

    async def work() -> None:
        async with AsyncEngine(spelling()[0]) as engine:
            stream = engine.generate(PROMPT, each(200))
            await stream.__anext__()
            await stream.aclose()
            await quiet(engine)
            assert_whole(engine.llm)

    run(work)


def test_closing_the_iterator_ends_the_request() -> None:
    one_leaves()


def test_a_request_that_nobody_ends_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(Stepper, "drop", lambda self, requests: None)  # noqa: ARG005
    with pytest.raises(AssertionError):
        one_leaves()


def test_pages_that_are_kept_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""

    def free(self: Engine, seat: int) -> None:
        self.canvas.release(seat)
        self.params.release(seat)

    monkeypatch.setattr(Engine, "_free", free)
    llm, _ = spelling()
    llm.generate([PROMPT], each(3))
    with pytest.raises(AssertionError):
        assert_whole(llm)


def test_an_abort_says_so_and_gives_what_has_settled() -> None:
    gate = Gate()
    llm, stub = spelling(before=gate)
    gate.close(at=5)

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            task = asyncio.create_task(read(engine.generate(PROMPT, each(20), request_id="one")))
            await until(gate.reached.is_set)
            await engine.abort("another")
            await engine.abort("one")
            await engine.abort("one")
            gate.opened.set()
            _, output = await task
            (answer,) = output.outputs
            assert (answer.text, answer.token_ids, answer.finish_reason) == ("abcdef", [*range(6)], "abort")
            assert (answer.num_forward_passes, answer.num_rows, answer.num_committed) == (6, 6 * 23, 6)
            assert (output.request_id, output.finished, output.prompt_token_ids) == ("one", True, [1, 2, 3])
            assert_whole(llm)
            assert len(stub.calls) == 6, "it ran on"
            await engine.abort("one")
            assert (await read(engine.generate(PROMPT, each(3), request_id="one")))[1].outputs[0].text == "abc"

    run(work)


def test_an_abort_in_the_queue() -> None:
    gate = Gate()
    llm, stub = spelling(before=gate, seats=1)
    gate.close(at=2)

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            first = asyncio.create_task(read(engine.generate(PROMPT, each(5))))
            await until(gate.reached.is_set)
            queued = asyncio.create_task(read(engine.generate(PROMPT, each(5, n=2), request_id="queued")))
            await until(lambda: engine.num_waiting == 2)
            await engine.abort("queued")
            gate.opened.set()
            _, output = await queued
            assert [(a.text, a.finish_reason, a.num_forward_passes) for a in output.outputs] == [("", "abort", 0)] * 2
            assert (await first)[1].outputs[0].text == "abcde"
            assert_whole(llm)
            assert [call.num_rows for call in stub.calls] == [8] * 5

    run(work)


def test_an_answer_that_is_done_keeps_its_reason() -> None:
    """Of two answers the stop string ends one; then the request is aborted."""
    gate = Gate()

    def script(view: View) -> Mapping[int, float]:
        return dict.fromkeys(range(26), 1 / 26) if view.position < 4 else {26: 0.9}

    llm = stub_llm(Stub(script, before=gate), tokenizer=TableTokenizer({i: bytes([97 + i]) for i in range(27)}))
    said = {"max_tokens": 9, "steps": 9, "block_length": 1, "temperature": 1.0, "seed": 2, "n": 2}
    free = llm.generate([PROMPT], SamplingParams(**said))[0].outputs
    assert free[0].text[0] != free[1].text[0]
    gate.close(at=len(llm.model.calls) + 3)

    async def work() -> RequestOutput:
        async with AsyncEngine(llm) as engine:
            stream = engine.generate(PROMPT, SamplingParams(**said, stop=free[0].text[0]), request_id="two")
            task = asyncio.create_task(read(stream))
            await until(gate.reached.is_set)
            await engine.abort("two")
            gate.opened.set()
            return (await task)[1]

    stopped, aborted = run(work).outputs
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", free[0].text[0])
    assert (aborted.finish_reason, aborted.text) == ("abort", free[1].text[:4])


def test_a_finished_request_is_never_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[Any] = []
    so_far = Stepper._so_far
    monkeypatch.setattr(Stepper, "_so_far", lambda self, answer: cut.append(answer) or so_far(self, answer))

    async def work() -> None:
        async with AsyncEngine(spelling()[0]) as engine:
            for _ in range(5):
                await read(engine.generate(PROMPT, each(4)))

    run(work)
    assert cut == []


def test_cancelling_frees_after_the_running_step_and_waits_for_nothing() -> None:
    gate = Gate()
    llm, stub = spelling(before=gate)
    gate.close(at=3)

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            stays = asyncio.create_task(read(engine.generate(PROMPT, each(8))))
            await until(lambda: engine.num_running == 1)
            goes = asyncio.create_task(read(engine.generate(PROMPT, each(20))))
            await until(gate.reached.is_set)
            goes.cancel()
            with pytest.raises(asyncio.CancelledError):
                await goes
            assert not gate.opened.is_set()
            num_passes = len(stub.calls)
            gate.opened.set()
            assert (await stays)[1].outputs[0].text == "abcdefgh"
            assert [call.num_rows for call in stub.calls[num_passes + 1 :]] == [11] * (7 - num_passes)
            assert_whole(llm)

    run(work)


def test_a_stream_that_is_dropped_without_closing() -> None:
    """`break` leaves the iterator to the garbage collector, which asyncio hears of."""
    llm, _ = spelling()

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            async for _ in engine.generate(PROMPT, each(200)):
                break
            await quiet(engine)
            assert engine.stats().num_passes < 200
            assert_whole(llm)

    run(work)


def test_an_event_loop_that_is_gone() -> None:
    """Its tasks were never cancelled; what they had asked for is dropped all the same."""
    gate = Gate()
    llm, stub = spelling(before=gate)
    gate.close(at=4)
    engine, loop = AsyncEngine(llm), asyncio.new_event_loop()
    stream = engine.generate(PROMPT, each(100))
    waiting = loop.create_task(stream.__anext__())
    loop.run_until_complete(asyncio.sleep(0.01))
    assert gate.reached.wait(SECONDS)
    loop.close()
    gate.opened.set()
    run(lambda: quiet(engine))
    assert len(stub.calls) < 20
    assert_whole(llm)
    run(engine.shutdown)
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_stream_that_is_never_read_costs_nothing() -> None:
    llm, stub = spelling()

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            stream = engine.generate(PROMPT, each(9), request_id="unread")
            await read(engine.generate(PROMPT, each(4)))
            await stream.aclose()

    run(work)
    assert [call.num_rows for call in stub.calls] == [7] * 4


# --- nobody waits for a step


def calls_during_a_step() -> list[bool]:
    """Whether the step was still running after each thing that a caller can do."""
    gate, gate_was_shut = Gate(), []
    llm, _ = spelling(before=gate)
    gate.close(at=2)
    opener = threading.Timer(1.0, gate.opened.set)

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            task = asyncio.create_task(read(engine.generate(PROMPT, each(9), request_id="a")))
            await until(gate.reached.is_set)
            opener.start()
            other = asyncio.create_task(read(engine.generate(PROMPT, each(9))))
            await asyncio.sleep(0)
            gate_was_shut.append(not gate.opened.is_set())
            stats = engine.stats()
            assert stats.kv_cache_usage > 0
            gate_was_shut.append(not gate.opened.is_set())
            await engine.abort("a")
            gate_was_shut.append(not gate.opened.is_set())
            gate.opened.set()
            await asyncio.gather(task, other)

    run(work)
    opener.cancel()
    return gate_was_shut


def test_nobody_waits_for_a_step() -> None:
    assert calls_during_a_step() == [True, True, True]


def test_a_lock_around_the_step_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    step = Stepper.step

    def locked(self: Stepper, requests: Any) -> bool:
        with self.changed:
            return step(self, requests)

    monkeypatch.setattr(Stepper, "step", locked)
    assert calls_during_a_step() != [True, True, True]


def test_the_thread_sleeps_when_nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, stub = spelling()
    steps: list[int] = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: steps.append(1) or step(self))

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            wakes: list[int] = []
            wait = engine._wait
            monkeypatch.setattr(engine, "_wait", lambda: wakes.append(1) or wait())
            await asyncio.sleep(0.1)
            assert (steps, wakes) == ([], [])
            await read(engine.generate(PROMPT, each(4)))
            await asyncio.sleep(0.1)
            assert (len(steps), len(stub.calls)) == (4, 4)
            assert len(wakes) <= 6

    run(work)


# --- slow readers


def unread_meanwhile(canvas: bool, num_answers: int = 1) -> tuple[int, list[StreamChunk], RequestOutput, int]:
    """A reader that looks away after its first chunk: what was kept for it, what it read, and what it was called."""
    llm, _ = spelling()

    async def work() -> tuple[int, list[StreamChunk], RequestOutput, int]:
        async with AsyncEngine(llm) as engine:
            loop, num_wakes = asyncio.get_running_loop(), 0
            soon = loop.call_soon_threadsafe

            def counted(*said: Any, **more: Any) -> Any:
                nonlocal num_wakes
                num_wakes += 1
                return soon(*said, **more)

            stream = engine.generate(PROMPT, each(50, n=num_answers), canvas=canvas)
            first = await stream.__anext__()
            (inbox,) = engine._inboxes.values()
            loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
            time.sleep(0.1)  # the loop itself stands still
            await quiet(engine)
            loop.call_soon_threadsafe = soon  # type: ignore[method-assign]
            num_unread = len(inbox._unread) + sum(len(answer.chunks) for answer in inbox.request.answers)
            chunks = [first, *[chunk async for chunk in stream]]
            output = chunks[-1].output
            assert output is not None
            return num_unread, chunks, output, num_wakes

    return run(work)


@pytest.mark.parametrize("canvas", [False, True])
def test_a_slow_reader(canvas: bool) -> None:
    num_unread, chunks, output, num_wakes = unread_meanwhile(canvas)
    answer = output.outputs[0]
    assert (num_unread, num_wakes <= 1) == (1, True)
    assert answer.num_forward_passes == 50
    assert "".join(chunk.delta for chunk in chunks) == answer.text == ("abcdefghijklmnopqrstuvwxyz" * 2)[:50]
    assert [token for chunk in chunks for token in chunk.token_ids] == answer.token_ids
    if canvas:
        last = chunks[-1].canvas
        assert last is not None
        assert [cell.token_id for cell in last] == answer.token_ids
        assert len(chunks) <= 3


def test_a_slow_reader_of_several_answers() -> None:
    num_unread, chunks, output, _ = unread_meanwhile(canvas=True, num_answers=3)
    assert num_unread == 3
    for answer in output.outputs:
        assert "".join(chunk.delta for chunk in chunks if chunk.index == answer.index) == answer.text
    assert [chunk.finished for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_text_that_is_lost_in_merging_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(async_engine, "_merged", lambda _, new: new)
    _, chunks, output, _ = unread_meanwhile(canvas=False)
    assert "".join(chunk.delta for chunk in chunks) != output.outputs[0].text


def test_a_quick_reader_sees_every_pass() -> None:
    """As long as it keeps up: the reader decides when the next pass runs."""
    turn = threading.Semaphore(1)
    llm, _ = spelling(before=lambda _: assert_acquired(turn))

    async def work() -> list[StreamChunk]:
        async with AsyncEngine(llm) as engine:
            chunks = []
            async for chunk in engine.generate(PROMPT, each(6), canvas=True):
                chunks.append(chunk)
                turn.release()
            return chunks

    chunks = run(work)
    assert [chunk.num_passes for chunk in chunks] == [1, 2, 3, 4, 5, 6]
    assert [chunk.delta for chunk in chunks] == [*"abcdef"]
    assert [sum(cell.token_id is None for cell in chunk.canvas) for chunk in chunks] == [5, 4, 3, 2, 1, 0]


def assert_acquired(turn: threading.Semaphore) -> None:
    assert turn.acquire(timeout=SECONDS)


# --- steps that fail


def test_a_step_that_fails() -> None:
    """Everyone who runs or waits is told, with the cause; who comes meanwhile and afterwards is served."""
    gate, trouble = Gate(), ValueError("no memory")

    def before(number: int) -> None:
        gate(number)
        if number == 3 and gate.reached.is_set() and not failed:
            failed.append(number)
            raise trouble

    failed: list[int] = []
    llm, _ = spelling(before=before, seats=2)
    gate.close(at=3)

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            inside = [asyncio.create_task(read(engine.generate(PROMPT, each(9)))) for _ in range(5)]
            await until(gate.reached.is_set)
            late = asyncio.create_task(read(engine.generate(PROMPT, each(5))))
            await asyncio.sleep(0)
            gate.opened.set()
            for error in await asyncio.gather(*inside, return_exceptions=True):
                assert isinstance(error, EngineError)
                assert error.__cause__ is trouble
            assert (await late)[1].outputs[0].text == "abcde"
            assert_whole(llm)
            assert (await read(engine.generate(PROMPT, each(7))))[1].outputs[0].text == "abcdefg"
            assert_whole(llm)

    run(work)


def test_what_came_before_a_failure_is_read_first() -> None:
    gate = Gate()

    def before(number: int) -> None:
        gate(number)
        if number == 4:
            raise ValueError("no memory")

    llm, _ = spelling(before=before)
    gate.close(at=4)

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            stream = engine.generate(PROMPT, each(9))
            first = await stream.__anext__()
            await until(gate.reached.is_set)
            gate.opened.set()
            await quiet(engine)
            assert first.delta + (await stream.__anext__()).delta == "abcd"
            with pytest.raises(EngineError, match="sent again"):
                await stream.__anext__()

    run(work)


def test_a_failure_that_leaves_ruins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seats that cannot be freed: everyone is told, and nobody waits for an engine that is gone."""

    def before(number: int) -> None:
        if number == 1:
            monkeypatch.setattr(Engine, "_free", lambda self, seat: 1 / 0)  # noqa: ARG005
            raise ValueError("the device is gone")

    llm, _ = spelling(before=before, seats=2)

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            inside = [asyncio.create_task(read(engine.generate(PROMPT, each(9)))) for _ in range(4)]
            for error in await asyncio.gather(*inside, return_exceptions=True):
                assert isinstance(error, EngineError)
                assert isinstance(error.__cause__, ValueError)
            with pytest.raises(EngineError, match="broke down"):
                await read(engine.generate(PROMPT, each(3)))
        with pytest.raises(EngineError, match="broke down"):
            llm.generate([PROMPT], each(3))

    run(work)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_tells_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        engine = AsyncEngine(spelling()[0])
        monkeypatch.setattr(engine, "_deliver", lambda _: 1 / 0)
        with pytest.raises(EngineError, match="broke off"):
            await read(engine.generate(PROMPT, each(9)))
        with pytest.raises(EngineError, match="shut down"):
            engine.generate(PROMPT, each(9))
        await engine.shutdown()
        assert_whole(engine.llm)

    run(work)


# --- shutting down


@contextmanager
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert [each for each in threading.enumerate() if each not in before and each.name == "unmask-engine"] == []


@pytest.mark.parametrize("timeout", [None, 60.0, 0.0, 0.02])
def test_shutdown(timeout: float | None) -> None:
    """Finished without a limit or within it, aborted after it."""
    llm, _ = spelling(before=lambda _: time.sleep(0.005))

    async def work() -> list[RequestOutput]:
        engine = AsyncEngine(llm)
        tasks = [asyncio.create_task(read(engine.generate(PROMPT, each(20)))) for _ in range(6)]
        await until(lambda: engine.num_running == 4)
        unread = engine.generate(PROMPT, each(4))
        await engine.shutdown(timeout)
        await engine.shutdown()
        for late in (lambda: engine.generate(PROMPT), lambda: engine.generate({"prompt_token_ids": []})):
            with pytest.raises(EngineError, match="shut down"):
                late()
        with pytest.raises(EngineError, match="shut down"):
            await unread.__anext__()
        await engine.abort("request-0")
        return [output for _, output in await asyncio.gather(*tasks)]

    with no_thread_left():
        outputs = run(work)
    reasons = {reason for output in outputs for reason in finish_reasons(output)}
    assert reasons == {"length" if timeout is None or timeout > 1 else "abort"}
    assert_whole(llm)
    assert llm.generate([PROMPT], each(4))[0].outputs[0].text == "abcd"


def test_a_second_shutdown_may_be_less_patient() -> None:
    llm, stub = spelling(before=lambda _: time.sleep(0.005))

    async def work() -> RequestOutput:
        engine = AsyncEngine(llm)
        task = asyncio.create_task(read(engine.generate(PROMPT, each(200))))
        await until(lambda: engine.num_running == 1)
        patient = asyncio.create_task(engine.shutdown())
        await asyncio.sleep(0.02)
        await asyncio.gather(patient, engine.shutdown(0))
        return (await task)[1]

    with no_thread_left():
        assert finish_reasons(run(work)) == ["abort"]
    assert len(stub.calls) < 200


def test_shutdown_of_an_idle_engine() -> None:
    with no_thread_left():
        run(AsyncEngine(spelling()[0]).shutdown)


def test_the_block_finishes_what_was_begun() -> None:
    llm, _ = spelling()

    async def work() -> RequestOutput:
        async with AsyncEngine(llm) as engine:
            task = asyncio.create_task(read(engine.generate(PROMPT, each(20))))
            await until(lambda: engine.num_running == 1)
        return (await task)[1]

    with no_thread_left():
        assert finish_reasons(run(work)) == ["length"]


def test_an_exception_in_the_block_ends_it_at_once() -> None:
    llm, stub = spelling(before=lambda _: time.sleep(0.005))

    tasks = []

    async def block() -> None:
        async with AsyncEngine(llm) as engine:
            tasks.append(asyncio.create_task(read(engine.generate(PROMPT, each(200)))))
            await until(lambda: engine.num_running == 1)
            raise KeyError

    async def work() -> RequestOutput:
        with pytest.raises(KeyError):
            await block()
        return (await tasks[0])[1]

    with no_thread_left():
        assert finish_reasons(run(work)) == ["abort"]
    assert len(stub.calls) < 200


FORGOTTEN = """
import asyncio
from unmask import LLM, AsyncEngine, SamplingParams

async def work():
    engine = AsyncEngine(LLM())
    stream = engine.generate("What", SamplingParams(max_tokens=200, ignore_eos=True, steps=200, block_length=0))
    task = asyncio.ensure_future(stream.__anext__())
    while engine.num_running == 0:
        await asyncio.sleep(0.01)
    return engine, stream, task

loop = asyncio.new_event_loop()
kept = loop.run_until_complete(work())
print("the end")
"""


def test_a_forgotten_engine_lets_the_interpreter_go() -> None:
    """In the middle of a step: a daemon thread inside torch would bring it down with SIGABRT."""
    done = subprocess.run([sys.executable, "-c", FORGOTTEN], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr


# --- what is refused


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ({"prompt_token_ids": []}, None, RequestError),
        ({"prompt_token_ids": [1, 64]}, None, RequestError),
        ({"prompt_token_ids": [1, 60]}, None, RequestError),
        ({"prompt_token_ids": [1] * 256}, None, RequestError),
        ({"prompt_token_ids": "one"}, None, RequestError),
        (7, None, RequestError),
        (PROMPT, SamplingParams(max_tokens=254), RequestError),
        (PROMPT, SamplingParams(stop_token_ids=(64,)), RequestError),
        (PROMPT, SamplingParams(steps=2, max_tokens=8, block_length=1), ConfigError),
        (PROMPT, {"max_tokens": 3}, ConfigError),
        ({"messages": [{"role": "user", "content": "a"}]}, None, TokenizerError),
    ],
)
def test_a_wrong_request_is_refused_where_it_is_made(prompt: Any, params: Any, error: type[Exception]) -> None:
    llm, stub = spelling()

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            with pytest.raises(error):
                engine.generate(prompt, params)
            assert (engine.num_waiting, engine.num_running, len(stub.calls)) == (0, 0, 0)
            assert (await read(engine.generate(PROMPT, each(3))))[1].outputs[0].text == "abc"

    run(work)


def test_a_canvas_larger_than_the_pool_is_refused_where_it_is_made() -> None:
    """Guidance takes two seats, and this pool holds one canvas of full length."""
    model = tiny_model("tiny-llada", dtype=torch.float64)
    llm = LLM(model, method="confidence", tokenizer=None, device="cpu", max_num_seqs=2, kv_cache_memory_bytes=2_200_000)
    assert llm.max_model_len <= 16 * llm.engine.pool.num_pages < 2 * llm.max_model_len
    most = llm.max_model_len - 3

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            with pytest.raises(RequestError, match="pages"):
                engine.generate(PROMPT, SamplingParams(max_tokens=most, cfg_scale=1.0))
            await read(engine.generate(PROMPT, SamplingParams(max_tokens=8)))
            assert_whole(llm)

    run(work)


def test_an_id_that_is_in_use() -> None:
    gate = Gate()
    llm, _ = spelling(before=gate)
    gate.close(at=1)

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            task = asyncio.create_task(read(engine.generate(PROMPT, each(4), request_id="a")))
            await until(gate.reached.is_set)
            with pytest.raises(RequestError, match="'a' is in use"):
                await read(engine.generate(PROMPT, each(4), request_id="a"))
            gate.opened.set()
            assert (await task)[1].outputs[0].text == "abcd"
            assert (await read(engine.generate(PROMPT, each(4), request_id="a")))[1].outputs[0].text == "abcd"

    run(work)


# --- counters


def test_counters() -> None:
    gate = Gate()
    llm, _ = spelling(before=gate, seats=2)
    gate.close(at=2)

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            assert (engine.num_running, engine.num_waiting, engine.kv_cache_usage) == (0, 0, 0.0)
            inside = [asyncio.create_task(read(engine.generate(PROMPT, each(20)))) for _ in range(3)]
            await until(gate.reached.is_set)
            late = asyncio.create_task(read(engine.generate(PROMPT, each(4, n=2))))
            await asyncio.sleep(0)
            stats = engine.stats()
            assert (stats.num_running, stats.num_waiting) == (2, 3)
            assert stats.kv_cache_usage == engine.kv_cache_usage == 4 / llm.engine.pool.num_pages
            gate.opened.set()
            await asyncio.gather(*inside, late)
            stats = engine.stats()
            assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
            assert (stats.num_passes, stats.num_rows) == (len(llm.model.calls), 3 * 20 * 23 + 2 * 4 * 7)
            assert (stats.num_prefix_queries, stats.num_prefix_hits) == (0, 0)
            assert "rules" in stats.seconds

    run(work)


def test_prompts_that_are_kept_count_as_held() -> None:
    async def work() -> None:
        async with AsyncEngine(tiny_llm("d2f")) as engine:
            for _ in range(2):
                await read(engine.generate({"prompt_token_ids": [5] * 40}, SamplingParams(max_tokens=4)))
            stats = engine.stats()
            assert (stats.num_prefix_queries, stats.num_prefix_hits) == (2, 1)
            assert stats.kv_cache_usage == 3 / engine.llm.engine.pool.num_pages

    run(work)
