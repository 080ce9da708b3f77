"""Ordinary passes in fixed shape, the host one step behind: what an engine on a GPU serves. Here the same program is
launched as it is; that its replay is equal is shown on a GPU (`scripts/soak captured`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from unmask import ops
from unmask.cache.policy import CachePolicy
from unmask.config import EngineConfig, SamplingParams
from unmask.engine.graphs import MAX_STEPS, FixedSteps, Messages
from unmask.engine.llm import LLM
from unmask.engine.step import Budgets, Step
from unmask.errors import ConfigError
from unmask.eval import continuous
from unmask.eval.continuous import SERVED, Way, compare, engine

FIXED = Way(fixed=True)
MORE = (*SERVED, ("vanilla", "llada-gqa"), ("factor", "llada"), ("entropy-bound", "dream"), ("flash-dllm", "llada"))


@pytest.mark.parametrize(("method", "network"), MORE)
def test_a_crowd_in_fixed_shape_is_everybody_alone_and_ragged(method: str, network: str) -> None:
    out = compare(method, network, 24, seed=3, seats=4, way=FIXED)
    assert not out.different
    assert out.lost_pages == 0
    assert out.most_seats > 1


def test_refreshes_wait_for_rows_in_fixed_shape_too() -> None:
    pairs = (("flash-cache", "llada"), ("fast-dllm-dual", "dream"))
    outcomes = [compare(*pair, 48, seed=5, way=FIXED) for pair in pairs]
    assert sum(each.num_waits for each in outcomes) > 3
    assert not any(each.different for each in outcomes)


def breaks(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, wrong: Callable[..., Any]) -> list[int]:
    monkeypatch.setattr(owner, name, wrong)
    return compare("flash-cache", "llada", 24, seed=3, seats=4, way=FIXED).different


def test_a_message_of_the_wrong_step_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the host reads what the device has now, not what it had."""
    send = Messages.send
    monkeypatch.setattr(Messages, "receive", lambda self: (self._on_the_way.popleft()[0], self._sources))

    def without_copies(self: Messages, about: Any, sources: Any) -> None:
        send(self, about, sources)
        self._sources = [source.zero_() if source.dtype == torch.int16 else source for source in sources]  # type: ignore[attr-defined]

    monkeypatch.setattr(Messages, "send", without_copies)
    assert compare("confidence", "llada", 12, seed=3, seats=4, way=FIXED).different


def test_a_refresh_in_too_few_rows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: seats that are due take part in the fixed pass."""
    monkeypatch.setattr(CachePolicy, "refreshes", False)
    monkeypatch.setattr(Step, "__call__", lambda self: self.run(self.look()))
    with pytest.raises(Exception, match="no room for its rows"):
        compare("flash-cache", "llada", 24, seed=3, seats=4, way=FIXED)


def fixed_llm(method: str = "confidence", seats: int = 4, **more: Any) -> LLM:
    return engine(method, "llada", seats, FIXED, **more)


def ask(llm: LLM, count: int, **said: Any) -> list[Any]:
    prompts = [{"prompt_token_ids": [7 + number, 3, 5]} for number in range(count)]
    return llm.generate(prompts, SamplingParams(**{"max_tokens": 20, "threshold": 0.3} | said))


def test_the_host_is_one_step_behind_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, depths = fixed_llm(), []
    receive = Messages.receive
    monkeypatch.setattr(Messages, "receive", lambda self: depths.append(len(self)) or receive(self))
    ask(llm, 3)
    assert max(depths) == 2
    assert depths.count(2) > 3


def test_a_request_alone_that_may_refresh_is_not_run_ahead_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would stand still in the pass that the host launched without knowing."""
    for method, said, alone in (
        ("fast-dllm-dual", {}, 1),
        ("flash-cache", {"refresh_interval": 4}, 1),
        ("flash-cache", {}, 2),
    ):
        llm, depths = fixed_llm(method), []
        receive = Messages.receive
        with monkeypatch.context() as patch:
            patch.setattr(Messages, "receive", lambda self, d=depths, r=receive: d.append(len(self)) or r(self))
            ask(llm, 1, **said)
        assert max(depths) == alone, method


def test_one_program_for_each_number_of_seats_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, Budgets]] = []
    fixed = Step.fixed

    def noted(self: Step, num_seats: int, budgets: Budgets, **options: Any) -> Step:
        made.append((num_seats, budgets))
        return fixed(self, num_seats, budgets, **options)

    monkeypatch.setattr(Step, "fixed", noted)
    llm = fixed_llm("flash-cache")
    ask(llm, 1)
    ask(llm, 1)
    assert [seats for seats, _ in made] == [1]
    ask(llm, 4)
    assert {seats for seats, _ in made} <= {1, 2, 4}
    assert len(made) == len(set(made)), "nothing is captured twice"
    assert all(not budgets.refreshes and budgets.num_rows % 16 == 0 for _, budgets in made)


def test_longer_requests_grow_the_canvas_and_forget_the_programs() -> None:
    llm = fixed_llm()
    ask(llm, 2)
    fixed = llm.engine.fixed
    assert fixed is not None
    assert fixed._programs
    llm.engine._make_room(1, 200, 1, 2)
    assert not fixed._programs
    assert llm.engine.canvas.capacity == 256, "a power of two, or all that fits"
    assert ask(llm, 2)[0].outputs[0].token_ids == ask(engine("confidence", "llada", 4), 2)[0].outputs[0].token_ids


def test_old_programs_go_when_there_are_too_many() -> None:
    llm = fixed_llm()
    ask(llm, 1)
    fixed = llm.engine.fixed
    assert fixed is not None
    with torch.inference_mode():
        for rows in range(16, 16 * (MAX_STEPS + 4), 16):
            fixed.get(1, Budgets(rows, 16))
    assert len(fixed._programs) == MAX_STEPS


def test_making_a_program_changes_no_seat() -> None:
    """Warming up runs it, while everybody is kept from taking part."""
    llm = fixed_llm()
    (answer,) = continuous.answers(llm, continuous.Asked([5, 6], SamplingParams(max_tokens=9, threshold=0.3), 0, None))
    llm.engine.add(answer)
    llm.engine.step()
    llm.engine._catch_up()
    before = {name: value.clone() for name, value in vars(llm.engine.canvas).items() if isinstance(value, torch.Tensor)}
    ran: list[Step] = []
    fixed = FixedSteps(llm.engine.step_program, capture=lambda step: (step(), ran.append(step), step)[-1])
    with torch.inference_mode():
        fixed.get(1, Budgets(32, 32, refreshes=False))
    assert ran
    for name, value in before.items():
        assert torch.equal(value, getattr(llm.engine.canvas, name)), name


def test_messages_arrive_in_order_and_keep_what_was_sent() -> None:
    messages, source = Messages(), torch.zeros(3)
    for number in range(4):
        source.fill_(number)
        messages.send(number, [source])
        if number:
            about, (copy,) = messages.receive()
            assert (about, copy.tolist()) == (number - 1, [number - 1.0] * 3)
    assert len(messages) == 1


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="captures none"):
        EngineConfig(enforce_eager=True, enable_torch_compile=True)
    with pytest.raises(ConfigError, match="reference"):
        EngineConfig(kernels="referense")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_kernels_that_cannot_run_are_refused() -> None:
    with pytest.raises(ConfigError, match="no NVIDIA GPU"):
        fixed_llm(kernels="triton")


# Faults that users of other engines reported


@pytest.mark.parametrize("method", ["confidence", "flash-cache", "fast-dllm-dual", "flash-verify", "d2f"])
def test_b51_a_later_run_leaves_earlier_results_alone(method: str) -> None:
    """On, below and between the sizes that are captured: the same tokens as without capture; and what the first run
    gave is its own, though every run writes the same tensors."""
    llm, plain = fixed_llm(method), engine(method, "llada", 4)
    results = {count: ask(llm, count, trajectory=True) for count in (1, 2, 3, 4)}
    before = {count: repr(each) for count, each in results.items()}
    other = [{"prompt_token_ids": [40 + number, 41]} for number in range(4)]
    llm.generate(other, SamplingParams(max_tokens=24, threshold=0.2, seed=9))
    assert {count: repr(each) for count, each in results.items()} == before
    for count, each in results.items():
        wanted = ask(plain, count, trajectory=True)
        assert [out.outputs[0].token_ids for out in each] == [out.outputs[0].token_ids for out in wanted], count


def test_b51_what_does_not_go_together_is_said_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"flash-verify.*row p - 1"):
        engine("flash-verify", "dream", 4, FIXED)


@pytest.mark.parametrize("fixed", [False, True])
def test_b52_rows_that_see_nothing_stay_numbers(fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three real tokens beside padding, and seats that are padding alone; three layers."""
    llm = engine("fast-dllm-dual", "llada", 4, Way(fixed=fixed), max_num_batched_tokens=64)
    forward, shapes = type(llm.model).forward, []

    def watched(self: Any, token: torch.Tensor, ctx: Any) -> torch.Tensor:
        hidden = forward(self, token, ctx)
        shapes.append(len(token))
        assert torch.isfinite(hidden).all()
        return hidden

    monkeypatch.setattr(type(llm.model), "forward", watched)
    prompts = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": list(range(1, 40))}, {"prompt_token_ids": [9]}]
    together = llm.generate(prompts, SamplingParams(max_tokens=8, threshold=0.3, block_length=4))
    assert shapes
    for prompt, result in zip(prompts, together):
        (alone,) = llm.generate([prompt], SamplingParams(max_tokens=8, threshold=0.3, block_length=4))
        assert alone.outputs[0].token_ids == result.outputs[0].token_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b52_every_attention_kernel_agrees(dtype: torch.dtype) -> None:
    """Five rows of padding in front of three real ones, and a sequence of padding alone."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 8, 2, 16).to(dtype) for _ in range(3))
    real = torch.arange(8) >= 5
    mask = torch.stack((real & real[:, None], torch.zeros(8, 8, dtype=torch.bool)))
    exact = ops.attention(*(each[:1, 5:].double() for each in (q, k, v)))[0]
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel([backend, SDPBackend.MATH]):
            out = ops.attention(q, k, v, mask=mask)
        assert torch.isfinite(out).all()
        assert not out[1].any()
        assert not out[0, :5].any()
        assert torch.allclose(out[0, 5:].double(), exact, atol=1e-5 if dtype == torch.float32 else 2e-2)
