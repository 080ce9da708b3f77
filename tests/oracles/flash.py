"""Flash-Cache and Flash-Verify on ONE request in plain Python loops: the oracle that the engine is compared with.

Written from the published description of the two methods and from nothing of the engine. A pass is a list of rows; a
row is a token, a position, the entry its key and value go to, and the entries it sees. Memory is one dictionary per
layer. Nothing is batched, nothing is masked: what a row does not see is not in its list.

Words: a *step* is a draft pass and, with Flash-Verify, a second pass over the searched positions if there are any.
`end` is the position after the leftmost committed end-of-text token; nothing at or past it exists any more.

Where the description leaves a choice, this is what happens here:

- `refresh_window` counts the decode window; if it is the smaller one, the decode window is recomputed all the same.
- `full_refresh_every=n` recomputes everything in the draft passes of steps 1, n + 1, 2 n + 1, ...: verifications do
  not count.
- What was committed in the last step uses up the tracking budget; positions of equal mass rank from the left. The
  mass is the one that the last draft pass gave; with fewer layers than `score_layers` it is 0 everywhere.
- Softmax mass is the attention weight (scaled, over all that the row sees), with the same sums and means as the
  logits.
- Verification has `verify_rows` rows: two for each searched position, the rest for context; with more searched
  positions than that, none for context. The context takes its kinds in the order just committed, committed in the
  step before, the rest by mass; the first two kinds go from left to right, and what does not fit is left out (it is
  then seen as the draft pass wrote it, a just committed position as MASK).
- In the first step the rest is the prompt, from the right.
- Ranking, threshold and acceptance use fp32 softmax statistics; the running product is of Python floats. MASK is
  never predicted, but counts in the softmax, here and in verification: an arg-max is that of the allowed tokens.
- An acceptance by product does not look at the arg-max. All accepted positions are committed together: an accepted
  end-of-text token does not stop the acceptance of later ones, it only removes those on its right.
- The second pass is run even where `gamma` > 1 makes it useless; it is not run when nothing is left to search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unmask.models.transformer import Layer, Transformer

Entry = tuple[str, int]
"""(kind, position). "canvas" entries stay; "context", "draft" and "mask" entries live for one verification."""
Memory = list[dict[Entry, tuple[Tensor, Tensor]]]
"""For every layer the key (rotated) and the value [Hkv, hd] of each entry."""


@dataclass(frozen=True, kw_only=True)
class FlashSettings:
    """Both methods' switches; `verify=False` is Flash-Cache alone."""

    threshold: float = 0.9
    """Commit every candidate at least this probable, and always the best one."""
    decode_window: int = 16
    """The leftmost undecided positions that may be committed."""
    refresh_window: int = 64
    """The leftmost undecided positions that are recomputed."""
    track: int = 64
    """Decided positions that are recomputed."""
    score_layers: int = 2
    """The first layer (from 0) that counts for the mass."""
    softmax_mass: bool = False
    """Attention weights instead of raw q.k."""
    mass_rows: str = "decode"
    """Whose attention is counted: the rows of the "decode" or of the "refresh" window."""
    full_refresh_every: int | None = None
    """None: everything is recomputed in the first pass only."""
    verify: bool = False
    gamma: float = 0.8
    accept: str = "agreement"
    """"agreement": the arg-max is the draft, and its probability at least gamma; "product": the product of the
    drafts' probabilities so far is at least gamma."""
    isolation: str = "strict"
    """How a row sees a searched position whose draft it may not see: "strict" from the canvas, as the draft pass
    wrote it, "reference" as this pass's mask row."""
    search: int = 8
    """Searched positions at most."""
    verify_rows: int = 32
    """Rows of a verification at most, context included (more only if `search` alone needs them)."""


@dataclass(frozen=True)
class Row:
    """One query."""

    token: int
    position: int
    writes: Entry
    sees: tuple[Entry, ...]


@dataclass
class Pass:
    """Rows of one forward and their raw logits [V]."""

    rows: list[Row]
    logits: list[Tensor]


@dataclass
class Step:
    """What one step did; positions count from the canvas's start."""

    rows: set[int]
    """Recomputed in the draft pass."""
    window: list[int]
    """The candidates."""
    tracked: set[int]
    """The decided ones of `rows`: in a full pass all there are."""
    mass: dict[int, float]
    """Of every visible position, from this draft pass."""
    context: set[int] = field(default_factory=set)
    searched: list[int] = field(default_factory=list)
    """In the order of the search."""
    drafts: list[int] = field(default_factory=list)
    """Their tokens."""
    accepted: list[int] = field(default_factory=list)
    """A prefix of `searched`."""
    committed: dict[int, int] = field(default_factory=dict)
    """Position: token, of both passes, without what the step's own end-of-text tokens removed."""
    end: int = 0
    """After the step."""
    passes: list[Pass] = field(default_factory=list)

    @property
    def num_passes(self) -> int:
        return len(self.passes)


@dataclass
class FlashRun:
    """What one request gave."""

    steps: list[Step] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """The answer, without end of text."""
    canvas: list[int] = field(default_factory=list)
    """[0, end): the prompt, the answer and the end-of-text token, if there is one."""
    finish_reason: str = "length"
    margin: float = math.inf
    """Smallest distance of any decision between probabilities to the other way."""
    mass_margin: float = math.inf
    """The same for the choices by mass."""

    @property
    def num_passes(self) -> int:
        return sum(step.num_passes for step in self.steps)

    @property
    def num_rows(self) -> int:
        return sum(len(one.rows) for step in self.steps for one in step.passes)


# --- the network


def empty_memory(model: Transformer) -> Memory:
    """Nothing written yet."""
    return [{} for _ in range(model.config.num_layers)]


def _rotated(model: Transformer, x: Tensor, positions: Sequence[int]) -> Tensor:
    """Heads `x` [R, heads, hd]: dimension i turns with dimension i + hd / 2."""
    cos, sin = (table.to(x.dtype)[:, None] for table in model.rope.at(torch.tensor(positions)))
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, low * sin + high * cos), -1)


@torch.inference_mode()
def forward(
    model: Transformer,
    memory: Memory,
    rows: Sequence[Row],
    mass_of: Iterable[int] = (),
    settings: FlashSettings | None = None,
) -> tuple[list[Tensor], dict[int, float]]:
    """The rows' logits [V], and the mass of the positions that the rows number `mass_of` see. In every layer all rows
    write before the first one reads."""
    settings = settings or FlashSettings()
    positions = [row.position for row in rows]
    chosen = sorted(mass_of)
    mass: dict[int, float] = {}
    x = model.embed(torch.tensor([row.token for row in rows]))
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        q, k, v = layer.attn.split(layer.attn_norm(x))
        q, k = _rotated(model, q, positions), _rotated(model, k, positions)
        here = memory[number]
        for index, row in enumerate(rows):
            here[row.writes] = (k[index], v[index])
        attended = _attend(q, here, rows)
        if number >= settings.score_layers:
            for index in chosen:
                for entry, value in _looks(q[index], here, rows[index].sees, settings.softmax_mass):
                    mass[entry[1]] = mass.get(entry[1], 0.0) + value / len(chosen)
        x = x + layer.attn.out(attended.flatten(1))
        x = x + layer.mlp(layer.mlp_norm(x))
    for index in chosen:
        for entry in rows[index].sees:
            mass.setdefault(entry[1], 0.0)
    return list(model.logits(model.norm(x))), mass


def _per_head(stored: Sequence[Tensor], num_heads: int) -> Tensor:
    """Entries [Hkv, hd] to [H, n, hd]: neighbouring query heads share a key head."""
    stacked = torch.stack(list(stored), 1)
    return stacked.repeat_interleave(num_heads // stacked.shape[0], 0)


def _attend(q: Tensor, here: dict[Entry, tuple[Tensor, Tensor]], rows: Sequence[Row]) -> Tensor:
    """[R, H, hd]. Rows that see the same entries share the stacked keys."""
    out = torch.zeros_like(q)
    for sees in dict.fromkeys(row.sees for row in rows):
        same = [index for index, row in enumerate(rows) if row.sees == sees]
        keys = _per_head([here[entry][0] for entry in sees], q.shape[1])
        values = _per_head([here[entry][1] for entry in sees], q.shape[1])
        queries = q[same].transpose(0, 1)  # [H, rows, hd]
        weights = torch.softmax(queries @ keys.transpose(1, 2) / math.sqrt(q.shape[-1]), -1)
        out[same] = (weights @ values).transpose(0, 1)
    return out


def _looks(
    q: Tensor, here: dict[Entry, tuple[Tensor, Tensor]], sees: Sequence[Entry], softmax: bool
) -> list[tuple[Entry, float]]:
    """How much the query [H, hd] looks at each entry, the mean over its heads."""
    raw = (_per_head([here[entry][0] for entry in sees], q.shape[0]) @ q[:, :, None])[..., 0]
    if softmax:
        raw = torch.softmax(raw / math.sqrt(q.shape[-1]), -1)
    return list(zip(sees, raw.double().mean(0).tolist()))


# --- the rows of the two passes


def draft_rows(tokens: Sequence[int], positions: Iterable[int], end: int) -> list[Row]:
    """Rows that rewrite `positions` of the canvas and see all of it."""
    canvas = tuple(("canvas", position) for position in range(end))
    return [Row(tokens[position], position, ("canvas", position), canvas) for position in sorted(positions)]


def verify_rows(
    tokens: Sequence[int],
    end: int,
    context: Iterable[int],
    searched: Sequence[int],
    drafts: Sequence[int],
    isolation: str,
    mask_id: int,
) -> list[Row]:
    """Context rows, then draft rows, then mask rows, the last two in the order of the search."""
    live = sorted(context)
    common = [("canvas", position) for position in range(end) if position not in {*live, *searched}]
    common += [("context", position) for position in live]
    undrafted = "mask" if isolation == "reference" else "canvas"

    def sees(num_drafts: int, own_mask: int | None = None) -> tuple[Entry, ...]:
        """The first `num_drafts` searched positions as drafts, all others as MASK."""
        kinds = ["draft" if n < num_drafts else "mask" if n == own_mask else undrafted for n in range(len(searched))]
        return (*common, *zip(kinds, searched))

    rows = [Row(tokens[position], position, ("context", position), sees(0)) for position in live]
    for n, (position, token) in enumerate(zip(searched, drafts, strict=True)):
        rows.append(Row(token, position, ("draft", position), sees(n + 1)))
    for n, position in enumerate(searched):
        rows.append(Row(mask_id, position, ("mask", position), sees(n, own_mask=n)))
    return rows


# --- decisions


@dataclass(frozen=True)
class Prediction:
    """What a position would become."""

    position: int
    token: int
    probability: float
    gap: float
    """To the second best token."""


def predict(logits: Tensor, position: int, mask_id: int) -> Prediction:
    """The most probable token but MASK, the lowest id on a tie."""
    probs = torch.softmax(logits.float(), -1)
    allowed = logits.float().clone()
    allowed[mask_id] = -math.inf
    token = int(torch.nonzero(allowed == allowed.max())[0])
    others = probs.clone()
    others[[mask_id, token]] = 0
    return Prediction(position, token, float(probs[token]), float(probs[token] - others.max()))


def num_accepted(probabilities: Sequence[float], agrees: Sequence[bool], s: FlashSettings) -> int:
    """How long the accepted prefix is, given the drafts' probabilities in the mask rows."""
    count, product = 0, 1.0
    for probability, agreed in zip(probabilities, agrees, strict=True):
        product *= probability
        if s.accept == "agreement":
            passes = agreed and probability >= s.gamma
        else:
            assert s.accept == "product"
            passes = product >= s.gamma
        if not passes:
            break
        count += 1
    return count


def by_mass(positions: Iterable[int], mass: dict[int, float]) -> list[int]:
    """Heaviest first, the leftmost on a tie."""
    return sorted(positions, key=lambda position: (-mass[position], position))


# --- the loop


class Decoder:
    """One request. `step()` until `undecided` is empty, or `run()`."""

    def __init__(
        self,
        model: Transformer,
        prompt: Sequence[int],
        max_tokens: int,
        settings: FlashSettings,
        eos_ids: Iterable[int] = (),
    ) -> None:
        assert model.config.logit_shift == 0, "position p is scored from its own row here"
        assert settings.isolation in ("strict", "reference")
        assert settings.mass_rows in ("decode", "refresh")
        self.model, self.settings, self.eos_ids = model, settings, frozenset(eos_ids)
        self.mask_id = model.config.mask_token_id
        self.num_prompt, self.end = len(prompt), len(prompt) + max_tokens
        self.tokens = [*prompt, *[self.mask_id] * max_tokens]
        self.undecided = set(range(self.num_prompt, self.end))
        self.memory = empty_memory(model)
        self.mass: dict[int, float] | None = None
        self.recent: set[int] = set()
        """Committed in the step before."""
        self.out = FlashRun()

    @property
    def decided(self) -> set[int]:
        return set(range(self.end)) - self.undecided

    def run(self) -> FlashRun:
        while self.undecided:
            self.step()
        answer = self.tokens[self.num_prompt : self.end]
        if answer and answer[-1] in self.eos_ids:
            self.out.finish_reason = "stop"
            answer.pop()
        self.out.token_ids, self.out.canvas = answer, self.tokens[: self.end]
        return self.out

    def step(self) -> None:
        s, previous = self.settings, self.mass
        left = sorted(self.undecided)
        window, refreshed = left[: s.decode_window], left[: max(s.decode_window, s.refresh_window)]
        tracked = self._tracked()
        rows = draft_rows(self.tokens, {*refreshed, *tracked} if tracked is not None else range(self.end), self.end)
        queries = window if s.mass_rows == "decode" else refreshed
        counted = [index for index, row in enumerate(rows) if row.position in queries]
        logits, self.mass = forward(self.model, self.memory, rows, counted, s)
        ran = {row.position for row in rows}
        step = Step(ran, window, ran - self.undecided, self.mass, passes=[Pass(rows, logits)])

        scored = [predict(logits[n], row.position, self.mask_id) for n, row in enumerate(rows)]
        order = sorted(
            (one for one in scored if one.position in window), key=lambda one: (-one.probability, one.position)
        )
        chosen = [one for n, one in enumerate(order) if n == 0 or one.probability >= s.threshold]
        self._rule_margin(order)
        self._commit(step, {one.position: one.token for one in chosen})
        if s.verify:
            rest = [one for one in order if one not in chosen and one.position < self.end]
            self._verify(step, rest[: s.search], rest, previous)

        step.committed = {position: token for position, token in step.committed.items() if position < self.end}
        step.end, self.recent = self.end, set(step.committed)
        self.out.steps.append(step)

    def _tracked(self) -> set[int] | None:
        """Decided positions to recompute; None: this pass recomputes everything."""
        s, number = self.settings, len(self.out.steps)
        if self.mass is None or (s.full_refresh_every is not None and number % s.full_refresh_every == 0):
            return None
        older = by_mass(self.decided - self.recent, self.mass)
        room = max(0, s.track - len(self.recent))
        self._mass_margin(older, room, self.mass)
        return self.recent | set(older[:room])

    def _commit(self, step: Step, found: dict[int, int]) -> None:
        for position, token in found.items():
            self.tokens[position] = token
            step.committed[position] = token
            if token in self.eos_ids:
                self.end = min(self.end, position + 1)
        self.undecided = {one for one in self.undecided - set(found) if one < self.end}

    def _verify(
        self, step: Step, search: list[Prediction], rest: list[Prediction], mass: dict[int, float] | None
    ) -> None:
        s = self.settings
        if not search:
            return
        self._order_margin(rest, len(search))
        step.searched, step.drafts = [one.position for one in search], [one.token for one in search]
        step.context = self._context(step, max(0, s.verify_rows - 2 * len(search)), mass)
        rows = verify_rows(self.tokens, self.end, step.context, step.searched, step.drafts, s.isolation, self.mask_id)
        logits, _ = forward(self.model, self.memory, rows)
        for layer in self.memory:  # nothing of this pass stays
            for row in rows:
                del layer[row.writes]
        step.passes.append(Pass(rows, logits))
        views = logits[-len(search) :]
        probabilities = [float(torch.softmax(view.float(), -1)[one.token]) for view, one in zip(views, search)]
        seconds = [predict(view, one.position, self.mask_id) for view, one in zip(views, search)]
        agrees = [second.token == one.token for second, one in zip(seconds, search)]
        count = num_accepted(probabilities, agrees, s)
        self._accept_margin(probabilities, seconds, agrees, count)
        step.accepted = step.searched[:count]
        self._commit(step, dict(zip(step.accepted, step.drafts)))

    def _context(self, step: Step, room: int, mass: dict[int, float] | None) -> set[int]:
        """Decided positions that verification sees afresh. `mass`: the step before's, None in the first step."""
        now = {position for position in step.committed if position < self.end}
        before = {position for position in self.recent if position < self.end}
        rest = self.decided - now - before
        ranked = sorted(rest, reverse=True) if mass is None else by_mass(rest, mass)
        if mass is not None:
            self._mass_margin(ranked, room - len(now) - len(before), mass)
        return set([*sorted(now), *sorted(before), *ranked][:room])

    # How close each decision was.

    def _close(self, distance: float) -> None:
        self.out.margin = min(self.out.margin, distance)

    def _rule_margin(self, order: list[Prediction]) -> None:
        for n, one in enumerate(order):
            self._close(one.gap)
            if n:
                self._close(abs(one.probability - self.settings.threshold))
        if len(order) > 1 and order[1].probability < self.settings.threshold:
            self._close(order[0].probability - order[1].probability)

    def _order_margin(self, rest: list[Prediction], num_searched: int) -> None:
        for high, low in itertools.pairwise(rest[: num_searched + 1]):
            self._close(high.probability - low.probability)

    def _accept_margin(
        self, probabilities: list[float], seconds: list[Prediction], agrees: list[bool], count: int
    ) -> None:
        product = 1.0
        for n, (probability, second, agreed) in enumerate(zip(probabilities, seconds, agrees)):
            if n > count:
                return
            product *= probability
            if self.settings.accept == "product":
                self._close(abs(product - self.settings.gamma))
                continue
            if n < count or not agreed:
                self._close(second.gap)
            if n < count or agreed:
                self._close(abs(probability - self.settings.gamma))

    def _mass_margin(self, ranked: list[int], cut: int, mass: dict[int, float]) -> None:
        if 0 < cut < len(ranked):
            inside, outside = mass[ranked[cut - 1]], mass[ranked[cut]]
            if not inside == outside == 0:  # without a layer that counts the tie is exact
                self.out.mass_margin = min(self.out.mass_margin, inside - outside)


def decode(
    model: Transformer,
    prompt: Sequence[int],
    max_tokens: int,
    settings: FlashSettings,
    eos_ids: Iterable[int] = (),
) -> FlashRun:
    """The answer to `prompt`."""
    return Decoder(model, prompt, max_tokens, settings, eos_ids).run()


# --- requests that an engine must answer in the same way


@dataclass(frozen=True)
class FlashCase:
    """One named request on a golden checkpoint."""

    name: str
    model: str
    prompt: tuple[int, ...]
    max_tokens: int
    settings: FlashSettings
    eos_ids: tuple[int, ...]
    """In place of the checkpoint's own."""
    ends: str
    """Where the end-of-text token stands in the answer: "start" (its first position), "middle" or "never"."""
    matters: tuple[dict[str, object], ...]
    """Changes of the settings each of which changes what the steps commit: an engine that ignores one is caught."""


def made_up_prompt(length: int, seed: int) -> tuple[int, ...]:
    """Ids below 300, the same everywhere; neither MASK nor end of text of the golden checkpoints."""
    return tuple((37 * n * n + 11 * n + 5 * seed) % 300 for n in range(length))


def _case(
    name: str,
    model: str,
    prompt: tuple[int, int],
    max_tokens: int,
    eos_id: int,
    ends: str,
    matters: Sequence[dict[str, object]],
    **switches: object,
) -> FlashCase:
    settings = FlashSettings(**switches)  # type: ignore[arg-type]
    return FlashCase(name, model, made_up_prompt(*prompt), max_tokens, settings, (eos_id,), ends, tuple(matters))


_MHA, _GQA, _UNUSED = "tiny-llada", "tiny-llada-gqa", 318

SETTINGS = [
    _case(
        "cache-small", _MHA, (12, 0), 24, _UNUSED, "never",
        [{"refresh_window": 6}, {"track": 0}, {"score_layers": 2}],
        decode_window=6, refresh_window=10, track=5, threshold=0.8, score_layers=0,
    ),
    _case(
        "cache-gqa-last-layer", _GQA, (20, 0), 24, 188, "middle",
        [{"track": 3}, {"score_layers": 0}],
        decode_window=8, refresh_window=8, track=6, threshold=0.6,
    ),
    _case(
        "cache-softmax", _GQA, (16, 0), 24, _UNUSED, "never",
        [{"softmax_mass": False}],
        decode_window=8, refresh_window=12, track=6, threshold=0.7, score_layers=1, softmax_mass=True,
    ),
    _case(
        "cache-refresh-rows", _MHA, (9, 10), 30, 93, "start",
        [{"mass_rows": "decode"}],
        decode_window=4, refresh_window=16, track=5, threshold=0.8, score_layers=0, mass_rows="refresh",
    ),
    _case(
        "cache-commits-beyond-budget", _GQA, (1, 4), 28, 285, "middle",
        [{"track": 12}],
        decode_window=12, refresh_window=16, track=2, threshold=0.4, score_layers=1,
    ),
    _case(
        "cache-full-refresh", _MHA, (30, 0), 24, _UNUSED, "never",
        [{"full_refresh_every": None}, {"full_refresh_every": 2}],
        decode_window=8, refresh_window=8, track=3, threshold=0.8, full_refresh_every=3,
    ),
    _case(
        "verify-strict", _GQA, (20, 5), 24, _UNUSED, "never",
        [{"isolation": "reference"}, {"accept": "product"}, {"verify_rows": 8}, {"verify": False}, {"search": 2}],
        decode_window=8, refresh_window=16, track=8, threshold=0.8, score_layers=0,
        verify=True, gamma=0.4, search=4, verify_rows=14,
    ),
    _case(
        "verify-strict-product", _MHA, (14, 2), 24, 21, "middle",
        [{"accept": "agreement"}, {"verify": False}, {"isolation": "reference"}],
        decode_window=8, refresh_window=16, track=8,
        verify=True, gamma=0.2, accept="product", search=4, verify_rows=12,
    ),
    _case(
        "verify-reference-product", _GQA, (24, 1), 30, 144, "middle",
        [{"isolation": "strict"}, {"accept": "agreement"}],
        decode_window=8, refresh_window=12, track=8, score_layers=1,
        verify=True, gamma=0.2, accept="product", isolation="reference", search=4, verify_rows=16,
    ),
    _case(
        "verify-reference-agreement", _MHA, (16, 27), 24, 186, "start",
        [{"isolation": "strict"}, {"verify": False}],
        decode_window=10, refresh_window=10, track=8,
        verify=True, gamma=0.5, isolation="reference", search=6, verify_rows=18,
    ),
    _case(
        "verify-short-prompt", _MHA, (1, 10), 28, _UNUSED, "never",
        [{"isolation": "reference"}, {"verify": False}],
        decode_window=16, refresh_window=20, track=6, threshold=0.7, score_layers=0, softmax_mass=True,
        verify=True, gamma=0.5,
    ),
    _case(
        "verify-no-room-for-context", _GQA, (10, 0), 24, 292, "middle",
        [{"verify_rows": 14}, {"verify": False}],
        decode_window=40, track=4, threshold=0.8, full_refresh_every=4,
        verify=True, gamma=0.4, search=5, verify_rows=10,
    ),
    _case("verify-defaults", _GQA, (40, 1), 40, _UNUSED, "never", [{"verify": False}], verify=True),
    _case(
        "verify-reference-defaults", _MHA, (33, 1), 40, _UNUSED, "never", [{"verify": False}],
        verify=True, accept="product", isolation="reference",
    ),
]  # fmt: skip
