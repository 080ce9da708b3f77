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
from unmask.bench.checking import poisoned, within
from unmask.bench.results import Results
from unmask.bench.trial import Case
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


def test_the_attention_check_sees_a_key_too_many() -> None:
    class Wrong(kernels_attend.ReferenceKernels):
        @staticmethod
        def attend_in_tiles(q_M: Tensor, k_E: Tensor, v_E: Tensor, sight: Any, tile: Any) -> Tensor:  # noqa: ARG004
            return kernels_attend.reference.attend(q_M, k_E, v_E, replace(sight, see_M=(sight.see_M - 1).clamp(min=0)))

    options: dict[str, Any] = {"num_live": 3, "per_seat": 6, "device": "cpu", "fill": 0.0}
    call = kernels_attend.make_call((3, 0, 5), (4, 2), 16, 64, torch.float32, **options)
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


def test_new_memory_is_poisoned_for_a_while() -> None:
    with poisoned():
        x = torch.empty(3)
        assert torch.isnan(x).all()
        assert torch.isnan(torch.empty_like(x)).all()
        assert torch.isnan(x.new_empty(2)).all()
        assert (torch.empty(2, dtype=torch.int64) == -1).all()
    assert "new_empty" not in vars(torch.Tensor)
    assert torch.empty_like.__name__ == "empty_like"


def test_nan_is_within_no_bound() -> None:
    assert within({"a": 1e-3}, 2e-3)
    assert not within({"a": 1e-3, "b": float("nan")}, 2e-3)
    assert not within({"a": 1e-3, "b": 1e-3}, {"a": 2e-3, "b": 1e-4})
