"""Reuse of whole prompts: a hit is the same prompt and finds the same numbers; every page has the holders it should.

The numbers of a prompt position here stand for K/V under block-causal attention: they depend on the whole prompt and
the position, and on nothing else.

S seats, P pages of a seat, L layers, D hidden size
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from torch import Tensor

from unmask.cache.pool import PAGE_SIZE, PagePool, PlaneSpec, num_pages_for
from unmask.cache.prefix import Prefix, PrefixCache
from unmask.errors import ConfigError, EngineError

NUM_SEATS, NUM_PAGES, NUM_LAYERS = 3, 8, 2
CAPACITY = NUM_PAGES * PAGE_SIZE
PLANES = {"k": PlaneSpec((1,), torch.int64), "v": PlaneSpec((2,), torch.int32)}
LENGTHS = (1, 15, 16, 17, 32, 33)

Prompt = tuple[int, ...]
# Each of the first is the beginning of the next; the last two share pages, or all but one token, with others.
PROMPTS: list[Prompt] = [tuple(range(length)) for length in LENGTHS]
PROMPTS += [(*range(16), 99), (*range(32), 99)]


def kv(prompt: Prompt, pos: int) -> int:
    """What a pass writes at a position of the prompt."""
    return 1 + 100 * PROMPTS.index(prompt) + pos


def entries(pages: Sequence[int], start: int, stop: int) -> Tensor:
    """int64: where the positions [start, stop) of a canvas with these pages are."""
    pos = torch.arange(start, stop)
    return torch.tensor(pages, dtype=torch.int64)[pos // PAGE_SIZE] * PAGE_SIZE + pos % PAGE_SIZE


def write(pool: PagePool, pages: Sequence[int], start: int, numbers: Sequence[int]) -> None:
    """Put numbers at the positions from ``start`` on, another one in each layer and plane."""
    entry, number = entries(pages, start, start + len(numbers)), torch.tensor(numbers, dtype=torch.int64)
    for layer in range(NUM_LAYERS):
        pool.k[layer, entry, 0] = number * NUM_LAYERS + layer
        pool.v[layer, entry] = (-number * NUM_LAYERS - layer).int()[:, None]


def read(pool: PagePool, pages: Sequence[int], length: int) -> list[int]:
    """The numbers at the first positions; -1 where nothing was written, or layers and planes do not agree."""
    entry, layer_L1 = entries(pages, 0, length), torch.arange(NUM_LAYERS)[:, None]
    k, v = pool.k[:, entry, 0] - layer_L1, pool.v[:, entry] + layer_L1[:, :, None]
    agree = (k == k[0]).all(0) & (v == -k[:, :, None]).all(0).all(-1)
    return torch.where(agree, k[0] // NUM_LAYERS, -1).tolist()


def make(num_pages: int = NUM_PAGES, cache: type[PrefixCache] = PrefixCache) -> tuple[PagePool, PrefixCache]:
    pool = PagePool(PLANES, num_layers=NUM_LAYERS, num_pages=num_pages, num_seats=NUM_SEATS, max_positions=CAPACITY)
    return pool, cache(pool)


def run_cold(pool: PagePool, cache: PrefixCache, seat: int, prompt: Prompt, length: int) -> None:
    """A request whose prompt is not known runs, to the end of its canvas, and its prompt is kept."""
    assert cache.reserve(seat, length)
    write(pool, pool.pages(seat), 0, [kv(prompt, pos) for pos in range(len(prompt))])
    cache.store(prompt, seat, None)
    write(pool, pool.pages(seat), len(prompt), range(7000, 7000 + length - len(prompt)))


def run_warm(pool: PagePool, cache: PrefixCache, seat: int, prompt: Prompt, length: int) -> None:
    """A request whose prompt is known runs to the end of its canvas, without a pass over its prompt."""
    prefix = cache.find(prompt)
    assert prefix is not None
    assert cache.seat(seat, length, prefix)
    write(pool, pool.pages(seat), len(prompt), range(8000, 8000 + length - len(prompt)))


def prompt_numbers(pool: PagePool, pages: Sequence[int], prompt: Prompt) -> bool:
    """Do these pages hold what a pass over the prompt writes?"""
    return read(pool, pages, len(prompt)) == [kv(prompt, pos) for pos in range(len(prompt))]


def known(cache: PrefixCache, prompt: Prompt) -> Prefix:
    prefix = cache.find(prompt)
    assert prefix is not None
    return prefix


# Random histories against a plain model


@dataclass
class Seated:
    """A request as the model sees it."""

    prompt: Prompt
    pages: list[int]
    num_shared: int
    numbers: list[int] = field(default_factory=list)


class Books(RuleBasedStateMachine):
    """The pool and its prefix cache beside lists of names: who holds which page, and what is in it."""

    pool_type: type[PagePool] = PagePool
    cache_type: type[PrefixCache] = PrefixCache
    reached: ClassVar[Counter[str]] = Counter()
    """How often something happened that matters and could be missed."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"num_layers": NUM_LAYERS, "num_pages": NUM_PAGES, "num_seats": NUM_SEATS, "max_positions": CAPACITY}
        self.pool = self.pool_type(PLANES, **sizes)
        self.cache = self.cache_type(self.pool)
        self.holders: dict[int, list[object]] = {page: [] for page in range(1, NUM_PAGES + 1)}
        self.prefixes: dict[Prompt, list[int]] = {}  # least recently used first
        self.seated: dict[int, Seated] = {}
        self.others: list[list[int]] = []
        self.fresh = count(5000)
        self.num_queries = self.num_hits = 0

    # The model

    def free(self) -> list[int]:
        return [page for page, names in self.holders.items() if not names]

    def add(self, name: object, pages: Sequence[int]) -> None:
        for page in pages:
            self.holders[page].append(name)

    def remove(self, name: object, pages: Sequence[int]) -> None:
        for page in pages:
            self.holders[page].remove(name)

    def alone(self, prompt: Prompt) -> list[int]:
        return [page for page in self.prefixes[prompt] if self.holders[page] == [prompt]]

    def make_room(self, num_pages: int, keep: Prompt | None = None) -> bool:
        """Evicts the least recently used that frees anything, again and again, if that leads there at all."""
        others = [prompt for prompt in self.prefixes if prompt != keep]
        evictable = [prompt for prompt in others if self.alone(prompt)]
        if len(self.free()) + sum(len(self.alone(prompt)) for prompt in evictable) < num_pages:
            self.reached["refused although there were some to evict"] += len(evictable) > 0
            return False
        evicted = []
        while len(self.free()) < num_pages:
            evicted.append(evictable.pop(0))
            self.forget(evicted[-1])
        self.reached["evicted some and kept others"] += bool(evicted and evictable)
        self.reached["passed over one that frees nothing"] += evicted != others[: len(evicted)]
        self.reached["evicted for a hit"] += bool(evicted and keep)
        return True

    def forget(self, prompt: Prompt) -> None:
        self.remove(prompt, self.prefixes.pop(prompt))

    def sit(self, seat: int, prompt: Prompt, length: int, shared: Sequence[int] = ()) -> None:
        pages = [*shared, *self.free()[: num_pages_for(length) - len(shared)]]
        self.add(seat, pages)
        self.seated[seat] = Seated(prompt, pages, len(shared))
        self.seated[seat].numbers = [kv(prompt, pos) for pos in range(len(prompt))]
        self.seated[seat].numbers += [next(self.fresh) for _ in range(length - len(prompt))]

    def free_seat(self, number: int) -> int:
        seats = [seat for seat in range(NUM_SEATS) if seat not in self.seated]
        return seats[number % len(seats)]

    def taken_seat(self, number: int) -> int:
        return sorted(self.seated)[number % len(self.seated)]

    # What may happen

    prompts = st.sampled_from(PROMPTS)
    extras = st.sampled_from([0, 1, 15, 16, 17, 31, 50, 80, CAPACITY])  # the last: as long as the pool has room for
    numbers = st.integers(0, 11)

    @precondition(lambda self: len(self.seated) < NUM_SEATS)
    @rule(number=numbers, prompt=prompts, extra=extras, evicts=st.booleans(), stores=st.booleans())
    def run_cold(self, number: int, prompt: Prompt, extra: int, evicts: bool, stores: bool) -> None:
        seat = self.free_seat(number)
        self.run_cold_at(seat, prompt, min(len(prompt) + extra, CAPACITY), evicts)
        if stores and seat in self.seated:
            self.store_from(seat)

    def run_cold_at(self, seat: int, prompt: Prompt, length: int, evicts: bool) -> None:
        needed = num_pages_for(length)
        fits = self.make_room(needed) if evicts else len(self.free()) >= needed
        assert (self.cache if evicts else self.pool).reserve(seat, length) == fits
        if fits:
            self.sit(seat, prompt, length)
            write(self.pool, self.pool.pages(seat), 0, self.seated[seat].numbers)

    @precondition(lambda self: self.prefixes and len(self.seated) < NUM_SEATS)
    @rule(number=numbers, which=numbers, extra=extras)
    def run_warm(self, number: int, which: int, extra: int) -> None:
        prompt = list(self.prefixes)[which % len(self.prefixes)]
        prefix = self.found(prompt)
        assert prefix is not None
        seat, length = self.free_seat(number), min(len(prompt) + extra, CAPACITY)
        full = self.prefixes[prompt][: len(prompt) // PAGE_SIZE]
        fits = self.make_room(num_pages_for(length) - len(full), keep=prompt)
        assert self.cache.seat(seat, length, prefix) == fits
        if fits:
            self.reached["hits"] += 1
            self.reached["hits beside another seat with the same pages"] += any(
                each.prompt == prompt and full for each in self.seated.values()
            )
            self.sit(seat, prompt, length, full)
            write(self.pool, self.pool.pages(seat), len(prompt), self.seated[seat].numbers[len(prompt) :])

    @rule(prompt=prompts)
    def find(self, prompt: Prompt) -> None:
        self.found(prompt)

    def found(self, prompt: Prompt) -> Prefix | None:
        prefix = self.cache.find(prompt)
        self.num_queries += 1
        assert (prefix is not None) == (prompt in self.prefixes)
        if prefix is None:
            return None
        self.num_hits += 1
        self.prefixes[prompt] = self.prefixes.pop(prompt)
        assert prefix.prompt == prompt
        assert list(prefix.pages) == self.prefixes[prompt]
        assert prefix.hidden_D is not None
        assert prefix.hidden_D.tolist() == [kv(prompt, 0)]
        return prefix

    @precondition(lambda self: len(self.seated) < NUM_SEATS)
    @rule(prompts=st.lists(prompts, min_size=1, max_size=4))
    def come_and_go(self, prompts: list[Prompt]) -> None:
        """Short requests leave their prompts behind: without them there is seldom more than one to evict."""
        seat = self.free_seat(0)
        for prompt in prompts:
            self.run_cold_at(seat, prompt, len(prompt), evicts=True)
            if seat in self.seated:
                self.store_from(seat)
                self.release_from(seat)

    @precondition(lambda self: self.seated)
    @rule(number=numbers)
    def store(self, number: int) -> None:
        self.store_from(self.taken_seat(number))

    def store_from(self, seat: int) -> None:
        prompt, pages = self.seated[seat].prompt, self.seated[seat].pages
        self.cache.store(prompt, seat, torch.tensor([kv(prompt, 0)]))
        full, has_tail = pages[: len(prompt) // PAGE_SIZE], len(prompt) % PAGE_SIZE > 0
        if prompt not in self.prefixes and self.make_room(has_tail):
            self.prefixes[prompt] = full + self.free()[:has_tail]
            self.add(prompt, self.prefixes[prompt])

    @precondition(lambda self: self.seated)
    @rule(number=numbers)
    def answer(self, number: int) -> None:
        """Another pass over the answer."""
        seat = self.taken_seat(number)
        start, numbers = len(self.seated[seat].prompt), self.seated[seat].numbers
        numbers[start:] = [next(self.fresh) for _ in numbers[start:]]
        write(self.pool, self.pool.pages(seat), start, numbers[start:])

    @precondition(lambda self: self.seated)
    @rule(number=numbers)
    def release(self, number: int) -> None:
        self.release_from(self.taken_seat(number))

    def release_from(self, seat: int) -> None:
        self.pool.release(seat)
        self.remove(seat, self.seated.pop(seat).pages)

    @precondition(lambda self: len(self.others) < 2)
    @rule(num_pages=st.integers(0, 2))
    def take(self, num_pages: int) -> None:
        free = self.free()
        taken = self.pool.take(num_pages)
        assert taken == (free[:num_pages] if num_pages <= len(free) else None)
        if taken:
            self.others.append(taken)
            self.add("other", taken)

    @precondition(lambda self: self.seated and len(self.others) < 2)
    @rule(number=numbers)
    def hold(self, number: int) -> None:
        """Somebody else reads the full pages of a prompt."""
        seated = self.seated[self.taken_seat(number)]
        pages = seated.pages[: len(seated.prompt) // PAGE_SIZE]
        self.pool.hold(pages)
        self.others.append(pages)
        self.add("other", pages)

    @precondition(lambda self: self.others)
    @rule(number=numbers)
    def drop(self, number: int) -> None:
        pages = self.others.pop(number % len(self.others))
        self.pool.drop(pages)
        self.remove("other", pages)

    @precondition(lambda self: len(self.prefixes) > 2)
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        for prompt in list(self.prefixes):
            self.forget(prompt)

    # What always holds

    @invariant()
    def every_page_has_the_holders_of_the_model(self) -> None:
        holders = {page: self.pool.num_holders(page) for page in self.holders}
        assert holders == {page: len(names) for page, names in self.holders.items()}
        assert self.pool.num_free == len(self.free())
        assert self.pool.num_used == NUM_PAGES - len(self.free())
        assert self.cache.num_pages == sum(len(self.alone(prompt)) for prompt in self.prefixes)
        assert (self.cache.num_queries, self.cache.num_hits) == (self.num_queries, self.num_hits)

    @invariant()
    def the_table_has_the_pages_of_the_seats(self) -> None:
        for seat, row in enumerate(self.pool.page_table_SP.tolist()):
            pages = self.seated[seat].pages if seat in self.seated else []
            assert list(self.pool.pages(seat)) == pages
            assert row == pages + [0] * (NUM_PAGES - len(pages))

    @invariant()
    def nobody_shares_a_page_that_is_written(self) -> None:
        for seat, seated in self.seated.items():
            for page in seated.pages[len(seated.prompt) // PAGE_SIZE :]:
                assert self.holders[page] == [seat]
                assert self.pool.num_holders(page) == 1

    @invariant()
    def everybody_reads_what_was_written(self) -> None:
        for seat, seated in self.seated.items():
            assert read(self.pool, self.pool.page_table_SP[seat].tolist(), len(seated.numbers)) == seated.numbers
        for prompt, pages in self.prefixes.items():
            assert prompt_numbers(self.pool, pages, prompt)

    def teardown(self) -> None:
        """When all is given back the pool is whole."""
        for seat in list(self.seated):
            self.pool.release(seat)
        for pages in self.others:
            self.pool.drop(pages)
        self.cache.clear()
        assert self.cache.num_pages == 0
        assert self.pool.num_free == NUM_PAGES
        assert self.pool.take(NUM_PAGES) == list(range(1, NUM_PAGES + 1))
        assert not self.pool.page_table_SP.any()


def check(machine: type[Books], num_histories: int, phases: Sequence[Phase] = tuple(Phase)) -> None:
    quiet = [HealthCheck.too_slow]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_histories,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=quiet,
        ),
    )


def test_books_and_contents_agree_with_the_model() -> None:
    Books.reached.clear()
    check(Books, 150)
    reached = dict(Books.reached)
    assert len(reached) == 6
    assert all(reached.values()), f"the histories never get where it matters: {reached}"


class ForgetsAPage(PagePool):
    def release(self, seat: int) -> None:
        self.hold(self.pages(seat)[-1:])
        super().release(seat)


class LeavesTheTable(PagePool):
    def release(self, seat: int) -> None:
        row_P = self.page_table_SP[seat].clone()
        super().release(seat)
        self.page_table_SP[seat] = row_P


class FreesTheShared(PagePool):
    def release(self, seat: int) -> None:
        shared = [page for page in self.pages(seat) if self._by_others[page]]
        super().release(seat)
        self.drop(shared)


class SharesTheTail(PrefixCache):
    """A warm seat writes on in the cache's own page."""

    def seat(self, seat: int, length: int, prefix: Prefix) -> bool:
        return self._pool.reserve(seat, length, prefix.pages)


class KeepsTheDonorsTail(PrefixCache):
    """The donor writes on in the page that the cache keeps."""

    def _copy(self, page: int) -> int:
        self._pool.hold([page])
        return page


class MatchesTheFirstPage(PrefixCache):
    def find(self, prompt: Sequence[int]) -> Prefix | None:
        same = [each for each in self._prefixes if each[:PAGE_SIZE] == tuple(prompt)[:PAGE_SIZE]]
        return super().find(same[0] if same else prompt)


class EvictsWhatItSeats(PrefixCache):
    def _make_room(self, num_pages: int, keep: Prefix | None = None) -> bool:  # noqa: ARG002
        return super()._make_room(num_pages)


class EvictsTheNewest(PrefixCache):
    def _make_room(self, num_pages: int, keep: Prefix | None = None) -> bool:
        for prompt in list(self._prefixes)[::-1]:
            self._prefixes.move_to_end(prompt)
        done = super()._make_room(num_pages, keep)
        for prompt in list(self._prefixes)[::-1]:
            self._prefixes.move_to_end(prompt)
        return done


@pytest.mark.parametrize("broken", [ForgetsAPage, LeavesTheTable, FreesTheShared], ids=lambda each: each.__name__)
def test_a_broken_pool_is_noticed(broken: type[PagePool]) -> None:
    """Negative controls of the histories above."""
    with pytest.raises((AssertionError, EngineError)):
        check(type("Broken", (Books,), {"pool_type": broken}), 400, [Phase.generate])


@pytest.mark.parametrize(
    "broken",
    [SharesTheTail, KeepsTheDonorsTail, MatchesTheFirstPage, EvictsWhatItSeats, EvictsTheNewest],
    ids=lambda each: each.__name__,
)
def test_a_broken_cache_is_noticed(broken: type[PrefixCache]) -> None:
    with pytest.raises((AssertionError, EngineError)):
        check(type("Broken", (Books,), {"cache_type": broken}), 400, [Phase.generate])


# A hit


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize("extra", [0, 1, 16, 31])
def test_a_hit_reads_what_a_cold_run_wrote(prompt: Prompt, extra: int) -> None:
    pool, cache = make()
    run_cold(pool, cache, 0, prompt, len(prompt) + extra)
    run_warm(pool, cache, 1, prompt, len(prompt) + extra)
    num_full = len(prompt) // PAGE_SIZE
    assert pool.pages(1)[:num_full] == pool.pages(0)[:num_full]
    assert not set(pool.pages(1)[num_full:]) & {*pool.pages(0), *known(cache, prompt).pages}
    for pages in (pool.pages(0), pool.pages(1), known(cache, prompt).pages):
        assert prompt_numbers(pool, pages, prompt)


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_a_hit_after_the_donor_left_and_others_pressed(prompt: Prompt) -> None:
    """The same numbers, in pages that nobody overwrote, whoever had the donor's own pages in between."""
    pool, cache = make()
    run_cold(pool, cache, 0, prompt, len(prompt) + 20)
    pool.release(0)
    for other in (each for each in PROMPTS if each != prompt):
        run_cold(pool, cache, 2, other, len(other) + 10)
        run_warm(pool, cache, 1, prompt, len(prompt) + 20)
        assert prompt_numbers(pool, pool.pages(1), prompt)
        pool.release(1)
        pool.release(2)
    cache.clear()
    assert pool.num_free == NUM_PAGES


def test_two_warm_seats_write_their_own_answers() -> None:
    prompt = PROMPTS[3]
    pool, cache = make()
    run_cold(pool, cache, 0, prompt, 40)
    run_warm(pool, cache, 1, prompt, 40)
    before = read(pool, pool.pages(1), 40)
    run_warm(pool, cache, 2, prompt, 30)
    write(pool, pool.pages(2), 17, range(9000, 9013))
    assert read(pool, pool.pages(1), 40) == before
    assert read(pool, pool.pages(2), 30)[17:] == list(range(9000, 9013))


@pytest.mark.parametrize("broken", [SharesTheTail, KeepsTheDonorsTail], ids=lambda each: each.__name__)
def test_a_tail_that_is_shared_is_overwritten(broken: type[PrefixCache]) -> None:
    """Why it is copied: the answer starts in the middle of that page. Here the next hit reads the last one's answer."""
    prompt = PROMPTS[3]
    numbers = {}
    for cache_type in (PrefixCache, broken):
        pool, cache = make(cache=cache_type)
        run_cold(pool, cache, 0, prompt, 20)
        run_warm(pool, cache, 1, prompt, 20)
        numbers[cache_type] = read(pool, known(cache, prompt).pages, 20)
    # The cache's page was copied before there was any answer; shared, it carries one.
    assert numbers[PrefixCache][17:] == [-1, -1, -1]
    assert numbers[broken][17:] in ([7000, 7001, 7002], [8000, 8001, 8002])


def test_the_hidden_row_is_a_copy() -> None:
    """The step's buffer, which it came from, is changed in place by the next pass."""
    pool, cache = make()
    hidden_D = torch.arange(4.0)
    assert pool.reserve(0, 20)
    cache.store(PROMPTS[3], 0, hidden_D)
    hidden_D.zero_()
    prefix = known(cache, PROMPTS[3])
    assert prefix.hidden_D is not None
    assert prefix.hidden_D.tolist() == [0, 1, 2, 3]


def test_what_is_known_is_not_stored_again() -> None:
    pool, cache = make()
    run_cold(pool, cache, 0, PROMPTS[3], 20)
    prefix, used = known(cache, PROMPTS[3]), pool.num_used
    cache.store(PROMPTS[3], 0, torch.zeros(4))
    assert known(cache, PROMPTS[3]) is prefix
    assert pool.num_used == used


# A miss


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_only_the_same_prompt_hits(prompt: Prompt) -> None:
    """Not its beginning, not its continuation, not one with the same leading pages: all others are known here."""
    pool, cache = make(num_pages=40)
    for other in PROMPTS:
        if other != prompt:
            run_cold(pool, cache, 0, other, len(other))
            pool.release(0)
    assert cache.find(prompt) is None
    assert (cache.num_queries, cache.num_hits) == (1, 0)
    assert all(cache.find(list(other)) for other in PROMPTS if other != prompt)
    assert (cache.num_queries, cache.num_hits) == (len(PROMPTS), len(PROMPTS) - 1)


def test_a_beginning_has_other_numbers_than_the_whole() -> None:
    """Why it must miss: the first positions of the longer prompt see the rest of it too."""
    pool, cache = make()
    run_cold(pool, cache, 0, PROMPTS[5], 33)
    shorter = PROMPTS[4]
    assert PROMPTS[5][:32] == shorter
    assert not prompt_numbers(pool, known(cache, PROMPTS[5]).pages, shorter)


def test_an_empty_prompt_is_never_known() -> None:
    pool, cache = make()
    assert pool.reserve(0, 20)
    cache.store((), 0, None)
    assert cache.find(()) is None
    assert pool.num_used == 2


# When memory is short


def test_the_least_recently_used_goes_first() -> None:
    pool, cache = make(num_pages=4)
    for prompt in PROMPTS[:3]:
        run_cold(pool, cache, 0, prompt, len(prompt))
        pool.release(0)
    assert (pool.num_free, cache.num_pages) == (1, 3)
    assert cache.find(PROMPTS[0])
    assert cache.reserve(0, 2 * PAGE_SIZE)
    assert [cache.find(prompt) is not None for prompt in PROMPTS[:3]] == [True, False, True]


def test_nothing_is_evicted_for_a_seat_that_does_not_fit() -> None:
    """It waits, perhaps for long; meanwhile the prompts are still good for others."""
    pool, cache = make()
    run_cold(pool, cache, 0, PROMPTS[0], 1)
    pool.release(0)
    assert pool.reserve(0, 4 * PAGE_SIZE)
    assert not cache.reserve(1, 5 * PAGE_SIZE)
    assert cache.find(PROMPTS[0])
    assert cache.reserve(1, 4 * PAGE_SIZE)
    assert cache.find(PROMPTS[0]) is None


def test_a_prompt_whose_pages_are_all_in_use_is_not_evicted_for_nothing() -> None:
    pool, cache = make()
    run_cold(pool, cache, 0, PROMPTS[4], 33)
    run_cold(pool, cache, 1, PROMPTS[0], 1)
    pool.release(1)
    assert (pool.num_used, cache.num_pages) == (4, 1)
    assert cache.reserve(1, 5 * PAGE_SIZE)
    assert cache.find(PROMPTS[0]) is None
    assert cache.find(PROMPTS[4])


def test_a_seat_may_evict_all_prompts_but_its_own() -> None:
    pool, cache = make()
    for prompt in (PROMPTS[5], PROMPTS[2], PROMPTS[1]):
        run_cold(pool, cache, 0, prompt, len(prompt))
        pool.release(0)
    assert cache.num_pages == 5
    run_warm(pool, cache, 0, PROMPTS[5], 7 * PAGE_SIZE)  # its two full pages, and the five that the tail leaves
    assert prompt_numbers(pool, pool.pages(0), PROMPTS[5])
    assert prompt_numbers(pool, known(cache, PROMPTS[5]).pages, PROMPTS[5])
    assert (pool.num_free, cache.num_pages) == (0, 1)
    assert [cache.find(prompt) for prompt in PROMPTS[1:3]] == [None, None]


def test_a_canvas_that_fills_the_pool() -> None:
    """The cache's tail page has no place beside it, so a known prompt runs cold; one without a tail runs warm."""
    pool, cache = make()
    run_cold(pool, cache, 0, PROMPTS[5], 33)
    pool.release(0)
    assert not cache.seat(0, CAPACITY, known(cache, PROMPTS[5]))
    assert (pool.pages(0), pool.num_used) == ((), 3)
    assert cache.reserve(0, CAPACITY)
    assert cache.find(PROMPTS[5]) is None
    pool.release(0)

    run_cold(pool, cache, 0, PROMPTS[4], CAPACITY)
    pool.release(0)
    run_warm(pool, cache, 0, PROMPTS[4], CAPACITY)
    assert pool.num_free == 0
    assert prompt_numbers(pool, pool.pages(0), PROMPTS[4])


def test_a_prompt_is_not_kept_without_a_page_for_its_tail() -> None:
    pool, cache = make()
    assert pool.reserve(0, CAPACITY)
    cache.store(PROMPTS[5], 0, None)
    assert cache.find(PROMPTS[5]) is None
    assert [pool.num_holders(page) for page in pool.pages(0)] == [1] * NUM_PAGES
    cache.store(PROMPTS[4], 0, None)  # needs none
    assert cache.find(PROMPTS[4])


def test_keeping_a_prompt_evicts_an_older_one() -> None:
    pool, cache = make()
    run_cold(pool, cache, 0, PROMPTS[0], 1)
    pool.release(0)
    assert pool.reserve(0, CAPACITY - PAGE_SIZE)
    cache.store(PROMPTS[5], 0, None)
    assert cache.find(PROMPTS[0]) is None
    assert known(cache, PROMPTS[5]).pages == (*pool.pages(0)[:2], 2)  # where the older one's tail was


def test_clearing_leaves_the_seats_their_pages() -> None:
    pool, cache = make()
    run_cold(pool, cache, 0, PROMPTS[5], 40)
    run_warm(pool, cache, 1, PROMPTS[5], 40)
    assert cache.num_pages == 1
    cache.clear()
    assert cache.find(PROMPTS[5]) is None
    assert all(prompt_numbers(pool, pool.pages(seat), PROMPTS[5]) for seat in (0, 1))
    for seat in (0, 1):
        pool.release(seat)
    assert (pool.num_free, cache.num_pages) == (NUM_PAGES, 0)


# What is refused


def test_a_prefix_that_was_evicted_is_refused() -> None:
    """Its pages hold somebody else's numbers by now."""
    pool, cache = make()
    run_cold(pool, cache, 0, PROMPTS[5], 40)
    prefix = known(cache, PROMPTS[5])
    pool.release(0)
    cache.clear()
    with pytest.raises(EngineError, match="a prefix of 33 positions is not kept any more; find it again"):
        cache.seat(0, 40, prefix)
    run_cold(pool, cache, 0, PROMPTS[5], 40)
    with pytest.raises(EngineError, match="find it again"):
        cache.seat(1, 40, prefix)


def test_a_canvas_shorter_than_its_prompt_is_refused() -> None:
    pool, cache = make()
    run_cold(pool, cache, 0, PROMPTS[5], 40)
    with pytest.raises(EngineError, match="a canvas of 32 positions for a prompt of 33"):
        cache.seat(1, 32, known(cache, PROMPTS[5]))
    assert pool.pages(1) == ()


@pytest.mark.parametrize("seat", [0, 2])
def test_a_seat_without_the_pages_of_the_prompt_is_refused(seat: int) -> None:
    pool, cache = make()
    assert pool.reserve(0, 32)
    with pytest.raises(EngineError, match="too few for the 33 positions"):
        cache.store(PROMPTS[5], seat, None)
    assert pool.num_used == 2


def test_what_the_pool_refuses_evicts_nothing() -> None:
    pool, cache = make()
    run_cold(pool, cache, 0, PROMPTS[5], 40)
    with pytest.raises(EngineError, match="seat 0 holds 3 pages already"):
        cache.reserve(0, CAPACITY)
    with pytest.raises(ConfigError, match=f"max_positions = {CAPACITY}"):
        cache.reserve(1, CAPACITY + 1)
    with pytest.raises(ConfigError, match=f"max_positions = {CAPACITY}"):
        cache.seat(1, CAPACITY + 1, known(cache, PROMPTS[5]))
    assert cache.find(PROMPTS[5])
