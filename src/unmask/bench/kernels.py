"""Every operation of `unmask.ops`: right, how near to its floor, how much faster than torch's own parts.

Each operation is first checked at awkward sizes, then measured at the sizes that steps have, where it is checked again.
Ceilings are measured in the same run.

M rows, D hidden size, F MLP size, V vocabulary, C scored rows, H query heads, Hkv key heads, hd head size, E entries,
S seats, Q rows of a seat, R numbers that are kept of a row, P packed rows, b banned ids
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unmask import ops as unmask_ops
from unmask.bench import kernels_attend, kernels_fp8
from unmask.bench.checking import BOUNDS, WORST, errors_of, poisoned, worst_error
from unmask.bench.floor import Cost, elementwise_cost, linear_cost, measure_ceilings, project_cost, stats_cost
from unmask.bench.names import OPS
from unmask.bench.results import Results
from unmask.bench.trial import Case, Trial, check, measure
from unmask.ops.reference import drift as drift_reference
from unmask.ops.reference import linear as linear_reference
from unmask.ops.reference import logit_stats as stats_reference
from unmask.ops.reference import mlp as mlp_reference
from unmask.ops.reference import norm as norm_reference
from unmask.ops.reference import project as project_reference
from unmask.ops.reference.rope import rope

WEIGHT_BYTES = 400e6
"""Weights that a measurement goes through: several times the cache, so that each is read from memory."""
MAX_WEIGHTS = 16
STATS_BOUNDS = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-4}
"""Of probabilities. The logits are rounded to the type first: 2^-9 of a logit of 6 is 1% of its exponential."""
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Ops:
    """The operations as they are measured."""

    attention: Any
    """The module or class with `attend`, `tracking_mass` and `attend_and_mass`."""
    project_and_store: Callable[..., Tensor]
    product_then_store: Callable[..., Tensor]
    """One product for queries, keys and values, then whatever rotates and stores."""
    logit_stats: Callable[..., Any]
    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    swiglu: Callable[[Tensor], Tensor]
    linear: Callable[[Tensor, Tensor], Tensor]
    linear_swiglu: Callable[[Tensor, Tensor], Any]
    drift: Callable[..., Tensor]
    furthest: Callable[..., Tensor]
    picked: Callable[..., drift_reference.Picked]
    fp8: Any = None
    """What is in `kernels_fp8.ReferenceKernels`; None where 8-bit floats are not multiplied."""


def triton_ops() -> Ops:
    """The kernels. Products are what `unmask.ops` takes for their shapes: the library's, where it is the faster one."""
    from unmask.ops.triton import attend, drift, logit_stats, mlp, norm, project

    return Ops(
        attention=attend,
        project_and_store=project.project_and_store,
        product_then_store=project.by_library,
        logit_stats=logit_stats.logit_stats,
        rms_norm=norm.rms_norm,
        add_rms_norm=norm.add_rms_norm,
        swiglu=mlp.swiglu,
        linear=unmask_ops.linear,
        linear_swiglu=unmask_ops.linear_swiglu,
        drift=drift.drift,
        furthest=drift.furthest,
        picked=drift.picked,
        fp8=kernels_fp8.triton_kernels(),
    )


def reference_ops() -> Ops:
    """The definitions, which run anywhere."""
    return Ops(
        attention=kernels_attend.ReferenceKernels,
        project_and_store=project_reference.project_and_store,
        product_then_store=project_reference.project_and_store,
        logit_stats=stats_reference.logit_stats,
        rms_norm=norm_reference.rms_norm,
        add_rms_norm=norm_reference.add_rms_norm,
        swiglu=mlp_reference.swiglu,
        linear=linear_reference.linear,
        linear_swiglu=linear_reference.linear_swiglu,
        drift=drift_reference.drift,
        furthest=drift_reference.furthest,
        picked=drift_reference.picked,
        fp8=kernels_fp8.ReferenceKernels,
    )


def _randn(*size: int, device: Any, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*size, device=device) * scale).to(dtype)


def _num_weights(num_bytes: float, device: Any) -> int:
    on_gpu = torch.device(device).type == "cuda"
    return min(MAX_WEIGHTS, max(2, -(-int(WEIGHT_BYTES) // int(num_bytes)))) if on_gpu else 2


def from_library(call: Callable[[int], Any]) -> bool:
    """Whether the call's product is the library's own `F.linear`: to time it beside that would tell nothing."""
    plain, made = F.linear, []

    def noted(*args: Any, **options: Any) -> Tensor:
        made.append(args)
        return plain(*args, **options)

    F.linear = noted
    try:
        call(0)
    finally:
        F.linear = plain
    return bool(made)


LIBRARY = "the library's"
"""What runs, where it is `F.linear`."""


# Queries, keys and values


def separately(
    hidden_MD: Tensor,
    weight: Tensor,
    cos_M: Tensor,
    sin_M: Tensor,
    write_M: Tensor,
    k_E: Tensor,
    v_E: Tensor,
) -> Tensor:
    """The published baseline (arXiv 2609.26796): three products, a rotation each of queries and keys, two stores."""
    num_kv_heads, head_dim = k_E.shape[1:]
    kv = num_kv_heads * head_dim
    q_weight, k_weight, v_weight = weight.split((len(weight) - 2 * kv, kv, kv))
    q_M, k_M, v_M = (F.linear(hidden_MD, each).unflatten(-1, (-1, head_dim)) for each in (q_weight, k_weight, v_weight))
    q_M = rope(q_M, cos_M, sin_M)
    k_E.index_copy_(0, write_M, rope(k_M, cos_M, sin_M))
    v_E.index_copy_(0, write_M, v_M)
    return q_M


def project_trial(
    ops: Ops,
    num_rows: int,
    *,
    device: Any,
    hidden: int = 4096,
    heads: int = 32,
    kv_heads: int = 32,
    head_dim: int = 128,
    dtype: torch.dtype = BF16,
    bias: bool = False,
) -> Trial:
    """Rows to random entries of a pool that holds NaN."""
    num_out, num_entries = (heads + 2 * kv_heads) * head_dim, max(8192 if num_rows > 256 else 512, 2 * num_rows)
    num_weights = _num_weights(num_out * hidden * dtype.itemsize, device)
    weights = [_randn(num_out, hidden, device=device, dtype=dtype, scale=0.02) for _ in range(num_weights)]
    bias_O = _randn(num_out, device=device, dtype=dtype) if bias else None
    x_MD = _randn(num_rows, hidden, device=device, dtype=dtype)
    angle_M = torch.rand(num_rows, head_dim // 2, device=device) * 6
    cos_M, sin_M = angle_M.cos(), angle_M.sin()
    write_M = torch.randperm(num_entries, device=device)[:num_rows]

    def pool(kind: torch.dtype) -> tuple[Tensor, Tensor]:
        k_E, v_E = (
            torch.full((num_entries, kv_heads, head_dim), float("nan"), device=device, dtype=kind) for _ in range(2)
        )
        return k_E, v_E

    def errors() -> dict[str, float]:
        ours, right = pool(dtype), pool(torch.float64)
        with poisoned():
            q_M = ops.project_and_store(x_MD, weights[0], bias_O, cos_M, sin_M, write_M, *ours)
        wide_bias = None if bias_O is None else bias_O.double()
        wide = (x_MD.double(), weights[0].double(), wide_bias, cos_M, sin_M, write_M)
        right_q_M = project_reference.project_and_store(*wide, *right)
        untouched = torch.ones(num_entries, dtype=torch.bool, device=device).index_fill_(0, write_M, False)
        stray = float("inf") if any((~each[untouched].isnan()).any() for each in ours) else 0.0
        k_M, v_M = ((a[write_M], b[write_M]) for a, b in zip(ours, right))
        return errors_of(q=(q_M, right_q_M), k=k_M, v=v_M) | {"stray writes": stray}

    still = pool(dtype)

    def over(way: Callable[..., Any]) -> Callable[[int], Any]:
        return lambda number: way(x_MD, weights[number % num_weights], bias_O, cos_M, sin_M, write_M, *still)

    ours = over(ops.project_and_store)
    others = {} if from_library(ours) else {"product, then rotate and store": over(ops.product_then_store)}
    if bias_O is None:
        others["three products, rotations, stores"] = over(lambda x, w, _, *more: separately(x, w, *more))
    return Trial(
        errors=errors,
        bound=BOUNDS[dtype],
        cost=project_cost(num_rows, hidden, heads, kv_heads, head_dim, dtype.itemsize),
        ours=ours,
        others=others,
        parts={"product alone": over(lambda x, w, *_: F.linear(x, w))},
        num_calls=num_weights,
    )


# Scores


def exact_stats(
    hidden_CD: Tensor, head_VD: Tensor, banned_b: Tensor, token_C: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """fp64: logits of the allowed tokens, and of each row for its ``token`` what the operation tells.

    What is left of the probability is added up, not 1 - p: it keeps its digits where p is nearly 1.
    """
    logits_CV = hidden_CD.double() @ head_VD.double().T
    log_p_CV = logits_CV.log_softmax(1)
    allowed_CV = logits_CV.index_fill(1, banned_b, -torch.inf)
    others_CV = log_p_CV.scatter(1, token_C[:, None], -torch.inf)
    neg_doubt_C = -others_CV.exp().sum(1)
    second_C = others_CV.index_fill(1, banned_b, -torch.inf).amax(1).exp()
    return allowed_CV, {
        "prob": log_p_CV.gather(1, token_C[:, None])[:, 0].exp(),
        "doubt": neg_doubt_C,
        "lag": neg_doubt_C - second_C,
        "entropy": (log_p_CV.exp() * log_p_CV).sum(1),
    }


def score_rows(heads: list[Tensor], num_rows: int, banned_b: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [C, D] of four kinds in turn, and the token of each that ties with another (-1: none does).

    1. Random. 2. One token stands out by 4 to 24: what is left of the probability goes down to 1e-6, and must keep its
    digits. 3. A banned token is the best. 4. Two tokens score the same to the last bit, since one number of the row is
    all that there is; the first weights are changed for it.
    """
    head_VD = heads[0]
    (vocab, hidden), device = head_VD.shape, head_VD.device
    x_CD = torch.randn(num_rows, hidden, device=device)
    number_C = torch.arange(num_rows, device=device)
    kind_C, tied_C = number_C % 4, torch.full_like(number_C, -1)
    token_C = torch.where(kind_C == 2, banned_b[number_C % len(banned_b)], 10 + 37 * number_C % (vocab - 20))
    toward_CD = head_VD[token_C].float()
    toward_CD = toward_CD / toward_CD.square().sum(1, keepdim=True)
    by_C = torch.tensor([24.0, 4.0, 16.0, 8.0], device=device)[number_C // 4 % 4] * ((kind_C == 1) | (kind_C == 2))
    x_CD += by_C[:, None] * toward_CD
    low, high, column = vocab // 3, vocab // 2, hidden // 2
    head_VD[[low, high], column] = 8 * head_VD[:, column].abs().amax()
    x_CD[kind_C == 3] = 0
    x_CD[kind_C == 3, column] = 4.0
    tied_C[kind_C == 3] = low
    return x_CD.to(head_VD.dtype), tied_C


def stats_trial(
    ops: Ops, num_rows: int, *, device: Any, hidden: int = 4096, vocab: int = 126464, dtype: torch.dtype = BF16
) -> Trial:
    """Against the product alone. At most 256 rows are compared: in fp64 each takes 1 MB of logits."""
    num_weights = _num_weights(vocab * hidden * dtype.itemsize, device)
    heads = [_randn(vocab, hidden, device=device, dtype=dtype, scale=0.02) for _ in range(num_weights)]
    banned_b = torch.tensor([vocab - 1, 5, 9], device=device)
    x_CD, tied_C = score_rows(heads, num_rows, banned_b)

    def errors() -> dict[str, float]:
        few_CD, low_C = x_CD[:256], tied_C[:256]
        with poisoned():
            found = ops.logit_stats(few_CD, heads[0], banned_b=banned_b, margin=True, entropy=True)
        allowed_CV, right = exact_stats(few_CD, heads[0], banned_b, found.token_C)
        chosen_C, best_C = allowed_CV.gather(1, found.token_C[:, None])[:, 0], allowed_CV.amax(1)
        ours = (found.prob_C, found.neg_doubt_C, found.neg_lag_C, found.neg_entropy_C)
        outputs = {name: (each, right[name]) for name, each in zip(right, ours)}
        # Each number beside itself, however small it is beside the others.
        worst = {WORST + name: worst_error(*both, floor=0.0) for name, both in outputs.items()}
        return {
            **errors_of(**outputs),
            **worst,
            "token": float(((best_C - chosen_C) / best_C.abs().clamp(min=1)).max()),
            "ties": float(((low_C >= 0) & (found.token_C != low_C)).sum()),
        }

    def call(number: int) -> Any:
        return ops.logit_stats(x_CD, heads[number % num_weights], banned_b=banned_b)

    def composed(number: int) -> Any:
        logits_CV = F.linear(x_CD, heads[number % num_weights]).float().index_fill_(1, banned_b, -torch.inf)
        return logits_CV.softmax(1).max(1)

    return Trial(
        errors=errors,
        bound=STATS_BOUNDS[dtype],
        cost=stats_cost(num_rows, hidden, vocab, dtype.itemsize),
        ours=call,
        others={"product, softmax, max": composed},
        parts={"product alone": lambda number: F.linear(x_CD, heads[number % num_weights])},
        num_calls=num_weights,
        memory=True,
    )


# What lies between the products


def norm_trial(
    ops: Ops, num_rows: int, size: int = 4096, *, device: Any, dtype: torch.dtype = BF16, add: bool = True
) -> Trial:
    """With ``add``, the sum that comes before the norm too. Every third row is so small that epsilon decides."""
    num_sets = 8
    scale_M1 = torch.where(torch.arange(num_rows, device=device) % 3 == 2, 1e-3, 1.0)[:, None]
    x, delta = ((_randn(num_sets, num_rows, size, device=device, dtype=dtype) * scale_M1).to(dtype) for _ in range(2))
    gain = (torch.rand(size, device=device) + 0.5).to(dtype)

    def ours(number: int) -> Any:
        at = number % num_sets
        return ops.add_rms_norm(x[at], delta[at], gain, 1e-5) if add else ops.rms_norm(x[at], gain, 1e-5)

    def composed(number: int) -> Any:
        at = number % num_sets
        return F.rms_norm(x[at] + delta[at] if add else x[at], (size,), gain, 1e-5)

    def errors() -> dict[str, float]:
        with poisoned():
            found = ours(0)
        total, out = found if add else (x[0], found)
        plain = x[0].double() + delta[0].double() if add else x[0].double()
        right = norm_reference.rms_norm(plain, gain.double(), 1e-5)
        return errors_of(norm=(out, right), **({"sum": (total, plain)} if add else {}))

    numbers = num_rows * size
    return Trial(
        errors=errors,
        bound=BOUNDS[dtype],
        cost=elementwise_cost(2 * numbers if add else numbers, 2 * numbers if add else numbers, dtype.itemsize),
        ours=ours,
        others={"add, F.rms_norm" if add else "F.rms_norm": composed},
        num_calls=num_sets,
    )


def swiglu_trial(ops: Ops, num_rows: int, size: int = 12288, *, device: Any, dtype: torch.dtype = BF16) -> Trial:
    """Against torch's silu and a product. Gates of every third row are so large that exponentials leave the range."""
    num_sets = 8
    gate_up = _randn(num_sets, num_rows, 2 * size, device=device, dtype=dtype)
    gate_up[:, 1::3, :size] *= 60

    def errors() -> dict[str, float]:
        with poisoned():
            out = ops.swiglu(gate_up[0])
        return errors_of(out=(out, mlp_reference.swiglu(gate_up[0].double())))

    return Trial(
        errors=errors,
        bound=BOUNDS[dtype],
        cost=elementwise_cost(2 * num_rows * size, num_rows * size, dtype.itemsize),
        ours=lambda number: ops.swiglu(gate_up[number % num_sets]),
        others={"F.silu, times": lambda number: mlp_reference.swiglu(gate_up[number % num_sets])},
        num_calls=num_sets,
    )


def linear_trial(
    ops: Ops, num_rows: int, num_in: int, num_out: int, *, device: Any, dtype: torch.dtype = BF16
) -> Trial:
    """One product. Where it is the library's own there is nothing to beat: its distance from the floor is all."""
    num_weights = _num_weights(num_in * num_out * dtype.itemsize, device)
    weights = [_randn(num_out, num_in, device=device, dtype=dtype, scale=0.02) for _ in range(num_weights)]
    x_MD = _randn(num_rows, num_in, device=device, dtype=dtype)

    def errors() -> dict[str, float]:
        with poisoned():
            out = ops.linear(x_MD, weights[0])
        return errors_of(out=(out, x_MD.double() @ weights[0].double().T))

    def ours(number: int) -> Tensor:
        return ops.linear(x_MD, weights[number % num_weights])

    library = from_library(ours)
    return Trial(
        errors=errors,
        bound=BOUNDS[dtype],
        cost=linear_cost(num_rows, num_in, num_out, dtype.itemsize),
        ours=ours,
        others={} if library else {"F.linear": lambda number: F.linear(x_MD, weights[number % num_weights])},
        num_calls=num_weights,
        facts={"runs": LIBRARY} if library else {},
    )


def gated_trial(
    ops: Ops, num_rows: int, num_in: int = 4096, num_out: int = 24576, *, device: Any, dtype: torch.dtype = BF16
) -> Trial:
    """Gate and up with the activation, beside the library's product with the activation's kernel behind it."""
    num_weights = _num_weights(num_in * num_out * dtype.itemsize, device)
    weights = [_randn(num_out, num_in, device=device, dtype=dtype, scale=0.02) for _ in range(num_weights)]
    x_MD = _randn(num_rows, num_in, device=device, dtype=dtype)

    def errors() -> dict[str, float]:
        with poisoned():
            out = ops.linear_swiglu(x_MD, weights[0])
        return errors_of(out=(out, mlp_reference.swiglu(x_MD.double() @ weights[0].double().T)))

    def ours(number: int) -> Any:
        return ops.linear_swiglu(x_MD, weights[number % num_weights])

    def apart(number: int) -> Tensor:
        return ops.swiglu(F.linear(x_MD, weights[number % num_weights]))

    library = from_library(ours)
    # The product's own output, twice as wide as the result, need not touch memory.
    floor = linear_cost(num_rows, num_in, num_out, dtype.itemsize) + Cost(-num_rows * num_out / 2 * dtype.itemsize)
    return Trial(
        errors=errors,
        bound=BOUNDS[dtype],
        cost=floor,
        ours=ours,
        others={} if library else {"product, then swiglu": apart},
        num_calls=num_weights,
        facts={"runs": f"{LIBRARY} product, then our swiglu"} if library else {},
    )


# A layer that chooses its rows


APART = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0)
"""Noise on what is kept of a row, over its numbers: as little drifts from pass to pass. 1 - cosine in fp32 is off by
6e-8 where the drift is 5e-9 (noise of 1e-4)."""
DRIFT_BOUND = 3e-3
"""Of each drift beside itself. Numbers of unit vectors in fp32 are off by 1e-7 of them: 1e-3 of a noise of 1e-4, and
less in the sum of their squares."""


def drifted(num_rows: int, size: int, device: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A plane [E, R], rows [M, R] that drifted from it by the noises of `APART` in turn, and their entries [M].

    Some rows were never kept (entry 0, zeros); one is zero itself, one points the other way; every fourth is so large,
    or so small, that its squares leave the range of its type.
    """
    at_M = torch.randperm(2 * num_rows, device=device)[:num_rows] + 1
    number_M = torch.arange(num_rows, device=device)
    at_M[number_M % 11 == 10] = 0
    plane_ER = torch.randn(2 * num_rows + 1, size, device=device)
    plane_ER[0] = 0
    scale = 2.0 ** (8 if dtype == torch.float16 else 70)
    plane_ER[::4] *= scale
    plane_ER[1::4] /= scale
    plane_ER = plane_ER.to(dtype)
    kept_MR = plane_ER[at_M].float()
    by_M1 = torch.tensor(APART, device=device)[number_M % len(APART)][:, None]
    size_M1 = kept_MR.abs().mean(1, keepdim=True)
    new_MR = kept_MR + by_M1 * size_M1 * torch.randn(num_rows, size, device=device)
    new_MR = torch.where(at_M[:, None] == 0, torch.randn(num_rows, size, device=device), new_MR)
    new_MR[6::29] = 0
    new_MR[7::29] = -kept_MR[7::29]
    new_MR[21::22] = 0  # of rows that were never kept: two zeros have not drifted
    return plane_ER, new_MR.to(dtype), at_M


def drift_trial(ops: Ops, num_rows: int, size: int = 128, *, device: Any, dtype: torch.dtype = torch.float32) -> Trial:
    """Rows of proxies (or, longer, of values) against what is kept of them, which is then renewed."""
    num_sets = 8
    sets = [drifted(num_rows, size, device, dtype) for _ in range(num_sets)]
    keep_M = torch.arange(num_rows, device=device) % 5 != 0

    def errors() -> dict[str, float]:
        plane_ER, new_MR, at_M = sets[0]
        plane_ER, right_ER = plane_ER.clone(), plane_ER.double()
        with poisoned():
            found_M = ops.drift(new_MR, plane_ER, at_M, keep_M)
        right_M = drift_reference.drift(new_MR.double(), right_ER, at_M, keep_M)
        return {
            "drift": worst_error(found_M, right_M, floor=1e-12),
            "kept": float((plane_ER[1:].double() != right_ER[1:]).sum()),
        }

    def call(drift: Callable[..., Tensor]) -> Callable[[int], Any]:
        def one(number: int) -> Tensor:
            plane_ER, new_MR, at_M = sets[number % num_sets]
            return drift(new_MR, plane_ER, at_M, keep_M)

        return one

    numbers = num_rows * size
    return Trial(
        errors=errors,
        bound={"drift": DRIFT_BOUND, "kept": 0.5},
        cost=elementwise_cost(2 * numbers, numbers, dtype.itemsize),
        ours=call(ops.drift),
        others={"in torch": call(drift_reference.drift)},
        num_calls=num_sets,
    )


def ranked(rows_of: list[int], counts: list[int], device: Any) -> tuple[Tensor, ...]:
    """What `furthest` is given for seats of so many rows: few drifts, so that ties lie at the cut of each seat, and now
    and then NaN.

    Every fourth row and the padding at a seat's end may not be chosen, and would be the first: they have drifted most.
    Every eighth comes on top.
    """
    num_rows_S = torch.tensor(rows_of, device=device)
    seat_M = torch.arange(len(rows_of), device=device).repeat_interleave(num_rows_S)
    first_S = F.pad(num_rows_S.cumsum(0), (1, 0))
    place_M = torch.arange(len(seat_M), device=device) - first_S[seat_M]
    levels = max(2, max(rows_of) // 16)
    drift_M = (torch.randperm(len(seat_M), device=device) % levels).float() / levels
    optional_M = (place_M % 4 != 0) & (place_M < num_rows_S[seat_M] - num_rows_S[seat_M] // 8)
    drift_M = torch.where(optional_M, drift_M, 2.0)
    drift_M[5::61] = torch.nan
    return drift_M, optional_M, seat_M, first_S, torch.tensor(counts, device=device), place_M % 8 == 0


def furthest_trial(ops: Ops, num_seats: int, per_seat: int, *, device: Any) -> Trial:
    """A quarter of each seat's rows. Compared too: seats of several lengths, one without rows, and counts from none to
    more than there are."""
    given = ranked([per_seat] * num_seats, [per_seat // 4] * num_seats, device)
    lengths = [per_seat, 0, *(max(1, per_seat - 7 * seat) for seat in range(num_seats)), per_seat]
    counts = [per_seat // 3, 1, *(seat * per_seat // 5 for seat in range(num_seats)), 2 * per_seat]
    uneven = ranked(lengths, counts, device)

    def errors() -> dict[str, float]:
        found = {}
        for name, each in (("rows", given), ("rows of uneven seats", uneven), ("none on top", uneven[:-1])):
            with poisoned():
                found_M = ops.furthest(*each)
            found[name] = float((found_M != drift_reference.furthest(*each)).sum())
        return found

    return Trial(
        errors=errors,
        bound=0.5,
        cost=elementwise_cost(num_seats * per_seat, num_seats * per_seat // 4, 4),
        ours=lambda number: ops.furthest(*given),  # noqa: ARG005
        others={"sorted": lambda number: drift_reference.furthest(*given)},  # noqa: ARG005
        num_calls=8,
    )


def picked_trial(ops: Ops, num_seats: int, per_seat: int, *, device: Any) -> Trial:
    """A quarter of the rows for a third of the places; the last seat has chosen none, and the first of several all."""
    most, num_rows = max(1, per_seat // 3), num_seats * per_seat
    chosen_SQ = torch.rand(num_seats, per_seat, device=device) < 0.25
    chosen_SQ[0] |= num_seats > 1
    chosen_SQ[-1] &= num_seats == 1
    write_M = torch.randperm(2 * num_rows, device=device)[:num_rows] + 1
    see_M = torch.randint(1, 2 * per_seat, (num_rows,), dtype=torch.int32, device=device)
    given = (chosen_SQ.flatten(), per_seat, most, write_M, see_M)

    def errors() -> dict[str, float]:
        with poisoned():
            found = ops.picked(*given)
        right = drift_reference.picked(*given)
        return {name: float((a != b).sum()) for name, a, b in zip(right._fields, found, right)}

    return Trial(
        errors=errors,
        bound=0.5,
        cost=Cost(num_rows + num_seats * (most * 40 + 8)),
        ours=lambda number: ops.picked(*given),  # noqa: ARG005
        others={"sorted": lambda number: drift_reference.picked(*given)},  # noqa: ARG005
        num_calls=8,
    )


# The lists


def check_cases(ops: Ops, device: Any) -> Iterator[Case]:
    """Awkward sizes, grouped heads, biases and the other types."""
    fp16, fp32 = torch.float16, torch.float32
    projects: list[dict[str, Any]] = [
        {"num_rows": 1},
        {"num_rows": 127},
        {"num_rows": 129},
        {"num_rows": 33, "heads": 28, "kv_heads": 4, "hidden": 3584, "bias": True},
        {"num_rows": 5, "heads": 7, "kv_heads": 7, "head_dim": 64, "hidden": 448, "bias": True, "dtype": fp32},
        {"num_rows": 40, "heads": 8, "kv_heads": 8, "head_dim": 64, "hidden": 512, "dtype": fp16},
    ]
    for each in projects:
        yield _case("project_and_store", each, lambda e=each: project_trial(ops, device=device, **e))  # type: ignore[misc]
    stats: list[dict[str, Any]] = [
        {"num_rows": 1},
        {"num_rows": 17, "vocab": 152064, "hidden": 3584},
        {"num_rows": 130, "vocab": 1024, "hidden": 320},
        {"num_rows": 18, "vocab": 32001, "hidden": 256, "dtype": fp16},
        {"num_rows": 18, "vocab": 32001, "hidden": 256, "dtype": fp32},
    ]
    for each in stats:
        yield _case("logit_stats", each, lambda e=each: stats_trial(ops, device=device, **e))  # type: ignore[misc]
    for rows, size, dtype in ((3, 3584, BF16), (5, 448, fp32), (7, 320, fp16)):
        shape = {"num_rows": rows, "size": size, "dtype": dtype}
        yield _case("add_rms_norm", shape, lambda s=shape: norm_trial(ops, device=device, **s))  # type: ignore[misc]
        yield _case("rms_norm", shape, lambda s=shape: norm_trial(ops, device=device, add=False, **s))  # type: ignore[misc]
        yield _case("swiglu", shape, lambda s=shape: swiglu_trial(ops, device=device, **s))  # type: ignore[misc]
        yield _case("drift", shape, lambda s=shape: drift_trial(ops, device=device, **s))  # type: ignore[misc]
    for num_seats, per_seat in ((1, 1), (3, 127), (5, 129)):
        seats = {"seats": num_seats, "per_seat": per_seat}
        yield Case("furthest", seats, lambda s=num_seats, p=per_seat: furthest_trial(ops, s, p, device=device))  # type: ignore[misc]
        yield Case("picked", seats, lambda s=num_seats, p=per_seat: picked_trial(ops, s, p, device=device))  # type: ignore[misc]
    long = {"seats": 2, "per_seat": 2500}
    yield Case("picked", long, lambda: picked_trial(ops, 2, 2500, device=device))
    yield Case("drift", {"rows": 99, "size": 128}, lambda: drift_trial(ops, 99, device=device))
    if ops.fp8 is not None:
        yield from kernels_fp8.checks(ops.fp8, device)


def timed_cases(ops: Ops, device: Any, *, quick: bool = False) -> Iterator[Case]:
    """Sizes of steps of LLaDA-8B, and attention of Dream-7B too."""
    yield from kernels_attend.cases(ops.attention, device, quick=quick)
    for rows in (16, 128, 4608) if quick else (16, 32, 64, 128, 256, 1024, 4096, 4608):
        yield _case("project_and_store", {"num_rows": rows}, lambda r=rows: project_trial(ops, r, device=device))  # type: ignore[misc]
    for rows in (16, 2048) if quick else (1, 16, 64, 160, 512, 2048):
        yield _case("logit_stats", {"num_rows": rows}, lambda r=rows: stats_trial(ops, r, device=device))  # type: ignore[misc]
    for rows in (128,) if quick else (16, 128, 4096):
        shape = {"num_rows": rows}
        yield _case("add_rms_norm", shape, lambda r=rows: norm_trial(ops, r, device=device))  # type: ignore[misc]
        yield _case("rms_norm", shape, lambda r=rows: norm_trial(ops, r, device=device, add=False))  # type: ignore[misc]
        yield _case("swiglu", shape, lambda r=rows: swiglu_trial(ops, r, device=device))  # type: ignore[misc]
        yield _case("linear_swiglu", shape, lambda r=rows: gated_trial(ops, r, device=device))  # type: ignore[misc]
        for num_in, num_out in ((12288, 4096), (4096, 4096)):
            sizes = shape | {"num_in": num_in, "num_out": num_out}
            yield _case("linear", sizes, lambda s=sizes: linear_trial(ops, device=device, **s))  # type: ignore[misc]
    for num_seats in (1, 32):
        rows = num_seats * 512
        yield _case("drift", {"num_rows": rows}, lambda r=rows: drift_trial(ops, r, device=device))  # type: ignore[misc]
        seats = {"seats": num_seats, "per_seat": 512}
        yield Case("furthest", seats, lambda s=num_seats: furthest_trial(ops, s, 512, device=device))  # type: ignore[misc]
        yield Case("picked", seats, lambda s=num_seats: picked_trial(ops, s, 512, device=device))  # type: ignore[misc]
    if ops.fp8 is not None:
        yield from kernels_fp8.cases(ops.fp8, device, quick=quick)


def tiny_cases(ops: Ops, device: Any) -> list[Case]:
    """Every operation at a size for a CPU: a test of the benchmark, no measurement."""
    f32 = torch.float32
    heads: dict[str, Any] = {"hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 16}
    shape = kernels_attend.Shape(2, 4, 32, 4, 2, 16)
    attention = ops.attention
    return [
        Case("attend", shape.sizes, lambda: kernels_attend.trial(attention, shape, device, f32)),
        Case("attend with mass", shape.sizes, lambda: kernels_attend.mass_trial(attention, shape, device, f32)),
        Case("project_and_store", {"rows": 5}, lambda: project_trial(ops, 5, device=device, dtype=f32, **heads)),
        Case("logit_stats", {"rows": 7}, lambda: stats_trial(ops, 7, device=device, hidden=32, vocab=96, dtype=f32)),
        Case("add_rms_norm", {"rows": 3}, lambda: norm_trial(ops, 3, 32, device=device, dtype=f32)),
        Case("rms_norm", {"rows": 3}, lambda: norm_trial(ops, 3, 32, device=device, dtype=f32, add=False)),
        Case("swiglu", {"rows": 3}, lambda: swiglu_trial(ops, 3, 32, device=device, dtype=f32)),
        Case("linear", {"rows": 3}, lambda: linear_trial(ops, 3, 32, 48, device=device, dtype=f32)),
        Case("linear_swiglu", {"rows": 3}, lambda: gated_trial(ops, 3, 32, 48, device=device, dtype=f32)),
        Case("drift", {"rows": 33}, lambda: drift_trial(ops, 33, 24, device=device)),
        Case("furthest", {"seats": 2, "per_seat": 9}, lambda: furthest_trial(ops, 2, 9, device=device)),
        Case("picked", {"seats": 3, "per_seat": 9}, lambda: picked_trial(ops, 3, 9, device=device)),
        *(kernels_fp8.tiny_cases(ops.fp8, device) if ops.fp8 is not None else ()),
    ]


def _case(op: str, shape: dict[str, Any], make: Callable[[], Trial]) -> Case:
    told = {name.removeprefix("num_"): str(v).removeprefix("torch.") for name, v in shape.items() if name == "dtype"}
    told |= {name.removeprefix("num_"): v for name, v in shape.items() if name != "dtype"}
    return Case(op, told, make)


def family(op: str) -> str:
    """The operation that a row belongs to: what checks of one say of the other."""
    return "attend" if op.startswith("attend") else op


# The run


def run(
    results: Results,
    device: torch.device | str,
    *,
    ops: Ops | None = None,
    quick: bool = False,
    seconds: float = 600,
    only: tuple[str, ...] = OPS,
    ceiling_sizes: dict[str, Any] | None = None,
    checks: list[Case] | None = None,
    timed: list[Case] | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Ceilings, checks, times. What does not fit ``seconds`` is left out, and said.

    The timed cases of an operation are told no speed-up if one of its checks failed.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device(device)
    ops = ops or (triton_ops() if device.type == "cuda" else reference_ops())
    ends = time.monotonic() + seconds
    if device.type != "cuda":  # nothing that is worth measuring
        checks = tiny_cases(ops, device) if checks is None else checks
        timed = tiny_cases(ops, device) if timed is None else timed
    ceilings = measure_ceilings(device, **(ceiling_sizes or {}))
    results.note(ceilings=vars(ceilings), quick=quick)
    right = dict.fromkeys(OPS, True)
    if ops.fp8 is None:
        results.note(without="products of 8-bit floats: this GPU or version has none with scales by row")
        tell(f"without {results.data['without']}")
    if checks is None and device.type == "cuda" and "attend" in only:
        for name, found in kernels_attend.checks(ops.attention, device, quick=quick):
            row = _tried(results, f"attend: {name}", ends, lambda f=found, n=name: attend_row(n, f()))  # type: ignore[misc]
            _take(results, row, right, "attend", tell, name)
    for case in check_cases(ops, device) if checks is None else checks:
        if family(case.op) in only:
            row = _tried(results, case.name, ends, lambda c=case: {"kind": "check", **check(c, c.make())})  # type: ignore[misc]
            _take(results, row, right, family(case.op), tell, case.name)
    for case in timed_cases(ops, device, quick=quick) if timed is None else timed:
        if family(case.op) in only:
            trusted = right[family(case.op)]
            row = _tried(results, case.name, ends, lambda c=case, t=trusted: _timed(c, device, ceilings, t))  # type: ignore[misc]
            _take(results, row, None, "", tell, case.name)


def search_tiles(
    results: Results, device: torch.device | str, *, seconds: float = 600, tell: Callable[[str], None] = print
) -> None:
    """Times of the attention kernel's tiles, size by size, the fastest first."""
    ends = time.monotonic() + seconds
    for name, search in kernels_attend.tiles(triton_ops().attention, device):
        row = _tried(results, f"attend: {name}", ends, search)
        if row is not None:
            results.add(row)
            tell(f"{name}: {row['failed'] if 'failed' in row else row['found'][:3]}")


def _timed(case: Case, device: torch.device, ceilings: Any, trusted: bool) -> dict[str, Any]:
    return {"kind": "time", **measure(case, case.make(), device, ceilings, trusted=trusted)}


def attend_row(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """A check of the attention kernels as a row."""
    errors = {key: value for key, value in found.items() if isinstance(value, float)}
    flags = {key: value for key, value in found.items() if isinstance(value, bool) and key != "ok"}
    return {"kind": "check", "op": "attend", "check": name, "ok": found["ok"], "errors": errors, **flags}


def _tried(results: Results, name: str, ends: float, make: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """A row; one that says what went wrong; None when there is no time left."""
    if time.monotonic() > ends:
        results.leave_out(name)
        return None
    try:
        return make()
    except Exception as failure:
        told = f"{type(failure).__name__}: {failure}"[:500]
        return {"kind": "failed", "op": name.split(":")[0], "case": name, "ok": False, "failed": told}
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _take(
    results: Results,
    row: dict[str, Any] | None,
    right: dict[str, bool] | None,
    op: str,
    tell: Callable[[str], None],
    name: str,
) -> None:
    """Write the row down. A check that was left out or failed takes the trust from its operation."""
    if right is not None:
        right[op] = right[op] and row is not None and bool(row["ok"])
    if row is not None:
        tell(f"{name}: {brief(results.add(row))}")


def brief(row: dict[str, Any]) -> str:
    """A row in a line."""
    if "failed" in row:
        return str(row["failed"]).splitlines()[0][:200]
    errors = "right" if row["ok"] else f"WRONG {row['errors']}"
    if "us" not in row:
        return errors
    others = ", ".join(f"{name} {us:.1f}" for name, us in (row["others_us"] | row["parts_us"]).items())
    return f"{row['us']:.1f} us, floor {row['floor_us']:.1f} ({row['bound_by']}), {errors}; {others}"
