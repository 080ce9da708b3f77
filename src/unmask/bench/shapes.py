"""The sizes of published networks, to be built with random weights: time depends on sizes, not on what was learnt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from unmask.errors import ConfigError, nearest
from unmask.models.config import ModelConfig
from unmask.models.transformer import Transformer


def _llada(
    vocab: int, hidden: int, layers: int, heads: int, head_dim: int, mlp: int, mask: int, eos: int
) -> ModelConfig:
    return ModelConfig(
        family="llada",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        intermediate_size=mlp,
        rope_theta=500000.0,
        norm_eps=1e-5,
        qkv_bias=False,
        tie_embeddings=False,
        max_positions=4096,
        logit_shift=0,
        mask_token_id=mask,
        eos_token_ids=(eos,),
        pad_token_id=eos,
        bos_token_id=None,
    )


DREAM_7B = ModelConfig(
    family="dream",
    vocab_size=152064,
    hidden_size=3584,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=18944,
    rope_theta=1e6,
    norm_eps=1e-6,
    qkv_bias=True,
    tie_embeddings=False,
    max_positions=4096,
    logit_shift=1,
    mask_token_id=151666,
    eos_token_ids=(151643,),
    pad_token_id=151643,
    bos_token_id=151643,
)

SHAPES: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "llada-8b": _llada(126464, 4096, 32, 32, 128, 12288, mask=126336, eos=126081),
        "dream-7b": DREAM_7B,
        "mini": _llada(1024, 320, 9, 5, 64, 832, mask=2, eos=0),
        "tiny": _llada(96, 32, 2, 2, 16, 64, mask=2, eos=0),
    }
)
"""By name; "mini" is the model that ships, "tiny" for a first try on a CPU."""


def shape_named(name: str) -> ModelConfig:
    """The sizes called ``name``.

    Raises:
        ConfigError: there are none; the nearest name is offered.
    """
    if name not in SHAPES:
        raise ConfigError(f"shape {name!r} is unknown; {nearest(name, SHAPES)}")
    return SHAPES[name]


def random_network(
    shape: str, device: torch.device | str, dtype: torch.dtype | None = None, *, max_positions: int = 0
) -> Transformer:
    """A network of this shape, made on the device; bf16 on a GPU and fp32 elsewhere, unless ``dtype`` says."""
    config = shape_named(shape)
    config = replace(config, max_positions=max(config.max_positions, max_positions))
    on_gpu = torch.device(device).type == "cuda"
    torch.manual_seed(0)
    return Transformer(config, device=device, dtype=dtype or (torch.bfloat16 if on_gpu else torch.float32))


def ordinary_ids(config: ModelConfig, count: int, seed: int) -> Tensor:
    """Random ids [count] without MASK and the ids that end an answer."""
    generator = torch.Generator().manual_seed(seed)
    special = {config.mask_token_id, *config.eos_token_ids}
    plain = next(id for id in range(config.vocab_size) if id not in special)
    ids = torch.randint(0, config.vocab_size, (count,), generator=generator)
    return torch.where(torch.isin(ids, torch.tensor(sorted(special))), plain, ids)
