from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cli.test_main import ENV, SPY

TINY = ("--shape", "tiny", "--prompt", "20", "--answer", "64", "--device", "cpu")


@pytest.mark.parametrize(
    "line",
    ["bench --help", "bench kernels --help", "bench step --help", "bench latency --help", "bench methods --help"],
)
def test_help_imports_nothing_large(line):
    result = subprocess.run([sys.executable, "-c", SPY, *line.split()], env=ENV, capture_output=True, text=True)
    assert result.stdout.strip()
    assert result.stderr.strip() == "LOADED"


def test_its_verbs(unmask):
    shown = unmask("bench", "--help").stdout
    assert all(f" {verb} " in shown for verb in ("kernels", "step", "latency", "throughput", "methods"))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("kernels --op atend", "'attend'"),
        ("kernels --tiles --device cpu", "--tiles searches on a GPU"),
        ("step --shape lada-8b", "'llada-8b'"),
        ("step --part targts", "'targets'"),
        ("step --seats 1,x", "numbers from 1 to 1024"),
        ("step --seats 0", "numbers from 1 to 1024"),
        ("step --shape tiny --tokens-per-pass 0", "more than 0"),
        ("step --shape tiny --tokens-per-pass 17", "at most the 16"),
        ("step --device cpu", "--shape mini, or tiny"),
        ("step --shape tiny --device cpu --check", "needs a GPU"),
        ("step --kernels cuda", "'cuda' is unknown"),
        ("latency --method flash-cash", "'flash-cache'"),
        ("latency --shape dream-7b --device cpu", "--shape mini, or tiny"),
        ("latency --quantization int4 --shape tiny", "quantization"),
        ("latency --shape tiny --enforce-eager --enable-torch-compile", "leave one of them out"),
        ("throughput --seats ,", "numbers from 1 to 1024"),
        ("throughput --max-num-batched-tokens 0", "max-num-batched-tokens"),
        ("throughput --seconds 0", "seconds"),
        ("methods --setting shrt", "'short'"),
        ("methods --method flash-cash", "'flash-cache'"),
        ("methods --problems 0", "problems"),
        ("methods --seats 1025", "seats"),
        ("stp", "'step'"),
    ],
)
def test_errors(unmask, line, complaint):
    result = unmask("bench", *line.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert complaint in result.stderr


def test_kernels(unmask, tmp_path):
    result = unmask("bench", "kernels", "--device", "cpu", "--op", "swiglu", "--out", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    assert "swiglu: rows 3:" in result.stdout
    assert "written" in result.stdout
    assert json.loads((tmp_path / "kernels.json").read_text())["rows"][-1]["speedup"]


def test_json_is_alone_on_stdout(unmask, tmp_path):
    result = unmask("bench", "latency", *TINY, "--method", "vanilla", "--no-compare", "--out", str(tmp_path), "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["rows"] == json.loads((tmp_path / "latency_tiny.json").read_text())["rows"]
    assert "tokens/s" in result.stderr


def test_step(unmask, tmp_path):
    sizes = ("--prompt", "200", "--answer", "250", "--seats", "2", "--part", "grid")
    result = unmask("bench", "step", "--shape", "tiny", "--device", "cpu", *sizes, "--out", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    rows = json.loads((tmp_path / "step_times_tiny.json").read_text())["rows"]
    assert [row["rows"] for row in rows] == [128, 16, 32, 64]
    assert all(row["ok"] for row in rows)


def test_throughput(unmask, tmp_path):
    more = ("--seats", "1,2", "--method", "flash-cache", "--out", str(tmp_path))
    result = unmask("bench", "throughput", *TINY, *more)
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "throughput_tiny.csv").read_text().count("\n") == 3


def test_methods(unmask, tmp_path):
    """What is compared with comes along; a second run goes on."""
    line = ("bench", "methods", "--device", "cpu", "--problems", "1", "--method", "freedave", "--out", str(tmp_path))
    result = unmask(*line, "--seconds", "1")
    assert result.exit_code == 0, result.stderr
    assert "left out: freedave threshold=2.0 block_length=16" in result.stdout
    assert unmask(*line).exit_code == 0
    rows = json.loads((tmp_path / "methods_short.json").read_text())["rows"]
    plain = "confidence threshold=2.0 block_length=16"
    assert [row["cell"] for row in rows] == ["confidence threshold=2.0", *(row["cell"] for row in rows[1:])]
    (ahead,) = (row for row in rows if row["cell"] == "freedave threshold=2.0 block_length=16")
    assert ahead["to_no_cache"]["of"] == plain
    assert ahead["to_one_a_pass"]["of"] == rows[0]["cell"]


def test_its_settings():
    from unmask.bench import methods
    from unmask.cli import bench

    assert tuple(methods.SETTINGS) == bench.SETTINGS


def test_where_results_go(unmask, tmp_path, monkeypatch):
    """docs/results where it is, as in a checkout; else the directory itself."""
    monkeypatch.chdir(tmp_path)
    line = ("bench", "kernels", "--device", "cpu", "--op", "linear")
    assert unmask(*line).exit_code == 0
    assert (tmp_path / "kernels.json").exists()
    (tmp_path / "docs" / "results").mkdir(parents=True)
    assert unmask(*line).exit_code == 0
    assert (tmp_path / "docs" / "results" / "kernels.csv").exists()
