"""The oracle of Flash-Cache and Flash-Verify itself: against full forwards, against the same run unrolled into one
dense forward, and against what the two methods promise."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from oracles.flash import (
    SETTINGS,
    Decoder,
    Entry,
    FlashCase,
    FlashRun,
    FlashSettings,
    Pass,
    decode,
    draft_rows,
    empty_memory,
    forward,
    made_up_prompt,
    num_accepted,
    verify_rows,
)
from oracles.golden import tiny_model
from unmask.models.attention import AttentionWeights, DenseContext
from unmask.models.transformer import Transformer

MODELS = ["tiny-llada", "tiny-llada-gqa"]
EVERYTHING = 10_000
PROMPTS = [made_up_prompt(length, seed) for length, seed in ((1, 0), (5, 1), (12, 2), (20, 3), (40, 4))]
exactly = functools.partial(torch.testing.assert_close, atol=1e-9, rtol=1e-9)


def model_of(name: str, dtype: torch.dtype = torch.float64) -> Transformer:
    return tiny_model(name, None, dtype)


@functools.cache
def one_layer() -> Transformer:
    """Random weights, large enough that what a row sees changes its scores much."""
    config = dataclasses.replace(tiny_model("tiny-llada-gqa").config, num_layers=1)
    model = Transformer(config, dtype=torch.float64)
    model.init_weights(0.4, torch.Generator().manual_seed(0))
    return model.eval()


@functools.cache
def run_of(name: str) -> FlashRun:
    case = next(case for case in SETTINGS if case.name == name)
    return decode(model_of(case.model), case.prompt, case.max_tokens, case.settings, case.eos_ids)


@torch.inference_mode()
def full_logits(model: Transformer, canvas: Sequence[int]) -> Tensor:
    context = DenseContext(torch.arange(len(canvas)), rope=model.rope)
    return model.logits(model(torch.tensor([list(canvas)]), context))[0]


def commits(run: FlashRun) -> list[dict[int, int]]:
    return [step.committed for step in run.steps]


def uncached(
    model: Transformer, prompt: Sequence[int], max_tokens: int, window: int, threshold: float, eos_id: int
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
        ended = [n for n in found if found[n] == eos_id]
        if ended:
            canvas = canvas[: min(ended) + 1]
        passes.append({n: found[n] for n in found if n < len(canvas)})
    return canvas, passes


# --- Flash-Cache


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("switches", [{"track": EVERYTHING}, {"track": 0, "full_refresh_every": 1}], ids=str)
def test_recomputing_everything_is_the_uncached_run(name: str, switches: dict[str, int]) -> None:
    model = model_of(name)
    for prompt in PROMPTS:
        for threshold, window in ((0.9, 7), (0.4, 30)):
            settings = FlashSettings(
                threshold=threshold, decode_window=window, refresh_window=EVERYTHING, **switches  # type: ignore[arg-type]
            )  # fmt: skip
            free = decode(model, prompt, 24, settings)
            for eos_id in (318, free.canvas[len(prompt)], free.canvas[len(prompt) + 9]):
                run = decode(model, prompt, 24, settings, [eos_id])
                canvas, passes = uncached(model, prompt, 24, window, threshold, eos_id)
                assert run.canvas == canvas
                assert commits(run) == passes
                assert run.num_passes == len(passes)


@pytest.mark.parametrize("name", MODELS)
def test_tracking_nothing_differs_from_the_uncached_run(name: str) -> None:
    model = model_of(name)
    settings = FlashSettings(threshold=0.7, decode_window=7, refresh_window=7, track=0)
    answers = [(commits(decode(model, p, 24, settings)), uncached(model, p, 24, 7, 0.7, -1)[1]) for p in PROMPTS]
    assert any(mine != full for mine, full in answers)


@pytest.mark.parametrize("case", SETTINGS, ids=lambda case: case.name)
def test_each_pass_recomputes_the_windows_and_the_tracked(case: FlashCase) -> None:
    s, run = case.settings, run_of(case.name)
    decided, end = set(range(len(case.prompt))), len(case.prompt) + case.max_tokens
    for number, step in enumerate(run.steps):
        undecided = [n for n in range(end) if n not in decided]
        assert step.window == undecided[: s.decode_window]
        if number == 0 or (s.full_refresh_every and number % s.full_refresh_every == 0):
            assert step.rows == set(range(end))
        else:
            last = run.steps[number - 1]
            assert step.rows == step.tracked | set(undecided[: max(s.decode_window, s.refresh_window)])
            assert set(last.committed) <= step.tracked <= decided
            assert len(step.tracked) == min(len(decided), max(s.track, len(last.committed)))
            chosen, others = step.tracked - set(last.committed), decided - step.tracked
            if chosen and others:
                assert min(last.mass[n] for n in chosen) >= max(last.mass[n] for n in others)
        end = step.end
        decided = {n for n in decided | set(step.committed) if n < end}
    assert decided == set(range(end))


def test_a_budget_smaller_than_the_commits_tracks_them_all() -> None:
    run = run_of("cache-commits-beyond-budget")
    assert any(len(step.tracked) > 2 for step in run.steps[1:])
    assert any(len(step.tracked) == 2 for step in run.steps[1:])


class Looking(DenseContext):
    """Keeps the queries and keys of every layer."""

    def __init__(self, pos: Tensor, model: Transformer) -> None:
        super().__init__(pos, rope=model.rope)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def project(self, layer: int, hidden: Tensor, weights: AttentionWeights) -> Tensor:
        q = super().project(layer, hidden, weights)
        assert self._kv is not None
        self.seen.append((q[0], self._kv[0][0]))
        return q


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("rows", ["decode", "refresh"])
def test_mass_is_the_mean_look_of_the_masked_rows(name: str, softmax: bool, rows: str) -> None:
    model, prompt = model_of(name), made_up_prompt(11, 3)
    settings = FlashSettings(decode_window=5, refresh_window=9, score_layers=1, softmax_mass=softmax, mass_rows=rows)
    decoder = Decoder(model, prompt, 20, settings)
    canvas = list(decoder.tokens)
    decoder.step()
    context = Looking(torch.arange(len(canvas)), model)
    with torch.inference_mode():
        model(torch.tensor([canvas]), context)
    queries = range(11, 11 + (5 if rows == "decode" else 9))
    expected = torch.zeros(len(canvas), dtype=torch.float64)
    for q, k in context.seen[1:]:
        shared = q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            for n in queries:
                raw = k[:, head // shared] @ q[n, head]
                look = torch.softmax(raw * q.shape[-1] ** -0.5, 0) if softmax else raw
                expected += look / (q.shape[1] * len(queries))
    mass = decoder.out.steps[0].mass
    found = torch.tensor([mass[n] for n in range(len(canvas))], dtype=torch.float64)
    exactly(found, expected)


def test_mass_without_a_counted_layer_tracks_from_the_left() -> None:
    run = decode(model_of("tiny-llada"), PROMPTS[3], 16, FlashSettings(decode_window=4, track=5, score_layers=3))
    assert set(run.steps[0].mass.values()) == {0.0}
    assert run.steps[1].tracked == {*run.steps[0].committed, *range(5 - len(run.steps[0].committed))}


# --- both: a run is one dense forward in which every row is a version of its position


@torch.inference_mode()
def unrolled(model: Transformer, passes: Sequence[Pass]) -> Tensor:
    """Logits of all rows of all passes from a single forward without memory."""
    rows = [row for one in passes for row in one.rows]
    mask = torch.zeros(len(rows), len(rows), dtype=torch.bool)
    version: dict[Entry, int] = {}
    start = 0
    for one in passes:
        version.update((row.writes, start + n) for n, row in enumerate(one.rows))
        for n, row in enumerate(one.rows):
            mask[start + n, [version[entry] for entry in row.sees]] = True
        start += len(one.rows)
    context = DenseContext(torch.tensor([row.position for row in rows]), mask=mask, rope=model.rope)
    return model.logits(model(torch.tensor([[row.token for row in rows]]), context))[0]


@pytest.mark.parametrize("case", SETTINGS, ids=lambda case: case.name)
def test_memory_is_what_an_unrolled_forward_computes(case: FlashCase) -> None:
    passes = [one for step in run_of(case.name).steps for one in step.passes][:12]
    mine = torch.stack([logits for one in passes for logits in one.logits])
    exactly(unrolled(model_of(case.model), passes), mine)


def test_nothing_of_a_verification_stays_in_memory() -> None:
    decoder = Decoder(model_of("tiny-llada"), PROMPTS[2], 24, FlashSettings(verify=True))
    before = []
    while decoder.undecided:
        decoder.step()
        assert all({kind for kind, _ in layer} == {"canvas"} for layer in decoder.memory)
        before.append(decoder.out.steps[-1].num_passes)
    assert 2 in before


# --- Flash-Verify


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("accept", ["agreement", "product"])
@pytest.mark.parametrize("isolation", ["strict", "reference"])
def test_a_gamma_above_one_gives_the_unverified_run(name: str, accept: str, isolation: str) -> None:
    for prompt in PROMPTS:
        plain = FlashSettings(threshold=0.6, decode_window=8, refresh_window=12, track=6)
        strict = dataclasses.replace(plain, verify=True, gamma=1.01, accept=accept, isolation=isolation, search=4)
        without = decode(model_of(name), prompt, 24, plain, [93])
        with_it = decode(model_of(name), prompt, 24, strict, [93])
        assert commits(without) == commits(with_it)
        assert [step.rows for step in without.steps] == [step.rows for step in with_it.steps]
        assert not any(step.accepted for step in with_it.steps)
        assert with_it.num_passes == len(with_it.steps) + sum(bool(step.searched) for step in with_it.steps)
        assert without.canvas == with_it.canvas


def situation(model: Transformer) -> tuple[list[int], int, list[int], list[int], list[int]]:
    """Canvas, number of prompt positions, just committed positions, searched positions and their drafts."""
    prompt = made_up_prompt(9, 6)
    canvas = [*prompt, *[model.config.mask_token_id] * 12]
    return canvas, len(prompt), [10, 13], [14, 9, 17, 12], [93, 54, 7, 130]


def mask_views(model: Transformer, isolation: str, flipped: int | None = None) -> list[Tensor]:
    """Logits of the mask rows after a draft pass and two commits, with one draft changed."""
    canvas, num_prompt, just, searched, drafts = situation(model)
    memory = empty_memory(model)
    forward(model, memory, draft_rows(canvas, range(len(canvas)), len(canvas)))
    for position in just:
        canvas[position] = 100
    if flipped is not None:
        drafts[flipped] = 200
    context = [*range(num_prompt - 3, num_prompt), *just]
    rows = verify_rows(canvas, len(canvas), context, searched, drafts, isolation, model.config.mask_token_id)
    return forward(model, memory, rows)[0][-len(searched) :]


@pytest.mark.parametrize("name", MODELS)
def test_a_draft_reaches_its_own_mask_row_only_under_reference_isolation(name: str) -> None:
    model = model_of(name)
    assert model.config.num_layers == 3
    strict, reference = mask_views(model, "strict"), mask_views(model, "reference")
    for n in range(4):
        changed = mask_views(model, "strict", n)
        assert all(torch.equal(changed[m], strict[m]) for m in range(n + 1))
        assert not any(torch.equal(changed[m], strict[m]) for m in range(n + 1, 4))
        leaks = (mask_views(model, "reference", n)[n] - reference[n]).abs().max()
        assert (leaks > 1e-3) == (n < 3), "all but the last one leak"


def test_one_layer_does_not_leak() -> None:
    for isolation in ("strict", "reference"):
        plain = mask_views(one_layer(), isolation)
        for n in range(4):
            assert torch.equal(mask_views(one_layer(), isolation, n)[n], plain[n])


@pytest.mark.parametrize("isolation", ["strict", "reference"])
def test_with_one_layer_a_mask_view_is_the_sequential_conditional(isolation: str) -> None:
    model = one_layer()
    canvas, _, just, searched, drafts = situation(model)
    for position in just:
        canvas[position] = 100
    views = mask_views(model, isolation)
    spread = []
    for position, draft, view in zip(searched, drafts, views):
        truth = full_logits(model, canvas)[position]
        exactly(view, truth)
        canvas[position] = draft
        spread.append(truth)
    assert (torch.softmax(spread[0], 0) - torch.softmax(spread[1], 0)).abs().max() > 1e-3


def test_with_more_layers_it_is_not() -> None:
    model = model_of("tiny-llada")
    canvas, _, just, searched, drafts = situation(model)
    for position in just:
        canvas[position] = 100
    canvas[searched[0]] = drafts[0]
    truth = full_logits(model, canvas)[searched[1]]
    assert all((mask_views(model, kind)[1] - truth).abs().max() > 1e-3 for kind in ("strict", "reference"))


@pytest.mark.parametrize("isolation", ["strict", "reference"])
def test_who_sees_what(isolation: str) -> None:
    other = "mask" if isolation == "reference" else "canvas"
    rows = verify_rows([5, 6, 0, 0, 0], 5, [1], [4, 2], [8, 9], isolation, 0)
    seen = {row.writes: {position: kind for kind, position in row.sees} for row in rows}
    fixed = {0: "canvas", 1: "context", 3: "canvas"}
    assert seen == {
        ("context", 1): {**fixed, 4: other, 2: other},
        ("draft", 4): {**fixed, 4: "draft", 2: other},
        ("draft", 2): {**fixed, 4: "draft", 2: "draft"},
        ("mask", 4): {**fixed, 4: "mask", 2: other},
        ("mask", 2): {**fixed, 4: "draft", 2: "mask"},
    }
    assert [(row.token, row.position) for row in rows] == [(6, 1), (8, 4), (9, 2), (0, 4), (0, 2)]


@pytest.mark.parametrize("case", SETTINGS, ids=lambda case: case.name)
def test_each_row_sees_each_visible_position_once(case: FlashCase) -> None:
    end = len(case.prompt) + case.max_tokens
    for step in run_of(case.name).steps:
        for row in step.passes[0].rows:
            assert sorted(position for _, position in row.sees) == list(range(end))
        for second in step.passes[1:]:
            (visible,) = {len(row.sees) for row in second.rows}
            assert step.end <= visible <= end
            for row in second.rows:
                assert sorted(position for _, position in row.sees) == list(range(visible))
        end = step.end


@pytest.mark.parametrize("case", [case for case in SETTINGS if case.settings.verify], ids=lambda case: case.name)
def test_the_search_and_its_context(case: FlashCase) -> None:
    s, run = case.settings, run_of(case.name)
    decided, before = set(range(len(case.prompt))), set[int]()
    for number, step in enumerate(run.steps):
        scores = {
            row.position: float(torch.softmax(logits.float(), -1)[token])
            for row, logits in zip(step.passes[0].rows, step.passes[0].logits)
            for token in [int(logits[:-1].argmax())]  # MASK is the last id
        }
        best = max(step.window, key=lambda n: (scores[n], -n))
        now = [n for n in step.window if n == best or scores[n] >= s.threshold]
        if len(step.passes) == 1:
            assert not step.searched
            assert not step.accepted
        else:
            end = len(step.passes[1].rows[0].sees)
            now = [n for n in now if n < end]
            live = [n for n in sorted(step.window, key=lambda n: (-scores[n], n)) if n not in now and n < end]
            assert step.searched == live[: s.search]
            assert step.accepted == step.searched[: len(step.accepted)]
            room = max(0, s.verify_rows - 2 * len(step.searched))
            kinds = [set(now), {n for n in before if n < end}]
            rest = {n for n in decided if n < end} - kinds[0] - kinds[1]
            assert len(step.context) == min(room, len(rest | kinds[0] | kinds[1])), "fewer if fewer are decided"
            if step.context & kinds[1]:
                assert kinds[0] <= step.context
            if step.context & rest:
                assert kinds[0] | kinds[1] <= step.context
            out = rest - step.context
            if number == 0:
                assert not out or max(out) < min(step.context & rest, default=EVERYTHING)
            elif step.context & rest and out:
                mass = run.steps[number - 1].mass
                assert min(mass[n] for n in step.context & rest) >= max(mass[n] for n in out)
        before = set(step.committed)
        decided = {n for n in decided | before if n < step.end}


def test_a_prompt_shorter_than_the_context() -> None:
    step = run_of("verify-short-prompt").steps[0]
    assert len(step.context) < 32 - 2 * len(step.searched)
    assert step.context == {0, *step.committed} - set(step.accepted)


def test_acceptance_takes_a_prefix() -> None:
    each = FlashSettings(gamma=0.8, accept="agreement")
    product = FlashSettings(gamma=0.5, accept="product")
    assert num_accepted([0.9, 0.8, 0.79, 0.99], [True] * 4, each) == 2
    assert num_accepted([0.9, 0.9, 0.9], [True, False, True], each) == 1
    assert num_accepted([0.7, 0.99], [True, True], each) == 0
    assert num_accepted([0.9, 0.6, 0.9, 1.0], [True] * 4, product) == 2
    assert num_accepted([0.9, 0.6], [False, False], product) == 2
    assert num_accepted([], [], product) == 0


# --- what every run promises


def test_every_run_ends_in_time_and_without_mask() -> None:
    """Many short runs, and the rarer events do happen among them."""
    events = dict.fromkeys(("first", "last", "none", "accepted", "two in a step", "gone", "window past the end"), 0)
    generator = torch.Generator().manual_seed(1)
    for number in range(160):
        model = model_of(MODELS[number % 2])
        mask = model.config.mask_token_id
        draw = torch.randint(0, 300, (20,), generator=generator).tolist()
        prompt, max_tokens = draw[2 : 3 + draw[0] % 16], 1 + draw[1] % 20
        settings = FlashSettings(
            threshold=(0.3, 0.6, 0.9)[number % 3],
            decode_window=1 + draw[2] % 24,
            refresh_window=1 + draw[3] % 24,
            track=draw[4] % 12,
            verify=number % 4 > 0,
            gamma=(0.2, 0.5)[draw[5] % 2],
            accept=("agreement", "product")[draw[6] % 2],
            isolation=("strict", "reference")[draw[7] % 2],
            search=draw[8] % 7,
            verify_rows=draw[9] % 24,
        )
        free = decode(model, prompt, max_tokens, settings)
        eos_id = free.canvas[len(prompt) + draw[10] % max_tokens]
        for run in (free, decode(model, prompt, max_tokens, settings, [eos_id])):
            eos_ids = set() if run is free else {eos_id}
            answer = run.canvas[len(prompt) :]
            assert run.canvas[: len(prompt)] == prompt
            assert mask not in answer
            assert 1 <= len(run.steps) <= max_tokens
            assert all(step.committed or step.end < len(prompt) + max_tokens for step in run.steps)
            assert not eos_ids & set(answer[:-1])
            assert run.token_ids == (answer[:-1] if run.finish_reason == "stop" else answer)
            assert (run.finish_reason == "stop") == (answer[-1] in eos_ids)
            assert run.finish_reason == "stop" or len(answer) == max_tokens
            final: dict[int, int] = {}
            for step in run.steps:
                assert not set(final) & set(step.committed)
                final |= step.committed
                ended = [n for n, token in zip(step.searched, step.drafts) if token in eos_ids and n in step.accepted]
                events["accepted"] += bool(ended)
                events["two in a step"] += len(ended) > 1
                events["gone"] += any(n >= step.end for n in step.accepted)
                events["window past the end"] += len(step.window) < settings.decode_window
            assert {n: final[n] for n in final if n < len(run.canvas)} == dict(enumerate(answer, len(prompt)))
            events["first"] += run.finish_reason == "stop" and len(answer) == 1
            events["last"] += run.finish_reason == "stop" and len(answer) == max_tokens
            events["none"] += run.finish_reason == "length"
    assert all(events.values()), events


def test_end_of_text_in_the_prompt_means_nothing() -> None:
    prompt = [93, 5, 93]
    run = decode(model_of("tiny-llada"), prompt, 8, FlashSettings(), [93])
    assert run.canvas[:3] == prompt
    assert len(run.canvas) > 3


@pytest.mark.parametrize("case", SETTINGS, ids=lambda case: case.name)
def test_the_named_settings(case: FlashCase) -> None:
    """Each ends where it says, no decision is so close that rounding could turn it, and its switches matter."""
    run = run_of(case.name)
    length = len(run.canvas) - len(case.prompt)
    assert case.ends == ("never" if run.finish_reason == "length" else "start" if length == 1 else "middle")
    assert length < case.max_tokens or case.ends == "never"
    assert min(run.margin, run.mass_margin) > 1e-4
    assert not case.settings.verify or any(step.accepted for step in run.steps)
    for change in case.matters:
        settings = dataclasses.replace(case.settings, **change)  # type: ignore[arg-type]
        other = decode(model_of(case.model), case.prompt, case.max_tokens, settings, case.eos_ids)
        assert commits(other) != commits(run), change


@pytest.mark.parametrize("case", SETTINGS, ids=lambda case: case.name)
def test_single_precision_decides_the_same(case: FlashCase) -> None:
    model = model_of(case.model, torch.float32)
    run = decode(model, case.prompt, case.max_tokens, case.settings, case.eos_ids)
    assert commits(run) == commits(run_of(case.name))
    assert [step.rows for step in run.steps] == [step.rows for step in run_of(case.name).steps]


def test_the_names_are_unique() -> None:
    assert len({case.name for case in SETTINGS}) == len(SETTINGS) >= 12
    assert {case.ends for case in SETTINGS} == {"start", "middle", "never"}
