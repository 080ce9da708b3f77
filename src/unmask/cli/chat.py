"""`unmask chat`: a conversation, one turn at a time."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console

from unmask.cli import _engine
from unmask.cli._engine import Engine, Message, as_user
from unmask.cli.inputs import stdin_lines
from unmask.cli.live import can_animate, follow, say, watch
from unmask.cli.main import report
from unmask.cli.options import (
    DeviceOption,
    DiffusionOption,
    DtypeOption,
    MethodOption,
    ModelOption,
    RevisionOption,
    TokenizerOption,
    make_params,
    with_options,
)
from unmask.cli.view import Marks, summary
from unmask.config import EngineConfig, SamplingParams
from unmask.errors import UnmaskError

if TYPE_CHECKING:
    from unmask.engine.outputs import RequestOutput

System = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--system", help="What the model is told before the conversation."),
]
ShowCanvas = Annotated[
    bool, typer.Option("--show-canvas/--no-show-canvas", help="Draw the canvas, or only the text that is settled.")
]

COMMANDS = "/reset forgets the conversation, /exit leaves (so does Ctrl-D), Ctrl-C cancels an answer"
MINI = "unmask-mini was trained on single-turn word problems: it answers those, and does not hold a conversation"


@dataclass
class Conversation:
    """The history, and how the next answer is shown."""

    llm: Engine
    params: SamplingParams
    console: Console
    system: str | None = None
    show_canvas: bool = True
    history: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.history = [] if self.system is None else [{"role": "system", "content": self.system}]

    def answer(self, text: str) -> None:
        """One turn. The history grows only when the answer is complete."""
        messages = as_user(text, self.history)
        started = time.perf_counter()
        output = self._show(messages)
        self.history = [*messages, {"role": "assistant", "content": output.outputs[0].text}]
        if self.console.is_terminal:
            note(self.console, summary([output], time.perf_counter() - started))

    def _show(self, messages: list[Message]) -> RequestOutput:
        animated = self.show_canvas and can_animate(self.console)
        stream = self.llm.stream({"messages": messages}, self.params, canvas=animated)
        if not animated:
            return follow(stream, self.console)
        end_ids = _engine.end_ids(self.llm, self.params)
        output = watch(stream, self.console, end_ids, marks=Marks.of(self.llm.method))
        say(self.console, output.outputs[0].text)
        return output


@with_options(SamplingParams, into="sampling", panel="Sampling", skip=("n", "trajectory"))
@with_options(EngineConfig, into="engine", panel="Engine")
def chat(
    model: ModelOption = None,
    method: MethodOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    revision: RevisionOption = None,
    tokenizer: TokenizerOption = None,
    system: System = None,
    show_canvas: ShowCanvas = True,
    diffusion_config: DiffusionOption = None,
    *,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Talk with a model, or pipe in one message per line."""
    params = make_params(sampling, diffusion_config).replace(n=1)
    named = {"model": model, "method": method, "dtype": dtype, "device": device}
    options = {**named, "revision": revision, "tokenizer": tokenizer, **engine}
    llm = _engine.load_llm(options)
    _engine.need_chat_template(llm)
    conversation = Conversation(llm, params, Console(), system, show_canvas)
    if model is None:
        note(Console(stderr=True), MINI)
    if sys.stdin.isatty():
        talk(conversation, typed_lines(conversation.console))
    else:
        for line in stdin_lines():
            if not obey(conversation, line):
                break


def talk(conversation: Conversation, lines: Iterator[str]) -> None:
    """The interactive loop: an error or Ctrl-C costs one turn, never the conversation."""
    note(conversation.console, COMMANDS)
    for line in lines:
        try:
            if not obey(conversation, line):
                return
        except KeyboardInterrupt:
            note(conversation.console, "cancelled; this turn is forgotten")
        except UnmaskError as error:
            report(error)


def obey(conversation: Conversation, line: str) -> bool:
    """Does what one line says; False ends the conversation."""
    text = line.strip()
    if text == "/exit":
        return False
    if text == "/reset":
        conversation.reset()
        note(conversation.console if conversation.console.is_terminal else Console(stderr=True), "forgotten")
    elif text.startswith("/") and text[1:].isalpha():
        note(Console(stderr=True), f"unknown command {text}; {COMMANDS}")
    elif text:
        conversation.answer(text)
    return True


def typed_lines(console: Console) -> Iterator[str]:
    """What the user types, until Ctrl-D; Ctrl-C drops the line."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    while True:
        try:
            yield input("› ")
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print()


def note(console: Console, text: str) -> None:
    """A remark of ours, in the background."""
    console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)
