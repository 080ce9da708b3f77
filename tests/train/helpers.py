"""A model and a run small enough for one slow core."""

import torch

from unmask.models.transformer import Transformer
from unmask.train.config import load_config
from unmask.train.modelling import model_config, new_model

SIZE = [
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.intermediate_size=64",
    "run.validation_rows=4",
    "run.validate_every=0",
    "run.log_every=1",
]
STAGES = ("uniform", "blocks", "long", "longer")
SMALL = [*SIZE, *(f"stage.{name}.{key}" for name in STAGES for key in ("steps=3", "batch_size=4", "warmup=2"))]
AR_STAGES = ("single", "long")
SMALL_AR = [*SIZE, *(f"stage.{name}.{key}" for name in AR_STAGES for key in ("steps=3", "batch_size=4", "warmup=2"))]


def small_config(*overrides):
    return load_config("unmask-mini", [*SMALL, *overrides])


def small_ar_config(*overrides):
    return load_config("unmask-mini-ar", [*SMALL_AR, *overrides])


def tiny_model() -> Transformer:
    return new_model(model_config(small_config()), 0, torch.device("cpu"))
