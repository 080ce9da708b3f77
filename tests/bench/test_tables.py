"""What `scripts/docs` makes of result files: tables, and pictures where matplotlib is there."""

from __future__ import annotations

from typing import Any

import pytest

from unmask.bench import kernels, serve, whole_step
from unmask.bench.results import Results
from unmask.bench.serve import Load

SIZES: dict[str, Any] = {"num_bytes": 1 << 12, "size": 16}
NAMES = ("step-grid", "step-kinds", "memory", "latency", "throughput", "kernel-times", "kernel-checks")


def quiet(_: str) -> None:
    pass


@pytest.mark.parametrize("name", NAMES)
def test_without_results_a_table_stays(docs: Any, name: str) -> None:
    page = f"<!-- begin {name} -->\nas it was\n<!-- end {name} -->\n"
    assert docs.fresh(page) == page
    assert docs.draw() == []


def test_tables_and_pictures(docs: Any) -> None:
    pytest.importorskip("matplotlib")
    out = docs.results.RESULTS
    kernels.run(Results("kernels", "cpu", out), "cpu", ceiling_sizes=SIZES, tell=quiet)
    step: dict[str, Any] = {"shape": "tiny", "prompt": 200, "answer": 250, "seats": (1, 2)}
    whole_step.run(Results("step_times_tiny", "cpu", out), "cpu", ceiling_sizes=SIZES, tell=quiet, **step)
    load = Load(shape="tiny", prompt=20, answer=64)
    serve.latency(Results("latency", "cpu", out), "cpu", load, ["flash-cache"], ceiling_sizes=SIZES, tell=quiet)
    many = Results("throughput", "cpu", out)
    serve.throughput(many, "cpu", load, ["flash-cache"], [1, 2], ceiling_sizes=SIZES, tell=quiet)
    tables = {name: docs.TABLES[name]() for name in NAMES}
    for name, table in tables.items():
        assert "Ceilings of this run" in table, name
        assert "WRONG" not in table
        assert "NOT AS ASKED" not in table
    assert "| 2 |" in tables["step-grid"]
    assert "`tiny`:" in tables["step-grid"]
    assert "| flash-dllm | 1 | 160 |" in tables["step-kinds"]
    assert tables["latency"].count("`vanilla`") == 2
    assert docs.draw() == ["step_tiny.svg", "kernels.svg"]
    assert all((docs.results.ROOT / "docs" / name).stat().st_size > 0 for name in ("step_tiny.svg", "kernels.svg"))


def test_a_wrong_operation_is_shown_without_a_speedup(docs: Any) -> None:
    from dataclasses import replace

    ops = kernels.reference_ops()
    wrong = replace(ops, swiglu=lambda gate_up: ops.swiglu(gate_up) * 1.001)
    results = Results("kernels", "cpu", docs.results.RESULTS)
    kernels.run(results, "cpu", ops=wrong, only=("swiglu",), ceiling_sizes=SIZES, tell=quiet)
    assert "WRONG" in docs.TABLES["kernel-times"]()
    assert "| NO |" in docs.TABLES["kernel-checks"]()


def test_what_was_left_out_is_said(docs: Any) -> None:
    results = Results("kernels", "cpu", docs.results.RESULTS)
    kernels.run(results, "cpu", seconds=0, ceiling_sizes=SIZES, tell=quiet)
    assert "Left out for lack of time: attend: seats 2" in docs.TABLES["kernel-times"]()
