"""A pass has so many rows, a pool so many pages: who waits for them stands still, nobody waits for ever, and whoever
goes, whenever that is, leaves no trace.

The scheduler on its own is held to this in `test_scheduler.py`; here it drives an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.served import Ask, answer_of, bare, drive, facts, load, pages, serve, without_rows
from oracles.flash import made_up_prompt
from unmask import LLM, ConfigError, RequestError, SamplingParams
from unmask.cache.pool import PAGE_SIZE, num_pages_for
from unmask.core.canvas import Canvas
from unmask.engine.engine import Engine
from unmask.engine.request import Answer
from unmask.engine.step import READBACK, Look

BLOCKS: dict[str, Any] = {"block_length": 4, "threshold": 0.7}
WINDOW: dict[str, Any] = {"decode_window": 4, "threshold": 0.7}
TRACKED = WINDOW | {"refresh_window": 5, "track": 3}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "fast-dllm-dual": ("tiny-llada", BLOCKS),
    "fast-dllm-prefix": ("tiny-dream", BLOCKS),
    "flash-cache": ("tiny-dream", TRACKED | {"refresh_interval": 3}),
    "flash-verify": ("tiny-llada-gqa", TRACKED | {"search": 3, "gamma": 0.5}),
    "d2f": ("tiny-dream", BLOCKS | {"block_length": 2, "tau_add": 0.0, "tau_act": 0.0, "pipeline_depth": 2}),
}
each_method = pytest.mark.parametrize("name", METHODS)
MAX_ROWS = 40


def row_of(name: str) -> Any:
    return bare(name, options={"max_search": 3, "verify_rows": 8}) if name == "flash-verify" else bare(name)


def engine(name: str, **options: Any) -> LLM:
    said = {"enable_prefix_caching": False, "max_num_seqs": 6} | options
    return load(METHODS[name][0], row_of(name), **said)


def crowd(name: str, count: int = 7, longer: int = 0) -> list[Ask]:
    """Requests of different lengths that come one after the other; the longest takes more than a pass has, and where
    the method allows it one is guided."""
    asks = []
    for number in range(count):
        guided = number == 2 and name != "flash-verify"
        params = SamplingParams(
            **METHODS[name][1],
            max_tokens=6 + 5 * number % 17,
            cfg_scale=1.5 if guided else 0.0,
            temperature=1.0 if number == 4 else 0.0,
            seed=number,
            ignore_eos=True,
            trajectory=True,
        )
        length = 39 if number == 3 else 2 + 7 * number % 20
        length += longer if name == "d2f" else 0  # there only the prompt is a refresh
        asks.append(Ask(made_up_prompt(length, number), params, arrives=number // 2))
    return asks


@cache
def alone(name: str, ask: Ask) -> Any:
    (out,) = serve(engine(name, max_num_seqs=2), [replace(ask, arrives=0, leaves=None)])
    return facts(out)


# --- what happens in a pass


def state_of(llm: LLM, answer: Answer) -> dict[str, Tensor]:
    """Everything that is a seat's own, twin included: the canvas, the kept row, and the K/V in its pages."""
    program, pool, seats = llm.engine.step_program, llm.engine.pool, answer.seats
    state = {name: each[seats] for name, each in vars(program.canvas).items() if isinstance(each, Tensor)}
    entry = [page * PAGE_SIZE + n for seat in seats for page in pool.pages(seat) for n in range(PAGE_SIZE)]
    kv = {name: plane[:, entry] for name, plane in pool.planes.items()}
    return {name: each.clone() for name, each in (state | kv | {"saved": program.saved_SD[seats]}).items()}


@dataclass
class Pass:
    """What one pass was."""

    running: list[Answer]
    waiting: list[Answer]
    cost: dict[Answer, int]
    """Rows that each wanted."""
    due: set[Answer]
    num_rows: int
    """Rows that ran, without those of a second pass."""
    deficit: int
    """Saved before it."""
    changed: dict[Answer, set[str]] = field(default_factory=dict)
    """Of those who waited: parts of their state that are not what they were."""
    told: dict[Answer, int] = field(default_factory=dict)
    """Of those who waited: rows that the host was told of."""


def watch(llm: LLM) -> list[Pass]:
    """All passes from now on."""
    program, scheduler, passes = llm.engine.step_program, llm.engine.scheduler, list[Pass]()
    look_, grant_, run_, step_ = program.look, scheduler.grant, program.run, llm.engine.step
    before = dict[Answer, dict[str, Tensor]]()

    def look() -> Look:
        before.clear()
        before.update({answer: state_of(llm, answer) for answer in scheduler.running})
        return look_()

    def grant(rows: Sequence[int], due: Sequence[bool]) -> list[Answer]:
        deficit, running = scheduler.budget.deficit, list(scheduler.running)
        cost = {answer: sum(rows[seat] for seat in answer.seats) for answer in running}
        is_due = {answer for answer in running if any(due[seat] for seat in answer.seats)}
        waiting = grant_(rows, due)
        passes.append(Pass(running, waiting, cost, is_due, 0, deficit))
        return waiting

    def run(look: Look) -> None:
        passes[-1].num_rows = int(look.run_SN.sum())
        run_(look)

    def step() -> None:
        number = len(passes)
        step_()
        for each in passes[number:]:
            for answer in each.waiting:
                now = state_of(llm, answer)
                each.changed[answer] = {key for key, old in before[answer].items() if not torch.equal(old, now[key])}
                each.told[answer] = sum(
                    int(program.readback[seat, READBACK.index("num_rows")]) for seat in answer.seats
                )

    for owner, name, spy in (
        (program, "look", look),
        (scheduler, "grant", grant),
        (program, "run", run),
        (llm.engine, "step", step),
    ):
        setattr(owner, name, spy)
    return passes


def check_standing_still(passes: Sequence[Pass]) -> None:
    for each in passes:
        for answer in each.waiting:
            assert not each.changed[answer]
            assert each.told[answer] == 0


def check_rows(passes: Sequence[Pass]) -> None:
    """The budget, and what was saved up. Who is alone may need more: nothing would come of waiting."""
    for each in passes:
        granted = [answer for answer in each.due if answer not in each.waiting]
        ordinary = [answer for answer in each.running if answer not in each.due]
        assert each.num_rows == sum(each.cost[answer] for answer in [*granted, *ordinary])
        if len(granted) + len(ordinary) > 1:
            assert each.num_rows <= MAX_ROWS + each.deficit
        assert sum(each.cost[answer] for answer in ordinary) <= MAX_ROWS or len(ordinary) == 1


def check_waits(llm: LLM, passes: Sequence[Pass]) -> int:
    """The first in line runs as soon as what the others leave it in every pass adds up; the longest wait."""
    waited, longest = 0, 0
    for each in passes:
        first = each.waiting[0] if each.waiting else None
        behind = [answer for answer in each.running if answer in each.due and answer not in each.waiting]
        waited = waited + 1 if first is not None and not behind else 0
        if first is not None:
            longest = max(longest, waited)
            assert waited <= -(-each.cost[first] // llm.engine._most_rows(first))
            assert [answer for answer in each.running if answer in each.waiting] == each.waiting, "in order of arrival"
    return longest


@each_method
def test_under_a_small_budget(name: str) -> None:
    """Who waits stands still bit for bit; the rows of a pass are bounded; everybody gets the answer it gets alone."""
    llm, asks = engine(name, max_num_batched_tokens=MAX_ROWS), crowd(name, longer=20)
    passes = watch(llm)
    answers = drive(llm, asks, limit=300)
    assert [facts(answer.output) for answer in answers] == [alone(name, ask) for ask in asks]
    check_standing_still(passes)
    check_rows(passes)
    assert check_waits(llm, passes) > 0
    waits = {answers.index(answer) for each in passes for answer in each.waiting}
    assert len(waits) > 2, "somebody does wait"
    assert any(answer.prompt_ids for each in passes for answer in each.waiting if len(each.running) > 1)
    assert llm.engine.pool.num_used == 0
    assert llm.engine.scheduler.budget.deficit == 0


@each_method
def test_later_refreshes_wait_too(name: str) -> None:
    """Not only first passes (all that D2F has)."""
    llm = engine(name, max_num_batched_tokens=MAX_ROWS)
    passes, later = watch(llm), 0
    run = llm.engine.step_program.run

    def count(look: Look) -> None:
        nonlocal later
        later += sum(int(llm.engine.canvas.pass_S[answer.seat]) > 0 for answer in passes[-1].waiting)
        run(look)

    llm.engine.step_program.run = count  # type: ignore[method-assign]
    drive(llm, crowd(name), limit=300)
    refreshes = name not in ("d2f", "flash-verify")
    assert (later > 0) == refreshes


@pytest.mark.parametrize("name", ["confidence", "d2f-uncached"])
def test_passes_that_are_all_alike_never_wait(name: str) -> None:
    """Admission bounds them: as many run as fit, and one that does not fit runs alone."""
    llm = load("tiny-llada", bare(name), max_num_batched_tokens=MAX_ROWS, max_num_seqs=6)
    passes = watch(llm)
    asks = [
        replace(ask, params=ask.params.replace(tau_add=None, tau_act=None, pipeline_depth=None)) for ask in crowd("d2f")
    ]
    got = [facts(answer.output) for answer in drive(llm, asks, limit=300)]
    assert got == [facts(serve(load("tiny-llada", bare(name)), [replace(ask, arrives=0)])[0]) for ask in asks]
    assert not any(each.waiting for each in passes)
    assert all(each.num_rows <= MAX_ROWS or len(each.running) == 1 for each in passes)
    assert any(each.num_rows > MAX_ROWS for each in passes)
    assert max(len(each.running) for each in passes) > 1


def test_blocks_that_were_opened_by_looking_are_closed_again() -> None:
    """With a share of 0 each look opens a block. Negative control: without taking that back a wait is noticed."""
    for takes_back in (True, False):
        llm = engine("d2f", max_num_batched_tokens=MAX_ROWS)
        program, passes = llm.engine.step_program, watch(llm)
        hold = program.hold

        def forgets(look: Look, waits_S: Tensor, hold: Any = hold, canvas_of: Any = program) -> Look:
            opened = canvas_of.canvas.block_state_SK.clone()
            held: Look = hold(replace(look, block_state_SK=opened), waits_S)
            return held

        if not takes_back:
            program.hold = forgets  # type: ignore[method-assign]
        drive(llm, crowd("d2f", longer=20), limit=300)
        assert sum(len(each.waiting) for each in passes) > 3
        changed = {part for each in passes for parts in each.changed.values() for part in parts}
        assert changed == (set() if takes_back else {"block_state_SK"})


def test_a_pass_counter_that_goes_on_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: refreshes by the engine's count of passes, for seats that stand still too."""
    commit = Canvas.commit

    def counts_all(self: Canvas, *args: Any, new_pass: bool = True) -> None:
        commit(self, *args, new_pass=new_pass)
        if new_pass:
            self.pass_S += (self.end_S > 0) & ~self.active_S

    monkeypatch.setattr(Canvas, "commit", counts_all)
    llm = engine("flash-cache", max_num_batched_tokens=MAX_ROWS)
    passes = watch(llm)
    drive(llm, crowd("flash-cache"), limit=300)
    with pytest.raises(AssertionError):
        check_standing_still(passes)


# --- cancelling


@dataclass
class Where:
    """Where the victim was when it went."""

    queued: int = 0
    waited: int = 0
    """For rows."""
    ran: int = 0
    done: int = 0


@pytest.mark.parametrize("victim", [0, 2, 3], ids=["short", "guided", "long"])
@each_method
def test_cancelling_leaves_no_trace(name: str, victim: int) -> None:
    """At any step: the others' answers are those of solo runs, and all pages come back."""
    llm, where = engine(name, max_num_batched_tokens=MAX_ROWS, max_num_seqs=3), Where()
    asks = crowd(name, count=5, longer=20 if victim == 3 else 0)
    for leaves in range(asks[victim].arrives, asks[victim].arrives + 40, 1 if victim == 3 else 3):
        if where.done:
            break
        passes = list[list[Answer]]()
        grant_ = type(llm.engine.scheduler).grant
        scheduler = llm.engine.scheduler

        def grant(rows: Sequence[int], due: Sequence[bool], passes: Any = passes, grant_: Any = grant_) -> list[Answer]:
            passes.append(grant_(scheduler, rows, due))  # noqa: B023
            waiting: list[Answer] = passes[-1]
            return waiting

        scheduler.grant = grant  # type: ignore[method-assign]
        answers = [answer_of(llm, ask) for ask in asks]
        cancel_at(llm, asks, answers, victim, leaves, passes, where)
        for number, (ask, answer) in enumerate(zip(asks, answers)):
            if number != victim:
                assert facts(answer.output) == alone(name, ask)
        check_empty(llm.engine)
    assert where.queued or victim == 0
    assert where.ran
    assert where.waited or victim != 3


def cancel_at(
    llm: LLM, asks: Sequence[Ask], answers: Sequence[Answer], victim: int, leaves: int, passes: Any, where: Where
) -> None:
    one, number = answers[victim], 0
    while llm.engine.busy or number <= max(ask.arrives for ask in asks):
        for ask, answer in zip(asks, answers):
            if ask.arrives == number:
                llm.engine.add(answer)
        if number == leaves:
            where.queued += one in llm.engine.scheduler.waiting
            where.waited += bool(passes) and one in passes[-1]
            where.ran += one in llm.engine.scheduler.running and not (passes and one in passes[-1])
            where.done += one.done
            llm.engine.abort(one)
            llm.engine.abort(one)  # nothing more happens
        llm.engine.step()
        number += 1
        assert number < 300, "somebody starves"


def check_empty(engine: Engine) -> None:
    """Nothing is left of anybody."""
    assert engine.pool.num_used == (engine.prefixes.num_pages if engine.prefixes is not None else 0)
    assert not engine.pool.page_table_SP.any()
    assert not engine.canvas.active_S.any()
    assert not engine.canvas.end_S.any()
    assert (engine.canvas.leader_S == -1).all()
    assert not [*engine.scheduler.running, *engine.scheduler.waiting, *engine._found]
    assert sorted(engine.scheduler._free) == list(range(engine.scheduler.max_seats))
    assert engine.scheduler.budget.deficit == 0


def test_cancelling_while_prompts_are_kept() -> None:
    """What stays are the pages of the prompts, which a second engine's solo runs do not need."""
    llm = engine("d2f", max_num_batched_tokens=MAX_ROWS, max_num_seqs=3, enable_prefix_caching=True)
    prefixes = llm.engine.prefixes
    assert prefixes is not None
    for leaves in range(10):
        asks = [replace(ask, leaves=leaves if n in (1, 2) else None) for n, ask in enumerate(crowd("d2f", 5))]
        for n, answer in enumerate(drive(llm, asks, limit=300)):
            if answer.output is not None:
                assert without_rows(answer.output)[:-1] == (*alone("d2f", asks[n])[:4], 0)
        check_empty(llm.engine)
    assert prefixes.num_hits > 20
    assert llm.engine.pool.num_used == prefixes.num_pages > 0
    prefixes.clear()
    assert llm.engine.pool.num_used == 0


@each_method
def test_everybody_is_cancelled(name: str) -> None:
    """In the middle of everything; the engine serves the next ones as if nothing had been."""
    llm, asks = engine(name, max_num_batched_tokens=MAX_ROWS, max_num_seqs=3), crowd(name, 5)
    for number in (0, 1, 4, 7):
        answers = drive(llm, [replace(ask, arrives=0, leaves=number) for ask in asks], limit=300)
        assert any(answer.output is None for answer in answers)
        check_empty(llm.engine)
    assert [facts(out) for out in serve(llm, asks)] == [alone(name, ask) for ask in asks]


# --- pages


@each_method
def test_admission_waits_for_pages(name: str) -> None:
    """In order of arrival: a short request does not overtake one that the pool has no room for yet."""
    model = METHODS[name][0]
    num_scratch_pages = 6 if name == "flash-verify" else 0  # of 8 seats, which come out of the same memory
    llm = engine(name, max_model_len=64, **pages(model, 7 + num_scratch_pages))
    pool, scheduler, asks = llm.engine.pool, llm.engine.scheduler, [replace(ask, arrives=0) for ask in crowd(name)]
    assert pool.num_pages == 7
    answers, most, waited, seated = [answer_of(llm, ask) for ask in asks], 0, 0, list[Answer]()
    for answer in answers:
        llm.engine.add(answer)
    while llm.engine.busy:
        llm.engine.step()
        most = max(most, len(scheduler.running))
        waited += bool(scheduler.waiting) and len(scheduler.running) < scheduler.max_seats - 1
        seated += [answer for answer in scheduler.running if answer not in seated]
        held = sum(num_pages_for(answer.length) * answer.num_seats for answer in scheduler.running)
        assert pool.num_used == held <= 7
    assert waited > 3
    assert most > 1
    assert seated == [answer for answer in answers if answer in seated]
    assert [facts(answer.output) for answer in answers] == [alone(name, ask) for ask in asks]
    check_empty(llm.engine)


def test_a_request_larger_than_the_pool_is_refused() -> None:
    """Before anything runs, with the numbers; others are served."""
    llm = load("tiny-llada", bare("d2f"), max_model_len=64, **pages("tiny-llada", 5))
    params = SamplingParams(**BLOCKS, max_tokens=24)
    prompt = {"prompt_token_ids": list(made_up_prompt(10, 1))}
    with pytest.raises(RequestError, match=r"34 positions in 2 seats needs 6 pages of 16 and the pool has 5"):
        llm.generate(prompt, params.replace(cfg_scale=1.0))
    check_empty(llm.engine)
    outs = llm.generate([prompt, prompt], [params, params.replace(cfg_scale=1.0, max_tokens=22)])
    assert [len(out.outputs[0].token_ids) for out in outs] == [24, 22]
    check_empty(llm.engine)


def test_a_pool_smaller_than_one_canvas_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=64 takes 4 pages.*hold 3;.*kv_cache_memory_bytes"):
        load("tiny-llada", bare("d2f"), max_model_len=64, **pages("tiny-llada", 3))
