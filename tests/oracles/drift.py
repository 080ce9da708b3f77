"""The drift caches, SPA-Cache and dLLM-Cache, on ONE request in plain Python loops: the oracle that the engine is
compared with.

Written from the published descriptions and what is known of the released code, and from nothing of the engine.
`DriftNetwork` is a network as `oracles.decoding` wants one, a function from a canvas to its logits, that remembers:
`oracles.decoding` decides what is committed, this file only what is computed. Memory is, per layer, five dictionaries
from a position to what it had there when it was last written: `k` (rotated), `v`, `delta` (attention + MLP), `out` (the
layer's output) and `mark` (what drift is measured by). Nothing leaves but what the canvas loses behind its end.

**Passes** s = 0, 1, ... of the request. With every = None nothing is refreshed after the warm-up.

- together (SPA-Cache): s % full_every == 0 or s <= warmup refreshes everything ("full"); else s % answer_every == 0
  the answer ("gen"). Apart (dLLM-Cache): s % full_every == 0 refreshes the prompt, s % answer_every == 0 the answer,
  either alone too ("prompt", "gen"); s <= warmup both. Any other pass is "partial". Pass 0 is always full.

**A pass**, layer by layer, x the layer's input at every position:

1. *Fresh* rows: those that are refreshed. In layer 0 always all of the canvas (`layer0="full"`), or all of the answer
   beside what is refreshed ("gen_only": the prompt's k and v cannot change there); "sparse": it is a layer as any.
2. *Scored* rows: those of the `region` (the answer, or all) that are not fresh; none if the answer is refreshed, none
   in a layer of ratio 0, of which nothing is then written or forgotten.
3. k and v are written: of fresh rows, and of scored ones k and v (`kv="dense"`), v ("values") or neither ("sparse").
4. Marks of fresh and scored rows: the whole v with its bias ("value"), A n ("proxy"; n the normed input, A the first
   `rank` rows of (U S)^T, v's weight^T = U S V^T, no bias), n ("input"), or the attention's output behind its
   projection ("attention": on k and v as step 3 left them). Drift is the cosine of a mark with the one in memory.
5. *Chosen*: the floor(ratio x scored) of smallest cosine, at least 1, the leftmost on a tie. `force_new`: positions
   whose token changed since the last pass come before all others ("first": the number stays), or on top ("union").
6. k and v of the chosen rows are written. Marks in memory become the new ones: of fresh rows, and of all scored ones
   (`store="overwrite_all"`) or only of the chosen ("scatter_selected": drift adds up until a row is computed).
7. Fresh and chosen rows attend to all of [0, end), go through the MLP, and write delta and out.
8. The layer's output is x + delta where a row ran. Elsewhere x + the delta in memory (`reuse="delta"`), or the out in
   memory ("absolute").

The prompt's stream goes through all layers in the same way; it is read by a scored prompt and by the shift.

**Shift** (Dream). Answer position P is predicted by the prompt's last row P - 1. `first_row`: its output "saved" in the
last pass that refreshed the prompt; its "stream" as step 8 leaves it (dLLM-Cache); "live": P - 1 belongs to the
answer, which is a row longer; "own": row P itself between full passes, the bug of SPA-Cache's released code. A region
that holds P - 1 reads the stream.

**Exact savings**: `layer0="gen_only"` (inexact if a prompt is scored), `head="masked"`: only rows that predict an
undecided position have logits, the others are nan.

Choices of our own, where both sources are silent: the answer of rule 5 is what is visible of it, so an end of text
makes it shorter; "first" with more new tokens than places takes the most drifted of them; ratio 0 overrules
`force_new`; a pass that refreshes the answer scores no prompt; of the two deltas of dLLM-Cache only the sum is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from oracles.decoding import Run, family_of
from oracles.decoding import decode as run_decoder
from unmask.config import SamplingParams
from unmask.models.transformer import Layer, Norm, Transformer

# D hidden size, H query heads, Hkv key heads, hd head size, N visible positions, R rows, r rank, P prompt length

_TINY_NORM = 1e-8
_CHOICES = {
    "identifier": ("value", "proxy", "input", "attention"),
    "reuse": ("delta", "absolute"),
    "layer0": ("full", "gen_only", "sparse"),
    "kv": ("dense", "values", "sparse"),
    "store": ("overwrite_all", "scatter_selected"),
    "force_new": ("off", "first", "union"),
    "region": ("answer", "all"),
    "first_row": ("saved", "stream", "live", "own"),
    "head": ("all", "masked"),
}


@dataclass(frozen=True, kw_only=True)
class DriftSettings:
    """The method's switches; the defaults are SPA-Cache's released code without its bugs."""

    identifier: str = "proxy"
    rank: float = 128
    """Of the proxy; up to 1 it is a share of the value's width."""
    ratio: float | tuple[float, ...] = 0.25
    """Share of the scored rows, one for all layers or one each."""
    reuse: str = "delta"
    layer0: str = "full"
    kv: str = "dense"
    store: str = "overwrite_all"
    force_new: str = "off"
    region: str = "answer"
    full_every: int | None = 50
    answer_every: int | None = 7
    together: bool = True
    """Whether `full_every` refreshes the answer too."""
    warmup: int = 0
    first_row: str = "saved"
    head: str = "all"

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            assert getattr(self, name) in allowed, f"{name}: {getattr(self, name)} is none of {allowed}"


NEVER = {"full_every": None, "answer_every": None}
PAPER = {"kv": "sparse", "reuse": "absolute", "layer0": "sparse", "region": "all", **NEVER}
DLLM_CACHE = {"identifier": "value", "kv": "values", "together": False, "first_row": "stream"}
"""What is never refreshed, SPA-Cache as its paper has it, and dLLM-Cache, in changes of the defaults."""


@dataclass
class LayerMemory:
    """What each position had in this layer when it was last written: k and v [Hkv, hd], delta and out [D], mark [*]."""

    k: dict[int, Tensor] = field(default_factory=dict)
    v: dict[int, Tensor] = field(default_factory=dict)
    delta: dict[int, Tensor] = field(default_factory=dict)
    out: dict[int, Tensor] = field(default_factory=dict)
    mark: dict[int, Tensor] = field(default_factory=dict)

    def cut(self, end: int) -> None:
        """Forget everything at or past `end`."""
        for plane in (self.k, self.v, self.delta, self.out, self.mark):
            for position in [one for one in plane if one >= end]:
                del plane[position]


@dataclass
class LayerLog:
    """What one pass did in one layer; positions count from the canvas's start, ascending."""

    fresh: list[int]
    drift: dict[int, float]
    """The cosine of each scored row."""
    chosen: list[int]
    rows: list[int]
    """Fresh and chosen: these went through attention and MLP."""
    wrote_k: list[int]
    wrote_v: list[int]
    gap: float
    """Between the last chosen and the first other cosine."""


@dataclass
class Pass:
    """What one pass did."""

    kind: str
    """"full", "gen", "prompt" or "partial"."""
    new: list[int]
    """Positions whose token changed since the pass before."""
    layers: list[LayerLog] = field(default_factory=list)
    streams: list[list[Tensor]] = field(default_factory=list)
    """[D] of every position, before each layer and after the last."""

    @property
    def num_rows(self) -> float:
        return sum(len(one.rows) for one in self.layers) / len(self.layers)


# --- the network


def _normed(norm: Norm, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight


def _rotated(model: Transformer, x: Tensor, positions: Sequence[int]) -> Tensor:
    """Heads `x` [R, heads, hd]: dimension i turns with dimension i + hd / 2."""
    cos, sin = (table.to(x.dtype)[:, None] for table in model.rope.at(torch.tensor(positions)))
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, low * sin + high * cos), -1)


def value_weight(model: Transformer, number: int) -> Tensor:
    """[Hkv hd, D]"""
    c, layer = model.config, model.layers[number]
    assert isinstance(layer, Layer)
    weight: Tensor = layer.attn.qkv.weight[(c.num_heads + c.num_kv_heads) * c.head_dim :]
    return weight


def singular_proxy(weight: Tensor, rank: float) -> Tensor:
    """[r, D] of the value weight [Hkv hd, D]."""
    width = weight.shape[0]
    num = int(rank) if rank > 1 else max(1, int(rank * width))
    u, s, _ = torch.linalg.svd(weight.double().T, full_matrices=False)
    proxy: Tensor = (u * s).T[:num].to(weight.dtype)
    return proxy


def cosine(a: Tensor, b: Tensor) -> float:
    """1 if nothing changed, to the last bit; as usual a norm below 1e-8 counts as 1e-8."""
    if torch.equal(a, b):
        return 1.0
    norms = a.norm().clamp(min=_TINY_NORM) * b.norm().clamp(min=_TINY_NORM)
    return float((a * b).sum() / norms)


class DriftNetwork:
    """One request's cache. Calling it is a pass: canvas [N] to logits [N, V], before the shift."""

    def __init__(self, model: Transformer, num_prompt: int, settings: DriftSettings) -> None:
        assert num_prompt > 0, "the first answer position needs a row before it"
        self.model, self.settings, self.num_prompt = model, settings, num_prompt
        c = model.config
        self.shift, self.mask_id, self.num_layers = c.logit_shift, c.mask_token_id, c.num_layers
        self.start = num_prompt - (self.shift if settings.first_row == "live" else 0)
        """Where the answer's rows begin."""
        ratio = settings.ratio
        self.ratios = ratio if isinstance(ratio, tuple) else (ratio,) * self.num_layers
        assert len(self.ratios) == self.num_layers
        self.proxies = [singular_proxy(value_weight(model, n), settings.rank) for n in range(self.num_layers)]
        self.memory = [LayerMemory() for _ in range(self.num_layers)]
        self.canvas: list[int] = []
        """Of the pass before."""
        self.saved: Tensor | None = None
        """Output of row P - 1 when the prompt was last refreshed."""
        self.passes: list[Pass] = []

    def refreshes(self, s: int) -> tuple[bool, bool]:
        """Whether pass s refreshes the prompt and the answer."""
        due = [every is not None and s % every == 0 for every in (self.settings.full_every, self.settings.answer_every)]
        if s <= self.settings.warmup or (due[0] and self.settings.together):
            return True, True
        return due[0], due[1]

    @torch.inference_mode()
    def __call__(self, canvas: Sequence[int]) -> Tensor:
        end, s = len(canvas), self.settings
        prompt_due, answer_due = self.refreshes(len(self.passes))
        kind = {(True, True): "full", (False, True): "gen", (True, False): "prompt", (False, False): "partial"}
        changed = [i for i, token in enumerate(canvas) if not self.canvas or token != self.canvas[i]]
        here = Pass(kind[prompt_due, answer_due], changed)
        for layer in self.memory:
            layer.cut(end)
        refreshed = {i for i in range(end) if (answer_due if i >= self.start else prompt_due)}
        x = {i: self.model.embed.weight[token] for i, token in enumerate(canvas)}
        for number in range(self.num_layers):
            here.streams.append(list(x.values()))
            fresh, scored = self._rows(number, end, refreshed, answer_due)
            x, log = self._layer(number, x, fresh, scored, set(changed))
            here.layers.append(log)
        here.streams.append(list(x.values()))
        self.passes.append(here)
        self.canvas = list(canvas)
        if self.shift:
            last = self.num_prompt - 1
            if prompt_due:
                self.saved = x[last]
            elif s.region == "answer" and s.first_row == "saved":
                assert self.saved is not None
                x[last] = self.saved
            elif s.region == "answer" and s.first_row == "own":
                x[last] = x[self.num_prompt]
        logits = F.linear(_normed(self.model.norm, torch.stack(list(x.values()))), self.model.head)
        if s.head == "masked":
            asked = {max(0, i - self.shift) for i, token in enumerate(canvas) if token == self.mask_id}
            logits[[i for i in range(end) if i not in asked]] = math.nan
        return logits

    def _rows(self, number: int, end: int, refreshed: set[int], answer_due: bool) -> tuple[set[int], list[int]]:
        """The fresh and the scored rows of a layer."""
        s = self.settings
        if number == 0 and s.layer0 != "sparse":
            reads_last = self.shift and s.first_row == "stream"
            first = 0 if s.layer0 == "full" else self.num_prompt - 1 if reads_last else self.start
            return refreshed | set(range(first, end)), []
        if answer_due or self.ratios[number] == 0:
            return refreshed, []
        region = range(self.start if s.region == "answer" else 0, end)
        return refreshed, [i for i in region if i not in refreshed]

    def _layer(
        self, number: int, x: dict[int, Tensor], fresh: set[int], scored: list[int], new: set[int]
    ) -> tuple[dict[int, Tensor], LayerLog]:
        s, here, layer = self.settings, self.memory[number], self.model.layers[number]
        assert isinstance(layer, Layer)
        wrote_k = fresh | (set(scored) if s.kv == "dense" else set())
        wrote_v = fresh | (set(scored) if s.kv != "sparse" else set())
        drift: dict[int, float] = {}
        chosen: set[int] = set()
        gap = math.inf
        if seen := sorted(fresh | set(scored)):
            n = _normed(layer.attn_norm, torch.stack([x[i] for i in seen]))
            q, k, v = (dict(zip(seen, one)) for one in self._projections(layer, n, seen))
            here.k.update({i: k[i] for i in wrote_k})
            here.v.update({i: v[i] for i in wrote_v})
            mark = dict(zip(seen, self._marks(number, n, q, v)))
            drift = {i: cosine(mark[i], here.mark[i]) for i in scored}
            chosen, gap = self._choose(self.ratios[number], drift, new)
            here.k.update({i: k[i] for i in chosen})
            here.v.update({i: v[i] for i in chosen})
            overwritten = fresh | (set(scored) if s.store == "overwrite_all" else chosen)
            here.mark.update({i: mark[i] for i in overwritten})
        if rows := sorted(fresh | chosen):
            attended = self._attention(layer, here, {i: q[i] for i in rows})
            middle = torch.stack([x[i] for i in rows]) + attended
            gate, up = F.linear(_normed(layer.mlp_norm, middle), layer.mlp.gate_up.weight).chunk(2, -1)
            here.delta.update(zip(rows, attended + F.linear(F.silu(gate) * up, layer.mlp.down.weight)))
            here.out.update({i: x[i] + here.delta[i] for i in rows})
        out = {i: here.out[i] if i in rows or s.reuse == "absolute" else x[i] + here.delta[i] for i in x}
        written = sorted(wrote_k | chosen), sorted(wrote_v | chosen)
        return out, LayerLog(sorted(fresh), drift, sorted(chosen), rows, *written, gap)

    def _projections(self, layer: Layer, n: Tensor, positions: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k (both rotated) and v [R, heads, hd] of the normed rows `n` [R, D]."""
        c = self.model.config
        heads = F.linear(n, layer.attn.qkv.weight, layer.attn.qkv.bias).unflatten(-1, (-1, c.head_dim))
        q, k, v = heads.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        return _rotated(self.model, q, positions), _rotated(self.model, k, positions), v

    def _attention(self, layer: Layer, here: LayerMemory, q: dict[int, Tensor]) -> Tensor:
        """What each query reads from all that memory holds, behind the output projection [R, D]."""
        per_key = self.model.config.num_heads // self.model.config.num_kv_heads  # neighbouring heads share a key head
        keys = torch.stack([here.k[i] for i in sorted(here.k)], 1).repeat_interleave(per_key, 0)  # [H, N, hd]
        values = torch.stack([here.v[i] for i in sorted(here.k)], 1).repeat_interleave(per_key, 0)
        queries = torch.stack(list(q.values()), 1)  # [H, R, hd]
        weights = torch.softmax(queries @ keys.transpose(1, 2) / math.sqrt(queries.shape[-1]), -1)
        return F.linear((weights @ values).transpose(0, 1).flatten(1), layer.attn.out.weight)

    def _marks(self, number: int, n: Tensor, q: dict[int, Tensor], v: dict[int, Tensor]) -> Iterable[Tensor]:
        kind, layer = self.settings.identifier, self.model.layers[number]
        assert isinstance(layer, Layer)
        if kind == "attention":
            return self._attention(layer, self.memory[number], q)
        if kind == "proxy":
            return n @ self.proxies[number].T
        return n if kind == "input" else [one.flatten() for one in v.values()]

    def _choose(self, ratio: float, drift: dict[int, float], new: set[int]) -> tuple[set[int], float]:
        """The rows that a layer computes of those scored, and how near another was."""
        if not drift:
            return set(), math.inf
        first = new if self.settings.force_new == "first" else set()
        order = sorted(drift, key=lambda i: (i not in first, drift[i], i))
        num = max(1, int(len(order) * ratio))
        chosen = set(order[:num])
        if self.settings.force_new == "union":
            chosen |= new & set(drift)
        same = num < len(order) and (order[num - 1] in first) == (order[num] in first)
        return chosen, drift[order[num]] - drift[order[num - 1]] if same else math.inf


# --- a whole request


@dataclass
class DriftRun:
    """What one request gave: `run` is the decoder's account, `passes` the cache's."""

    run: Run
    passes: list[Pass]
    drift_margin: float
    """Smallest gap of any choice of rows."""

    @property
    def num_rows(self) -> float:
        return sum(one.num_rows for one in self.passes)


def decode(
    model: Transformer,
    prompt: Sequence[int],
    params: SamplingParams,
    settings: DriftSettings,
    *,
    curve: bool = False,
    draw: Callable[[Tensor, int, int], int] | None = None,
) -> DriftRun:
    """The answer to `prompt`; `curve` and `draw` as in `oracles.decoding`."""
    assert params.cfg_scale == 0, "guidance is a second request"
    network = DriftNetwork(model, len(prompt), settings)
    run = run_decoder(network, family_of(model), prompt, params, curve=curve, draw=draw)
    gaps = [layer.gap for one in network.passes for layer in one.layers]
    return DriftRun(run, network.passes, min(gaps))


# --- budgets


CURVES = {
    "LLaDA-8B-Instruct": (32, 0.75, 0.03, 0.25, 0.13),
    "LLaDA-1.5": (32, 0.8, 0.03, 0.25, 0.13),
    "Dream-v0-Instruct-7B": (28, 0.5, 0.05, 0.3, 0.25),
}
"""Number of layers, the peak's place, and the ratio at the start, the peak and the end."""


def _bell(t: float, low: float, at: float, high: float, start: float, peak: float, end: float) -> float:
    """`start` at `low`, `peak` at `at`, `end` at `high`."""
    edge, width = (start, at - low) if t < at else (end, high - at)
    return float(peak * (edge / peak) ** (((t - at) / (width or 1)) ** 2))


def released_curve(num_layers: int, at: float, start: float, peak: float, end: float, least: float) -> list[float]:
    """The ratio of each layer l at t = l / L; the floor is under the left half alone."""
    ts = [number / num_layers for number in range(num_layers)]
    return [max(_bell(t, 0, at, 1, start, peak, end), least if t < at else 0.0) for t in ts]


def budget(name: str, *, most: float | None = None, average: float | None = None, least: float = 1 / 16) -> list[float]:
    """A model's curve scaled to a highest or an average ratio, the average being that of the curve without a floor."""
    num_layers, at, start, peak, end = CURVES[name]
    scale = most / peak if most is not None else 1.0
    if average is not None:
        scale = average * num_layers / sum(released_curve(num_layers, at, start, peak, end, 0.0))
    return released_curve(num_layers, at, scale * start, scale * peak, scale * end, least)


def paper_curve(num_layers: int, at: int, start: float, peak: float, end: float) -> list[float]:
    """The paper's: layers count from 1, and the first, the peak's and the last have exactly the ratios named."""
    return [_bell(number, 1, at, num_layers, start, peak, end) for number in range(1, num_layers + 1)]
