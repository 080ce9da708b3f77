"""dKV-Cache: what is decided is recomputed once more, and then kept.

S seats, N positions.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from unmask.cache.policy import CachePolicy, Limits, SeatLimits
from unmask.core.canvas import Canvas


class Order(Protocol):
    """What is known, before a pass, of the candidates that it decides. The limits are all parameters of the requests;
    whoever knows the rule knows which of them it reads."""

    def foreseen(self, canvas: Canvas, candidate_SN: Tensor, limits: Any) -> Tensor:
        """bool [S, N]: the candidates that are decided; of a rule that must see predictions, those that it may have."""
        ...

    def most_foreseen(self, reach: int, limits: Any) -> int:
        """Most of them in a pass of one request, of ``reach`` candidates."""
        ...

    def most_decided(self, reach: int, limits: Any) -> int:
        """Most positions that an ordinary pass or a refresh decides."""
        ...


class Delayed(CachePolicy):
    """dKV-Cache (arXiv 2505.15781): all rows but those of tokens that were known before the last pass.

    A token's K/V change most in the pass after its commit, the first that sees it instead of a MASK; so they are kept
    from then on and not one pass earlier. ``variant`` says what is kept: ``decode`` is this rule, and every so many
    passes of a block everything; ``prefill`` the prompt alone, for good; ``pd`` is decode with the prompt kept for
    good, so that only its first pass is a refresh of the whole canvas. ``greedy`` keeps MASKs too: it runs what the
    last pass decided, what ``order`` (None: every candidate) says that this one decides, and the ``window`` undecided
    positions nearest to each of those.

    ``shift`` is the network's logit shift. Under a shift of 1 row p has a token of its own and scores position p + 1,
    and ``shift_type`` says which of the two must be known before the row is kept: ``un_right`` both; ``right`` its own,
    and a row that scores a candidate runs all the same; ``un`` the next one, so that a position decided after its
    neighbour keeps a MASK's K/V until the next refresh (the reference's default). Greedy does not ask.
    """

    def __init__(
        self,
        *,
        variant: str = "decode",
        shift_type: str = "un_right",
        shift: int = 0,
        window: int = 4,
        order: Order | None = None,
    ) -> None:
        self.variant, self.shift_type, self.shift = variant, shift_type, shift
        self.window, self.order = window, order
        self.recurs = variant in ("decode", "greedy")
        # The references' first passes of a block that run everything: LLaDA's begins again with each block and keeps
        # nothing before its third pass, Dream's keeps the prompt from the second on, and so does the greedy one.
        self.num_whole = 1 if shift or variant == "greedy" else 2

    def due(self, canvas: Canvas, limits: Limits) -> Tensor:
        first_S = canvas.pass_S == 0
        return first_S | self._renews(canvas, limits) if self.recurs else first_S

    def rows(self, canvas: Canvas, candidate_SN: Tensor, limits: Limits) -> Tensor:
        if self.variant == "prefill":
            wanted_SN = torch.ones_like(candidate_SN)
        else:
            some_SN = self._greedy if self.variant == "greedy" else self._unkept
            wanted_SN = some_SN(canvas, candidate_SN, limits) | self._renews(canvas, limits)[:, None]
        if not self.recurs:
            wanted_SN = wanted_SN & (canvas.pos_1N() >= (canvas.prompt_S - self.shift)[:, None])
        return canvas.visible_SN() & (wanted_SN | (canvas.pass_S == 0)[:, None])

    def most_rows(self, prompt: int, answer: int, reach: int, limits: SeatLimits) -> int:
        most = min(answer + self.shift, prompt + answer)
        if self.variant != "greedy":
            return most
        next_, new = reach, reach
        if self.order is not None:
            next_, new = self.order.most_foreseen(reach, limits), self.order.most_decided(reach, limits)
        return min(new + next_ * (1 + self.shift + self.window), most)

    def most_rows_left(self, prompt: int, answer: int, reach: int, limits: SeatLimits, undecided: int) -> int:
        """All others are kept, but for the rows that score one of those, and the canvas's last, which scores none.
        Where the prompt is kept for good, a pass that recomputes all of the answer is an ordinary one."""
        most = self.most_rows(prompt, answer, reach, limits)
        return min((1 + self.shift) * undecided + self.shift, most) if self.recurs else most

    def _greedy(self, canvas: Canvas, candidate_SN: Tensor, limits: Limits) -> Tensor:
        """bool [S, N]: what the last pass decided, what this one does, and what is near."""
        next_SN = candidate_SN if self.order is None else self.order.foreseen(canvas, candidate_SN, limits)
        near_SN = _nearest(next_SN, canvas.undecided_SN() & ~next_SN, self.window)
        return canvas.new_SN() | next_SN | self._scoring(next_SN) | near_SN

    def _unkept(self, canvas: Canvas, candidate_SN: Tensor, limits: Limits) -> Tensor:  # noqa: ARG002
        """bool [S, N]: what is not kept, and what scores a candidate."""
        return self._scoring(candidate_SN) | ~self._kept(canvas)

    def _renews(self, canvas: Canvas, limits: Limits) -> Tensor:
        """bool [S]: nothing that was decided is kept in this pass, by the passes that the current block has had."""
        # The last commit before the block was in the pass before its first one.
        before_SN = canvas.block_SN < canvas.current_block_S()[:, None]
        begun_S = torch.where(before_SN, canvas.commit_pass_SN, 0).amax(1).clamp(min=0)
        passes_S, every_S = canvas.pass_S - begun_S, limits.interval_S
        return (passes_S < self.num_whole) | ((every_S > 0) & (passes_S % every_S.clamp(min=1) == 0))

    def _kept(self, canvas: Canvas) -> Tensor:
        """bool [S, N]: rows that are left alone in this pass."""
        known_SN = self._known(canvas)
        if not self.shift or self.shift_type == "right":
            return known_SN
        # There is nothing behind the last row: the reference takes it for known once it has looked twice.
        behind_S1 = (canvas.pass_S > 1)[:, None].expand(-1, self.shift)
        next_SN = torch.cat((known_SN[:, self.shift :], behind_S1), 1)
        return next_SN if self.shift_type == "un" else known_SN & next_SN

    def _known(self, canvas: Canvas) -> Tensor:
        """bool [S, N]: given, or committed before the last pass; so are, in time, positions that are gone."""
        pass_S1 = canvas.pass_S[:, None]
        known_SN = canvas.final_SN & (canvas.commit_pass_SN < pass_S1)
        return torch.where(canvas.pos_1N() < canvas.end_S[:, None], known_SN, pass_S1 > 1)

    def _scoring(self, candidate_SN: Tensor) -> Tensor:
        """bool [S, N]: rows without which a candidate could not be decided."""
        scoring_SN = torch.nn.functional.pad(candidate_SN[:, self.shift :], (0, self.shift))
        first_SN = torch.nn.functional.pad(candidate_SN[:, :1], (0, candidate_SN.shape[1] - 1))
        return scoring_SN | first_SN  # nothing is before position 0: its own row scores it


def _nearest(from_SN: Tensor, among_SN: Tensor, count: int) -> Tensor:
    """bool [S, N]: positions ``among`` which are of the ``count`` nearest ones to one of those ``from``, the left one
    before the right one at the same distance. The two sets have nothing in common.

    Whether p is, it can ask of the nearest on each side alone: between a farther one and p, and as far on its other
    side, there lies all that lies so of the nearer one, and maybe more.
    """
    num_positions = from_SN.shape[1]
    pos_1N = torch.arange(num_positions, device=from_SN.device)[None]
    before_SN = torch.nn.functional.pad(among_SN.cumsum(1), (1, 0))  # [:, p]: how many lie left of p
    left_SN = torch.where(from_SN, pos_1N, -1).cummax(1).values
    right_SN = torch.where(from_SN, pos_1N, num_positions).flip(1).cummin(1).values.flip(1)
    mirror_SN = (2 * left_SN - pos_1N).clamp(min=0)
    ahead_SN = before_SN[:, :-1] - before_SN.gather(1, mirror_SN)  # in [mirror, p)
    near_SN = (left_SN >= 0) & (ahead_SN < count)
    mirror_SN = (2 * right_SN - pos_1N).clamp(max=num_positions)
    ahead_SN = before_SN.gather(1, mirror_SN) - before_SN[:, 1:]  # in (p, mirror)
    near_SN = near_SN | ((right_SN < num_positions) & (ahead_SN < count))
    return among_SN & near_SN
