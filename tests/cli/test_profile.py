from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cli.test_main import ENV, SPY

QUICK = ("profile", "--max-tokens", "16", "--rule", "threshold", "--device", "cpu")


def test_help_imports_nothing_large():
    result = subprocess.run([sys.executable, "-c", SPY, "profile", "--help"], env=ENV, capture_output=True, text=True)
    assert "--above" in result.stdout
    assert result.stderr.strip() == "LOADED"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--rule thershold", "'threshold'"),
        ("--problems 0", "problems"),
        ("--above 0", "above is 0"),
        ("--above 3", "(0, 2]"),
        ("--ratio 1.5", "ratio is 1.5"),
        ("--rank 0", "rank"),
        ("--prompts /nowhere.txt", "/nowhere.txt"),
        ("--device cuda:99", "cuda"),
        ("--device mps", "64-bit"),
        ("--model /nowhere", "/nowhere"),
        ("--tops 3", "--tops"),
        ("more", "more"),
    ],
)
def test_errors(unmask, line, complaint):
    result = unmask("profile", *line.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert complaint in result.stderr


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("\n\n", "holds no prompt"), ('{"answer": 3}\n', "line 1 has no text"), ("x\n{3\n", "line 2 is not JSON")],
)
def test_prompts_that_are_none(unmask, tmp_path, text, complaint):
    file = tmp_path / "prompts"
    file.write_text(text)
    result = unmask("profile", "--prompts", str(file))
    assert (result.exit_code, result.stdout) == (2, "")
    assert complaint in result.stderr


def test_prompts(tmp_path):
    from unmask.cli.profile import read_prompts

    file = tmp_path / "prompts"
    file.write_text('How many?\n\n{"question": "One\\nor two?", "answer": "x"}\n{"prompt": "Three"}\n')
    assert read_prompts(file) == ["How many?", "One\nor two?", "Three"]


def test_a_run(unmask, tmp_path, capsys):
    from unmask.cli.profile import show

    file = tmp_path / "prompts"
    file.write_text("Ann has 3 pens and buys 4 more. How many pens does she have?\n")
    result = unmask(*QUICK, "--prompts", str(file), "--out", str(tmp_path), "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)  # JSON is alone there
    assert data == json.loads((tmp_path / "profile.json").read_text())
    assert (data["model"], data["rules"], data["num_requests"]) == ("unmask-mini", ["threshold"], 1)
    assert data["prompts"] == "own"
    assert {row["part"] for row in data["rows"]} == {"drift", "attention", "agreement"}
    assert "1 requests" in result.stderr
    show(data)
    shown = capsys.readouterr().out
    assert "layer" in shown
    assert '{"curve": (' in shown


def test_its_rules():
    from unmask.bench import profile as bench
    from unmask.cli import profile as cli

    assert cli.RULES == bench.RULES
    assert cli.FEW in bench.RANKS
    assert cli.TOP in bench.TOPS
