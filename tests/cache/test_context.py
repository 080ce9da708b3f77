"""The engine's attention context: against each sequence alone, and against loops that keep K/V in a dictionary.

S seats, N positions, X scratch columns, J live entries, M rows, E entries of the pool, L layers
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from oracles.flash import FlashSettings, Row, draft_rows, empty_memory, forward
from oracles.golden import tiny_model
from unmask.cache.context import MassSpec, PagedContext
from unmask.cache.pool import PAGE_SIZE, PagePool, kv_planes, num_pages_for
from unmask.core.canvas import Canvas
from unmask.core.rows import RowPlan, Scratch, pack
from unmask.models.attention import DenseContext
from unmask.models.transformer import Transformer

MODELS = ("tiny-llada", "tiny-llada-gqa", "tiny-dream")
LENGTHS = (37, 0, 16, 5)  # several pages, a free seat, one full page, a part of one
CAPACITY = 40


@pytest.fixture(params=[(name, dtype) for name in MODELS for dtype in (torch.float64, torch.float32)], ids=str)
def model(request: pytest.FixtureRequest) -> Transformer:
    name, dtype = request.param
    return tiny_model(name, None, dtype)


@pytest.fixture(params=MODELS)
def model64(request: pytest.FixtureRequest) -> Transformer:
    return tiny_model(request.param, None, torch.float64)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def same(ours: Tensor, expected: Tensor) -> None:
    """Equal up to the order of sums: logits reach 30."""
    tolerance = 1e-10 if ours.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


def differs(ours: Tensor, other: Tensor) -> bool:
    return not torch.allclose(ours, other, atol=1e-3, rtol=0)


@dataclass
class Seats:
    """Canvases of random tokens, and a pool in which nothing is where one would expect it: the pages are shuffled, and
    every entry holds noise."""

    model: Transformer
    canvas: Canvas
    pool: PagePool
    lengths: tuple[int, ...]

    @classmethod
    def make(
        cls,
        model: Transformer,
        lengths: tuple[int, ...] = LENGTHS,
        capacity: int = CAPACITY,
        *,
        num_scratch: int = 0,
        seed: int = 0,
    ) -> Seats:
        generator = torch.Generator().manual_seed(seed)
        canvas = Canvas.empty(len(lengths), capacity, model.config.mask_token_id, "cpu")
        canvas.token_SN.copy_(torch.randint(0, 300, canvas.token_SN.shape, generator=generator))
        canvas.end_S.copy_(torch.tensor(lengths))
        canvas.active_S.copy_(canvas.end_S > 0)
        num_pages = sum(map(num_pages_for, lengths)) + 3
        pool = PagePool(
            kv_planes(model.config, model.head.dtype),
            num_layers=model.config.num_layers,
            num_pages=num_pages,
            num_seats=len(lengths) + 1,  # larger than the canvas
            max_positions=max(lengths) + PAGE_SIZE,
            num_scratch=num_scratch,
        )
        pages = pool.take(num_pages)
        assert pages is not None
        left = [pages[n] for n in torch.randperm(num_pages, generator=generator).tolist()]
        for seat, length in enumerate(lengths):
            if length:
                own = [left.pop() for _ in range(num_pages_for(length))]
                assert pool.reserve(seat, length, shared=own)
        pool.drop(pages)
        for plane in pool.planes.values():
            plane.normal_(0, 3, generator=generator)
        return cls(model, canvas, pool, lengths)

    def plan(
        self,
        run_SN: Tensor | None = None,
        see_SN: Tensor | None = None,
        scratch: Scratch | None = None,
        per_seat: int | None = None,
    ) -> RowPlan:
        """By default all that is visible runs and sees what is visible."""
        run_SN = self.canvas.visible_SN() if run_SN is None else run_SN
        see_SN = self.canvas.end_S[:, None].expand(-1, self.canvas.capacity) if see_SN is None else see_SN
        return pack(self.canvas, run_SN, see_SN, scratch, per_seat=per_seat)

    def context(self, plan: RowPlan, **mass: Any) -> PagedContext:
        return PagedContext(plan, self.pool, self.model.rope, self.canvas.capacity, **mass)

    def logits(self, plan: RowPlan) -> Tensor:
        """[M, V]"""
        return self.model.logits(self.model(plan.token_M, self.context(plan)))

    def alone(self, seat: int, mask: Tensor | None = None) -> Tensor:
        """Logits [N, V] of a seat's sequence by itself, without a cache."""
        length = self.lengths[seat]
        ctx = DenseContext(torch.arange(length), mask=mask, rope=self.model.rope)
        return self.model.logits(self.model(self.canvas.token_SN[seat : seat + 1, :length], ctx))[0]

    def entry(self, seat: int, pos: int) -> int:
        return self.pool.pages(seat)[pos // PAGE_SIZE] * PAGE_SIZE + pos % PAGE_SIZE

    def planes(self) -> dict[str, Tensor]:
        return {name: plane.clone() for name, plane in self.pool.planes.items()}

    def changed(self, before: dict[str, Tensor]) -> list[set[int]]:
        """Entries that differ in any bit, for every plane and layer."""
        out = []
        for name, plane in self.pool.planes.items():
            for layer in range(len(plane)):
                now, then = (each[layer].view(torch.int32) for each in (plane, before[name]))
                out.append(set((now != then).flatten(1).any(1).nonzero()[:, 0].tolist()))
        return out

    def some(self, seed: int, share: float = 0.3) -> Tensor:
        """bool [S, N]: visible positions, at random."""
        chance_SN = torch.rand(self.canvas.token_SN.shape, generator=torch.Generator().manual_seed(seed))
        return self.canvas.visible_SN() & (chance_SN < share)


def rows_of(plan: RowPlan, seat: int) -> Tensor:
    """Rows of the seat that are no padding, by column."""
    row_E = plan.row_SE[seat]
    return row_E[row_E >= 0]


# Packed sequences


@pytest.mark.parametrize("per_seat", [None, 37, 40])
def test_packed_sequences_equal_each_alone(model: Transformer, per_seat: int | None) -> None:
    seats = Seats.make(model)
    plan = seats.plan(per_seat=per_seat)
    logits_MV = seats.logits(plan)
    assert len(logits_MV) == (sum(LENGTHS) if per_seat is None else len(LENGTHS) * per_seat)
    assert logits_MV.isfinite().all()
    for seat, length in enumerate(LENGTHS):
        if length:
            same(logits_MV[rows_of(plan, seat)], seats.alone(seat))


def test_one_position_too_many_is_noticed(model64: Transformer) -> None:
    """Negative control: a seat that sees past its end sees what lay there before."""
    seats = Seats.make(model64)
    reach_SN = seats.canvas.end_S[:, None].expand(-1, CAPACITY) + 1
    logits_MV = seats.logits(seats.plan(see_SN=reach_SN))
    assert differs(logits_MV[rows_of(seats.plan(), 0)], seats.alone(0))
    assert differs(logits_MV[rows_of(seats.plan(), 3)], seats.alone(3))


def test_sequences_of_a_batch_do_not_see_each_other(model64: Transformer) -> None:
    seats = Seats.make(model64)
    before_MV, plan = seats.logits(seats.plan()), seats.plan()
    seats.canvas.token_SN[0] = seats.canvas.token_SN[0].flip(0)
    after_MV = seats.logits(seats.plan())
    for seat in (2, 3):
        assert torch.equal(after_MV[rows_of(plan, seat)], before_MV[rows_of(plan, seat)])
    assert differs(after_MV[rows_of(plan, 0)], before_MV[rows_of(plan, 0)])


def test_a_reach_of_its_own_for_every_row_is_a_mask(model: Transformer) -> None:
    """Block-causal views: a row sees to its block's end."""
    seats = Seats.make(model)
    block_N = torch.arange(CAPACITY) // 4 * 4 + 4
    see_SN = torch.minimum(block_N, seats.canvas.end_S[:, None]).int()
    for per_seat in (None, 38):
        plan = seats.plan(see_SN=see_SN, per_seat=per_seat)
        logits_MV = seats.logits(plan)
        for seat, length in enumerate(LENGTHS):
            if length:
                mask_NN = torch.arange(length) < see_SN[seat, :length, None]
                same(logits_MV[rows_of(plan, seat)], seats.alone(seat, mask_NN))
                assert length <= 4 or differs(logits_MV[rows_of(plan, seat)], seats.alone(seat))


# Later passes


@pytest.mark.parametrize("per_seat", [None, 20])
def test_a_few_rows_equal_a_full_recompute(model: Transformer, per_seat: int | None) -> None:
    """When nothing else changed: their scores, and what they write."""
    seats = Seats.make(model)
    full = seats.plan()
    full_MV, before = seats.logits(full), seats.planes()
    plan = seats.plan(seats.some(seed=1), per_seat=per_seat)
    few_MV = seats.logits(plan)
    for seat in (0, 2, 3):
        same(few_MV[rows_of(plan, seat)], full_MV[full.row_SE[seat][plan.row_SE[seat] >= 0]])
    for name, plane in seats.pool.planes.items():
        same(plane[:, PAGE_SIZE:], before[name][:, PAGE_SIZE:])


def test_a_few_rows_differ_when_others_changed(model64: Transformer) -> None:
    """Negative control, and what a cache is: rows that did not run are seen as they were."""
    seats = Seats.make(model64)
    seats.logits(seats.plan())
    run_SN = seats.some(seed=1)
    seats.canvas.token_SN[0, 3] += 1
    run_SN[0, 3] = False
    stale_MV, plan = seats.logits(seats.plan(run_SN)), seats.plan(run_SN)
    fresh_NV = seats.alone(0)
    assert differs(stale_MV[rows_of(plan, 0)], fresh_NV[run_SN[0, : LENGTHS[0]]])
    seats.canvas.token_SN[0, 3] -= 1
    same(stale_MV[rows_of(plan, 0)], seats.alone(0)[run_SN[0, : LENGTHS[0]]])


@pytest.mark.parametrize("per_seat", [None, 6, 40])
@pytest.mark.parametrize("model_name", MODELS)
def test_only_the_entries_of_rows_that_ran_change(model_name: str, per_seat: int | None) -> None:
    """Bit for bit, in every plane and layer; padding writes the trash page only, and rows that did not fit nothing."""
    seats = Seats.make(tiny_model(model_name), num_scratch=3)
    seats.logits(seats.plan())
    seats.canvas.token_SN += 1  # so that whatever runs writes something else
    before = seats.planes()
    run_SN = seats.some(seed=2)
    run_SN[2] = False
    plan = seats.plan(run_SN, per_seat=per_seat)
    seats.logits(plan)
    ran = {seats.entry(seat, pos) for seat, pos in (plan.row_SE >= 0).nonzero().tolist()}
    assert len(ran) == int(plan.num_rows_S.sum()) > 0
    trash = set() if per_seat is None else {0}
    assert seats.changed(before) == [ran | trash] * 6
    assert int(run_SN.sum()) - len(ran) == int(plan.overflow_S.sum())
    assert (plan.overflow_S > 0).any() == (per_seat == 6)


def test_one_bit_in_a_neighbours_page_is_noticed() -> None:
    """Negative control of the comparison above."""
    seats = Seats.make(tiny_model("tiny-llada"))
    before = seats.planes()
    assert seats.changed(before) == [set()] * 6
    entry = seats.entry(2, 15)
    value = seats.pool.v[1, entry, 0, 0]
    value.copy_(torch.nextafter(value, torch.tensor(torch.inf)))
    assert seats.changed(before) == [set(), set(), set(), set(), {entry}, set()]


def scratch_of(seats: Seats, generator: torch.Generator, written_SX: Tensor) -> Scratch:
    """Random scratch rows, and a live list of canvas and scratch columns that have been written; no row loses the
    sight of position 0."""
    num_seats, num_scratch = written_SX.shape
    capacity = seats.canvas.capacity

    def chance(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) < 0.5

    def below(limit_S: Tensor, *shape: int) -> Tensor:
        return (torch.rand(num_seats, *shape, generator=generator) * limit_S[:, None]).long()

    has_rows_S1 = seats.canvas.active_S[:, None]
    valid_SX = (chance(num_seats, num_scratch) | ~written_SX) & has_rows_S1
    canvas_SJ = below(seats.canvas.end_S, 4)
    scratch_SJ = capacity + below(torch.full((num_seats,), num_scratch), 3)
    shadow_SN = chance(num_seats, capacity)
    shadow_SN[:, 0] = False
    return Scratch(
        token_SX=torch.randint(0, 300, (num_seats, num_scratch), generator=generator),
        pos_SX=below(seats.canvas.end_S, num_scratch),
        valid_SX=valid_SX,
        live_SJ=torch.cat((canvas_SJ, scratch_SJ), 1),
        canvas_bits_SJ=chance(num_seats, 7),
        bits_SXJ=chance(num_seats, num_scratch, 7),
        shadow_SN=shadow_SN,
    )


def oracle_rows(seats: Seats, plan: RowPlan, scratch: Scratch | None, see_SN: Tensor, seat: int) -> list[Row]:
    """A seat's rows, each with the list of what it sees."""
    canvas, capacity = seats.canvas, seats.canvas.capacity

    def key(column: int) -> tuple[str, int]:
        return ("canvas", column) if column < capacity else ("scratch", column - capacity)

    out = []
    for column in (plan.row_SE[seat] >= 0).nonzero()[:, 0].tolist():
        x = column - capacity
        if x < 0:
            token, pos, see = int(canvas.token_SN[seat, column]), column, int(see_SN[seat, column])
        else:
            assert scratch is not None
            token, pos, see = int(scratch.token_SX[seat, x]), int(scratch.pos_SX[seat, x]), int(canvas.end_S[seat])
        sees = list(range(see))
        if scratch is not None:
            bits = scratch.canvas_bits_SJ[seat] if x < 0 else scratch.bits_SXJ[seat, x]
            sees = [n for n in sees if not scratch.shadow_SN[seat, n]]
            sees += [live for live, bit in zip(scratch.live_SJ[seat].tolist(), bits.tolist()) if bit]
        out.append(Row(token, pos, key(column), tuple(key(each) for each in sees)))
    return out


@pytest.mark.parametrize("with_scratch", [False, True])
@pytest.mark.parametrize("per_seat", [None, 45])
def test_random_passes_equal_a_loop_with_a_dictionary(
    model64: Transformer, per_seat: int | None, with_scratch: bool
) -> None:
    """Passes over random rows with random views, tokens changing in between: the scores of every row, and at the end
    all that is kept."""
    seats = Seats.make(model64, num_scratch=5)
    generator = torch.Generator().manual_seed(4)
    memories = [empty_memory(model64) for _ in LENGTHS]
    written_SX = torch.zeros(len(LENGTHS), 5, dtype=torch.bool)
    for number in range(6):
        run_SN = seats.some(seed=number, share=0.3 if number else 1)
        chance_SN = torch.rand(run_SN.shape, generator=generator)
        see_SN = (1 + chance_SN * seats.canvas.end_S[:, None]).int().clamp(max=seats.canvas.end_S[:, None])
        scratch = scratch_of(seats, generator, written_SX) if with_scratch else None
        plan = seats.plan(run_SN, see_SN, scratch, per_seat)
        assert not plan.overflow_S.any()
        logits_MV = seats.logits(plan)
        for seat in (0, 2, 3):
            rows = oracle_rows(seats, plan, scratch, see_SN, seat)
            expected, _ = forward(model64, memories[seat], rows)
            same(logits_MV[rows_of(plan, seat)], torch.stack(expected) if expected else logits_MV[:0])
        if scratch is not None:
            written_SX |= scratch.valid_SX
        new_SN = torch.randint(0, 300, run_SN.shape, generator=generator)
        seats.canvas.token_SN.copy_(torch.where(seats.some(seed=50 + number), new_SN, seats.canvas.token_SN))
    num_kept = 0
    for seat, memory in enumerate(memories):
        for layer, entries in enumerate(memory):
            for (kind, place), (k, v) in entries.items():
                entry = seats.entry(seat, place) if kind == "canvas" else int(seats.pool.scratch_SX[seat, place])
                same(seats.pool.k[layer, entry], k)
                same(seats.pool.v[layer, entry], v)
                num_kept += 1
    assert num_kept == model64.config.num_layers * (sum(LENGTHS) + (15 if with_scratch else 0))


@pytest.mark.parametrize("change", ["bits", "canvas bits", "live", "shadow", "scratch row"])
def test_the_loop_notices_the_live_list(change: str) -> None:
    """Negative control: the engine's pass has another one."""
    model = tiny_model("tiny-llada-gqa", None, torch.float64)
    seats = Seats.make(model, num_scratch=5)
    written_SX = torch.zeros(len(LENGTHS), 5, dtype=torch.bool)
    scratch = scratch_of(seats, torch.Generator().manual_seed(4), written_SX)
    other = dict(vars(scratch))
    name = {
        "bits": "bits_SXJ", "canvas bits": "canvas_bits_SJ", "live": "live_SJ", "shadow": "shadow_SN",
        "scratch row": "token_SX",
    }[change]  # fmt: skip
    other[name] = other[name].roll(1, -1)
    see_SN = seats.canvas.end_S[:, None].expand(-1, CAPACITY)
    plan = seats.plan(scratch=scratch)
    expected, _ = forward(model, empty_memory(model), oracle_rows(seats, plan, scratch, see_SN, 0))
    same(seats.logits(plan)[rows_of(plan, 0)], torch.stack(expected))
    assert differs(seats.logits(seats.plan(scratch=Scratch(**other)))[rows_of(plan, 0)], torch.stack(expected))


@pytest.mark.parametrize("mass", [None, MassSpec(0), MassSpec(0, softmax=True)], ids=["none", "raw", "softmax"])
def test_a_pass_of_fixed_shape_reads_nothing_from_the_device(mass: MassSpec | None) -> None:
    """Tensors without values are enough for it; a ragged pass looks at counts. (On a CPU, the rotation table looks at
    the positions first.)"""
    seats = Seats.make(tiny_model("tiny-llada"))
    counts_M = torch.ones(sum(LENGTHS), dtype=torch.bool)
    ragged = seats.context(seats.plan(), mass=mass, counts_M=counts_M)
    fixed = seats.context(seats.plan(per_seat=40), mass=mass, counts_M=torch.ones(160, dtype=torch.bool))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert seats.model(fixed.plan.token_M, fixed).shape == (160, 64)
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            seats.model(ragged.plan.token_M, ragged)


# Mass


def oracle_mass(
    seats: Seats, memories: list[Any], run_SN: Tensor, counted_SN: Tensor, first_layer: int, *, softmax: bool
) -> Tensor:
    """float64 [S, N], by the oracle's forward; the memories take what the rows write."""
    settings = FlashSettings(score_layers=first_layer, softmax_mass=softmax)
    mass_SN = torch.zeros(counted_SN.shape, dtype=torch.float64)
    for seat, length in enumerate(seats.lengths):
        rows = draft_rows(seats.canvas.token_SN[seat].tolist(), run_SN[seat].nonzero()[:, 0].tolist(), length)
        counted = [number for number, row in enumerate(rows) if counted_SN[seat, row.position]]
        if rows:
            _, mass = forward(seats.model, memories[seat], rows, counted, settings)
            for pos, value in mass.items():
                mass_SN[seat, pos] = value
    return mass_SN


def our_mass(seats: Seats, run_SN: Tensor, counted_SN: Tensor, per_seat: int | None, spec: MassSpec | None) -> Tensor:
    plan = seats.plan(run_SN, per_seat=per_seat)
    counted_SE = torch.nn.functional.pad(counted_SN, (0, 1))
    counts_M = counted_SE[plan.seat_M, plan.column_M]
    ctx = seats.context(plan, mass=spec, counts_M=counts_M)
    seats.model(plan.token_M, ctx)
    return ctx.mass_SN(counted_SN.sum(1), CAPACITY)


def counted_of(run_SN: Tensor) -> Tensor:
    """Every other row that runs, and none in seat 3."""
    counted_SN = run_SN & (run_SN.cumsum(1) % 2 == 1)
    counted_SN[3] = False
    return counted_SN


def close_mass(ours: Tensor, exact: Tensor) -> None:
    """Ours is fp32 in the end, whatever the network is in."""
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("per_seat", [None, 38])
@pytest.mark.parametrize("first_layer", [0, 1, 2])
def test_mass_is_the_oracles(model64: Transformer, per_seat: int | None, first_layer: int, softmax: bool) -> None:
    """Of a full pass, and of one over a few rows behind it."""
    seats = Seats.make(model64)
    memories = [empty_memory(model64) for _ in LENGTHS]
    spec = MassSpec(first_layer=first_layer, softmax=softmax)
    for run_SN in (seats.canvas.visible_SN(), seats.some(seed=6)):
        counted_SN = counted_of(run_SN)
        exact_SN = oracle_mass(seats, memories, run_SN, counted_SN, first_layer, softmax=softmax)
        mass_SN = our_mass(seats, run_SN, counted_SN, per_seat, spec)
        close_mass(mass_SN, exact_SN)
        assert mass_SN[0, : LENGTHS[0]].all()
        assert not mass_SN[~seats.canvas.visible_SN()].any()
        assert not mass_SN[3].any()


@pytest.mark.parametrize("softmax", [False, True])
def test_mass_of_some_layers_is_the_difference_of_two(model64: Transformer, softmax: bool) -> None:
    """`last_layer` is exclusive."""
    seats = Seats.make(model64)
    run_SN = seats.canvas.visible_SN()
    counted_SN = counted_of(run_SN)
    fresh = [empty_memory(model64) for _ in LENGTHS]
    exact = [oracle_mass(seats, fresh, run_SN, counted_SN, first, softmax=softmax) for first in range(3)]
    for first, last in ((0, 1), (0, 2), (1, 2)):
        mass_SN = our_mass(seats, run_SN, counted_SN, None, MassSpec(first, last, softmax))
        close_mass(mass_SN, exact[first] - exact[last])
        assert differs(mass_SN.double(), exact[first])


@pytest.mark.parametrize("change", ["rows", "first_layer", "softmax"])
def test_the_oracle_notices_another_mass(change: str) -> None:
    """Negative control."""
    model = tiny_model("tiny-llada-gqa", None, torch.float64)
    seats = Seats.make(model)
    run_SN = seats.canvas.visible_SN()
    counted_SN = counted_of(run_SN)
    exact_SN = oracle_mass(seats, [empty_memory(model) for _ in LENGTHS], run_SN, counted_SN, 1, softmax=False)
    close_mass(our_mass(seats, run_SN, counted_SN, None, MassSpec(1)), exact_SN)
    wrong_SN = {
        "rows": lambda: our_mass(seats, run_SN, counted_SN.roll(1, 1) & run_SN, None, MassSpec(1)),
        "first_layer": lambda: our_mass(seats, run_SN, counted_SN, None, MassSpec(0)),
        "softmax": lambda: our_mass(seats, run_SN, counted_SN, None, MassSpec(1, softmax=True)),
    }[change]()
    with pytest.raises(AssertionError):
        close_mass(wrong_SN, exact_SN)


def test_there_is_no_mass_if_no_layer_counts() -> None:
    seats = Seats.make(tiny_model("tiny-llada"))
    run_SN = seats.canvas.visible_SN()
    for spec in (None, MassSpec(first_layer=3), MassSpec(first_layer=1, last_layer=1)):
        mass_SN = our_mass(seats, run_SN, run_SN, None, spec)
        assert torch.equal(mass_SN, torch.zeros(len(LENGTHS), CAPACITY))
    assert our_mass(seats, run_SN, run_SN, None, MassSpec()).any()


# Memory


def storages() -> dict[int, int]:
    """Bytes of every storage that a tensor somewhere holds, views too. (Tensors without values are of other types.)"""
    held = [each for each in gc.get_objects() if type(each) in (Tensor, torch.nn.Parameter)]
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}


def largest_kept(seats: Seats, ctx: PagedContext) -> list[int]:
    """Bytes of the largest new storage that is alive after each layer, and after the pass."""
    gc.collect()
    before, after_layers = storages(), []

    def look(*_: Any) -> None:
        after_layers.append(max(size for where, size in storages().items() if where not in before))

    hooks = [layer.register_forward_hook(look) for layer in seats.model.layers]
    hidden_MD = seats.model(ctx.plan.token_M, ctx)
    for hook in hooks:
        hook.remove()
    del hidden_MD
    look()
    return after_layers


class KeepsScores(PagedContext):
    """Keeps one number of the scores of its last layer, and so all of them."""

    kept: Tensor

    def attend(self, layer: int, q: Tensor) -> Tensor:
        k_MK = self._pool.k[layer][self.sight.entries()[self.plan.seat_M]]
        scores_MHK = torch.einsum("mhd,mkhd->mhk", q, k_MK)
        self.kept = scores_MHK.softmax(-1)[0, 0, :1]
        return super().attend(layer, q)


class KeepsGuesses(PagedContext):
    """Scores the vocabulary from the queries' rows."""

    kept: Tensor

    def attend(self, layer: int, q: Tensor) -> Tensor:
        out = super().attend(layer, q)
        self.kept = out @ torch.ones(out.shape[1], 320)
        return out


@pytest.mark.parametrize("per_seat", [None, 128])
@pytest.mark.parametrize("spec", [None, MassSpec(0), MassSpec(0, softmax=True)], ids=["none", "raw", "softmax"])
def test_nothing_of_rows_by_keys_by_heads_outlives_a_layer(per_seat: int | None, spec: MassSpec | None) -> None:
    """Not even in bools, nor rows by vocabulary. What stays is a hidden row each, and one mask for all heads."""
    seats = Seats.make(tiny_model("tiny-llada"), (128, 128), 128)
    num_rows, num_keys, num_heads, vocab_size, hidden_size = 256, 128, 4, 320, 64
    see_SN = torch.randint(1, 129, (2, 128), generator=torch.Generator().manual_seed(0))
    plan = seats.plan(see_SN=see_SN, per_seat=per_seat)
    assert len(plan.token_M) == num_rows
    assert plan.num_keys == num_keys
    options: dict[str, Any] = {"mass": spec, "counts_M": torch.ones(num_rows, dtype=torch.bool)}
    limit = min(num_rows * num_keys * num_heads, num_rows * vocab_size * 4)
    *layers, after = largest_kept(seats, seats.context(plan, **options))
    assert len(layers) == 3
    assert max(layers) <= num_rows * hidden_size * 4 < limit
    assert after <= num_rows * num_keys < limit
    for keeps in (KeepsScores, KeepsGuesses):
        ctx = keeps(plan, seats.pool, seats.model.rope, seats.canvas.capacity, **options)
        assert min(largest_kept(seats, ctx)) >= limit
        assert math.isfinite(float(ctx.kept.sum()))
