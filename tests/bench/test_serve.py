"""Requests from end to end, on a CPU: tiny networks of random weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unmask.bench import serve
from unmask.bench.results import Results, flatten
from unmask.bench.serve import Load, busy_share
from unmask.engine.graphs import FixedSteps

SIZES = {"num_bytes": 1 << 12, "size": 16}
ENGINE = {"quantization": None, "enforce_eager": False, "kernels": "auto"}
LOAD = Load(shape="tiny", prompt=20, answer=64, requests=2, engine=ENGINE)


def run(tmp_path: Path | None, methods: list[str | None], load: Load = LOAD, **options: Any) -> Results:
    results = Results("latency", "cpu", tmp_path)
    serve.latency(results, "cpu", load, methods, ceiling_sizes=SIZES, tell=lambda _: None, **options)
    return results


def test_latency_with_its_yardsticks(tmp_path: Path) -> None:
    rows = run(tmp_path, ["flash-cache", "flash-dllm", "fast-dllm-dual"]).rows
    assert [row["method"] for row in rows] == ["flash-cache", "flash-dllm", "fast-dllm-dual", "vanilla", "vanilla"]
    for row in rows:
        assert row["tokens"] == 64 * row["requests"]
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["ms_per_pass"] == pytest.approx(1e3 * row["seconds"] / row["passes"])
        assert row["over_floor"] == pytest.approx(row["seconds"] / row["floor_seconds"])
        assert row["idle_share"] is None  # nothing to trace on a CPU
        assert row["over_vanilla_one"] == pytest.approx(row["tokens_per_second"] / rows[-1]["tokens_per_second"])
    assert [row["tokens_per_pass"] for row in rows] == pytest.approx([64 / 23] * 4 + [1.0], rel=0.03)
    assert json.loads((tmp_path / "latency.json").read_text())["rows"] == rows


def captured(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Any], None] | None = None) -> None:
    """Engines here get steps of fixed shape, launched as they are; in their first program ``wrong`` follows a step."""
    made = serve.Bench.llm

    def capture(step: Any) -> Callable[[], None]:
        def run() -> None:
            step()
            if wrong is not None:
                wrong(step)

        return run

    def llm(self: serve.Bench, load: Load) -> Any:
        out = made(self, load)
        out.engine.fixed = FixedSteps(out.engine.step_program, capture=capture)
        return out

    monkeypatch.setattr(serve.Bench, "llm", llm)


@pytest.mark.parametrize("method", ["flash-dllm", "fast-dllm-dual"])
def test_captured_steps_are_compared_with_eager_ones(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(None, [method], compare=False).rows[0]["same_as_eager"] is None, "nothing is captured on a CPU"
    captured(monkeypatch)
    results = Results("throughput", "cpu", None)
    serve.throughput(results, "cpu", LOAD, [method], [1, 3], ceiling_sizes=SIZES, tell=lambda _: None)
    assert [row["same_as_eager"] for row in results.rows] == [True, True]


def test_no_speed_is_set_against_another_where_captured_steps_decide_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a replay that changes what the last pass committed. Its time is there, the ratios are not."""

    def another_token(step: Any) -> None:
        if step.policy.refreshes:  # not in the yardsticks
            step.canvas.token_SN[step.canvas.commit_pass_SN > 0] = 7

    captured(monkeypatch, another_token)
    told: list[str] = []
    results = Results("latency", "cpu", None)
    serve.latency(results, "cpu", LOAD, ["flash-cache"], ceiling_sizes=SIZES, tell=told.append)
    ours, *vanilla = results.rows
    assert ours["same_as_eager"] is False
    assert ours["tokens_per_second"] > 0
    assert ours["over_vanilla_one"] is ours["over_vanilla_equal"] is None
    assert told[0].endswith("NOT AS EAGER")
    assert [row["same_as_eager"] for row in vanilla] == [True, True]
    assert vanilla[-1]["over_vanilla_one"] == 1.0


def test_throughput_over_seats(tmp_path: Path) -> None:
    results = Results("throughput", "cpu", tmp_path)
    serve.throughput(results, "cpu", LOAD, ["flash-cache"], [1, 3], waves=2, ceiling_sizes=SIZES, tell=lambda _: None)
    assert [(row["seats"], row["requests"]) for row in results.rows] == [(1, 2), (3, 6)]
    one, three = results.rows
    assert three["tokens"] == 3 * one["tokens"]
    assert three["passes"] == one["passes"]


def test_a_floor_by_hand() -> None:
    """vanilla, one request: 16 passes, each with all 84 rows over 84 keys, 64 tokens scored."""
    from unmask.bench.floor import Ceilings, pass_cost
    from unmask.bench.shapes import SHAPES

    row = run(None, ["vanilla"], dataclasses.replace(LOAD, per_pass=4.0, requests=1), compare=False).rows[0]
    assert (row["passes"], row["rows_per_pass"]) == (16, 84)
    rows, keys = 16 * 84, 84
    cost = pass_cost(
        SHAPES["tiny"],
        rows=rows,
        scored=64,
        keys_read=16 * keys,
        row_keys=rows * keys,
        passes=16,
        weight_size=4,
        size=4,
    )
    bench = serve.Bench("cpu", Ceilings(1e10, 1e10))
    found = bench.measure(dataclasses.replace(LOAD, method="vanilla", per_pass=4.0), one_by_one=False)
    assert found["floor_seconds"] == pytest.approx(2 * cost.seconds(bench.ceilings))


def test_no_floor_where_rows_do_not_see_everything() -> None:
    load = dataclasses.replace(LOAD, engine={**ENGINE, "allow_attention_mismatch": True}, per_pass=None)
    row = run(None, ["d2f"], load, compare=False).rows[0]
    assert row["floor_seconds"] is None
    assert row["tokens_per_second"] > 0


def test_the_model_that_ships() -> None:
    load = Load(model="unmask-mini", per_pass=None, answer=48, requests=1, engine=ENGINE)
    row = run(None, [None], load).rows[0]
    assert (row["weights"], row["model"]) == ("real", "unmask-mini")
    assert 0 < row["tokens"] <= 48
    assert row["over_vanilla_one"] is None


def test_a_run_without_time_names_what_is_left() -> None:
    results = run(None, ["flash-cache"], seconds=0)
    assert results.rows == []
    assert len(results.data["left_out"]) == 3


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([], 1.0),
        ([(0, 1)], 1.0),
        ([(0, 1), (3, 4)], 0.5),
        ([(3, 4), (0, 1)], 0.5),
        ([(0, 4), (1, 2), (3, 4)], 1.0),
        ([(0, 2), (1, 3), (5, 10)], 0.8),
    ],
)
def test_busy_share(spans: list[tuple[float, float]], share: float) -> None:
    assert busy_share(spans) == pytest.approx(share)


def test_a_step_of_two_passes_commits_twice_as_many() -> None:
    one, two = (Load(method=name, answer=512, per_pass=2.8).params().steps for name in ("flash-cache", "flash-dllm"))
    assert (one, two) == (183, 92)
    assert Load(method="fast-dllm-dual", answer=512, per_pass=16.0).params().steps == 32
    assert Load(method="flash-dllm", answer=512, per_pass=16.0).params().steps == 32


def test_rows_are_flat_in_csv() -> None:
    assert flatten({"a": 1, "b": {"c": {"d": 2}}, "e": [1, None]}) == {"a": 1, "b.c.d": 2, "e": "1 None"}
