"""dKV-Cache: what is decided is recomputed once more, and then kept.

S seats, N positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.cache.policy import CachePolicy, Limits, SeatLimits
from unmask.core.canvas import Canvas


class Delayed(CachePolicy):
    """dKV-Cache (arXiv 2505.15781): all rows but those of tokens that were known before the last pass.

    A token's K/V change most in the pass after its commit, the first that sees it instead of a MASK; so they are kept
    from then on and not one pass earlier. ``variant`` says what is kept: ``decode`` is this rule, and every so many
    passes of a block everything; ``prefill`` the prompt alone, for good; ``pd`` is decode with the prompt kept for
    good, so that only its first pass is a refresh of the whole canvas.

    ``shift`` is the network's logit shift. Under a shift of 1 row p has a token of its own and scores position p + 1,
    and ``shift_type`` says which of the two must be known before the row is kept: ``un_right`` both; ``right`` its own,
    and a row that scores a candidate runs all the same; ``un`` the next one, so that a position decided after its
    neighbour keeps a MASK's K/V until the next refresh (the reference's default).
    """

    def __init__(self, *, variant: str = "decode", shift_type: str = "un_right", shift: int = 0) -> None:
        self.variant, self.shift_type, self.shift = variant, shift_type, shift
        self.recurs = variant == "decode"
        # The references' first passes of a block that run everything: LLaDA's begins again with each block and keeps
        # nothing before its third pass, Dream's keeps the prompt from the second on.
        self.num_whole = 1 if shift else 2

    def due(self, canvas: Canvas, limits: Limits) -> Tensor:
        first_S = canvas.pass_S == 0
        return first_S | self._renews(canvas, limits) if self.variant == "decode" else first_S

    def rows(self, canvas: Canvas, candidate_SN: Tensor, limits: Limits) -> Tensor:
        wanted_SN = self._scoring(candidate_SN)
        if self.variant == "prefill":
            wanted_SN = torch.ones_like(wanted_SN)
        else:
            wanted_SN = wanted_SN | ~self._kept(canvas) | self._renews(canvas, limits)[:, None]
        if self.variant != "decode":
            wanted_SN = wanted_SN & (canvas.pos_1N() >= (canvas.prompt_S - self.shift)[:, None])
        return canvas.visible_SN() & (wanted_SN | (canvas.pass_S == 0)[:, None])

    def most_rows(self, prompt: int, answer: int, reach: int, limits: SeatLimits) -> int:  # noqa: ARG002
        return min(answer + self.shift, prompt + answer)

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
