"""`unmask generate`: one answer per prompt."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console

from unmask.cli import _engine
from unmask.cli._engine import Engine, Prompt, as_user
from unmask.cli.inputs import read_prompts
from unmask.cli.live import can_animate, say, watch
from unmask.cli.options import (
    DeviceOption,
    DiffusionOption,
    DtypeOption,
    JsonOption,
    MethodOption,
    ModelOption,
    RevisionOption,
    TokenizerOption,
    make_params,
    with_options,
)
from unmask.cli.view import Marks, shorten, summary
from unmask.config import EngineConfig, SamplingParams
from unmask.errors import ConfigError

if TYPE_CHECKING:
    from unmask.engine.outputs import RequestOutput

Prompts = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Argument(metavar="PROMPT", help="Each is one request; without any, stdin is."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="The text only: no live view, no summary.")]
Raw = Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, without the chat template.")]
Infill = Annotated[bool, typer.Option("--infill", help="The prompt holds holes: [[6]] is one of six tokens.")]
Question = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--question", help="With --infill: what the user asked; the text with holes is the answer."),
]
Pace = Annotated[float, typer.Option("--pace", min=0, help="Seconds that each pass stays on the screen at least.")]


@dataclass(frozen=True)
class Job:
    """What to do with each prompt."""

    llm: Engine
    params: SamplingParams
    raw: bool
    infill: bool
    question: str | None

    def prompt(self, text: str) -> Prompt:
        """The text as the engine takes it."""
        templated = not self.raw and _engine.has_chat_template(self.llm)
        return {"messages": as_user(text)} if templated else text

    def run(self, texts: list[str]) -> list[RequestOutput]:
        """All prompts in one batch."""
        if self.infill:
            before = None if self.question is None else as_user(self.question)
            return [self.llm.infill(text, self.params, messages=before) for text in texts]
        prompts = [self.prompt(text) for text in texts]
        if any(isinstance(prompt, str) for prompt in prompts):
            return self.llm.generate(texts, self.params)
        return self.llm.chat([as_user(text) for text in texts], self.params)


@with_options(SamplingParams, into="sampling", panel="Sampling")
@with_options(EngineConfig, into="engine", panel="Engine")
def generate(
    prompts: Prompts = None,
    model: ModelOption = None,
    method: MethodOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    revision: RevisionOption = None,
    tokenizer: TokenizerOption = None,
    raw: Raw = False,
    infill: Infill = False,
    question: Question = None,
    as_json: JsonOption = False,
    quiet: Quiet = False,
    pace: Pace = 0.0,
    diffusion_config: DiffusionOption = None,
    *,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Answer prompts; on a terminal, watch the canvas fill in."""
    params = make_params(sampling, diffusion_config)
    if question is not None and not infill:
        raise ConfigError("--question goes with --infill; without it, the prompt is the question")
    texts = read_prompts(prompts or [])
    named = {"model": model, "method": method, "dtype": dtype, "device": device}
    options = {**named, "revision": revision, "tokenizer": tokenizer, **engine}
    job = Job(_engine.load_llm(options, quiet or as_json), params, raw, infill, question)
    console = Console()
    if as_json:
        print_json(job, texts)
    elif can_animate(console) and not quiet and not infill:
        animate(job, texts, console, pace)
    else:
        print_plain(job, texts, console, quiet)


def print_json(job: Job, texts: list[str]) -> None:
    """One object per request and line."""
    for text, output in zip(texts, job.run(texts)):
        print(json.dumps(output.to_dict() | {"prompt": text}, ensure_ascii=not _stdout_is_unicode()), flush=True)


def _stdout_is_unicode() -> bool:
    return (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"


def print_plain(job: Job, texts: list[str], console: Console, quiet: bool) -> None:
    """The answers on stdout, a summary on stderr."""
    started = time.perf_counter()
    outputs = job.run(texts)
    for output in outputs:
        print_answers(output, console)
    if not quiet:
        print_summary(outputs, time.perf_counter() - started, Console(stderr=True))


def animate(job: Job, texts: list[str], console: Console, pace: float) -> None:
    """The prompts one after another, each live, its text left on the screen."""
    end_ids, marks = _engine.end_ids(job.llm, job.params), Marks.of(job.llm.method)
    for text in texts:
        if len(texts) > 1:
            console.print(shorten(text, console.width), style="dim", markup=False, highlight=False)
        started = time.perf_counter()
        stream = job.llm.stream(job.prompt(text), job.params, canvas=True)
        output = watch(stream, console, end_ids, pace, marks)
        print_answers(output, console)
        print_summary([output], time.perf_counter() - started, console)


def print_answers(output: RequestOutput, console: Console) -> None:
    """The text of each answer, each on lines of its own."""
    for answer in output.outputs:
        say(console, answer.text)


def print_summary(outputs: list[RequestOutput], seconds: float, console: Console) -> None:
    """The counts in one line."""
    console.print(summary(outputs, seconds), style="dim", markup=False, highlight=False, soft_wrap=True)
