"""What this machine has. Every probe is a function of its own, answers fast, and is content with nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

REQUIRED = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "transformers",
    "jinja2",
    "huggingface_hub",
    "typer",
    "rich",
)
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "gpu": ("triton",),
    "server": ("fastapi", "uvicorn", "prometheus-client"),
    "train": ("matplotlib",),
    "eval": ("lm-eval",),
}
TRITON_RANGE = ((3, 2), (3, 8))
"""Versions of Triton that the extra gpu allows: the first, and the first that is too new."""
MIN_KERNELS = (8, 0)
"""Compute capability that the kernels are written for: bf16 on tensor cores, asynchronous copies."""
MIN_FP8 = (8, 9)
"""Compute capability of the first GPUs that multiply 8-bit floats."""
MIN_DRIVER = {"11": 450, "12": 525, "13": 580}
"""Oldest Linux driver that runs each major CUDA version (NVIDIA's compatibility table)."""


@dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi."""

    name: str
    memory_bytes: int
    driver: str
    compute_cap: str | None = None
    """Such as 9.0; None where the driver is too old to say."""


def version_of(package: str) -> str | None:
    """The installed version, read without importing the package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ram_bytes() -> int | None:
    """Memory of the machine, or of the container where that is less."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
    limit = _container_limit(Path("/sys/fs/cgroup/memory.max"))
    return min(total, limit) if limit else total


def _container_limit(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such file, or the word "max"
        return None


def gpus() -> list[Gpu]:
    """The GPUs that nvidia-smi knows; none without it. Drivers before 2022 refuse the question for compute_cap."""
    for fields in ("name,memory.total,driver_version,compute_cap", "name,memory.total,driver_version"):
        query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        except subprocess.CalledProcessError:
            continue
        except (OSError, subprocess.SubprocessError):
            return []
        return [gpu for line in answer.splitlines() if (gpu := parse_gpu(line, fields.count(",")))]
    return []


def parse_gpu(line: str, num_commas: int = 3) -> Gpu | None:
    """``name, MiB, driver`` and perhaps ``, compute capability``; None where nvidia-smi has no number to give."""
    parts = [part.strip() for part in line.rsplit(",", num_commas)]
    if len(parts) != num_commas + 1 or not parts[1].isdigit():
        return None
    capability = parts[3] if num_commas == 3 and numbers(parts[3]) else None
    return Gpu(parts[0], int(parts[1]) * 2**20, parts[2], capability)


def numbers(version: str) -> tuple[int, int] | None:
    """Major and minor of ``3.6.0+git`` or ``9.0``; None where there are none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def torch_build(version: str) -> str:
    """``cpu``, ``cu128``, ``rocm6.3`` or, where the version does not say, an empty string."""
    return version.partition("+")[2]


def driver_too_old(build: str, driver: str) -> bool:
    """Whether a CUDA build of torch needs a newer driver than this."""
    major = driver.partition(".")[0]
    return build.startswith("cu") and major.isdigit() and int(major) < MIN_DRIVER.get(build[2:4], 0)


def hub_cache() -> Path:
    """Where the Hugging Face libraries keep what they fetched."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.environ.get("HF_HOME", f"{cache}/huggingface")).expanduser() / "hub"


def is_cached(cache: Path, model: str) -> bool:
    """Whether weights of this hub model lie in the cache."""
    snapshots = cache / ("models--" + model.replace("/", "--")) / "snapshots"
    return any(snapshots.glob("*/*.safetensors"))


def free_disk(path: Path) -> int | None:
    """Bytes left where this path is, or would be."""
    there = next((p for p in (path, *path.parents) if p.exists()), None)
    return shutil.disk_usage(there).free if there else None


def hub_reachable(timeout: float = 5) -> str | None:
    """None when the hub answers, else why it does not."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=timeout).close()
    except urllib.error.HTTPError:
        return None  # it answered
    except (OSError, ValueError) as error:
        return f"{endpoint}: {error}"
    return None
