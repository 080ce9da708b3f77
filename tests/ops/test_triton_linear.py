"""The Triton products of few rows against the reference: in the interpreter on the CPU (fp32 and fp16: its bf16 is
silently wrong), as compiled kernels where there is a GPU. Memory that a kernel is to fill holds NaN.

M rows, N weight rows, K weight columns, Z shares of K
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from unmask.ops.reference.mlp import swiglu
from unmask.ops.reference.norm import rms_norm

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"

# The interpreter is chosen when a kernel is defined, Triton's own included; nothing else of this process shall see it.
_before = os.environ.get("TRITON_INTERPRET")
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
try:
    triton = pytest.importorskip("triton", reason="no Triton")
    from triton.runtime import interpreter

    from unmask.ops.triton import linear as kernels
finally:
    if _before is None:
        os.environ.pop("TRITON_INTERPRET", None)
interpreted = (kernels._store, triton.language.sum)
if not ON_GPU and not all(isinstance(f, interpreter.InterpretedFunction) for f in interpreted):
    pytest.skip("Triton was imported without TRITON_INTERPRET=1, and there is no GPU", allow_module_level=True)

Tile = kernels.Tile
PLAIN = Tile(width=32, depth=32, swap=True, tma=False)
WIDE = Tile(width=16, depth=32, strips=3, swap=False)
SHARED = Tile(width=32, depth=32, splits=3)
TILES = (PLAIN, WIDE, SHARED, replace(SHARED, tma=False, swap=False))
DTYPES = (torch.float32, torch.float16, *((torch.bfloat16,) if ON_GPU else ()))
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter turns a loop bound into a number in a way that NumPy 2.4 refuses, and imports parts of
    Triton as late as its first call."""
    if ON_GPU:
        return
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is not written shows."""
    empty, new_empty = torch.empty, Tensor.new_empty
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan))
        patch.setattr(Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).fill_(torch.nan))
        yield


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def error(ours: Tensor, exact: Tensor) -> float:
    """Relative; NaN stays NaN."""
    return float((ours.double() - exact).norm() / exact.norm().clamp(min=1e-9))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "depth"), [(1, 40, 32), (127, 96, 64), (129, 100, 100), (160, 33, 64), (200, 48, 99)]
)
def test_linear_is_the_reference(num_rows: int, num_columns: int, depth: int, tile: Tile) -> None:
    """Rows in one block, in two and in two tiles; columns and depths that are no multiple of a tile or of 16 bytes."""
    x_MD, weight_ND = random(num_rows, depth), random(num_columns, depth, seed=1)
    bias = random(num_columns, seed=2)
    out_MN = kernels.linear(x_MD, weight_ND, bias, tile=tile)
    assert error(out_MN, F.linear(x_MD.double(), weight_ND.double(), bias.double())) < 1e-5


@pytest.mark.parametrize("tile", [*TILES, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_swiglu_is_the_reference(dtype: torch.dtype, tile: Tile | None) -> None:
    """The last strip of the gate runs into the rows of ``up``."""
    x_MD, weight_ND = random(5, 64, dtype=dtype), random(2 * 52, 64, dtype=dtype, seed=1)
    exact = swiglu(F.linear(x_MD.double(), weight_ND.double()))
    assert error(kernels.linear_swiglu(x_MD, weight_ND, tile=tile), exact) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 33])
def test_the_chosen_tile_is_the_reference(num_rows: int, dtype: torch.dtype) -> None:
    """Rows with strides of their own."""
    x_MD, weight_ND = random(num_rows, 128, dtype=dtype)[:, :72], random(80, 72, dtype=dtype, seed=1)
    out_MN = kernels.linear(x_MD, weight_ND)
    assert out_MN.dtype == dtype
    assert error(out_MN, F.linear(x_MD.double(), weight_ND.double())) < BOUNDS[dtype]


@pytest.mark.parametrize("splits", [1, 3, 4, 5])
def test_shares_add_up_and_every_one_is_written(splits: int) -> None:
    """Of two steps of K: shares without a step are zeros."""
    x_MD, weight_ND = random(3, 64), random(40, 64, seed=1)
    part_ZMN = kernels.linear_parts(x_MD, weight_ND, tile=Tile(width=32, depth=128, splits=splits))
    assert part_ZMN.shape == (splits, 3, 40)
    assert error(part_ZMN.sum(0), F.linear(x_MD.double(), weight_ND.double())) < 1e-5
    assert error(part_ZMN[0], F.linear(x_MD.double(), weight_ND.double())) > 0.1 or splits == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_parts"), [(0, 2), (1, 1), (5, 3)])
def test_the_norm_of_shares_rounds_as_the_reference(num_rows: int, num_parts: int, dtype: torch.dtype) -> None:
    x, gain, part_ZMN = (
        random(num_rows, 37, dtype=dtype),
        random(37, dtype=dtype, seed=1),
        random(num_parts, num_rows, 37),
    )
    total, out = kernels.add_rms_norm_parts(x, part_ZMN, gain, 1e-5)
    product = torch.zeros_like(part_ZMN[0])
    for part_MN in part_ZMN:
        product = product + part_MN
    assert torch.equal(total, x + product.to(dtype))
    assert torch.allclose(out, rms_norm(total, gain, 1e-5), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_a_wrong_weight_is_noticed() -> None:
    """Negative control, in the last row and the last column."""
    x_MD, weight_ND = random(129, 33), random(33, 33, seed=1)
    exact = F.linear(x_MD.double(), weight_ND.double())
    weight_ND[32, 32] += 1
    assert error(kernels.linear(x_MD, weight_ND, tile=PLAIN), exact) > 1e-2


def test_what_is_supported() -> None:
    x_MD, weight_ND = random(2, 16), random(4, 16)
    assert kernels.supported(x_MD, weight_ND)
    assert not kernels.supported(x_MD.double(), weight_ND.double())
    assert not kernels.supported(x_MD.half(), weight_ND)
    assert not kernels.supported(x_MD, random(16, 4).T)


def test_tiles_depend_on_shapes_alone() -> None:
    """And fill the processors without a second wave."""
    for num_rows in (1, 16, 128, 160):
        for num_columns in (12288, 4096, 3584):
            tile = kernels.tile_for(num_rows, num_columns, parts=True)
            assert 48 <= num_columns / (tile.width * tile.strips) * tile.splits <= 264
    assert kernels.blocks_of(160) == (128, 32)
    assert kernels.blocks_of(1) == (16, 0)


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
        ptx = made.asm["ptx"]
        words = ("wgmma.mma_async", "cp.async.bulk.tensor", "griddepcontrol.wait", "cp.async.bulk.prefetch.L2")
        found.append((self.__name__, made.metadata.shared, [word in ptx for word in words]))
    return run

driver.set_active(H200())
JITFunction.__getitem__ = launch
found = []
from unmask.ops.triton import linear as kernels
zeros = lambda *shape: torch.zeros(*shape, dtype=torch.bfloat16)
for rows in (1, 32, 128, 160):
    x, weight = zeros(rows, 4096), zeros(256, 4096)
    kernels.linear(x, weight, zeros(256), pdl=True)
    kernels.linear_swiglu(x, weight, pdl=True)
    part_ZMN = kernels.linear_parts(x, weight, pdl=True)
products = len(found)
kernels.linear(zeros(1, 99).half(), zeros(33, 99).half())
kernels.linear(zeros(5, 64).float(), zeros(33, 64).float())
kernels.add_rms_norm_parts(zeros(1, 256), part_ZMN[:, :1], zeros(256), 1e-5, pdl=True)
kernels._sum(part_ZMN, zeros(256), torch.bfloat16, True)
print(json.dumps((found[:products], found[products:])))
"""


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="knows Triton 3.6 from inside")
def test_every_kernel_compiles_for_an_h200() -> None:
    """The interpreter takes more than the compiler does. Products run on the matrix units, get their tiles by
    descriptor, and bring weights into the cache before they wait; all within 227 KB."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(Path(kernels.__file__).parents[3])
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    products, others = json.loads(done.stdout.splitlines()[-1])
    written = {name for name in vars(kernels) if name.endswith("_kernel")}
    assert {name for name, *_ in products + others} == written
    assert len(products) == 12
    for _, shared, has in products:
        assert all(has)
        assert shared <= 227 * 1024
