"""Who sits where and who runs in a pass: traces of the row budget worked by hand, promises that hold for every load,
and a control for each promise that breaks it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from unmask.config import SamplingParams
from unmask.engine.request import Answer
from unmask.engine.scheduler import RowBudget, Scheduler

drawn = settings(max_examples=400, deadline=None, derandomize=True)
sought = settings(max_examples=3000, deadline=None, database=None, phases=[Phase.generate])  # any example will do


def answer(length: int = 8, guided: bool = False) -> Answer:
    """An answer of so many positions; the scheduler asks for nothing else."""
    seat_params: Any = SimpleNamespace(guidance=1.0 if guided else 0.0)
    return Answer(0, (), range(length), length, SamplingParams(), seat_params)


# --- the row budget of one pass


@dataclass(frozen=True)
class Grant:
    """One pass as the budget sees it; everything but `blocked` and `num_granted` counts rows."""

    max_rows: int
    num_ordinary: int
    costs: tuple[int, ...]
    blocked: bool
    before: int
    """The deficit before this pass."""
    num_granted: int
    after: int

    @property
    def used(self) -> int:
        return sum(self.costs[: self.num_granted])

    @property
    def fresh(self) -> int:
        return max(0, self.max_rows - self.num_ordinary)

    @property
    def head(self) -> int | None:
        """Cost of the first that was not granted."""
        return self.costs[self.num_granted] if self.num_granted < len(self.costs) else None


def never_negative(grant: Grant) -> bool:
    return grant.after >= 0


def forgets(grant: Grant) -> bool:
    """Nothing is saved for nobody."""
    return bool(grant.costs) or grant.blocked or grant.after == 0


def less_than_the_head_needs(grant: Grant) -> bool:
    """Nobody waits for rows that are there; and a burst after a wait is shorter than budget and canvas together."""
    return grant.head is None or grant.after < grant.head


def rows_are_bounded(grant: Grant) -> bool:
    """Ordinary passes always run; refreshes add what the budget leaves and what was saved, or there is one alone."""
    alone = grant.num_ordinary == 0 and grant.num_granted == 1
    return alone or grant.num_ordinary + grant.used <= max(grant.max_rows, grant.num_ordinary) + grant.before


def saves(grant: Grant) -> bool:
    """While somebody waits, no row of the budget is lost."""
    return grant.head is None or grant.after >= grant.before + grant.fresh - grant.used


def saves_nothing_for_those_outside(grant: Grant) -> bool:
    """If memory or seats are what is missing, rows are spent but not saved."""
    left = max(0, grant.before - max(0, grant.used - grant.fresh))
    return not grant.blocked or grant.head is not None or grant.after == left


def somebody_runs(grant: Grant) -> bool:
    return grant.num_ordinary > 0 or grant.num_granted > 0 or not grant.costs


BUDGET_PROMISES = (
    never_negative,
    forgets,
    less_than_the_head_needs,
    rows_are_bounded,
    saves,
    saves_nothing_for_those_outside,
    somebody_runs,
)


@dataclass(frozen=True)
class Demand:
    """What one pass asks of the budget."""

    num_ordinary: int
    costs: tuple[int, ...] = ()
    blocked: bool = False


def grants(budget: RowBudget, demands: Sequence[Demand]) -> list[Grant]:
    """What becomes of these passes, one after the other."""
    done = []
    for demand in demands:
        before = budget.deficit
        num_granted = budget.grant(demand.num_ordinary, demand.costs, blocked=demand.blocked)
        asked = (budget.max_rows, demand.num_ordinary, demand.costs, demand.blocked)
        done.append(Grant(*asked, before, num_granted, budget.deficit))
    return done


def broken(done: Sequence[Grant]) -> set[str]:
    """Names of the promises that do not hold in some pass."""
    return {promise.__name__ for promise in BUDGET_PROMISES if not all(map(promise, done))}


def sangam(max_rows: int, deficit: int, demand: Demand) -> tuple[int, int]:
    """(granted, deficit) of one pass, line by line from Sangam's loop. Whoever is outside is the last of the waiting,
    and no memory can be reserved for it. Ordinary rows are within the budget there."""
    outside = "outside"
    waiting: list[Any] = [*demand.costs, *([outside] if demand.blocked else [])]
    fresh = max_rows - demand.num_ordinary
    avail = fresh + deficit
    if not waiting:
        return 0, 0
    used = admitted = 0
    mem_blocked = False
    for cost in waiting:
        if cost is outside:
            mem_blocked = True
            break
        if used + cost > avail and not (demand.num_ordinary == 0 and used == 0):
            break
        admitted += 1
        used += cost
    if mem_blocked:
        return admitted, max(0, deficit - max(0, used - fresh))
    return admitted, max(0, avail - used)


TRACES: dict[str, list[tuple[Demand, int, int]]] = {
    # of 100 rows: demand, refreshes granted, deficit afterwards
    "a long one saves up, and a short one behind it waits too": [
        (Demand(60, (100,)), 0, 40),
        (Demand(60, (100, 10)), 0, 80),
        (Demand(60, (100, 10)), 2, 10),
        (Demand(70), 0, 0),
    ],
    "longer than the budget, while others run": [
        (Demand(10, (250,)), 0, 90),
        (Demand(10, (250,)), 0, 180),
        (Demand(10, (250,)), 1, 20),
    ],
    "longer than the budget, with nobody else": [(Demand(0, (250, 10)), 1, 0), (Demand(20, (10,)), 1, 70)],
    "longer than the budget, but somebody else fills the pass": [
        (Demand(0, (30, 250)), 1, 70),
        (Demand(20, (250,)), 0, 150),
        (Demand(0, (250,)), 1, 0),
    ],
    "others leave nothing": [(Demand(60, (80,)), 0, 40), (Demand(100, (80,)), 0, 40), (Demand(60, (80,)), 1, 0)],
    "others need more than there is": [(Demand(60, (80,)), 0, 40), (Demand(190, (80,)), 0, 40)],
    "somebody outside gets nothing saved": [
        (Demand(50, (60,), blocked=True), 0, 50),
        (Demand(50, (30,), blocked=True), 1, 50),
        (Demand(50, (70,), blocked=True), 1, 30),
        (Demand(50, (), blocked=True), 0, 30),
        (Demand(90, (50,), blocked=True), 0, 40),
        (Demand(90, (50,), blocked=True), 1, 0),
        (Demand(50, (), blocked=True), 0, 0),
    ],
    "what is left is carried as long as somebody is due": [
        (Demand(40, (30,)), 1, 30),
        (Demand(40, (60,)), 1, 30),
        (Demand(40, (90,)), 1, 0),
    ],
}


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_by_hand(name: str) -> None:
    demands, num_granted, deficits = zip(*TRACES[name])
    done = grants(RowBudget(100), demands)
    assert [grant.num_granted for grant in done] == list(num_granted)
    assert [grant.after for grant in done] == list(deficits)
    assert not broken(done)


def demands_of(max_rows: int, most_ordinary: int) -> st.SearchStrategy[list[Demand]]:
    ordinary = st.one_of(st.just(0), st.integers(0, most_ordinary))
    costs = st.lists(st.integers(1, 3 * max_rows), max_size=4).map(tuple)
    return st.lists(st.builds(Demand, ordinary, costs, st.booleans()), min_size=1, max_size=20)


@st.composite
def budgets(draw: st.DrawFn, crowded: bool = True) -> tuple[int, list[Demand]]:
    """A budget and passes for it; crowded ones may need more ordinary rows than there are."""
    max_rows = draw(st.integers(1, 60))
    return max_rows, draw(demands_of(max_rows, 2 * max_rows if crowded else max_rows))


@drawn
@given(budgets())
def test_the_budget_keeps_its_promises(drawn_budget: tuple[int, list[Demand]]) -> None:
    max_rows, demands = drawn_budget
    assert not broken(grants(RowBudget(max_rows), demands))


@drawn
@given(budgets(crowded=False))
def test_the_budget_is_sangams(drawn_budget: tuple[int, list[Demand]]) -> None:
    max_rows, demands = drawn_budget
    for demand, grant in zip(demands, grants(RowBudget(max_rows), demands)):
        assert (grant.num_granted, grant.after) == sangam(max_rows, grant.before, demand)


class NeverSaves(RowBudget):
    def grant(self, num_ordinary: int, costs: Sequence[int], *, blocked: bool) -> int:
        num_granted = super().grant(num_ordinary, costs, blocked=blocked)
        self.deficit = 0
        return num_granted


class NeverForgets(RowBudget):
    def grant(self, num_ordinary: int, costs: Sequence[int], *, blocked: bool) -> int:
        before = self.deficit
        num_granted = super().grant(num_ordinary, costs, blocked=blocked)
        if not costs:
            self.deficit = before + max(0, self.max_rows - num_ordinary)
        return num_granted


class SavesForThoseOutside(RowBudget):
    def grant(self, num_ordinary: int, costs: Sequence[int], *, blocked: bool) -> int:  # noqa: ARG002
        return super().grant(num_ordinary, costs, blocked=False)


class RunsUpDebts(RowBudget):
    def grant(self, num_ordinary: int, costs: Sequence[int], *, blocked: bool) -> int:
        avail = self.deficit + max(0, self.max_rows - num_ordinary)
        num_granted = super().grant(num_ordinary, costs, blocked=blocked)
        if num_granted:
            self.deficit = avail - sum(costs[:num_granted])
        return num_granted


class EatsSavings(RowBudget):
    """Ordinary rows beyond the budget are taken from what was saved."""

    def grant(self, num_ordinary: int, costs: Sequence[int], *, blocked: bool) -> int:
        self.deficit = max(0, self.deficit - max(0, num_ordinary - self.max_rows))
        return super().grant(num_ordinary, costs, blocked=blocked)


class NeverLetsTheLongOneGo(RowBudget):
    """It saves up for the first one even if nothing runs meanwhile."""

    def grant(self, num_ordinary: int, costs: Sequence[int], *, blocked: bool) -> int:
        before = self.deficit
        if costs and num_ordinary == 0 and costs[0] > self.max_rows + before:
            self.deficit += self.max_rows
            return 0
        return super().grant(num_ordinary, costs, blocked=blocked)


class LetsAllGo(RowBudget):
    def grant(self, num_ordinary: int, costs: Sequence[int], *, blocked: bool) -> int:
        super().grant(num_ordinary, costs, blocked=blocked)
        return len(costs)


class HoldsOneBack(RowBudget):
    """The last one that fits has to wait."""

    def grant(self, num_ordinary: int, costs: Sequence[int], *, blocked: bool) -> int:
        before, fresh = self.deficit, max(0, self.max_rows - num_ordinary)
        num_granted = max(0, super().grant(num_ordinary, costs, blocked=blocked) - 1)
        if costs:
            self.deficit = max(0, before + fresh - sum(costs[:num_granted]))
        return num_granted


BUDGET_FAULTS: list[tuple[type[RowBudget], str]] = [
    (NeverSaves, "saves"),
    (NeverForgets, "forgets"),
    (SavesForThoseOutside, "saves_nothing_for_those_outside"),
    (RunsUpDebts, "never_negative"),
    (EatsSavings, "saves"),
    (NeverLetsTheLongOneGo, "somebody_runs"),
    (LetsAllGo, "rows_are_bounded"),
    (HoldsOneBack, "less_than_the_head_needs"),
]


def seek(strategy: st.SearchStrategy[Any], condition: Callable[[Any], bool]) -> None:
    """Passes if there is an example; `find` raises otherwise."""
    find(strategy, condition, settings=sought, random=random.Random(0))


@pytest.mark.parametrize(("fault", "promise"), BUDGET_FAULTS)
def test_a_wrong_budget_is_found_out(fault: type[RowBudget], promise: str) -> None:
    seek(budgets(), lambda drawn_budget: promise in broken(grants(fault(drawn_budget[0]), drawn_budget[1])))


# --- seats and the queue


def scheduler(
    max_seats: int = 4,
    max_rows: int = 100,
    rows: Callable[[Answer], int] = lambda answer: answer.length * answer.num_seats,
    reserve: Callable[[Answer], bool] = lambda _: True,
) -> Scheduler:
    return Scheduler(max_seats, max_rows, rows_of=rows, reserve=reserve)


def test_low_seats_first_and_again_after_release() -> None:
    queue, answers = scheduler(), [answer() for _ in range(5)]
    for one in answers:
        queue.add(one)
    assert (queue.num_waiting, queue.num_running) == (5, 0)
    assert queue.admit() == answers[:4]
    assert [one.seat for one in answers] == [0, 1, 2, 3, -1]
    assert (queue.num_waiting, queue.num_running) == (1, 4)
    assert [queue.release(answers[2]), queue.release(answers[1])] == [[2], [1]]
    assert (answers[1].seat, answers[1].twin) == (-1, -1)
    assert queue.admit() == [answers[4]]
    assert answers[4].seat == 1
    assert [*queue.running] == [answers[0], answers[3], answers[4]]


def test_a_guided_answer_sits_twice_or_not_at_all() -> None:
    queue, single, guided, late = scheduler(max_seats=2), answer(), answer(guided=True), answer()
    for one in (single, guided, late):
        queue.add(one)
    assert queue.admit() == [single]  # a seat is free, but the guided one is first
    assert queue.admit() == []
    queue.release(single)
    assert queue.admit() == [guided]
    assert (guided.seat, guided.twin) == (0, 1)
    assert queue.release(guided) == [0, 1]
    assert queue.admit() == [late]


def test_the_rows_of_all_ordinary_passes_fit_one_pass() -> None:
    queue, answers = scheduler(max_rows=20), [answer(10), answer(5, guided=True), answer(1), answer(21), answer(1)]
    for one in answers:
        queue.add(one)
    assert queue.admit() == answers[:2]
    queue.release(answers[0])
    assert queue.admit() == [answers[2]]
    queue.release(answers[1])
    queue.release(answers[2])
    assert queue.admit() == [answers[3]]  # longer than a pass: alone
    queue.release(answers[3])
    assert queue.admit() == [answers[4]]


def test_without_memory_the_seats_go_back_and_nobody_passes() -> None:
    asked: list[tuple[Answer, int, int]] = []
    memory = False

    def reserve(one: Answer) -> bool:
        asked.append((one, one.seat, one.twin))
        return memory

    queue, first, second = scheduler(reserve=reserve), answer(guided=True), answer()
    queue.add(first)
    queue.add(second)
    assert queue.admit() == []
    assert asked == [(first, 0, 1)]
    assert (first.seat, first.twin) == (-1, -1)
    assert list(queue.waiting) == [first, second]
    memory = True
    assert queue.admit() == [first, second]
    assert [(one.seat, one.twin) for one in (first, second)] == [(0, 1), (2, -1)]


def test_seats_go_back_if_the_reservation_raises() -> None:
    def reserve(_: Answer) -> bool:
        if errors:
            raise errors.pop()
        return True

    errors = [MemoryError("no pages")]
    queue, one = scheduler(max_seats=1, reserve=reserve), answer()
    queue.add(one)
    with pytest.raises(MemoryError, match="no pages"):
        queue.admit()
    assert one.seat == -1
    assert queue.admit() == [one]


def test_release_takes_out_of_the_queue_and_knows_strangers() -> None:
    queue, one, other = scheduler(), answer(), answer()
    queue.add(one)
    queue.add(other)
    assert queue.release(one) == []
    assert queue.admit() == [other]
    assert queue.release(one) == []
    assert queue.release(other) == [0]
    assert queue.release(other) == []


# --- who stands still


def seated(*answers: Answer, max_rows: int = 100) -> Scheduler:
    queue = scheduler(8, max_rows, rows=lambda _: 1)
    for one in answers:
        queue.add(one)
    queue.admit()
    return queue


def test_ordinary_passes_run_and_refreshes_wait_in_order() -> None:
    answers = [answer() for _ in range(4)]
    queue = seated(*answers)
    rows, due = [60, 90, 20, 30], [False, True, False, True]
    assert queue.grant(rows, due) == [answers[1], answers[3]]
    assert queue.budget.deficit == 20
    for deficit in (40, 60, 80):
        assert queue.grant(rows, due) == [answers[1], answers[3]]  # 30 would have fitted, but 90 is first
        assert queue.budget.deficit == deficit
    assert queue.grant(rows, due) == [answers[3]]
    assert queue.budget.deficit == 10
    assert queue.grant(rows, [False] * 4) == []
    assert queue.budget.deficit == 0


def test_order_is_that_of_arrival_not_of_seats() -> None:
    first, second, third = answer(), answer(), answer()
    queue = seated(first, second)
    queue.release(first)
    queue.add(third)
    queue.admit()
    assert (third.seat, second.seat) == (0, 1)
    assert queue.grant([80, 80], [True, True]) == [third]


def test_an_answer_needs_the_rows_of_both_its_seats() -> None:
    single, guided = answer(), answer(guided=True)
    queue = seated(single, guided)
    for due in ([True, True], [True, False], [False, True]):  # it refreshes as a whole
        assert queue.grant([70, 100, 100], [False, *due]) == [guided]
    assert queue.budget.deficit == 90
    queue = seated(single, guided)
    assert queue.grant([70, 20, 20], [True, False, False]) == [single]
    assert queue.budget.deficit == 60


def test_empty_seats_do_not_count() -> None:
    first, second = answer(), answer()
    queue = seated(first, second)
    queue.release(first)
    assert queue.grant([999, 100, 999], [True, True, True]) == []
    assert queue.budget.deficit == 0


def test_a_cancelled_head_lets_the_next_one_run() -> None:
    ordinary, long, short = answer(), answer(), answer()
    queue = seated(ordinary, long, short)
    assert queue.grant([50, 900, 50], [False, True, True]) == [long, short]
    queue.release(long)
    assert queue.budget.deficit == 50  # what was saved is the next one's
    assert queue.grant([50, 0, 100], [False, False, True]) == []


def test_nothing_is_saved_while_somebody_waits_outside() -> None:
    ordinary, refreshed = answer(), answer()
    queue = seated(ordinary, refreshed, max_rows=2)  # two ordinary rows: a third answer stays outside
    queue.add(answer())
    queue.budget.deficit = 7
    assert queue.admit() == []
    assert queue.grant([1, 1], [False, False]) == []
    assert queue.budget.deficit == 7  # kept, though nobody is due
    assert queue.grant([1, 3], [False, True]) == []
    assert queue.budget.deficit == 5
    assert queue.grant([0, 1], [False, True]) == []
    assert queue.budget.deficit == 5  # one row was left over


def test_what_was_left_before_a_pause_is_gone_after_it() -> None:
    one, other = answer(), answer()
    queue = seated(one)
    assert queue.grant([30], [True]) == []
    assert queue.budget.deficit == 70
    queue.add(other)
    queue.release(one)
    assert queue.budget.deficit == 70  # somebody is still there
    queue.release(other)
    assert queue.budget.deficit == 0


# --- a closed loop

NEVER = 1 << 30


@dataclass(eq=False)
class Job:
    """A request, and what it will do once it is seated. Rows and memory are those of all its seats."""

    number: int
    arrival: int
    """The pass before which it arrives."""
    answer: Answer
    width: int
    """Most rows of an ordinary pass, a seat."""
    plan: tuple[bool, ...]
    """Its own passes: is it a refresh?"""
    patience: int | None
    """It is cancelled before so many passes after its arrival are over."""
    num_done: int = 0
    finished: int = NEVER

    @property
    def over(self) -> bool:
        return self.num_done == len(self.plan)

    @property
    def due(self) -> bool:
        return self.plan[self.num_done]

    @property
    def canvas(self) -> int:
        return self.answer.length * self.answer.num_seats

    @property
    def most_rows(self) -> int:
        return self.width * self.answer.num_seats

    @property
    def rows_a_seat(self) -> int:
        """An ordinary pass needs anything up to the width."""
        return self.answer.length if self.due else 1 + 7 * self.num_done % self.width

    @property
    def longest_wait(self) -> int:
        """Passes from the one in which its refresh is first in line to the one in which it runs.

        It was admitted, so the ordinary passes of all the others leave `most_rows` of the budget or more, in every
        pass; all of that is saved. After n passes n times as much is there, so the n-th runs it if that is the canvas.
        (An answer whose ordinary pass is longer than the budget is alone, and runs at once.)
        """
        return -(-self.canvas // self.most_rows)

    @property
    def longest_run(self) -> int:
        """Passes from when nobody older is left to its end: none goes by in which it neither runs nor is first in
        line, for nobody who came later was seated before it or is refreshed before it."""
        return sum(self.longest_wait if refresh else 1 for refresh in self.plan)


@dataclass(frozen=True)
class Pass:
    """What one pass of the loop looked like."""

    running: tuple[Job, ...]
    due: tuple[Job, ...]
    standing: tuple[Job, ...]
    grant: Grant


@dataclass
class Load:
    """Requests and the engine that they come to."""

    max_seats: int
    max_rows: int
    memory: int
    """Positions."""
    jobs: list[Job]


@st.composite
def loads(draw: st.DrawFn, cancelled: bool = True) -> Load:
    max_seats, max_rows = draw(st.integers(2, 6)), draw(st.integers(8, 80))
    lengths = draw(st.lists(st.integers(1, 100), min_size=1, max_size=10))
    jobs, arrival = [], 0
    for number, length in enumerate(lengths):
        arrival += draw(st.one_of(st.just(0), st.integers(0, 12)))
        phases = draw(st.lists(st.integers(0, 25), min_size=1, max_size=4))
        plan = [due for phase in phases for due in (True, *[False] * phase)]
        plan = plan[draw(st.integers(0, 1)) :] or [False]  # the first pass need not be a refresh
        width = draw(st.integers(1, min(length, 30)))
        patience = draw(st.one_of(st.none(), st.integers(0, 40))) if cancelled else None
        guided = draw(st.integers(0, 3)) == 0
        jobs.append(Job(number, arrival, answer(length, guided), width, tuple(plan), patience))
    least = max(job.canvas for job in jobs)
    memory = draw(st.one_of(st.integers(least, 2 * least), st.just(sum(job.canvas for job in jobs))))
    return Load(max_seats, max_rows, memory, jobs)


@dataclass
class Loop:
    """An engine in which nothing is computed: it runs a load pass by pass and keeps what happened."""

    load: Load
    make: type[Scheduler] = Scheduler
    budget: type[RowBudget] = RowBudget
    passes: list[Pass] = field(default_factory=list)
    seated: list[Job] = field(default_factory=list)
    given_up: bool = False

    def __post_init__(self) -> None:
        self.scheduler = self.make(
            self.load.max_seats, self.load.max_rows, rows_of=self.most_rows, reserve=self.reserve
        )
        self.scheduler.budget = self.budget(self.load.max_rows)
        self.job_of = {job.answer: job for job in self.load.jobs}
        self.memory = self.load.memory
        self.number = 0

    def most_rows(self, one: Answer) -> int:
        return self.job_of[one].most_rows

    def reserve(self, one: Answer) -> bool:
        taken = [seat for job in self.scheduler.running for seat in (job.seat, job.twin) if seat >= 0]
        own = [one.seat, one.twin][: one.num_seats]
        assert all(seat in range(self.load.max_seats) for seat in own)
        assert len({*own, *taken}) == len(own) + len(taken)
        fits = self.job_of[one].canvas <= self.memory
        self.memory -= self.job_of[one].canvas if fits else 0
        return fits

    def run(self) -> Loop:
        """All jobs to their end, or twice as far as the longest run can take."""
        coming = deque(self.load.jobs)
        limit = 2 * (coming[-1].arrival + sum(job.longest_run for job in coming))
        while coming or self.scheduler.num_waiting or self.scheduler.num_running:
            while coming and coming[0].arrival <= self.number:
                self.scheduler.add(coming.popleft().answer)
            self.cancel()
            if self.scheduler.num_waiting or self.scheduler.num_running:
                self.step()
            self.number += 1
            if self.number > limit:
                self.given_up = True
                break
        return self

    def cancel(self) -> None:
        for one in [*self.scheduler.running, *self.scheduler.waiting]:
            job = self.job_of[one]
            if job.patience is not None and self.number >= job.arrival + job.patience:
                self.leave(job)

    def leave(self, job: Job) -> None:
        if self.scheduler.release(job.answer):
            self.memory += job.canvas

    def step(self) -> None:
        for one in self.scheduler.admit():
            self.seated.append(self.job_of[one])
        running = tuple(self.job_of[one] for one in self.scheduler.running)
        standing = self.grant(running)
        for job in running:
            job.num_done += job not in standing
            if job.over:
                job.finished = self.number
                self.leave(job)

    def grant(self, running: Sequence[Job]) -> tuple[Job, ...]:
        """Ask the scheduler, and write down what it says."""
        rows, due_seats = [0] * self.load.max_seats, [False] * self.load.max_seats
        for job in running:
            for seat in (job.answer.seat, job.answer.twin)[: job.answer.num_seats]:
                rows[seat], due_seats[seat] = job.rows_a_seat, job.due
        blocked, before = self.scheduler.num_waiting > 0, self.scheduler.budget.deficit
        standing = tuple(self.job_of[one] for one in self.scheduler.grant(rows, due_seats))
        due = tuple(job for job in running if job.due)
        num_ordinary = sum(job.rows_a_seat * job.answer.num_seats for job in running if not job.due)
        asked = (self.load.max_rows, num_ordinary, tuple(job.canvas for job in due), blocked)
        grant = Grant(*asked, before, sum(job not in standing for job in due), self.scheduler.budget.deficit)
        self.passes.append(Pass(tuple(running), due, standing, grant))
        return standing


def budget_holds(loop: Loop) -> bool:
    return not broken([one.grant for one in loop.passes])


def rows_are_bounded_by_the_budget(loop: Loop) -> bool:
    """No pass has more rows than budget and savings, unless there is one answer in it."""

    def bounded(one: Pass) -> bool:
        num_rows = one.grant.num_ordinary + one.grant.used
        alone = len(one.running) - len(one.standing) == 1
        return alone or num_rows <= one.grant.max_rows + one.grant.before

    return all(map(bounded, loop.passes))


def seated_in_order(loop: Loop) -> bool:
    numbers = [job.number for job in loop.seated]
    return numbers == sorted(numbers)


def refreshed_in_order(loop: Loop) -> bool:
    """Whoever stands still is due, and so is everybody after it: they all stand."""
    return all(one.standing == one.due[len(one.due) - len(one.standing) :] for one in loop.passes)


def first_in_line_waits_no_longer_than_stated(loop: Loop) -> bool:
    job, waited = None, 0
    for one in loop.passes:
        head = one.standing[0] if one.standing and one.standing == one.due else None
        waited = waited + 1 if head is job else 1
        job = head
        if job is not None and waited >= job.longest_wait:  # it stood in the pass in which it must run
            return False
    return True


def finished_in_time(loop: Loop) -> bool:
    """The stated bound: the longest run of a job, and of everybody who was there when it came, one after the other."""
    jobs = loop.load.jobs

    def left(job: Job) -> int:
        """The pass after which it was gone, if that was before the loop gave up."""
        cancelled = NEVER if job.patience is None else job.arrival + job.patience - 1
        return min(cancelled, job.finished)

    def in_time(job: Job) -> bool:
        before = [other for other in jobs[: job.number] if left(other) >= job.arrival]
        latest = job.arrival - 1 + sum(other.longest_run for other in [*before, job])
        return left(job) <= latest

    return not loop.given_up and all(map(in_time, jobs))


def whole_again(loop: Loop) -> bool:
    """All memory is back, nothing is saved, and the next to come find all seats, in order."""
    scheduler, idle = loop.scheduler, loop.scheduler.budget.deficit == 0
    probes = [answer(1) for _ in range(loop.load.max_seats)]
    for number, probe in enumerate(probes):
        loop.job_of[probe] = Job(number, 0, probe, 0, (False,), None)
        scheduler.add(probe)
    loop.memory += len(probes)
    scheduler.admit()
    return idle and loop.memory == loop.load.memory and [p.seat for p in probes] == list(range(len(probes)))


LOOP_PROMISES = (
    budget_holds,
    rows_are_bounded_by_the_budget,
    seated_in_order,
    refreshed_in_order,
    first_in_line_waits_no_longer_than_stated,
    finished_in_time,
    whole_again,
)


def failures(loop: Loop) -> set[str]:
    """Names of the promises that do not hold."""
    return {promise.__name__ for promise in LOOP_PROMISES if not promise(loop)}


@drawn
@given(loads(cancelled=False))
def test_everybody_finishes_in_time(load: Load) -> None:
    assert not failures(Loop(load).run())
    assert all(job.over for job in load.jobs)


@drawn
@given(loads())
def test_cancelled_requests_leave_no_trace(load: Load) -> None:
    assert not failures(Loop(load).run())
    assert all(job.over or job.patience is not None for job in load.jobs)


def test_the_longest_wait_is_reached() -> None:
    """The bound is sharp: nine passes of ten rows for a canvas of ninety, while others need all their rows."""
    wide = Job(0, 0, answer(90), 90, (False,) * 100, None)
    long = Job(1, 0, answer(90), 10, (True,), None)
    queue = scheduler(2, 100, rows=lambda one: wide.width if one is wide.answer else long.width)
    for job in (wide, long):
        queue.add(job.answer)
    queue.admit()
    assert long.longest_wait == 9
    stood = [queue.grant([90, 90], [False, True]) == [long.answer] for _ in range(9)]
    assert stood == [True] * 8 + [False]


class ShortRefreshesFirst(Scheduler):
    def grant(self, rows: Sequence[int], due: Sequence[bool]) -> list[Answer]:
        running = self.running
        self.running = sorted(running, key=lambda one: rows[one.seat])
        standing = super().grant(rows, due)
        self.running = running
        return standing


class Overtakes(Scheduler):
    """If the first in the queue finds no place, the others are tried."""

    def admit(self) -> list[Answer]:
        admitted = super().admit()
        for _ in range(len(self.waiting)):
            self.waiting.rotate(-1)
            admitted += super().admit()
        return admitted


class ForgetsTwins(Scheduler):
    def grant(self, rows: Sequence[int], due: Sequence[bool]) -> list[Answer]:
        twins = {one.twin for one in self.running}
        return super().grant([0 if seat in twins else num for seat, num in enumerate(rows)], due)


class Crowds(Scheduler):
    """Admits without asking for the rows of ordinary passes."""

    def __init__(
        self,
        max_seats: int,
        max_rows: int,
        *,
        rows_of: Callable[[Answer], int],  # noqa: ARG002
        reserve: Callable[[Answer], bool],
    ) -> None:
        super().__init__(max_seats, max_rows, rows_of=lambda _: 0, reserve=reserve)


class StopsOrdinaryPasses(Scheduler):
    """Everybody waits while somebody does."""

    def grant(self, rows: Sequence[int], due: Sequence[bool]) -> list[Answer]:
        return list(self.running) if super().grant(rows, due) else []


class KeepsSeats(Scheduler):
    """A seat that was given up stays taken."""

    def release(self, answer: Answer) -> list[int]:
        seats = super().release(answer)
        self._free = [seat for seat in self._free if seat not in seats[1:]]
        return seats


LOOP_FAULTS: list[tuple[type[Scheduler], type[RowBudget], str]] = [
    (ShortRefreshesFirst, RowBudget, "refreshed_in_order"),
    (Overtakes, RowBudget, "seated_in_order"),
    (ForgetsTwins, RowBudget, "rows_are_bounded_by_the_budget"),
    (Crowds, RowBudget, "rows_are_bounded_by_the_budget"),
    (Crowds, RowBudget, "first_in_line_waits_no_longer_than_stated"),
    (StopsOrdinaryPasses, RowBudget, "refreshed_in_order"),
    (StopsOrdinaryPasses, RowBudget, "finished_in_time"),
    (KeepsSeats, RowBudget, "whole_again"),
    (Scheduler, NeverSaves, "first_in_line_waits_no_longer_than_stated"),
    (Scheduler, NeverSaves, "finished_in_time"),
    (Scheduler, LetsAllGo, "rows_are_bounded_by_the_budget"),
    (Scheduler, NeverLetsTheLongOneGo, "budget_holds"),
    (Scheduler, HoldsOneBack, "finished_in_time"),
]


@pytest.mark.parametrize(("make", "budget", "promise"), LOOP_FAULTS)
def test_a_wrong_scheduler_is_found_out(make: type[Scheduler], budget: type[RowBudget], promise: str) -> None:
    seek(loads(), lambda load: promise in failures(Loop(load, make, budget).run()))


def test_savings_are_bounded_by_the_largest_refresh() -> None:
    """Thousand light passes save no more than one refresh can cost; a head of that cost still gets its turn."""
    bounded, unbounded = RowBudget(100, max_deficit=300), RowBudget(100)
    for _ in range(1000):
        assert bounded.grant(30, [20], blocked=False) == unbounded.grant(30, [20], blocked=False) == 1
    assert (bounded.deficit, unbounded.deficit) == (300, 50_000)
    assert bounded.grant(30, [300] * 16, blocked=False) == 1
    waits = 0
    while bounded.grant(99, [300], blocked=False) == 0:
        waits += 1
    assert waits <= 300
