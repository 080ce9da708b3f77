"""What a request gets back: vLLM's shapes, with the counters of a diffusion model beside them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

BLOCK_STATES = ("closed", "open", "full", "sealing", "sealed")
"""Of a pipeline's block: not added yet; decides above the threshold only; is promised a commit in every step; complete,
and runs once more; left alone for good."""


@dataclass(frozen=True)
class CommitEvent:
    """One answer position's fate: when it became final and how probable its token was then."""

    position: int
    """Place in the answer, 0 first (for infilling: place in the whole text)."""
    token_id: int
    num_pass: int
    """The request's own pass that committed it, 1 first."""
    probability: float


@dataclass(frozen=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: list[int]
    """The answer up to the end of text, which is not among them, nor is any padding."""
    finish_reason: str
    """``stop``: an end-of-text token, a stop id or a stop string; ``length``: the canvas is full; ``abort``: somebody
    ended it before, and this is what had settled."""
    stop_reason: int | str | None = None
    """The stop string or stop id that ended it; None for end-of-text and for ``length``."""
    num_forward_passes: int = 0
    num_steps: int = 0
    """Steps; a step is two passes where the drafter verifies in a pass of its own."""
    num_rows: int = 0
    """Valid rows through the network, guidance rows among them."""
    num_committed: int = 0
    """Tokens of the answer that decoding found; less than all of them only for infilling."""
    trajectory: list[CommitEvent] | None = None

    @property
    def tokens_per_pass(self) -> float:
        """Useful tokens over this answer's own passes."""
        return self.num_committed / self.num_forward_passes if self.num_forward_passes else 0.0


@dataclass(frozen=True)
class RequestOutput:
    """One prompt with its answers, in the order in which the prompts were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True

    @property
    def num_forward_passes(self) -> int:
        """Passes of all answers."""
        return sum(output.num_forward_passes for output in self.outputs)

    @property
    def num_rows(self) -> int:
        """Rows of all answers."""
        return sum(output.num_rows for output in self.outputs)

    @property
    def tokens_per_pass(self) -> float:
        """Useful tokens of all answers over their passes."""
        passes = self.num_forward_passes
        return sum(output.num_committed for output in self.outputs) / passes if passes else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        out = asdict(self)
        for plain, output in zip(out["outputs"], self.outputs):
            plain["tokens_per_pass"] = output.tokens_per_pass
        return out | {
            "num_forward_passes": self.num_forward_passes,
            "num_rows": self.num_rows,
            "tokens_per_pass": self.tokens_per_pass,
        }


@dataclass(frozen=True)
class CanvasCell:
    """One answer position as it stands: what a viewer draws."""

    token_id: int | None
    """None while undecided."""
    text: str
    probability: float | None
    """At the pass that committed it; None while undecided or when it was given."""
    num_pass: int | None
    """The step that committed it; 0 when it was given."""
    recomputed: bool = True
    """Whether its row ran in the last pass."""
    block_state: str | None = None
    """Of the block it is in, for methods with several blocks in flight: one of `BLOCK_STATES`."""


@dataclass(frozen=True)
class StreamChunk:
    """One step of one answer."""

    index: int
    delta: str
    """Settled text that was not sent before; deltas join to the final text and are never taken back."""
    token_ids: list[int] = field(default_factory=list)
    """The tokens newly settled in this step."""
    num_passes: int = 0
    canvas: list[CanvasCell] | None = None
    """The answer after this step, when asked for."""
    output: RequestOutput | None = None
    """The whole result, on the last chunk only."""

    @property
    def finished(self) -> bool:
        """Whether this is the last chunk of the request."""
        return self.output is not None

    @property
    def says_something(self) -> bool:
        """Whether it holds text, tokens or a canvas."""
        return bool(self.delta or self.token_ids or self.canvas is not None)
