"""What tests of tables share."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def docs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`scripts/docs`, looking for results in an empty directory."""
    scripts = Path(__file__).parents[2] / "scripts"
    monkeypatch.syspath_prepend(str(scripts))
    loader = importlib.machinery.SourceFileLoader("docs_script", str(scripts / "docs"))
    spec = importlib.util.spec_from_loader("docs_script", loader)
    assert spec is not None
    module: Any = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    (tmp_path / "docs" / "results").mkdir(parents=True)
    module.ROOT, module.RESULTS = tmp_path, tmp_path / "docs" / "results"
    return module
