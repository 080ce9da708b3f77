"""Designs of one-pass verification that are tried outside the engine: what they promise, whether or not they pay.

K drafts, M rows, X scratch columns, J live columns
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.fixed import Case, make_step, result, run
from engine.watched import (
    COMMON_TOKENS,
    MODELS,
    Pass,
    alone,
    both_forms,
    changed_to,
    column,
    request,
    tiny,
    trace,
    watch,
)
from unmask.bench.methods import Bench, Setting
from unmask.bench.methods import run as run_cells
from unmask.bench.results import Results
from unmask.bench.step import Kind, check_replay, random_model
from unmask.cache.context import MassSpec
from unmask.cache.policy import Recompute, Tracked
from unmask.decoding.drafter import Drafter
from unmask.decoding.frontier import Frontier, Window
from unmask.engine.step import Step
from unmask.errors import ConfigError


def script() -> Any:
    file = Path(__file__).parents[2] / "scripts" / "one_pass"
    loader = importlib.machinery.SourceFileLoader("one_pass_script", str(file))
    spec = importlib.util.spec_from_loader("one_pass_script", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["one_pass_script"] = module  # dataclasses look themselves up
    loader.exec_module(module)
    return module


SCRIPT: Any = script()
K = 5
WIDTH = 12
MEMBERS: dict[str, Callable[[], tuple[Drafter, Frontier]]] = {
    "left-to-right": lambda: (SCRIPT.LeftToRight(K), Window()),
    "star": lambda: (SCRIPT.Star(K), Window()),
    "ahead": lambda: (SCRIPT.Ahead(level=0.05, width=WIDTH), SCRIPT.Further(3)),
}
CACHED = {"policy": Tracked(MassSpec(first_layer=1))}
designs = pytest.mark.parametrize("name", MEMBERS)


def step_of(name: str, cases: list[Case], model: str = "tiny-llada", **more: Any) -> Step:
    drafter, frontier = MEMBERS[name]()
    return make_step(tiny(model), cases, **{"drafter": drafter, "frontier": frontier} | more)


def windowed(each: Case, **more: Any) -> Case:
    return changed_to(each, **{"window": 9, "gamma": 0.1} | more)


CASES = [
    windowed(request(7, 24, 24, 0)),
    windowed(request(5, 20, 20, 1), gamma=0.05),
    windowed(request(1, 22, 22, 2, rule={"threshold": 0.6}), window=6, gamma=0.2),
    windowed(request(9, 30, 30, 3, COMMON_TOKENS), gamma=0.05),
    windowed(request(12, 26, 26, 4, COMMON_TOKENS[1:]), gamma=0.0),
    windowed(request(3, 9, 9, 6), gamma=0.0),
    windowed(request(2, 1, 1, 9), gamma=0.0),
]


@both_forms
@pytest.mark.parametrize("members", [{}, CACHED], ids=["recompute", "tracked"])
@pytest.mark.parametrize("model", MODELS)
@designs
def test_gamma_above_one_is_no_verification(name: str, model: str, members: dict[str, Any], fixed: bool) -> None:
    """Same tokens in the same passes as without a drafter, whatever rows run beside."""
    cases = [changed_to(each, gamma=2.0, refresh=10, track=5) for each in CASES]
    plain = run(make_step(tiny(model), cases, frontier=Window(), fixed=fixed, **members), cases)
    if members:  # a cache recomputes the candidates: here there are no more of them
        members = {**members, "frontier": Window()}
    step = step_of(name, cases, model, fixed=fixed, **members)
    told = trace(step)
    assert [result(step, seat, each) for seat, each in enumerate(cases)] == plain
    assert not any(column(each, "num_accepted").any() for each in told)


@designs
def test_alone_in_a_batch_and_in_both_forms(name: str) -> None:
    def members() -> dict[str, Any]:
        drafter, frontier = MEMBERS[name]()
        return {"drafter": drafter, "frontier": frontier}

    alone_each = [alone(tiny(), each, fixed=False, **members()) for each in CASES]
    for fixed in (False, True):
        assert run(step_of(name, CASES, fixed=fixed), CASES) == alone_each


@designs
def test_a_small_gamma_accepts_drafts_and_saves_passes(name: str) -> None:
    """Control of the first equality."""
    plain = [alone(tiny(), each, frontier=Window()).num_passes for each in CASES]
    step = step_of(name, CASES)
    told = trace(step)
    passes = [result(step, seat, each).num_passes for seat, each in enumerate(CASES)]
    assert sum(int(column(each, "num_accepted").sum()) for each in told) > 5
    assert sum(passes) < sum(plain)


# --- what reaches a row that judges a draft


def full_pass(drafter: Drafter, frontier: Frontier, least: int) -> tuple[Step, Pass]:
    """A pass that verifies so many drafts."""
    each = windowed(request(5, 14, 14, rule={"threshold": 1.0}), gamma=2.0)
    step = make_step(tiny(), [each], drafter=drafter, frontier=frontier)
    passes = watch(step)
    with torch.inference_mode():
        for _ in range(3):
            step()
    assert int((passes[-1].pending_pos_SZ[0] >= 0).sum()) >= least
    return step, passes[-1]


@torch.inference_mode()
def again(step: Step, each: Pass, scratch_column: int | None = None) -> Any:
    """Hidden rows of the pass made again, with another token in one of its scratch rows."""
    step.pool.k.copy_(each.before[0])
    step.pool.v.copy_(each.before[1])
    token_M = each.plan.token_M.clone()
    if scratch_column is not None:
        (row,) = each.scratch_rows(0, scratch_column, 1)
        token_M[row] = (token_M[row] + 7) % 300
    return step._forward(replace(each.plan, token_M=token_M))[0].clone()


def leaks(step: Step, each: Pass, evidence: dict[int, int], judges: dict[int, int]) -> tuple[list[int], list[int]]:
    """Drafts that reach the row which judges them, and those that reach no other row that judges."""
    before, own, lone = again(step, each), [], []
    for draft, scratch_column in evidence.items():
        after = again(step, each, scratch_column)
        moved = {other for other, row in judges.items() if not torch.equal(after[row], before[row])}
        own += [draft] if draft in moved else []
        lone += [draft] if not moved - {draft} else []
    return own, lone


def star_rows(each: Pass) -> tuple[dict[int, int], dict[int, int]]:
    return {k: k for k in range(K)}, dict(enumerate(each.scratch_rows(0, K, K)))


class Meshed:
    """Evidence that sees other evidence."""

    def _table(self, device: torch.device) -> torch.Tensor:
        table_XJ = super()._table(device).clone()  # type: ignore[misc]
        table_XJ[:K, K : 2 * K] = True
        return table_XJ


def test_a_draft_of_a_star_reaches_every_probe_but_its_own() -> None:
    step, each = full_pass(SCRIPT.Star(K), Window(), K)
    assert leaks(step, each, *star_rows(each)) == ([], [])


def test_evidence_that_meets_evidence_leaks() -> None:
    """Negative control: a probe meets its own draft through the others' evidence."""
    step, each = full_pass(type("Mesh", (Meshed, SCRIPT.Star), {})(K), Window(), K)
    assert leaks(step, each, *star_rows(each))[0] == list(range(K))


def test_no_draft_of_a_view_reaches_the_canvas() -> None:
    """Its judges are the canvas's own rows; the view's other rows see it."""
    step, each = full_pass(*MEMBERS["ahead"](), 2)
    there = [row for row in each.scratch_rows(0, 0, WIDTH) if row >= 0]
    placed = [k for k, row in enumerate(there) if int(each.plan.token_M[row]) != step.canvas.mask_token_id]
    assert len(placed) == int((each.pending_pos_SZ[0] >= 0).sum())
    before, canvas = again(step, each), [int(row) for row in each.plan.row_SE[0, : each.capacity] if row >= 0]
    for k in placed:
        after = again(step, each, k)
        assert torch.equal(after[canvas], before[canvas])
        others = [row for other, row in enumerate(there) if other != k]
        assert (after[others] != before[others]).any(-1).all()


def test_left_to_right_is_the_order_of_drafts() -> None:
    _, each = full_pass(SCRIPT.LeftToRight(K), Window(), K)
    places = [pos for pos in each.pending_pos_SZ[0].tolist() if pos >= 0]
    assert places == sorted(places)


def test_sizes_have_bounds() -> None:
    for wrong in (0, 22):
        with pytest.raises(ConfigError, match=f"{wrong} drafts cannot be verified against each other; use 1 to 21"):
            SCRIPT.Star(wrong)
        with pytest.raises(ConfigError, match="positions cannot be verified in one pass; use 1 to 32"):
            SCRIPT.Ahead(width=wrong + 11 if wrong else 0)


# --- the comparison


def test_every_design_has_cells_and_a_plain_rule_to_beat() -> None:
    every = SCRIPT.cells()
    assert len({cell.name for cell in every}) == len(every)
    assert {cell.drafter for cell in every} == {None, *SCRIPT.DESIGNS}
    thresholds = {cell.sampling["threshold"] for cell in every if cell.method == "window"}
    assert {cell.sampling["threshold"] for cell in every} <= thresholds


def test_what_verifies_already_is_asked_before_other_designs() -> None:
    """Thresholds as high as eps and as gamma, one draft, two passes and nested drafts: a cut run has them."""
    every = SCRIPT.cells()
    number = next(place for place, cell in enumerate(every) if cell.drafter not in (None, "chain"))
    early = every[:number]
    for said in ({"threshold": 0.95, "decode_window": 16}, {"threshold": 0.8, "decode_window": 16}):
        assert any(cell.method == "window" and cell.sampling == said for cell in early)
    for threshold, gamma, width in SCRIPT.FIRST:
        said = {"threshold": threshold, "gamma": gamma, "decode_window": width}
        asked = [cell for cell in early if said.items() <= cell.sampling.items()]
        assert [cell.sampling.get("search") for cell in asked] == [None, 1, None]
        assert [cell.row().drafter for cell in asked] == ["one-pass", "one-pass", "two-pass"]
    assert [cell.method for cell in early if "block_length" in cell.sampling] == [
        "freedave",
        "fast-dllm-dual",
        "confidence",
    ]
    assert number <= 17
    assert sum(cell.sampling["threshold"] > 1 for cell in every[:-5]) == 0


def test_a_small_run(tmp_path: Path) -> None:
    bench = Bench(Setting(name="short", per_request=1, max_tokens=32, num_problems=2, seats=2), "cpu")
    results = Results("one_pass_short", "cpu", tmp_path)
    names = ("chain", "star", "ahead")
    both = {"threshold": 0.95, "decode_window": 16}
    every = [each for each in SCRIPT.cells() if {**each.sampling, **both} == each.sampling]
    wanted = [each for each in every if each.drafter in (None, *names) and each.sampling.get("gamma", 0.95) == 0.95]
    wanted = [each for each in wanted if each.method in ("window", "one-pass") and "search" not in each.sampling]
    run_cells(results, bench, wanted, tell=lambda _: None)
    SCRIPT.conclude(results.rows)
    results.write()
    rows = {row["drafter"]: row for row in json.loads((tmp_path / "one_pass_short.json").read_text())["rows"]}
    assert all(rows[name]["to_no_cache"]["of"] == rows["none"]["cell"] for name in names)
    assert all(rows[name]["gain"] is not None for name in names)
    assert len(list(SCRIPT.table(results.data))) == 2 + len(wanted)
    told = SCRIPT.why(bench, 0.95, 0.5)
    assert sum(told.get(fate, 0) for fate in SCRIPT.FATES) == told["drafts"] > 0


@designs
def test_compiled_parts_are_whole_graphs_and_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a design waits for the device, or a GPU could not capture it."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    drafter, frontier = MEMBERS[name]()
    if name == "ahead":
        drafter = SCRIPT.Ahead(level=0.0, width=WIDTH)  # this network is sure of nothing
    kind = Kind(name, lambda: frontier, Recompute, lambda: copy(drafter))
    model = random_model(2, 64, 256, torch.float32, "cpu")
    found = check_replay(kind, model, 14, capture=False, compiled=True)
    assert found["equal"], found["differences"]
    assert found["drafts_accepted"] > 0
    torch._dynamo.reset()
