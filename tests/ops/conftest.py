"""What tests of Triton kernels share: kernels that are interpreted where there is no GPU, memory that holds NaN until
it is written, and a compiler for an H200 that needs none.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = (torch.float32, torch.float16, *((torch.bfloat16,) if ON_GPU else ()))
"""The interpreter's bf16 is silently wrong."""


def load_kernels(name: str) -> ModuleType:
    """The module of `unmask.ops.triton`; interpreted without a GPU. Skips the module that asks where it cannot be had.

    The interpreter is chosen when a kernel is defined, Triton's own included; nothing else of this process may see it.
    """
    before = os.environ.get("TRITON_INTERPRET")
    if not ON_GPU:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        triton = pytest.importorskip("triton", reason="Triton is not installed; it is made for Linux on x86-64")
        from triton.runtime import interpreter

        kernels = importlib.import_module(f"unmask.ops.triton.{name}")
    finally:
        if before is None:
            os.environ.pop("TRITON_INTERPRET", None)
    ours = [value for key, value in vars(kernels).items() if key.endswith("_kernel")]
    if not ON_GPU and not all(isinstance(f, interpreter.InterpretedFunction) for f in (*ours, triton.language.sum)):
        pytest.skip("Triton was imported without TRITON_INTERPRET=1, and there is no GPU", allow_module_level=True)
    return kernels


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter turns a loop bound into a number in a way that NumPy 2.4 refuses, and imports parts of
    Triton as late as its first call."""
    if ON_GPU:
        return
    from triton.runtime import interpreter

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is not written shows: NaN, and no entry at all."""

    def poison(make: Any) -> Any:
        def poisoned(*args: Any, **kwargs: Any) -> Tensor:
            out = make(*args, **kwargs)
            return out.fill_(torch.nan if out.is_floating_point() else -1)

        return poisoned

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", poison(torch.empty))
        patch.setattr(torch, "empty_like", poison(torch.empty_like))
        patch.setattr(Tensor, "new_empty", poison(Tensor.new_empty))
        yield


COMPILE = """
import json, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class H200:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=0: 0

def launch(self, grid):
    def run(*args, **kwargs):
        made = self.warmup(*args, grid=grid, **kwargs)
        found.append((self.__name__, made.metadata.shared, made.asm["ptx"]))
    return run

driver.set_active(H200())
JITFunction.__getitem__ = launch
found = []
{calls}
print(json.dumps(found))
"""


def compile_for_h200(calls: str) -> list[tuple[str, int, str]]:
    """Name, bytes of shared memory and PTX of every kernel that the statements launch, in that order.

    The interpreter takes more than the compiler does. Nothing is run, so that all outputs are garbage.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    code = COMPILE.replace("{calls}", calls)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [(name, shared, ptx) for name, shared, ptx in json.loads(done.stdout.splitlines()[-1])]
