"""Verification in one pass: against plain loops, what its rows see, what reaches a row that judges a draft, and the
settings at which it is no verification. Every promise comes with a control that breaks it.

K drafts, D hidden size, S seats
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.fixed import Case, make_step, result, run
from engine.watched import (
    COMMON_TOKENS,
    MODELS,
    Pass,
    alone,
    both_forms,
    canvas_state,
    changed,
    changed_to,
    column,
    drawn,
    entries_of,
    request,
    tiny,
    trace,
    watch,
    watched_run,
)
from models.checkpoints import random_model as random_checkpoint
from oracles.one_pass import Draft, OnePassRun, OnePassSettings, decode, scored_by, views
from unmask import LLM, SamplingParams
from unmask.bench.step import Kind, check_replay, random_model
from unmask.cache.context import MassSpec
from unmask.cache.policy import CachePolicy, Recompute, Tracked
from unmask.core.rows import spread
from unmask.decoding.frontier import Blocks, Frontier, Whole, Window
from unmask.decoding.one_pass import MAX_DRAFTS, OnePass
from unmask.engine.step import Step
from unmask.errors import ConfigError
from unmask.methods import MAX_ONE_PASS_SEARCH, METHODS, check_weights
from unmask.models.attention import DenseContext
from unmask.models.transformer import Transformer

NETWORKS = (*MODELS, "tiny-dream")
DREAM_TOKENS = (180, 200)  # as COMMON_TOKENS of the others
K = 5
EVIDENCE, PROBES = 0, K - 1  # scratch columns; the first probe row is that of the second draft


def windowed(each: Case, **more: Any) -> Case:
    return changed_to(each, **{"window": 9, "gamma": 0.3} | more)


def one_pass_step(model: Transformer, cases: Sequence[Case], num_drafts: int = K, **more: Any) -> Step:
    members: dict[str, Any] = {"frontier": Window(), "drafter": OnePass(num_drafts, shift=model.config.logit_shift)}
    return make_step(model, cases, **members | more)


def drafter_for(name: str, cls: type[OnePass] = OnePass) -> OnePass:
    return cls(K, shift=tiny(name).config.logit_shift)


def caches(name: str, cached: bool) -> dict[str, Any]:
    """Members for a step with a cache, or without."""
    return {"policy": Tracked(MassSpec(first_layer=1), shift=tiny(name).config.logit_shift)} if cached else {}


with_caches = pytest.mark.parametrize("cached", [False, True], ids=["recompute", "tracked"])


def one_layer(name: str = "tiny-llada") -> Transformer:
    return random_checkpoint(name, **{"num_hidden_layers" if name == "tiny-dream" else "n_layers": 1}).double()


def pending(step: Step, seat: int) -> list[Draft]:
    drafts = zip(step.canvas.pending_pos_SZ[seat].tolist(), step.canvas.pending_token_SZ[seat].tolist())
    return [Draft(pos, token) for pos, token in drafts if pos >= 0]


# --- against plain loops


def settings_of(each: Case) -> OnePassSettings:
    p = each.params
    return OnePassSettings(
        threshold=p.threshold,
        decode_window=p.window,
        drafts=min(p.search, K),
        gamma=p.gamma,
        accept="product" if p.product else "agreement",
    )


@functools.cache
def wanted(name: str, prompt: tuple[int, ...], length: int, settings: OnePassSettings, eos: Any) -> OnePassRun:
    return decode(tiny(name), prompt, length, settings, eos)


def run_of(name: str, each: Case) -> OnePassRun:
    return wanted(name, tuple(each.prompt), each.length, settings_of(each), each.params.eos)


CASES = [
    windowed(request(7, 24, 24, 0)),
    windowed(request(5, 20, 20, 1), gamma=0.15, product=True),
    windowed(request(1, 22, 22, 2, rule={"threshold": 0.6}), window=6, gamma=0.5),
    windowed(request(9, 30, 30, 3, COMMON_TOKENS), window=16, gamma=0.2),
    windowed(request(12, 26, 26, 4, COMMON_TOKENS[1:]), gamma=0.0),
    windowed(request(4, 26, 26, 5, COMMON_TOKENS), gamma=0.0, product=True),
    windowed(request(3, 9, 9, 6), search=1, gamma=0.2),
    windowed(request(6, 18, 18, 7, rule={"threshold": 1.0}), search=3, gamma=0.1),
    windowed(request(8, 16, 16, 8), gamma=2.0),
    windowed(request(2, 3, 3, 9), gamma=0.0),
    windowed(request(0, 12, 12, 10), gamma=0.1),
    windowed(request(1, 26, 26, 11, DREAM_TOKENS), gamma=0.0),
    windowed(request(9, 30, 30, 12, DREAM_TOKENS), window=16, gamma=0.1),
]


@torch.inference_mode()
def check_steps(step: Step, cases: Sequence[Case], runs: Sequence[OnePassRun]) -> None:
    """Every pass of every seat: the drafts it verifies, what is accepted, all commits, the rows, the end."""
    canvas = step.canvas
    for number in range(max(len(each.steps) for each in runs)):
        drafts = [pending(step, seat) for seat in range(len(cases))]
        final_SN = canvas.final_SN.clone()
        step()
        for seat, each in enumerate(runs):
            if number >= len(each.steps):
                assert not column(step.readback, "num_rows")[seat]
                continue
            want, end = each.steps[number], int(canvas.end_S[seat])
            new = (canvas.final_SN[seat] & ~final_SN[seat])[:end].nonzero().flatten().tolist()
            assert drafts[seat] == want.drafts, (seat, number)
            assert int(column(step.readback, "num_accepted")[seat]) == len(want.accepted), (seat, number)
            assert {pos: int(canvas.token_SN[seat, pos]) for pos in new} == want.committed, (seat, number)
            assert (end, int(column(step.readback, "num_rows")[seat])) == (want.end, want.num_rows), (seat, number)
    assert not canvas.active_S.any()
    for seat, each in enumerate(runs):
        assert canvas.token_SN[seat, : canvas.end_S[seat]].tolist() == each.canvas
        assert int(canvas.rows_S[seat]) == each.num_rows
        assert int(canvas.num_forward_S[seat]) == len(each.steps)


@both_forms
@pytest.mark.parametrize("name", NETWORKS)
def test_every_step_is_that_of_the_plain_loops(name: str, fixed: bool) -> None:
    step = one_pass_step(tiny(name), CASES, seats=len(CASES) + 1, fixed=fixed)
    check_steps(step, CASES, [run_of(name, each) for each in CASES])


@pytest.mark.parametrize("names", [MODELS, NETWORKS[-1:]], ids=["own rows", "shifted"])
def test_the_cases_show_what_they_are_for(names: Sequence[str]) -> None:
    runs = [run_of(name, each) for name in names for each in CASES]
    steps = [step for each in runs for step in each.steps]
    assert sum(len(step.accepted) > 1 for step in steps) > 20
    assert any(step.accepted and not step.ruled for step in steps), "nobody was rescued beside an acceptance"
    assert any(step.accepted and step.ruled for step in steps), "the rule commits beside an acceptance"
    assert any(0 < len(step.accepted) < len(step.drafts) for step in steps)
    assert any(step.retold for step in steps), "a refused draft takes its probe's token"
    ends = [(before.end, step) for each in runs for before, step in pairwise(each.steps)]
    assert any(step.accepted and step.end < end and not step.ruled for end, step in ends), "an end of text was a draft"
    assert any(len(step.drafts) == 1 for step in steps)


@drawn
@given(st.data(), st.booleans(), st.sampled_from(NETWORKS))
def test_drawn_requests_follow_the_plain_loops(data: st.DataObject, fixed: bool, name: str) -> None:
    cases = data.draw(st.lists(drawn_requests(), min_size=1, max_size=3))
    check_steps(one_pass_step(tiny(name), cases, fixed=fixed), cases, [run_of(name, each) for each in cases])


@st.composite
def drawn_requests(draw: st.DrawFn) -> Case:
    length = draw(st.integers(1, 20))
    each = request(
        draw(st.integers(0, 12)),
        length,
        length,
        draw(st.integers(0, 9)),
        draw(st.sampled_from([(), COMMON_TOKENS, DREAM_TOKENS])),
        rule={"threshold": draw(st.sampled_from([0.3, 0.6, 0.9]))},
    )
    return windowed(
        each,
        window=draw(st.integers(1, 12)),
        gamma=draw(st.sampled_from([0.0, 0.1, 0.3, 0.8])),
        product=draw(st.booleans()),
        search=draw(st.sampled_from([1, 2, 4, 8])),
    )


class Obliging(OnePass):
    """Takes a draft that its probe does not predict."""

    def _judged(self, canvas: Any, params: Any, view: Any, scores: Any, drafted: Any) -> Any:
        drafted = replace(drafted, token_SW=torch.cat((canvas.pending_token_SZ[:, 1:],) * 2, 1))
        return super()._judged(canvas, params, view, scores, drafted)


class Forgetful(OnePass):
    """Proposes what the canvas predicts, also where a view was asked."""

    def _propose(self, canvas: Any, params: Any, scores: Any, open_SW: Any, judged: Any) -> None:
        nowhere_S1 = torch.full_like(judged.rejected_pos_S1, -1)
        super()._propose(canvas, params, scores, open_SW, replace(judged, rejected_pos_S1=nowhere_S1))


class Blind(OnePass):
    """Probes that see no evidence."""

    def _table(self, device: torch.device) -> Tensor:
        table_XJ = super()._table(device).clone()
        table_XJ[PROBES:, OF_EVIDENCE] = False
        return table_XJ


OF_EVIDENCE, OF_PROBES = slice(-2 * PROBES, -PROBES), slice(-PROBES, None)  # columns of a live list


class Peeking(OnePass):
    """Probes that see their own draft; the last one has no row of its own."""

    def _table(self, device: torch.device) -> Tensor:
        table_XJ = super()._table(device).clone()
        for view in range(PROBES - 1):
            table_XJ[PROBES + view, OF_EVIDENCE][view + 1] = True
            table_XJ[PROBES + view, view + 1] = False
        return table_XJ


class Stale(OnePass):
    """Probes with the canvas's token where an earlier draft stands."""

    def _probes(self, canvas: Any, pos_SZ: Tensor) -> tuple[Tensor, Tensor]:
        pos_SV, _ = super()._probes(canvas, pos_SZ)
        return pos_SV, canvas.token_SN.gather(1, pos_SV)


class Hasty(OnePass):
    """Probes with any draft's token that stands where they do, also a later one's."""

    def _probes(self, canvas: Any, pos_SZ: Tensor) -> tuple[Tensor, Tensor]:
        pos_SV, _ = super()._probes(canvas, pos_SZ)
        here_SVZ = pos_SV[:, :, None] == canvas.pending_pos_SZ[:, None, :]
        draft_SV = torch.where(here_SVZ, canvas.pending_token_SZ[:, None, :], 0).sum(2)
        return pos_SV, torch.where(here_SVZ.any(2), draft_SV, canvas.token_SN.gather(1, pos_SV))


class Unshifted(OnePass):
    """Probes at their drafts' own places."""

    def _probes(self, canvas: Any, pos_SZ: Tensor) -> tuple[Tensor, Tensor]:
        return pos_SZ[:, 1:], torch.full_like(pos_SZ[:, 1:], canvas.mask_token_id)


class Doubled(OnePass):
    """Rows that see whatever is at their own position, and themselves."""

    def _standing(self, there_SZ: Tensor, pos_SZ: Tensor, pos_SX: Tensor, sees_SXJ: Tensor) -> Tensor:  # noqa: ARG002
        return sees_SXJ


class Absent(OnePass):
    """Probes that never see themselves, also where they are to stand for a draft's place."""

    def _standing(self, there_SZ: Tensor, pos_SZ: Tensor, pos_SX: Tensor, sees_SXJ: Tensor) -> Tensor:
        return super()._standing(torch.zeros_like(there_SZ), pos_SZ, pos_SX, sees_SXJ)


class Shadowing(OnePass):
    """Where probes stand, too, the canvas is set apart: nobody sweeps it there, so it has no mass."""

    def scratch(self, canvas: Any) -> Any:
        scratch = super().scratch(canvas)
        assert scratch is not None
        pos_SV, valid_SV = scratch.pos_SX[:, PROBES:], scratch.valid_SX[:, PROBES:]
        elsewhere_SV = valid_SV & ~scratch.shadow_SN.gather(1, pos_SV)
        num_rows, add = scratch.bits_SXJ.shape[1], torch.cat
        return replace(
            scratch,
            live_SJ=add((scratch.live_SJ, pos_SV), 1),
            canvas_bits_SJ=add((scratch.canvas_bits_SJ, elsewhere_SV), 1),
            bits_SXJ=add((scratch.bits_SXJ, elsewhere_SV[:, None, :].expand(-1, num_rows, -1)), 2),
            shadow_SN=scratch.shadow_SN | spread(elsewhere_SV, pos_SV, elsewhere_SV, canvas.capacity),
        )


class Crossed(OnePass):
    """Drafts of a neighbour."""

    def scratch(self, canvas: Any) -> Any:
        scratch = super().scratch(canvas)
        assert scratch is not None
        return replace(scratch, token_SX=torch.where(scratch.valid_SX.roll(1, 0), scratch.token_SX.roll(1, 0), 0))


WRONG: list[type[OnePass]] = [Obliging, Forgetful, Blind, Peeking]
WRONG_SHIFTED = [Stale, Hasty, Unshifted, Doubled, Absent]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [*(("tiny-llada", wrong) for wrong in WRONG), *(("tiny-dream", x) for x in WRONG + WRONG_SHIFTED)],
)
def test_another_drafter_is_noticed(name: str, wrong: type[OnePass]) -> None:
    """Negative control."""
    step, runs = one_pass_step(tiny(name), CASES, drafter=drafter_for(name, wrong)), [run_of(name, x) for x in CASES]
    with pytest.raises(AssertionError):
        check_steps(step, CASES, runs)


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
def test_the_served_row_follows_the_plain_loops(name: str) -> None:
    """The table's row, through the door, four seats for all."""
    cases = [changed_to(each, search=min(each.params.search, K)) for each in CASES if each.prompt]
    llm = LLM(model=tiny(name), method="one-pass", tokenizer=None, max_num_seqs=4)
    said = [
        SamplingParams(
            max_tokens=each.length,
            threshold=each.params.threshold,
            decode_window=each.params.window,
            search=each.params.search,
            gamma=each.params.gamma,
            accept="product" if each.params.product else "agreement",
            ignore_eos=True,
            stop_token_ids=each.params.eos,
        )
        for each in cases
    ]
    outs = llm.generate([{"prompt_token_ids": each.prompt} for each in cases], said)
    for out, each in zip((one.outputs[0] for one in outs), cases):
        want = run_of(name, each)
        answer = want.canvas[len(each.prompt) :]
        assert out.token_ids == (answer[:-1] if answer[-1] in each.params.eos else answer)
        assert (out.num_forward_passes, out.num_rows) == (len(want.steps), want.num_rows)


# --- what rows see


def drafts_of(each: Pass, seat: int) -> list[Draft]:
    places, tokens = each.pending_pos_SZ[seat].tolist(), each.pending_token_SZ[seat].tolist()
    return [Draft(pos, token) for pos, token in zip(places, tokens) if pos >= 0]


def check_content(each: Pass, seat: int, shift: int = 0) -> int:
    """Every row meets every position once: canvas rows the canvas, evidence and probes their views."""
    tokens = each.token_SN[seat, : each.end_S[seat]].tolist()
    drafts = drafts_of(each, seat)
    seen_by = views(tokens, drafts)
    for row in each.plan.row_SE[seat, : len(tokens)].tolist():
        assert row < 0 or list(each.content(seat, row).values()) == tokens
    evidence = [row for row in each.scratch_rows(seat, EVIDENCE, K - 1) if row >= 0]
    probes = [row for row in each.scratch_rows(seat, PROBES, K - 1) if row >= 0]
    assert len(evidence) == len(probes) == max(len(drafts) - 1, 0)
    for number, (left, right) in enumerate(zip(evidence, probes)):
        for row in (left, right):
            assert list(each.content(seat, row).values()) == seen_by[number + 1], (seat, number)
        assert Draft(int(each.plan.pos_M[left]), int(each.plan.token_M[left])) == drafts[number]
        assert int(each.plan.pos_M[right]) == scored_by(drafts[number + 1].position, shift)
        scratch = set(each.scratch_SX[seat].tolist())
        met = [entry for entry in each.sources(seat, left).values() if entry in scratch]
        assert len(met) == number + 1, "the canvas's own rows elsewhere"
    return len(probes)


def check_contents(name: str, drafter: OnePass, *, cached: bool = False, fixed: bool = True) -> int:
    cases = [changed_to(each, refresh=12, track=4) for each in CASES]
    members = {"frontier": Window(), "drafter": drafter, **caches(name, cached)}
    passes = watched_run(tiny(name), cases, fixed=fixed, **members)
    shift = tiny(name).config.logit_shift
    return sum(check_content(each, seat, shift) for each in passes for seat in range(len(CASES)))


@both_forms
@with_caches
@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
def test_every_row_sees_its_view_and_each_position_once(name: str, cached: bool, fixed: bool) -> None:
    assert check_contents(name, drafter_for(name), cached=cached, fixed=fixed) > 100


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *((name, x) for name in ("tiny-llada", "tiny-dream") for x in (Blind, Peeking)),
        *(("tiny-dream", x) for x in WRONG_SHIFTED),
    ],
)
def test_rows_that_see_something_else_are_noticed(name: str, wrong: type[OnePass]) -> None:
    """Negative control."""
    with pytest.raises(AssertionError):
        check_contents(name, drafter_for(name, wrong))


def test_drafts_stand_in_all_ways_beside_each_other() -> None:
    """Where the row stands that judges a later draft, if logits are shifted: what the tests of them are about."""
    found: Counter[str] = Counter()
    for each in watched_run(tiny("tiny-dream"), CASES, frontier=Window(), drafter=drafter_for("tiny-dream")):
        for seat, case in enumerate(CASES):
            places = [draft.position for draft in drafts_of(each, seat)]
            for number, place in enumerate(places[1:], 1):
                before = scored_by(place, 1)
                if before in places:
                    where = "earlier" if before in places[:number] else "later"
                else:
                    final = bool(each.final_SN[seat, before])
                    where = "prompt" if before < len(case.prompt) else "decided" if final else "mask"
                found[where] += 1
    assert set(found) == {"earlier", "later", "prompt", "decided", "mask"}, found


@torch.inference_mode()
def test_the_first_position_is_scored_by_its_own_row() -> None:
    """Nothing is before it: where it is a draft, two probes may stand there."""
    model = one_layer("tiny-dream")
    step = one_pass_step(model, [windowed(request(0, 8, 8))])
    canvas = step.canvas
    canvas.pending_pos_SZ[0] = torch.tensor([2, 0, 1, 4, 3])
    canvas.pending_token_SZ[0] = torch.tensor([30, 31, 32, 33, 34])
    passes = watch(step)
    step()
    assert check_content(passes[0], 0, 1) == K - 1
    found = [passes[0].hidden_MD[row] for row in passes[0].scratch_rows(0, PROBES, K - 1)]
    wanted_KD = sequential_conditionals(model, passes[0])
    torch.testing.assert_close(torch.stack(found), wanted_KD[1:], atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
def test_no_scratch_row_writes_the_canvas(name: str) -> None:
    for each in watched_run(tiny(name), CASES, frontier=Window(), drafter=drafter_for(name)):
        scratch_M = (each.plan.column_M >= each.capacity) & ~each.is_padding_M
        assert set(each.write_M[scratch_M].tolist()) <= set(each.scratch_SX.flatten().tolist())


def full_pass(
    model: Transformer, *, fixed: bool = True, drafter: OnePass | None = None, seats: int = 1, **more: Any
) -> tuple[Step, Pass]:
    """An early pass that verifies K drafts of each request, some of them side by side."""
    cases = [windowed(request(5, 14, 14, seed, rule={"threshold": 1.0}), gamma=2.0) for seed in range(4, 4 + seats)]
    if drafter is not None:
        more["drafter"] = drafter
    step = one_pass_step(model, cases, fixed=fixed, **more)
    passes = watch(step)
    with torch.inference_mode():
        for _ in range(3):
            step()
    assert all(len(drafts_of(passes[-1], seat)) == K for seat in range(seats))
    return step, passes[-1]


def scratch_tokens(step: Step, each: Pass, changed_draft: int | None, seat: int) -> Tensor:
    """int [X]: what a seat's scratch rows hold in that pass, made anew with another token in a draft."""
    canvas = copy(step.canvas)
    for name in ("token_SN", "final_SN", "end_S", "pending_pos_SZ", "pending_token_SZ"):
        setattr(canvas, name, getattr(each, name).clone())
    canvas.active_S = torch.ones_like(canvas.active_S)
    if changed_draft is not None:
        token_Z = canvas.pending_token_SZ[seat]
        token_Z[changed_draft] = (token_Z[changed_draft] + 7) % 300
    scratch = step.drafter.scratch(canvas)
    assert scratch is not None
    return scratch.token_SX[seat]


@torch.inference_mode()
def again(step: Step, each: Pass, changed_draft: int | None = None, *, of: int = 0, seat: int = 0) -> tuple[Any, ...]:
    """Hidden rows [K, D] that judge a seat's drafts when the pass is made again with another token in a draft, those of
    its canvas, and the K/V that the canvas has then."""
    step.pool.k.copy_(each.before[0])
    step.pool.v.copy_(each.before[1])
    token_M, rows = each.plan.token_M.clone(), each.scratch_rows(of, EVIDENCE, 2 * (K - 1))
    token_M[rows] = scratch_tokens(step, each, changed_draft, of).int()
    assert changed_draft is not None or torch.equal(token_M, each.plan.token_M)
    hidden_MD, _ = step._forward(replace(each.plan, token_M=token_M))
    first = scored_by(drafts_of(each, seat)[0].position, step.shift)
    first = int(each.plan.row_SE[seat, first])
    canvas = each.plan.row_SE[seat, : each.capacity]
    at_N = entries_of(step, seat)
    kv = torch.cat((step.pool.k[:, at_N], step.pool.v[:, at_N]))
    judges = [first, *each.scratch_rows(seat, PROBES, K - 1)]
    return hidden_MD[judges].clone(), hidden_MD[canvas[canvas >= 0]].clone(), kv


@both_forms
@with_caches
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_draft_reaches_no_row_up_to_the_one_that_judges_it(name: str, dtype: str, cached: bool, fixed: bool) -> None:
    """Another token in draft k leaves the rows that judge drafts 0..k bit-equal, and the canvas's rows and its cache;
    it reaches every later one."""
    step, each = full_pass(tiny(name, dtype), fixed=fixed, **caches(name, cached))
    judges, canvas, kv = again(step, each)
    for k in range(K):
        after, canvas_after, kv_after = again(step, each, k)
        assert torch.equal(after[: k + 1], judges[: k + 1]), k
        assert (after[k + 1 :] != judges[k + 1 :]).any(-1).all()
        assert torch.equal(canvas_after, canvas)
        assert torch.equal(kv_after, kv)


class Leaking(OnePass):
    """Probes that see the later places as live probes, not as the canvas has them."""

    def _table(self, device: torch.device) -> Tensor:
        table_XJ = super()._table(device).clone()
        table_XJ[PROBES:, K + PROBES :] |= table_XJ[PROBES:, 1:K]
        table_XJ[PROBES:, :K] = False
        return table_XJ


@pytest.mark.parametrize(("name", "wrong"), [("tiny-llada", Peeking), ("tiny-dream", Peeking), ("tiny-dream", Hasty)])
def test_a_draft_that_reaches_its_judge_is_noticed(name: str, wrong: type[OnePass]) -> None:
    """Negative control."""
    step, each = full_pass(tiny(name), drafter=drafter_for(name, wrong))
    judges, _, _ = again(step, each)
    found = [k for k in range(K) if not torch.equal(again(step, each, k)[0][: k + 1], judges[: k + 1])]
    assert found == ([1, 2, 3] if wrong is Peeking else [4])


def test_live_masks_leak_from_the_second_layer_on() -> None:
    """Negative control: a later probe has seen draft k, and the probe that judges it would see that probe."""
    step, each = full_pass(tiny(), drafter=Leaking(K))
    judges, _, _ = again(step, each)
    for k in range(1, K - 1):
        assert not torch.equal(again(step, each, k)[0][k], judges[k]), k
    step, each = full_pass(one_layer(), drafter=Leaking(K))
    judges, _, _ = again(step, each)
    for k in range(K - 1):
        assert torch.equal(again(step, each, k)[0][: k + 1], judges[: k + 1]), "tokens alone make the first layer's K/V"


@both_forms
@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
def test_no_draft_reaches_another_request(name: str, fixed: bool) -> None:
    step, each = full_pass(tiny(name), fixed=fixed, seats=3)
    for of, seat in ((0, 1), (1, 2), (2, 0)):
        judges = again(step, each, seat=seat)[0]
        for k in range(K - 1):
            assert torch.equal(again(step, each, k, of=of, seat=seat)[0], judges)


@torch.inference_mode()
def sequential_conditionals(model: Transformer, each: Pass) -> Tensor:
    """Hidden rows [K, D] of dense forwards over whole canvases, the drafts before each placed one after the other."""
    tokens = each.token_SN[0, : each.end_S[0]].tolist()
    drafts = drafts_of(each, 0)
    rows = []
    for draft, view in zip(drafts, views(tokens, drafts)):
        context = DenseContext(torch.arange(len(view)), rope=model.rope)
        rows.append(model(torch.tensor([view]), context)[0, scored_by(draft.position, model.config.logit_shift)])
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
def test_on_one_layer_a_probe_is_the_sequential_conditional(name: str) -> None:
    """Where K/V depend on nothing but token and position, a probe says what one token a pass would."""
    step, each = full_pass(one_layer(name))
    wanted_KD = sequential_conditionals(one_layer(name), each)
    torch.testing.assert_close(again(step, each)[0], wanted_KD, atol=1e-10, rtol=0)


@pytest.mark.parametrize("wrong", [Stale, Hasty, Peeking, Doubled])
def test_on_one_layer_another_row_is_another_conditional(wrong: type[OnePass]) -> None:
    """Negative control, where logits are shifted."""
    step, each = full_pass(one_layer("tiny-dream"), drafter=drafter_for("tiny-dream", wrong))
    difference_K = (again(step, each)[0] - sequential_conditionals(one_layer("tiny-dream"), each)).abs().amax(1)
    assert (difference_K > 1e-6).any()


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
def test_on_three_layers_a_probe_is_not_quite_the_sequential_conditional(name: str) -> None:
    """Negative control: the canvas's K/V of deeper layers were made without the drafts. The first draft's row is the
    canvas's own, where nothing is missing."""
    step, each = full_pass(tiny(name))
    difference_K = (again(step, each)[0] - sequential_conditionals(tiny(name), each)).abs().amax(1)
    assert difference_K[0] < 1e-10
    assert (difference_K[1:] > 1e-6).all()


# --- verification that accepts nothing, and one that does

FRONTIERS: dict[str, type[Frontier]] = {"window": Window, "blocks": Blocks, "whole": Whole}


@both_forms
@with_caches
@pytest.mark.parametrize("frontier", FRONTIERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_gamma_above_one_is_no_verification(name: str, frontier: str, cached: bool, fixed: bool) -> None:
    """The rows beside a pass change nothing in it: same tokens, same passes, same pass of every commit."""
    cases = [
        windowed(request(prompt, 16, 8, eos=eos), gamma=2.0, refresh=10, track=5, product=prompt == 7)
        for prompt in (1, 7, 20)
        for eos in ((), DREAM_TOKENS if name == "tiny-dream" else COMMON_TOKENS)
    ]
    members = caches(name, cached) | {"frontier": FRONTIERS[frontier](), "fixed": fixed}
    plain = run(make_step(tiny(name), cases, **members), cases)
    step = one_pass_step(tiny(name), cases, **members)
    told = trace(step)
    assert [result(step, seat, each) for seat, each in enumerate(cases)] == plain
    assert not any(column(each, "num_accepted").any() for each in told)


def test_rows_that_take_mass_are_noticed() -> None:
    """Negative control: decided positions that nobody sweeps are not tracked."""
    cases = [windowed(request(20, 16, 8), gamma=2.0, refresh=10, track=5)]
    members = caches("tiny-dream", True) | {"frontier": Window()}
    plain = run(make_step(tiny("tiny-dream"), cases, **members), cases)
    for drafter, equal in ((OnePass, True), (Shadowing, False)):
        step = one_pass_step(tiny("tiny-dream"), cases, **members, drafter=drafter_for("tiny-dream", drafter))
        assert (run(step, cases) == plain) == equal


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
def test_a_small_gamma_accepts_drafts_and_saves_passes(name: str) -> None:
    """Control of the equality above."""
    each = windowed(request(7, 24, 24), gamma=0.2)
    slow = alone(tiny(name), each, frontier=Window())
    step = one_pass_step(tiny(name), [each])
    told = trace(step)
    assert sum(int(column(readback, "num_accepted")) for readback in told) > 5
    assert len(told) < slow.num_passes - 3
    assert len(told) == result(step, 0, each).num_passes


@both_forms
@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
def test_one_draft_adds_no_row(name: str, fixed: bool) -> None:
    """It is judged by the canvas's own row. Two more rows for each further draft."""
    each = windowed(request(7, 24, 24), gamma=0.2)
    for num_drafts, asked in ((1, 8), (K, 1)):
        step = one_pass_step(tiny(name), [changed_to(each, search=asked)], num_drafts, fixed=fixed)
        passes, told = watch(step), trace(step)
        assert all(int(one.plan.num_rows_S[0]) == int(one.end_S[0]) for one in passes)
        assert sum(int(column(readback, "num_accepted")) for readback in told) > 2
    assert OnePass(1).num_scratch == 0
    for one in watched_run(tiny(name), [each], frontier=Window(), drafter=drafter_for(name), fixed=fixed):
        more = 2 * max(len(drafts_of(one, 0)) - 1, 0)
        assert int(one.plan.num_rows_S[0]) == int(one.end_S[0]) + more


def test_the_number_of_drafts_has_bounds() -> None:
    for wrong in (0, MAX_DRAFTS + 1):
        with pytest.raises(ConfigError, match=f"{wrong} drafts cannot be verified in one pass; use 1 to 22"):
            OnePass(wrong)
    assert MAX_ONE_PASS_SEARCH == MAX_DRAFTS
    for name in ("tiny-llada", "tiny-dream"):
        step = one_pass_step(tiny(name), CASES[:1], MAX_DRAFTS)
        scratch = step.drafter.scratch(step.canvas)
        assert scratch is not None
        assert scratch.live_SJ.shape[1] == 64


# --- alone and in company, in both forms, and standing still


@with_caches
@pytest.mark.parametrize("name", NETWORKS)
def test_alone_in_a_batch_and_in_both_forms(name: str, cached: bool) -> None:
    cases = [changed_to(each, refresh=12, track=4, interval=seat % 3 * 3) for seat, each in enumerate(CASES)]
    warm = {"threshold": 0.6, "temperature": 0.7}
    cases += [windowed(request(6, 16, 16, seed, rule={**warm, "seed": seed}), refresh=12, track=4) for seed in range(3)]
    members = {"frontier": Window(), **caches(name, cached)}
    results = [alone(tiny(name), each, drafter=drafter_for(name), fixed=False, **members) for each in cases]
    for fixed in (False, True):
        assert run(one_pass_step(tiny(name), cases, fixed=fixed, **members), cases) == results
    crossed = drafter_for(name, Crossed)  # negative control
    assert run(one_pass_step(tiny(name), cases, **members | {"drafter": crossed}), cases) != results


SATURATED, UNSATURATED = {"refresh": 200, "track": 200}, {"refresh": 2, "track": 1}


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
@pytest.mark.parametrize(("budgets", "equal"), [(SATURATED, True), (UNSATURATED, False)])
def test_a_cache_that_keeps_nothing_is_none(budgets: dict[str, int], equal: bool, name: str) -> None:
    """Tracked rows that are the whole canvas, beside verification: the same tokens in the same passes; and the control,
    a cache that keeps nearly all."""
    cases = [changed_to(each, **budgets) for each in CASES]
    plain = run(one_pass_step(tiny(name), cases), cases)
    assert (run(one_pass_step(tiny(name), cases, **caches(name, True)), cases) == plain) == equal


@both_forms
@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
def test_a_seat_that_stands_still_keeps_its_drafts(name: str, fixed: bool) -> None:
    step = one_pass_step(tiny(name), CASES[:3], fixed=fixed)
    passes = watch(step)
    with torch.inference_mode():
        step()
        step()
        before = [canvas_state(step.canvas, seat) for seat in range(3)]
        waits_S = torch.tensor([False, True, False])
        step.run(step.hold(step.look(), waits_S))
        step.let_go(waits_S)
    assert (before[1]["pending_pos_SZ"] >= 0).all()
    assert changed(before[1], canvas_state(step.canvas, 1)) == set()
    assert "pending_pos_SZ" in changed(before[0], canvas_state(step.canvas, 0))
    assert not passes[-1].plan.num_rows_S[1]


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
def test_drafts_are_open_and_before_the_end(name: str) -> None:
    """After every pass; also when an end of text was committed in it."""
    step, ended = one_pass_step(tiny(name), CASES), 0
    canvas = step.canvas
    with torch.inference_mode():
        while canvas.active_S.any():
            end_S = canvas.end_S.clone()
            step()
            there_SZ = canvas.pending_pos_SZ >= 0
            open_SZ = canvas.undecided_SN().gather(1, canvas.pending_pos_SZ.clamp(min=0))
            assert (open_SZ | ~there_SZ)[canvas.active_S].all()
            assert ((canvas.pending_pos_SZ < canvas.end_S[:, None]) | ~there_SZ).all()
            assert (there_SZ.int().diff(dim=1) <= 0).all(), "drafts stand at the front"
            ended += int((canvas.end_S < end_S).sum())
    assert ended > 2


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("policy", [Recompute, Tracked])
def test_compiled_parts_are_whole_graphs_and_change_nothing(
    policy: type[CachePolicy], shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The benchmark's scenario: requests end, others take their seats, nothing of the step waits for the device."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    cache = functools.partial(Tracked, shift=shift) if policy is Tracked else policy
    kind = Kind("one-pass", Window, cache, functools.partial(OnePass, shift=shift))
    model = random_model(2, 64, 256, torch.float32, "cpu")
    model.config = replace(model.config, logit_shift=shift)
    found = check_replay(kind, model, 14, capture=False, compiled=True)
    assert found["equal"], found["differences"]
    assert found["drafts_accepted"] > 0
    torch._dynamo.reset()


# --- the table


def test_the_rows_of_the_table() -> None:
    uncached, cached = METHODS["one-pass"], METHODS["one-pass-cache"]
    assert (uncached.frontier, uncached.policy, uncached.drafter) == ("window", "recompute", "one-pass")
    assert (cached.frontier, cached.policy, cached.drafter) == ("window", "tracked", "one-pass")
    for method in (uncached, cached):
        assert {name: method.sampling[name] for name in ("search", "gamma", "accept")} == {
            "search": 8,
            "gamma": 0.8,
            "accept": "agreement",
        }
    assert isinstance(LLM(model=tiny(), method="one-pass", tokenizer=None).engine.axes.drafter, OnePass)


def test_what_it_cannot_verify_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cfg_scale=1\.5 .* 'one-pass' verifies on one"):
        METHODS["one-pass"].complete(SamplingParams(cfg_scale=1.5), {}, {"max_tokens": 8})
    with pytest.raises(ConfigError, match="search=9 is over the 8 that method 'one-pass'"):
        METHODS["one-pass"].complete(SamplingParams(search=9), {}, {"max_tokens": 8})
    with pytest.raises(ConfigError, match="does not read isolation"):
        METHODS["one-pass"].complete(SamplingParams(isolation="strict"), {}, {"max_tokens": 8})
    shifted = tiny("tiny-dream").config
    drafter = LLM(model=tiny("tiny-dream"), method="one-pass-cache", tokenizer=None).engine.axes.drafter
    assert isinstance(drafter, OnePass)
    assert drafter.shift == 1
    own = replace(METHODS["one-pass"], drafter=OnePass(4), sampling={})
    check_weights(own, tiny().config, allow=False)
    with pytest.raises(ConfigError, match=r"'OnePass' is for logits that are shifted by 0.*make it with shift=1"):
        check_weights(own, shifted, allow=False)
    for axes in ({"options": {"max_search": 23}}, {"frontier": "pipeline"}, {"sampling": {"search": 9}}):
        with pytest.raises(ConfigError, match="method 'one-pass'"):
            replace(METHODS["one-pass"], **axes)
