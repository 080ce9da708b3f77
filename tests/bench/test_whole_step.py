"""The benchmark of whole steps, on a CPU: eager, at tiny sizes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from unmask.bench import shapes, whole_step
from unmask.bench.floor import Ceilings
from unmask.bench.results import Results
from unmask.bench.shapes import SHAPES, random_network
from unmask.bench.whole_step import Kind, fixed, kinds, make_pool, make_step, measure, same_as_eager, seat_all
from unmask.engine.step import READBACK
from unmask.models.transformer import Transformer

PROMPT, ANSWER = 288, 192
CEILINGS = Ceilings(1e10, 1e11)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return random_network("tiny", "cpu", max_positions=PROMPT + ANSWER)


def told(step: Any, name: str) -> list[int]:
    values: list[int] = step.readback[:, READBACK.index(name)].tolist()
    return values


@pytest.mark.parametrize("kind", [*kinds(PROMPT + ANSWER, ANSWER).values(), fixed(16)], ids=lambda kind: kind.name)
@torch.inference_mode()
def test_every_step_runs_its_rows_and_commits_its_tokens(kind: Kind, model: Transformer) -> None:
    """Three tokens a pass in each seat, in ten passes; a row more or less would be another measurement."""
    pool = make_pool(model, 2, PROMPT + ANSWER, num_scratch=kind.drafter().num_scratch)
    step = make_step(kind, model, pool, 2, PROMPT + ANSWER)
    seat_all(step, kind, PROMPT, ANSWER, 3.0)
    left = step.canvas.undecided_SN().sum(1).tolist()
    assert left == [ANSWER - (ANSWER // 32 if kind.begun else 0)] * 2
    for _ in range(10):
        step()
        assert told(step, "overflow") == told(step, "due") == [0, 0]
        assert all(kind.rows <= rows <= kind.rows + kind.second_rows for rows in told(step, "num_rows"))
        now, accepted = told(step, "num_undecided"), told(step, "num_accepted")
        gone = [before - after - extra for before, after, extra in zip(left, now, accepted)]
        expected = {2, 3} if kind.block else {3}  # blocks of 32 in 11 passes: some of 2
        assert set(gone) <= expected
        left = now


@pytest.mark.parametrize("name", ["128 rows", "flash-dllm", "dual"])
def test_a_measurement(name: str, model: Transformer) -> None:
    kind = kinds(PROMPT + ANSWER, ANSWER)[name]
    pool = make_pool(model, 2, PROMPT + ANSWER, num_scratch=kind.drafter().num_scratch)
    row = measure(kind, model, pool, CEILINGS, seats=2, prompt=PROMPT, answer=ANSWER, per_pass=3.0)
    assert row["ok"]
    assert row["over_floor"] == pytest.approx(row["ms"] / row["floor_ms"])
    assert row["tokens_per_pass"] >= 2.5
    assert (row["seats"], row["rows"], row["keys"]) == (2, kind.rows, PROMPT + ANSWER)


def test_a_step_that_runs_out_of_work_is_no_measurement(model: Transformer) -> None:
    """Negative control: at the answer's end there are fewer rows than the kind has."""
    kind = kinds(128)["flash-cache"]
    pool = make_pool(model, 1, 128)
    assert not measure(kind, model, pool, CEILINGS, seats=1, prompt=64, answer=64, per_pass=3.0)["ok"]


@pytest.mark.parametrize("name", ["flash-cache", "flash-dllm", "dual", "vanilla"])
def test_policies_are_asked_as_in_the_engine(name: str) -> None:
    """Whether a refresh is due is a part of the step: its kernels are timed."""
    policy = kinds()[name].policy(0)
    assert type(policy).due is getattr(policy.due, "__func__", None)


def test_a_refresh_that_is_due_is_no_measurement(model: Transformer) -> None:
    """Negative control: blocks of which nothing is committed begin with a refresh, for which there are no rows."""
    kind = dataclasses.replace(kinds(PROMPT + ANSWER, ANSWER)["dual"], begun=False)
    pool = make_pool(model, 1, PROMPT + ANSWER)
    options: dict[str, Any] = {"seats": 1, "prompt": PROMPT, "answer": ANSWER, "per_pass": 3.0}
    assert not measure(kind, model, pool, CEILINGS, **options)["ok"]


@torch.inference_mode()
def test_a_replay_that_decides_otherwise_is_no_measurement(model: Transformer) -> None:
    """Negative controls: a replay that does nothing, one that commits another token, one that tells other numbers."""
    kind = kinds(PROMPT + ANSWER, ANSWER)["flash-dllm"]
    pool = make_pool(model, 2, PROMPT + ANSWER, num_scratch=kind.drafter().num_scratch)
    step = make_step(kind, model, pool, 2, PROMPT + ANSWER)
    seat_all(step, kind, PROMPT, ANSWER, 3.0)
    step()
    state = {name: value.clone() for name, value in vars(step.canvas).items() if isinstance(value, torch.Tensor)}

    def another_token() -> None:
        before_SN = step.canvas.final_SN.clone()
        step()
        step.canvas.token_SN[step.canvas.final_SN & ~before_SN] += 1

    def other_numbers() -> None:
        step()
        step.readback[1, 0] += 1

    assert same_as_eager(step, step)
    assert not any(same_as_eager(step, wrong) for wrong in (lambda: None, another_token, other_numbers))
    for name, value in state.items():
        assert torch.equal(getattr(step.canvas, name), value), name


def test_the_run_writes_row_by_row(tmp_path: Path) -> None:
    results = Results("step_times", "cpu", tmp_path)
    seen = []

    def tell(_: str) -> None:
        if (tmp_path / "step_times.json").exists():
            seen.append(len(json.loads((tmp_path / "step_times.json").read_text())["rows"]))

    options: dict[str, Any] = {"shape": "tiny", "prompt": PROMPT, "answer": ANSWER, "compiled": False}
    sizes = {"num_bytes": 1 << 12, "size": 16}
    whole_step.run(results, "cpu", seats=(1, 2), parts=("grid",), ceiling_sizes=sizes, tell=tell, **options)
    assert [(row["seats"], row["rows"]) for row in results.rows] == [(s, r) for s in (1, 2) for r in (128, 16, 32, 64)]
    assert seen == list(range(8))
    assert all(row["ok"] for row in results.rows)
    assert (tmp_path / "step_times.csv").read_text().count("\n") == 9


def test_a_run_without_time_names_what_is_left(tmp_path: Path) -> None:
    results = Results("step_times", "cpu", tmp_path)
    sizes = {"num_bytes": 1 << 12, "size": 16}
    whole_step.run(results, "cpu", shape="tiny", seats=(1,), seconds=0, ceiling_sizes=sizes, tell=lambda _: None)
    assert results.rows == []
    assert "128 rows, 1 seats" in results.data["left_out"]


@pytest.mark.parametrize("name", ["128 rows", "16 rows", "flash-cache", "vanilla", "vanilla in blocks"])
@torch.inference_mode()
def test_networks_with_shifted_scores(name: str, model: Transformer) -> None:
    """The rows that score the candidates run: all of them are committed in time."""
    config = dataclasses.replace(model.config, family="dream", logit_shift=1)
    kind = (kinds(PROMPT + ANSWER, ANSWER) | {"16 rows": fixed(16)})[name]
    shifted = Transformer(config, device="cpu")
    pool = make_pool(shifted, 2, PROMPT + ANSWER)
    assert measure(kind, shifted, pool, CEILINGS, seats=2, prompt=PROMPT, answer=ANSWER, per_pass=3.0)["ok"]


def test_networks_with_shifted_scores_are_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their steps have no second pass."""
    shifted = dataclasses.replace(SHAPES["tiny"], family="dream", logit_shift=1)
    monkeypatch.setattr(shapes, "SHAPES", {"tiny": shifted})
    results = Results("step_times", "cpu", None)
    sizes = {"num_bytes": 1 << 12, "size": 16}
    options: dict[str, Any] = {"ceiling_sizes": sizes, "tell": lambda _: None, "seconds": 0, "parts": ("targets",)}
    whole_step.run(results, "cpu", shape="tiny", **options)
    assert "flash-cache, 1 seats" in results.data["left_out"]
    assert not any(name.startswith(("flash-dllm", "dual")) for name in results.data["left_out"])


def test_memory_is_counted(model: Transformer) -> None:
    found = whole_step.memory(kinds(96)["flash-cache"], model, seats=2, capacity=96)
    entries = (1 + 2 * 6) * 16
    assert found["pool_GB"] * 1e9 == pytest.approx(entries * 2 * 2 * 2 * 16 * 4)
    assert found["weights_GB"] * 1e9 == pytest.approx(4 * sum(each.numel() for each in model.parameters()))
