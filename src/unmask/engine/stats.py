"""Where the time goes: seconds by part of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Stats:
    """Seconds spent by part, and passes and rows run. On a GPU the parts are times of launching, not of running."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.num_passes = 0
        self.num_rows = 0

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Add the time inside the block to ``part``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start

    def reset(self) -> None:
        """Start from zero."""
        self.__init__()  # type: ignore[misc]
