"""A canvas as a picture: from the cells of a `StreamChunk` to something rich can print.

An undecided cell is a dim ``░``, one just committed is bright, a settled one is coloured by the probability it had
when it was committed, from amber (unlikely) to green (sure). The first end of text is a dim ``∎``; nothing after it
belongs to the answer.

Methods that do not recompute everything show what was recomputed in the last pass (where layers choose rows, by any
that does choose): settled cells that were are shaded, undecided ones that were not are ``·``. Of methods with several
blocks in flight an undecided cell shows its block's state, and a dim line stands behind the blocks that are complete.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

if TYPE_CHECKING:
    from unmask.engine.outputs import CanvasCell, RequestOutput, StreamChunk
    from unmask.methods import Method

UNDECIDED = "░"
RESTS = "·"  # undecided, and not in the last pass
BLOCKS = {"closed": RESTS, "open": UNDECIDED, "full": "▒"}
COMPLETE = {"sealing": "┊", "sealed": "│"}
END = "∎"
NEWLINE = "↵"
FRESH = "bold #ffffff on #00685c"
RAN = "on #30343c"  # another colour than that of FRESH on terminals with 256 colours, too
DIM = "dim"
# Upper bound of the probability, and the colour below it. Readable on dark and light backgrounds.
SHADES = ((0.3, "#c8643c"), (0.5, "#c08a3e"), (0.7, "#a59a45"), (0.9, "#7fa25a"), (float("inf"), "#5aa27a"))


@dataclass(frozen=True)
class Marks:
    """What a method lets a viewer see besides the tokens."""

    rows: bool = False
    """Some cells run in a pass and others rest."""
    blocks: bool = False
    """Several blocks are in flight."""
    steps: bool = False
    """A step may be more than one pass."""

    @classmethod
    def of(cls, method: Method) -> Marks:
        return cls(
            rows=method.kinds[1] != "recompute",
            blocks=method.kinds[0] == "pipeline",
            steps=method.kinds[2] == "two-pass",
        )


PLAIN = Marks()


class Moment(NamedTuple):
    """One answer at one time."""

    chunk: StreamChunk
    seen_step: int
    """The last step that an earlier picture has shown."""

    @property
    def cells(self) -> Sequence[CanvasCell]:
        return self.chunk.canvas or ()

    @property
    def last_step(self) -> int:
        return max((cell.num_pass or 0 for cell in self.cells), default=0)


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


def cell_style(cell: CanvasCell, seen_step: int, marks: Marks = PLAIN) -> str:
    """How a decided cell is drawn; cells committed after step ``seen_step`` are new."""
    if (cell.num_pass or 0) > seen_step:
        return FRESH
    probability = cell.probability
    colour = "" if probability is None else next(colour for bound, colour in SHADES if probability < bound)
    return f"{colour} {RAN}" if colour and marks.rows and cell.recomputed else colour


def undecided_glyph(cell: CanvasCell, marks: Marks = PLAIN) -> str:
    """How an undecided cell is drawn."""
    if marks.blocks and cell.block_state is not None:
        return BLOCKS.get(cell.block_state, UNDECIDED)
    return RESTS if marks.rows and not cell.recomputed else UNDECIDED


def canvas_text(
    cells: Sequence[CanvasCell], end_ids: frozenset[int] = frozenset(), seen_step: int = 0, marks: Marks = PLAIN
) -> Text:
    """The answer as it stands."""
    text = Text(overflow="fold")
    shown = answer_cells(cells, end_ids)
    for cell, following in zip(shown, [*shown[1:], None]):
        if cell.token_id is None:
            text.append(undecided_glyph(cell, marks), DIM)
        elif cell.token_id in end_ids:
            text.append(END, DIM)
        else:
            text.append(printable(cell.text).replace("\n", NEWLINE + "\n"), cell_style(cell, seen_step, marks))
        if marks.blocks and following is not None and following.block_state != cell.block_state:
            text.append(COMPLETE.get(cell.block_state or "", ""), DIM)
    return text


def counts(num_tokens: int, num_passes: int, seconds: float | None = None, num_steps: int = 0) -> str:
    """Tokens, passes and tokens a pass; the seconds, and steps that are not passes, if they are told."""
    per_pass = num_tokens / num_passes if num_passes else 0.0
    steps = f" in {plural(num_steps, 'step')}" if num_steps not in (0, num_passes) else ""
    parts = [plural(num_tokens, "token"), plural(num_passes, "pass") + steps, f"{per_pass:.2f} tokens per pass"]
    return " · ".join(parts if seconds is None else [*parts, f"{seconds:.1f} s"])


def plural(count: int, noun: str) -> str:
    """``1 pass``, ``2 passes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def num_committed(cells: Sequence[CanvasCell], end_ids: frozenset[int]) -> int:
    """Answer tokens decided so far; the end of text is none."""
    return sum(c.token_id is not None and c.token_id not in end_ids for c in answer_cells(cells, end_ids))


def summary(outputs: Sequence[RequestOutput], seconds: float) -> str:
    """One line about finished requests."""
    answers = [answer for output in outputs for answer in output.outputs]
    num_tokens, num_passes, num_steps = (
        sum(getattr(answer, name) for answer in answers)
        for name in ("num_committed", "num_forward_passes", "num_steps")
    )
    line = counts(num_tokens, num_passes, seconds, num_steps)
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
    """Text of which no more than ``height`` lines are shown: those around the character at ``focus``."""

    text: Text
    focus: int
    height: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        lines = hard_wrap(self.text, options.max_width)
        focus = len(hard_wrap(self.text[: self.focus + 1], options.max_width)) - 1
        first = max(0, min(focus - self.height // 2, len(lines) - self.height))
        yield from lines[first : first + self.height]


def first_undecided(moment: Moment, end_ids: frozenset[int], marks: Marks) -> int:
    """Where the first undecided cell is in the picture's text; its end if there is none."""
    place = next((i for i, cell in enumerate(moment.cells) if cell.token_id is None), len(moment.cells))
    return len(canvas_text(moment.cells[:place], end_ids, marks=marks))


@dataclass(frozen=True)
class Legend:
    """One line that says what the marks mean."""

    marks: Marks

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        line = Text(style=DIM, no_wrap=True, overflow="ellipsis")
        if self.marks.blocks:
            line.append("  ".join(f"{glyph} {state}" for state, glyph in {**BLOCKS, **COMPLETE}.items()))
        else:
            line.append(f"{UNDECIDED} recomputed  {RESTS} not recomputed")
        if self.marks.rows and console.color_system is not None and not console.no_color:
            line.append("  ").append("shaded", f"not dim {SHADES[-1][1]} {RAN}").append(" decided and recomputed")
        yield line


def picture(
    latest: Sequence[Moment],
    end_ids: frozenset[int] = frozenset(),
    seconds: float | None = None,
    height: int = 1000,
    marks: Marks = PLAIN,
) -> RenderableType:
    """One canvas per answer, one under the other, and a footer with the counts.

    Args:
        latest: each answer's newest chunk.
        height: lines that there are room for.
    """
    several, explained = len(latest) > 1, marks.rows or marks.blocks
    room = max(1, (height - 2 - explained) // max(1, len(latest)) - several)
    parts: list[RenderableType] = []
    for moment in latest:
        text = canvas_text(moment.cells, end_ids, moment.seen_step, marks)
        title = [Text(f"answer {moment.chunk.index + 1}", DIM)] if several else []
        parts += [*title, Window(text, first_undecided(moment, end_ids, marks), room)]
    num_tokens = sum(num_committed(moment.cells, end_ids) for moment in latest)
    num_steps = sum(moment.last_step for moment in latest) if marks.steps else 0
    footer = counts(num_tokens, sum(moment.chunk.num_passes for moment in latest), seconds, num_steps)
    parts.append(Text(footer, DIM, no_wrap=True, overflow="ellipsis"))
    return Group(*parts, *([Legend(marks)] if explained else []))


def shorten(text: str, width: int) -> str:
    """One line that is no wider than this."""
    line = " ".join(printable(text).split())
    if cell_len(line) <= width:
        return line
    while cell_len(line) >= width:
        line = line[:-1]
    return line + "…"
