"""Rows from problems, and batches from workers."""

import functools
import os

import numpy as np
import pytest

from unmask.errors import EngineError
from unmask.problems import make_problems
from unmask.train.config import DataConfig, NoiseConfig, StageConfig
from unmask.train.data import LocalBatches, WorkerBatches
from unmask.train.encode import BatchMaker, Encoder, StagePlan, load_encoder, load_tokenizer

from .helpers import small_config

TOKENIZER = small_config().tokenizer
ENCODER = functools.partial(load_encoder, TOKENIZER, 0)


def plan(first=0, **changes):
    settings = {"name": "s", "steps": 9, "batch_size": 6, "length": 168} | changes
    return StagePlan(stage=StageConfig(**settings), data=DataConfig(), noise=NoiseConfig(), first=first)


def test_spliced_prompts_equal_rendered_ones():
    encoder, tokenizer = ENCODER(), load_tokenizer(TOKENIZER)
    assert encoder.parts is not None
    for count in (1, 3):
        for problem in make_problems(7, 20, per_request=count):
            messages = [{"role": "user", "content": problem["question"]}]
            assert encoder.prompt(problem["question"]) == tokenizer.apply_chat_template(messages)


class Merging:
    """A tokenizer whose contents are encoded differently inside the template."""

    def encode(self, text):
        return [len(text), 7]

    def apply_chat_template(self, messages, add_generation_prompt=True):
        assert add_generation_prompt
        content = messages[0]["content"]
        return [1, *(self.encode(content) if content == "apple" else [3]), 2]


def test_a_template_that_cannot_be_spliced_is_rendered():
    encoder = Encoder(Merging(), 0)
    assert encoder.parts is None
    assert encoder.prompt("anything") == [1, 3, 2]


def test_rows_are_prompt_answer_fill():
    encoder = ENCODER()
    (group,) = BatchMaker(encoder, plan(batch_size=200)).make(0)
    problems = list(make_problems(1, 200))
    for i in range(200):
        prompt, end, see = group.prompt[i], group.end[i], group.see[i]
        assert group.token[i, :prompt].tolist() == encoder.prompt(problems[i]["question"])
        assert group.token[i, prompt:end].tolist() == encoder.answer(problems[i]["answer"])
        assert not group.token[i, end:].any()
        assert end + 1 <= see <= 168
    assert group.token.dtype == np.int16
    assert 5 <= (group.see == 168).sum() <= 40
    assert group.num_answer == sum(group.see - group.prompt)
    assert group.num_loss(False) == sum(group.end + 1 - group.prompt)


def test_short_rows_have_their_own_shape():
    maker = BatchMaker(ENCODER(), plan(batch_size=10, length=300, short_length=168, short_share=0.6, requests={3: 1}))
    short, long = maker.make(0)
    assert short.token.shape == (6, 168)
    assert long.token.shape == (4, 300)


def test_requests_that_do_not_fit_are_replaced():
    (group,) = BatchMaker(ENCODER(), plan(batch_size=20, length=100, requests={3: 1})).make(0)
    assert (group.end < 100).all()


@pytest.fixture
def workers():
    batches = WorkerBatches(ENCODER, 2)
    yield batches
    batches.close()


def _same(a, b):
    return all(np.array_equal(x, y) for g, h in zip(a, b) for x, y in zip(g, h))


def test_workers_make_the_same_batches_in_order_across_stages(workers):
    local = LocalBatches(ENCODER)
    for stage in (plan(), plan(first=30, batch_size=3)):
        workers.start(stage)
        local.start(stage)
        for _ in range(5):
            assert _same(workers.next(), local.next())


def test_indices_have_no_repeat_and_no_gap():
    maker = BatchMaker(ENCODER(), plan(first=12))
    taken = []
    maker._fitting = lambda index, _count, _length: taken.append(index) or ([1], [2])
    for batch in range(4):
        maker.make(batch)
    assert taken == list(range(12, 12 + 4 * 6))


def test_a_dead_worker_raises(workers):
    workers.start(plan())
    workers.next()
    workers.workers[1][0].kill()
    with pytest.raises(EngineError, match="data worker 1 of 2 died with exit code -9"):
        list(iter(workers.next, None))


def _fails():
    raise RuntimeError("no such tokenizer")


def test_a_failing_worker_says_why():
    batches = WorkerBatches(_fails, 1)
    try:
        batches.start(plan())
        with pytest.raises(EngineError, match="no such tokenizer"):
            batches.next()
    finally:
        batches.close()


def test_close_leaves_no_process(workers):
    workers.start(plan())
    workers.next()
    pids = [process.pid for process, _ in workers.workers]
    workers.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
