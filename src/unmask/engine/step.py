"""One step of decoding for every seat: plan, forward, scores, rule, commits, drafts, state, and what the host is told.

The same program runs in two forms. Ragged, it packs the rows and candidates that there are and looks at counts on the
way. With `Budgets` its shapes are fixed and nothing is read back, so that it can be captured and replayed.

S seats, N positions, E columns of a seat, X scratch columns, M rows, C scored slots, K searched positions, D hidden
size
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unmask.cache.context import PagedContext
from unmask.cache.policy import CachePolicy
from unmask.cache.pool import PagePool
from unmask.core.canvas import Canvas, put
from unmask.core.rows import RowPlan, Scratch, at_rows, pack, slots
from unmask.core.scores import Scores
from unmask.decoding.drafter import Drafter, Prediction
from unmask.decoding.frontier import Frontier, FrontierView
from unmask.decoding.params import DecodeParams
from unmask.decoding.sample import TOKEN, VERIFY
from unmask.engine.scoring import Model, banned_ids, guide, predict
from unmask.engine.stats import Stats
from unmask.errors import ConfigError
from unmask.models.attention import LayerGate
from unmask.ops import LogitStats

READBACK = (
    *("num_settled", "num_undecided", "num_rows", "num_accepted", "overflow", "total_rows"),
    *("end", "num_steps", "num_forward"),
    *("active", "due"),
)
"""Columns of what a step tells the host, by type: int64, int32, bool. ``total_rows``, ``num_steps`` and ``num_forward``
are the request's up to now, ``due`` says whether its next pass is a refresh."""


@dataclass(frozen=True)
class Budgets:
    """Static sizes of a step, per seat."""

    num_rows: int
    """Canvas rows of a pass."""
    num_scored: int
    """Candidates that are scored."""
    refreshes: bool = True
    """Rows for a whole canvas. Without, a seat whose pass is a refresh stands still until a ragged step has run it."""


@dataclass(frozen=True)
class Look:
    """What the next pass would be: nothing has run yet."""

    view: FrontierView
    run_SN: Tensor
    """bool: canvas positions that run."""
    counted_SN: Tensor
    """bool: whose attention counts as mass."""
    due_S: Tensor
    """bool: the pass is a refresh."""
    block_state_SK: Tensor
    """Block states before the look."""


@dataclass(frozen=True)
class Work:
    """What is known before the forward."""

    plan: RowPlan
    view: FrontierView
    """By slot."""
    slot_SC: Tensor
    """Candidates, packed: positions, the capacity where a slot is empty."""
    pos_SC: Tensor
    row_SC: Tensor
    """Row that scores the slot; rows behind the plan's are the saved ones."""
    twin_row_SC: Tensor
    """The same position's row in the seat's guidance twin; in a seat without one, its own."""
    scored_SC: Tensor
    counts_M: Tensor
    overflow_S: Tensor


@dataclass(frozen=True)
class _Turn:
    """A pass that has run, for the drafter."""

    canvas: Canvas
    params: DecodeParams
    view: FrontierView
    scores: Scores
    drafted: Callable[[], Prediction]
    again: Callable[[Scratch, int, Tensor, Tensor], Prediction]


class Step:
    """The step over tensors that stay where they are. Call it, or capture it and replay: the same functions run.

    A seat whose canvas is inactive has no rows and does not change. `readback` int32 [S, 11] holds `READBACK`. Without
    ``budgets`` it is ragged. With ``compiled`` the parts around the network go through torch.compile.
    """

    def __init__(
        self,
        model: Model,
        canvas: Canvas,
        params: DecodeParams,
        pool: PagePool,
        *,
        frontier: Frontier,
        policy: CachePolicy,
        drafter: Drafter | None = None,
        budgets: Budgets | None = None,
        unknown_ids: Sequence[int] = (),
        compiled: bool = False,
        stats: Stats | None = None,
    ) -> None:
        self.model, self.canvas, self.params, self.pool, self.budgets = model, canvas, params, pool, budgets
        self.frontier, self.policy, self.drafter = frontier, policy, drafter or Drafter()
        self.stats = stats
        self.banned_b = banned_ids(model, unknown_ids)
        self.shift = model.config.logit_shift
        num_seats, device = len(pool.page_table_SP), canvas.device
        self.saved_SD = torch.zeros(num_seats, model.head.shape[1], dtype=model.head.dtype, device=device)
        self.readback = torch.zeros(canvas.num_seats, len(READBACK), dtype=torch.int32, device=device)
        self.run_SN = torch.zeros_like(canvas.final_SN)
        """bool [S, N]: canvas positions that were recomputed in the last pass; for viewers."""
        self._check_sizes()
        if compiled:
            self._compile()

    def resize(self, canvas: Canvas, params: DecodeParams) -> None:
        """Go on with larger tensors that hold the same seats; for ragged steps, which nobody captured."""
        if canvas is not self.canvas:
            self.readback = self.readback.new_zeros(canvas.num_seats, len(READBACK))
            self.run_SN = torch.zeros_like(canvas.final_SN)
        self.canvas, self.params = canvas, params

    def fixed(self, num_seats: int, budgets: Budgets, *, compiled: bool = False) -> Step:
        """The step of the first seats in fixed shape, over this one's tensors, for what requests need now."""
        step = copy(self)
        step.canvas, step.params = self.canvas.first(num_seats), self.params.first(num_seats)
        step.budgets, step.stats, step.drafter = budgets, None, copy(self.drafter)
        step.readback, step.run_SN = self.readback[:num_seats], self.run_SN[:num_seats]
        if compiled:
            step._compile()
        return step

    def _check_sizes(self) -> None:
        """A drafter must suit the network, and its static shapes must fit the step's."""
        drafter = self.drafter
        if drafter.num_scratch and self.shift != drafter.shift:
            raise ConfigError(
                f"{type(drafter).__name__} scores a position from its own row, and this network from row "
                f"p - {self.shift}; run it without a drafter"
            )
        if drafter.num_scratch > self.pool.scratch_SX.shape[1]:
            raise ConfigError(
                f"{type(drafter).__name__} needs {drafter.num_scratch} scratch entries a seat and the pool has "
                f"{self.pool.scratch_SX.shape[1]}"
            )

    def _compile(self) -> None:
        """Fuse everything but the network and the head: dozens of small kernels become a few."""
        own = ("look", "hold", "_plan", "_with_saved", "_again_plan", "_end")
        for owner, names in ((self, own), (self.drafter, self.drafter.parts)):
            for name in names:
                setattr(owner, name, torch.compile(getattr(owner, name), fullgraph=True, dynamic=False))

    def _time(self, part: str) -> AbstractContextManager[None]:
        return self.stats.time(part) if self.stats is not None else nullcontext()

    def __call__(self) -> None:
        """One step of every active seat, but for refreshes that the budgets have no rows for."""
        look = self.look()
        if self.budgets is None or self.budgets.refreshes:
            self.run(look)
            return
        self.run(self.hold(look, look.due_S))
        self.let_go(look.due_S)

    # --- before the forward

    def look(self) -> Look:
        """Where tokens may be decided next, and which positions run for that. Advances block states."""
        canvas, params = self.canvas, self.params
        before_SK = canvas.block_state_SK.clone()
        due_S = self.policy.due(canvas, params)
        view = self.frontier.advance(canvas, params)
        run_SN = self.policy.rows(canvas, view.candidate_SN, params)
        if params.needs.guided:  # a twin decides nothing: it runs what its leader runs
            leader_S = canvas.leader_or_self_S()
            run_SN, due_S = run_SN[leader_S] & canvas.visible_SN(), due_S[leader_S]
        counted_SN = self.policy.counted(canvas, view.candidate_SN, params)
        view = replace(view, candidate_SN=view.candidate_SN & self._scorable(run_SN))
        return Look(view, run_SN, counted_SN, due_S & canvas.active_S, before_SK)

    def _scorable(self, run_SN: Tensor) -> Tensor:
        """bool [S, N]: positions whose scoring row runs, or was kept."""
        if not self.shift:
            return run_SN
        source_1N = (self.canvas.pos_1N() - self.shift).clamp(min=0)
        ran_SN = torch.cat((run_SN[:, :1].expand(-1, self.shift), run_SN[:, : -self.shift]), 1)
        return ran_SN | (source_1N == self.canvas.saved_pos_S[:, None])

    def hold(self, look: Look, waits_S: Tensor) -> Look:
        """The look without the seats that ``waits`` bool [S]: they stand still, inactive until `let_go`."""
        canvas = self.canvas
        canvas.active_S &= ~waits_S
        put(canvas.block_state_SK, waits_S[:, None], look.block_state_SK)
        goes_S1 = ~waits_S[:, None]
        view = replace(look.view, candidate_SN=look.view.candidate_SN & goes_S1)
        return replace(look, view=view, run_SN=look.run_SN & goes_S1, counted_SN=look.counted_SN & goes_S1)

    def let_go(self, waits_S: Tensor) -> None:
        """After the pass: who was held takes part again."""
        self.canvas.active_S |= waits_S

    def _plan(self, look: Look) -> Work:
        """Which rows run, and which of them score what."""
        canvas, params, budgets, view = self.canvas, self.params, self.budgets, look.view
        scratch = self.drafter.scratch(canvas)
        per_seat = None if budgets is None else budgets.num_rows + (0 if scratch is None else scratch.pos_SX.shape[1])
        plan = pack(canvas, look.run_SN, view.see_SN, scratch, per_seat=per_seat)
        width = max(int(view.candidate_SN.sum(1).max()), 1) if budgets is None else budgets.num_scored
        slot_SC, not_scored_S = slots(view.candidate_SN, width)
        pos_SC = slot_SC.clamp(max=canvas.capacity - 1)
        source_SC = (pos_SC - self.shift).clamp(min=0)
        row_SC = self._scoring_rows(plan, source_SC, torch.arange(canvas.num_seats, device=canvas.device))
        twin_row_SC = self._scoring_rows(plan, source_SC, _twin_S(params)) if params.needs.guided else row_SC
        return Work(
            plan=plan,
            view=view.at(slot_SC),
            slot_SC=slot_SC,
            pos_SC=pos_SC,
            row_SC=row_SC.clamp(min=0),
            twin_row_SC=twin_row_SC.clamp(min=0),
            scored_SC=(row_SC >= 0) & (slot_SC < canvas.capacity),
            counts_M=at_rows(look.counted_SN, plan),
            overflow_S=plan.overflow_S + not_scored_S,
        )

    def _scoring_rows(self, plan: RowPlan, source_SC: Tensor, of_S: Tensor) -> Tensor:
        """Row of each position among those of the seats ``of``, the kept ones included; -1 where there is none."""
        row_SC = plan.row_SE[of_S].gather(1, source_SC)
        if self.shift:
            kept_SC = (row_SC < 0) & (source_SC == self.canvas.saved_pos_S[of_S, None])
            row_SC = torch.where(kept_SC, len(plan.token_M) + of_S[:, None], row_SC)
        return row_SC

    # --- the network, and the head

    def run(self, look: Look) -> None:
        """The step that was looked at."""
        if self.params.needs.guided and self.drafter.num_scratch:
            raise ConfigError(f"{type(self.drafter).__name__} cannot verify guided requests; leave cfg_scale out")
        with self._time("rules"):
            work = self._plan(look)
        hidden_MD, context = self._forward(work.plan, work.counts_M)
        with self._time("scores"):
            rows_MD = self._with_saved(work, hidden_MD) if self.shift else hidden_MD
            scores = self._score(work, rows_MD)
        turn = _Turn(
            self.canvas,
            self.params,
            work.view,
            scores,
            drafted=lambda: self._drafted(work, hidden_MD),
            again=self._again,
        )
        self._num_more_S: Tensor | None = None
        num_accepted_S = self.drafter.settle(turn)
        with self._time("rules"):
            if self.policy.mass is not None:
                num_counted_S = torch.zeros_like(self.canvas.rows_S).index_add(
                    0, work.plan.seat_M, work.counts_M.long()
                )
                self.policy.observe(self.canvas, context.mass_SN(num_counted_S, self.canvas.capacity))
            num_rows_S = work.plan.num_rows_S if context.gate is None else context.gate.num_rows_S
            self._end(num_rows_S, self._num_more_S, num_accepted_S, work.overflow_S)
        # In place: steps of fixed shape share it, and what is sent to viewers is always this one.
        self.run_SN.copy_(look.run_SN if context.gate is None else _computed_SN(work.plan, context.gate, look.run_SN))

    def _forward(self, plan: RowPlan, counts_M: Tensor | None = None) -> tuple[Tensor, PagedContext]:
        with self._time("forward"):
            mass = self.policy.mass if counts_M is not None else None
            context = PagedContext(plan, self.pool, self.model.rope, self.canvas.capacity, mass=mass, counts_M=counts_M)
            if counts_M is not None:
                most_new = None if self.budgets is None else self.budgets.num_scored
                context.gate = self.policy.gate(self.canvas, self.params, plan, context, self.pool, most_new)
            return self.model(plan.token_M, context), context

    def _with_saved(self, work: Work, hidden_MD: Tensor) -> Tensor:
        """The rows and, behind them, those kept from earlier passes; then keep new ones.

        Kept is the row that scores the leftmost undecided position of each seat, if it ran: once its block is sealed
        it does not run again.
        """
        canvas = self.canvas
        saved_SD = self.saved_SD[: canvas.num_seats]
        out_MD = torch.cat((hidden_MD, saved_SD))
        open_SN = canvas.undecided_SN()
        if self.params.needs.guided:  # a twin keeps the row at its leader's position
            open_SN = open_SN[canvas.leader_or_self_S()]
        first_S1 = torch.where(open_SN, canvas.pos_1N(), canvas.capacity - 1).amin(1, keepdim=True).long()
        source_S1 = (first_S1 - self.shift).clamp(min=0)
        row_S1 = work.plan.row_SE.gather(1, source_S1)
        keeps_S1 = (row_S1 >= 0) & open_SN.any(1, keepdim=True)
        kept_SD = torch.where(keeps_S1, out_MD[row_S1[:, 0].clamp(min=0)], saved_SD)
        saved_SD.copy_(kept_SD)
        put(canvas.saved_pos_S, keeps_S1[:, 0], source_S1[:, 0])
        return out_MD

    def _score(self, work: Work, rows_MD: Tensor) -> Scores:
        stats = self._predict(rows_MD, work.row_SC, work.pos_SC, work.scored_SC, twin_row_SC=work.twin_row_SC)
        values = (stats.token_C, stats.prob_C, stats.neg_doubt_C, stats.neg_lag_C, stats.neg_entropy_C)
        return Scores(work.pos_SC, work.scored_SC, *(value.view_as(work.pos_SC) for value in values))

    def _predict(
        self,
        rows_MD: Tensor,
        row_SC: Tensor,
        pos_SC: Tensor,
        wanted_SC: Tensor,
        *,
        twin_row_SC: Tensor | None = None,
        purpose: int = TOKEN,
        ask_SC: Tensor | None = None,
    ) -> LogitStats:
        """Predictions [S * C] for positions, each from its row. Ragged, only the wanted ones are computed."""
        seat_S = torch.arange(len(pos_SC), device=pos_SC.device)
        flat = [seat_S[:, None].expand_as(pos_SC), row_SC, pos_SC, *(x for x in (twin_row_SC, ask_SC) if x is not None)]
        flat = [x.flatten() for x in flat]
        pick = wanted_SC.flatten().nonzero()[:, 0] if self.budgets is None else None
        if pick is not None:
            flat = [x[pick] for x in flat]
        seat_C, row_C, pos_C, *more = flat
        hidden_CD = rows_MD[row_C]
        if twin_row_SC is not None and self.params.needs.guided:
            guided_C = self.params.twin_S[seat_C] >= 0
            hidden_CD = guide(hidden_CD, rows_MD[more[0]], self.params.guidance_S[seat_C], guided_C)
        ask_C = more[-1] if ask_SC is not None else None
        stats = predict(
            hidden_CD, self.model.head, self.banned_b, seat_C, pos_C, self.canvas, self.params, purpose, ask_C
        )
        if pick is None:
            return stats
        spread = (torch.zeros(pos_SC.numel(), dtype=x.dtype, device=x.device) for x in vars(stats).values())
        return LogitStats(*(out.index_copy_(0, pick, x) for out, x in zip(spread, vars(stats).values())))

    def _drafted(self, work: Work, hidden_MD: Tensor) -> Prediction:
        row_SX = work.plan.row_SE[:, self.canvas.capacity : -1]
        pos_M = torch.cat((work.plan.pos_M, work.plan.pos_M.new_zeros(1)))  # behind all rows: no row at all
        pos_SX = (pos_M[row_SX].long() + self.shift).clamp(max=self.canvas.capacity - 1)  # the one that a row scores
        return _prediction(self._predict(hidden_MD, row_SX.clamp(min=0), pos_SX, row_SX >= 0), pos_SX)

    def _again(self, scratch: Scratch, first: int, pos_SK: Tensor, ask_SK: Tensor) -> Prediction:
        if self.budgets is None and not bool(scratch.valid_SX.any()):
            return Prediction(ask_SK, *(torch.zeros_like(ask_SK, dtype=torch.float32) for _ in range(3)))
        plan = self._again_plan(scratch)
        hidden_MD, _ = self._forward(plan)
        self._num_more_S = plan.num_rows_S
        column = self.canvas.capacity + first
        row_SK = plan.row_SE[:, column : column + pos_SK.shape[1]]
        with self._time("scores"):
            stats = self._predict(
                hidden_MD, row_SK.clamp(min=0), pos_SK, row_SK >= 0, purpose=VERIFY, ask_SC=ask_SK.clamp(min=0)
            )
        return _prediction(stats, pos_SK)

    def _again_plan(self, scratch: Scratch) -> RowPlan:
        canvas = self.canvas
        nothing_SN = torch.zeros_like(canvas.final_SN)
        per_seat = None if self.budgets is None else self.drafter.num_second
        return pack(canvas, nothing_SN, canvas.pos_1N().expand_as(nothing_SN), scratch, per_seat=per_seat)

    # --- after it

    def _end(self, num_rows_S: Tensor, num_more_S: Tensor | None, num_accepted_S: Tensor, overflow_S: Tensor) -> None:
        """Count, retire blocks, and fill the readback; finished seats become inactive, so that a replay before the host
        looks changes nothing."""
        canvas = self.canvas
        guided = self.params.needs.guided
        self.frontier.retire(canvas, self.params)
        canvas.count_pass(num_rows_S, guided=guided)
        if num_more_S is not None:
            canvas.count_pass(num_more_S, guided=guided)
            num_rows_S = num_rows_S + num_more_S
        num_undecided_S = canvas.undecided_SN().sum(1)
        whole = (canvas.num_settled_S().long(), num_undecided_S, num_rows_S, num_accepted_S, overflow_S)
        groups = (
            (*whole, canvas.rows_S),
            (canvas.end_S, canvas.pass_S, canvas.num_forward_S),
            (canvas.active_S, self.policy.due(canvas, self.params)),
        )
        # Stacked by type and joined: a cast for each of eleven columns would be a kernel each.
        self.readback.copy_(torch.cat([torch.stack(group, 1) for group in groups], 1))
        if guided:  # a twin rests when its leader does
            num_undecided_S = num_undecided_S[canvas.leader_or_self_S()]
        canvas.active_S &= num_undecided_S > 0


def _twin_S(params: DecodeParams) -> Tensor:
    """Each seat's guidance twin; itself where it has none."""
    return torch.where(params.twin_S >= 0, params.twin_S, torch.arange(params.num_seats, device=params.twin_S.device))


def _computed_SN(plan: RowPlan, gate: LayerGate, run_SN: Tensor) -> Tensor:
    """bool [S, N]: of the positions in a pass, those that it recomputed, as far as the gate says (``ran_M``)."""
    ran_M: Tensor | None = getattr(gate, "ran_M", None)
    if ran_M is None:
        return run_SN
    row_SN = plan.row_SE[:, : run_SN.shape[1]]
    # Behind the rows, one that did not run: a pass may have none at all.
    return torch.cat((ran_M, ran_M.new_zeros(1)))[row_SN]


def _prediction(stats: LogitStats, like_SW: Tensor) -> Prediction:
    values = (stats.token_C, stats.prob_C, stats.neg_doubt_C, stats.asked_prob_C)
    return Prediction(*(value.view(like_SW.shape) for value in values))
