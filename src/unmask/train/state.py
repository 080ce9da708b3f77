"""A resumable state on disk: `state.safetensors` and `state.json` in one directory. No pickle.

The directory is replaced by renaming: a reader finds the old state or the new one, whenever the writer dies.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from unmask.errors import CheckpointError


def save_state(directory: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write a state in place of the one that is there."""
    fresh, old = _beside(directory, "new"), _beside(directory, "old")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, fresh / "state.safetensors")
    (fresh / "state.json").write_text(json.dumps(dict(facts), indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        os.replace(directory, old)
    os.replace(fresh, directory)
    shutil.rmtree(old, ignore_errors=True)


def load_state(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state's tensors, on the CPU, and its facts."""
    found = _present(directory)
    if found is None:
        raise CheckpointError(f"{directory} holds no training state; start without resuming")
    try:
        facts: dict[str, Any] = json.loads((found / "state.json").read_text(encoding="utf-8"))
        return load_file(found / "state.safetensors"), facts
    except Exception as error:
        raise CheckpointError(f"the training state in {found} is not readable: {error}") from error


def has_state(directory: Path) -> bool:
    """Is there a state to resume from?"""
    return _present(directory) is not None


def _present(directory: Path) -> Path | None:
    """The state; the one before, when a writer died between its two renames."""
    options = (directory, _beside(directory, "old"))
    return next((d for d in options if (d / "state.json").exists()), None)


def _beside(directory: Path, kind: str) -> Path:
    return directory.with_name(f"{directory.name}.{kind}")
