"""`logit_stats` of `ops.reference.logit_stats` in one pass over the logits, a band of the vocabulary at a time.

The library's product fills a buffer of rows x a band of the vocabulary; a kernel reads it once, while much of it is
still in the cache, and keeps a record a row and part of the band: the softmax's sums and the best token, both online.
When all bands are through, the records are merged. Rows x vocabulary never stand. The product stays the library's,
since at 2,048 rows it takes 2.7 ms at best, where 15% more would be slower than anything that is saved here.

C scored rows, D hidden size, V vocabulary, b ids banned for all, B ids banned for a row, R records of a row; in the
kernels also N columns that one step takes
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from unmask.ops.reference import logit_stats as reference
from unmask.ops.reference.logit_stats import LogitStats, Sampling

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

LOWEST = tl.constexpr(-1e37)
"""Where a running maximum begins. Finite, so that the distance to it times 0 is 0."""
BANNED = tl.constexpr(-1e38)
"""A logit that takes no part in the softmax; so far below any maximum that its exponential is 0."""


@dataclass(frozen=True)
class Bands:
    """How rows and vocabulary are cut. To be measured."""

    max_rows: int = 2048
    """Rows of one product: beyond it more of them make it no faster, and the bands would only be narrower."""
    max_bytes: int = 36 << 20
    """Of the buffer. Prediction: what fits the 60 MB cache beside a band's weights is read from there."""
    step: int = 8448
    """A band is a multiple of it: 33 x 256, so that 2,048 rows give 528 tiles of 128 x 256, 4 for each of the 132
    multiprocessors of an H200; 8,192 would fill the fourth round to 88%."""
    programs: int = 2112
    """Fewest programs of a statistics kernel, 16 a multiprocessor, if the rows and the band allow."""
    block: int = 512
    num_warps: int = 2

    def columns(self, num_rows: int, itemsize: int, vocab_size: int) -> int:
        """Of a band: all of the vocabulary when it fits, or bands of about the same width."""
        most = max(1, self.max_bytes // (num_rows * itemsize * self.step))
        steps = triton.cdiv(vocab_size, self.step)
        return min(vocab_size, int(triton.cdiv(steps, triton.cdiv(steps, most))) * self.step)

    def part(self, num_rows: int, columns: int) -> int:
        """Columns of one program."""
        parts = min(triton.cdiv(columns, self.block), triton.cdiv(self.programs, num_rows))
        return int(triton.cdiv(triton.cdiv(columns, parts), self.block)) * self.block


BANDS = Bands()


def supported(hidden_CD: Tensor, head_VD: Tensor) -> bool:
    """Whether these kernels take the call: no fp64, no two dtypes at once, no gradient, and a head in one piece."""
    wants_grad = torch.is_grad_enabled() and (hidden_CD.requires_grad or head_VD.requires_grad)
    return (
        hidden_CD.dtype in DTYPES
        and head_VD.dtype == hidden_CD.dtype
        and len(head_VD) > 0
        and head_VD.is_contiguous()
        and not wants_grad
    )


@torch.no_grad()
def logit_stats(
    hidden_CD: Tensor,
    head_VD: Tensor,
    *,
    banned_b: Tensor | None = None,
    ban_argmax_CB: Tensor | None = None,
    ban_softmax_CB: Tensor | None = None,
    sampling: Sampling | None = None,
    margin: bool = False,
    entropy: bool = False,
    ask_C: Tensor | None = None,
    bands: Bands = BANDS,
) -> LogitStats:
    """As the reference, which still draws the tokens: with ``sampling``, it is called."""
    num_rows, vocab_size = len(hidden_CD), len(head_VD)
    if sampling is not None or num_rows == 0:
        return reference.logit_stats(
            hidden_CD,
            head_VD,
            banned_b=banned_b,
            ban_argmax_CB=ban_argmax_CB,
            ban_softmax_CB=ban_softmax_CB,
            sampling=sampling,
            margin=margin,
            entropy=entropy,
            ask_C=ask_C,
        )
    device = hidden_CD.device
    banned_b = _some(banned_b)
    ban_argmax_CB, ban_softmax_CB = _some(ban_argmax_CB), _some(ban_softmax_CB)
    ask_C = _some(ask_C)
    most = min(num_rows, bands.max_rows)
    columns = bands.columns(most, hidden_CD.element_size(), vocab_size)
    part = bands.part(most, columns)
    firsts = range(0, vocab_size, columns)
    parts_of_band = triton.cdiv(columns, part)
    num_records = parts_of_band * (len(firsts) - 1) + triton.cdiv(vocab_size - firsts[-1], part)
    num_fields = 6 if margin else 4 if entropy else 3
    record_FCR = torch.empty(num_fields, num_rows, num_records, dtype=torch.float32, device=device)
    id_CR = torch.empty(num_rows, num_records, dtype=torch.int32, device=device)
    out_5C = torch.empty(5, num_rows, dtype=torch.float32, device=device)
    token_C = torch.empty(num_rows, dtype=torch.int64, device=device)
    allowed_V = None if banned_b is None else _allowed(banned_b, vocab_size)
    buffer = hidden_CD.new_empty(most * columns)
    for start in range(0, num_rows, most):
        rows = slice(start, min(start + most, num_rows))
        here_CD = hidden_CD[rows]
        for band, first in enumerate(firsts):
            band_VD = head_VD[first : first + columns]
            logits_CV = buffer[: len(here_CD) * len(band_VD)].view(len(here_CD), len(band_VD))
            torch.mm(here_CD, band_VD.T, out=logits_CV)
            _stats_kernel[(len(here_CD), triton.cdiv(len(band_VD), part))](
                logits_CV,
                record_FCR,
                id_CR,
                out_5C,
                banned_b,
                allowed_V,
                ban_argmax_CB,
                ban_softmax_CB,
                ask_C,
                start,
                num_rows,
                first,
                len(band_VD),
                part,
                band * parts_of_band,
                num_records,
                SHARED=0 if banned_b is None else len(banned_b),
                PER_ROW=0 if ban_argmax_CB is None else ban_argmax_CB.shape[1],
                SOFTMAX=0 if ban_softmax_CB is None else ban_softmax_CB.shape[1],
                MARGIN=margin,
                ENTROPY=entropy,
                ASK=ask_C is not None,
                BLOCK_N=bands.block,
                num_warps=bands.num_warps,
            )
    _merge_kernel[(num_rows,)](
        record_FCR,
        id_CR,
        ban_softmax_CB,
        ask_C,
        token_C,
        out_5C,
        num_rows,
        num_records,
        SOFTMAX=0 if ban_softmax_CB is None else ban_softmax_CB.shape[1],
        MARGIN=margin,
        ENTROPY=entropy,
        ASK=ask_C is not None,
        BLOCK_R=triton.next_power_of_2(num_records),
        num_warps=1,
    )
    return LogitStats(token_C, *out_5C)


def _some(ids: Tensor | None) -> Tensor | None:
    """No list instead of an empty one."""
    return None if ids is None or ids.numel() == 0 else ids.contiguous()


def _allowed(banned_b: Tensor, vocab_size: int) -> Tensor:
    """int8 [V]: 0 at the ids that no row may predict. Hundreds of them lie at the vocabulary's end, too many to compare
    each logit with."""
    allowed_V = torch.empty(vocab_size, dtype=torch.int8, device=banned_b.device)
    block = 256
    grid = (triton.cdiv(vocab_size, block),)
    _allowed_kernel[grid](allowed_V, banned_b, vocab_size, len(banned_b), BLOCK_V=block, BLOCK_B=16, num_warps=2)
    return allowed_V


@triton.jit
def _allowed_kernel(
    allowed_ptr: tl.tensor,
    banned_ptr: tl.tensor,
    vocab_size: tl.tensor,
    num_banned: tl.tensor,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
) -> None:
    id_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    banned_V = tl.zeros((BLOCK_V,), tl.int32)
    for at in range(0, num_banned, BLOCK_B):
        at_B = at + tl.arange(0, BLOCK_B)
        banned_B = tl.load(banned_ptr + at_B, mask=at_B < num_banned, other=-1).to(tl.int32)
        banned_V = tl.maximum(banned_V, tl.max((id_V[:, None] == banned_B[None, :]).to(tl.int32), axis=1))
    tl.store(allowed_ptr + id_V, (1 - banned_V).to(tl.int8), mask=id_V < vocab_size)


@triton.jit
def _num_near(ids_ptr: tl.tensor, first: tl.tensor, end: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """How many of the ids lie in [first, end)."""
    at_B = tl.arange(0, triton.next_power_of_2(COUNT))
    id_B = tl.load(ids_ptr + at_B, mask=at_B < COUNT, other=-1)
    return tl.sum(((id_B >= first) & (id_B < end)).to(tl.int32))


# Counts of rows and records are not specialised: 1 would be no tensor any more, and every kernel would be compiled once
# more for the multiples of 16.
@triton.jit(do_not_specialize=["first_row", "num_rows", "first_record", "num_records"])
def _stats_kernel(
    logits_ptr: tl.tensor,
    record_ptr: tl.tensor,
    id_ptr: tl.tensor,
    out_ptr: tl.tensor,
    banned_ptr: tl.tensor,
    allowed_ptr: tl.tensor,
    ban_argmax_ptr: tl.tensor,
    ban_softmax_ptr: tl.tensor,
    ask_ptr: tl.tensor,
    first_row: tl.tensor,
    num_rows: tl.tensor,
    first_id: tl.tensor,
    num_columns: tl.tensor,
    part: tl.tensor,
    first_record: tl.tensor,
    num_records: tl.tensor,
    SHARED: tl.constexpr,
    PER_ROW: tl.constexpr,
    SOFTMAX: tl.constexpr,
    MARGIN: tl.constexpr,
    ENTROPY: tl.constexpr,
    ASK: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One program: one row, one part of the band. Every lane keeps its own running values; they meet at the end."""
    row = first_row + tl.program_id(0)
    logits_ptr += tl.program_id(0).to(tl.int64) * num_columns
    start = tl.program_id(1) * part
    end = tl.minimum(start + part, num_columns)
    lane_N = tl.arange(0, BLOCK_N)

    # Most parts have no banned id in them: they are told once, and not asked at every step.
    near_shared, near_row, near_softmax = 0, 0, 0
    if SHARED:
        near_shared = _num_near(banned_ptr, first_id + start, first_id + end, SHARED)
    if PER_ROW:
        near_row = _num_near(ban_argmax_ptr + row * PER_ROW, first_id + start, first_id + end, PER_ROW)
    if SOFTMAX:
        near_softmax = _num_near(ban_softmax_ptr + row * SOFTMAX, first_id + start, first_id + end, SOFTMAX)

    max_N = tl.full((BLOCK_N,), LOWEST, tl.float32)
    rest_N = tl.zeros((BLOCK_N,), tl.float32)  # sum of exp(logit - max) without the maximum's own 1
    dot_N = tl.zeros((BLOCK_N,), tl.float32)  # of (logit - max) exp(logit - max)
    best_N = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    id_N = start + lane_N
    top_N = tl.full((BLOCK_N,), BANNED, tl.float32)  # best and second best in the softmax that may be predicted
    second_N = tl.full((BLOCK_N,), BANNED, tl.float32)
    for at in range(start, end, BLOCK_N):
        column_N = at + lane_N
        inside_N = column_N < end
        choice_N = tl.load(logits_ptr + column_N, mask=inside_N, other=float("-inf")).to(tl.float32)
        soft_N = choice_N
        if SHARED:
            if near_shared > 0:
                allowed_N = tl.load(allowed_ptr + first_id + column_N, mask=inside_N, other=0)
                choice_N = tl.where(allowed_N != 0, choice_N, float("-inf"))
        if PER_ROW:
            if near_row > 0:
                for i in range(PER_ROW):
                    banned = tl.load(ban_argmax_ptr + row * PER_ROW + i) - first_id
                    choice_N = tl.where(column_N == banned, float("-inf"), choice_N)
        if SOFTMAX:
            if near_softmax > 0:
                for i in range(SOFTMAX):
                    banned = tl.load(ban_softmax_ptr + row * SOFTMAX + i) - first_id
                    soft_N = tl.where(column_N == banned, BANNED, soft_N)
        soft_N = tl.maximum(soft_N, BANNED)
        # One exponential: either the sums so far shrink to a new maximum, or the new term is below the old one.
        over_N = soft_N - max_N
        factor_N = tl.exp(-tl.abs(over_N))
        if ENTROPY:
            dot_N = tl.where(over_N > 0, (dot_N - over_N * (rest_N + 1)) * factor_N, dot_N + over_N * factor_N)
        rest_N = tl.where(over_N > 0, (rest_N + 1) * factor_N, rest_N + factor_N)
        max_N = tl.maximum(max_N, soft_N)
        if MARGIN:
            may_N = tl.where(choice_N == float("-inf"), BANNED, soft_N)
            second_N = tl.maximum(second_N, tl.minimum(top_N, may_N))
            top_N = tl.maximum(top_N, may_N)
        id_N = tl.where(choice_N > best_N, column_N, id_N)
        best_N = tl.maximum(best_N, choice_N)

    row_record = row.to(tl.int64) * num_records + first_record + tl.program_id(1)
    size = num_rows.to(tl.int64) * num_records
    highest, shrink_N, rest = _join(max_N, rest_N, BLOCK_N)
    tl.store(record_ptr + row_record, highest)
    tl.store(record_ptr + size + row_record, rest)
    best = tl.max(best_N)
    tl.store(record_ptr + 2 * size + row_record, best)
    tl.store(id_ptr + row_record, first_id + tl.min(tl.where(best_N == best, id_N, num_columns)))
    if ENTROPY or MARGIN:
        tl.store(record_ptr + 3 * size + row_record, tl.sum((dot_N + (max_N - highest) * (rest_N + 1)) * shrink_N))
    if MARGIN:
        top, second = _two(top_N, second_N, BLOCK_N)
        tl.store(record_ptr + 4 * size + row_record, top)
        tl.store(record_ptr + 5 * size + row_record, second)
    if ASK:
        asked = tl.load(ask_ptr + row) - first_id
        if (asked >= start) & (asked < end):
            tl.store(out_ptr + 4 * size // num_records + row, tl.load(logits_ptr + asked).to(tl.float32))


@triton.jit
def _join(max_N: tl.tensor, rest_N: tl.tensor, BLOCK_N: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The highest maximum, what brings each sum to it, and the sum of all without its own 1: 1 + rest - 1 would lose
    what a sure token lacks."""
    lane_N = tl.arange(0, BLOCK_N)
    highest = tl.max(max_N)
    shrink_N = tl.exp(max_N - highest)
    winner = tl.min(tl.where(max_N == highest, lane_N, BLOCK_N))
    return highest, shrink_N, tl.sum(tl.where(lane_N == winner, rest_N, (rest_N + 1) * shrink_N))


@triton.jit
def _log1p(x: tl.tensor) -> tl.tensor:
    """log(1 + x) of x >= 0; the series' first missing term is 2e-10 of it where it is used."""
    return tl.where(x < 1e-3, x * (1 - x * (0.5 - x * (1 / 3))), tl.log(1 + x))


@triton.jit
def _two(top_N: tl.tensor, second_N: tl.tensor, BLOCK_N: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Best and second best of all lanes' two; equal ones count twice."""
    lane_N = tl.arange(0, BLOCK_N)
    top = tl.max(top_N)
    winner = tl.min(tl.where(top_N == top, lane_N, BLOCK_N))
    return top, tl.maximum(tl.max(tl.where(lane_N == winner, BANNED, top_N)), tl.max(second_N))


@triton.jit(do_not_specialize=["num_rows", "num_records"])
def _merge_kernel(
    record_ptr: tl.tensor,
    id_ptr: tl.tensor,
    ban_softmax_ptr: tl.tensor,
    ask_ptr: tl.tensor,
    token_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_records: tl.tensor,
    SOFTMAX: tl.constexpr,
    MARGIN: tl.constexpr,
    ENTROPY: tl.constexpr,
    ASK: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """One program: the records of one row."""
    row = tl.program_id(0)
    at_R = tl.arange(0, BLOCK_R)
    mask_R = at_R < num_records
    size = num_rows.to(tl.int64) * num_records
    record_ptr += row.to(tl.int64) * num_records
    max_R = tl.load(record_ptr + at_R, mask=mask_R, other=LOWEST)
    rest_R = tl.load(record_ptr + size + at_R, mask=mask_R, other=0.0)
    best_R = tl.load(record_ptr + 2 * size + at_R, mask=mask_R, other=float("-inf"))
    id_R = tl.load(id_ptr + row.to(tl.int64) * num_records + at_R, mask=mask_R, other=2147483647)
    highest, shrink_R, rest = _join(max_R, rest_R, BLOCK_R)
    total = 1 + rest
    best = tl.max(best_R)
    token = tl.min(tl.where(best_R == best, id_R, 2147483647))
    prob = tl.exp(best - highest) / total
    neg_doubt = tl.where(best == highest, -rest / total, prob - 1)
    if SOFTMAX:
        near = _num_near(ban_softmax_ptr + row * SOFTMAX, token, token + 1, SOFTMAX)
        prob = tl.where(near > 0, 0.0, prob)
        neg_doubt = tl.where(near > 0, -1.0, neg_doubt)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(out_ptr + row, prob)
    neg_lag, neg_entropy, asked_prob = 0.0, 0.0, 0.0
    if MARGIN:
        top_R = tl.load(record_ptr + 4 * size + at_R, mask=mask_R, other=BANNED)
        second_R = tl.load(record_ptr + 5 * size + at_R, mask=mask_R, other=BANNED)
        top, second = _two(top_R, second_R, BLOCK_R)
        top_share, second_share = tl.exp(top - highest), tl.exp(second - highest)
        neg_lag = -tl.where(top == highest, rest + second_share, total - top_share + second_share) / total
    if ENTROPY:
        dot_R = tl.load(record_ptr + 3 * size + at_R, mask=mask_R, other=0.0)
        neg_entropy = tl.sum((dot_R + (max_R - highest) * (rest_R + 1)) * shrink_R) / total - _log1p(rest)
    if ASK:
        asked = tl.load(ask_ptr + row)
        logit = tl.load(out_ptr + 4 * num_rows + row)
        asked_prob = tl.exp(logit - highest) / total
        if SOFTMAX:
            near = _num_near(ban_softmax_ptr + row * SOFTMAX, asked, asked + 1, SOFTMAX)
            asked_prob = tl.where(near > 0, 0.0, asked_prob)
    tl.store(out_ptr + num_rows + row, neg_doubt)
    tl.store(out_ptr + 2 * num_rows + row, neg_lag)
    tl.store(out_ptr + 3 * num_rows + row, neg_entropy)
    tl.store(out_ptr + 4 * num_rows + row, asked_prob)
