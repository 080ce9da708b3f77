"""The canvas: all that a decoding request is, as device tensors with a seat axis first.

S seats, N canvas positions, E end-of-text ids. Every tensor is allocated once and changed in place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unmask.core.transfer import send

CLOSED, OPEN, FULL, TO_SEAL, SEALED = range(5)  # states of a block, in the order it goes through them
GIVEN = 0  # commit_pass of a position that came with the request
UNDECIDED = -1


def positions(capacity: int, device: torch.device | str) -> Tensor:
    """[1, N] position numbers, ready to compare with [S, 1]."""
    return torch.arange(capacity, device=device, dtype=torch.int32).unsqueeze(0)


@dataclass
class Canvas:
    """Decoding state of S seats. A free seat is inactive and ends at 0."""

    mask_token_id: int
    token_SN: Tensor
    """int32; MASK while undecided."""
    final_SN: Tensor
    """bool: given with the request, or committed."""
    commit_prob_SN: Tensor
    """float32: probability of the token when it was committed."""
    commit_pass_SN: Tensor
    """int16: the request's own pass that committed it; 0 given, -1 undecided."""
    block_SN: Tensor
    """int16: 0 prompt, 1.. from the prompt's end."""
    prompt_S: Tensor
    """int32: first answer position."""
    end_S: Tensor
    """int32: positions at or past it are gone: not visible, no candidates, never returned."""
    pass_S: Tensor
    """int32: steps this request took part in: one pass each, two where a drafter verifies in a pass of its own."""
    num_forward_S: Tensor
    """int32: forward passes this request had rows in."""
    sched_S: Tensor
    """int32: place in the request's schedule."""
    carry_S: Tensor
    """int32: commits that an earlier pass of the schedule left over."""
    rows_S: Tensor
    """int64: rows this request sent through the network."""
    active_S: Tensor
    """bool: takes part in the next pass."""
    leader_S: Tensor
    """int32: for the twin of a guided seat, the seat that it follows; -1 otherwise."""
    block_state_SK: Tensor
    """uint8: CLOSED .. SEALED of each block, for frontiers that keep several blocks in flight; K = 0 for others."""
    mass_SN: Tensor
    """float32: how much the undecided positions looked at each position in the last pass; before there is any such
    mass, and for policies that do not track, the position itself: the rightmost weighs most."""
    saved_pos_S: Tensor
    """int64: position whose hidden row the step keeps for models with shifted logits; -1 none."""
    pending_pos_SZ: Tensor
    """int64: positions of the drafts that the next pass tries, -1 none; Z = 0 without a drafter."""
    pending_token_SZ: Tensor
    """int64: their tokens."""
    pos_SN: Tensor
    """int32: position numbers, alike in all seats. Kept, since a pass compares with them a dozen times."""

    @classmethod
    def empty(
        cls,
        num_seats: int,
        capacity: int,
        mask_token_id: int,
        device: torch.device | str,
        num_blocks: int = 0,
        num_pending: int = 0,
    ) -> Canvas:
        """All seats free. ``num_blocks`` is the most blocks of a canvas whose state is kept, the prompt's included."""

        def full(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        seats, places = (num_seats,), (num_seats, capacity)
        return cls(
            mask_token_id=mask_token_id,
            token_SN=full(places, mask_token_id, torch.int32),
            final_SN=full(places, False, torch.bool),
            commit_prob_SN=full(places, 0, torch.float32),
            commit_pass_SN=full(places, UNDECIDED, torch.int16),
            block_SN=full(places, 0, torch.int16),
            prompt_S=full(seats, 0, torch.int32),
            end_S=full(seats, 0, torch.int32),
            pass_S=full(seats, 0, torch.int32),
            num_forward_S=full(seats, 0, torch.int32),
            sched_S=full(seats, 0, torch.int32),
            carry_S=full(seats, 0, torch.int32),
            rows_S=full(seats, 0, torch.int64),
            active_S=full(seats, False, torch.bool),
            leader_S=full(seats, -1, torch.int32),
            block_state_SK=full((num_seats, num_blocks), CLOSED, torch.uint8),
            mass_SN=full(places, 0, torch.float32),
            saved_pos_S=full(seats, -1, torch.int64),
            pending_pos_SZ=full((num_seats, num_pending), -1, torch.int64),
            pending_token_SZ=full((num_seats, num_pending), -1, torch.int64),
            pos_SN=positions(capacity, device).repeat(num_seats, 1),
        )

    @property
    def num_seats(self) -> int:
        return self.token_SN.shape[0]

    @property
    def capacity(self) -> int:
        return self.token_SN.shape[1]

    @property
    def device(self) -> torch.device:
        return self.token_SN.device

    def pos_1N(self) -> Tensor:
        """[1, N]"""
        return self.pos_SN[:1]

    def visible_SN(self) -> Tensor:
        """Positions that exist in this pass."""
        return (self.pos_1N() < self.end_S[:, None]) & self.active_S[:, None]

    def undecided_SN(self) -> Tensor:
        """Positions still to be decided. A twin decides nothing: it follows its leader."""
        return self.visible_SN() & ~self.final_SN & (self.leader_S < 0)[:, None]

    def new_SN(self, ago: int = 0) -> Tensor:
        """bool [S, N]: committed in the request's last step, or in the one ``ago`` steps before."""
        step_S1 = (self.pass_S - ago)[:, None]
        return self.visible_SN() & (self.commit_pass_SN == step_S1) & (step_S1 > 0)

    def current_block_S(self) -> Tensor:
        """[S] the leftmost block with something undecided; beyond all blocks when there is none."""
        beyond = torch.iinfo(self.block_SN.dtype).max
        return torch.where(self.undecided_SN(), self.block_SN, beyond).amin(1)

    def place(self, seat: int, token_N: Tensor, *, prompt: int, block_N: Tensor, leader: int = -1) -> None:
        """Take a seat: ``token_N`` int [L] holds the prompt, given tokens, and MASK where the answer is to be found.

        ``block_N`` int [L] is the block of each position. With ``leader`` the seat is its guidance twin: the same
        canvas with the prompt masked.
        """
        length = token_N.shape[0]
        token = torch.full((self.capacity,), self.mask_token_id, dtype=torch.int32)
        token[:length] = token_N
        given = token != self.mask_token_id
        block = torch.zeros(self.capacity, dtype=torch.int16)
        block[:length] = block_N
        final = given.clone()
        final[length:].fill_(True)  # past the extent there is nothing to decide
        if leader >= 0:
            token[:prompt].fill_(self.mask_token_id)
        send(self.token_SN[seat], token)
        send(self.final_SN[seat], final)
        send(self.commit_pass_SN[seat], torch.where(given, GIVEN, UNDECIDED).to(torch.int16))
        send(self.block_SN[seat], block)
        self.commit_prob_SN[seat].zero_()
        for state, value in (
            (self.prompt_S, prompt),
            (self.end_S, length),
            (self.leader_S, leader),
            (self.active_S, True),
            (self.pending_pos_SZ, -1),
            (self.saved_pos_S, -1),
            (self.block_state_SK, CLOSED),
        ):
            state[seat].fill_(value)
        for state in (self.pass_S, self.num_forward_S, self.sched_S, self.carry_S, self.rows_S):
            state[seat].zero_()
        torch.arange(self.capacity, out=self.mass_SN[seat])
        self.block_state_SK[seat, :1].fill_(TO_SEAL)  # the prompt is decided; one pass and its rows are left alone

    def release(self, seat: int) -> None:
        """Free a seat."""
        self.active_S[seat].fill_(False)
        self.end_S[seat].zero_()
        self.leader_S[seat].fill_(-1)

    def grown(self, num_seats: int, capacity: int, num_blocks: int) -> Canvas:
        """A larger canvas with the same seats in the same places."""
        num_pending = self.pending_pos_SZ.shape[1]
        larger = Canvas.empty(num_seats, capacity, self.mask_token_id, self.device, num_blocks, num_pending)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                getattr(larger, name)[tuple(slice(size) for size in value.shape)] = value
        return larger

    def first(self, num_seats: int) -> Canvas:
        """The first seats: the same tensors, not copies."""
        first: dict[str, Any] = {k: v[:num_seats] for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **first)

    def commit(
        self, chosen_SN: Tensor, token_SN: Tensor, prob_SN: Tensor, eos_SE: Tensor, *, new_pass: bool = True
    ) -> None:
        """Make ``chosen`` positions final and end the canvas at the leftmost end of text of the answer.

        A later commit may move the end left, never right; an end-of-text id of the prompt means nothing. Counts the
        pass of every active seat, unless these commits belong to a pass that was counted.
        """
        if new_pass:
            self.pass_S += self.active_S.int()
        put(self.token_SN, chosen_SN, token_SN.int())
        put(self.commit_prob_SN, chosen_SN, prob_SN)
        put(self.commit_pass_SN, chosen_SN, self.pass_S[:, None].to(torch.int16))
        self.final_SN |= chosen_SN
        ends_SN = chosen_SN & (token_SN[:, :, None] == eos_SE[:, None, :]).any(-1)
        first_S = torch.where(ends_SN, self.pos_1N() + 1, self.capacity + 1).amin(1)
        torch.minimum(self.end_S, first_S, out=self.end_S)

    def leader_or_self_S(self) -> Tensor:
        """int64 [S]: whom a seat follows; itself where it is no twin."""
        seat_S = torch.arange(self.num_seats, device=self.device)
        return torch.where(self.leader_S >= 0, self.leader_S.long(), seat_S)

    def count_pass(self, num_rows_S: Tensor, *, guided: bool = True) -> None:
        """Count a forward pass with so many rows of each seat; a twin's rows count for the request that it serves.
        Unless ``guided``, there are no twins."""
        self.num_forward_S += num_rows_S > 0
        if guided:
            self.rows_S.scatter_add_(0, self.leader_or_self_S(), num_rows_S)
        else:
            self.rows_S += num_rows_S

    def follow(self) -> None:
        """Twins take over what their leaders decided; their prompts stay masked."""
        source_S = self.leader_or_self_S()
        answer_SN = self.pos_1N() >= self.prompt_S[:, None]
        put(self.token_SN, answer_SN, self.token_SN[source_S])
        put(self.final_SN, answer_SN, self.final_SN[source_S])
        self.end_S.copy_(self.end_S[source_S])

    def num_settled_S(self) -> Tensor:
        """[S] length of the longest run of final positions from the answer's start, within the end."""
        open_SN = ~self.final_SN & (self.pos_1N() >= self.prompt_S[:, None])
        first_S = torch.where(open_SN, self.pos_1N(), self.capacity).amin(1)
        return torch.minimum(first_S, self.end_S) - self.prompt_S


def put(state: Tensor, where: Tensor, value: Tensor) -> None:
    """Set ``state`` to ``value`` where it is told, in one kernel."""
    torch.where(where, value.detach(), state, out=state)
