"""Decides who sits where and who runs in a pass: the queue, the seats, the row budget. Touches no tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

from unmask.engine.request import Answer


class RowBudget:
    """Deficit row budget of one pass (Sangam, arXiv 2607.04206): ordinary passes always run; refreshes wait for rows.

    A refresh needs its whole canvas in one pass and cannot be split. What the ordinary passes leave of ``max_rows`` is
    saved up (``deficit``, in rows) while a refresh waits, so that it runs after a while, however long its canvas is,
    and the others are held up on average by no more than ``max_rows`` a pass.
    """

    def __init__(self, max_rows: int, *, max_deficit: int | None = None) -> None:
        self.max_rows, self.max_deficit = max_rows, max_deficit
        """``max_deficit`` bounds what is saved, in rows; the largest refresh must fit. None saves without bound, as the
        published rule does: after long quiet times many refreshes may then run in one pass."""
        self.deficit = 0

    def grant(self, num_ordinary: int, costs: Sequence[int], *, blocked: bool) -> int:
        """How many of ``costs``, from the first, run in this pass: nobody overtakes a refresh that has to wait.

        Args:
            num_ordinary: rows of all seats whose pass is ordinary.
            costs: rows of each refresh that is due, in order of arrival.
            blocked: somebody waits outside for memory or a seat.
        """
        # Ordinary passes may need more than the budget. That leaves nothing to save, but it must not eat what was
        # saved either: the first in line would lose in crowded passes what it gained in others, and might never run.
        # Clamped, its savings only grow. They do grow under `Scheduler`, which admits no more than fits the budget:
        # whoever waits has rows of its own there that nobody uses meanwhile.
        fresh = max(0, self.max_rows - num_ordinary)
        num_granted = self._num_affordable(costs, fresh + self.deficit)
        if costs and num_granted == 0 and num_ordinary == 0:
            num_granted = 1  # it costs more than the budget, but saving up for it would only leave this pass empty
        left = max(0, fresh + self.deficit - sum(costs[:num_granted]))
        carried = self._carried(left, len(costs), num_granted, blocked)
        self.deficit = carried if self.max_deficit is None else min(carried, self.max_deficit)
        return num_granted

    def _num_affordable(self, costs: Sequence[int], num_rows: int) -> int:
        """Refreshes up to the first that does not fit ``num_rows`` with those before it."""
        totals = list(accumulate(costs))
        return next((place for place, total in enumerate(totals) if total > num_rows), len(totals))

    def _carried(self, left: int, num_due: int, num_granted: int, blocked: bool) -> int:
        """The next pass's deficit if ``left`` rows were not used in this one."""
        if blocked and num_granted == num_due:
            return min(self.deficit, left)  # rows are not what is missing: spend, but do not save
        return left if num_due else 0


class Scheduler:
    """First come, first served: whoever arrived first is seated first, and refreshed first.

    An answer is seated when seats are free, its ordinary passes fit one pass of ``max_rows`` with everybody else's,
    and the memory of its whole canvas can be had. Once seated it takes part in every pass, except that its refreshes
    (its first pass may be one) wait for the row budget. While one waits, the answer stands still.

    Args:
        max_seats: an answer takes one, a guided answer two.
        max_rows: rows of one pass, on average. An answer that needs more in an ordinary pass runs alone.
        rows_of: most rows that an ordinary pass of this answer can need, all its seats together.
        max_refresh: most rows that one answer's refresh can cost; no more than that is ever saved up.
        reserve: takes the memory of this answer's whole canvas, or says False; ``seat`` and ``twin`` are set. It must
            be able to say True when nothing runs: an answer that can never be seated would be waited for for ever.
    """

    def __init__(
        self,
        max_seats: int,
        max_rows: int,
        *,
        rows_of: Callable[[Answer], int],
        reserve: Callable[[Answer], bool],
        max_refresh: int | None = None,
    ) -> None:
        self.max_seats, self.max_rows = max_seats, max_rows
        self.budget = RowBudget(max_rows, max_deficit=max_refresh)
        self.waiting: deque[Answer] = deque()
        self.running: dict[Answer, int] = {}
        """Who is seated, in order of arrival, and the most rows of an ordinary pass of each."""
        self._rows_of, self._reserve = rows_of, reserve
        self._free = list(range(max_seats - 1, -1, -1))

    @property
    def num_waiting(self) -> int:
        """Answers in the queue."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Answers that are seated, standing still or not."""
        return len(self.running)

    def add(self, answer: Answer) -> None:
        """Queue an answer."""
        self.waiting.append(answer)

    def admit(self) -> list[Answer]:
        """Seat whoever can be seated now, in order of arrival, and return them."""
        admitted = []
        while self.waiting and self._fits(self.waiting[0]) and self._seat(self.waiting[0]):
            answer = self.waiting.popleft()
            self.running[answer] = self._rows_of(answer)
            admitted.append(answer)
        return admitted

    def grant(self, rows: Sequence[int], due: Sequence[bool]) -> list[Answer]:
        """The answers that must stand still in this pass, in order of arrival. Call it once a pass.

        Args:
            rows: rows that each seat's next pass wants.
            due: whether that pass is a refresh. One of two seats of an answer is enough: they never part.
        """
        refreshing = [answer for answer in self.running if any(due[seat] for seat in answer.seats)]
        costs = [sum(rows[seat] for seat in answer.seats) for answer in refreshing]
        num_ordinary = 0
        if refreshing:  # otherwise the budget does not care
            num_ordinary = sum(rows[seat] for answer in self.running for seat in answer.seats) - sum(costs)
        num_granted = self.budget.grant(num_ordinary, costs, blocked=bool(self.waiting))
        return refreshing[num_granted:]

    def release(self, answer: Answer) -> list[int]:
        """Take an answer out of the queue or off its seats, which are returned."""
        if answer in self.waiting:
            self.waiting.remove(answer)
        seats = []
        if answer in self.running:
            del self.running[answer]
            seats = self._vacate(answer)
        if not self.running and not self.waiting:
            self.budget.deficit = 0  # as after a pass in which nobody waits: the next one to come starts afresh
        return seats

    def _fits(self, answer: Answer) -> bool:
        if len(self._free) < answer.num_seats:
            return False
        return not self.running or sum(self.running.values()) + self._rows_of(answer) <= self.max_rows

    def _seat(self, answer: Answer) -> bool:
        """Give an answer its seats and memory, or neither."""
        answer.seat = self._free.pop()
        answer.twin = self._free.pop() if answer.num_seats == 2 else -1
        seated = False
        try:
            seated = self._reserve(answer)
        finally:
            if not seated:
                self._vacate(answer)
        return seated

    def _vacate(self, answer: Answer) -> list[int]:
        seats = answer.seats
        self._free += seats
        self._free.sort(reverse=True)  # low seats first: small batches stay in a small bucket
        answer.seat = answer.twin = -1
        return seats
