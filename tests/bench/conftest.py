"""What tests of tables share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def docs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`scripts/docs`, looking for results in an empty directory."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    from _docs import results

    (tmp_path / "docs" / "results").mkdir(parents=True)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "docs" / "results")
    return results.load_script("docs")
