"""Draws docs/canvas.svg: one canvas early, half-way and done, from a real generation.

    PYTHONPATH=src python scripts/record_canvas.py [--model DIR] [--seed 4] [--prompt TEXT] [--out docs/canvas.svg]

The same model, seed and prompt give the same file: nothing in it depends on the clock, and it names no font or host
to fetch anything from.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from unmask.cli._engine import Engine, Prompt, as_user, end_ids, has_chat_template, load_llm
from unmask.cli.view import PLAIN, Marks, Moment, picture
from unmask.config import SamplingParams

WIDTH = 84
MOMENTS = ("early", "half-way", "done")

SVG = """\
<svg class="canvas" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width;
}}
{styles}
</style>
<defs>{lines}</defs>
<rect fill="#16181d" width="100%" height="100%" rx="8"/>
<g transform="translate(9, 24)">
{backgrounds}
<g class="{unique_id}-matrix" xml:space="preserve">
{matrix}
</g></g></svg>
"""


def follow(llm: Engine, prompt: Prompt, params: SamplingParams) -> list[Moment]:
    """Every step of the canvas."""
    moments: list[Moment] = []
    for chunk in llm.stream(prompt, params, canvas=True):
        if chunk.canvas is not None:
            moments.append(Moment(chunk, moments[-1].last_step if moments else 0))
    return moments


def pick(steps: Sequence[Moment]) -> list[Moment]:
    """A fifth of the way, half-way, and the end, which shows nothing as new."""
    last = steps[-1]
    return [steps[len(steps) // 5], steps[len(steps) // 2], Moment(last.chunk, last.last_step)]


def draw(moments: Sequence[Moment], prompt: str, ends: frozenset[int], marks: Marks = PLAIN) -> str:
    """The moments as one SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text(prompt, "bold"))
    for name, moment in zip(MOMENTS, moments):
        console.print()
        console.print(Text(name, "#7f8fa6"))
        console.print(picture([moment], ends, marks=marks))
    return console.export_svg(title="", code_format=SVG, unique_id="unmask")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--method")
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--prompt", help="a word problem made from the seed when left out")
    parser.add_argument("--out", type=Path, default=Path("docs/canvas.svg"))
    args = parser.parse_args(words)
    prompt = args.prompt or problem(args.seed)
    params = SamplingParams(seed=args.seed, max_tokens=args.max_tokens)
    llm = load_llm({"model": args.model, "method": args.method, "device": "cpu", "dtype": "float32"})
    steps = follow(llm, {"messages": as_user(prompt)} if has_chat_template(llm) else prompt, params)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    drawing = draw(pick(steps), prompt, end_ids(llm, params), Marks.of(llm.method))
    args.out.write_text(drawing, encoding="utf-8")


def problem(seed: int) -> str:
    """A question that the shipped model was not trained on."""
    from unmask.problems import make_problems

    question: str = next(iter(make_problems(seed, 1, split="test")))["question"]
    return question


if __name__ == "__main__":
    main()
