"""A request inside the engine: what was asked, where it sits, and what became of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from unmask.config import SamplingParams
from unmask.decoding.params import SeatParams
from unmask.engine.outputs import CompletionOutput, RequestOutput, StreamChunk
from unmask.engine.text import TextTracker
from unmask.errors import EngineError


@dataclass(eq=False)
class Answer:
    """One answer in the making. A request with n answers is n of these.

    The canvas is ``prompt_ids`` followed by ``answer_ids``, in which MASK marks what is to be found: all of it for an
    ordinary request, the holes for infilling.
    """

    index: int
    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    block_length: int
    params: SamplingParams
    seat_params: SeatParams
    tracker: TextTracker | None = None
    """Follows the settled text; None when nobody needs text before the end."""
    watch: bool = False
    """Stream chunks are wanted."""
    watch_canvas: bool = False
    chunks: deque[StreamChunk] = field(default_factory=deque)
    output: CompletionOutput | None = None
    error: BaseException | None = None
    num_streamed: int = 0
    """Tokens that the chunks so far hold."""
    seat: int = -1
    twin: int = -1
    due: bool = True
    """Its next pass is a refresh, as far as the host knows."""
    num_steps: int = 0
    """Steps that the host knows of."""

    def stream(self, chunk: StreamChunk) -> None:
        """Queue a chunk for whoever watches."""
        self.num_streamed += len(chunk.token_ids)
        self.chunks.append(chunk)

    def take(self) -> list[StreamChunk]:
        """The chunks that nobody has taken yet."""
        return [self.chunks.popleft() for _ in range(len(self.chunks))]

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)

    @property
    def seats(self) -> list[int]:
        """Where it sits now."""
        return [seat for seat in (self.seat, self.twin) if seat >= 0]

    @property
    def num_seats(self) -> int:
        """A guided request sits twice: once with its prompt masked."""
        return 2 if self.seat_params.guidance > 0 else 1

    @property
    def done(self) -> bool:
        return self.output is not None or self.error is not None


@dataclass(eq=False)
class Request:
    """One prompt on its way through the engine, with all its answers."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    answers: list[Answer]

    @property
    def done(self) -> bool:
        return all(answer.done for answer in self.answers)

    def output(self) -> RequestOutput:
        """The result.

        Raises:
            EngineError: a step that served it failed; its exception is the cause.
        """
        for answer in self.answers:
            if answer.error is not None:
                raise EngineError("the pass that served this request failed; it can be sent again") from answer.error
        outputs = [answer.output for answer in self.answers if answer.output is not None]
        return RequestOutput(self.request_id, self.prompt, list(self.prompt_ids), outputs)

    def news(self) -> list[StreamChunk]:
        """Chunks since the last call that say something; once it is done, the last one carries the result.

        Raises:
            EngineError: as `output` does.
        """
        done = self.done  # asked first: what a step adds after this, of another thread's maybe, is for the next call
        chunks = [chunk for answer in self.answers for chunk in answer.take()]
        if not done:
            return [chunk for chunk in chunks if chunk.says_something]
        output = self.output()
        *others, last = chunks or [StreamChunk(0, "", num_passes=output.outputs[0].num_forward_passes)]
        return [*(chunk for chunk in others if chunk.says_something), replace(last, output=output)]
