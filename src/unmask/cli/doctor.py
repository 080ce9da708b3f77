"""`unmask doctor`: whether this machine can run which model, and what to do about what is missing."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unmask._version import __version__
from unmask.cli import system
from unmask.cli.catalog import CANVAS, Model, known_models, shipped_dir
from unmask.cli.models import gigabytes, narrow_table, wide_console
from unmask.cli.options import JsonOption

HEADROOM = 1.1
"""Memory beyond weights, keys and values, as a factor: activations and the libraries themselves."""
MARKS = {"ok": ("✓", "green"), "note": ("·", "yellow"), "missing": ("✗", "red")}


@dataclass(frozen=True)
class Finding:
    """One thing looked at: ``ok``, ``note`` (works without) or ``missing`` (does not)."""

    level: str
    what: str
    fix: str = ""


@dataclass
class Report:
    """Everything that `doctor` says."""

    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    fits: list[dict[str, Any]] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        return all(finding.level != "missing" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"usable": self.usable}


def doctor(
    as_json: JsonOption = False,
    online: Annotated[bool, typer.Option("--online", help="Also try to reach the hub.")] = False,
) -> None:
    """Look at this machine: what is here, what fits, what is missing."""
    report = examine(online)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        draw(report, wide_console())
    if not report.usable:
        raise typer.Exit(1)


def examine(online: bool = False) -> Report:
    """Looks at everything once."""
    gpus, cache, ram = system.gpus(), system.hub_cache(), system.ram_bytes()
    torch = system.version_of("torch")
    report = Report()
    report.facts = {
        "unmask": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": system.num_cores(),
        "ram_bytes": ram,
        "gpus": [asdict(gpu) for gpu in gpus],
        "torch": torch,
        "triton": system.version_of("triton"),
        "hub_cache": str(cache),
        "hub_cache_free_bytes": system.free_disk(cache),
        "HF_TOKEN": "set" if os.environ.get("HF_TOKEN") else "not set",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "not set"),
    }
    on_gpu = [*accelerator(torch, gpus), *capabilities(gpus), *compiler(gpus)]
    report.findings = [*packages(), *on_gpu, *extras(gpus), *weights(), *hub(online)]
    memory = max((gpu.memory_bytes for gpu in gpus), default=ram)
    for model in known_models():
        cached = model.sizes is not None if "/" not in model.name else system.is_cached(cache, model.name)
        report.fits.append(fit(model, memory, on_gpu=bool(gpus)) | {"on_disk": cached})
    return report


def packages() -> list[Finding]:
    """The packages that nothing works without."""
    absent = [name for name in system.REQUIRED if system.version_of(name) is None]
    if absent:
        return [Finding("missing", f"packages: {', '.join(absent)}", f"pip install {' '.join(absent)}")]
    return [Finding("ok", "all required packages are installed")]


def accelerator(torch: str | None, gpus: list[system.Gpu]) -> list[Finding]:
    """Whether torch's build suits the GPUs."""
    if not gpus:
        return [Finding("note", "no NVIDIA GPU found (nvidia-smi); everything runs on the CPU")]
    if torch is None:
        return []
    build = system.torch_build(torch)
    if build == "cpu" or build.startswith("rocm"):
        fix = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"
        return [Finding("note", f"torch {torch} cannot use the GPU: a {build} build", fix)]
    if system.driver_too_old(build, gpus[0].driver):
        need = system.MIN_DRIVER[build[2:4]]
        return [Finding("note", f"driver {gpus[0].driver} is too old for {build}", f"install driver {need} or newer")]
    return [Finding("ok", f"torch {torch} suits {gpus[0].name}, driver {gpus[0].driver}")]


def capabilities(gpus: list[system.Gpu]) -> list[Finding]:
    """What the GPUs are too old for. One of each kind is told."""
    found = []
    for name, capability in dict.fromkeys((gpu.name, gpu.compute_cap) for gpu in gpus):
        have = system.numbers(capability or "")
        if have is None:
            what = f"the driver does not say the compute capability of {name}"
            found.append(
                Finding("note", what, f"install a newer driver; the kernels need {_dotted(system.MIN_KERNELS)}")
            )
        elif have < system.MIN_KERNELS:
            what = f"{name} has compute capability {capability}, and the GPU kernels need {_dotted(system.MIN_KERNELS)}"
            found.append(Finding("note", what, "use an Ampere GPU (A100, RTX 30) or a later one, or --device cpu"))
        elif have < system.MIN_FP8:
            what = f"{name} has compute capability {capability}, and fp8 needs {_dotted(system.MIN_FP8)}"
            found.append(Finding("note", what, "leave --quantization out, or use an Ada or Hopper GPU or a later one"))
        else:
            found.append(Finding("ok", f"{name} has compute capability {capability}: kernels and fp8"))
    return found


def compiler(gpus: list[system.Gpu]) -> list[Finding]:
    """Whether Triton, if it is here, is one that the kernels are tried with; `extras` tells when it is not."""
    version = system.version_of("triton") if gpus else None
    if version is None:
        return []
    first, too_new = system.TRITON_RANGE
    allowed = f"triton>={_dotted(first)},<{_dotted(too_new)}"
    have = system.numbers(version)
    if have is not None and first <= have < too_new:
        return [Finding("ok", f"triton {version}")]
    age = "too old" if have is not None and have < first else "too new" if have is not None else "of unknown version"
    return [Finding("note", f"triton {version} is {age}: the kernels need {allowed}", f"pip install '{allowed}'")]


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def extras(gpus: list[system.Gpu]) -> list[Finding]:
    """The optional parts; the GPU kernels are worth a word only where there is a GPU."""
    found = []
    for extra, names in system.EXTRAS.items():
        absent = [name for name in names if system.version_of(name) is None]
        if not absent:
            found.append(Finding("ok", f"extra {extra}: installed"))
        elif extra != "gpu" or gpus:
            what = f"extra {extra}: {', '.join(absent)} not installed"
            found.append(Finding("note", what, f"pip install 'unmask[{extra}]'"))
    return found


def weights() -> list[Finding]:
    """The model that ships."""
    if shipped_dir() is None:
        return [Finding("note", "the model that ships is not in this checkout", "give --model, or install the wheel")]
    return [Finding("ok", "the model that ships is here")]


def hub(online: bool) -> list[Finding]:
    """What stands between this machine and other models."""
    found = []
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        found.append(Finding("note", "HF_HUB_OFFLINE is set: only cached models load", "unset HF_HUB_OFFLINE"))
    if online:
        why_not = system.hub_reachable()
        fix = "check the network, a proxy (HTTPS_PROXY) or HF_ENDPOINT"
        found.append(Finding("note", f"hub unreachable: {why_not}", fix) if why_not else Finding("ok", "hub reachable"))
    return found


def fit(model: Model, memory: int | None, on_gpu: bool) -> dict[str, Any]:
    """The dtype in which a model fits, None if in none. A CPU prefers float32, a GPU the published bfloat16."""
    dtypes = ("bfloat16",) if on_gpu else ("float32", "bfloat16")
    needs = {dtype: int(model.sizes.memory(dtype) * HEADROOM) for dtype in dtypes} if model.sizes else {}
    fitting = [dtype for dtype, need in needs.items() if memory is not None and need <= memory]
    return {
        "model": model.name,
        "dtype": fitting[0] if fitting else None,
        "need_bytes": needs[fitting[0]] if fitting else min(needs.values(), default=None),
        "where": "gpu" if on_gpu else "ram",
    }


def draw(report: Report, console: Console) -> None:
    """The report for people."""
    facts = Table.grid(padding=(0, 2))
    for name, value in report.facts.items():
        facts.add_row(Text(name.removesuffix("_bytes"), "bold"), Text(_fact(name, value)))
    console.print(facts)
    console.print()
    for finding in report.findings:
        mark, colour = MARKS[finding.level]
        line = Text.assemble((mark, colour), " ", finding.what, (f"  → {finding.fix}" if finding.fix else "", "cyan"))
        console.print(line, soft_wrap=True)
    console.print(_fit_table(report.fits))
    console.print(
        f"Needs: weights, keys and values of a {CANVAS}-token canvas, and {HEADROOM - 1:.0%} on top.", style="dim"
    )
    verdict = ("usable", "bold green") if report.usable else ("not usable: see ✗ above", "bold red")
    console.print(Text(*verdict))


def _fact(name: str, value: Any) -> str:
    if name == "gpus":
        return ", ".join(map(_gpu, value)) or "none"
    if name.endswith("_bytes"):
        return gigabytes(value)
    return "not installed" if value is None else str(value)


def _gpu(gpu: dict[str, Any]) -> str:
    capability = f", compute capability {gpu['compute_cap']}" if gpu["compute_cap"] else ""
    return f"{gpu['name']} ({gigabytes(gpu['memory_bytes'])}{capability})"


def _fit_table(fits: list[dict[str, Any]]) -> Table:
    table = narrow_table("model", "fits here", "needs", "on disk")
    for row in fits:
        fits_in = Text("no", "red") if row["dtype"] is None else Text(f"{row['dtype']} ({row['where']})", "green")
        unknown = row["need_bytes"] is None
        table.add_row(
            row["model"], "-" if unknown else fits_in, gigabytes(row["need_bytes"]), "yes" if row["on_disk"] else "no"
        )
    return table
