"""`problems`, `train` and the script that draws docs/canvas.svg."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from cli.fake_llm import END_ID, FakeLLM
from unmask.config import SamplingParams
from unmask.errors import ConfigError

ROOT = Path(__file__).parents[2]


def lines(result):
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_problems_are_reproducible_json_lines(unmask):
    first = lines(unmask("problems", "--seed", "7", "--n", "5"))
    assert len(first) == 5
    assert all(set(line) == {"question", "answer"} for line in first)
    assert first == lines(unmask("problems", "--seed", "7", "--n", "5"))
    assert first != lines(unmask("problems", "--seed", "8", "--n", "5"))


def test_problems_take_their_options(unmask, monkeypatch):
    seen = {}
    monkeypatch.setattr(
        "unmask.cli.problems.make_problems", lambda seed, n, **options: seen.update(seed=seed, n=n, **options) or []
    )
    args = "--seed 3 --n 2 --split train --per-request 4 --min-steps 2 --max-steps 5"
    assert unmask("problems", *args.split()).exit_code == 0
    assert seen == {"seed": 3, "n": 2, "split": "train", "per_request": 4, "min_steps": 2, "max_steps": 5}


def test_an_unknown_split_is_told(unmask):
    result = unmask("problems", "--split", "tset")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")


def test_train_passes_everything_on(unmask, monkeypatch):
    seen = {}
    monkeypatch.setattr("unmask.train.config.load_config", lambda path, overrides: (path, overrides))
    monkeypatch.setattr(
        "unmask.train.trainer.train", lambda config, out, **options: seen.update(config=config, out=out, **options)
    )
    args = "train tiny --out run --resume --init dir --stage a --stage b --max-seconds 9 --workers 0 --device cpu"
    assert unmask(*args.split(), "--set", "x.y=1", "--set", "x.z=2").exit_code == 0
    assert seen == {
        "config": ("tiny", ["x.y=1", "x.z=2"]),
        "out": Path("run"),
        "device": "cpu",
        "resume": True,
        "init": Path("dir"),
        "stages": ["a", "b"],
        "max_seconds": 9.0,
        "num_workers": 0,
    }


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [(ConfigError("no such stage"), 2, "error: no such stage\n"), (KeyboardInterrupt(), 130, "interrupted\n")],
)
def test_train_that_does_not_end_well(error, code, message, unmask, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr("unmask.train.config.load_config", fail)
    result = unmask("train", "tiny", "--out", "run")
    assert (result.exit_code, result.stderr) == (code, message)


def test_train_needs_a_place(unmask):
    result = unmask("train", "tiny")
    assert result.exit_code == 2
    assert "--out" in result.stderr


@pytest.fixture
def record():
    spec = importlib.util.spec_from_file_location("record_canvas", ROOT / "scripts" / "record_canvas.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_recorded_canvas_fetches_nothing_and_repeats(record):
    def svg():
        steps = record.follow(FakeLLM(), "x", SamplingParams())
        return record.draw(record.pick(steps), "What is <2> & 2?", frozenset({END_ID}))

    first = svg()
    assert first == svg()
    assert set(re.findall(r"https?://[^\"' )]+", first)) == {"http://www.w3.org/2000/svg"}
    assert "@font-face" not in first
    assert first.count("░") > 0
    assert all(moment in first for moment in record.MOMENTS)


def test_the_recorded_canvas_is_xml(record):
    from xml.etree import ElementTree

    steps = record.follow(FakeLLM(), "x", SamplingParams())
    assert ElementTree.fromstring(record.draw(record.pick(steps), "<&>", frozenset({END_ID}))).tag.endswith("svg")


def test_the_picture_is_of_the_model_that_ships(record, tmp_path):
    record.main(["--out", str(tmp_path / "canvas.svg")])
    assert (tmp_path / "canvas.svg").read_text() == (ROOT / "docs" / "canvas.svg").read_text()
