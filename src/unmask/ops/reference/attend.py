"""Attention of a pass's rows over the paged pool: a sweep over each seat's canvas, plus a short live list.

M rows, S seats, P pages of a seat, N = P * page size positions, E entries of the pool, J live entries, H query heads,
Hkv key heads, hd head size, g seats of a group, R rows and K keys of a seat in it
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from unmask.ops.reference.attention import attention


@dataclass(frozen=True)
class Sight:
    """What the rows of a pass see; the same in every layer.

    A row sees the canvas positions [0, see) of its seat that are not shadowed, and the live entries whose bit it holds.
    A position that is live in some other content is shadowed, so each row meets each position once.
    """

    seat_M: Tensor
    """int64: ascending."""
    see_M: Tensor
    """int32: 0 for padding rows, which also hold no bit."""
    num_rows_S: Tensor
    """int64: rows of each seat; with `per_seat`, those that are no padding."""
    page_table_SP: Tensor
    """int32: page of the pool for each `page_size` positions."""
    page_size: int
    num_keys: int
    """No row sees further: the sweep's extent."""
    per_seat: int | None = None
    """Fixed shape: every seat has this many rows. None: rows follow each other seat by seat (waits for the device)."""
    live_SJ: Tensor | None = None
    """int64: entries of the live list."""
    live_bits_MJ: Tensor | None = None
    """bool"""
    shadow_SN: Tensor | None = None
    """bool"""
    whole: Sight | None = None
    """Of whose rows these are some; None: these are all. What does not depend on rows is made once, for the whole."""

    def part(self, seat_P: Tensor, see_P: Tensor, num_S: Tensor, per_seat: int | None) -> Sight:
        """What some of these rows see, ``num`` of each seat, and of fixed shape in ``per_seat`` places."""
        assert self.live_SJ is None, "a part of the rows has no live list"
        return replace(self, seat_M=seat_P, see_M=see_P, num_rows_S=num_S, per_seat=per_seat, whole=self)

    @cached_property
    def groups(self) -> list[Group]:
        """Seats with about as many rows, padded to the longest: one dense attention each."""
        if self.per_seat is not None:
            num_seats = len(self.page_table_SP)
            row_gR = torch.arange(num_seats * self.per_seat, device=self.see_M.device).view(num_seats, self.per_seat)
            return [Group.of(self, torch.arange(num_seats, device=self.see_M.device), row_gR, None, self.num_keys)]
        num_rows = self.num_rows_S.tolist()
        reach_S = torch.zeros_like(self.num_rows_S).scatter_reduce(0, self.seat_M, self.see_M.long(), "amax").tolist()
        start_S = self.num_rows_S.cumsum(0) - self.num_rows_S
        by_size: dict[int, list[int]] = {}
        for seat, count in enumerate(num_rows):
            if count:
                by_size.setdefault(count.bit_length(), []).append(seat)
        out = []
        for seats in by_size.values():
            counts = [num_rows[seat] for seat in seats]
            most, reach, device = max(counts), max(reach_S[seat] for seat in seats), self.see_M.device
            seat_g, count_g = torch.tensor(seats, device=device), torch.tensor(counts, device=device)
            step_gR = torch.minimum(torch.arange(most, device=device), count_g[:, None] - 1)
            row_gR = start_S[seat_g, None] + step_gR
            out.append(Group.of(self, seat_g, row_gR, None if min(counts) == most else count_g, reach))
        return out

    def entries(self) -> Tensor:
        """int64 [S, N]: the pool's entry of every position."""
        offset = torch.arange(self.page_size, device=self.page_table_SP.device)
        return (self.page_table_SP.long()[:, :, None] * self.page_size + offset).flatten(1)


@dataclass(frozen=True)
class Group:
    """Seats whose rows are padded to a rectangle."""

    seat_g: Tensor
    row_gR: Tensor
    """Rows; a shorter seat repeats its last one."""
    here_gR: Tensor | None
    """bool: the row is no repetition; None: none is."""
    entry_gK: Tensor
    """Entries of the swept canvas, then of the live list."""
    allowed_gRK: Tensor | None
    """bool, [g, 1, K] where the rows of each seat see the same; None: every row sees every key."""
    num_swept: int
    fixed: bool
    """Nothing may be read back from the device."""

    @classmethod
    def of(cls, sight: Sight, seat_g: Tensor, row_gR: Tensor, count_g: Tensor | None, reach: int) -> Group:
        here_gR = None
        if count_g is not None:
            here_gR = torch.arange(row_gR.shape[1], device=row_gR.device) < count_g[:, None]
        entry_gK = sight.entries()[seat_g, :reach]
        see_gR = sight.see_M[row_gR]
        live_SJ, live_bits_MJ = sight.live_SJ, sight.live_bits_MJ
        if sight.per_seat is None and live_SJ is None and bool((see_gR == see_gR[:, :1]).all()):
            see_gR = see_gR[:, :1]
        allowed = torch.arange(reach, device=row_gR.device) < see_gR[:, :, None]
        if sight.shadow_SN is not None:
            allowed = allowed & ~sight.shadow_SN[seat_g, None, :reach]
        if live_SJ is not None and live_bits_MJ is not None:
            entry_gK = torch.cat((entry_gK, live_SJ[seat_g]), 1)
            allowed = torch.cat((allowed, live_bits_MJ[row_gR]), 2)
        full = sight.per_seat is None and bool(allowed.all())
        return cls(
            seat_g, row_gR, here_gR, entry_gK, None if full else allowed, reach, fixed=sight.per_seat is not None
        )


@dataclass
class MassSum:
    """Tracking mass of the rows ``counts`` bool [M], summed over all layers that are attended with this object."""

    counts_M: Tensor
    softmax: bool = False
    """Attention weights instead of raw q . k; see `tracking_mass`."""
    sum_SN: Tensor | None = None
    part_SHN: Tensor | None = None
    """What kernels summed, key heads [S, Hkv, N] apart, so that one addition a pass goes over them and not one a layer.
    Of raw q . k only, and not divided by the number of heads."""
    num_heads: int = 1

    def add(self, mass_SN: Tensor) -> None:
        """One more layer."""
        self.sum_SN = mass_SN if self.sum_SN is None else self.sum_SN + mass_SN

    def total_SN(self) -> Tensor | None:
        """fp32 (or wider) [S, N]; None before the first layer."""
        if self.part_SHN is None:
            return self.sum_SN
        part_SN = self.part_SHN.sum(1) / self.num_heads
        return part_SN if self.sum_SN is None else self.sum_SN + part_SN


def attend(q_M: Tensor, k_E: Tensor, v_E: Tensor, sight: Sight, mass: MassSum | None = None) -> Tensor:
    """Rows ``q`` [M, H, hd] over the entries ``k``, ``v`` [E, Hkv, hd] of one layer; returns [M, H, hd].

    Rows that see nothing get zeros. With ``mass`` the layer's tracking mass is added to it.
    """
    if mass is not None:
        mass.add(tracking_mass(q_M, k_E, sight, mass.counts_M, softmax=mass.softmax))
    out_M = torch.empty_like(q_M) if sight.per_seat is None else torch.zeros_like(q_M)
    for group in sight.groups:
        keys, values = k_E[group.entry_gK], v_E[group.entry_gK]
        out_gR = attention(q_M[group.row_gR], keys, values, mask=group.allowed_gRK)
        if group.here_gR is None:
            out_M[group.row_gR.flatten()] = out_gR.flatten(0, 1)
        else:
            out_M[group.row_gR[group.here_gR]] = out_gR[group.here_gR]
    return out_M


def tracking_mass(q_M: Tensor, k_E: Tensor, sight: Sight, counts_M: Tensor, *, softmax: bool = False) -> Tensor:
    """How much the rows ``counts`` bool [M] look at each canvas position: fp32 (or wider) [S, N].

    The sum over those rows of the mean over heads of q . k, unscaled (Flash-dLLM section 3.1), or with ``softmax`` of
    the attention weights. Positions that none of them sweeps get 0. The raw sum is linear in q: one summed query a key
    head, so that a position which some of a seat's counted rows sweep counts them all.
    """
    num_seats, num_pages = sight.page_table_SP.shape
    wide = torch.promote_types(q_M.dtype, torch.float32)
    mass_SN = torch.zeros(num_seats, num_pages * sight.page_size, dtype=wide, device=q_M.device)
    for group in sight.groups:
        counts_gR = counts_M[group.row_gR]
        if group.here_gR is not None:
            counts_gR = counts_gR & group.here_gR
        q_gR, k_gK = q_M[group.row_gR].to(wide), k_E[group.entry_gK].to(wide)
        mass_gK = _softmax_mass(q_gR, k_gK, group, counts_gR) if softmax else _raw_mass(q_gR, k_gK, counts_gR)
        swept_gK = _swept(sight, group, counts_gR)
        mass_SN[group.seat_g, : group.num_swept] = mass_gK[:, : group.num_swept].masked_fill(~swept_gK, 0)
    return mass_SN


def _swept(sight: Sight, group: Group, counts_gR: Tensor) -> Tensor:
    """bool [g, K], the swept keys alone: a counting row sees the position in its sweep."""
    reach_g1 = (sight.see_M[group.row_gR] * counts_gR).amax(1, keepdim=True)
    swept_gK = torch.arange(group.num_swept, device=reach_g1.device) < reach_g1
    return swept_gK if sight.shadow_SN is None else swept_gK & ~sight.shadow_SN[group.seat_g, : group.num_swept]


def _raw_mass(q_gR: Tensor, k_gK: Tensor, counts_gR: Tensor) -> Tensor:
    num_heads, num_kv_heads = q_gR.shape[2], k_gK.shape[2]
    summed_gH = (q_gR * counts_gR[:, :, None, None]).sum(1)
    summed_gHkv = summed_gH.unflatten(1, (num_kv_heads, -1)).sum(2) / num_heads
    mass_gK: Tensor = (k_gK * summed_gHkv[:, None]).sum((2, 3))
    return mass_gK


def _softmax_mass(q_gR: Tensor, k_gK: Tensor, group: Group, counts_gR: Tensor) -> Tensor:
    """As many counting rows of each seat at a time as have no more logits than there are numbers of queries or keys:
    queries x keys x heads never stands."""
    num_heads, num_kv_heads = q_gR.shape[2], k_gK.shape[2]
    mass_gK = torch.zeros(k_gK.shape[:2], dtype=q_gR.dtype, device=q_gR.device)
    seat_g1 = torch.arange(len(q_gR), device=q_gR.device)[:, None]
    most = q_gR.shape[1] if group.fixed else int(counts_gR.sum(1).max())
    allowed_gRK = None if group.allowed_gRK is None else group.allowed_gRK.expand(-1, q_gR.shape[1], -1)
    step = max(1, max(q_gR.numel(), k_gK.numel()) // max(1, mass_gK.numel() * num_heads))
    for row_gr in counts_gR.int().argsort(dim=1, descending=True, stable=True)[:, :most].split(step, 1):
        q_grHkv = q_gR[seat_g1, row_gr].unflatten(2, (num_kv_heads, num_heads // num_kv_heads))
        logits = torch.einsum("grhqd,gkhd->grhqk", q_grHkv, k_gK) / q_gR.shape[3] ** 0.5
        if allowed_gRK is not None:
            logits = logits.masked_fill(~allowed_gRK[seat_g1, row_gr][:, :, None, None], -torch.inf)
        weight_grK = logits.softmax(-1).mean((2, 3)).nan_to_num(0)
        mass_gK += (weight_grK * counts_gR[seat_g1, row_gr][:, :, None]).sum(1)
    return mass_gK
