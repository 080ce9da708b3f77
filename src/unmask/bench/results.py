"""Result files: JSON for scripts and CSV for people, written anew after every measurement, so that a run can be cut."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from unmask.bench.environment import environment


class Results:
    """The rows of one run, which has one environment."""

    def __init__(self, name: str, device: torch.device | str, out: Path | None) -> None:
        self.name, self.out = name, out
        self.data: dict[str, Any] = {"environment": environment(device), "rows": [], "left_out": []}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What was measured so far."""
        rows: list[dict[str, Any]] = self.data["rows"]
        return rows

    def note(self, **facts: Any) -> None:
        """Facts of the whole run."""
        self.data |= facts
        self.write()

    def leave_out(self, what: str) -> None:
        """Something that was not measured, and is said so."""
        self.data["left_out"].append(what)
        self.write()

    def add(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """One measurement."""
        self.rows.append(dict(row))
        self.write()
        return self.rows[-1]

    def write(self) -> None:
        """Both files, whole; nothing without a directory."""
        if self.out is None:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        _replace(self.out / f"{self.name}.json", json.dumps(self.data, indent=1) + "\n")
        self._write_csv(self.out / f"{self.name}.csv")

    def _write_csv(self, path: Path) -> None:
        made = self.data["environment"]
        last = {"device": made["device"], "torch": made["versions"].get("torch")}
        last |= {name: made[name] for name in ("date", "commit")}
        flat = [flatten(row) | last for row in self.rows]
        columns = list(dict.fromkeys(name for row in flat for name in row))
        fresh = path.with_suffix(".csv.new")
        with fresh.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(flat)
        fresh.replace(path)


def _replace(path: Path, text: str) -> None:
    """Whole or not at all: a run may be cut while it writes."""
    fresh = path.with_suffix(path.suffix + ".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def flatten(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under dotted names; lists joined by spaces."""
    out: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            out |= flatten(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
    return out
