"""What `scripts/docs` makes of result files: tables, and pictures where matplotlib is there."""

from __future__ import annotations

import json
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


def test_the_librarys_own_product_is_told_as_that(docs: Any) -> None:
    results = Results("kernels", "cpu", docs.results.RESULTS)
    kernels.run(results, "cpu", only=("linear", "rms_norm"), ceiling_sizes=SIZES, tell=quiet)
    lines = docs.TABLES["kernel-times"]().splitlines()
    (linear,) = (line for line in lines if line.startswith("| `linear`"))
    assert "| the library's |" in linear
    assert "runs" not in linear
    assert "(F.rms_norm) |" in next(line for line in lines if line.startswith("| `rms_norm`"))
    assert "| of one row |" in docs.TABLES["kernel-checks"]()


def captured_result(docs: Any, **more: Any) -> str:
    load = {"way": "float64", "method": "d2f", "network": "llada", "num_requests": 4, "num_cancelled": 1}
    load |= {"num_passes": 40, "num_waits": 0, "most_seats": 3, "different": [], "lost_pages": 0}
    made = {"device": "a GPU", "versions": {"torch": "2"}, "date": "2026-01-01", "commit": "0123456789"}
    result = {"environment": made, "seats": 8, "loads": [load], **more}
    (docs.results.RESULTS / "captured.json").write_text(json.dumps(result))
    text: str = docs.TABLES["captured"]()
    return text


def test_a_run_of_captured_steps_says_of_which_code_it_is(docs: Any) -> None:
    from unmask.eval.continuous import source_digest

    assert captured_result(docs, source_digest=source_digest()).endswith("Commit 0123456.")
    assert captured_result(docs, source_digest="another").endswith("Commit 0123456, of earlier code.")


def test_buckets_of_captured_steps(docs: Any) -> None:
    filled = {"way": "float64", "method": "d2f", "network": "llada", "captured": True, "full": True}
    filled |= {"num_replays": {"1": 9, "64": 12}, "different": {"1": [], "64": [3, 5]}}
    never = filled | {"method": "elastic-cache", "captured": False, "num_replays": {}, "different": {}}
    text = captured_result(docs, source_digest="", buckets=[filled, never])
    assert "| crowd | method | passes of 1 | passes of 64 | other answers |" in text
    assert "| float64 | `d2f` | 9 | 12 | 2 |" in text
    assert "| float64 | `elastic-cache` | not captured | not captured | 0 |" in text


def test_a_time_whose_captured_steps_decide_otherwise_is_marked(docs: Any) -> None:
    load = Load(shape="tiny", prompt=20, answer=32)
    results = Results("latency", "cpu", docs.results.RESULTS)
    serve.latency(results, "cpu", load, ["confidence"], compare=False, ceiling_sizes=SIZES, tell=quiet)
    assert "| `confidence` |" in docs.TABLES["latency"]()
    results.rows[0]["same_as_eager"] = False
    results.write()
    assert "| `confidence` NOT AS EAGER |" in docs.TABLES["latency"]()
