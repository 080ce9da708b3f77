"""Jobs in several processes, each with one thing that is dear to make: a network and its problems."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, TypeVar

import torch

Job = TypeVar("Job")
_held: Any = None
"""What this process made."""


def side_by_side(
    make: Callable[..., Any],
    arguments: tuple[Any, ...],
    do: Callable[[Any, Job], Any],
    jobs: Iterable[Job],
    *,
    workers: int,
    may_begin: Callable[[], bool],
) -> Iterator[tuple[Job, Any]]:
    """``do(make(*arguments), job)`` for the jobs, each with its result as it comes; ``make`` is called once a process.

    A job begins only while ``may_begin()``; those that run are waited for. CPU threads are divided among the workers.

    Raises:
        Whatever a job does.
    """
    threads, left = max(1, torch.get_num_threads() // workers), iter(jobs)
    running: dict[Future[Any], Job] = {}
    # Spawned: a process that has used a GPU cannot be forked.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _begin, (threads, make, arguments)) as pool:
        while True:
            while len(running) < workers and may_begin() and (job := next(left, None)) is not None:
                running[pool.submit(_do, do, job)] = job
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()


def _begin(threads: int, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    global _held
    torch.set_num_threads(threads)
    _held = make(*arguments)


def _do(do: Callable[[Any, Any], Any], job: Any) -> Any:
    return do(_held, job)
