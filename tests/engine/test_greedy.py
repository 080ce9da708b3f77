"""dKV-Cache-Greedy, served. The reference (horseee/dKV-Cache@49a76fc) draws its order from the device's generator, so
there are no golden data: a plain loop for one request stands in for it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.served import Ask, answer_of, bare, drive, facts, serve, without_rows
from engine.served import load as served
from engine.test_delayed import asks
from oracles.flash import draft_rows, empty_memory, forward, made_up_prompt, predict
from oracles.golden import tiny_model
from unmask import LLM, SamplingParams, methods
from unmask.cache import delayed as module
from unmask.cache.delayed import Delayed
from unmask.cache.policy import Limits
from unmask.core.canvas import Canvas
from unmask.decoding.sample import RANK, uniform
from unmask.engine import step as step_module
from unmask.engine.graphs import FixedSteps
from unmask.engine.order import RandomOrder
from unmask.engine.step import Budgets
from unmask.errors import EngineError, MethodError
from unmask.eval import continuous
from unmask.eval.continuous import Way, compare
from unmask.methods import METHODS, Method

LLADA = ("tiny-llada", "tiny-llada-gqa")


def row(window: int = 4, frontier: str = "blocks", **options: Any) -> Method:
    return bare("dkv-cache", frontier=frontier, options={"variant": "greedy", "window": window, **options})


# --- a plain loop for one request


@dataclass(frozen=True)
class Plain:
    """One run of the loop."""

    prompt: tuple[int, ...]
    length: int
    block_length: int
    steps: int
    interval: int
    window: int
    seed: int = 5

    @property
    def ask(self) -> Ask:
        return Ask(
            self.prompt,
            SamplingParams(
                max_tokens=self.length,
                block_length=self.block_length,
                steps=self.steps,
                refresh_interval=self.interval or None,
                seed=self.seed,
                remasking="random",
                ignore_eos=True,
                trajectory=True,
            ),
        )


def order_of(seed: int, candidates: Sequence[int], number: int) -> list[int]:
    """The order that a pass decides in; ``number`` counts the passes before it."""
    pos_1N = torch.arange(max(candidates) + 1)[None]
    chance = uniform(torch.tensor([seed]), pos_1N, torch.tensor([number]), RANK)[0].tolist()
    return sorted(candidates, key=lambda pos: (-chance[pos], pos))


def scan(start: int, free: set[int], count: int, length: int) -> set[int]:
    """The reference's way to its window: one step to the left, one to the right, and so on."""
    found, left, right, to_left = set[int](), start - 1, start + 1, True
    while len(found) < count and (left >= 0 or right < length):
        place = left if to_left else right
        if place in free:
            found.add(place)
        left, right = (left - 1, right) if to_left else (left, right + 1)
        to_left = not to_left
    return found


def loop(model_name: str, run: Plain, seed: int, *, forgets: bool = False) -> tuple[list[tuple[int, int, int]], int]:
    """What is committed, (position, token, pass), and the rows of all passes. ``forgets`` what the last one decided."""
    model = tiny_model(model_name, None, torch.float64)
    mask, start, end = model.config.mask_token_id, len(run.prompt), len(run.prompt) + run.length
    tokens, memory = [*run.prompt, *[mask] * run.length], empty_memory(model)
    blocks = [range(at, min(at + run.block_length, end)) for at in range(start, end, run.block_length)]
    commits, num_rows, number = list[tuple[int, int, int]](), 0, 0
    for block, steps in zip(blocks, shares(run.steps, len(blocks)), strict=True):
        new = set[int]()
        for step, quota in enumerate(shares(len(block), steps)):
            masks = {pos for pos in range(end) if tokens[pos] == mask}
            targets = set(order_of(seed, sorted(masks & set(block)), number)[:quota])
            near = set[int]().union(*(scan(pos, masks - targets, run.window, end) for pos in targets))
            rows = targets | near | (set() if forgets else new)
            if step % (run.interval or run.steps) == 0:
                rows = set(range(end))
            logits, _ = forward(model, memory, draft_rows(tokens, rows, end))
            of_row = dict(zip(sorted(rows), logits, strict=True))
            num_rows, number, new = num_rows + len(rows), number + 1, targets
            for pos in sorted(targets):
                tokens[pos] = predict(of_row[pos], pos, mask).token
                commits.append((pos - start, tokens[pos], number))
    return sorted(commits), num_rows


def shares(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]


RUNS = [
    Plain(made_up_prompt(9, 1), 24, 24, 24, 4, 4),
    Plain(made_up_prompt(12, 2), 24, 8, 24, 3, 2),
    Plain(made_up_prompt(7, 3), 20, 10, 12, 4, 1, seed=11),  # one or two a pass
    Plain(made_up_prompt(5, 4), 24, 12, 8, 2, 3),  # three a pass
    Plain(made_up_prompt(8, 5), 18, 9, 18, 0, 0),  # no window, and no refresh within a block
]


def engine(model: str, method: Method, *, fixed: bool, seats: int = 3) -> LLM:
    llm = served(model, method, max_num_seqs=seats)
    if fixed:
        llm.engine.fixed = FixedSteps(llm.engine.step_program, capture=lambda step: step)
    return llm


def seed_of(llm: LLM, ask: Ask) -> int:
    return answer_of(llm, ask).seat_params.seed


@pytest.mark.parametrize("fixed", [False, True], ids=["ragged", "fixed"])
@pytest.mark.parametrize("model", LLADA)
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_it_equals_the_loop(run: Plain, model: str, fixed: bool) -> None:
    llm = engine(model, row(run.window), fixed=fixed)
    (got,) = serve(llm, [run.ask])
    commits, num_rows = loop(model, run, seed_of(llm, run.ask))
    assert sorted((each.position, each.token_id, each.num_pass) for each in got.trajectory or ()) == commits
    assert got.num_rows == num_rows


def test_every_part_of_the_loop_matters() -> None:
    """Other windows and refreshes, and tokens that never run after they were decided, give other answers."""
    others = (
        ("window", lambda run: loop("tiny-llada", dataclasses.replace(run, window=run.window + 3), 5)),
        ("interval", lambda run: loop("tiny-llada", dataclasses.replace(run, interval=run.interval + 1), 5)),
        ("new", lambda run: loop("tiny-llada", run, 5, forgets=True)),
        ("order", lambda run: loop("tiny-llada", run, 6)),
    )
    for what, other in others:
        differ = sum(other(run)[0] != loop("tiny-llada", run, 5)[0] for run in RUNS)
        assert differ > 1, (what, differ)


@pytest.mark.parametrize("model", ["tiny-llada", "tiny-dream"])
def test_the_order_is_known_before_the_pass(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a random order decides is what was foreseen; of one by confidence it is not always: the control."""
    for remasking in ("random", "low_confidence"):
        foreseen: list[Tensor] = []
        decided: list[Tensor] = []
        plain, commit = RandomOrder.foreseen, Canvas.commit

        def watched(self: RandomOrder, canvas: Canvas, *rest: Any, plain: Any = plain, to: Any = foreseen) -> Tensor:
            to.append(plain(self, canvas, *rest))
            return to[-1]

        def committed(
            self: Canvas, chosen_SN: Tensor, *rest: Any, plain: Any = commit, to: Any = decided, **m: Any
        ) -> None:
            to.append(chosen_SN.clone())
            plain(self, chosen_SN, *rest, **m)

        monkeypatch.setattr(RandomOrder, "foreseen", watched)
        monkeypatch.setattr(Canvas, "commit", committed)
        said = SamplingParams(max_tokens=21, steps=9, remasking=remasking, block_length=7, ignore_eos=True, seed=3)
        serve(served(model, row()), [Ask(made_up_prompt(6 + n, n), said, arrives=n) for n in range(2)])
        monkeypatch.undo()
        same = [torch.equal(a, b) for a, b in zip(foreseen, decided, strict=True)]
        assert all(same) == (remasking == "random")


# --- which rows run


@pytest.mark.parametrize("seed", range(30))
def test_the_nearest(seed: int) -> None:
    """Of one position what the reference's scan finds; of several, what one of them has."""
    r = random.Random(seed)
    length, count = r.randint(1, 40), r.randint(0, 6)
    kinds = [[r.choice("..fft") for _ in range(length)] for _ in range(8)]
    from_SN, among_SN = (torch.tensor([[kind == which for kind in each] for each in kinds]) for which in "tf")
    for each, got_N in zip(kinds, module._nearest(from_SN, among_SN, count), strict=True):
        free = {pos for pos, kind in enumerate(each) if kind == "f"}
        want = set[int]().union(*(scan(pos, free, count, length) for pos, kind in enumerate(each) if kind == "t"))
        assert set(got_N.nonzero()[:, 0].tolist()) == want


@pytest.mark.parametrize("frontier", ["blocks", "window", "whole"])
@pytest.mark.parametrize("model", ["tiny-llada-gqa", "tiny-dream"])
def test_the_rows_that_run(model: str, frontier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In mixed company: other orders, thresholds, guidance, infilling, ends of text. Never more than promised."""
    llm, plain, shift = served(model, row(2, frontier)), Delayed.rows, int(model == "tiny-dream")
    seen = {"few": 0, "due": 0}

    def rows(self: Delayed, canvas: Canvas, candidate_SN: Tensor, limits: Limits) -> Tensor:
        run_SN, due_S = plain(self, canvas, candidate_SN, limits), self.due(canvas, limits)
        assert self.order is not None
        next_SN = self.order.foreseen(canvas, candidate_SN, limits)
        for answer in llm.engine.scheduler.running:
            seat, end = answer.seat, int(canvas.end_S[answer.seat])
            run = set(run_SN[seat].nonzero()[:, 0].tolist())
            next_ = set(next_SN[seat].nonzero()[:, 0].tolist())
            assert next_ <= set(candidate_SN[seat].nonzero()[:, 0].tolist())
            assert next_ or answer.params.alg == "origin" or not bool(candidate_SN[seat].any())
            if due_S[seat]:
                assert run == set(range(end))
                seen["due"] += 1
                continue
            free = set(canvas.undecided_SN()[seat].nonzero()[:, 0].tolist()) - next_
            number = int(canvas.pass_S[seat])
            want = next_ | {max(pos - shift, 0) for pos in next_}
            want |= set[int]().union(*(scan(pos, free, 2, end) for pos in next_))
            want |= {pos for pos in range(end) if int(canvas.commit_pass_SN[seat, pos]) == number > 0}
            assert run == want
            assert len(run) * answer.num_seats <= llm.engine._most_rows(answer)
            seen["few"] += len(run) < end // 2
        return run_SN

    monkeypatch.setattr(Delayed, "rows", rows)
    for seed in range(3):
        serve(llm, asks(model, frontier, seed))
    assert min(seen.values()) > 10


@pytest.mark.parametrize("model", ["tiny-llada", "tiny-dream"])
def test_a_schedules_rows_do_not_grow_with_the_answer(model: str) -> None:
    llm, shift = served(model, row(4)), int(model == "tiny-dream")
    for length in (40, 80):
        (one, adaptive) = (
            answer_of(llm, Ask(made_up_prompt(9, 1), SamplingParams(max_tokens=length, remasking="random", **said)))
            for said in ({"steps": length // 2}, {"threshold": 0.9})
        )
        most = max(one.seat_params.quota)
        assert llm.engine._most_rows(one) == most + most * (5 + shift) < length
        assert llm.engine._most_rows(adaptive) == length + shift  # a refresh may decide all: the control


# --- at the limit, and beside others


def test_refreshed_in_every_pass_it_is_no_cache() -> None:
    for model, frontier in (("tiny-llada", "blocks"), ("tiny-dream", "blocks"), ("tiny-dream", "whole")):
        requests = asks(model, frontier, seed=2)
        every, never = (
            [dataclasses.replace(ask, params=ask.params.replace(refresh_interval=said)) for ask in requests]
            for said in (1, None)
        )
        want = serve(served(model, bare("dkv-cache", frontier=frontier, policy="recompute")), never)
        assert [facts(out) for out in serve(served(model, row(2, frontier)), every)] == [facts(out) for out in want]
        got = serve(served(model, row(2, frontier)), never)
        assert [without_rows(out) for out in got] != [without_rows(out) for out in want]


@pytest.mark.parametrize("model", LLADA)
def test_with_a_window_over_all_it_is_the_decode_variant(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for that one's second whole pass of a block. A smaller window is another cache: the control."""
    plain = Delayed.__init__

    def once(self: Delayed, **said: Any) -> None:
        plain(self, **said)
        self.num_whole = 1

    requests = [dataclasses.replace(each.ask, arrives=number) for number, each in enumerate(RUNS)]
    monkeypatch.setattr(Delayed, "__init__", once)
    want = serve(served(model, bare("dkv-cache")), requests)
    monkeypatch.undo()
    for window, same in ((200, True), (2, False)):
        assert ([facts(out) for out in serve(served(model, row(window)), requests)] == [facts(o) for o in want]) == same


@pytest.mark.parametrize("fixed", [False, True], ids=["ragged", "fixed"])
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_crowd_is_everybody_alone(family: str, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    method = dataclasses.replace(METHODS["dkv-cache"], options={"variant": "greedy", "window": 2})
    for place in (methods, continuous):
        monkeypatch.setattr(place, "METHODS", {**METHODS, "dkv-cache": method})
    out = compare("dkv-cache", family, 16, seed=4, seats=4, way=Way(fixed=fixed))
    assert not out.different
    assert out.lost_pages == 0
    assert out.most_seats > 1


def test_chance_that_decides_everything_at_last() -> None:
    """Dream's `origin`: what chance decides runs, however much it is."""
    method = bare("dkv-cache", frontier="whole", schedule="dream", options={"variant": "greedy", "window": 0})
    said = SamplingParams(max_tokens=30, steps=6, alg="origin", ignore_eos=True, seed=1)
    for fixed in (False, True):
        answers = drive(engine("tiny-dream", method, fixed=fixed), [Ask(made_up_prompt(8, n), said) for n in range(3)])
        assert all(each.output is not None and len(each.output.token_ids) == 30 for each in answers)


def test_an_order_of_ones_own() -> None:
    """Without one, every candidate is foreseen: a frontier of few candidates says itself what comes next."""
    method = Method(name="own", title="own", frontier="window", policy=Delayed(variant="greedy", window=0))
    said = SamplingParams(max_tokens=20, decode_window=2, threshold=0.5, ignore_eos=True, refresh_interval=6)
    (out,) = serve(served("tiny-llada", method), [Ask(made_up_prompt(9, 1), said)])
    assert len(out.token_ids) == 20
    assert out.num_rows < 29 * out.num_forward_passes / 2


def test_the_window_is_a_number() -> None:
    for wrong in (-1, 2.5, True, None):
        with pytest.raises(MethodError, match="window must be an integer of at least 0"):
            bare("dkv-cache", options={"window": wrong})


# --- rows of a pass in fixed shape


def sized(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rows, candidates) of every replay from now on."""
    sizes, get = list[tuple[int, int]](), FixedSteps.get

    def noted(self: FixedSteps, num_seats: int, budgets: Budgets) -> Any:
        sizes.append((budgets.num_rows, budgets.num_scored))
        return get(self, num_seats, budgets)

    monkeypatch.setattr(FixedSteps, "get", noted)
    llm.engine.fixed = FixedSteps(llm.engine.step_program, capture=lambda step: step)
    return sizes


@pytest.mark.parametrize("options", [{}, {"variant": "greedy", "window": 1}], ids=["decode", "greedy"])
@pytest.mark.parametrize("model", ["tiny-llada", "tiny-dream"])
def test_a_fixed_pass_becomes_smaller_as_answers_fill(
    model: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By halves, for the fullest of those that run; the answers are those of ragged passes."""
    method = bare("dkv-cache", options=options)
    said = SamplingParams(max_tokens=80, steps=80, refresh_interval=8, remasking="random", ignore_eos=True, seed=1)
    requests = [Ask(made_up_prompt(9 + n, n), said, arrives=20 * n) for n in range(2)]
    want = [facts(out) for out in serve(served(model, method), requests)]
    llm = served(model, method)
    sizes = sized(llm, monkeypatch)
    assert [facts(out) for out in serve(llm, requests)] == want
    rows, shift = [each for each, _ in sizes], int(model == "tiny-dream")
    if options:
        assert set(rows) == {16}  # what the schedule has for a pass, and its neighbours
        assert {scored for _, scored in sizes} == {16 + 16 * shift}
    else:
        assert max(rows) >= 80
        assert set(rows) == {max(rows), 48, 32}
        assert rows[-1] == 32
    assert all(scored <= each + 16 * shift for each, scored in sizes)


def test_a_size_that_is_too_small_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Delayed.most_rows_left
    monkeypatch.setattr(Delayed, "most_rows_left", lambda *given: plain(*given) // 4)
    llm = served("tiny-llada", bare("dkv-cache"))
    sized(llm, monkeypatch)
    with pytest.raises(EngineError, match="no room for its rows"):
        serve(llm, [Ask(made_up_prompt(9, 1), SamplingParams(max_tokens=80, refresh_interval=8, ignore_eos=True))])


@pytest.mark.parametrize("name", ["one-pass", "one-pass-cache", "freedave", "flash-verify"])
def test_rows_of_drafters_are_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass has more rows than were announced, the second ones of a step too; without a drafter's it would: the
    control, where drafts are in the first pass."""
    llm, counts, plain = served("tiny-llada", bare(name)), list[int](), step_module.pack

    def packed(*given: Any, **more: Any) -> Any:
        plan = plain(*given, **more)
        counts.append(int(plan.num_rows_S.sum()))
        return plan

    monkeypatch.setattr(step_module, "pack", packed)
    said: dict[str, Any] = {"threshold": 2.0, "block_length": 16}
    if name != "freedave":
        said = {"decode_window": 8, "threshold": 0.95, "search": 8, "gamma": 0.9}
    if name in ("one-pass-cache", "flash-verify"):
        said |= {"refresh_window": 8, "track": 4}
    most, wanted = 0, list[int]()
    grant = llm.engine.scheduler.grant
    monkeypatch.setattr(
        llm.engine.scheduler, "grant", lambda rows, due: (wanted.append(sum(rows)), grant(rows, due))[1]
    )
    params = SamplingParams(max_tokens=48, ignore_eos=True, **said)
    answer = answer_of(llm, Ask(made_up_prompt(12, 1), params))
    llm.engine.add(answer)
    while llm.engine.busy:
        counts.clear()
        llm.engine.step()
        assert counts[0] <= wanted[-1]
        if answer.num_steps > 1:
            assert max(counts) <= llm.engine._most_rows(answer)
            most = max(most, counts[0] - llm.engine._canvas_rows(answer))
    assert (most > 0) == (name in ("one-pass", "freedave", "one-pass-cache"))
