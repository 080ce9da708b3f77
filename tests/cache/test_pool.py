"""The page pool: sizes, places and books. (Random histories of it are in test_prefix.py, with the prefix cache.)

S seats, P pages of a seat, E entries, L layers, X scratch entries of a seat
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unmask.cache.pool import PAGE_SIZE, PagePool, PlaneSpec, bytes_per_page, kv_planes, num_pages_for
from unmask.errors import ConfigError, EngineError
from unmask.models.config import ModelConfig

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "models"
PLANES = {
    "k": PlaneSpec((2, 4), torch.float32),
    "v": PlaneSpec((2, 4), torch.float32),
    "proxy": PlaneSpec((3,), torch.bfloat16),
    "age": PlaneSpec((), torch.int16),
}


def make(planes: dict[str, PlaneSpec] = PLANES, **sizes: Any) -> PagePool:
    """Three layers, six pages, three seats of up to 70 positions: more than four pages, fewer than the pool has."""
    return PagePool(planes, **{"num_layers": 3, "num_pages": 6, "num_seats": 3, "max_positions": 70, **sizes})


def tensors(pool: PagePool) -> list[Tensor]:
    return [*pool.planes.values(), pool.page_table_SP, pool.scratch_SX]


def page_of(pool: PagePool, name: str, page: int) -> Tensor:
    return pool.planes[name][:, page * PAGE_SIZE : (page + 1) * PAGE_SIZE]


def fill(pool: PagePool) -> None:
    """Every number of a plane its own, as far as the type goes."""
    for plane in pool.planes.values():
        plane.copy_(torch.arange(plane.numel()).remainder(251).view_as(plane))


# Sizes


@pytest.mark.parametrize(("length", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_pages_for_a_length(length: int, pages: int) -> None:
    assert num_pages_for(length) == pages


@pytest.mark.parametrize("spec", PLANES.values(), ids=PLANES)
def test_bytes_of_an_entry(spec: PlaneSpec) -> None:
    assert spec.num_bytes == torch.zeros(spec.shape, dtype=spec.dtype).nbytes


@pytest.mark.parametrize("model", ["tiny-llada-gqa", "tiny-dream"])
def test_kv_planes_have_the_key_heads_of_the_model(model: str) -> None:
    config = ModelConfig.from_pretrained(GOLDEN / model)
    assert config.num_kv_heads < config.num_heads
    spec = PlaneSpec((config.num_kv_heads, config.head_dim), torch.bfloat16)
    assert kv_planes(config, torch.bfloat16) == {"k": spec, "v": spec}


@pytest.mark.parametrize(
    "sizes",
    [{}, {"num_scratch": 5}, {"num_pages": 1, "num_seats": 1, "max_positions": 1, "num_layers": 1}, {"num_seats": 64}],
    ids=str,
)
def test_announced_bytes_are_those_of_the_tensors(sizes: dict[str, int]) -> None:
    """A budget that is kept on paper only ends in an out-of-memory error."""
    pool = make(**sizes)
    assert pool.num_bytes == sum(each.numel() * each.element_size() for each in tensors(pool))

    num_layers, num_seats = pool.k.shape[0], pool.page_table_SP.shape[0]
    num_scratch, page = sizes.get("num_scratch", 0), bytes_per_page(PLANES, num_layers)
    scratch = num_seats * num_scratch * page // PAGE_SIZE
    tables = num_seats * (4 * num_pages_for(sizes.get("max_positions", 70)) + 8 * num_scratch)
    assert pool.num_bytes == (1 + pool.num_pages) * page + scratch + tables


def test_nothing_else_lies_on_the_device() -> None:
    """Negative control of the sum above: a tensor that the pool keeps and does not announce would be found here."""
    pool = make(num_scratch=2)
    kept = [each for each in vars(pool).values() if isinstance(each, Tensor)] + list(pool.planes.values())
    assert {id(each) for each in kept} == {id(each) for each in tensors(pool)}


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_pages_that_fit_a_budget(spare: int) -> None:
    """The trash page counts: a pool of that many pages stays in the budget, and one more page would not."""
    page = bytes_per_page(PLANES, 3)
    budget = 7 * page + spare
    num_pages = PagePool.num_pages_in(budget, PLANES, 3)
    assert num_pages == (5 if spare < 0 else 6)
    assert sum(plane.nbytes for plane in make(num_pages=num_pages).planes.values()) <= budget
    assert sum(plane.nbytes for plane in make(num_pages=num_pages + 1).planes.values()) > budget


@pytest.mark.parametrize("num_bytes", [0, 1, bytes_per_page(PLANES, 3)])
def test_a_budget_for_the_trash_page_alone_has_no_pages(num_bytes: int) -> None:
    assert PagePool.num_pages_in(num_bytes, PLANES, 3) == 0


@pytest.mark.parametrize("name", ["num_layers", "num_pages", "num_seats", "max_positions"])
def test_a_size_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} = 0; it needs at least 1"):
        make(**{name: 0})


def test_a_negative_number_of_scratch_entries_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_scratch is -1"):
        make(num_scratch=-1)


# Places


def test_planes_are_zeros_of_all_entries() -> None:
    pool = make(num_scratch=5)
    assert pool.k is pool.planes["k"]
    assert pool.v is pool.planes["v"]
    for name, spec in PLANES.items():
        assert pool.planes[name].shape == (3, 7 * PAGE_SIZE + 15, *spec.shape)
        assert pool.planes[name].dtype == spec.dtype
        assert not pool.planes[name].any()


def test_scratch_entries_are_each_seats_own_and_behind_all_pages() -> None:
    pool = make(num_scratch=5)
    assert (pool.scratch_SX.shape, pool.scratch_SX.dtype) == ((3, 5), torch.int64)
    assert sorted(pool.scratch_SX.flatten().tolist()) == list(range(7 * PAGE_SIZE, pool.k.shape[1]))
    assert make().scratch_SX.shape == (3, 0)


def test_the_table_is_as_wide_as_the_longest_canvas() -> None:
    pool = make()
    assert (pool.page_table_SP.shape, pool.page_table_SP.dtype) == ((3, 5), torch.int32)
    assert not pool.page_table_SP.any()


def test_tensors_stay_where_they_are() -> None:
    """Captured graphs know them by address."""
    pool = make(num_scratch=2)
    before = [(id(each), each.data_ptr()) for each in tensors(pool)]
    assert pool.reserve(0, 40)
    pool.hold(pool.pages(0))
    pool.copy_page(pool.pages(0)[0], (pool.take(1) or [])[0])
    pool.release(0)
    assert [(id(each), each.data_ptr()) for each in tensors(pool)] == before


# Books


@pytest.mark.parametrize(("length", "pages"), [(1, 1), (15, 1), (16, 1), (17, 2), (70, 5)])
def test_a_seat_gets_the_lowest_free_pages(length: int, pages: int) -> None:
    pool = make()
    assert pool.reserve(1, length)
    assert pool.pages(1) == tuple(range(1, 1 + pages))
    assert pool.page_table_SP.tolist() == [[0] * 5, [*pool.pages(1), *[0] * (5 - pages)], [0] * 5]
    assert (pool.num_used, pool.num_free) == (pages, 6 - pages)


def test_pages_come_back_in_order_whoever_gave_them_back_first() -> None:
    pool = make()
    for seat in range(3):
        assert pool.reserve(seat, 2 * PAGE_SIZE)
    for seat in (2, 0):
        pool.release(seat)
    assert pool.take(3) == [1, 2, 5]


def test_a_released_seat_leaves_nothing_in_the_table() -> None:
    pool = make()
    assert pool.reserve(1, 70)
    pool.release(1)
    assert not pool.page_table_SP.any()
    assert pool.reserve(1, 17)
    assert pool.page_table_SP[1].tolist() == [1, 2, 0, 0, 0]


def test_releasing_a_seat_without_pages_does_nothing() -> None:
    pool = make()
    pool.release(0)
    assert pool.reserve(0, 20)
    pool.release(0)
    pool.release(0)
    assert pool.num_free == 6
    assert pool.take(6) == [1, 2, 3, 4, 5, 6]


def test_too_few_free_pages_change_nothing() -> None:
    pool = make()
    assert pool.reserve(0, 3 * PAGE_SIZE)
    assert not pool.reserve(1, 3 * PAGE_SIZE + 1)
    assert pool.take(4) is None
    assert (pool.pages(1), pool.num_free) == ((), 3)
    assert not pool.page_table_SP[1].any()
    assert pool.reserve(1, 3 * PAGE_SIZE)
    assert (pool.pages(1), pool.num_free) == ((4, 5, 6), 0)


def test_a_canvas_may_fill_the_pool() -> None:
    pool = make(max_positions=6 * PAGE_SIZE)
    assert pool.reserve(0, 6 * PAGE_SIZE)
    assert pool.num_free == 0
    assert pool.page_table_SP[0].tolist() == [1, 2, 3, 4, 5, 6]


def test_shared_pages_count_once_and_outlive_the_first_holder() -> None:
    pool = make()
    assert pool.reserve(0, 3 * PAGE_SIZE)
    assert pool.reserve(1, 4 * PAGE_SIZE, shared=pool.pages(0)[:2])
    assert pool.pages(1) == (1, 2, 4, 5)
    assert [pool.num_holders(page) for page in range(1, 7)] == [2, 2, 1, 1, 1, 0]
    pool.release(0)
    assert [pool.num_holders(page) for page in range(1, 7)] == [1, 1, 0, 1, 1, 0]
    pool.release(1)
    assert pool.num_free == 6


def test_a_holder_that_is_no_seat_keeps_pages_alive() -> None:
    pool = make()
    assert pool.reserve(0, 2 * PAGE_SIZE)
    pool.hold([1])
    pool.hold([1])
    pool.release(0)
    assert pool.num_used == 1
    pool.drop([1])
    assert pool.num_used == 1
    pool.drop([1])
    assert pool.num_used == 0
    assert pool.take(0) == []


def test_copying_a_page_copies_all_planes_and_layers_and_nothing_else() -> None:
    pool = make(num_scratch=3)
    fill(pool)
    source, target = pool.take(2) or []
    before = {name: plane.clone() for name, plane in pool.planes.items()}
    pool.copy_page(source, target)
    for name, plane in pool.planes.items():
        assert torch.equal(page_of(pool, name, target), page_of(pool, name, source)), name
        page_of(pool, name, target).zero_()
        before[name][:, target * PAGE_SIZE : (target + 1) * PAGE_SIZE] = 0
        assert torch.equal(plane, before[name]), name
        assert plane.any(), name


# What is refused. The pool holds seat 0's pages 1 and 2, and page 3, which is no seat's.


@pytest.mark.parametrize(
    ("breach", "message"),
    [
        (lambda pool: pool.reserve(0, 5), "seat 0 holds 2 pages already"),
        (lambda pool: pool.reserve(1, 16, shared=[1, 2]), "2 shared pages for 16 positions, which need 1"),
        (lambda pool: pool.reserve(1, 40, shared=[4]), "page 4 is free"),
        (lambda pool: pool.reserve(1, 40, shared=[0]), "page 0 is none that can be held"),
        (lambda pool: pool.hold([3, 4]), "page 4 is free"),
        (lambda pool: pool.hold([7]), "page 7 is none that can be held"),
        (lambda pool: pool.drop([4]), "page 4 has 0 holders besides 0 seats"),
        (lambda pool: pool.drop([3, 3]), "page 3 has 1 holders besides 0 seats and would be dropped 2 times"),
        (lambda pool: pool.drop([3, 1]), "page 1 has 0 holders besides 1 seats"),
        (lambda pool: pool.drop([0]), "page 0 is none"),
        (lambda pool: pool.copy_page(4, 3), "page 4 is free"),
        (lambda pool: pool.copy_page(3, 4), "page 4 has 0 holders"),
        (lambda pool: pool.copy_page(3, 0), "page 0 is none"),
    ],
)
def test_a_breach_is_an_error_and_changes_nothing(breach: Callable[[PagePool], Any], message: str) -> None:
    pool = make()
    assert pool.reserve(0, 20)
    assert pool.take(1) == [3]
    with pytest.raises(EngineError, match=message):
        breach(pool)
    assert [pool.num_holders(page) for page in range(1, 7)] == [1, 1, 1, 0, 0, 0]
    assert (pool.pages(0), pool.pages(1)) == ((1, 2), ())
    assert pool.page_table_SP.tolist() == [[1, 2, 0, 0, 0], [0] * 5, [0] * 5]


def test_a_page_of_two_holders_is_not_written() -> None:
    pool = make()
    assert pool.reserve(0, 32)
    pool.hold([1])
    with pytest.raises(EngineError, match="page 1 has 2 holders; only a page of one is written"):
        pool.copy_page(2, 1)


def test_a_double_drop_does_not_take_a_page_from_a_seat() -> None:
    """The page has a count left, the seat's: one book for both kinds of holders would not notice."""
    pool = make()
    assert pool.reserve(0, 16)
    pool.hold([1])
    pool.drop([1])
    with pytest.raises(EngineError, match="drop a page once"):
        pool.drop([1])
    assert (pool.num_holders(1), pool.num_free) == (1, 5)


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (0, "a canvas of 0 positions"),
        (-1, "a canvas of -1 positions"),
        (71, "71 positions; a seat takes 1 to max_positions = 70"),
        (65, "65 positions needs 5 pages of 16, the pool has 4"),
    ],
)
def test_a_length_that_never_fits_is_refused(length: int, message: str) -> None:
    """Waiting for free pages would be waiting for ever."""
    pool = make(num_pages=4)
    with pytest.raises(ConfigError, match=message):
        pool.reserve(0, length)
    assert pool.num_free == 4
