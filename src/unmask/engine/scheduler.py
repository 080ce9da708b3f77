"""Decides who sits where. Holds the queue and the seats; touches no tensor."""

from __future__ import annotations

from collections import deque

from unmask.engine.request import Answer


class Scheduler:
    """First come, first served: an answer is seated when it finds its seats free and its rows fit the pass.

    ``max_rows`` bounds the rows of one pass; a canvas longer than that runs alone.
    """

    def __init__(self, max_seats: int, max_rows: int) -> None:
        self.max_seats, self.max_rows = max_seats, max_rows
        self.waiting: deque[Answer] = deque()
        self.running: list[Answer] = []
        self._free = list(range(max_seats - 1, -1, -1))

    @property
    def num_rows(self) -> int:
        """Most rows that the running answers can need in one pass."""
        return sum(answer.length * answer.num_seats for answer in self.running)

    def add(self, answer: Answer) -> None:
        self.waiting.append(answer)

    def admit(self) -> list[Answer]:
        """Seat whoever can be seated now, and return them."""
        admitted = []
        while self.waiting and self._fits(self.waiting[0]):
            answer = self.waiting.popleft()
            answer.seat = self._free.pop()
            answer.twin = self._free.pop() if answer.num_seats == 2 else -1
            self.running.append(answer)
            admitted.append(answer)
        return admitted

    def _fits(self, answer: Answer) -> bool:
        rows = self.num_rows + answer.length * answer.num_seats
        return len(self._free) >= answer.num_seats and (rows <= self.max_rows or not self.running)

    def release(self, answer: Answer) -> list[int]:
        """Take an answer out of the queue or off its seats, which are returned."""
        if answer in self.waiting:
            self.waiting.remove(answer)
        if answer not in self.running:
            return []
        self.running.remove(answer)
        seats = [seat for seat in (answer.seat, answer.twin) if seat >= 0]
        self._free += seats
        self._free.sort(reverse=True)  # low seats first: small batches stay in a small bucket
        answer.seat = answer.twin = -1
        return seats
