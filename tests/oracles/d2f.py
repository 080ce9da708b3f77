"""D2F decoding of ONE request in plain Python loops: the oracle that the engine is compared with.

Written from the published description of the method and from nothing of the engine. Every pass runs the network on the
whole text so far, without a cache; what a cache would be allowed to keep is only written down (`Step.window`).

Words: the prompt is a block, and the answer is cut into blocks of `block_length` from the prompt's end on. A row sees
all of its own block and of the blocks before it, decided or not, and nothing later. A block is *active* while it
decodes, *sealing* in the one pass that runs it with all of its tokens in place, and *sealed* from then on: nothing
that it sees changes any more. It stays active, though complete, as long as a block before it is active. An active
block is *full* from the step on in which the block before it is decided to `tau_act`; only a full one must commit in
every pass. *In flight* are the active blocks. Positions count from the prompt's start.

One step, in this order: add one block; make blocks full; stop if no block is active; run sealing and active blocks;
what was sealing is sealed; commit; complete blocks with no active one before them become sealing.

Where the description leaves a choice, this is what happens here:

- The prompt runs in the first pass, beside the first block, and counts as decided to 1; an empty one as well.
- A ratio is a quotient of two integers and is compared with >=, a probability with > `threshold`. All blocks commit
  from the same forward.
- A forced token is the best by `rank`, ties leftmost; the threshold is on the probability all the same. Softmax
  statistics are fp32. MASK is never predicted, but counts in the softmax and in the entropy; "margin" is the lead
  over the second best token but MASK.
- `depth` bounds the blocks in flight when one is added. A complete block that waits for an earlier one counts: it runs
  in every pass, and the depth bounds the rows of a pass.
- `max_tokens` is exact: the last block may be shorter.
- With `early_stop`, `end` is the position after the leftmost committed end-of-text token of the answer, wherever it
  was committed, and may move left later. What is at or past it is gone from the step's commits on, whole blocks or the
  tail of one; a shortened block is complete when what is left of it is. Its ratio, which would count only what is
  left, is never asked for: it is the last one. The request is done when all before `end` is decided.
- Without it (the reference), any committed end of text, wherever it is, only stops the adding of blocks. The blocks
  that are there are completed, and the answer's text is cut at its first end of text.
- The last blocks are not sealed: the run ends with the last commit.
- Scored one row back (Dream), the first position of the first active block takes the last row of the block before.
  While that block is sealing, the row is one of this pass; later it is the one of the sealing pass (or of the first
  pass, for the prompt), which the reference saves at that moment. `Decoder.rows` does it literally: it has each row as
  of the last pass that ran it. A fresh forward gives the same row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oracles.flash import made_up_prompt
from unmask.models.transformer import Layer, Transformer


@dataclass(frozen=True, kw_only=True)
class D2FSettings:
    """The method's switches."""

    block_length: int = 8
    tau_add: float = 0.1
    """A block is added when the last one is decided to this part."""
    tau_act: float = 0.95
    """A block is full when the one before is decided to this part."""
    threshold: float = 0.9
    """Commit what is more probable than this."""
    depth: int | None = None
    """Blocks in flight at most."""
    early_stop: bool = True
    """Nothing past the end of text exists; False: as the reference does it."""
    rank: str = "prob"
    """What the forced token is the best in: "prob", "margin" (over the second best token) or "entropy" (least)."""


@dataclass(frozen=True)
class Block:
    """[start, stop) of the canvas as a pass found it."""

    start: int
    stop: int
    state: str
    """"active", "sealing" or "sealed"."""
    full: bool
    undecided: int


@dataclass
class Step:
    """What one step did."""

    tokens: tuple[int, ...]
    """The prompt and the blocks that exist, as this pass ran them."""
    blocks: tuple[Block, ...]
    """Of the answer, as this pass found them."""
    window: set[int]
    """What a cached implementation runs: the sealing and the active blocks, in the first step the prompt too."""
    committed: dict[int, int] = field(default_factory=dict)
    """Position: token, without what the step's own end-of-text tokens removed."""
    forced: set[int] = field(default_factory=set)
    """Committed as the best of a full block that had none above the threshold."""
    end: int = 0
    """After the step."""

    @property
    def num_rows(self) -> int:
        return len(self.window)


@dataclass
class D2FRun:
    """What one request gave."""

    steps: list[Step] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """The answer before its first end of text."""
    canvas: list[int] = field(default_factory=list)
    """The prompt and the answer's blocks: with `early_stop` [0, end), with the end-of-text token if there is one."""
    finish_reason: str = "length"
    margin: float = math.inf
    """Smallest distance of any decision to the other way: rounding below it cannot change the run."""

    @property
    def num_passes(self) -> int:
        return len(self.steps)

    @property
    def num_rows(self) -> int:
        return sum(step.num_rows for step in self.steps)


# --- the network


def spans_of(length: int, prompt_len: int, block_length: int) -> list[range]:
    """[0, length) in blocks, the prompt first.

    >>> spans_of(9, 3, 4)
    [range(0, 3), range(3, 7), range(7, 9)]
    """
    starts = [0, *range(prompt_len, length, block_length)]
    spans = [range(start, min(stop, length)) for start, stop in zip(starts, [*starts[1:], length])]
    return [span for span in spans if span]


@torch.inference_mode()
def _forward(
    model: Transformer, tokens: Sequence[int], prompt_len: int, block_length: int
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Raw logits [N, V], and each layer's rotated keys and its values [N, Hkv, hd]."""
    spans = spans_of(len(tokens), prompt_len, block_length)
    stored = []
    x = model.embed(torch.tensor(list(tokens)))
    for layer in model.layers:
        assert isinstance(layer, Layer)
        q, k, v = layer.attn.split(layer.attn_norm(x))
        q, k = _rotated(model, q), _rotated(model, k)
        stored.append((k, v))
        attended = [_attend(q[span.start : span.stop], k[: span.stop], v[: span.stop]) for span in spans]
        x = x + layer.attn.out(torch.cat(attended).flatten(1))
        x = x + layer.mlp(layer.mlp_norm(x))
    return model.logits(model.norm(x)), stored


def _rotated(model: Transformer, x: Tensor) -> Tensor:
    """Heads `x` [N, heads, hd] of the positions 0..N-1: dimension i turns with dimension i + hd / 2."""
    cos, sin = (table.to(x.dtype)[:, None] for table in model.rope.at(torch.arange(len(x))))
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, low * sin + high * cos), -1)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every row of `q` [R, H, hd] over all of `k`, `v` [N, Hkv, hd]; neighbouring query heads share a key head."""
    shared = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(shared, 1).transpose(0, 1) for each in (k, v))  # [H, N, hd]
    weights = torch.softmax(q.transpose(0, 1) @ k.transpose(1, 2) / math.sqrt(q.shape[-1]), -1)
    return (weights @ v).transpose(0, 1)


def block_causal_logits(model: Transformer, tokens: Sequence[int], prompt_len: int, block_length: int) -> Tensor:
    """Raw logits [N, V] (no shift) of a fresh forward in which each block sees itself and what is before it."""
    return _forward(model, tokens, prompt_len, block_length)[0]


def block_kv(
    model: Transformer, tokens: Sequence[int], prompt_len: int, block_length: int
) -> list[tuple[Tensor, Tensor]]:
    """Each layer's rotated keys and its values [N, Hkv, hd] of such a forward."""
    return _forward(model, tokens, prompt_len, block_length)[1]


# --- decisions


@dataclass(frozen=True)
class Prediction:
    """What a position would become."""

    position: int
    token: int
    probability: float
    lead: float
    """Over the second best token."""
    neg_entropy: float

    def score(self, rank: str) -> float:
        return {"prob": self.probability, "margin": self.lead, "entropy": self.neg_entropy}[rank]


def predict(logits: Tensor, position: int, mask_id: int) -> Prediction:
    """The most probable token but MASK, the lowest id on a tie, from the raw logits [V]."""
    probs = torch.softmax(logits.float(), -1)
    allowed = logits.float().clone()
    allowed[mask_id] = -math.inf
    token = int(torch.nonzero(allowed == allowed.max())[0])
    others = probs.clone()
    others[[mask_id, token]] = 0
    neg_entropy = float(torch.special.xlogy(probs, probs).sum())
    return Prediction(position, token, float(probs[token]), float(probs[token] - others.max()), neg_entropy)


# --- the loop


class Decoder:
    """One request. `step()` until it says False, or `run()`."""

    def __init__(
        self,
        model: Transformer,
        prompt: Sequence[int],
        max_tokens: int,
        settings: D2FSettings,
        eos_ids: Iterable[int] = (),
    ) -> None:
        assert 0 <= settings.tau_add <= 1, "above 1 no second block is ever added"
        assert 0 <= settings.tau_act <= 1, "above 1 no block is ever full"
        assert settings.depth is None or settings.depth >= 1
        assert settings.rank in ("prob", "margin", "entropy")
        self.model, self.settings, self.eos_ids = model, settings, frozenset(eos_ids)
        self.mask_id, self.shift = model.config.mask_token_id, model.config.logit_shift
        self.num_prompt, self.end = len(prompt), len(prompt) + max_tokens
        self.tokens = list(prompt)
        """The prompt and the blocks so far."""
        self.blocks: list[Block] = []
        self.ended = False
        """An end of text was committed (without `early_stop`)."""
        self.rows: dict[int, Tensor] = {}
        """The logits [V] of each row as of the last pass that ran it."""
        self.out = D2FRun()

    def run(self) -> D2FRun:
        while self.step():
            pass
        answer = self.tokens[self.num_prompt :]
        ends = [n for n, token in enumerate(answer) if token in self.eos_ids]
        self.out.finish_reason = "stop" if ends else "length"
        self.out.token_ids = answer[: ends[0]] if ends else answer
        self.out.canvas = list(self.tokens)
        return self.out

    def step(self) -> bool:
        """False: nothing was left to do."""
        self._add()
        self._activate()
        if all(block.state != "active" for block in self.blocks):
            return False
        window = {n for block in self.blocks if block.state != "sealed" for n in range(block.start, block.stop)}
        if not self.out.steps:
            window |= set(range(self.num_prompt))
        step = Step(tuple(self.tokens), tuple(self.blocks), window)
        self.rows |= self.forward(window)
        self._seal()
        for block in self.blocks:
            if block.state == "active":
                step.committed |= self._decide(block, step.forced)
        self._commit(step)
        self._retire()
        self.out.steps.append(step)
        return True

    def forward(self, window: set[int]) -> dict[int, Tensor]:
        """The logits [V] of the rows `window` of this pass."""
        logits = block_causal_logits(self.model, self.tokens, self.num_prompt, self.settings.block_length)
        return {n: logits[n] for n in window}

    def _add(self) -> None:
        s = self.settings
        start = self.blocks[-1].stop if self.blocks else self.num_prompt
        stop = min(start + s.block_length, self.end)
        in_flight = sum(block.state == "active" for block in self.blocks)
        if start == stop or self.ended or self._ratio(len(self.blocks) - 1) < s.tau_add:
            return
        if s.depth is not None and in_flight >= s.depth:
            return
        self.tokens += [self.mask_id] * (stop - start)
        self.blocks.append(Block(start, stop, "active", False, stop - start))

    def _ratio(self, number: int) -> float:
        """How much of a block is decided; block -1 is the prompt."""
        if number < 0:
            return 1.0
        size = self.blocks[number].stop - self.blocks[number].start
        return (size - self.blocks[number].undecided) / size

    def _activate(self) -> None:
        for number, block in enumerate(self.blocks):
            if self._ratio(number - 1) >= self.settings.tau_act:
                self.blocks[number] = dataclasses.replace(block, full=True)

    def _seal(self) -> None:
        for number, block in enumerate(self.blocks):
            if block.state == "sealing":
                self.blocks[number] = dataclasses.replace(block, state="sealed")

    def _decide(self, block: Block, forced: set[int]) -> dict[int, int]:
        """What the block commits in this pass."""
        s = self.settings
        positions = [n for n in range(block.start, block.stop) if self.tokens[n] == self.mask_id]
        scored = [predict(self.rows[max(0, n - self.shift)], n, self.mask_id) for n in positions]
        chosen = [one for one in scored if one.probability > s.threshold]
        for one in scored:
            self._close(abs(one.probability - s.threshold))
        if block.full and scored and not chosen:
            ranked = sorted(scored, key=lambda one: (-one.score(s.rank), one.position))
            chosen = ranked[:1]
            forced.add(chosen[0].position)
            if len(ranked) > 1:
                self._close(ranked[0].score(s.rank) - ranked[1].score(s.rank))
        for one in chosen:
            self._close(one.lead)
        return {one.position: one.token for one in chosen}

    def _commit(self, step: Step) -> None:
        for position, token in step.committed.items():
            self.tokens[position] = token
            if token in self.eos_ids and self.settings.early_stop:
                self.end = min(self.end, position + 1)
            elif token in self.eos_ids:
                self.ended = True
        del self.tokens[self.end :]
        self.blocks = [self._counted(block) for block in self.blocks if block.start < self.end]
        step.committed = {n: token for n, token in step.committed.items() if n < self.end}
        step.forced &= set(step.committed)
        step.end = self.end

    def _counted(self, block: Block) -> Block:
        """The block up to `end`, its undecided positions counted anew."""
        stop = min(block.stop, self.end)
        return dataclasses.replace(block, stop=stop, undecided=self.tokens[block.start : stop].count(self.mask_id))

    def _retire(self) -> None:
        for number, block in enumerate(self.blocks):
            if block.undecided:
                return
            if block.state == "active":
                self.blocks[number] = dataclasses.replace(block, state="sealing")

    def _close(self, distance: float) -> None:
        self.out.margin = min(self.out.margin, distance)


def decode(
    model: Transformer,
    prompt: Sequence[int],
    max_tokens: int,
    settings: D2FSettings,
    eos_ids: Iterable[int] = (),
) -> D2FRun:
    """The answer to `prompt`."""
    return Decoder(model, prompt, max_tokens, settings, eos_ids).run()


# --- requests that an engine must answer in the same way


@dataclass(frozen=True)
class D2FCase:
    """One named request on a golden checkpoint."""

    name: str
    model: str
    prompt: tuple[int, ...]
    max_tokens: int
    settings: D2FSettings
    eos_ids: tuple[int, ...]
    """In place of the checkpoint's own."""
    ends: str
    """Where the answer's first end of text stands: "start" (its first position), "middle" or "never"."""
    speculative: bool
    """Some end of text is committed while a block before its own is undecided."""
    matters: tuple[dict[str, object], ...]
    """Changes of the settings each of which changes what the steps commit: an engine that ignores one is caught."""


def _case(
    name: str,
    model: str,
    prompt: tuple[int, int],
    max_tokens: int,
    eos_ids: tuple[int, ...],
    ends: str,
    matters: Sequence[dict[str, object]],
    *,
    speculative: bool = False,
    **switches: object,
) -> D2FCase:
    settings = D2FSettings(**switches)  # type: ignore[arg-type]
    return D2FCase(
        name, model, made_up_prompt(*prompt), max_tokens, settings, eos_ids, ends, speculative, tuple(matters)
    )


_MHA, _GQA, _DREAM = "tiny-llada", "tiny-llada-gqa", "tiny-dream"
_UNUSED, _UNUSED_DREAM = (318,), (316,)

SETTINGS = [
    _case(
        "defaults", _MHA, (12, 0), 32, _UNUSED, "never",
        [{"tau_add": 0.5}, {"tau_act": 0.5}, {"threshold": 0.8}, {"depth": 2}],
    ),
    _case(
        "defaults-dream", _DREAM, (14, 0), 32, _UNUSED_DREAM, "never",
        [{"tau_add": 0.5}, {"tau_act": 0.5}, {"threshold": 0.8}, {"depth": 2}],
    ),
    _case(
        "odd-blocks", _GQA, (9, 2), 23, _UNUSED, "never",
        [{"block_length": 6}, {"tau_add": 0.6}, {"tau_act": 0.9}, {"threshold": 0.7}],
        block_length=5, tau_add=0.2, tau_act=0.4, threshold=0.6,
    ),
    _case(
        "odd-blocks-dream", _DREAM, (11, 0), 31, _UNUSED_DREAM, "never",
        [{"block_length": 8}, {"tau_add": 1.0}, {"depth": 3}],
        block_length=7, tau_add=0.4, tau_act=0.8, threshold=0.7,
    ),
    _case(
        "ends-at-the-start", _MHA, (10, 24), 30, (109,), "start",
        [{"early_stop": False}, {"depth": 1}],
        block_length=6, tau_act=0.5,
    ),
    _case(
        "ends-at-the-start-dream", _DREAM, (21, 0), 30, (74,), "start",
        [{"early_stop": False}],
        tau_act=0.4, threshold=0.8,
    ),
    _case(
        "ends-in-the-middle", _GQA, (16, 2), 40, (274,), "middle",
        [{"early_stop": False}, {"tau_act": 1.0}, {"threshold": 0.9}],
        block_length=7, tau_act=0.6, threshold=0.7,
    ),
    _case(
        "speculative-end", _MHA, (8, 2), 40, (7,), "middle",
        [{"early_stop": False}, {"tau_add": 1.0}],
        speculative=True, block_length=6, tau_act=0.4, threshold=0.6,
    ),
    _case(
        "speculative-end-dream", _DREAM, (18, 2), 36, (100,), "middle",
        [{"early_stop": False}, {"tau_add": 0.9}],
        speculative=True, block_length=6, tau_act=0.5, threshold=0.6,
    ),
    _case(
        "end-moves-left", _GQA, (11, 0), 40, (176,), "middle",
        [{"early_stop": False}],
        speculative=True, block_length=5, tau_act=0.4, threshold=0.6,
    ),
    _case(
        "end-moves-left-dream", _DREAM, (11, 7), 40, (192,), "middle",
        [{"early_stop": False}],
        speculative=True, block_length=5, tau_act=0.4, threshold=0.6,
    ),
    _case(
        "reference-speculative-end", _GQA, (14, 0), 40, (241,), "middle",
        [{"early_stop": True}, {"tau_add": 0.9}],
        speculative=True, tau_act=0.6, threshold=0.7, early_stop=False,
    ),
    _case(
        "reference-dream", _DREAM, (7, 3), 45, (120,), "middle",
        [{"early_stop": True}, {"tau_add": 0.9}],
        block_length=9, tau_act=0.6, threshold=0.7, early_stop=False,
    ),
    _case(
        "reference-depth-2", _MHA, (12, 0), 44, (239,), "middle",
        [{"early_stop": True}, {"depth": None}],
        speculative=True, block_length=7, tau_act=0.5, threshold=0.7, depth=2, early_stop=False,
    ),
    _case(
        "reference-late-end", _DREAM, (12, 0), 25, (8,), "middle",
        [{"early_stop": True}, {"tau_act": 0.5}, {"rank": "margin"}],
        block_length=7, tau_act=0.9, early_stop=False,
    ),
    _case(
        "reference-ends-with-its-blocks", _GQA, (13, 10), 29, (14,), "middle",
        [{"early_stop": True}, {"tau_add": 0.1}],
        block_length=6, tau_add=1.0, tau_act=0.9, threshold=0.7, early_stop=False,
    ),
    _case(
        "depth-1", _MHA, (15, 1), 26, _UNUSED, "never",
        [{"depth": None}, {"depth": 2}, {"threshold": 0.9}],
        block_length=6, tau_act=0.5, threshold=0.7, depth=1,
    ),
    _case(
        "depth-1-ends", _GQA, (15, 0), 26, (59,), "middle",
        [{"depth": None}, {"early_stop": False}],
        block_length=6, tau_act=0.5, threshold=0.7, depth=1,
    ),
    _case(
        "depth-2-dream", _DREAM, (20, 1), 37, _UNUSED_DREAM, "never",
        [{"depth": None}, {"depth": 1}, {"depth": 3}],
        block_length=5, tau_add=0.2, tau_act=0.5, threshold=0.8, depth=2,
    ),
    _case(
        "depth-2-speculative-end", _MHA, (17, 52), 33, (220,), "middle",
        [{"depth": None}, {"depth": 1}, {"early_stop": False}],
        speculative=True, block_length=5, tau_add=0.2, tau_act=0.4, threshold=0.7, depth=2,
    ),
    _case(
        "sequential-dream", _DREAM, (9, 1), 19, _UNUSED_DREAM, "never",
        [{"tau_add": 0.5, "tau_act": 0.5}, {"threshold": 0.8}, {"block_length": 4}],
        block_length=5, tau_add=1.0, tau_act=1.0, threshold=1.0,
    ),
    _case(
        "one-block", _MHA, (12, 1), 17, _UNUSED, "never",
        [{"block_length": 16}, {"threshold": 0.8}],
        block_length=40, tau_add=1.0, tau_act=1.0, threshold=1.0,
    ),
    _case(
        "one-block-ends-dream", _DREAM, (12, 0), 21, (10,), "middle",
        [{"block_length": 16}, {"threshold": 0.8}, {"early_stop": False}],
        block_length=40,
    ),
    _case(
        "blocks-of-one-dream", _DREAM, (10, 0), 18, (5,), "middle",
        [{"block_length": 2}],
        block_length=1, tau_add=0.0, tau_act=1.0, threshold=0.6,
    ),
    _case(
        "shorter-than-a-block-dream", _DREAM, (12, 0), 3, _UNUSED_DREAM, "never",
        [{"threshold": 0.9}],
        threshold=0.4,
    ),
    _case(
        "all-full", _GQA, (12, 1), 30, _UNUSED, "never",
        [{"tau_act": 0.5}, {"tau_add": 0.5}, {"depth": 2}],
        block_length=4, tau_add=0.0, tau_act=0.0,
    ),
    _case(
        "all-full-ends-dream", _DREAM, (12, 0), 30, (6,), "middle",
        [{"tau_act": 0.5}, {"tau_add": 0.5}, {"early_stop": False}],
        speculative=True, block_length=4, tau_add=0.0, tau_act=0.0,
    ),
    _case(
        "margin", _GQA, (12, 0), 30, _UNUSED, "never",
        [{"rank": "prob"}, {"rank": "entropy"}],
        threshold=0.95, rank="margin",
    ),
    _case(
        "entropy-dream", _DREAM, (12, 1), 30, _UNUSED_DREAM, "never",
        [{"rank": "prob"}, {"rank": "margin"}],
        threshold=0.95, rank="entropy",
    ),
    _case(
        "entropy-ends", _MHA, (12, 0), 30, (70,), "middle",
        [{"rank": "prob"}, {"rank": "margin"}, {"early_stop": False}],
        speculative=True, block_length=6, tau_act=0.5, rank="entropy",
    ),
    _case(
        "ratios-equal-to-the-taus", _MHA, (13, 1), 35, _UNUSED, "never",
        [{"tau_add": 0.61}, {"tau_act": 0.81}],
        block_length=5, tau_add=0.6, tau_act=0.8, threshold=0.8,
    ),
    _case(
        "ratios-equal-to-the-taus-dream", _DREAM, (13, 0), 35, _UNUSED_DREAM, "never",
        [{"tau_add": 0.301}, {"tau_act": 0.701}],
        block_length=10, tau_add=0.3, tau_act=0.7, threshold=0.8,
    ),
    _case(
        "one-token-prompt", _MHA, (1, 0), 30, (133,), "middle",
        [{"early_stop": False}, {"tau_act": 1.0}],
        speculative=True, tau_act=0.5, threshold=0.8,
    ),
    _case(
        "one-token-prompt-dream", _DREAM, (1, 0), 30, _UNUSED_DREAM, "never",
        [{"tau_act": 1.0}, {"tau_add": 0.5}],
        tau_act=0.5, threshold=0.8,
    ),
    _case("long", _GQA, (40, 0), 50, _UNUSED, "never", [{"tau_act": 0.5}, {"depth": 2}], block_length=16),
    _case(
        "long-dream", _DREAM, (40, 0), 50, _UNUSED_DREAM, "never",
        [{"tau_act": 0.5}, {"depth": 1}],
        block_length=24, threshold=0.8,
    ),
]  # fmt: skip
