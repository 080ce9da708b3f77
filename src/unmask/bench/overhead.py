"""Where a run's time goes on this machine: our own part beside the network's, and the network beside bare torch.

B sequences, N positions, D hidden size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unmask.bench.environment import environment
from unmask.cache.context import PagedContext
from unmask.cache.pool import PagePool, kv_planes, num_pages_for
from unmask.config import SamplingParams
from unmask.core.canvas import Canvas
from unmask.core.rows import pack
from unmask.engine.llm import LLM
from unmask.eval.word_problems import held_out, score
from unmask.models.transformer import Layer, Norm, Transformer

NETWORK = ("forward", "scores", "tokenizer")


def run_share(llm: LLM, num_requests: int, params: SamplingParams) -> dict[str, Any]:
    """Seconds by part while ``num_requests`` held-out problems are solved, and the share that is ours."""
    problems = held_out(num_requests)
    score(llm, problems[:4], params)  # first calls pay for allocations
    llm.engine.stats.reset()
    result = score(llm, problems, params)
    seconds = dict(llm.engine.stats.seconds)
    inside = sum(seconds.get(part, 0.0) for part in NETWORK)
    return {
        "num_requests": num_requests,
        "num_passes": llm.engine.stats.num_passes,
        "seconds": result.seconds,
        **{f"seconds_{part}": value for part, value in seconds.items()},
        "share_outside": 1 - inside / result.seconds,
    }


def bare_forward(model: Transformer, token_BN: Tensor) -> Tensor:
    """The same layers written straight in torch: hidden rows [B, N, D] after the final norm."""
    config = model.config
    cos, sin = (table[: token_BN.shape[1], None] for table in model.rope.reserve(token_BN.shape[1], token_BN.device))
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return torch.rms_norm(x, (x.shape[-1],), weight, config.norm_eps)

    def rotate(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    x = F.embedding(token_BN, model.embed.weight)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        qkv = F.linear(norm(x, layer.attn_norm.weight), layer.attn.qkv.weight, layer.attn.qkv.bias)
        q, k, v = qkv.unflatten(-1, (-1, config.head_dim)).split(heads, -2)
        q, k, v = (t.transpose(1, 2) for t in (rotate(q), rotate(k), v))
        seen = F.scaled_dot_product_attention(q, k, v, enable_gqa=config.num_heads != config.num_kv_heads)
        x = x + F.linear(seen.transpose(1, 2).flatten(-2), layer.attn.out.weight)
        gate, up = F.linear(norm(x, layer.mlp_norm.weight), layer.mlp.gate_up.weight).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, layer.mlp.down.weight)
    assert isinstance(model.norm, Norm)
    return norm(x, model.norm.weight)


def our_forward(model: Transformer, num_seqs: int, length: int) -> Callable[[Tensor], Tensor]:
    """The engine's way: flat rows over a pool of pages. The pool is there before a pass; its rows are packed for it."""
    pool = PagePool(
        kv_planes(model.config, model.head.dtype),
        num_layers=model.config.num_layers,
        num_pages=num_seqs * num_pages_for(length),
        num_seats=num_seqs,
        max_positions=length,
        device=model.head.device,
    )
    canvas = Canvas.empty(num_seqs, length, model.config.mask_token_id, model.head.device)
    for seat in range(num_seqs):
        pool.reserve(seat, length)
    canvas.end_S.fill_(length)
    canvas.active_S.fill_(True)

    def run(token_BN: Tensor) -> Tensor:
        canvas.token_SN.copy_(token_BN)
        plan = pack(canvas, canvas.visible_SN(), canvas.end_S[:, None].expand(-1, length))
        hidden: Tensor = model(plan.token_M, PagedContext(plan, pool, model.rope, length))
        out: Tensor = hidden.unflatten(0, token_BN.shape)
        return out

    return run


def _median_ms(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


@torch.inference_mode()
def forward_ratio(model: Transformer, num_seqs: int, length: int, repeats: int = 30) -> dict[str, Any]:
    """Milliseconds of our forward and of the bare one on equal rows, alternating, and their ratio.

    Raises:
        ValueError: the two disagree; a time is worth nothing then.
    """
    token_BN = torch.randint(0, model.config.vocab_size, (num_seqs, length))
    engine = our_forward(model, num_seqs, length)
    ours, bare = engine(token_BN), bare_forward(model, token_BN)
    error = float((ours - bare).norm() / bare.norm())
    if error > 1e-4:
        raise ValueError(f"the bare forward differs from ours by {error:.1e} relative; mend it before timing")
    rounds = [
        (_median_ms(lambda: engine(token_BN), 3), _median_ms(lambda: bare_forward(model, token_BN), 3))
        for _ in range(repeats)
    ]
    ours_ms, bare_ms = (statistics.median(column) for column in zip(*rounds))
    shape = {"num_seqs": num_seqs, "length": length, "relative_error": error}
    return {**shape, "ours_ms": ours_ms, "bare_ms": bare_ms, "ratio": ours_ms / bare_ms}


def overhead(model: str | None = None, num_requests: int = 32) -> dict[str, Any]:
    """Both measurements on the CPU, for one request at a time and for a batch."""
    rows = []
    for seats in (1, 16):
        llm = LLM(model, device="cpu", dtype="float32", max_num_seqs=seats)
        rows.append({"seats": seats, **run_share(llm, num_requests, SamplingParams())})
    network = llm.model
    assert isinstance(network, Transformer)
    ratios = [forward_ratio(network, num_seqs, length) for num_seqs, length in ((1, 128), (1, 176), (8, 168))]
    return {"environment": environment("cpu"), "runs": rows, "forwards": ratios}
