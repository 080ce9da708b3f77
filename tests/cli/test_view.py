from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from cli.fake_llm import END_ID, TEXT, UNDECIDED, FakeLLM, decided, final_cells
from unmask.cli.live import can_animate, follow, say, watch
from unmask.cli.view import (
    FRESH,
    PLAIN,
    RAN,
    SHADES,
    Marks,
    Moment,
    canvas_text,
    cell_style,
    counts,
    picture,
    printable,
    shorten,
    summary,
)
from unmask.config import SamplingParams
from unmask.engine.outputs import BLOCK_STATES, CanvasCell, StreamChunk
from unmask.errors import EngineError
from unmask.methods import METHODS

ENDS = frozenset({END_ID})
TRACKED, PIPELINE = Marks.of(METHODS["flash-cache"]), Marks.of(METHODS["d2f"])
SURE = SHADES[-1][1]
ESCAPE = "\x1b"


def terminal(**options):
    options = {"width": 80, "height": 24, "force_terminal": True, "color_system": "truecolor", "_environ": {}} | options
    return Console(file=io.StringIO(), **options)


def plain(output):
    """What a terminal shows of it, without the styles."""
    return re.sub(ESCAPE + r"\[[0-9;]*m", "", output)


def coloured(latest, marks):
    console = terminal()
    console.print(picture(latest, marks=marks))
    return plain(console.file.getvalue())


def shown(renderable, **options):
    console = terminal(**{"color_system": None, **options})
    console.print(renderable)
    return console.file.getvalue()


def chunk(*cells, num_passes=1, index=0):
    return StreamChunk(index, "", canvas=list(cells), num_passes=num_passes)


def moment(*cells, seen=1, **kwargs):
    return Moment(chunk(*cells, **kwargs), seen)


def mask(recomputed=True, block_state=None):
    return CanvasCell(None, "", None, None, recomputed, block_state)


def token(text, recomputed=True, block_state=None, num_pass=1):
    return CanvasCell(1, text, 0.95, num_pass, recomputed, block_state)


def test_undecided_cells_are_drawn_one_by_one():
    assert canvas_text([decided("A"), UNDECIDED, UNDECIDED, decided(" b")]).plain == "A░░ b"


def test_only_the_first_end_of_text_is_drawn_and_nothing_after_it():
    cells = [decided("A"), UNDECIDED, decided("<|end|>", END_ID), decided("<|end|>", END_ID), UNDECIDED]
    assert canvas_text(cells, ENDS).plain == "A░∎"


def test_a_newline_shows_and_breaks_the_line():
    assert canvas_text([decided("a\n"), decided("b")]).plain == "a↵\nb"


@pytest.mark.parametrize("probability", [0.0, 0.29, 0.3, 0.69, 0.9, 1.0])
def test_settled_cells_are_shaded_by_probability(probability):
    style = cell_style(decided("x", probability=probability), seen_step=1)
    assert style == next(colour for bound, colour in SHADES if probability < bound)


def test_new_cells_are_bright_and_given_cells_plain():
    assert cell_style(decided("x", num_pass=3), seen_step=2) == FRESH
    assert cell_style(decided("x", probability=None, num_pass=0), seen_step=0) == ""


def test_control_characters_cannot_reach_the_terminal():
    hostile = f"a{ESCAPE}[2Jb\tc\x07\u202e\u2028\ud800"
    assert printable(hostile) == "a�[2Jb c����"
    assert ESCAPE not in canvas_text([decided(hostile)]).plain


@pytest.mark.parametrize("text", ["", "�", "👩‍👩‍👧", "漢字", "é", "\u0301", "ก็"])
@pytest.mark.parametrize("width", [10, 80])
def test_no_line_is_wider_than_the_terminal(text, width):
    cells = [decided(text, num_pass=1 + i % 3) for i in range(60)] + [UNDECIDED] * 7
    for marks in (PLAIN, TRACKED, PIPELINE):
        lines = shown(picture([moment(*cells)], marks=marks), width=width).splitlines()
        assert max(map(cell_len, lines)) <= width


def test_the_footer_counts_answer_tokens():
    out = shown(picture([moment(*final_cells(), num_passes=4, seen=4)], ENDS, seconds=1.25))
    assert out.splitlines()[-1] == "8 tokens · 4 passes · 2.00 tokens per pass · 1.2 s"


def test_a_canvas_before_its_first_pass():
    assert counts(0, 0) == "0 tokens · 0 passes · 0.00 tokens per pass"


def test_several_answers_are_told_apart():
    out = shown(picture([moment(decided("x")), moment(decided("y"), index=1)]))
    assert out.splitlines()[:4] == ["answer 1", "x", "answer 2", "y"]


def test_a_long_canvas_is_cut_to_the_lines_being_decided():
    cells = [decided(f"line{i}\n") for i in range(50)] + [UNDECIDED] * 3 + [decided(f"\nend{i}") for i in range(50)]
    for marks in (PLAIN, TRACKED, PIPELINE):
        lines = shown(picture([moment(*cells)], height=12, marks=marks)).splitlines()
        assert len(lines) == 11  # one line stays free
        assert any("░░░" in line for line in lines)


def test_the_cut_does_not_take_text_for_undecided_cells():
    cells = [decided("░·▒\n")] + [decided(f"line{i}\n") for i in range(50)] + [mask(recomputed=False)] * 3
    out = shown(picture([moment(*cells)], height=12, marks=TRACKED))
    assert "···" in out
    assert "░·▒" not in out


# --- what ran, and blocks in flight


def test_what_a_method_lets_one_see():
    plain = {name for name, row in METHODS.items() if Marks.of(row) == PLAIN}
    assert plain == {"vanilla", "dream", "confidence", "factor", "entropy-bound", "window", "one-pass"}
    assert Marks.of(METHODS["fast-dllm-dual"]) == Marks(rows=True)
    assert Marks.of(METHODS["flash-verify"]) == Marks(rows=True, steps=True)
    assert Marks.of(METHODS["flash-verify-uncached"]) == Marks(steps=True)
    assert Marks(rows=True, blocks=True) == PIPELINE
    assert Marks.of(METHODS["d2f-uncached"]) == Marks(blocks=True)


def test_masks_that_did_not_run_are_dots():
    cells = [token("A"), mask(), mask(recomputed=False)]
    assert canvas_text(cells, marks=TRACKED).plain == "A░·"
    assert canvas_text(cells).plain == "A░░"  # a method that recomputes everything looks as it always did


@pytest.mark.parametrize(
    ("marks", "recomputed", "style"),
    [(TRACKED, True, f"{SURE} {RAN}"), (TRACKED, False, SURE), (PIPELINE, True, f"{SURE} {RAN}"), (PLAIN, True, SURE)],
)
def test_settled_cells_that_ran_are_shaded(marks, recomputed, style):
    assert cell_style(token("x", recomputed), 1, marks) == style


def test_new_cells_are_not_shaded_and_given_ones_have_no_style():
    assert cell_style(token("x"), 0, TRACKED) == FRESH
    assert cell_style(decided("x", probability=None, num_pass=0), 0, TRACKED) == ""


def test_masks_show_the_state_of_their_block():
    cells = [mask(state != "closed", state) for state in ("full", "open", "closed")]
    assert canvas_text(cells, marks=PIPELINE).plain == "▒░·"
    assert canvas_text(cells, marks=Marks.of(METHODS["d2f-uncached"])).plain == "▒░·"
    assert canvas_text(cells).plain == "░░░"


def test_a_line_stands_behind_the_blocks_that_are_complete():
    cells = [token(state[-1], block_state=state) for state in ("sealed", "sealed", "sealing", "full", "full", "open")]
    assert canvas_text(cells, marks=PIPELINE).plain == "dd│g┊lln"
    assert canvas_text(cells).plain == "ddglln"
    assert canvas_text(cells[:2], marks=PIPELINE).plain == "dd"  # nothing follows: no line
    lines = [cell for cell in canvas_text(cells, marks=PIPELINE).spans if cell.style == "dim"]
    assert len(lines) == 2


def test_every_block_state_has_a_mark():
    states = [[token("x", block_state=state), mask(block_state="other")] for state in BLOCK_STATES]
    cells = [mask(block_state=state) for state in BLOCK_STATES]
    glyphs = {canvas_text([cell], marks=PIPELINE).plain for cell in cells[:3]}
    glyphs |= {canvas_text(each, marks=PIPELINE).plain[1] for each in states[3:]}
    assert glyphs == {"·", "░", "▒", "┊", "│"}


def test_the_end_and_what_is_behind_it_have_no_line():
    cells = [token("a", block_state="sealed"), CanvasCell(END_ID, "<|end|>", 0.9, 1, True, "sealed"), mask()]
    assert canvas_text(cells, ENDS, marks=PIPELINE).plain == "a∎"


@pytest.mark.parametrize(
    ("name", "legend"),
    [
        ("flash-cache", "░ recomputed  · not recomputed  shaded decided and recomputed"),
        ("fast-dllm-prefix", "░ recomputed  · not recomputed  shaded decided and recomputed"),
        ("d2f", "· closed  ░ open  ▒ full  ┊ sealing  │ sealed  shaded decided and recomputed"),
        ("d2f-uncached", "· closed  ░ open  ▒ full  ┊ sealing  │ sealed"),
    ],
)
def test_the_legend_says_what_the_marks_mean(name, legend):
    lines = coloured([moment(token("x"))], Marks.of(METHODS[name])).splitlines()
    assert [line.rstrip() for line in lines[-1:]] == [legend]
    assert cell_len(legend) <= 80


@pytest.mark.parametrize("name", ["confidence", "dream", "flash-verify-uncached"])
def test_no_legend_where_there_is_nothing_to_explain(name):
    assert coloured([moment(token("x"))], Marks.of(METHODS[name])).splitlines()[-1].startswith("1 token · 1 pass")


@pytest.mark.parametrize("options", [{"_environ": {"NO_COLOR": "1"}}, {"color_system": None}])
def test_without_colours_the_glyphs_stay_and_the_legend_promises_no_shade(options):
    cells = [token("A"), token("B", recomputed=False), mask(), mask(recomputed=False)]
    console = terminal(**options)
    console.print(picture([moment(*cells)], marks=TRACKED))
    out = plain(console.file.getvalue())
    assert out.splitlines()[0] == "AB░·"
    assert out.splitlines()[-1] == "░ recomputed  · not recomputed"
    assert not re.search(ESCAPE + r"\[[0-9;]*[34]8;", console.file.getvalue())


def test_with_colours_the_shade_is_there():
    drawn = terminal().render(picture([moment(token("A"), token("B", recomputed=False))], marks=TRACKED))
    shades = {segment.text: segment.style.bgcolor for segment in drawn if segment.style}
    assert shades["A"].name == shades["shaded"].name == RAN.split()[-1]
    assert shades["B"] is None


def test_fresh_and_shaded_differ_where_colours_are_few():
    from rich.color import ColorSystem
    from rich.style import Style

    fresh, ran = (Style.parse(style).bgcolor for style in (FRESH, f"{SURE} {RAN}"))
    assert fresh.downgrade(ColorSystem.EIGHT_BIT).number != ran.downgrade(ColorSystem.EIGHT_BIT).number


def test_steps_are_told_where_a_step_is_more_than_a_pass():
    cells = [token("a"), token("b", num_pass=2), mask()]
    shown_by = {name: shown(picture([moment(*cells, num_passes=3)], marks=Marks.of(METHODS[name]))) for name in METHODS}
    assert "2 tokens · 3 passes in 2 steps · 0.67 tokens per pass" in shown_by["flash-verify"]
    assert "2 tokens · 3 passes in 2 steps · 0.67 tokens per pass" in shown_by["flash-verify-uncached"]
    assert {name for name in METHODS if "step" in shown_by[name]} == {
        name for name, row in METHODS.items() if row.drafter == "two-pass"
    }


def test_what_is_new_follows_the_steps_where_they_are_fewer_than_passes():
    """Step 2 of two passes each: nothing was seen of it when step 1 was drawn."""
    from unmask.cli.live import Watched

    view = Watched(terminal(), ENDS, Marks.of(METHODS["flash-verify"]))
    view.take(chunk(token("a"), mask(), num_passes=2))
    view.take(chunk(token("a"), token("b", num_pass=2), num_passes=4))
    assert view.latest[0].seen_step == 1
    text = canvas_text(view.latest[0].cells, seen_step=view.latest[0].seen_step)
    assert [span.style for span in text.spans] == [SURE, FRESH]


@pytest.mark.parametrize(
    ("passes", "steps", "line"),
    [(4, 0, "4 passes"), (4, 4, "4 passes"), (4, 3, "4 passes in 3 steps"), (2, 1, "2 passes in 1 step")],
)
def test_counts_say_steps_only_where_they_differ(passes, steps, line):
    assert counts(8, passes, num_steps=steps).split(" · ")[1] == line


def test_the_canvas_fills_in_and_is_wiped():
    console = terminal()
    output = watch(FakeLLM().stream("x", SamplingParams(), canvas=True), console, ENDS, pace=0.001)
    drawn = console.file.getvalue()
    assert output.outputs[0].text == TEXT
    assert "░" in drawn
    assert "∎" in drawn
    assert "<|end|>" not in drawn
    assert drawn.rindex(f"{ESCAPE}[?25h") > drawn.rindex(f"{ESCAPE}[?25l")


def test_no_color_keeps_the_shape_and_drops_the_colours():
    console = terminal(_environ={"NO_COLOR": "1"})
    watch(FakeLLM().stream("x", SamplingParams(), canvas=True), console, ENDS)
    assert " and two make" in console.file.getvalue()
    assert "38;2;" not in console.file.getvalue()


def test_ctrl_c_gives_the_cursor_back_and_closes_the_stream():
    console, llm = terminal(), FakeLLM(interrupt_after=3)
    with pytest.raises(KeyboardInterrupt):
        watch(llm.stream("x", SamplingParams(), canvas=True), console, ENDS)
    drawn = console.file.getvalue()
    assert drawn.rindex(f"{ESCAPE}[?25h") > drawn.rindex(f"{ESCAPE}[?25l")
    assert llm.closed == 1


def test_follow_prints_what_is_settled():
    console = Console(file=io.StringIO())
    assert follow(FakeLLM().stream("x", SamplingParams()), console).outputs[0].text == TEXT
    assert console.file.getvalue() == TEXT + "\n"


def test_a_stream_without_a_result_is_our_fault():
    with pytest.raises(EngineError):
        follow(iter([chunk()]), Console(file=io.StringIO()))


def test_text_is_literal_in_a_pipe_and_harmless_on_a_terminal():
    pipe, screen = Console(file=io.StringIO()), terminal()
    for console in (pipe, screen):
        say(console, f"[red]{ESCAPE}[2J")
    assert pipe.file.getvalue() == f"[red]{ESCAPE}[2J\n"
    assert ESCAPE + "[2J" not in screen.file.getvalue()
    assert "[red]" in screen.file.getvalue()


def test_dumb_terminals_are_not_animated():
    assert can_animate(terminal())
    assert not can_animate(terminal(_environ={"TERM": "dumb"}))
    assert not can_animate(Console(file=io.StringIO()))


def test_the_summary_says_steps_where_they_differ():
    output = FakeLLM().output("x", SamplingParams())
    answers = [dataclasses.replace(output.outputs[0], num_steps=steps) for steps in (3, 4)]
    one, other = (dataclasses.replace(output, outputs=[answer]) for answer in answers)
    assert summary([one], 2.0).startswith("8 tokens · 4 passes in 3 steps · 2.00 tokens per pass")
    assert summary([other], 2.0).startswith("8 tokens · 4 passes · 2.00 tokens per pass")
    assert "8 passes in 7 steps" in summary([one, other], 2.0)


def test_summary_of_several_requests():
    output = FakeLLM().output("x", SamplingParams(n=2))
    assert summary([output, output], 2.0) == (
        "2 requests · 32 tokens · 16 passes · 2.00 tokens per pass · 2.0 s · 16 tokens/s"
    )


def test_shorten_counts_wide_characters():
    assert shorten("a\nb", 10) == "a b"
    assert cell_len(shorten("漢字" * 20, 9)) <= 9
