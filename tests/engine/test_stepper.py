"""Threads that share one `LLM`: they carry each other's requests, and nobody loses anything by it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from decoding.helpers import engine
from oracles.golden import tiny_model
from stubs import Stub, TableTokenizer, View
from unmask import LLM, EngineError, RequestError, SamplingParams

PROMPT = {"prompt_token_ids": [1, 2, 3]}
LETTERS = TableTokenizer({i: bytes([97 + i]) for i in range(26)})
SECONDS = 30.0


def each(length: int, **said: Any) -> SamplingParams:
    """One token a pass."""
    return SamplingParams(**{"max_tokens": length, "steps": length, "block_length": 0} | said)


def random_letters(before: Callable[[int], None] | None = None) -> tuple[LLM, Stub]:
    def script(_: View) -> Mapping[int, float]:
        return dict.fromkeys(range(26), 1 / 26)

    stub = Stub(script, before=before)
    return engine(stub, tokenizer=LETTERS), stub


@pytest.mark.parametrize("num_read", range(1, 7))
def test_a_stream_that_another_call_brings_to_its_end(num_read: int) -> None:
    """Whatever answer it was at when it was left alone."""
    llm, _ = random_letters()
    params = SamplingParams(max_tokens=6, steps=6, block_length=1, temperature=1.0, seed=2, n=3)
    stream = llm.stream(PROMPT, params)
    chunks = [next(stream) for _ in range(num_read)]
    whole = llm.generate([PROMPT], params.replace(max_tokens=12, steps=12))[0]
    assert not llm.engine.busy
    chunks += stream
    assert [chunk.finished for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    for answer in chunks[-1].output.outputs:
        assert "".join(chunk.delta for chunk in chunks if chunk.index == answer.index) == answer.text
        assert whole.outputs[answer.index].text.startswith(answer.text)


def test_a_refused_prompt_leaves_nothing_in_the_queue() -> None:
    """The second canvas is larger than the pool, once guidance takes two seats."""
    model = tiny_model("tiny-llada", dtype=torch.float64)
    llm = LLM(model, method="confidence", tokenizer=None, device="cpu", max_num_seqs=2, kv_cache_memory_bytes=2_200_000)
    params = [SamplingParams(max_tokens=4), SamplingParams(max_tokens=llm.max_model_len - 3, cfg_scale=1.0)]
    with pytest.raises(RequestError, match="pages"):
        llm.generate([PROMPT, PROMPT], params)
    assert not llm.engine.busy


class Together:
    """Calls of several threads, all begun while the first one's third pass stands still."""

    def __init__(self, fails: bool = False) -> None:
        self.reached, self.opened, self.fails = threading.Event(), threading.Event(), fails
        self.llm, self.stub = random_letters(before=self._before)
        self.results: dict[int, Any] = {}

    def _before(self, number: int) -> None:
        if number == 2:
            self.reached.set()
            self.opened.wait(SECONDS)
            if self.fails:
                self.fails = False
                raise ValueError("no memory")

    def _call(self, number: int, length: int) -> None:
        try:
            self.results[number] = self.llm.generate([PROMPT], each(length))[0]
        except Exception as error:
            self.results[number] = error

    def run(self, *lengths: int) -> dict[int, Any]:
        threads = [threading.Thread(target=self._call, args=pair) for pair in enumerate(lengths)]
        threads[0].start()
        assert self.reached.wait(SECONDS)
        for thread in threads[1:]:
            thread.start()
        while self.llm.stepper.num_waiting < len(lengths) - 1:
            pass
        self.opened.set()
        for thread in threads:
            thread.join(SECONDS)
        return self.results


def test_calls_of_several_threads_share_the_batch() -> None:
    """Everybody's first pass is the one after the third of the first."""
    together = Together()
    results = together.run(9, 4, 5)
    assert [results[n].outputs[0].num_forward_passes for n in range(3)] == [9, 4, 5]
    assert [call.num_rows for call in together.stub.calls] == [12] * 3 + [27] * 4 + [20] + [12]
    assert not together.llm.engine.busy


def test_a_failed_step_of_another_thread() -> None:
    """Who stepped gets the exception itself, who came meanwhile is served."""
    together = Together(fails=True)
    results = together.run(9, 4)
    assert isinstance(results[0], ValueError)
    assert results[1].outputs[0].num_forward_passes == 4
    assert not together.llm.engine.busy


def test_a_failed_step_tells_everyone_inside() -> None:
    def before(number: int) -> None:
        if number == 3:
            raise ValueError("no memory")

    llm, _ = random_letters(before)
    stream = llm.stream(PROMPT, each(9))
    next(stream)
    with pytest.raises(ValueError, match="no memory"):
        llm.generate([PROMPT], each(9))
    with pytest.raises(EngineError, match="sent again") as caught:
        list(stream)
    assert isinstance(caught.value.__cause__, ValueError)
    assert llm.engine.pool.num_used == 0


def test_a_hole_that_no_canvas_holds() -> None:
    llm, _ = random_letters()
    with pytest.raises(RequestError, match="999999999999 tokens, the limit is 256"):
        llm.infill("a[[999999999999]]b")
