"""A canvas as a picture: from the cells of a `StreamChunk` to something rich can print.

An undecided cell is a dim ``░``, one just committed is bright, a settled one is shaded by the probability it had
when it was committed, from amber (unlikely) to green (sure). The first end of text is a dim ``∎``; nothing after it
belongs to the answer.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

if TYPE_CHECKING:
    from unmask.engine.outputs import CanvasCell, RequestOutput, StreamChunk

UNDECIDED = "░"
END = "∎"
NEWLINE = "↵"
FRESH = "bold #ffffff on #00685c"
DIM = "dim"
# Upper bound of the probability, and the colour below it. Readable on dark and light backgrounds.
SHADES = ((0.3, "#c8643c"), (0.5, "#c08a3e"), (0.7, "#a59a45"), (0.9, "#7fa25a"), (float("inf"), "#5aa27a"))


def printable(text: str) -> str:
    """Text that cannot move the cursor: newlines stay, a tab is a space, control characters are ``�``."""
    return "".join(map(_printable, text.replace("\r\n", "\n")))


def _printable(char: str) -> str:
    if char == "\n":
        return char
    if char == "\t":
        return " "
    bidi = "\u202a" <= char <= "\u202e" or "\u2066" <= char <= "\u2069"
    return "\ufffd" if bidi or unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") else char


def answer_cells(cells: Sequence[CanvasCell], end_ids: frozenset[int]) -> Sequence[CanvasCell]:
    """The cells up to and with the first end of text."""
    for i, cell in enumerate(cells):
        if cell.token_id in end_ids:
            return cells[: i + 1]
    return cells


def cell_style(cell: CanvasCell, seen_passes: int) -> str:
    """How a decided cell is drawn; cells committed after pass ``seen_passes`` are new."""
    if (cell.num_pass or 0) > seen_passes:
        return FRESH
    if cell.probability is None:
        return ""
    return next(colour for bound, colour in SHADES if cell.probability < bound)


def canvas_text(cells: Sequence[CanvasCell], end_ids: frozenset[int] = frozenset(), seen_passes: int = 0) -> Text:
    """The answer as it stands."""
    text = Text(overflow="fold")
    for cell in answer_cells(cells, end_ids):
        if cell.token_id is None:
            text.append(UNDECIDED, DIM)
        elif cell.token_id in end_ids:
            text.append(END, DIM)
        else:
            text.append(printable(cell.text).replace("\n", NEWLINE + "\n"), cell_style(cell, seen_passes))
    return text


def counts(num_tokens: int, num_passes: int, seconds: float | None = None) -> str:
    """Tokens, passes and their quotient, and the seconds if they are told."""
    per_pass = num_tokens / num_passes if num_passes else 0.0
    parts = [plural(num_tokens, "token"), plural(num_passes, "pass"), f"{per_pass:.2f} tokens per pass"]
    return " · ".join(parts if seconds is None else [*parts, f"{seconds:.1f} s"])


def plural(count: int, noun: str) -> str:
    """``1 pass``, ``2 passes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def num_committed(cells: Sequence[CanvasCell], end_ids: frozenset[int]) -> int:
    """Answer tokens decided so far; the end of text is none."""
    return sum(c.token_id is not None and c.token_id not in end_ids for c in answer_cells(cells, end_ids))


def summary(outputs: Sequence[RequestOutput], seconds: float) -> str:
    """One line about finished requests."""
    num_tokens = sum(answer.num_committed for output in outputs for answer in output.outputs)
    line = counts(num_tokens, sum(output.num_forward_passes for output in outputs), seconds)
    rate = f" · {num_tokens / seconds:.0f} tokens/s" if seconds > 0 else ""
    return (f"{plural(len(outputs), 'request')} · " if len(outputs) > 1 else "") + line + rate


def hard_wrap(text: Text, width: int) -> list[Text]:
    """Lines of at most ``width`` columns. Broken anywhere: a run of undecided cells is one long word to a word wrap."""
    return [piece for line in text.split("\n", allow_blank=True) for piece in line.divide(_breaks(line.plain, width))]


def _breaks(line: str, width: int) -> list[int]:
    breaks, column = [], 0
    for place, char in enumerate(line):
        column += cell_len(char)
        if column > width:
            breaks.append(place)
            column = cell_len(char)
    return breaks


@dataclass(frozen=True)
class Window:
    """Text of which no more than ``height`` lines are shown: those around the first undecided cell."""

    text: Text
    height: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        lines = hard_wrap(self.text, options.max_width)
        focus = next((i for i, line in enumerate(lines) if UNDECIDED in line.plain), len(lines))
        first = max(0, min(focus - self.height // 2, len(lines) - self.height))
        yield from lines[first : first + self.height]


def picture(
    latest: Sequence[tuple[StreamChunk, int]],
    end_ids: frozenset[int] = frozenset(),
    seconds: float | None = None,
    height: int = 1000,
) -> RenderableType:
    """One canvas per answer, one under the other, and a footer with the counts.

    Args:
        latest: each answer's newest chunk, and the passes that an earlier picture has shown already.
        height: lines that there are room for.
    """
    several = len(latest) > 1
    room = max(1, (height - 2) // max(1, len(latest)) - several)
    parts: list[RenderableType] = []
    for chunk, seen in latest:
        title = [Text(f"answer {chunk.index + 1}", DIM)] if several else []
        parts += [*title, Window(canvas_text(chunk.canvas or [], end_ids, seen), room)]
    num_tokens = sum(num_committed(chunk.canvas or [], end_ids) for chunk, _ in latest)
    footer = counts(num_tokens, sum(chunk.num_passes for chunk, _ in latest), seconds)
    return Group(*parts, Text(footer, DIM, no_wrap=True, overflow="ellipsis"))


def shorten(text: str, width: int) -> str:
    """One line that is no wider than this."""
    line = " ".join(printable(text).split())
    if cell_len(line) <= width:
        return line
    while cell_len(line) >= width:
        line = line[:-1]
    return line + "…"
