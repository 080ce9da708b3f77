"""The model that is trained: made new or taken from a directory, and exported."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.errors import ConfigError, nearest
from unmask.models.config import ModelConfig
from unmask.models.families import FAMILIES
from unmask.models.loading import load_model, save_model
from unmask.models.transformer import Transformer
from unmask.train.config import TrainConfig
from unmask.train.encode import special_ids

DEFAULTS: Mapping[str, Any] = {
    "family": "llada",
    "rope_theta": 10000.0,
    "norm_eps": 1e-5,
    "qkv_bias": False,
    "tie_embeddings": False,
    "logit_shift": 0,
    "max_positions": 1024,
}
TRAINABLE = (("full", 0), ("block_causal", 1))
"""Attention and logit shift: masks that are filled in, or every next token from the left."""


def model_config(config: TrainConfig) -> ModelConfig:
    """The `[model]` table completed by the tokenizer's ids and by defaults.

    Raises:
        ConfigError: a key that ModelConfig does not have, or a size that is missing or wrong.
    """
    table = dict(config.model)
    known = {f.name for f in dataclasses.fields(ModelConfig)}
    for name in table:
        if name not in known:
            raise ConfigError(f"unknown [model] key {name!r}; {nearest(name, known)}")
    values: dict[str, Any] = {**DEFAULTS, **special_ids(config.tokenizer), **table}
    try:
        values.setdefault("num_kv_heads", values["num_heads"])
        values.setdefault("head_dim", values["hidden_size"] // values["num_heads"])
        made = ModelConfig(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"[model]: {error}") from error
    if (made.attention, made.logit_shift) not in TRAINABLE:
        raise ConfigError(
            f"[model]: attention {made.attention!r} with logit_shift {made.logit_shift} cannot be trained; use 'full' "
            "with 0, or 'block_causal' with 1"
        )
    if made.logit_shift != (shift := FAMILIES[made.family].logit_shift):
        raise ConfigError(f"[model]: family {made.family!r} has logit_shift {shift}, not {made.logit_shift}")
    causal = made.attention == "block_causal"
    for stage in config.stages:
        if ("causal" in stage.masks) != causal:
            kinds = ", ".join(stage.masks)
            raise ConfigError(
                f"stage {stage.name!r} has masks of kind {kinds}, and [model] attention {made.attention!r}; causal "
                "masks and 'block_causal' go together"
            )
    return made


def new_model(config: ModelConfig, seed: int, device: torch.device) -> Transformer:
    """Random weights; the same for a seed on every device."""
    model = Transformer(config, device="cpu", dtype=torch.float32)
    model.init_weights(generator=torch.Generator().manual_seed(seed))
    return model.to(device)


def initial_model(directory: Path, config: TrainConfig, device: torch.device) -> Transformer:
    """The weights of a model directory, in fp32; its own config counts, `[model]` does not.

    Raises:
        ConfigError: its special ids are not those of the tokenizer.
    """
    model = load_model(directory, dtype=torch.float32, device=device)
    ids = special_ids(config.tokenizer)
    own, given = model.config.mask_token_id, ids["mask_token_id"]
    if own != given or model.config.vocab_size < ids["vocab_size"]:
        raise ConfigError(f"{directory} has mask_token_id {own}, and the tokenizer {config.tokenizer} has {given}")
    return model


@torch.no_grad()
def export(weights: Mapping[str, Tensor], config: ModelConfig, to: Path, tokenizer: Path, max_shard_bytes: int) -> Path:
    """A model directory with these weights in bf16, in place of what is there."""
    model = Transformer(config, device="cpu", dtype=torch.bfloat16)
    for name, param in model.named_parameters():
        param.copy_(weights[name])
    fresh = to.with_name(to.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    save_model(model, fresh, max_shard_bytes=max_shard_bytes, tokenizer_dir=tokenizer)
    shutil.rmtree(to, ignore_errors=True)
    fresh.rename(to)
    return to
