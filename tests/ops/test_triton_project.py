"""The Triton projections against the reference: in the interpreter on the CPU (fp32 and fp16: its bf16 is silently
wrong), as compiled kernels where there is a GPU. Memory that a kernel is to fill holds NaN.

M rows, D hidden size, H query heads, Hkv key heads, hd head size, E entries
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.conftest import DEVICE, DTYPES, load_kernels
from unmask.ops.reference import project as reference

kernels = load_kernels("project")
triton = pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("interpreted", "poisoned")

E = 300
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
POINTERS = kernels.Tile(width=16, depth=32, tma=False, swap=False)
DESCRIPTORS = kernels.Tile(width=32, depth=64)


@dataclass(frozen=True)
class Call:
    """Random arguments; entries that no row writes hold numbers that must stay."""

    hidden_MD: Tensor
    weight: Tensor
    bias: Tensor | None
    cos_M: Tensor
    sin_M: Tensor
    write_M: Tensor
    k_E: Tensor
    v_E: Tensor

    def __call__(self, way: Callable[..., Tensor], **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        mine = replace(self, k_E=self.k_E.clone(), v_E=self.v_E.clone())
        return way(*vars(mine).values(), **options), mine.k_E, mine.v_E

    def to(self, dtype: torch.dtype) -> Call:
        names = ("hidden_MD", "weight", "bias", "k_E", "v_E")
        some = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(self, **{name: value.to(dtype) for name, value in some.items()})


def call(
    num_rows: int,
    heads: tuple[int, int],
    head_dim: int,
    hidden_size: int,
    *,
    bias: bool,
    dtype: torch.dtype = torch.float32,
) -> Call:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE)

    width = (heads[0] + 2 * heads[1]) * head_dim
    angle_M = randn(num_rows, head_dim // 2).float() * 3
    return Call(
        hidden_MD=randn(num_rows, hidden_size),
        weight=randn(width, hidden_size) / hidden_size**0.5,
        bias=randn(width) if bias else None,
        cos_M=angle_M.cos(),
        sin_M=angle_M.sin(),
        write_M=torch.randperm(E, generator=generator)[:num_rows].to(DEVICE),
        k_E=randn(E, heads[1], head_dim),
        v_E=randn(E, heads[1], head_dim),
    ).to(dtype)


def compare(given: Call, ours: tuple[Tensor, ...], dtype: torch.dtype = torch.float32) -> None:
    """NaN is never close; entries that no row writes stay bit for bit."""
    for out, exact in zip(ours, given.to(torch.float64)(reference.project_and_store)):
        assert out.dtype == dtype
        assert not out.numel() or (out.double() - exact).norm() / exact.norm() < BOUNDS[dtype]
    others = torch.ones(E, dtype=torch.bool, device=DEVICE).index_fill(0, given.write_M, False)
    assert torch.equal(ours[1][others], given.k_E[others])
    assert torch.equal(ours[2][others], given.v_E[others])


@pytest.mark.parametrize("tile", [POINTERS, DESCRIPTORS, None])
@pytest.mark.parametrize("heads", [(7, 1), (2, 2)])
@pytest.mark.parametrize(
    ("num_rows", "head_dim", "hidden_size"), [(1, 64, 64), (127, 64, 40), (129, 20, 99), (5, 128, 64)]
)
def test_the_one_kernel_is_the_reference(
    num_rows: int, head_dim: int, hidden_size: int, heads: tuple[int, int], tile: kernels.Tile | None
) -> None:
    """Pairs and hidden sizes that fill no tile, and rows of two blocks."""
    given = call(num_rows, heads, head_dim, hidden_size, bias=heads == (7, 1))
    compare(given, given(kernels.fused, tile=tile))


@pytest.mark.parametrize("way", [kernels.fused, kernels.by_library, kernels.project_and_store])
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ways_in_every_type(dtype: torch.dtype, way: Callable[..., Tensor]) -> None:
    """28 query heads and 4 key heads, with bias."""
    given = call(17, (28, 4), 16, 48, bias=True, dtype=dtype)
    compare(given, given(way), dtype)


@pytest.mark.parametrize("way", [kernels.fused, kernels.by_library])
@pytest.mark.parametrize("num_rows", [0, 70, 200])
def test_rows_of_none_or_several_tiles(num_rows: int, way: Callable[..., Tensor]) -> None:
    given = call(num_rows, (2, 2), 32, 32, bias=False)
    compare(given, given(way))


def test_keys_that_are_not_rotated_are_noticed() -> None:
    """Negative control."""
    given = call(5, (4, 2), 32, 32, bias=False)
    plain = replace(given, cos_M=torch.ones_like(given.cos_M), sin_M=torch.zeros_like(given.sin_M))
    with pytest.raises(AssertionError):
        compare(given, plain(kernels.fused))


def test_a_wrong_entry_is_noticed() -> None:
    """Negative control."""
    given = call(5, (4, 2), 32, 32, bias=False)
    moved = replace(given, write_M=given.write_M.roll(1))
    with pytest.raises(AssertionError):
        compare(given, moved(kernels.fused))


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
        found.append((self.__name__, made.metadata.shared, "wgmma.mma_async" in made.asm["ptx"]))
    return run

driver.set_active(H200())
JITFunction.__getitem__ = launch
found = []
from unmask.ops.triton import project as kernels
for rows, heads, key_heads, size in ((1, 4, 4, 4096), (32, 28, 4, 3584), (160, 4, 1, 512)):
    weight = torch.zeros((heads + 2 * key_heads) * 128, size, dtype=torch.bfloat16)
    pool = torch.zeros(9, key_heads, 128, dtype=torch.bfloat16)
    hidden, angle = torch.zeros(rows, size, dtype=torch.bfloat16), torch.zeros(rows, 64)
    rest = (angle, angle, torch.zeros(rows, dtype=torch.int64), pool, pool)
    kernels.fused(hidden, weight, weight[:, 0].contiguous(), *rest, pdl=True)
    kernels.rotate_and_store(torch.zeros(rows, len(weight), dtype=torch.bfloat16), *rest, pdl=True)
print(json.dumps(found))
"""


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="knows Triton 3.6 from inside")
def test_every_kernel_compiles_for_an_h200() -> None:
    """The interpreter takes more than the compiler does."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(Path(kernels.__file__).parents[3])
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name for name, *_ in found} == {"_fused_kernel", "_rotate_kernel"}
    assert all(on_matrix_units for name, _, on_matrix_units in found if name == "_fused_kernel")
    assert all(shared <= 227 * 1024 for _, shared, _ in found)
