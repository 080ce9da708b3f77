from __future__ import annotations

import io
import sys

import pytest
from typer.testing import CliRunner

from cli.fake_llm import FakeLLM
from unmask.cli import _engine
from unmask.cli.main import app


class Stdin(io.TextIOWrapper):
    def __init__(self, data: bytes, tty: bool = False):
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.tty = tty

    def isatty(self):
        return self.tty


@pytest.fixture
def llm(monkeypatch):
    """The fake engine that every verb gets; ``llm.options`` are what it was asked for."""
    fake = FakeLLM()

    def make(options):
        fake.options = options
        return fake

    monkeypatch.setattr(_engine, "make_llm", make)
    return fake


@pytest.fixture
def unmask(monkeypatch):
    """Runs a command line; returns its result with ``stdout``, ``stderr`` and ``exit_code``."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("UNMASK_DEBUG", raising=False)

    def run(*args: str, stdin: bytes = b"", **env: str):
        return CliRunner().invoke(app, list(args), input=stdin, env=env)

    return run


@pytest.fixture
def stdin(monkeypatch):
    return lambda data=b"", tty=False: monkeypatch.setattr(sys, "stdin", Stdin(data, tty))
