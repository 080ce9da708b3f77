"""Every example runs and says what it should."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
TINY = ROOT / "tests" / "data" / "golden" / "models" / "tiny-dream"

# Arguments, and words of the output.
CASES: dict[str, tuple[list[str], list[str]]] = {
    "quickstart.py": ([], ["#### 9", "passes"]),
    "batch_with_params.py": ([], ["expected #### 9, got #### 9", "tokens a pass"]),
    "stream_canvas.py": ([], ["....", "#### 60"]),
    "async_streams.py": ([], ["request 0: stop", "request 1: abort", "request 2: stop", "rows for all of them"]),
    "infill.py": ([], ["He has 57 + 25 = 82 grapes", "tokens found"]),
    "add_a_method.py": (["--n", "3"], ["d3llm-careful", "/3 right"]),
    "own_method.py": (["--n", "3"], ["careful", "/3 right"]),
    "load_llada.py": ([str(TINY), "--max-tokens", "4"], ["dream: 3 layers", "ids ["]),
}


def test_every_example_is_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_it_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, words = CASES[name]
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    for word in words:
        assert word in printed
