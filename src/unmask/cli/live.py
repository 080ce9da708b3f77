"""Following one request: on a terminal as a canvas that fills in, elsewhere quietly."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from unmask.cli.view import PLAIN, Marks, Moment, picture, printable
from unmask.errors import EngineError

if TYPE_CHECKING:
    from unmask.engine.outputs import RequestOutput, StreamChunk

FRAMES_PER_SECOND = 20


def can_animate(console: Console) -> bool:
    """Whether the cursor can be moved there."""
    return console.is_terminal and not console.is_dumb_terminal


class Watched:
    """The state of a view: the newest chunk of each answer. Drawn anew at every refresh, so the clock runs."""

    def __init__(self, console: Console, end_ids: frozenset[int], marks: Marks) -> None:
        self.console, self.end_ids, self.marks = console, end_ids, marks
        self.started = time.perf_counter()
        self.latest: dict[int, Moment] = {}

    def take(self, chunk: StreamChunk) -> None:
        if chunk.canvas is None:
            return
        before = self.latest.get(chunk.index)
        self.latest[chunk.index] = Moment(chunk, before.last_step if before else 0)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def __rich__(self) -> RenderableType:
        latest = [self.latest[i] for i in sorted(self.latest)]
        return picture(latest, self.end_ids, self.seconds, self.console.size.height, self.marks)


@contextmanager
def closed_after(stream: Iterable[StreamChunk]) -> Generator[Iterable[StreamChunk], None, None]:
    """The stream, closed whatever happens, so that the engine drops a request nobody follows any more."""
    if hasattr(stream, "close"):
        closable: Any = stream
        with closing(closable):
            yield stream
    else:
        yield stream


def watch(
    stream: Iterable[StreamChunk],
    console: Console,
    end_ids: frozenset[int] = frozenset(),
    pace: float = 0.0,
    marks: Marks = PLAIN,
) -> RequestOutput:
    """Draws the canvas until the request is done, then wipes the drawing and returns the result.

    Args:
        pace: seconds that a frame stays at least.
    """
    view = Watched(console, end_ids, marks)
    live = Live(view, console=console, refresh_per_second=FRAMES_PER_SECOND, transient=True)
    output = None
    with closed_after(stream) as chunks, live:
        for chunk in chunks:
            view.take(chunk)
            output = chunk.output or output
            if pace:
                live.refresh()
                time.sleep(pace)
    return _needed(output)


def follow(stream: Iterable[StreamChunk], console: Console) -> RequestOutput:
    """Prints the settled text as it comes."""
    output = None
    with closed_after(stream) as chunks:
        for chunk in chunks:
            say(console, chunk.delta, end="")
            output = chunk.output or output
    say(console, "")
    return _needed(output)


def say(console: Console, text: str, end: str = "\n") -> None:
    """Text of the model's: literal on a file or a pipe, free of control characters on a terminal."""
    if console.is_terminal:
        console.print(Text(printable(text)), end=end, soft_wrap=True)
    else:
        console.file.write(text + end)
        console.file.flush()


def _needed(output: RequestOutput | None) -> RequestOutput:
    if output is None:
        raise EngineError("the stream ended without a result; please report it")
    return output
