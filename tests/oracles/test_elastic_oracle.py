"""The oracle of Elastic-Cache itself: against full forwards, against the same method written with whole-canvas arrays,
and against what the method promises."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from oracles.elastic import (
    CASES,
    Decoder,
    ElasticCase,
    ElasticRun,
    ElasticSettings,
    decode,
    similarity_of,
)
from oracles.golden import tiny_model
from unmask import ops
from unmask.models.attention import DenseContext
from unmask.models.config import ModelConfig
from unmask.models.transformer import Transformer

# D hidden size, H query heads, Hkv key heads, hd head size, N visible positions, R rows, T tested positions

EXACT = {"gamma": 2.0, "tripping": "redo"}
SHAPES = [(2, 4, 4), (3, 4, 2), (4, 4, 1)]
PROMPTS = [
    tuple((7 * n * n + 5 * n + 3 * seed) % 45 for n in range(length)) for length, seed in ((1, 0), (6, 1), (13, 2))
]
_MASK, _UNUSED_EOS = 47, 46
exactly = functools.partial(torch.testing.assert_close, atol=1e-9, rtol=1e-9)


@functools.cache
def network(num_layers: int, num_heads: int, num_kv_heads: int, seed: int = 0) -> Transformer:
    """Random weights, large enough that what a row sees changes its scores much."""
    config = ModelConfig(
        family="llada",
        vocab_size=48,
        hidden_size=24,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        intermediate_size=32,
        rope_theta=1e4,
        norm_eps=1e-5,
        qkv_bias=True,
        tie_embeddings=False,
        max_positions=128,
        logit_shift=0,
        mask_token_id=_MASK,
        eos_token_ids=(_UNUSED_EOS,),
        pad_token_id=None,
        bos_token_id=None,
    )
    model = Transformer(config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    model.init_weights(0.4, generator)
    with torch.no_grad():
        for layer in model.layers:
            layer.attn.qkv.bias.normal_(0, 0.3, generator=generator)  # type: ignore[union-attr, operator]
    return model.eval()


@torch.inference_mode()
def full_logits(model: Transformer, canvas: Sequence[int]) -> Tensor:
    context = DenseContext(torch.arange(len(canvas)), rope=model.rope)
    return model.logits(model(torch.tensor([list(canvas)]), context))[0]


def commits(run: ElasticRun) -> list[dict[int, int]]:
    return [step.committed for step in run.steps]


def uncached(
    model: Transformer, prompt: Sequence[int], max_tokens: int, window: int, threshold: float, eos_ids: Sequence[int]
) -> tuple[list[int], list[dict[int, int]]]:
    """A sliding window with a threshold on full forwards: the canvas, and what each pass committed."""
    mask = model.config.mask_token_id
    canvas, passes = [*prompt, *[mask] * max_tokens], []
    while mask in canvas:
        probs = torch.softmax(full_logits(model, canvas).float(), -1)
        allowed = probs.clone()
        allowed[:, mask] = -1
        candidates = [n for n, token in enumerate(canvas) if token == mask][:window]
        token = {n: int(allowed[n].argmax()) for n in candidates}
        best = max(candidates, key=lambda n: (float(probs[n, token[n]]), -n))
        found = {n: token[n] for n in candidates if n == best or probs[n, token[n]] >= threshold}
        for n in found:
            canvas[n] = found[n]
        ended = [n for n in found if found[n] in eos_ids]
        if ended:
            canvas = canvas[: min(ended) + 1]
        passes.append({n: found[n] for n in found if n < len(canvas)})
    return canvas, passes


class Arrays:
    """The default method on arrays over the whole canvas, with the model's own modules: one layer at a time, a layer
    below `reset` reused, one at or above it recomputed. Scores come out, similarities and tracked positions stay."""

    def __init__(self, model: Transformer, length: int) -> None:
        c, self.model = model.config, model
        size = (c.num_layers, length)
        self.x = torch.zeros(*size, c.hidden_size, dtype=torch.float64)
        self.q = torch.zeros(*size, c.num_heads, c.head_dim, dtype=torch.float64)
        self.k = torch.zeros(*size, c.num_kv_heads, c.head_dim, dtype=torch.float64)
        self.v = torch.zeros_like(self.k)
        self.tracked = torch.zeros(0, dtype=torch.long)
        self.first = True
        self.similarity: list[float] = []
        self.num_rows = 0

    def weights(self, q_RHd: Tensor, k_NHd: Tensor) -> Tensor:
        """[H, R, N]"""
        grouped = k_NHd.repeat_interleave(q_RHd.shape[1] // k_NHd.shape[1], 1)
        return torch.softmax(torch.einsum("rhd,nhd->hrn", q_RHd, grouped) * q_RHd.shape[-1] ** -0.5, -1)

    @torch.inference_mode()
    def step(self, canvas: list[int], new: list[int], window: list[int], s: ElasticSettings) -> Tensor:
        """The window's logits."""
        everywhere = torch.arange(len(canvas))
        fed = everywhere if self.first else torch.tensor(sorted({*self.tracked.tolist(), *new, *window}))
        reset = -1 if self.first else len(self.model.layers)
        rows, stream = fed, self.model.embed(torch.tensor(canvas))[fed]
        decided = torch.tensor([token != _MASK for token in canvas])
        self.similarity, tops = [], []
        for n, layer in enumerate(self.model.layers):
            self.x[n, rows] = stream
            if n == reset:
                rows, stream = everywhere, self.x[n].clone()
            q, k, v = layer.attn.split(layer.attn_norm(stream))  # type: ignore[operator]
            cos, sin = self.model.rope.at(rows)
            q, k = ops.rope(q, cos, sin), ops.rope(k, cos, sin)
            before = self.weights(self.q[n, self.tracked], self.k[n])
            self.q[n, rows], self.k[n, rows], self.v[n, rows] = q, k, v
            attention = self.weights(q, self.k[n])
            if n < reset:
                after = attention[:, torch.isin(rows, self.tracked)]
                self.similarity.append(float(F.cosine_similarity(before, after, dim=0).mean()))
                reset = n + 1 if self.similarity[-1] < s.gamma else reset
            mass = attention[:, torch.isin(rows, torch.tensor(window))].sum((0, 1))
            tops.append(torch.where(decided, mass, -1).topk(s.num_tracked).indices)
            values = self.v[n].repeat_interleave(q.shape[1] // v.shape[1], 1)
            mixed = torch.einsum("hrn,nhd->rhd", attention, values).flatten(1)
            stream = stream + layer.attn.out(mixed)  # type: ignore[union-attr, operator]
            stream = stream + layer.mlp(layer.mlp_norm(stream))  # type: ignore[operator]
            self.num_rows += len(rows)
        self.tracked, self.first = torch.cat(tops).unique(), False
        return self.model.logits(self.model.norm(stream))[torch.isin(rows, torch.tensor(window))]


# --- exact where it must be


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_first_pass_is_a_full_forward(shape: tuple[int, int, int]) -> None:
    model, prompt = network(*shape), PROMPTS[2]
    decoder = Decoder(model, prompt, 12, ElasticSettings(window=5))
    decoder.step()
    logits = full_logits(model, [*prompt, *[_MASK] * 12])
    assert sorted(decoder.out.steps[0].logits) == list(range(13, 18))
    for position, row in decoder.out.steps[0].logits.items():
        exactly(row, logits[position])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("switches", [{}, {"cosine": "keys", "tested": "own"}], ids=str)
def test_recomputing_everything_is_the_uncached_run(shape: tuple[int, int, int], switches: dict[str, str]) -> None:
    model = network(*shape)
    for prompt, window, threshold in zip(PROMPTS, (5, 3, 20), (0.3, 0.2, 0.6)):
        settings = ElasticSettings(window=window, threshold=threshold, **EXACT, **switches)  # type: ignore[arg-type]
        free = decode(model, prompt, 16, settings)
        for eos_id in (_UNUSED_EOS, free.canvas[len(prompt)], free.canvas[len(prompt) + 9]):
            run = decode(model, prompt, 16, settings, [eos_id])
            canvas, passes = uncached(model, prompt, 16, window, threshold, [eos_id])
            assert run.canvas == canvas
            assert commits(run) == passes
            assert [step.tripped for step in run.steps] == [None] + [0] * (len(passes) - 1)
            ends = [len(prompt) + 16] + [step.end for step in run.steps]
            for step, end in zip(run.steps, ends):
                assert all(one.rows == set(range(end)) for one in step.layers)


@pytest.mark.parametrize("gamma", [-1.0, 0.9, 2.0])
@pytest.mark.parametrize("tripping", ["keep", "redo"])
def test_one_layer_is_exact_whatever_is_reused(gamma: float, tripping: str) -> None:
    """Its keys and values depend on the tokens alone, and every changed token runs."""
    model = network(1, 4, 2)
    settings = ElasticSettings(gamma=gamma, window=4, threshold=0.3, tripping=tripping)
    for prompt in PROMPTS:
        canvas, passes = uncached(model, prompt, 16, 4, 0.3, [])
        run = decode(model, prompt, 16, settings)
        assert (run.canvas, commits(run)) == (canvas, passes)


@pytest.mark.parametrize(
    "switches",
    [{"tripping": "keep"}, {"gamma": -1.0}, {"gamma": 0.7}, {"run_new": False}],
    ids=str,
)
def test_anything_less_is_not_the_uncached_run(switches: dict[str, object]) -> None:
    """Negative controls of the exact setting: in more than one layer each of these reuses what has changed."""
    differs = []
    for shape in SHAPES:
        for prompt in PROMPTS[1:]:
            settings = ElasticSettings(window=5, threshold=0.3, **{**EXACT, **switches})  # type: ignore[arg-type]
            model = network(*shape)
            differs.append(commits(decode(model, prompt, 16, settings)) != uncached(model, prompt, 16, 5, 0.3, [])[1])
    assert any(differs)


def test_a_new_token_that_does_not_run_is_not_exact_even_in_one_layer() -> None:
    settings = ElasticSettings(gamma=-1.0, window=4, threshold=0.3, run_new=False)
    model = network(1, 4, 2)
    assert any(commits(decode(model, p, 16, settings)) != uncached(model, p, 16, 4, 0.3, [])[1] for p in PROMPTS)


# --- the same method, written differently


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gamma", [-1.0, 0.8, 0.95, 2.0])
def test_it_equals_the_array_form(shape: tuple[int, int, int], gamma: float) -> None:
    model, prompt = network(*shape), PROMPTS[2]
    settings = ElasticSettings(gamma=gamma, window=5, threshold=0.4, num_tracked=2)
    run = decode(model, prompt, 18, settings)
    arrays, canvas, new = Arrays(model, 31), [*prompt, *[_MASK] * 18], []  # type: ignore[var-annotated]
    for step in run.steps:
        logits = arrays.step(canvas, new, step.window, settings)
        exactly(torch.stack([step.logits[position] for position in step.window]), logits)
        found = [one.similarity for one in step.layers if one.similarity is not None]
        assert found == pytest.approx(arrays.similarity, abs=1e-9)
        assert {position for one in step.layers for position in one.tracked} == set(arrays.tracked.tolist())
        new = sorted(step.committed)
        for position, token in step.committed.items():
            canvas[position] = token
    assert canvas == run.canvas
    assert arrays.num_rows == run.num_rows * shape[0]


# --- what each step promises


def check_steps(run: ElasticRun, s: ElasticSettings, num_prompt: int, length: int) -> None:
    decided, end = set(range(num_prompt)), length
    recent: set[int] = set()
    tracked: list[list[int]] = []
    for number, step in enumerate(run.steps):
        undecided = [n for n in range(end) if n not in decided]
        assert set(step.window) <= set(undecided[: s.window])
        ran = set(undecided if s.masks == "all" else step.window) | step.tracked | (recent if s.run_new else set())
        assert step.tracked == {n for one in tracked for n in one if n < end}
        first_full = 0 if number == 0 else len(step.layers)
        if step.tripped is not None:
            first_full = step.tripped + (s.tripping == "keep")
        for index, layer in enumerate(step.layers):
            assert layer.rows == (set(range(end)) if index >= first_full else ran)
            is_tested = number > 0 and (step.tripped is None or index <= step.tripped)
            assert (layer.similarity is not None) == is_tested
            if layer.similarity is not None:
                assert -1e-9 <= layer.similarity <= 1 + 1e-9
                assert (layer.similarity < s.gamma) == (index == step.tripped)
                own = sorted(n for n in tracked[index] if n < end)
                assert layer.tested == (sorted(step.tracked) if s.tested == "union" else own)
            assert set(layer.mass) == decided
            assert len(layer.tracked) == min(s.num_tracked, len(decided))
            others = decided - set(layer.tracked)
            assert not others or min(layer.mass[n] for n in layer.tracked) >= max(layer.mass[n] for n in others)
        assert step.commits
        assert set(step.committed) <= set(step.window)
        tracked = [layer.tracked for layer in step.layers]
        recent, end = set(step.committed), step.end
        decided = {n for n in decided | recent if n < end}
    assert decided == set(range(end))
    assert run.num_passes <= length - num_prompt


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"gamma": 0.97, "num_tracked": 3},
        {"cosine": "keys", "tested": "own"},
        {"tripping": "redo", "gamma": 0.8},
        {"masks": "all"},
        {"run_new": False},
        {"block_length": 5, "threshold": None, "steps": 9},
    ],
    ids=str,
)
def test_each_pass_runs_what_it_should(switches: dict[str, object]) -> None:
    settings = ElasticSettings(**{"window": 5, "threshold": 0.4, **switches})  # type: ignore[arg-type]
    for shape, prompt in zip(SHAPES, PROMPTS):
        model = network(*shape)
        free = decode(model, prompt, 16, settings)
        check_steps(free, settings, len(prompt), len(prompt) + 16)
        run = decode(model, prompt, 16, settings, [free.token_ids[9]])
        check_steps(run, settings, len(prompt), len(prompt) + 16)


def test_a_stricter_gamma_trips_no_later() -> None:
    """In the second step: until then all gammas have done the same."""
    for shape in SHAPES:
        trips = []
        for gamma in (2.0, 0.99, 0.95, 0.9, 0.8, -1.0):
            decoder = Decoder(network(*shape), PROMPTS[2], 16, ElasticSettings(gamma=gamma, window=5, threshold=0.4))
            decoder.step()
            decoder.step()
            tripped = decoder.out.steps[1].tripped
            trips.append(shape[0] if tripped is None else tripped)
        assert trips == sorted(trips)
        assert trips[0] == 0
        assert trips[-1] == shape[0]


def test_a_schedule_commits_its_quota() -> None:
    settings = ElasticSettings(window=6, threshold=None, steps=7, block_length=8)
    run = decode(network(3, 4, 2), PROMPTS[1], 18, settings)
    assert [len(step.commits) for step in run.steps] == [3, 3, 2, 4, 4, 1, 1]
    assert all(max(step.window) < 6 + 8 for step in run.steps[:3])


def test_end_of_text_shortens_the_canvas() -> None:
    model, prompt = network(3, 4, 2), PROMPTS[2]
    settings = ElasticSettings(window=6, threshold=0.3)
    free = decode(model, prompt, 20, settings)
    eos_id = free.token_ids[7]
    run = decode(model, prompt, 20, settings, [eos_id])
    assert run.finish_reason == "stop"
    assert run.canvas[-1] == eos_id
    assert eos_id not in run.token_ids
    assert len(run.canvas) == len(prompt) + len(run.token_ids) + 1


def test_it_is_deterministic() -> None:
    def log(run: ElasticRun) -> list[object]:
        return [(step.commits, step.tripped, step.layers, step.end) for step in run.steps]

    for shape in SHAPES:
        one, two = (decode(network(*shape), PROMPTS[2], 16, ElasticSettings(window=5, threshold=0.4)) for _ in range(2))
        assert log(one) == log(two)


# --- the similarity


def test_the_cosine_by_hand() -> None:
    before, now = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])  # [H, N]
    assert similarity_of([before], [before], "heads") == pytest.approx(1)
    assert similarity_of([before], [now], "keys") == pytest.approx((1 + 0) / 2)
    assert similarity_of([before], [now], "heads") == pytest.approx((2**-0.5 + 0) / 2)
    assert similarity_of([before, before], [now, before], "keys") == pytest.approx(0.75)
    assert similarity_of([], [], "heads") == 1.0


def test_a_key_that_nobody_looks_at_lowers_the_similarity() -> None:
    row = torch.tensor([[1.0, 1e-12], [1.0, 1e-12]], dtype=torch.float64)
    assert similarity_of([row], [row], "heads") == pytest.approx(0.5, abs=1e-6)
    exactly(F.cosine_similarity(row, row, dim=0).mean().item(), similarity_of([row], [row], "heads"))


# --- the engine's cases


@functools.cache
def run_of(name: str) -> ElasticRun:
    case = next(case for case in CASES if case.name == name)
    return decode(
        tiny_model(case.model, None, torch.float64), case.prompt, case.max_tokens, case.settings, case.eos_ids
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_have_room_for_rounding(case: ElasticCase) -> None:
    run = run_of(case.name)
    assert min(run.margin, run.drift_margin, run.track_margin) > 1e-4
    check_steps(run, case.settings, len(case.prompt), len(case.prompt) + case.max_tokens)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_switch_of_a_case_matters(case: ElasticCase) -> None:
    model = tiny_model(case.model, None, torch.float64)
    for change in case.matters:
        other = dataclasses.replace(case.settings, **change)  # type: ignore[arg-type]
        run = decode(model, case.prompt, case.max_tokens, other, case.eos_ids)
        assert commits(run) != commits(run_of(case.name)), change
