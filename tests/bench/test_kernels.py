"""The benchmark of the operations, on a CPU: reference operations at tiny sizes."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unmask.bench import kernels, kernels_attend
from unmask.bench.checking import errors_of, poisoned, within, worst_error
from unmask.bench.results import Results
from unmask.bench.trial import Case, Trial, check
from unmask.ops.reference import drift as drift_reference
from unmask.ops.reference.logit_stats import LogitStats

OPS = kernels.reference_ops()
CEILINGS: dict[str, Any] = {"num_bytes": 1 << 12, "size": 16}


def measured(out: Path | None, **options: Any) -> Results:
    results = Results("kernels", "cpu", out)
    kernels.run(results, "cpu", ceiling_sizes=CEILINGS, tell=lambda _: None, **options)
    return results


def timed(results: Results) -> dict[str, dict[str, Any]]:
    return {row["op"]: row for row in results.rows if row["kind"] == "time"}


def test_every_operation_is_right_and_timed(tmp_path: Path) -> None:
    results = measured(tmp_path)
    rows = timed(results)
    assert set(rows) == {*kernels.OPS, "attend with mass"}
    for row in rows.values():
        assert row["ok"], row
        assert row["us"] > 0
        assert row["floor_us"] > 0
        assert row["over_floor"] == pytest.approx(row["us"] / row["floor_us"])
        assert set(row["speedup"]) == set(row["others_us"])
    stored = json.loads((tmp_path / "kernels.json").read_text())
    assert stored["rows"] == results.rows
    assert set(stored["ceilings"]) == {"bytes_per_second", "flops_per_second"}
    assert {"device", "versions", "date", "commit"} <= set(stored["environment"])
    with (tmp_path / "kernels.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(results.rows)
    assert {"op", "ok", "us", "floor_us", "bytes", "flops", "device", "torch", "date", "commit"} <= set(table[0])
    assert float(next(row for row in table if row["kind"] == "time")["us"]) > 0


def wrong_swiglu(gate_up: Tensor) -> Tensor:
    return OPS.swiglu(gate_up) * 1.001


def test_no_speedup_is_told_of_an_operation_that_is_wrong() -> None:
    """Negative control: a thousandth too much. Its time is there, what it beats is not; others are not touched."""
    rows = timed(measured(None, ops=replace(OPS, swiglu=wrong_swiglu)))
    assert not rows["swiglu"]["ok"]
    assert rows["swiglu"]["us"] > 0
    assert rows["swiglu"]["others_us"]
    assert rows["swiglu"]["speedup"] == {}
    assert rows["rms_norm"]["ok"]
    assert rows["rms_norm"]["speedup"]


def test_no_speedup_is_told_when_another_check_failed() -> None:
    """Right at the size that is timed, wrong at another."""
    ops, wrong = OPS, replace(OPS, swiglu=wrong_swiglu)
    f32 = torch.float32
    checks = [Case("swiglu", {"rows": 2}, lambda: kernels.swiglu_trial(wrong, 2, 8, device="cpu", dtype=f32))]
    cases = [Case("swiglu", {"rows": 3}, lambda: kernels.swiglu_trial(ops, 3, 8, device="cpu", dtype=f32))]
    found = timed(measured(None, checks=checks, timed=cases))["swiglu"]
    assert found["ok"]
    assert found["speedup"] == {}
    checks = [Case("swiglu", {"rows": 2}, lambda: kernels.swiglu_trial(ops, 2, 8, device="cpu", dtype=f32))]
    assert timed(measured(None, checks=checks, timed=cases))["swiglu"]["speedup"]


def test_a_case_that_raises_is_a_row_and_the_run_goes_on(tmp_path: Path) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such luck")

    results = measured(tmp_path, ops=replace(OPS, linear=broken))
    failed = [row for row in results.rows if row["kind"] == "failed"]
    assert failed
    assert all("no such luck" in row["failed"] and not row["ok"] for row in failed)
    assert timed(results)["swiglu"]["ok"]


def test_what_does_not_fit_the_time_is_named(tmp_path: Path) -> None:
    results = measured(tmp_path, seconds=0)
    assert results.rows == []
    assert len(results.data["left_out"]) == 2 * len(kernels.tiny_cases(OPS, "cpu"))
    assert json.loads((tmp_path / "kernels.json").read_text())["left_out"] == results.data["left_out"]


@pytest.mark.parametrize("op", kernels.OPS)
def test_single_operations(op: str) -> None:
    rows = measured(None, only=(op,)).rows
    assert rows
    assert {kernels.family(row["op"]) for row in rows} == {op}


def wrong_stats(*args: Any, **options: Any) -> LogitStats:
    """The second best token."""
    found = OPS.logit_stats(*args, **options)
    return LogitStats((found.token_C + 1) % 96, *list(vars(found).values())[1:])


def stray_store(*args: Any) -> Tensor:
    """One row of K goes where nobody asked for it."""
    q_M = OPS.project_and_store(*args)
    free = torch.ones(len(args[6]), dtype=torch.bool).index_fill_(0, args[5], False)
    args[6][free.nonzero()[0]] = 1.0
    return q_M


def forgets(*args: Any) -> Tensor:
    return torch.empty_like(OPS.rms_norm(*args))


@pytest.mark.parametrize(
    ("name", "field", "wrong"),
    [
        ("logit_stats", "logit_stats", wrong_stats),
        ("project_and_store", "project_and_store", stray_store),
        ("rms_norm", "rms_norm", forgets),
        ("add_rms_norm", "add_rms_norm", lambda x, _, weight, eps: (x, OPS.rms_norm(x, weight, eps))),
        ("linear", "linear", lambda x, weight: x @ weight.T.abs()),
    ],
)
def test_errors_are_seen(name: str, field: str, wrong: Any) -> None:
    """Negative controls: another token, a write next to it, memory that is not written, no sum, other weights."""
    rows = timed(measured(None, ops=replace(OPS, **{field: wrong})))
    assert not rows[name]["ok"]


def right(trial: Trial) -> bool:
    return bool(check(Case("", {}, lambda: trial), trial)["ok"])


def swapped(out: Tensor) -> Tensor:
    """The largest of some numbers of the last row has changed places with its neighbour; nothing else is wrong."""
    out = out.clone()
    piece = out.view(-1, out.shape[-1])[-1][-128:]
    at = int(piece.abs().argmax()) // 2 * 2
    piece[at : at + 2] = piece[at : at + 2].flip(0)
    return out


@pytest.mark.parametrize("op", ["rms_norm", "swiglu", "linear", "linear_swiglu", "attend", "project"])
def test_one_wrong_number_is_seen(op: str) -> None:
    """Negative control: of up to 1,032 x 2,048 numbers in bf16 two change places, 2e-3 of the whole tensor."""

    def make(ops: kernels.Ops) -> Trial:
        if op == "attend":
            shape = kernels_attend.Shape(2, 33, 64, 4, 2, 64)
            return kernels_attend.trial(ops.attention, shape, "cpu", torch.bfloat16)
        if op == "project":
            return kernels.project_trial(ops, 33, device="cpu", hidden=64, heads=8, kv_heads=8, head_dim=64)
        makers: dict[str, Any] = {
            "rms_norm": lambda: kernels.norm_trial(ops, 1032, 2048, device="cpu", add=False),
            "swiglu": lambda: kernels.swiglu_trial(ops, 1032, 2048, device="cpu"),
            "linear": lambda: kernels.linear_trial(ops, 1032, 64, 2048, device="cpu"),
            "linear_swiglu": lambda: kernels.gated_trial(ops, 516, 64, 4096, device="cpu"),
        }
        trial: Trial = makers[op]()
        return trial

    class Attention(kernels_attend.ReferenceKernels):
        @staticmethod
        def attend(*args: Any) -> Tensor:
            return swapped(OPS.attention.attend(*args))

    torch.manual_seed(0)
    field = {"project": "project_and_store", "attend": "attention"}.get(op, op)
    wrong = Attention if op == "attend" else lambda *args: swapped(getattr(OPS, field)(*args))
    assert right(make(OPS))
    trial = make(replace(OPS, **{field: wrong}))
    assert not right(trial)
    if op in ("rms_norm", "linear"):
        assert trial.errors()["norm" if op == "rms_norm" else "out"] < trial.bound, "the whole tensor shows nothing"


def test_rows_that_are_small_beside_the_others_count() -> None:
    plain = torch.randn(4, 300, dtype=torch.float64)
    plain[2] *= 0.01
    plain[3] = 0
    off = plain.clone()
    off[2] *= 1.5
    found = errors_of(x=(off, plain))
    assert found["x"] < 0.01
    assert found["worst row of x"] == pytest.approx(0.5)
    off = plain.clone()
    off[3, 7] = 1e-3
    assert 0.05 < worst_error(off, plain) < 1.0, "against a thousandth of the usual norm, where a row is zero"
    assert worst_error(plain[0], plain[0]) == 0
    off[0, 0] = float("nan")
    assert worst_error(off, plain) != worst_error(off, plain)


def cosine(new_MR: Tensor, kept_MR: Tensor) -> Tensor:
    return (new_MR * kept_MR).sum(1) / (new_MR.norm(dim=1) * kept_MR.norm(dim=1)).clamp(min=1e-30)


def naive_drift(new_MR: Tensor, kept_ER: Tensor, at_M: Tensor, keep_M: Tensor) -> Tensor:
    out_M: Tensor = OPS.drift(new_MR, kept_ER.clone(), at_M, None)
    near_M = (out_M < 1.5) & (out_M > 0)  # the rest is right: what is wrong are the last digits
    usual_MR = new_MR / new_MR.abs().amax(1, keepdim=True).clamp(min=1e-30)
    old_MR = kept_ER[at_M] / kept_ER[at_M].abs().amax(1, keepdim=True).clamp(min=1e-30)
    OPS.drift(new_MR, kept_ER, at_M, keep_M)
    return torch.where(near_M, 1 - cosine(usual_MR, old_MR), out_M)


def drift_without_range(new_MR: Tensor, kept_ER: Tensor, at_M: Tensor, keep_M: Tensor) -> Tensor:
    """Squares of what was given, without a look at its size."""
    a_MR, b_MR = (x / x.norm(dim=1, keepdim=True).clamp(min=1e-30) for x in (new_MR, kept_ER[at_M]))
    out_M = OPS.drift(new_MR, kept_ER, at_M, keep_M)
    return torch.where((out_M == 0) | (out_M == 1), out_M, (a_MR - b_MR).square().sum(1) / 2)


def drift_that_keeps_all(new_MR: Tensor, kept_ER: Tensor, at_M: Tensor, keep_M: Tensor) -> Tensor:
    return OPS.drift(new_MR, kept_ER, at_M, torch.ones_like(keep_M))


def drift_that_keeps_nothing(new_MR: Tensor, kept_ER: Tensor, at_M: Tensor, keep_M: Tensor) -> Tensor:
    return OPS.drift(new_MR, kept_ER, at_M, keep_M & False)


def drift_of_what_it_kept(new_MR: Tensor, kept_ER: Tensor, at_M: Tensor, keep_M: Tensor) -> Tensor:
    """It stores before it reads."""
    OPS.drift(new_MR, kept_ER, at_M, keep_M)
    return OPS.drift(new_MR, kept_ER, at_M, None)


def drift_of_zeros(new_MR: Tensor, kept_ER: Tensor, at_M: Tensor, keep_M: Tensor) -> Tensor:
    """A row that was never kept has half drifted."""
    out_M = OPS.drift(new_MR, kept_ER, at_M, keep_M)
    return torch.where(at_M == 0, 0.5, out_M)


@pytest.mark.parametrize("size", [24, 128])
@pytest.mark.parametrize(
    "wrong",
    [
        naive_drift,
        drift_without_range,
        drift_that_keeps_all,
        drift_that_keeps_nothing,
        drift_of_what_it_kept,
        drift_of_zeros,
    ],
)
def test_wrong_drifts_are_seen(wrong: Any, size: int) -> None:
    torch.manual_seed(0)
    assert right(kernels.drift_trial(OPS, 33, size, device="cpu"))
    assert not right(kernels.drift_trial(replace(OPS, drift=wrong), 33, size, device="cpu"))


def furthest_of(
    drift_M: Tensor, optional_M: Tensor, seat_M: Tensor, first_S: Tensor, count_S: Tensor, must_M: Tensor | None = None
) -> Tensor:
    """Ties go to the right."""
    turned = (each.flip(0) for each in (drift_M, optional_M, len(count_S) - 1 - seat_M))
    first_S = (len(seat_M) - first_S).flip(0)
    out_M = drift_reference.furthest(*turned, first_S, count_S.flip(0)).flip(0)
    return out_M if must_M is None else out_M | must_M


def furthest_of_all(drift_M: Tensor, optional_M: Tensor, *seats: Tensor) -> Tensor:
    return drift_reference.furthest(drift_M, torch.ones_like(optional_M), *seats) & optional_M


def furthest_by_the_first_count(*given: Tensor) -> Tensor:
    return drift_reference.furthest(*given[:4], given[4][:1].expand_as(given[4]), *given[5:])


def furthest_with_ties(*given: Tensor) -> Tensor:
    """All that drifted as far as the last one."""
    drift_M, optional_M, seat_M = given[:3]
    out_M = drift_reference.furthest(*given[:5])
    least_S = torch.full((len(given[4]),), torch.inf).scatter_reduce(0, seat_M[out_M], drift_M[out_M], "amin")
    out_M = optional_M & (drift_M >= least_S[seat_M])
    return out_M | given[5] if len(given) > 5 else out_M


def furthest_of_whole_blocks(*given: Tensor) -> Tensor:
    """Rows behind the last whole block of 8 are not written."""
    out_M = torch.empty_like(given[1])
    whole = len(out_M) // 8 * 8
    out_M[:whole] = drift_reference.furthest(*given)[:whole]
    return out_M


def furthest_without_nan(drift_M: Tensor, *given: Tensor) -> Tensor:
    return drift_reference.furthest(drift_M.nan_to_num(nan=-1.0), *given)


def furthest_that_counts_all(*given: Tensor) -> Tensor:
    """Rows that come on top take the places of others."""
    if len(given) == 5:
        return drift_reference.furthest(*given)
    drift_M = torch.where(given[5], torch.inf, given[0])
    return drift_reference.furthest(drift_M, given[1] | given[5], *given[2:])


@pytest.mark.parametrize(("num_seats", "per_seat"), [(2, 9), (3, 127)])
@pytest.mark.parametrize(
    "wrong",
    [
        furthest_of,
        furthest_of_all,
        furthest_by_the_first_count,
        furthest_with_ties,
        furthest_of_whole_blocks,
        furthest_without_nan,
        furthest_that_counts_all,
    ],
)
def test_wrong_choices_of_rows_are_seen(wrong: Any, num_seats: int, per_seat: int) -> None:
    torch.manual_seed(0)
    assert right(kernels.furthest_trial(OPS, num_seats, per_seat, device="cpu"))
    assert not right(kernels.furthest_trial(replace(OPS, furthest=wrong), num_seats, per_seat, device="cpu"))


def picked_with(**wrong: Any) -> Any:
    """`picked`, but for some of what it gives, which is made of the whole and of what it was given."""

    def picked(*given: Any) -> drift_reference.Picked:
        found = drift_reference.picked(*given)
        return found._replace(**{name: make(found, *given) for name, make in wrong.items()})

    return picked


def padding(found: drift_reference.Picked) -> Tensor:
    return found.see_P == 0


@pytest.mark.parametrize(
    "wrong",
    [
        picked_with(num_S=lambda _, chosen_M, per_seat, *__: chosen_M.view(-1, per_seat).sum(1)),
        picked_with(see_P=lambda found, *given: given[4][found.rows_P]),
        picked_with(write_P=lambda found, *given: torch.where(padding(found), given[3][0], found.write_P)),
        picked_with(rows_P=lambda found, *_: torch.where(padding(found), 0, found.rows_P)),
        lambda chosen_M, per_seat, most, *rest: drift_reference.picked(
            chosen_M.view(-1, per_seat).flip(1).flatten(), per_seat, most, *rest
        ),
        picked_with(see_P=lambda found, *_: torch.where(padding(found), torch.empty_like(found.see_P), found.see_P)),
    ],
    ids=["counts too many", "padding sees", "padding writes", "padding of seat 0", "other rows", "not written"],
)
def test_wrong_packings_are_seen(wrong: Any) -> None:
    torch.manual_seed(0)
    assert right(kernels.picked_trial(OPS, 3, 9, device="cpu"))
    assert not right(kernels.picked_trial(replace(OPS, picked=wrong), 3, 9, device="cpu"))


def stats_by_difference(*args: Any, **options: Any) -> LogitStats:
    """Doubt and lag as differences of probabilities: their digits are gone where one is nearly 1."""
    found = OPS.logit_stats(*args, **options)
    return replace(found, neg_doubt_C=found.prob_C - 1)


def stats_without_bans(*args: Any, **options: Any) -> LogitStats:
    found: LogitStats = OPS.logit_stats(*args, **options | {"banned_b": None})
    return found


def stats_that_ban_softmax(hidden_CD: Tensor, head_VD: Tensor, *, banned_b: Tensor, **options: Any) -> LogitStats:
    """Banned ids leave the denominator too."""
    ids_CB = banned_b.expand(len(hidden_CD), -1)
    found: LogitStats = OPS.logit_stats(hidden_CD, head_VD, ban_softmax_CB=ids_CB, banned_b=banned_b, **options)
    return found


def stats_with_the_last_of_ties(hidden_CD: Tensor, head_VD: Tensor, *, banned_b: Tensor, **options: Any) -> LogitStats:
    last = len(head_VD) - 1
    found = OPS.logit_stats(hidden_CD, head_VD.flip(0), banned_b=last - banned_b, **options)
    return replace(found, token_C=last - found.token_C)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "wrong", [stats_by_difference, stats_without_bans, stats_that_ban_softmax, stats_with_the_last_of_ties]
)
def test_wrong_scores_are_seen(wrong: Any, dtype: torch.dtype) -> None:
    sizes: dict[str, Any] = {"device": "cpu", "hidden": 64, "vocab": 500, "dtype": dtype}
    torch.manual_seed(0)
    assert right(kernels.stats_trial(OPS, 18, **sizes))
    assert not right(kernels.stats_trial(replace(OPS, logit_stats=wrong), 18, **sizes))


def test_an_epsilon_and_a_range_are_looked_at() -> None:
    """Negative controls: a norm without epsilon, and a sigmoid whose exponential overflows."""
    f32: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    bare = replace(OPS, rms_norm=lambda x, weight, _: OPS.rms_norm(x, weight, 0.0))
    assert right(kernels.norm_trial(OPS, 3, 64, add=False, **f32))
    assert not right(kernels.norm_trial(bare, 3, 64, add=False, **f32))

    def overflows(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return gate * gate.exp() / (1 + gate.exp()) * up

    torch.manual_seed(0)
    assert right(kernels.swiglu_trial(OPS, 3, 256, **f32))
    assert not right(kernels.swiglu_trial(replace(OPS, swiglu=overflows), 3, 256, **f32))


def test_the_attention_that_is_timed_is_checked_in_every_seat() -> None:
    class Wrong(kernels_attend.ReferenceKernels):
        @staticmethod
        def attend(q_M: Tensor, k_E: Tensor, v_E: Tensor, sight: Any, mass: Any = None) -> Tensor:
            out_M = kernels_attend.reference.attend(q_M, k_E, v_E, sight, mass)
            out_M[-sight.per_seat :] = out_M[: sight.per_seat]  # the last seat has the first one's answer
            return out_M

    shape = kernels_attend.Shape(3, 4, 32, 4, 2, 16)
    for make in (kernels_attend.trial, kernels_attend.mass_trial):
        assert right(make(kernels_attend.ReferenceKernels, shape, "cpu", torch.float32))
        assert not right(make(Wrong, shape, "cpu", torch.float32))


def test_a_mass_of_the_last_layer_alone_is_seen() -> None:
    class Wrong(kernels_attend.ReferenceKernels):
        @staticmethod
        def attend(q_M: Tensor, k_E: Tensor, v_E: Tensor, sight: Any, mass: Any = None) -> Tensor:
            mass.sum_SN = None
            return kernels_attend.reference.attend(q_M, k_E, v_E, sight, mass)

    shape = kernels_attend.Shape(2, 4, 32, 4, 2, 16)
    assert not right(kernels_attend.mass_trial(Wrong, shape, "cpu", torch.float32))


def test_no_speedup_is_told_of_the_librarys_own_product() -> None:
    """Beside itself it is once as fast, which says nothing."""
    rows = timed(measured(None, only=("linear", "linear_swiglu", "project_and_store")))
    assert rows["linear"]["runs"] == kernels.LIBRARY
    assert rows["linear"]["speedup"] == rows["linear_swiglu"]["speedup"] == {}
    assert set(rows["project_and_store"]["speedup"]) == {"three products, rotations, stores"}
    own = timed(measured(None, ops=replace(OPS, linear=lambda x, weight: x @ weight.T), only=("linear",)))
    assert set(own["linear"]["speedup"]) == {"F.linear"}
    assert "runs" not in own["linear"]


def test_the_attention_check_sees_a_key_too_many() -> None:
    class Wrong(kernels_attend.ReferenceKernels):
        @staticmethod
        def attend_in_tiles(q_M: Tensor, k_E: Tensor, v_E: Tensor, sight: Any, tile: Any) -> Tensor:  # noqa: ARG004
            return kernels_attend.reference.attend(q_M, k_E, v_E, replace(sight, see_M=(sight.see_M - 1).clamp(min=0)))

    options: dict[str, Any] = {"num_live": 3, "per_seat": 6, "device": "cpu", "fill": 0.0}
    call = kernels_attend.make_call((3, 0, 5), (4, 2), 16, 64, torch.float32, **options)
    assert kernels_attend.check(kernels_attend.ReferenceKernels, call)["ok"]
    assert not kernels_attend.check(Wrong, call)["ok"]


def test_the_attention_check_has_logits_beyond_the_range_of_exponentials() -> None:
    """Negative control: no largest logit is taken off before the exponential."""

    class Wrong(kernels_attend.ReferenceKernels):
        @staticmethod
        def attend_in_tiles(q_M: Tensor, k_E: Tensor, v_E: Tensor, sight: Any, tile: Any) -> Tensor:  # noqa: ARG004
            out_M = kernels_attend.reference.attend(q_M, k_E, v_E, sight)
            entry_MN = sight.entries()[sight.seat_M]
            logits_MHN = torch.einsum("mhd,mnhd->mhn", q_M.float(), k_E[entry_MN].float()) / q_M.shape[-1] ** 0.5
            seen_MN = torch.arange(entry_MN.shape[1]) < sight.see_M[:, None]
            most_MH = logits_MHN.masked_fill(~seen_MN[:, None], -torch.inf).amax(-1)
            return torch.where((most_MH > 88.7)[:, :, None], torch.nan, out_M)

    options: dict[str, Any] = {"device": "cpu", "fill": 0.0}
    call = kernels_attend.make_call((3, 0, 16), (4, 4), 128, 128, torch.bfloat16, **options)
    assert kernels_attend.check(kernels_attend.ReferenceKernels, call)["ok"]
    assert not kernels_attend.check(Wrong, call)["ok"]


def test_a_quick_run_is_a_part_of_a_whole_one() -> None:
    whole = [case.name for case in kernels.timed_cases(OPS, "cpu")]
    quick = [case.name for case in kernels.timed_cases(OPS, "cpu", quick=True)]
    assert set(quick) < set(whole)
    assert {kernels.family(name.split(":")[0]) for name in quick} == set(kernels.OPS)
    checks = [name for name, _ in kernels_attend.checks(OPS.attention, "cpu")]
    few = [name for name, _ in kernels_attend.checks(OPS.attention, "cpu", quick=True)]
    assert set(few) == set(kernels_attend.QUICK) < set(checks)
    assert {
        "fp32, GQA, 17 live",
        "canvas of 4096",
        "beyond 32 bits",
        "ragged, 64 live",
        "ragged",
    } < set(checks), "a whole run looks at every type, the longest canvas, the fullest live list"


def test_new_memory_is_poisoned_for_a_while() -> None:
    with poisoned():
        x = torch.empty(3)
        assert torch.isnan(x).all()
        assert torch.isnan(torch.empty_like(x)).all()
        assert torch.isnan(x.new_empty(2)).all()
        assert (torch.empty(2, dtype=torch.int64) == -1).all()
        assert torch.empty(2, dtype=torch.bool).all()
        assert torch.isnan(torch.empty(2, dtype=torch.float8_e4m3fn).float()).all()
    assert "new_empty" not in vars(torch.Tensor)
    assert torch.empty_like.__name__ == "empty_like"


def test_nan_is_within_no_bound() -> None:
    assert within({"a": 1e-3}, 2e-3)
    assert not within({"a": 1e-3, "b": float("nan")}, 2e-3)
    assert not within({"a": 1e-3, "b": 1e-3}, {"a": 2e-3, "b": 1e-4})
