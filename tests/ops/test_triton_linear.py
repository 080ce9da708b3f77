"""The Triton products of few rows against the reference: in the interpreter on the CPU (fp32 and fp16: its bf16 is
silently wrong), as compiled kernels where there is a GPU. Memory that a kernel is to fill holds NaN. The interpreter
multiplies 8-bit floats exactly; what the tensor cores lose of their sums only a GPU shows.

M rows, N weight rows, K weight columns, Z shares of K
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ops.conftest import DEVICE, DTYPES, ON_GPU, compile_for_h200, load_kernels
from unmask.ops.reference import fp8
from unmask.ops.reference.mlp import swiglu

kernels = load_kernels("linear")
triton = pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("interpreted", "poisoned")

Tile = kernels.Tile
PLAIN = Tile(width=32, depth=32, swap=True, tma=False)
WIDE = Tile(width=16, depth=32, strips=3, swap=False)
SHARED = Tile(width=32, depth=32, splits=3)
TILES = (PLAIN, WIDE, SHARED, replace(SHARED, tma=False, swap=False))
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


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


def eight_bits(num_rows: int, num_columns: int, depth: int) -> tuple[Tensor, Tensor, fp8.Fp8Weight]:
    """Rows and channels of very different sizes: a scale that is left out or misplaced shows."""
    spread_M = 2.0 ** (torch.arange(num_rows, device=DEVICE) % 7)
    spread_N = 2.0 ** (torch.arange(num_columns, device=DEVICE) % 5)
    rows = fp8.quantize_rows(random(num_rows, depth) * spread_M[:, None])
    return *rows, fp8.Fp8Weight.quantize(random(num_columns, depth, seed=1) * spread_N[:, None])


FP8_BOUND = 5e-3 if ON_GPU else 1e-5
"""Tensor cores keep 14 bits of a sum."""


@pytest.mark.parametrize("tile", [*TILES, replace(WIDE, splits=2, promote=32), None])
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "depth"), [(1, 40, 32), (127, 96, 64), (129, 100, 112), (160, 33, 64), (200, 48, 99)]
)
def test_eight_bits_are_the_reference(num_rows: int, num_columns: int, depth: int, tile: Tile | None) -> None:
    """Scaled where the sum is stored, or where shares are added; bias last."""
    value_MD, scale_M, weight = eight_bits(num_rows, num_columns, depth)
    bias = random(num_columns, seed=2)
    wanted = fp8.linear_fp8(fp8.Fp8Rows(value_MD, scale_M, torch.float32), weight, bias)
    out_MN = kernels.linear_fp8(value_MD, scale_M, weight, bias, tile=tile, dtype=torch.float32)
    assert error(out_MN, wanted.double()) < FP8_BOUND
    for each in (out_MN, wanted):
        each /= scale_M[:, None] * weight.scale_N
    assert error(out_MN, wanted.double()) < FP8_BOUND


@pytest.mark.parametrize("splits", [1, 2])
def test_eight_bits_are_rounded_once(splits: int) -> None:
    """To the reference's very numbers in the interpreter, whose sums of 8-bit products with few bits are exact."""
    value_MD, scale_M, weight = eight_bits(3, 40, 64)
    value_MD, value_ND = (each.float().sign().to(each.dtype) for each in (value_MD, weight.value_ND))
    weight = fp8.Fp8Weight(value_ND, weight.scale_N)
    tile, bias = replace(PLAIN, splits=splits), random(40, seed=2, dtype=torch.float16)
    out_MN = kernels.linear_fp8(value_MD, scale_M, weight, bias, tile=tile, dtype=torch.float16)
    wanted = fp8.linear_fp8(fp8.Fp8Rows(value_MD, scale_M, torch.float16), weight, bias)
    assert torch.equal(out_MN, wanted) if not ON_GPU else error(out_MN, wanted.double()) < FP8_BOUND
    assert kernels.linear_fp8(value_MD[:0], scale_M[:0], weight, tile=tile).shape == (0, 40)
    assert kernels.linear_fp8(value_MD[:0], scale_M[:0], weight, tile=tile).dtype == torch.bfloat16


@pytest.mark.skipif(not ON_GPU, reason="the tensor cores' sums")
@pytest.mark.parametrize("promote", [0, 128])
@pytest.mark.parametrize("depth", [4096, 12288])
def test_long_sums_of_eight_bits(depth: int, promote: int) -> None:
    value_MD, scale_M, weight = eight_bits(32, 512, depth)
    wanted = fp8.linear_fp8(fp8.Fp8Rows(value_MD, scale_M, torch.float32), weight).double()
    tile = Tile(64, 128, splits=2, promote=promote)
    assert error(kernels.linear_fp8(value_MD, scale_M, weight, tile=tile), wanted) < FP8_BOUND


def test_the_tile_of_eight_bits_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one for the fewest rows that suffice, on Hopper alone; the product then comes from this kernel."""
    from unmask.ops.triton import fp8 as quantised

    value_MD, scale_M, weight = eight_bits(5, 48, 64)
    monkeypatch.setattr(kernels, "FP8_TILES", {(32, 48, 64): SHARED, (4, 48, 64): WIDE, (32, 64, 48): PLAIN})
    monkeypatch.setattr(kernels, "is_hopper", lambda _: False)
    assert kernels.faster_fp8(4, weight) is None
    monkeypatch.setattr(kernels, "is_hopper", lambda _: True)
    assert [kernels.faster_fp8(rows, weight) for rows in (1, 4, 5, 32, 33)] == [WIDE, WIDE, SHARED, SHARED, None]
    other = fp8.Fp8Weight(weight.value_ND.float(), weight.scale_N)
    assert kernels.faster_fp8(4, other) is None
    used = []
    monkeypatch.setattr(kernels, "linear_fp8", lambda *_, tile: used.append(tile) or torch.zeros(5, 48))
    assert quantised.product(value_MD.view(1, 5, 64), scale_M.view(1, 5), weight, None).shape == (1, 5, 48)
    assert used == [SHARED]


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


FP8_CALLS = """
from unmask.ops.reference.fp8 import Fp8Weight
from unmask.ops.triton import linear as kernels
eight = lambda *shape: torch.empty(shape, dtype=torch.float8_e4m3fn)
Tile = kernels.Tile
def product(rows, columns, depth, tile):
    weight = Fp8Weight(eight(columns, depth), torch.empty(columns))
    kernels.linear_fp8(eight(rows, depth), torch.empty(rows), weight, torch.empty(columns).bfloat16(), tile=tile)
for rows in (1, 32, 128, 160):
    product(rows, 256, 4096, Tile(64, 128, num_stages=3))
    product(rows, 256, 4096, Tile(64, 128, num_stages=3, promote=128))
product(128, 24576, 4096, Tile(64, 128, 3, num_warps=8, num_stages=5, swap=False))
product(1, 33, 99, Tile(64, 64))
product(32, 4096, 4096, Tile(64, 128, splits=2, num_stages=8))
"""


def test_eight_bits_compile_for_an_h200(tmp_path: Path) -> None:
    """On the matrix units, by descriptor where 16 bytes allow it, within 227 KB, and without a spilt register."""
    found = compile_for_h200(FP8_CALLS)
    assert [name for name, *_ in found] == ["_linear_kernel"] * 11 + ["_sum_kernel"]
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    for at, (name, shared, ptx) in enumerate(found):
        assert shared <= 227 * 1024
        assert ("f32.e4m3.e4m3" in ptx) == (name == "_linear_kernel")
        assert ("cp.async.bulk.tensor" in ptx) == (name == "_linear_kernel" and at != 9)
        (tmp_path / "kernel.ptx").write_text(ptx)
        command = [ptxas, "-v", "--gpu-name=sm_90a", tmp_path / "kernel.ptx", "-o", tmp_path / "kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr
