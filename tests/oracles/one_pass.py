"""One-pass verification on ONE request in plain Python loops: the oracle that the engine is compared with.

Written from the description of the method and from nothing of the engine's. A pass is a list of rows, as in
`oracles.flash`, whose network runs here; what a row does not see is not in its list. Every pass recomputes the whole
canvas, candidates are the leftmost undecided positions, and the rule is the threshold's.

View i is the canvas with drafts 1..i-1 in place and MASK at every other undecided position. In one pass run

- base rows: the canvas; they see the canvas;
- evidence j = 1..K-1: draft j at its place; sees drafts 1..j as evidence, and of the rest the canvas;
- probes i = 2..K: the row of view i that scores draft i, with the token that view i has there: a MASK at the place of
  draft i, or, where logits are shifted by one, whatever is at the place before it. They see drafts 1..i-1 as evidence,
  and of the rest the canvas. Probe 1 is the base row that scores draft 1.

Evidence and probes at the place of a draft see themselves there, and nothing else. A probe at another place sees the
canvas's entry, as it does everywhere: the token is the same.

Where the description leaves a choice, this is what happens here:

- A draft must be what its probe predicts under both acceptances; the running product is that of the probes'
  probabilities. K is what there is of drafts, so that a lone draft brings no row.
- An accepted end of text removes the accepted drafts behind it, and the rule decides only what lies before it.
- The window is that of the pass, accepted ones included. Where a draft was accepted, the rule need not commit.
- The next drafts are the most probable of the window by the base rows, the leftmost on a tie; the first refused one, if
  it is among them, has its probe's token and keeps its place in the order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from oracles.flash import Entry, Prediction, Row, draft_rows, empty_memory, forward, predict
from unmask.models.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class OnePassSettings:
    """The method's switches."""

    threshold: float = 0.9
    decode_window: int = 16
    drafts: int = 8
    """Drafts at most."""
    gamma: float = 0.8
    accept: str = "agreement"
    """"agreement": each probability is at least gamma; "product": their running product is."""


@dataclass(frozen=True)
class Draft:
    """A token that the pass before would have taken next."""

    position: int
    token: int


@dataclass
class Step:
    """What one pass did; positions count from the canvas's start."""

    drafts: list[Draft]
    """What it verified."""
    num_rows: int
    accepted: list[int] = field(default_factory=list)
    """Positions, a prefix of the drafts' without what an end of text removed."""
    ruled: dict[int, int] = field(default_factory=dict)
    """What the rule committed."""
    committed: dict[int, int] = field(default_factory=dict)
    """All that was, within the end."""
    retold: bool = False
    """A refused draft was proposed again with its probe's token, and the canvas's was another."""
    end: int = 0
    """After the pass."""


@dataclass
class OnePassRun:
    """What one request gave."""

    steps: list[Step] = field(default_factory=list)
    canvas: list[int] = field(default_factory=list)
    """[0, end)"""

    @property
    def num_rows(self) -> int:
        return sum(step.num_rows for step in self.steps)


def scored_by(position: int, shift: int) -> int:
    """Where the row is that scores a position; nothing is before the first one."""
    return max(position - shift, 0)


def scratch_rows(tokens: Sequence[int], drafts: Sequence[Draft], shift: int = 0) -> list[Row]:
    """Evidence 1..K-1, then probes 2..K, over the canvas `tokens`."""
    places = [draft.position for draft in drafts]

    def seen(own: Entry, count: int) -> Iterator[Entry]:
        for position in range(len(tokens)):
            if position == own[1] and position in places:
                yield own
            else:
                yield ("evidence" if position in places[:count] else "canvas", position)

    rows = []
    for j, draft in enumerate(drafts[:-1], 1):
        entry: Entry = ("evidence", draft.position)
        rows.append(Row(draft.token, draft.position, entry, tuple(seen(entry, j))))
    for i, (draft, view) in enumerate(zip(drafts, views(tokens, drafts))):
        if i > 0:
            place = scored_by(draft.position, shift)
            entry = (f"probe {i}", place)
            rows.append(Row(view[place], place, entry, tuple(seen(entry, i))))
    return rows


def num_accepted(drafts: Sequence[Draft], probes: Sequence[Prediction], s: OnePassSettings) -> int:
    """How long the run of drafts is that pass."""
    product = 1.0
    for count, (draft, probe) in enumerate(zip(drafts, probes, strict=True)):
        product *= probe.probability
        sure = probe.probability if s.accept == "agreement" else product
        if probe.token != draft.token or sure < s.gamma:
            return count
    return len(drafts)


class Decoder:
    """One request. `step()` until `undecided` is empty, or `run()`."""

    def __init__(
        self,
        model: Transformer,
        prompt: Sequence[int],
        max_tokens: int,
        settings: OnePassSettings,
        eos_ids: Iterable[int] = (),
    ) -> None:
        self.model, self.settings, self.eos_ids = model, settings, frozenset(eos_ids)
        self.mask_id, self.shift = model.config.mask_token_id, model.config.logit_shift
        self.end = len(prompt) + max_tokens
        self.tokens = [*prompt, *[self.mask_id] * max_tokens]
        self.undecided = set(range(len(prompt), self.end))
        self.drafts: list[Draft] = []
        self.out = OnePassRun()

    def run(self) -> OnePassRun:
        while self.undecided:
            self.step()
        self.out.canvas = self.tokens[: self.end]
        return self.out

    def step(self) -> None:
        s, drafts = self.settings, self.drafts
        window = sorted(self.undecided)[: s.decode_window]
        logits = self._forward()
        base = {
            position: predict(logits[scored_by(position, self.shift)], position, self.mask_id) for position in window
        }
        step = Step(drafts, len(logits))
        probes = [base[drafts[0].position]] if drafts else []
        for number in range(1, len(drafts)):
            row = self.end + len(drafts) - 1 + number - 1
            probes.append(predict(logits[row], drafts[number].position, self.mask_id))
        count = num_accepted(drafts, probes, s)
        for draft in drafts[:count]:
            self._commit(step, draft.position, draft.token)
        step.accepted = [draft.position for draft in drafts[:count] if draft.position < self.end]
        self._rule(step, [base[position] for position in window if position in self.undecided])
        step.accepted = [position for position in step.accepted if position < self.end]
        refused = probes[count] if count < len(drafts) else None
        self.drafts = self._propose(
            step, [base[position] for position in window if position in self.undecided], refused
        )
        step.committed = {position: token for position, token in step.committed.items() if position < self.end}
        step.end = self.end
        self.out.steps.append(step)

    def _forward(self) -> list[Tensor]:
        rows = draft_rows(self.tokens, range(self.end), self.end)
        rows += scratch_rows(self.tokens[: self.end], self.drafts, self.shift)
        return forward(self.model, empty_memory(self.model), rows)[0]

    def _rule(self, step: Step, scored: list[Prediction]) -> None:
        best = max(scored, key=lambda one: (one.probability, -one.position), default=None)
        for one in scored:
            if one.probability >= self.settings.threshold or (one is best and not step.accepted):
                step.ruled[one.position] = one.token
        for position, token in step.ruled.items():
            self._commit(step, position, token)

    def _commit(self, step: Step, position: int, token: int) -> None:
        self.tokens[position] = step.committed[position] = token
        if token in self.eos_ids:
            self.end = min(self.end, position + 1)
        self.undecided = {one for one in self.undecided if one != position and one < self.end}

    def _propose(self, step: Step, scored: list[Prediction], refused: Prediction | None) -> list[Draft]:
        out = []
        for one in sorted(scored, key=lambda one: (-one.probability, one.position))[: self.settings.drafts]:
            knows_more = refused is not None and refused.position == one.position
            token = refused.token if refused is not None and knows_more else one.token
            step.retold |= token != one.token
            out.append(Draft(one.position, token))
        return out


def decode(
    model: Transformer, prompt: Sequence[int], max_tokens: int, settings: OnePassSettings, eos_ids: Iterable[int] = ()
) -> OnePassRun:
    """The answer to `prompt`."""
    return Decoder(model, prompt, max_tokens, settings, eos_ids).run()


def views(tokens: Sequence[int], drafts: Sequence[Draft]) -> list[list[int]]:
    """The canvas as the probe of each draft is to see it."""
    out, canvas = [], list(tokens)
    for draft in drafts:
        out.append(list(canvas))
        canvas[draft.position] = draft.token
    return out
