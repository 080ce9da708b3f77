"""What a device can do at best: bytes and FLOPs by formula, over the rates that the same run measured.

A floor is the larger of two times: every byte that must move, at the rate of a large copy; every product, at the rate
of a large matrix product. No time is added for what runs one after the other, so a floor is never too high.

M rows, D hidden size, F MLP size, V vocabulary, H query heads, Hkv key heads, hd head size
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unmask.bench.timing import median_seconds, seconds_a_call
from unmask.models.config import ModelConfig


@dataclass(frozen=True)
class Ceilings:
    """Rates that were reached."""

    bytes_per_second: float
    """Read and written together."""
    flops_per_second: float


@dataclass(frozen=True)
class Cost:
    """What an operation cannot do without."""

    num_bytes: float = 0.0
    num_flops: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.num_bytes + other.num_bytes, self.num_flops + other.num_flops)

    def seconds(self, ceilings: Ceilings) -> float:
        """The floor."""
        return max(self.num_bytes / ceilings.bytes_per_second, self.num_flops / ceilings.flops_per_second)

    def bound_by(self, ceilings: Ceilings) -> str:
        """Which of the two it is: "bytes" or "flops"."""
        slow = self.num_bytes / ceilings.bytes_per_second >= self.num_flops / ceilings.flops_per_second
        return "bytes" if slow else "flops"


def measure_ceilings(
    device: torch.device | str,
    *,
    num_bytes: int | None = None,
    size: int | None = None,
    dtype: torch.dtype | None = None,
) -> Ceilings:
    """The best of several: copies on the device of ``num_bytes`` (by the driver, and by a kernel that writes the
    negative of what it reads), and matrix products of random numbers (zeros would draw less power and run at a higher
    clock), square and of half as many rows. Unsaid sizes suit the device."""
    on_gpu = torch.device(device).type == "cuda"
    num_bytes, size = num_bytes or (2 << 30 if on_gpu else 1 << 24), size or (8192 if on_gpu else 256)
    dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
    copied = min(_seconds_to_copy(num_bytes, device, dtype))
    rates = [
        2 * num_rows * size**2 / _seconds_to_multiply(num_rows, size, device, dtype) for num_rows in (size, size // 2)
    ]
    return Ceilings(2 * num_bytes / copied, max(rates))


def _seconds_to_copy(num_bytes: int, device: torch.device | str, dtype: torch.dtype) -> tuple[float, float]:
    source, target = (torch.ones(num_bytes // dtype.itemsize, dtype=dtype, device=device) for _ in range(2))
    return (
        median_seconds(lambda: target.copy_(source), device),
        median_seconds(lambda: torch.neg(source, out=target), device),
    )


def _seconds_to_multiply(num_rows: int, size: int, device: torch.device | str, dtype: torch.dtype) -> float:
    a, b = (torch.randn(count, size, device=device).to(dtype) for count in (num_rows, size))
    out = torch.empty(num_rows, size, device=device, dtype=dtype)
    return seconds_a_call(lambda _: torch.mm(a, b.T, out=out), 4, device)


# Operations, each of a bf16 network unless ``size`` (bytes of a number) says otherwise


def linear_cost(num_rows: int, num_in: int, num_out: int, size: int = 2) -> Cost:
    """Weights, rows in and rows out once."""
    moved = num_in * num_out + num_rows * (num_in + num_out)
    return Cost(size * moved, 2.0 * num_rows * num_in * num_out)


def project_cost(num_rows: int, hidden: int, heads: int, kv_heads: int, head_dim: int, size: int = 2) -> Cost:
    """The product above, and the cosines and sines of the rows (fp32)."""
    plain = linear_cost(num_rows, hidden, (heads + 2 * kv_heads) * head_dim, size)
    return plain + Cost(num_rows * head_dim * 4)


def attend_cost(seats: int, rows: int, keys: int, heads: int, kv_heads: int, head_dim: int, size: int = 2) -> Cost:
    """K and V of every seat once. Queries and outputs are left out: in a larger kernel they need not touch memory."""
    kv_bytes = 2.0 * seats * keys * kv_heads * head_dim * size
    return Cost(kv_bytes, 4.0 * seats * rows * keys * heads * head_dim)


def stats_cost(num_rows: int, hidden: int, vocab: int, size: int = 2) -> Cost:
    """The head and the rows once; the logits never stand."""
    return Cost(size * float(vocab * hidden + num_rows * hidden), 2.0 * num_rows * hidden * vocab)


def elementwise_cost(num_read: int, num_written: int, size: int = 2) -> Cost:
    """Numbers in and numbers out."""
    return Cost(float(size * (num_read + num_written)))


# A whole pass


def layer_parameters(config: ModelConfig) -> int:
    """Weights of the matrices of all layers: what every pass reads, and multiplies every row by."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * q + 2 * kv)
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def kv_bytes(config: ModelConfig, size: int = 2) -> int:
    """Of one position, in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * size


def pass_parts(
    config: ModelConfig,
    *,
    rows: float,
    scored: float,
    keys_read: float,
    row_keys: float,
    passes: int = 1,
    weight_size: float = 2,
    size: int = 2,
) -> dict[str, Cost]:
    """Passes of the whole network: layer weights and head once a pass, K/V read and K/V written.

    ``rows``, ``scored`` rows, the positions whose K/V are read (``keys_read``) and pairs of a row and a key
    (``row_keys``) are counted over all seats and passes. ``weight_size`` is the bytes of a layer's weight; products in
    8 bits count half, since the matrix units do twice as many of them.
    """
    layers, head = layer_parameters(config), config.vocab_size * config.hidden_size
    attention = 4 * row_keys * config.num_layers * config.num_heads * config.head_dim
    return {
        "products": Cost(passes * weight_size * layers, 2 * rows * layers * weight_size / size),
        "attention": Cost(kv_bytes(config, size) * (keys_read + rows), attention),
        "head": Cost(passes * size * head, 2 * scored * head),
    }


def pass_cost(config: ModelConfig, **counts: Any) -> Cost:
    """The same in one: what bytes and FLOPs take if they overlap throughout."""
    return sum(pass_parts(config, **counts).values(), Cost())


def seconds_in_turn(parts: Mapping[str, Cost], ceilings: Ceilings) -> float:
    """Of parts that run one after the other, each bound by what binds it: attention waits for memory while the matrix
    units rest, and products of many rows are the other way round."""
    return sum(part.seconds(ceilings) for part in parts.values())


def step_cost(config: ModelConfig, **counts: Any) -> Cost:
    """`step_parts` in one."""
    return sum(step_parts(config, **counts).values(), Cost())


def step_parts(
    config: ModelConfig,
    *,
    seats: int,
    rows: int,
    scored: int,
    keys: int,
    size: int = 2,
    weight_size: int | None = None,
) -> dict[str, Cost]:
    """One pass in which each of ``seats`` runs ``rows`` rows over ``keys`` positions and scores ``scored`` of them."""
    return pass_parts(
        config,
        rows=seats * rows,
        scored=seats * scored,
        keys_read=seats * keys,
        row_keys=seats * rows * keys,
        weight_size=weight_size or size,
        size=size,
    )
