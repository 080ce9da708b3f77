"""What a step promises whatever the numbers, in both of its forms: who sees what, what is written, and that no request,
no host and no replay changes anything. Every promise comes with a control that breaks it.

L layers, S seats, E pool entries, N canvas positions, M rows of a pass, X scratch columns, K searched positions
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.fixed import (
    BlockCausal,
    Blocks,
    Case,
    Dual,
    Nested,
    Pipeline,
    Result,
    Whole,
    make_pool,
    make_step,
    place,
    result,
    run,
)
from engine.watched import (
    COMMON_TOKENS,
    DRAFTS,
    ENDING,
    FORMS,
    KINDS,
    MASKS,
    MODELS,
    NUM_SEARCH,
    ONE_A_PASS,
    PIPELINED,
    TRACKED,
    TWO_SEATS,
    Forgetting,
    Kind,
    Members,
    Pass,
    alone,
    both_forms,
    canvas_state,
    changed,
    changed_to,
    column,
    entries_of,
    fill_scratch,
    first_verification,
    flash,
    isolated,
    kind_of,
    kv_of,
    mixed,
    one_a_pass,
    request,
    tiny,
    trace,
    tracking,
    two_pass,
    verify_passes,
    verifying,
    watch,
    watched_run,
)
from unmask.cache.policy import Prefix, Tracked
from unmask.cache.pool import PAGE_SIZE
from unmask.core.canvas import Canvas
from unmask.decoding.frontier import FrontierView, Window
from unmask.decoding.params import DecodeParams
from unmask.engine.step import READBACK, Budgets, Step
from unmask.models.transformer import Transformer

# --- each row sees each visible position exactly once


@both_forms
@pytest.mark.parametrize("frontier", [Blocks, Whole])
def test_canvas_rows_see_the_canvas_as_it_is(frontier: type[Blocks] | type[Whole], fixed: bool) -> None:
    """With full recompute, every row meets every position once, holding what the canvas holds; until its end."""
    passes = watched_run(tiny(), [*TWO_SEATS, *ENDING], frontier=frontier(), fixed=fixed)
    assert any((each.end_S[2:4] < passes[0].end_S[2:4]).any() for each in passes)
    for each in passes:
        for seat, row in each.rows():
            content = each.content(seat, row)
            assert content == dict(enumerate(each.token_SN[seat, : each.end_S[seat]].tolist()))


CACHES = {
    "prefix": Kind(TWO_SEATS, lambda: {"policy": Prefix()}),
    "dual": Kind(TWO_SEATS, lambda: {"policy": Dual()}),
    "tracked": Kind(TRACKED, lambda: {"frontier": Window(), "policy": Tracked()}),
    "flash": Kind(TRACKED, lambda: {"frontier": Window(), "policy": Tracked(), "drafter": two_pass()}),
}


def has_latest_tokens(each: Pass) -> bool:
    """Of every canvas row: what it sees was written with the tokens that stand there now."""
    return all(
        list(each.content(seat, row).values()) == each.token_SN[seat, : each.end_S[seat]].tolist()
        for seat, row in each.rows()
        if each.plan.column_M[row] < each.capacity
    )


@both_forms
@pytest.mark.parametrize("kind", CACHES)
def test_no_cache_shows_a_mask_where_a_token_was_committed(kind: str, fixed: bool) -> None:
    """K/V may be of an earlier view, never of an earlier token: what a step commits runs in the next pass."""
    cases = [*CACHES[kind].cases, *(changed_to(each, eos=COMMON_TOKENS) for each in CACHES[kind].cases)]
    passes = watched_run(tiny(), cases, **CACHES[kind].members(), fixed=fixed)
    assert any(len(each.canvas_rows(0)) < each.end_S[0] for each in passes if not each.verifies)
    assert all(has_latest_tokens(each) for each in passes)


def test_a_cache_that_leaves_out_new_tokens_shows_a_mask() -> None:
    """Negative control."""
    passes = watched_run(tiny(), TRACKED, frontier=Window(), policy=Forgetting())
    assert not all(has_latest_tokens(each) for each in passes)


@both_forms
def test_rows_of_the_pipeline_see_up_to_their_block_and_sealed_blocks_as_they_ended(fixed: bool) -> None:
    """Block-causal: nothing after the own block; what is not recomputed any more was written with its final tokens."""
    reaches = set()
    for each in watched_run(tiny(), PIPELINED, frontier=Pipeline(), policy=BlockCausal(), fixed=fixed):
        for seat, row in each.rows():
            content = each.content(seat, row)
            assert list(content.values()) == each.token_SN[seat, : len(content)].tolist()
            reaches.add(len(content))
    assert len(reaches) > 4


def nested_passes(num_drafts: int = 3, *, fixed: bool = True) -> list[Pass]:
    return watched_run(tiny(), ONE_A_PASS, policy=Dual(), drafter=Nested(num_drafts, block_width=6), fixed=fixed)


def nested_content(each: Pass, seat: int, row: int, width: int = 6) -> None:
    """A row of view z sees the first z drafts in its block, MASK or final tokens elsewhere in it."""
    scratch = int(each.plan.column_M[row]) - each.capacity
    view = 0 if scratch < 0 else 1 + scratch // width
    content = each.content(seat, row)
    undecided = (each.token_SN[seat] == 319).nonzero().flatten()
    current = each.block_SN[seat] == each.block_SN[seat, undecided[0]]
    expected = each.token_SN[seat].clone().long()
    for z in range(view):
        assert each.pending_pos_SZ[seat, z] >= 0
        expected[each.pending_pos_SZ[seat, z]] = each.pending_token_SZ[seat, z]
    for pos in current.nonzero().flatten().tolist():
        assert content[pos] == expected[pos]


@both_forms
def test_rows_of_nested_views_see_their_own_view_only(fixed: bool) -> None:
    """Each view is the canvas with one draft more, each position once; canvas rows never see a draft."""
    views = 0
    for each in nested_passes(fixed=fixed):
        for seat, row in each.rows():
            nested_content(each, seat, row)
        views += int((each.plan.row_SE[:, each.capacity :] >= 0).any())
    assert views > 2


def verify_content(each: Pass, seat: int, row: int, strict: bool, mask: int = 319) -> str:
    """The isolation table: what each kind of row sees at the searched positions, in their order, and where from."""
    source, content = each.sources(seat, row), each.content(seat, row)
    kind, i = kind_of(each, row)
    drafts, masks = (each.scratch_rows(seat, first, NUM_SEARCH) for first in (DRAFTS, MASKS))
    for j, (draft, mask_row) in enumerate(zip(drafts, masks)):
        assert (draft < 0) == (mask_row < 0)
        if draft < 0:
            continue
        pos = int(each.plan.pos_M[draft])
        if {"context": False, "draft": j <= i, "mask": j < i}[kind]:
            entry, token = each.scratch_SX[seat, DRAFTS + j], int(each.plan.token_M[draft])
        else:
            live = not strict or (kind, i) == ("mask", j)
            entry, token = each.scratch_SX[seat, MASKS + j] if live else each.entry_SN[seat, pos], mask
        assert (content[pos], source[pos]) == (token, int(entry)), (kind, i, j)
    for at in each.scratch_rows(seat, 0, DRAFTS):
        if at >= 0:
            pos = int(each.plan.pos_M[at])
            assert content[pos] == each.token_SN[seat, pos] != mask
            assert source[pos] == each.write_M[at]
    return kind


ISOLATIONS = {"strict": [True] * 4, "reference": [False] * 4, "mixed": [True, False, False, True]}


@both_forms
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_rows_of_the_second_pass_see_drafts_before_them_and_masks_after(isolation: str, fixed: bool) -> None:
    """Context rows see every searched position as MASK; draft i the drafts up to i; MASK i the drafts before i. The
    MASKs that are not a row's own are live ones or, in strict isolation, the canvas's: each request as it asks."""
    strict = ISOLATIONS[isolation]
    cases = isolated([*TWO_SEATS, *ENDING], strict)
    passes = verify_passes(watched_run(tiny(), cases, drafter=two_pass(), fixed=fixed))
    kinds = [verify_content(each, seat, row, strict[seat]) for each in passes for seat, row in each.rows()]
    assert {kind: kinds.count(kind) > 10 for kind in ("context", "draft", "mask")} == dict.fromkeys(
        ("context", "draft", "mask"), True
    )


@both_forms
def test_nothing_past_a_new_end_is_searched(fixed: bool) -> None:
    """An end of text that the first pass commits cuts the second: no row stands, and none looks, behind it."""
    plain = [request(5, 16, 16, seed, rule={"threshold": 0.97}) for seed in range(6)]
    answers = [alone(tiny(), each) for each in plain]
    cases = [
        changed_to(each, eos=(answer.token_ids[answer.commit_pass.index(1)],)) for each, answer in zip(plain, answers)
    ]
    first, second = watched_run(tiny(), cases, drafter=two_pass(), fixed=fixed)[:2]
    assert second.verifies
    assert (second.end_S < first.end_S).sum() >= 5
    for seat, row in second.rows():
        assert second.plan.pos_M[row] < second.end_S[seat]
        verify_content(second, seat, row, strict=True)


def test_a_position_is_seen_twice_without_the_shadow() -> None:
    """Negative control: the same plans without their shadow let rows meet positions twice."""
    nested = [each for each in nested_passes() if each.sight.shadow_SN is not None and each.sight.shadow_SN.any()]
    verify = verify_passes(watched_run(tiny(), TWO_SEATS, drafter=two_pass()))
    for each in (nested[0], verify[0]):
        bare = replace(each, sight=replace(each.sight, shadow_SN=None))
        with pytest.raises(AssertionError, match="seat"):
            [bare.content(seat, row) for seat, row in bare.rows()]


def test_the_isolation_table_tells_a_draft_from_a_mask() -> None:
    """Negative control: with drafts and MASK rows exchanged the content is not that of the table."""
    each = verify_passes(watched_run(tiny(), TWO_SEATS, drafter=two_pass()))[0]
    token_E, at_SX = each.held_token_E.clone(), each.scratch_SX[:, DRAFTS:]
    token_E[at_SX] = token_E[at_SX].roll(NUM_SEARCH, 1)
    wrong = replace(each, held_token_E=token_E)
    with pytest.raises(AssertionError):
        [verify_content(wrong, seat, row, strict=True) for seat, row in wrong.rows()]


def test_the_isolation_table_tells_the_isolations_apart() -> None:
    """Negative control: the rows of a request in strict isolation are not those of the reference's."""
    for strict in (True, False):
        each = verify_passes(watched_run(tiny(), isolated(TWO_SEATS, strict), drafter=two_pass()))[0]
        with pytest.raises(AssertionError):
            [verify_content(each, seat, row, not strict) for seat, row in each.rows()]


# --- what a pass writes


def assert_writes(each: Pass) -> None:
    """Canvas entries that no row of this pass claims are bit-identical after it."""
    untouched_E = each.entry_SN[each.plan.row_SE[:, : each.capacity] < 0]
    for before, after in zip(each.before, each.after):
        assert torch.equal(before[:, untouched_E], after[:, untouched_E])


@both_forms
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_writes_the_canvas_entries_of_its_canvas_rows_only(kind: str, fixed: bool) -> None:
    """A row that writes a canvas entry stands at that position with the canvas's own token; drafts write their seat's
    scratch, padding a page that nobody reads."""
    step = KINDS[kind].step(seats=3, fixed=fixed)
    passes = watch(step)
    run(step, KINDS[kind].cases)
    for each in passes:
        assert_writes(each)
        plan, padding_S1 = each.plan, torch.zeros_like(each.entry_SN[:, :1])
        assert not fixed or each.is_padding_M.any()
        scratch_SX = each.scratch_SX[:, : plan.row_SE.shape[1] - each.capacity - 1]
        own_SE = torch.cat((each.entry_SN, scratch_SX, padding_S1), 1)
        assert torch.equal(each.write_M, own_SE[plan.seat_M, plan.column_M])
        on_canvas_M = plan.column_M < each.capacity
        seat_M, pos_M = plan.seat_M[on_canvas_M], plan.column_M[on_canvas_M]
        assert torch.equal(plan.pos_M[on_canvas_M].long(), pos_M)
        assert torch.equal(plan.token_M[on_canvas_M], each.token_SN[seat_M, pos_M])
        read = {entry for seat, row in each.rows() for entry in each.seen(seat, row)}
        assert min(read, default=PAGE_SIZE) >= PAGE_SIZE


@both_forms
@pytest.mark.parametrize("strict", [True, False])
def test_the_second_pass_leaves_the_canvas_entries_alone(strict: bool, fixed: bool) -> None:
    """K/V of all canvas entries, bit for bit, before and after every verification."""
    cases = isolated(TWO_SEATS, strict)
    step = make_step(tiny(), cases, drafter=two_pass(), fixed=fixed)
    passes = watch(step)
    run(step, cases)
    for each in verify_passes(passes):
        at_E = each.entry_SN.flatten()
        for before, after in zip(each.before, each.after):
            assert torch.equal(before[:, at_E], after[:, at_E])
            assert not torch.equal(before, after) or each.is_padding_M.all()


def test_a_draft_written_to_the_canvas_is_noticed() -> None:
    """Negative control: a verification row that wrote its canvas entry would change it."""
    step, each = first_verification(tiny(), strict=True)
    (row,) = each.scratch_rows(0, DRAFTS, 1)
    column_M = each.plan.column_M.clone()
    column_M[row] = each.plan.pos_M[row]
    with torch.inference_mode():
        step._forward(replace(each.plan, column_M=column_M))
    wrong = replace(each, after=(step.pool.k.clone(), step.pool.v.clone()))
    with pytest.raises(AssertionError):
        assert_writes(wrong)


@both_forms
@pytest.mark.parametrize("kind", KINDS)
def test_nobody_reads_what_nobody_wrote(kind: str, fixed: bool) -> None:
    """Absurd numbers in fresh entries and, between steps, in scratch: the run does not notice; and the entries of
    no request keep them. (Finite ones: under a mask, kernels multiply values by 0.)"""
    cases = KINDS[kind].cases
    plain = run(KINDS[kind].step(seats=3, fixed=fixed), cases)
    step = KINDS[kind].step(seats=3, fixed=fixed)
    for kv in (step.pool.k, step.pool.v):
        kv.fill_(1e4)
    with torch.inference_mode():
        while step.canvas.active_S.any():
            step()
            fill_scratch(step, 1e4)
    assert [result(step, seat, each) for seat, each in enumerate(cases)] == plain
    sizes = [*(each.size for each in cases), 0]
    for seat, size in enumerate(sizes):
        assert all((kv[:, size:] == 1e4).all() for kv in kv_of(step, seat).values())
        assert all((kv[:, :size] != 1e4).all() for kv in kv_of(step, seat).values())


@both_forms
def test_absurd_numbers_in_entries_that_are_read_are_noticed(fixed: bool) -> None:
    """Negative control: the same numbers in the prompt's entries of a cached run change its answer."""
    kind = KINDS["dual"]
    plain = run(kind.step(fixed=fixed), kind.cases)
    step = kind.step(fixed=fixed)
    with torch.inference_mode():
        step()
        for seat in range(len(kind.cases)):
            step.pool.v[:, entries_of(step, seat)[:4]] = 1e4
    assert run(step, kind.cases) != plain


# --- the two forms


def history(step: Step) -> list[dict[str, Tensor]]:
    """Everything that the canvas holds and the host is told, after each step."""
    told = []
    with torch.inference_mode():
        while step.canvas.active_S.any():
            step()
            state = {name: value.clone() for name, value in vars(step.canvas).items() if isinstance(value, Tensor)}
            told.append(state | {"readback": step.readback.clone()})
            assert len(told) < 200
    return told


def assert_same(one: Sequence[dict[str, Tensor]], other: Sequence[dict[str, Tensor]]) -> None:
    """Equal decisions and counts; probabilities and masses up to rounding."""
    assert len(one) == len(other)
    for a, b in zip(one, other):
        for name in a:
            torch.testing.assert_close(a[name], b[name], atol=1e-6, rtol=1e-6, msg=lambda text: f"{name}: {text}")  # noqa: B023


@pytest.mark.parametrize("kind", FORMS)
def test_both_forms_are_the_same_decoding(kind: str) -> None:
    """Step by step, in every tensor of the canvas and in all that the host reads."""
    fixed, ragged = (history(FORMS[kind].step(fixed=each)) for each in (True, False))
    assert_same(fixed, ragged)


def test_another_cache_is_another_decoding() -> None:
    """Negative control: histories differ where only the recomputed positions do."""
    with pytest.raises(AssertionError):
        assert_same(history(KINDS["dual"].step()), history(make_step(tiny(), ONE_A_PASS)))


def in_a_wider_pool(step: Step) -> Step:
    """The same canvas over a pool of four seats and three pages."""
    pool = make_pool(step.model, 4, 3 * PAGE_SIZE, step.drafter.num_scratch)  # type: ignore[arg-type]
    axes = {"frontier": step.frontier, "policy": step.policy, "drafter": step.drafter}
    return Step(step.model, step.canvas, step.params, pool, **axes)  # type: ignore[arg-type]


def grown(canvas: Canvas) -> Canvas:
    return canvas.grown(4, 3 * PAGE_SIZE, canvas.block_state_SK.shape[1] + 2)


@pytest.mark.parametrize("kind", [*KINDS, "drains"])
def test_a_ragged_step_goes_on_in_larger_tensors(kind: str) -> None:
    """More seats, positions, blocks and schedule steps in the middle of a run change nothing."""
    plain = run(FORMS[kind].step(fixed=False), FORMS[kind].cases)
    step = in_a_wider_pool(FORMS[kind].step(fixed=False))
    canvas, params = step.canvas, step.params
    with torch.inference_mode():
        for _ in range(2):
            step()
        step.resize(grown(canvas), params.grown(4, params.num_steps + 3))
        step()
        step.resize(step.canvas, step.params)
    assert run(step, FORMS[kind].cases) == plain


def test_a_ragged_step_without_its_state_is_noticed() -> None:
    """Negative control: what the last pass committed is part of what must be kept."""
    plain = run(KINDS["tracked"].step(fixed=False), TRACKED)
    step = in_a_wider_pool(KINDS["tracked"].step(fixed=False))
    with torch.inference_mode():
        for _ in range(2):
            step()
    larger = grown(step.canvas)
    larger.commit_pass_SN.clamp_(max=0)
    step.resize(larger, step.params.grown(4, step.params.num_steps))
    assert run(step, TRACKED) != plain


# --- alone or in a batch


def seated(model: Transformer, places: Mapping[int, Case], seats: int, guests: Sequence[Case], **options: Any) -> Step:
    """A step with requests in chosen seats, wide enough for the guests that join later."""
    everyone = [*places.values(), *guests]
    widest = Case(
        prompt=[0],
        length=max(each.size for each in everyone),
        block_length=min(each.block_length for each in everyone),
        params=replace(everyone[0].params, quota=(1,) * max(len(each.params.quota) for each in everyone)),
    )
    step = make_step(model, [widest], seats=seats, **options)
    step.canvas.release(0)
    step.params.release(0)
    for seat, each in places.items():
        place(step, seat, each)
    return step


@torch.inference_mode()
def run_with_guests(step: Step, places: Mapping[int, Case], guests: Sequence[Case]) -> list[tuple[Case, Result]]:
    """Run to the end; every second step a guest takes a seat that has become free. All answers, with their requests."""
    waiting, inside, done = list(guests), dict(places), []
    for number in range(300):
        step()
        assert not column(step.readback, "overflow").any()
        for seat in [seat for seat in inside if not step.canvas.active_S[seat]]:
            each = inside.pop(seat)
            done.append((each, result(step, seat, each)))
            step.canvas.release(seat)
        free = [seat for seat in places if seat not in inside]
        if number % 2 and waiting and free:
            inside[free[0]] = waiting.pop(0)
            place(step, free[0], inside[free[0]])
        if not inside and not waiting:
            return done
    raise AssertionError("unfinished")


def assert_alone(model: Transformer, done: Sequence[tuple[Case, Result]], members: Members, *, fixed: bool) -> None:
    for each, got in done:
        assert got == alone(model, each, **members(), fixed=fixed), each


GUEST_KINDS: dict[str, tuple[Callable[[], list[Case]], Members]] = {
    "recompute": (mixed, dict),
    "tracked": (lambda: tracking(mixed()), lambda: {"frontier": Window(), "policy": Tracked()}),
    "two-pass": (lambda: verifying(mixed()), lambda: {"drafter": two_pass()}),
    "flash": (lambda: tracking(verifying(mixed())), flash),
    "pipeline": (
        lambda: [
            request(prompt, 12 - i % 3, block, i, tau_add=add, tau_act=act, rule={"threshold": 0.8})
            for i, (prompt, block, add, act) in enumerate(
                [(1, 4, 0.1, 0.95), (7, 3, 0.5, 0.5), (20, 5, 1.0, 1.0), (1, 2, 0.0, 0.9), (7, 6, 0.3, 0.3)] * 2
            )
        ],
        lambda: {"frontier": Pipeline(), "policy": BlockCausal()},
    ),
    "nested": (
        # One size, so that no entry of an earlier request lies behind a later one's canvas.
        lambda: [one_a_pass(7, 12, block, seed) for seed, block in enumerate((4, 5, 6, 3, 12, 6, 4))],
        lambda: {"policy": Dual(), "drafter": Nested(3, 12)},
    ),
}


@both_forms
@pytest.mark.parametrize("kind", GUEST_KINDS)
def test_a_request_does_not_feel_its_neighbours(kind: str, fixed: bool) -> None:
    """Eight seats, two of them empty, mixed rules; requests that join later into freed seats, in other phases. Each
    has the tokens, the passes and the commits that it has alone."""
    cases, members = GUEST_KINDS[kind]
    first, guests = cases()[:6], cases()[6:]
    places = dict(zip((0, 1, 3, 4, 6, 7), first))
    step = seated(tiny(), places, 8, guests, **members(), fixed=fixed)
    done = run_with_guests(step, places, guests)
    assert len(done) == len(first) + len(guests)
    assert_alone(tiny(), done, members, fixed=fixed)


@both_forms
def test_all_rules_in_one_batch_of_gqa(fixed: bool) -> None:
    """The same for shared key heads, every rule at once."""
    cases, model = mixed(), tiny(MODELS[1])
    done = list(zip(cases, run(make_step(model, cases, seats=11, fixed=fixed), cases)))
    assert_alone(model, done, dict, fixed=fixed)


@both_forms
def test_a_neighbours_row_is_noticed(fixed: bool) -> None:
    """Negative control: a step that reads another seat's K/V gives other answers than the request alone."""
    cases = mixed()[:3]
    step = make_step(tiny(), cases, fixed=fixed)
    step.pool.page_table_SP.copy_(step.pool.page_table_SP[:1].expand_as(step.pool.page_table_SP).clone())
    with pytest.raises(AssertionError):
        assert_alone(tiny(), list(zip(cases, run(step, cases))), dict, fixed=fixed)


LATER: dict[str, Members] = {
    "dual": lambda: {"policy": Dual()},
    "nested": lambda: {"policy": Dual(), "drafter": Nested(2, 12)},
    "prefix": lambda: {"policy": Prefix()},
    "flash": flash,
}


@both_forms
@pytest.mark.parametrize("kind", LATER)
def test_a_shorter_request_in_a_used_seat_refreshes_its_cache(kind: str, fixed: bool) -> None:
    """A cache begins with a full pass, whatever the seat held before."""
    longer, shorter = tracking([one_a_pass(9, 24, 12), one_a_pass(3, 6, 6, seed=1)])
    step = make_step(tiny(), [longer], **LATER[kind](), fixed=fixed)
    run(step, [longer])
    place(step, 0, shorter)
    assert run(step, [shorter])[0] == alone(tiny(), shorter, **LATER[kind](), fixed=fixed)


@both_forms
@pytest.mark.parametrize("held", [False, True], ids=["inactive", "held"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_inactive_seat_does_not_change(kind: str, held: bool, fixed: bool) -> None:
    """A seat that waits for a step keeps every canvas tensor and its K/V, and goes on as if nothing had been; also if
    it was looked at and then held back."""
    cases = KINDS[kind].cases
    plain = run(KINDS[kind].step(fixed=fixed), cases)
    step = KINDS[kind].step(fixed=fixed)
    with torch.inference_mode():
        for _ in range(2):
            step()
        before, waits_S = canvas_state(step.canvas, 1) | kv_of(step, 1), torch.tensor([False, True])
        neighbour = canvas_state(step.canvas, 0)
        if held:
            step.run(step.hold(step.look(), waits_S))
        else:
            step.canvas.active_S[1] = False
            step()
        step.canvas.active_S[1] = True
        after = canvas_state(step.canvas, 1) | kv_of(step, 1)
        assert {"token_SN", "pass_S"} <= changed(neighbour, canvas_state(step.canvas, 0))  # control: it was a step
        assert not changed(before, after)
    assert run(step, cases) == plain


@both_forms
@pytest.mark.parametrize("kind", KINDS)
def test_a_seat_may_wait_for_its_first_pass(kind: str, fixed: bool) -> None:
    """The largest pass waits for the row budget: here three steps, beside a neighbour that goes on."""
    cases = KINDS[kind].cases
    plain = run(KINDS[kind].step(fixed=fixed), cases)
    step, waits_S = KINDS[kind].step(fixed=fixed), torch.tensor([False, True])
    before = canvas_state(step.canvas, 1)
    with torch.inference_mode():
        for _ in range(3):
            step.run(step.hold(step.look(), waits_S))
            assert not column(step.readback, "num_rows")[1]
            step.canvas.active_S |= waits_S
    assert not changed(before, canvas_state(step.canvas, 1))
    assert run(step, cases) == plain


@both_forms
@pytest.mark.parametrize("kind", ["guided-dual", "dream-guided"])
def test_a_guided_request_waits_with_its_twin(kind: str, fixed: bool) -> None:
    """In the first step and later on, beside a neighbour that goes on."""
    cases = FORMS[kind].cases
    plain = run(FORMS[kind].step(fixed=fixed), cases)
    step, waits_S = FORMS[kind].step(fixed=fixed), torch.tensor([True, True, False])
    with torch.inference_mode():
        for number in range(6):
            before = [canvas_state(step.canvas, seat) | kv_of(step, seat) for seat in (0, 1)]
            if number % 2:
                step()
                continue
            step.run(step.hold(step.look(), waits_S))
            step.canvas.active_S |= waits_S
            assert not any(
                changed(before[seat], canvas_state(step.canvas, seat) | kv_of(step, seat)) for seat in (0, 1)
            )
    assert run(step, cases) == plain


# --- no host decisions


class NoLooking(TorchDispatchMode):
    """Raises where a value leaves the device, or decides about a shape."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "item", "equal", "is_nonzero", "bincount")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.FORBIDDEN or name.startswith(("_unique", "unique", "nonzero")):
            raise AssertionError(f"{name} waits for the device")
        if name.startswith(("index", "_unsafe_index")) and isinstance(args[1], (list, tuple)):
            looks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
            assert not looks, f"{name} with a boolean mask waits for the device"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_looking(step: Step) -> Iterator[None]:
    """Inside, the step must not look. Inference mode is off, since it hides the parts of composite operators. The
    rotary table is read as on a device: on the CPU it grows on demand."""
    rope = step.model.rope
    table = rope.reserve(step.canvas.capacity, step.canvas.device)

    def refuse(self: Tensor, *args: Any) -> Any:  # noqa: ARG001
        raise AssertionError("reading values waits for the device")

    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), NoLooking():
        patch.setattr(rope, "at", lambda pos: (table[0][pos], table[1][pos]))
        for name in ("tolist", "numpy", "cpu"):
            patch.setattr(Tensor, name, refuse)
        yield


ORIGIN = {"alg": "origin", "min_tokens": 3}
BLIND_KINDS = FORMS | {
    "whole": Kind(mixed(), lambda: {"frontier": Whole()}),
    "window": Kind(mixed(), lambda: {"frontier": Window()}),
    "blocks": Kind(mixed()),
    "origin": Kind([request(5, 8, 4, rule={"steps": steps} | more) for steps, more in ((8, {}), (4, ORIGIN))]),
    "uncached-pipeline": Kind(PIPELINED, lambda: {"frontier": Pipeline()}),
    "flash-mixed": Kind(tracking(verifying(mixed())), flash),
}


@pytest.mark.parametrize("kind", BLIND_KINDS)
def test_a_step_makes_no_host_decision(kind: str) -> None:
    """Whole steps without one operator that reads a value back or whose output shape depends on values."""
    step = BLIND_KINDS[kind].step()
    with no_looking(step):
        for _ in range(4):
            step()
    assert (step.canvas.commit_pass_SN > 1).any()


def test_a_ragged_step_looks() -> None:
    """Negative control: without budgets a step counts its rows on the host."""
    step = KINDS["recompute"].step(fixed=False)
    with pytest.raises(AssertionError, match="waits for the device"), no_looking(step):
        step()


def _item(mask: Tensor) -> Any:
    return mask.sum().item()


PEEKS: dict[str, Callable[[Tensor], Any]] = {
    "item": _item,
    "bool": lambda mask: bool(mask.any()),
    "tolist": lambda mask: mask.tolist(),
    "nonzero": lambda mask: mask.nonzero(),
    "where": lambda mask: torch.where(mask),
    "masked_select": lambda mask: mask.masked_select(mask),
    "index": lambda mask: mask[mask],
    "index_put": lambda mask: mask.clone().__setitem__(mask, True),
    "unique": lambda mask: mask.unique(),
    "equal": lambda mask: torch.equal(mask, mask),
}


@pytest.mark.parametrize("peek", PEEKS)
def test_a_frontier_that_looks_is_caught(peek: str) -> None:
    """Negative control: each way of reading a value trips the guard."""

    class Looking(Blocks):
        def advance(self, canvas: Canvas, params: DecodeParams) -> FrontierView:
            view = super().advance(canvas, params)
            PEEKS[peek](view.candidate_SN)
            return view

    step = make_step(tiny(), TWO_SEATS, frontier=Looking())
    with pytest.raises(AssertionError, match="waits for the device"), no_looking(step):
        step()


# --- what the host reads


@both_forms
@pytest.mark.parametrize("kind", KINDS)
def test_the_readback_tells_the_truth_and_only_grows(kind: str, fixed: bool) -> None:
    """Settled and pass counts never fall, ends never rise, undecided counts reach 0 as the seat stops."""
    cases = [*KINDS[kind].cases, changed_to(KINDS[kind].cases[0], eos=COMMON_TOKENS)]
    step = KINDS[kind].step(cases, fixed=fixed)
    told = torch.stack(trace(step)).long()
    by = {name: told[:, :, column_] for column_, name in enumerate(READBACK)}
    active = by["active"].bool()
    assert (by["num_settled"].diff(dim=0) >= 0).all()
    assert torch.equal(by["num_steps"], by["active"].cumsum(0))
    assert (by["end"].diff(dim=0) <= 0).all()
    assert not by["overflow"].any()
    assert (by["num_undecided"][active].unsqueeze(0) >= 0).all()
    assert not by["num_undecided"][-1].any()
    assert torch.equal(active[1:], active[:-1] & (by["num_undecided"][:-1] > 0))
    assert (by["num_rows"] > 0).eq(active).all()
    for seat, each in enumerate(cases):
        got = result(step, seat, each)
        assert by["num_settled"][-1, seat] == len(got.token_ids) == by["end"][-1, seat] - len(each.prompt)
        assert by["num_steps"][-1, seat] == got.num_passes


@both_forms
@pytest.mark.parametrize("kind", KINDS)
def test_replaying_after_the_end_changes_nothing(kind: str, fixed: bool) -> None:
    """A step that was launched before the host saw the end: no canvas tensor and no canvas entry changes."""
    step = KINDS[kind].step(fixed=fixed)
    trace(step)
    seats = range(len(KINDS[kind].cases))
    before = [canvas_state(step.canvas, seat) | kv_of(step, seat) for seat in seats]
    settled_S = column(step.readback, "num_settled").clone()
    with torch.inference_mode():
        for _ in range(2):
            step()
    assert not any(changed(before[seat], canvas_state(step.canvas, seat) | kv_of(step, seat)) for seat in seats)
    assert torch.equal(settled_S, column(step.readback, "num_settled"))
    assert not column(step.readback, "active").any()
    assert not column(step.readback, "num_rows").any()


@pytest.mark.parametrize("budget", ["num_rows", "num_scored"])
def test_a_budget_that_is_too_small_is_told(budget: str) -> None:
    """Rows and candidates that did not fit are counted seat by seat; with enough of both the count is 0."""
    step = make_step(tiny(), TWO_SEATS, seats=3)
    capacity = step.canvas.capacity
    step.budgets = replace(Budgets(capacity, capacity), **{budget: 2})
    with torch.inference_mode():
        step()
    rows, candidates = ([each.size for each in TWO_SEATS], [each.block_length for each in TWO_SEATS])
    wanted = rows if budget == "num_rows" else candidates
    assert column(step.readback, "overflow").tolist() == [*(each - 2 for each in wanted), 0]
    enough = make_step(tiny(), TWO_SEATS, seats=3)
    with torch.inference_mode():
        enough()
    assert not column(enough.readback, "overflow").any()
