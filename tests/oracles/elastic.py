"""Elastic-Cache on ONE request in plain Python loops: the oracle that the engine is compared with.

Written from the published description of the method and what is known of its released code, and from nothing of the
engine. Memory is, per layer, four dictionaries from a position to what it had there when it last ran: the layer's
input `x`, its query `q`, its key `k` (both rotated) and its value `v`. All of them stay between steps.

**State** beside the memory: which positions are undecided (MASK), which were committed in the step before, and for
every layer its `tracked` positions. `end` is the position after the leftmost committed end-of-text token; nothing at
or past it exists any more: it is dropped from memory and tracking, no row sees it.

**First step.** Every position runs through every layer. No layer is tested.

**Every later step**, one pass, always one:

1. Rows R = the tracked positions of all layers together | what the step before committed | the window, the leftmost
   `window` undecided positions. R is the same in every layer. Undecided positions beyond the window do not run: their
   keys and values stay from when they last ran (the first step, or the last recomputation of that layer).
2. A *reused* layer: the rows R write x, q, k, v; then each attends to all of [0, end): R's keys are of this step, all
   others from memory. So a reused layer costs |R| rows, and it does refresh the cache, at R.
3. The *drift test*, in every reused layer: for each tracked position (union over the layers), its attention weights
   now (its new query on the keys after the writes) against those before (the query in memory on the keys in memory,
   both as they were before this step's writes). Similarity = mean over (tracked position, key) of the cosine between
   the two vectors of H heads. It is the *previous* step's row only if that position ran then; a position that has
   just become the most attended did not run, so its row is rebuilt from the query it last had.
4. Below `gamma` the layer *trips*: it stays as it is, and every layer after it is recomputed. The next layer takes the
   new input at R and, at all other positions, the input that they last had in memory (which may be old: this is an
   approximation); from there on all of [0, end) runs and writes x, q, k, v. Recomputed layers are not tested: one
   trip a step at most. If the last layer trips, nothing is recomputed.
5. Every layer, reused or not, chooses its tracked positions for the next step: the `num_tracked` positions that the
   window's rows attend to most (weights summed over heads and window rows), among those that were decided before this
   step's commits. What this step commits runs in the next step anyway.
6. The window's logits are scored; commits and end of text as below.

Nothing else refreshes: no period, nothing at block boundaries. A block only limits the window.

**Commits.** Threshold: every candidate at least so probable, always the best one. Schedule: `steps` spread over the
blocks, the most probable first. MASK is never predicted but counts in the softmax (fp32). Ties go to the left.

**Where paper and released code differ**, or one is silent: first what happens here, then the other reading, with its
switch, or without one if the house rules decide.

- Cosine: along the heads, mean over keys (code). Along the keys, mean over heads (paper): `cosine="keys"`.
- Tested positions: the union over layers (code). The layer's own (paper): `tested="own"`.
- Tripping layer: kept (both). Recomputed too, which makes an exact setting possible: `tripping="redo"`.
- Undecided positions beyond the window: do not run (both). All run and all count for the tracking, while only the
  window commits (the code's "block caching" switched off): `masks="all"`.
- Just committed positions: run in the next step (code; of the paper we have no clear word). Not: `run_new=False`.
- End of text: the leftmost so far, it may move left, and nothing past it is visible. Code: the leftmost of the first
  step that finds one, for good, and what is past it stays visible.
- At least one commit: the best one, leftmost on a tie. Code: all that tie.
- Without a threshold: `steps` spread over blocks. Code: a constant number a step.
- Blocks: the answer is one (both). Shorter ones: `block_length`.
- What the attention of the tracked positions was "before": rebuilt from memory (code). Paper: the last step's weights,
  which do not exist for a position that did not run in it; no switch.

Choices of our own: a step in which nothing is left to test (the end of text removed it all) has similarity 1. As in
the usual definition of the cosine a norm below 1e-8 counts as 1e-8, which pulls the mean down for keys that hardly
anyone looks at. "Before" is over the keys visible now, so that a request that knows its end is a canvas of that
length. With `tested="own"` the rows R still hold all layers' tracked positions.

With `gamma` > 1, `tripping="redo"` and `run_new` every later step recomputes all rows of all layers: the method is
then the uncached run. With one layer it always is. With `tripping="keep"` and more layers it is not at any gamma,
because positions outside R keep their input of layer 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from oracles.decoding import blocks_of, spread
from oracles.flash import Prediction, made_up_prompt, predict
from unmask.models.transformer import Layer, Norm, Transformer

# D hidden size, H query heads, Hkv key heads, hd head size, N visible positions, R rows, T tested positions

_TINY_NORM = 1e-8


@dataclass(frozen=True, kw_only=True)
class ElasticSettings:
    """The method's switches."""

    gamma: float = 0.9
    """A layer trips below this similarity."""
    window: int = 16
    """The leftmost undecided positions that run and may be committed."""
    num_tracked: int = 1
    """Most attended positions per layer."""
    threshold: float | None = 0.9
    """Commit every candidate at least this probable, and always the best one. None: `steps` rules."""
    steps: int | None = None
    """Fixed schedule, spread over the blocks; a pass commits at most as many as the window holds."""
    block_length: int | None = None
    """The window stays inside the leftmost unfinished block; None: the answer is one block."""
    cosine: str = "heads"
    """Along which axis of the weights: "heads" or "keys"."""
    tested: str = "union"
    """Whose tracked positions a layer tests: of all layers ("union") or its "own"."""
    tripping: str = "keep"
    """The layer that trips: "keep" it as it ran, or "redo" it with the layers after it."""
    masks: str = "window"
    """Undecided positions that run: the "window" or "all" of them (which then all count for the tracking)."""
    run_new: bool = True
    """Whether what the step before committed runs."""


@dataclass
class LayerMemory:
    """What each position had in this layer when it last ran."""

    x: dict[int, Tensor] = field(default_factory=dict)
    """[D]"""
    q: dict[int, Tensor] = field(default_factory=dict)
    """[H, hd], rotated."""
    k: dict[int, Tensor] = field(default_factory=dict)
    """[Hkv, hd], rotated."""
    v: dict[int, Tensor] = field(default_factory=dict)
    """[Hkv, hd]"""
    tracked: list[int] = field(default_factory=list)
    """The most attended positions of the last step, most attended first."""

    def cut(self, end: int) -> None:
        """Forget everything at or past `end`."""
        for plane in (self.x, self.q, self.k, self.v):
            for position in [one for one in plane if one >= end]:
                del plane[position]
        self.tracked = [one for one in self.tracked if one < end]


@dataclass(frozen=True)
class Commit:
    """A token became final; `position` counts from the canvas's start."""

    position: int
    token: int
    probability: float


@dataclass
class LayerLog:
    """What one pass did in one layer."""

    rows: set[int]
    """The positions that went through it; with `tripping="redo"` the tripping layer counts as recomputed."""
    tested: list[int]
    """Empty in a recomputed layer."""
    similarity: float | None
    """None: not tested."""
    mass: dict[int, float]
    """What the window's rows give to each position that could be tracked."""
    tracked: list[int]
    """Chosen for the next step."""


@dataclass
class Step:
    """What one step did; positions count from the canvas's start."""

    window: list[int]
    """The candidates."""
    tracked: set[int]
    """Of all layers, from the step before."""
    layers: list[LayerLog]
    tripped: int | None
    """The layer whose test failed."""
    logits: dict[int, Tensor]
    """[V] of each candidate."""
    commits: list[Commit] = field(default_factory=list)
    """From left to right, without what the step's own end of text removed."""
    end: int = 0
    """After the step."""

    @property
    def committed(self) -> dict[int, int]:
        return {one.position: one.token for one in self.commits}


@dataclass
class ElasticRun:
    """What one request gave."""

    steps: list[Step] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """The answer, without end of text."""
    canvas: list[int] = field(default_factory=list)
    """[0, end): the prompt, the answer and the end-of-text token, if there is one."""
    finish_reason: str = "length"
    margin: float = math.inf
    """Smallest distance of any choice between probabilities to the other way."""
    drift_margin: float = math.inf
    """Smallest distance of a similarity to gamma."""
    track_margin: float = math.inf
    """Smallest distance in mass between a tracked position and one that is not."""

    @property
    def num_passes(self) -> int:
        return len(self.steps)

    @property
    def num_rows(self) -> float:
        """Rows of all layers and passes, per layer."""
        return sum(len(one.rows) for step in self.steps for one in step.layers) / len(self.steps[0].layers)


# --- the network


def _normed(norm: Norm, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight


def _rotated(model: Transformer, x: Tensor, positions: Sequence[int]) -> Tensor:
    """Heads `x` [R, heads, hd]: dimension i turns with dimension i + hd / 2."""
    cos, sin = (table.to(x.dtype)[:, None] for table in model.rope.at(torch.tensor(positions)))
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, low * sin + high * cos), -1)


def _run_projections(model: Transformer, layer: Layer, memory: LayerMemory, positions: Sequence[int]) -> None:
    """Write q, k and v of `positions` from their x."""
    heads, kv_heads, size = model.config.num_heads, model.config.num_kv_heads, model.config.head_dim
    x = torch.stack([memory.x[position] for position in positions])
    flat = F.linear(_normed(layer.attn_norm, x), layer.attn.qkv.weight, layer.attn.qkv.bias)
    q, k, v = flat.unflatten(-1, (-1, size)).split((heads, kv_heads, kv_heads), dim=1)
    q, k = _rotated(model, q, positions), _rotated(model, k, positions)
    for index, position in enumerate(positions):
        memory.q[position], memory.k[position], memory.v[position] = q[index], k[index], v[index]


def _visible(plane: dict[int, Tensor], num_heads: int, end: int) -> Tensor:
    """Keys or values of [0, end) as each query head sees them, [H, N, hd]."""
    stacked = torch.stack([plane[position] for position in range(end)], 1)
    return stacked.repeat_interleave(num_heads // stacked.shape[0], 0)  # neighbouring query heads share a key head


def _weights(here: LayerMemory, positions: Sequence[int], num_heads: int, end: int) -> dict[int, Tensor]:
    """Attention weights [H, N] of the queries that memory has for `positions` over the keys that it has of [0, end)."""
    if not positions:
        return {}
    queries = torch.stack([here.q[position] for position in positions], 1)  # [H, R, hd]
    scores = queries @ _visible(here.k, num_heads, end).transpose(1, 2) / math.sqrt(queries.shape[-1])
    return dict(zip(positions, torch.softmax(scores, -1).unbind(1)))


def _finish(layer: Layer, here: LayerMemory, weights: dict[int, Tensor], end: int) -> dict[int, Tensor]:
    """The layer's output [D] of each position that has attention weights."""
    stacked = torch.stack(list(weights.values()), 1)  # [H, R, N]
    mixed = (stacked @ _visible(here.v, stacked.shape[0], end)).transpose(0, 1).flatten(1)
    x = torch.stack([here.x[position] for position in weights]) + F.linear(mixed, layer.attn.out.weight)
    gate, up = F.linear(_normed(layer.mlp_norm, x), layer.mlp.gate_up.weight).chunk(2, -1)
    return dict(zip(weights, x + F.linear(F.silu(gate) * up, layer.mlp.down.weight)))


def similarity_of(before: Sequence[Tensor], now: Sequence[Tensor], axis: str) -> float:
    """Mean cosine between the weights [H, N] of each tested position before and now; 1 if there is none."""
    found: list[float] = []
    for old, new in zip(before, now, strict=True):
        along = 0 if axis == "heads" else 1
        norms = old.norm(dim=along).clamp(min=_TINY_NORM) * new.norm(dim=along).clamp(min=_TINY_NORM)
        found += ((old * new).sum(along) / norms).tolist()
    return sum(found) / len(found) if found else 1.0


@dataclass(frozen=True)
class Plan:
    """What a pass is about to run."""

    rows: list[int]
    lookers: list[int]
    """The rows whose attention is counted for the tracking."""
    trackable: list[int]
    """The decided positions."""
    everything: bool
    """Whether this is the first pass."""
    end: int


@torch.inference_mode()
def forward(
    model: Transformer, memory: Sequence[LayerMemory], tokens: Sequence[int], plan: Plan, s: ElasticSettings
) -> tuple[dict[int, Tensor], list[LayerLog], int | None]:
    """The output rows [D] (before the final norm) of all positions that ran last, the log of each layer, and the
    layer that tripped. Memory and the layers' tracked positions are brought up to date."""
    end, num_heads = plan.end, model.config.num_heads
    logs: list[LayerLog] = []
    tripped = None
    first_full = 0 if plan.everything else len(memory)  # this layer and those after it are recomputed
    union = sorted({position for one in memory for position in one.tracked})
    current = {position: model.embed.weight[tokens[position]] for position in plan.rows}
    for number, (layer, here) in enumerate(zip(model.layers, memory, strict=True)):
        assert isinstance(layer, Layer)
        here.x.update(current)
        tested: list[int] = []
        similarity = None
        if number < first_full:
            tested = union if s.tested == "union" else sorted(here.tracked)
            before = _weights(here, tested, num_heads, end)
            _run_projections(model, layer, here, sorted(current))
            now = _weights(here, tested, num_heads, end)
            similarity = similarity_of(list(before.values()), list(now.values()), s.cosine)
            if similarity < s.gamma:
                tripped, first_full = number, number if s.tripping == "redo" else number + 1
        if number >= first_full:
            current = {position: here.x[position] for position in range(end)}
            _run_projections(model, layer, here, sorted(current))
        weights = _weights(here, sorted(current), num_heads, end)
        looks = sum(weights[looker].sum(0) for looker in plan.lookers)  # [N]
        assert isinstance(looks, Tensor)
        mass = {position: float(looks[position]) for position in plan.trackable}
        here.tracked = sorted(mass, key=lambda position: (-mass[position], position))[: s.num_tracked]
        logs.append(LayerLog(set(current), tested, similarity, mass, list(here.tracked)))
        current = _finish(layer, here, weights, end)
    return current, logs, tripped


# --- the loop


class Decoder:
    """One request. `step()` until `undecided` is empty, or `run()`."""

    def __init__(
        self,
        model: Transformer,
        prompt: Sequence[int],
        max_tokens: int,
        settings: ElasticSettings,
        eos_ids: Iterable[int] = (),
    ) -> None:
        assert model.config.logit_shift == 0, "position p is scored from its own row here"
        assert settings.cosine in ("heads", "keys")
        assert settings.tested in ("union", "own")
        assert settings.tripping in ("keep", "redo")
        assert settings.masks in ("window", "all")
        assert (settings.threshold is None) != (settings.steps is None), "a threshold or a schedule"
        assert prompt, "without a prompt there is nothing to track"
        self.model, self.settings, self.eos_ids = model, settings, frozenset(eos_ids)
        self.mask_id = model.config.mask_token_id
        self.num_prompt, self.end = len(prompt), len(prompt) + max_tokens
        self.tokens = [*prompt, *[self.mask_id] * max_tokens]
        self.undecided = set(range(self.num_prompt, self.end))
        self.memory = [LayerMemory() for _ in model.layers]
        self.recent: set[int] = set()
        """Committed in the step before."""
        self.blocks = blocks_of(self.num_prompt, self.end, settings.block_length)
        self.quota: list[list[int]] = []
        """What is left of each block's schedule."""
        if settings.steps is not None:
            shares = spread(settings.steps, len(self.blocks))
            self.quota = [spread(len(block), share) for block, share in zip(self.blocks, shares, strict=True)]
            self.quota = [[one for one in plan if one > 0] for plan in self.quota]
            assert max(max(plan) for plan in self.quota) <= settings.window, "the window is smaller than a step's share"
        self.out = ElasticRun()

    def run(self) -> ElasticRun:
        while self.undecided:
            self.step()
        answer = self.tokens[self.num_prompt : self.end]
        if answer and answer[-1] in self.eos_ids:
            self.out.finish_reason = "stop"
            answer.pop()
        self.out.token_ids, self.out.canvas = answer, self.tokens[: self.end]
        return self.out

    def step(self) -> None:
        s = self.settings
        block = next(n for n, one in enumerate(self.blocks) if not self.undecided.isdisjoint(one))
        window = sorted(self.undecided & set(self.blocks[block]))[: s.window]
        lookers = window if s.masks == "window" else sorted(self.undecided)
        tracked = {position for one in self.memory for position in one.tracked}
        rows = tracked | set(lookers) | (self.recent if s.run_new else set())
        everything = not self.out.steps
        plan = Plan(
            rows=list(range(self.end)) if everything else sorted(rows),
            lookers=lookers,
            trackable=sorted(set(range(self.end)) - self.undecided),
            everything=everything,
            end=self.end,
        )
        hidden, logs, tripped = forward(self.model, self.memory, self.tokens, plan, s)
        logits = {position: self._logits(hidden[position]) for position in window}
        step = Step(window, tracked, logs, tripped, logits)
        self._drift_margins(logs)

        order = [predict(logits[position], position, self.mask_id) for position in window]
        order.sort(key=lambda one: (-one.probability, one.position))
        self._commit(step, self._chosen(order, block))
        step.end = self.end
        self.out.steps.append(step)

    @torch.inference_mode()
    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(_normed(self.model.norm, hidden), self.model.head)

    def _chosen(self, order: list[Prediction], block: int) -> list[Prediction]:
        """What the step commits, given the candidates from the most probable one on."""
        s = self.settings
        for one in order:
            self._close(one.gap)
        if s.threshold is None:
            count = min(self.quota[block].pop(0), len(order))
        else:
            count = max(1, sum(one.probability >= s.threshold for one in order))
            for one in order[1:]:
                self._close(abs(one.probability - s.threshold))
        by_rank = s.threshold is None or order[0].probability < s.threshold
        if by_rank and count < len(order):
            self._close(order[count - 1].probability - order[count].probability)
        return order[:count]

    def _commit(self, step: Step, chosen: list[Prediction]) -> None:
        for one in sorted(chosen, key=lambda one: one.position):
            if one.position < self.end:
                self.tokens[one.position] = one.token
                step.commits.append(Commit(one.position, one.token, one.probability))
                if one.token in self.eos_ids:
                    self.end = one.position + 1
        self.recent = set(step.committed)
        self.undecided = {one for one in self.undecided - self.recent if one < self.end}
        for layer in self.memory:
            layer.cut(self.end)

    # How close each decision was.

    def _close(self, distance: float) -> None:
        self.out.margin = min(self.out.margin, distance)

    def _drift_margins(self, logs: list[LayerLog]) -> None:
        for one in logs:
            if one.tested:
                assert one.similarity is not None
                self.out.drift_margin = min(self.out.drift_margin, abs(one.similarity - self.settings.gamma))
            ranked = sorted(one.mass.values(), reverse=True)
            if len(one.tracked) < len(ranked):
                gap = ranked[len(one.tracked) - 1] - ranked[len(one.tracked)]
                self.out.track_margin = min(self.out.track_margin, gap)


def decode(
    model: Transformer,
    prompt: Sequence[int],
    max_tokens: int,
    settings: ElasticSettings,
    eos_ids: Iterable[int] = (),
) -> ElasticRun:
    """The answer to `prompt`."""
    return Decoder(model, prompt, max_tokens, settings, eos_ids).run()


# --- requests that an engine must answer in the same way


@dataclass(frozen=True)
class ElasticCase:
    """One named request on a golden checkpoint."""

    name: str
    model: str
    prompt: tuple[int, ...]
    max_tokens: int
    settings: ElasticSettings
    eos_ids: tuple[int, ...]
    """In place of the checkpoint's own."""
    matters: tuple[dict[str, object], ...]
    """Changes of the settings each of which changes what the steps commit: an engine that ignores one is caught."""


def _case(
    name: str,
    model: str,
    prompt: tuple[int, int],
    max_tokens: int,
    eos_id: int,
    matters: Sequence[dict[str, object]],
    **switches: object,
) -> ElasticCase:
    settings = ElasticSettings(**switches)  # type: ignore[arg-type]
    return ElasticCase(name, model, made_up_prompt(*prompt), max_tokens, settings, (eos_id,), tuple(matters))


_MHA, _GQA, _UNUSED = "tiny-llada", "tiny-llada-gqa", 318

CASES = [
    _case(
        "heads-union", _MHA, (8, 0), 24, _UNUSED,
        [{"gamma": 0.9}, {"cosine": "keys"}, {"tested": "own"}, {"tripping": "redo"}, {"masks": "all"},
         {"num_tracked": 3}, {"window": 5}],
        gamma=0.97, window=8, threshold=0.8,
    ),
    _case(
        "heads-union-gqa", _GQA, (8, 0), 24, _UNUSED,
        [{"gamma": 0.9}, {"cosine": "keys"}, {"tested": "own"}, {"tripping": "redo"}, {"num_tracked": 3}],
        gamma=0.97, window=8, threshold=0.8,
    ),
    _case(
        "keys-own-gqa", _GQA, (16, 1), 24, _UNUSED,
        [{"cosine": "heads"}, {"tested": "union"}, {"num_tracked": 1}, {"tripping": "redo"}],
        gamma=0.95, window=6, threshold=0.6, num_tracked=2, cosine="keys", tested="own",
    ),
    _case(
        "redo", _MHA, (16, 0), 24, _UNUSED,
        [{"tripping": "keep"}, {"gamma": 2.0}, {"gamma": -1.0}],
        gamma=0.93, window=7, threshold=0.7, tripping="redo",
    ),
    _case(
        "all-masks", _MHA, (16, 0), 24, _UNUSED, [{"masks": "window"}, {"gamma": -1.0}],
        gamma=0.95, window=6, threshold=0.8, masks="all",
    ),
    _case(
        "schedule-blocks-gqa", _GQA, (16, 0), 24, _UNUSED, [{"block_length": None}, {"gamma": -1.0}],
        gamma=0.95, window=6, threshold=None, steps=12, block_length=8,
    ),
    _case(
        "end-of-text", _MHA, (16, 0), 24, 223, [{"gamma": 2.0}, {"gamma": -1.0}],
        gamma=0.93, window=7, threshold=0.7, tripping="redo",
    ),
]  # fmt: skip
