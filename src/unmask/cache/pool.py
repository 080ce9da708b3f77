"""Where K, V and whatever else is kept of a position lives: pages of entries that seats take, share and give back.

An entry is one position's place in every plane and layer; a page is `PAGE_SIZE` entries that are taken together.
Entries lie page after page, the scratch entries of all seats behind them:

    [ trash | page 1 | .. | page num_pages | seat 0's scratch | seat 1's | .. ]

S seats, P pages of a seat, E entries, L layers, X scratch entries of a seat
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.core.transfer import send
from unmask.errors import ConfigError, EngineError
from unmask.models.config import ModelConfig

PAGE_SIZE = 16
TRASH_PAGE = 0


@dataclass(frozen=True)
class PlaneSpec:
    """One per-entry tensor of the pool."""

    shape: tuple[int, ...]
    """Of one entry in one layer."""
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of one entry in one layer."""
        return math.prod(self.shape) * self.dtype.itemsize


def kv_planes(config: ModelConfig, dtype: torch.dtype) -> dict[str, PlaneSpec]:
    """The planes that every model needs: "k" after rotation and "v", [Hkv, hd] an entry."""
    spec = PlaneSpec((config.num_kv_heads, config.head_dim), dtype)
    return {"k": spec, "v": spec}


def bytes_per_page(planes: Mapping[str, PlaneSpec], num_layers: int) -> int:
    """Bytes of one page in all planes and layers."""
    return PAGE_SIZE * num_layers * sum(spec.num_bytes for spec in planes.values())


def num_pages_for(length: int) -> int:
    """Pages that ``length`` positions need."""
    return -(-length // PAGE_SIZE)


class PagePool:
    """All planes of all seats, and who holds which page.

    A page is free, or held: by seats, and by others that are no seat (`take`, `hold`, `drop`). What several hold,
    nobody may write. Device tensors are allocated once and changed in place, since captured graphs know them by
    address; the books are kept on the host, and no method reads the device.
    """

    planes: dict[str, Tensor]
    """By name, [L, E, *shape]. They begin as zeros: what nobody wrote is never visible, but must be numbers."""
    page_table_SP: Tensor
    """int32: the pages of a seat in the order of its positions; 0, the trash page, where it has none."""
    scratch_SX: Tensor
    """int64: each seat's scratch entries, behind all pages."""
    num_pages: int
    """Pages that can be held; the trash page, which takes what padding writes and is never read, is not counted."""

    def __init__(
        self,
        planes: Mapping[str, PlaneSpec],
        *,
        num_layers: int,
        num_pages: int,
        num_seats: int,
        max_positions: int,
        num_scratch: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """``max_positions`` is the longest canvas of a seat. ConfigError for a size that no pool has."""
        _check_sizes(num_layers=num_layers, num_pages=num_pages, num_seats=num_seats, max_positions=max_positions)
        if num_scratch < 0:
            raise ConfigError(f"num_scratch is {num_scratch}; use 0 for no scratch entries, or more")
        self.num_pages, self._max_positions = num_pages, max_positions
        first_scratch = (1 + num_pages) * PAGE_SIZE
        num_entries = first_scratch + num_seats * num_scratch
        self.planes = {
            name: torch.zeros((num_layers, num_entries, *spec.shape), dtype=spec.dtype, device=device)
            for name, spec in planes.items()
        }
        seat_places = (num_seats, num_pages_for(max_positions))
        self.page_table_SP = torch.zeros(seat_places, dtype=torch.int32, device=device)
        self.scratch_SX = torch.arange(first_scratch, num_entries, device=device).view(num_seats, num_scratch)
        # A heap: the lowest free page goes first, so equal histories give equal pages.
        self._free = list(range(1, num_pages + 1))
        self._pages: list[tuple[int, ...]] = [()] * num_seats
        # Two books, so that somebody's double drop cannot pull a page from under a seat.
        self._by_seats = [0] * (1 + num_pages)
        self._by_others = [0] * (1 + num_pages)

    @property
    def k(self) -> Tensor:
        """[L, E, Hkv, hd]"""
        return self.planes["k"]

    @property
    def v(self) -> Tensor:
        """[L, E, Hkv, hd]"""
        return self.planes["v"]

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that somebody holds."""
        return self.num_pages - self.num_free

    @property
    def num_bytes(self) -> int:
        """Of all device tensors: the planes, with the trash page and the scratch entries, and both tables."""
        return sum(each.nbytes for each in (*self.planes.values(), self.page_table_SP, self.scratch_SX))

    @staticmethod
    def num_pages_in(num_bytes: int, planes: Mapping[str, PlaneSpec], num_layers: int) -> int:
        """The most ``num_pages`` whose planes, trash page included, fit ``num_bytes``; 0 if not even one does.

        Scratch entries and the tables come on top.
        """
        return max(num_bytes // bytes_per_page(planes, num_layers) - 1, 0)

    def reserve(self, seat: int, length: int, shared: Sequence[int] = ()) -> bool:
        """Give the seat pages for ``length`` positions; False, and no change, if too few are free.

        The first ``len(shared)`` of them are pages that others hold too, which the seat may only read; the rest are
        its own. ConfigError for a length that would not fit if the pool were empty, since waiting would not help;
        EngineError if the seat holds pages already, or a shared page is free.
        """
        self._check_reserve(seat, length, shared)
        num_own = num_pages_for(length) - len(shared)
        if num_own > self.num_free:
            return False
        pages = (*shared, *self._pop(num_own))
        for page in pages:
            self._by_seats[page] += 1
        self._set_pages(seat, pages)
        return True

    def release(self, seat: int) -> None:
        """Take the seat's pages from it; those that nobody else holds are free. Nothing if it has none."""
        pages = self._pages[seat]
        if not pages:
            return
        for page in pages:
            self._by_seats[page] -= 1
            self._push_if_free(page)
        self._set_pages(seat, ())

    def pages(self, seat: int) -> tuple[int, ...]:
        """The seat's pages in the order of its positions."""
        return self._pages[seat]

    def num_holders(self, page: int) -> int:
        """How many hold the page, seats and others; EngineError if the pool has no such page."""
        if not TRASH_PAGE < page <= self.num_pages:
            raise EngineError(f"page {page} is none that can be held; the pool has pages 1 to {self.num_pages}")
        return self._by_seats[page] + self._by_others[page]

    def hold(self, pages: Sequence[int]) -> None:
        """Add a holder that is no seat to each page; EngineError, and no change, if one of them is free."""
        self._check_held(pages)
        for page in pages:
            self._by_others[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """Undo `take` or `hold`; EngineError, and no change, if a page has no such holder (any more)."""
        for page, times in Counter(pages).items():
            if self.num_holders(page) - self._by_seats[page] < times:
                held = f"{self._by_others[page]} holders besides {self._by_seats[page]} seats"
                raise EngineError(f"page {page} has {held} and would be dropped {times} times; drop a page once")
        for page in pages:
            self._by_others[page] -= 1
            self._push_if_free(page)

    def take(self, count: int) -> list[int] | None:
        """``count`` free pages for a holder that is no seat; None, and no change, if too few are free."""
        if count > self.num_free:
            return None
        pages = self._pop(count)
        for page in pages:
            self._by_others[page] += 1
        return pages

    def copy_page(self, source: int, target: int) -> None:
        """Copy all planes and layers of a page that is held into one that has a single holder, else EngineError."""
        self._check_held([source])
        if self.num_holders(target) != 1:
            raise EngineError(f"page {target} has {self.num_holders(target)} holders; only a page of one is written")
        for plane in self.planes.values():
            plane[:, _entries(target)].copy_(plane[:, _entries(source)])

    def _check_reserve(self, seat: int, length: int, shared: Sequence[int]) -> None:
        if not 1 <= length <= self._max_positions:
            limit = f"1 to max_positions = {self._max_positions}"
            raise ConfigError(f"a canvas of {length} positions; a seat takes {limit}: change one or the other")
        needed = num_pages_for(length)
        if needed > self.num_pages:
            sizes = f"needs {needed} pages of {PAGE_SIZE}, the pool has {self.num_pages}"
            raise ConfigError(f"a canvas of {length} positions {sizes}; shorten it or give the pool more memory")
        if self._pages[seat]:
            raise EngineError(f"seat {seat} holds {len(self._pages[seat])} pages already; release them first")
        if len(shared) > needed:
            raise EngineError(f"{len(shared)} shared pages for {length} positions, which need {needed}; share fewer")
        self._check_held(shared)

    def _check_held(self, pages: Sequence[int]) -> None:
        for page in pages:
            if not self.num_holders(page):
                raise EngineError(f"page {page} is free; only a page that somebody holds can be shared or copied")

    def _pop(self, count: int) -> list[int]:
        return [heapq.heappop(self._free) for _ in range(count)]

    def _push_if_free(self, page: int) -> None:
        if not self.num_holders(page):
            heapq.heappush(self._free, page)

    def _set_pages(self, seat: int, pages: tuple[int, ...]) -> None:
        """The whole row is written, so nothing of the seat's last request stays behind."""
        self._pages[seat] = pages
        row_P = self.page_table_SP[seat]
        send(row_P, torch.tensor([*pages, *[TRASH_PAGE] * (len(row_P) - len(pages))], dtype=torch.int32))


def _entries(page: int) -> slice:
    return slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"a pool with {name} = {value}; it needs at least 1: give it more memory or other sizes")
