from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from cli.fake_llm import END_ID, TEXT, UNDECIDED, FakeLLM, decided, final_cells
from unmask.cli.live import can_animate, follow, say, watch
from unmask.cli.view import FRESH, SHADES, canvas_text, cell_style, counts, picture, printable, shorten, summary
from unmask.config import SamplingParams
from unmask.engine.outputs import StreamChunk
from unmask.errors import EngineError

ENDS = frozenset({END_ID})
ESCAPE = "\x1b"


def terminal(**options):
    options = {"width": 80, "height": 24, "force_terminal": True, "color_system": "truecolor", "_environ": {}} | options
    return Console(file=io.StringIO(), **options)


def shown(renderable, **options):
    console = terminal(**{"color_system": None, **options})
    console.print(renderable)
    return console.file.getvalue()


def chunk(*cells, num_passes=1, index=0):
    return StreamChunk(index, "", canvas=list(cells), num_passes=num_passes)


def test_undecided_cells_are_drawn_one_by_one():
    assert canvas_text([decided("A"), UNDECIDED, UNDECIDED, decided(" b")]).plain == "A░░ b"


def test_only_the_first_end_of_text_is_drawn_and_nothing_after_it():
    cells = [decided("A"), UNDECIDED, decided("<|end|>", END_ID), decided("<|end|>", END_ID), UNDECIDED]
    assert canvas_text(cells, ENDS).plain == "A░∎"


def test_a_newline_shows_and_breaks_the_line():
    assert canvas_text([decided("a\n"), decided("b")]).plain == "a↵\nb"


@pytest.mark.parametrize("probability", [0.0, 0.29, 0.3, 0.69, 0.9, 1.0])
def test_settled_cells_are_shaded_by_probability(probability):
    style = cell_style(decided("x", probability=probability), seen_passes=1)
    assert style == next(colour for bound, colour in SHADES if probability < bound)


def test_new_cells_are_bright_and_given_cells_plain():
    assert cell_style(decided("x", num_pass=3), seen_passes=2) == FRESH
    assert cell_style(decided("x", probability=None, num_pass=0), seen_passes=0) == ""


def test_control_characters_cannot_reach_the_terminal():
    hostile = f"a{ESCAPE}[2Jb\tc\x07\u202e\u2028\ud800"
    assert printable(hostile) == "a�[2Jb c����"
    assert ESCAPE not in canvas_text([decided(hostile)]).plain


@pytest.mark.parametrize("text", ["", "�", "👩‍👩‍👧", "漢字", "é", "\u0301", "ก็"])
@pytest.mark.parametrize("width", [10, 80])
def test_no_line_is_wider_than_the_terminal(text, width):
    cells = [decided(text, num_pass=1 + i % 3) for i in range(60)] + [UNDECIDED] * 7
    lines = shown(picture([(chunk(*cells), 1)]), width=width).splitlines()
    assert max(map(cell_len, lines)) <= width


def test_the_footer_counts_answer_tokens():
    out = shown(picture([(chunk(*final_cells(), num_passes=4), 4)], ENDS, seconds=1.25))
    assert out.splitlines()[-1] == "8 tokens · 4 passes · 2.00 tokens per pass · 1.2 s"


def test_a_canvas_before_its_first_pass():
    assert counts(0, 0) == "0 tokens · 0 passes · 0.00 tokens per pass"


def test_several_answers_are_told_apart():
    out = shown(picture([(chunk(decided("x")), 0), (chunk(decided("y"), index=1), 0)]))
    assert out.splitlines()[:4] == ["answer 1", "x", "answer 2", "y"]


def test_a_long_canvas_is_cut_to_the_lines_being_decided():
    cells = [decided(f"line{i}\n") for i in range(50)] + [UNDECIDED] * 3 + [decided(f"\nend{i}") for i in range(50)]
    lines = shown(picture([(chunk(*cells), 1)], height=12)).splitlines()
    assert len(lines) <= 12
    assert any("░░░" in line for line in lines)


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


def test_summary_of_several_requests():
    output = FakeLLM().output("x", SamplingParams(n=2))
    assert summary([output, output], 2.0) == (
        "2 requests · 32 tokens · 16 passes · 2.00 tokens per pass · 2.0 s · 16 tokens/s"
    )


def test_shorten_counts_wide_characters():
    assert shorten("a\nb", 10) == "a b"
    assert cell_len(shorten("漢字" * 20, 9)) <= 9
