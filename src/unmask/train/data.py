"""Batches from worker processes.

Worker w makes the batches b with b mod W = w, and the reader takes them in order: every request once, no gap, the same
batches whatever W is. A worker holds one finished batch until the reader takes it, which bounds memory.

Protocol of a worker's pipe: reader -> worker `(serial, plan, first batch)` to start a stage, None to stop;
worker -> reader `(serial, batch, groups)` or `("error", traceback)`. Batches of an older serial are thrown away.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from unmask.errors import EngineError
from unmask.train.encode import BatchMaker, Encoder, Group, StagePlan

MakeEncoder = Callable[[], Encoder]
"""Runs inside the worker; must pickle when workers are spawned."""

PATIENCE = 300.0
"""Seconds without a batch from a living worker before the run gives up."""


def default_workers() -> int:
    """All cores but two, at most 14; none on small machines, where they would only take turns."""
    cores = os.cpu_count() or 1
    return min(14, cores - 2) if cores >= 4 else 0


class LocalBatches:
    """Batches made in this process, as they are asked for."""

    def __init__(self, make_encoder: MakeEncoder) -> None:
        self.encoder = make_encoder()

    def start(self, plan: StagePlan) -> None:
        """Begin a stage."""
        self.maker, self.batch = BatchMaker(self.encoder, plan), 0

    def next(self) -> list[Group]:
        """The next batch of the stage."""
        self.batch += 1
        return self.maker.make(self.batch - 1)

    def close(self) -> None:
        """Nothing to shut down."""


class WorkerBatches:
    """Batches made by processes, which live from here to `close`.

    Make it before CUDA is initialised: then workers are forked, which costs nothing; after that they are spawned.
    """

    def __init__(self, make_encoder: MakeEncoder, num_workers: int) -> None:
        self.serial, self.batch = 0, 0
        self.workers: list[tuple[Any, Connection]] = []
        context = multiprocessing.get_context(_start_method())
        try:
            for _ in range(num_workers):
                self.workers.append(_launch(context, make_encoder))
        except BaseException:
            self.close()
            raise

    def start(self, plan: StagePlan) -> None:
        """Begin a stage: workers drop what they were doing."""
        self.serial, self.batch = self.serial + 1, 0
        for number in range(len(self.workers)):
            self._send(number, (self.serial, plan, number, len(self.workers)))

    def next(self) -> list[Group]:
        """The next batch of the stage.

        Raises:
            EngineError: the worker whose turn it is failed or died; says how.
        """
        number = self.batch % len(self.workers)
        while True:
            message = self._receive(number)
            if message[0] == "error":
                raise EngineError(f"data worker {number} failed:\n{message[1]}")
            serial, batch, groups = message
            if serial == self.serial:
                assert batch == self.batch, f"worker {number} sent batch {batch}, expected {self.batch}"
                self.batch += 1
                return [Group(*group) for group in groups]

    def close(self) -> None:
        """Stop all workers; safe to call twice, and after an error."""
        for _, pipe in self.workers:
            pipe.close()
        for process, _ in self.workers:
            process.terminate()
        for process, _ in self.workers:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self.workers = []

    def _send(self, number: int, message: Any) -> None:
        try:
            self.workers[number][1].send(message)
        except OSError as error:
            raise self._death(number) from error

    def _receive(self, number: int) -> Any:
        process, pipe = self.workers[number]
        since = time.monotonic()
        try:
            while not pipe.poll(0.5):
                if not process.is_alive() and not pipe.poll(0):
                    raise self._death(number)
                if time.monotonic() - since > PATIENCE:
                    raise EngineError(f"data worker {number} made no batch in {PATIENCE:.0f} s; use fewer workers")
            return pipe.recv()
        except (EOFError, OSError) as error:
            raise self._death(number) from error

    def _death(self, number: int) -> EngineError:
        process = self.workers[number][0]
        process.join(1)
        return EngineError(
            f"data worker {number} of {len(self.workers)} died with exit code {process.exitcode}; the machine may be "
            "out of memory: resume with fewer workers"
        )


Batches = LocalBatches | WorkerBatches


def open_batches(make_encoder: MakeEncoder, num_workers: int) -> Batches:
    """Batches from `num_workers` processes; from this one when it is 0."""
    return WorkerBatches(make_encoder, num_workers) if num_workers > 0 else LocalBatches(make_encoder)


def _start_method() -> str:
    import torch

    forks = "fork" in multiprocessing.get_all_start_methods() and os.name == "posix"
    return "fork" if forks and not torch.cuda.is_initialized() else "spawn"


def _launch(context: Any, make_encoder: MakeEncoder) -> tuple[Any, Connection]:
    ours, theirs = context.Pipe(duplex=True)
    process = context.Process(target=_work, args=(theirs, make_encoder, os.getpid()), daemon=True)
    with warnings.catch_warnings():
        # Python 3.12 warns of any fork beside threads. These children use numpy and the tokenizer only: nothing that
        # holds a lock of another thread.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    return process, ours


def _work(pipe: Connection, make_encoder: MakeEncoder, parent: int) -> None:
    """A worker's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent shuts us down
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    try:
        _serve(pipe, make_encoder())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the reader has gone
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


def _leave_with(parent: int) -> None:
    """End this process when its parent ends, even amid a blocked send: other workers hold copies of the parent's end of
    the pipe, so it never closes by itself."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _serve(pipe: Connection, encoder: Encoder) -> None:
    message = pipe.recv()
    while message is not None:
        serial, plan, batch, stride = message
        maker = BatchMaker(encoder, plan)
        while not pipe.poll(0):
            pipe.send((serial, batch, [tuple(group) for group in maker.make(batch)]))
            batch += stride
        message = pipe.recv()
