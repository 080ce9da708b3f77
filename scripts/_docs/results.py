"""Result files: reading them, and saying what made them."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Result = dict[str, Any]
Show = Callable[[Result], str]
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"


def single(name: str) -> Result:
    """What docs/results/NAME.json holds."""
    result: Result = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def found(name: str) -> list[Result]:
    """The result files of a measurement; a file's "variant" is what tells it from the plain one."""
    files = sorted(RESULTS.glob(f"{name}.json")) + sorted(RESULTS.glob(f"{name}_*.json"))
    if not files:
        raise FileNotFoundError(name)
    return [single(file.stem) | {"variant": file.stem.removeprefix(name).strip("_")} for file in files]


def of_each(name: str, about: Show) -> Callable[[Show], Callable[[], str]]:
    """Makes what is shown of a result, maybe nothing, into what is shown of every result file of a measurement."""

    def of_all(show: Show) -> Callable[[], str]:
        def shown() -> str:
            parts = []
            for result in found(name):
                if text := show(result):
                    title = f"`{result['variant']}`:\n\n" if result["variant"] else ""
                    parts.append(f"{title}{text}\n\n{about(result)}")
            if not parts:
                raise FileNotFoundError(name)
            return "\n\n".join(parts)

        return shown

    return of_all


def ceilings(result: Result) -> str:
    """Of a run of `unmask bench`: ceilings, machine, and what was left out."""
    rates = result["ceilings"]
    text = f"Ceilings of this run: copy {rates['bytes_per_second'] / 1e12:.2f} TB/s, "
    text += f"bf16 {rates['flops_per_second'] / 1e12:.0f} TFLOP/s; {made_with(result)}"
    left_out = result["left_out"]
    return text + (f" Left out for lack of time: {'; '.join(left_out)}." if left_out else "")


def made_with(result: Result) -> str:
    """The machine of a result or of a row."""
    made = result["environment"]
    return f"{made['device']}, torch {made['versions']['torch']}, {made['date']}."


def problems(result: Result) -> str:
    """The problems of a result or of a row, and the machine."""
    return (
        f"{result['num_problems']} held-out problems{in_requests(result)}, {result['max_tokens']} answer positions, "
        f"{result['dtype']}; {made_with(result)}"
    )


def in_requests(result: Result) -> str:
    return f" in requests of {result['per_request']}" if result["per_request"] > 1 else ""


def load_script(name: str) -> Any:
    """A script beside `scripts/docs` as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(Path(__file__).parents[1] / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
