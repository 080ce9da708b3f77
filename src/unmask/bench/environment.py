"""What a measurement was made with: it travels beside every number."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from typing import Any

import torch

PACKAGES = ("unmask", "torch", "triton", "transformers", "tokenizers", "safetensors")


def environment(device: torch.device | str) -> dict[str, Any]:
    """Device, versions, date and commit."""
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else (platform.processor() or platform.machine()),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "cuda": torch.version.cuda if on_gpu else None,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": os.environ.get("UNMASK_COMMIT") or _commit(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
