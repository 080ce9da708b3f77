"""Continuous batching: requests that join, wait, are cancelled and leave at any step get the answers they get alone.

The long form is `scripts/soak continuous`; its committed result must be as new as the code that it tested.
"""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import unmask
from unmask.cache.policy import Dual, Limits
from unmask.cache.pool import PagePool
from unmask.core.canvas import Canvas
from unmask.engine.step import Look, Step
from unmask.eval.continuous import SERVED, WATCHED, Outcome, _dump, compare, source_digest

RESULT = Path(__file__).parents[1] / "docs" / "results" / "continuous.json"


def run(method: str, network: str, count: int = 64) -> Outcome:
    return compare(method, network, count, seed=11)


@pytest.mark.parametrize(("method", "network"), SERVED)
def test_64_requests_get_the_answers_they_get_alone(method: str, network: str) -> None:
    found = run(method, network)
    assert found.different == []
    assert found.lost_pages == 0
    assert found.num_cancelled > 0, "nobody left early: the load shows nothing"
    assert found.most_seats >= 6, "nobody had company: the load shows nothing"


def test_refreshes_wait_in_these_loads() -> None:
    """The row budget is at work, or standing still was not tested."""
    assert run("fast-dllm-dual", "llada-gqa").num_waits > 10


# --- negative controls


def test_control_seats_that_share_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = PagePool.reserve

    def careless(self: PagePool, seat: int, *rest: Any) -> bool:
        done = reserve(self, seat, *rest)
        self.page_table_SP[seat] = torch.where(self.page_table_SP[seat] > 0, self.page_table_SP[seat] // 2 + 1, 0)
        return done

    monkeypatch.setattr(PagePool, "reserve", careless)
    assert run("flash-cache", "llada").different


def test_control_a_seat_that_moves_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    hold = Step.hold

    def careless(self: Step, look: Look, waits_S: torch.Tensor) -> Look:
        out = hold(self, look, waits_S)
        self.canvas.pass_S += waits_S.int()
        return out

    monkeypatch.setattr(Step, "hold", careless)
    assert run("fast-dllm-dual", "llada-gqa").different


def test_control_a_refresh_by_the_engines_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phases that depend on who else is there."""

    def due(self: Dual, canvas: Canvas, limits: Limits) -> torch.Tensor:  # noqa: ARG001
        return (canvas.pass_S == 0) | (canvas.pass_S.sum() % 3 == 0)

    monkeypatch.setattr(Dual, "due", due)
    assert run("fast-dllm-dual", "llada-gqa").different


# --- the committed result of the long form


def test_the_long_run_is_clean_and_as_new_as_the_code() -> None:
    result = json.loads(RESULT.read_text())
    assert result["num_requests"] >= 2000
    assert result["num_different"] == 0
    assert result["lost_pages"] == 0
    assert {(each["method"], each["network"]) for each in result["loads"]} == set(SERVED)
    assert result["source_digest"] == source_digest(), (
        f"code under {', '.join(WATCHED)} changed since the run; run `scripts/soak continuous` and commit its result"
    )


def test_a_syntax_tree_in_words_is_the_same_in_every_python() -> None:
    """Python 3.12 gave functions type parameters; nobody's are empty lists here."""
    tree = ast.parse("def f(x): return f'{x}!'")
    words = (
        "Module(body=[FunctionDef(name='f' args=arguments(args=[arg(arg='x')]) body=[Return(value=JoinedStr(values="
        "[FormattedValue(value=Name(id='x' ctx=Load()) conversion=-1) Constant(value='!')]))])])"
    )
    assert _dump(tree) == words


def test_the_digest_notices_code_and_nothing_else(tmp_path: Path) -> None:
    package = tmp_path / "unmask"
    for part in WATCHED:
        shutil.copytree(Path(unmask.__file__).parent / part, package / part)
    assert source_digest(package) == source_digest()
    rule = package / "decoding" / "rule.py"
    text = rule.read_text()
    rule.write_text(text + '\n\n# a comment\n"""A text."""\n')
    assert source_digest(package) == source_digest()
    rule.write_text(text.replace("UNCAPPED = 1 << 30", "UNCAPPED = 1 << 29"))
    assert source_digest(package) != source_digest()
