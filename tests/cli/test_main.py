from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unmask._version import __version__
from unmask.cli.main import VERBS, load_verb

SRC = Path(__file__).parents[2] / "src"
HERE = Path(__file__).parents[1]
ENV = {**os.environ, "PYTHONPATH": f"{SRC}{os.pathsep}{HERE}", "COLUMNS": "100", "TERM": "xterm-256color"}

# Runs a command line, then tells which of the large packages it imported.
SPY = """
import sys, unmask.cli.main as m
sys.argv[0] = "unmask"
try:
    m.main()
finally:
    print("LOADED", *sorted({"torch", "transformers", "tokenizers", "triton"} & set(sys.modules)), file=sys.stderr)
"""
FAKE = """
import cli.fake_llm, unmask.cli._engine as e, unmask.cli.main as m
e.make_llm = lambda options: cli.fake_llm.FakeLLM(delay=float({delay}))
m.main()
"""


def python(code, *args, **options):
    return subprocess.run(
        [sys.executable, "-c", code, *args], env=ENV, capture_output=True, text=True, timeout=60, **options
    )


@pytest.mark.parametrize(
    "line",
    ["--help", "--version", "models", "methods", "doctor", "problems --n 2", "generate --help", "train --help"],
)
def test_light_verbs_import_nothing_large(line):
    result = python(SPY, *line.split())
    assert result.stdout.strip()
    assert result.stderr.strip() == "LOADED", result.stderr


def test_a_typo_is_told_without_importing_anything_large():
    result = python(SPY, "generate", "x", "--method", "vanila")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == "LOADED"


def test_python_m_unmask():
    result = subprocess.run([sys.executable, "-m", "unmask", "--version"], env=ENV, capture_output=True, text=True)
    assert result.stdout == f"unmask {__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb, unmask):
    result = unmask(verb, "--help")
    assert result.exit_code == 0
    assert load_verb(verb).help


def test_help_lists_every_verb(unmask):
    assert all(f" {verb} " in unmask("--help").stdout for verb in VERBS)


def test_an_unknown_verb_gets_a_suggestion(unmask):
    result = unmask("genrate")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "'generate'" in result.stderr


def test_an_unknown_option_gets_a_suggestion(unmask):
    result = unmask("generate", "x", "--treshold", "1")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--threshold" in result.stderr


def test_a_reader_that_goes_away_is_no_traceback():
    command = f"{sys.executable} -m unmask problems --n 20000 | head -n 1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], env=ENV, capture_output=True, text=True, timeout=60)
    assert json.loads(result.stdout)["question"]
    assert (result.returncode, result.stderr) == (141, "")


def test_a_terminal_without_unicode_gets_the_rest():
    result = subprocess.run(
        [sys.executable, "-c", FAKE.format(delay=0), "generate", "x", "-q"],
        env={**ENV, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stdout) == (0, "Two and two make ?.\nDone\n")


def _hear_interrupts() -> None:
    """A test run in the background has interrupts ignored, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("interrupt", [True, False])
def test_a_real_terminal(interrupt):
    import pty

    outside, inside = pty.openpty()
    command = [sys.executable, "-c", FAKE.format(delay=0.3 if interrupt else 0.05), "generate", "x"]
    process = subprocess.Popen(
        command, env=ENV, stdin=inside, stdout=inside, stderr=inside, close_fds=True, preexec_fn=_hear_interrupts
    )
    os.close(inside)
    drawn = read_until(outside, "░".encode())
    if interrupt:
        process.send_signal(signal.SIGINT)
    drawn += read_until(outside, None)
    assert process.wait(30) == (130 if interrupt else 0)
    os.close(outside)
    assert drawn.rindex(b"\x1b[?25h") > drawn.rindex(b"\x1b[?25l")
    assert (b"interrupted" in drawn) is interrupt
    assert (b"4 passes" in drawn) is not interrupt
    assert b"Traceback" not in drawn


def read_until(fd, mark):
    data, deadline = b"", time.monotonic() + 30
    while (mark is None or mark not in data) and time.monotonic() < deadline:
        try:
            piece = os.read(fd, 4096)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        data += piece
    return data
