"""Prompts whose K/V are kept for the next request that has the same prompt. For block-causal models only.

There the prompt is block 0 and sees itself alone, so its K/V depend on nothing else and are the same for every
request that has exactly this prompt. It sees itself in both directions: a prompt that shares only the leading tokens
has other K/V from its first position on, so it must miss, and nothing smaller than a whole prompt is ever shared.

    kept      [ full page | full page | tail page ]
    a seat    [ full page | full page | own page  | own page | .. ]

Full pages are shared with the seats, which never write them again. The tail page, which the prompt fills in part, is
copied, because a seat's answer goes on in it. (Entries behind the prompt are copied too: numbers that no row sees
before the seat has written its own.)

D hidden size
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from unmask.cache.pool import PAGE_SIZE, PagePool, num_pages_for
from unmask.errors import EngineError


@dataclass(frozen=True, eq=False)
class Prefix:
    """A prompt that the cache knows. Good for `PrefixCache.seat` until the cache evicts it: find it anew each time."""

    prompt: tuple[int, ...]
    full: tuple[int, ...]
    """Pages that the prompt fills."""
    tail: int | None
    """The cache's own copy of the page that the prompt fills in part; None if its length is a multiple of the page."""
    hidden_D: Tensor | None
    """Final hidden row of the last prompt position, from which models with shifted logits score the first answer
    position; None for others."""

    @property
    def pages(self) -> tuple[int, ...]:
        """All pages, in the order of positions."""
        return self.full if self.tail is None else (*self.full, self.tail)


class PrefixCache:
    """Whole prompts by their ids, evicted least recently used first when a seat needs their pages.

    The key is the tuple of all ids, not a digest of it: a hit is the same prompt, never a likely one.
    A page belongs to one prefix at most, since a seat has one prompt and a prompt is kept once.
    """

    num_queries: int
    """Calls of `find` that count."""
    num_hits: int
    """Those that found their prompt."""

    def __init__(self, pool: PagePool) -> None:
        self.num_queries = self.num_hits = 0
        self._pool = pool
        self._prefixes: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()  # least recently used first

    @property
    def num_pages(self) -> int:
        """Pages that only this cache keeps alive: what `clear` would free."""
        return self._num_alone(self._prefixes.values())

    def find(self, prompt: Sequence[int], *, count: bool = True) -> Prefix | None:
        """The prefix that is exactly ``prompt``, now the most recently used; None if it is not known (() never is).

        ``count=False`` for asking again on behalf of the same request.
        """
        prefix = self._prefixes.get(tuple(prompt))
        self.num_queries += count
        self.num_hits += count and prefix is not None
        if prefix is not None:
            self._prefixes.move_to_end(prefix.prompt)
        return prefix

    def seat(self, seat: int, length: int, prefix: Prefix) -> bool:
        """Give the seat pages for ``length`` positions that hold the K/V of the prompt already.

        False, and no change, if memory is short even without all other prefixes. `reserve` may then still find room,
        as it can evict ``prefix`` as well: a canvas that fills the whole pool leaves none for the cache's tail page.
        EngineError if ``prefix`` was evicted meanwhile (its pages may hold another prompt) or is longer than the
        canvas; ConfigError and EngineError of `PagePool.reserve`.
        """
        if self._prefixes.get(prefix.prompt) is not prefix:
            raise EngineError(f"a prefix of {len(prefix.prompt)} positions is not kept any more; find it again")
        if length < len(prefix.prompt):
            raise EngineError(f"a canvas of {length} positions for a prompt of {len(prefix.prompt)}; count the prompt")
        if not self._reserve(seat, length, prefix):
            return False
        if prefix.tail is not None:
            self._pool.copy_page(prefix.tail, self._pool.pages(seat)[len(prefix.full)])
        return True

    def store(self, prompt: Sequence[int], seat: int, hidden_D: Tensor | None) -> None:
        """Keep the prompt of a seat, as soon as its last pass over the prompt ran; ``hidden_D`` is cloned.

        From now on the seat may not write the pages that its prompt fills. Nothing happens if the prompt is known or
        empty, or if there is no page for the copy of the partial one, even without all other prefixes.
        EngineError if the seat's pages do not reach the prompt's end.
        """
        prompt = tuple(prompt)
        if not prompt or prompt in self._prefixes:
            return
        pages, num_full = self._pool.pages(seat), len(prompt) // PAGE_SIZE
        if len(pages) < num_pages_for(len(prompt)):
            raise EngineError(f"seat {seat} has {len(pages)} pages, too few for the {len(prompt)} positions to keep")
        tail = None
        if len(prompt) % PAGE_SIZE:
            if not self._make_room(1):
                return
            tail = self._copy(pages[num_full])
        self._pool.hold(pages[:num_full])
        hidden_D = None if hidden_D is None else hidden_D.clone()
        self._prefixes[prompt] = Prefix(prompt, pages[:num_full], tail, hidden_D)

    def reserve(self, seat: int, length: int) -> bool:
        """`PagePool.reserve` for a prompt that is not known, evicting prefixes if memory is short.

        False, and nothing evicted, if memory is short even without all of them.
        """
        return self._reserve(seat, length, None)

    def clear(self) -> None:
        """Forget every prompt. Pages that seats hold stay theirs."""
        for prefix in list(self._prefixes.values()):
            self._evict(prefix)

    def _reserve(self, seat: int, length: int, prefix: Prefix | None) -> bool:
        shared = () if prefix is None else prefix.full
        if self._pool.reserve(seat, length, shared):
            return True
        room = self._make_room(num_pages_for(length) - len(shared), keep=prefix)
        return room and self._pool.reserve(seat, length, shared)

    def _make_room(self, num_pages: int, keep: Prefix | None = None) -> bool:
        """Evict all but ``keep`` until so many pages are free; False, and nothing evicted, if that cannot be."""
        others = [prefix for prefix in self._prefixes.values() if prefix is not keep]
        if self._pool.num_free + self._num_alone(others) < num_pages:
            return False
        for prefix in others:
            if self._pool.num_free >= num_pages:
                break
            # One whose pages are all in use by seats would be lost for nothing.
            if self._num_alone([prefix]):
                self._evict(prefix)
        return True

    def _num_alone(self, prefixes: Iterable[Prefix]) -> int:
        return sum(self._pool.num_holders(page) == 1 for prefix in prefixes for page in prefix.pages)

    def _evict(self, prefix: Prefix) -> None:
        del self._prefixes[prefix.prompt]
        self._pool.drop(prefix.pages)

    def _copy(self, page: int) -> int:
        """A page of the cache's own with the same content; one must be free."""
        taken = self._pool.take(1)
        assert taken, "a page is free"
        self._pool.copy_page(page, taken[0])
        return taken[0]
