"""Which implementation runs an operation: the Triton kernel where it takes the call, the reference anywhere else.

A kernel is a module of `ops.triton` with the operation's name in it and a `supported`, which looks at shapes and types
alone, never at values: the choice is the same in every replay of a captured pass.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor

from unmask.config import KERNELS
from unmask.errors import ConfigError, nearest

MIN_CAPABILITY = (8, 0)
"""Of a GPU: bf16 on the matrix units, and copies that run beside them."""

_choice: ContextVar[str] = ContextVar("kernels", default="auto")


@contextmanager
def kernels(choice: str) -> Iterator[None]:
    """Inside, operations run by this choice: "auto", "reference" (plain torch), or "triton".

    "triton" is "auto" that must be able to use kernels; single calls that no kernel takes (fp64, or a head size without
    one) still go to the reference.

    Raises:
        ConfigError: an unknown choice, or "triton" where kernels cannot run; the message says why.
    """
    check(choice)
    token = _choice.set(choice)
    try:
        yield
    finally:
        _choice.reset(token)


def check(choice: str) -> None:
    """The errors of `kernels`, without the change."""
    if choice not in KERNELS:
        raise ConfigError(f"kernels={choice!r}; {nearest(choice, set(KERNELS))}")
    if choice == "triton" and (reason := why_not()):
        raise ConfigError(f"kernels='triton', but {reason}; use kernels='auto'")


def on(device: torch.device) -> AbstractContextManager[object]:
    """Inside, this GPU is the thread's current one: Triton launches on it, streams begin on it. Nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def why_not(device: torch.device | None = None) -> str | None:
    """Why no Triton kernel can run on this GPU, without one on the current; None: they can."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "torch sees no NVIDIA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        have, need = (".".join(map(str, each)) for each in (capability, MIN_CAPABILITY))
        return f"the GPU has compute capability {have} and the kernels need {need}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'unmask[gpu]')"
    return None


_why_not = cache(why_not)
"""Of a GPU by name: which one is current may change."""


def kernel(name: str, *tensors: Tensor) -> Any:
    """The module of `ops.triton` for a call with these tensors; None: the reference."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):  # kernels have no backward
        return None  # before the choice is read, which torch.compile cannot trace
    if not tensors[0].is_cuda or _choice.get() == "reference" or _why_not(tensors[0].device):
        return None
    return importlib.import_module(f"unmask.ops.triton.{name}")
