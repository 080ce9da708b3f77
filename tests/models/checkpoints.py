"""Small checkpoints on disk, to load and to break."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from unmask.models.config import ModelConfig
from unmask.models.loading import save_model
from unmask.models.transformer import Transformer

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
MODELS = ("tiny-llada", "tiny-llada-gqa", "tiny-dream")


def golden_json(model: str, **changes: Any) -> dict[str, Any]:
    """config.json of a golden model; a change to `...` removes the key."""
    return change(json.loads((GOLDEN / "models" / model / "config.json").read_text()), **changes)


def change(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (config | changes).items() if value is not ...}


def random_model(model: str = "tiny-llada", seed: int = 0, **changes: Any) -> Transformer:
    """Random weights, gains and biases too, in the layout of a golden model."""
    made = Transformer(ModelConfig.from_dict(golden_json(model, **changes)), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_(0, 0.2, generator=generator)
    return made


def write(directory: Path, model: str = "tiny-llada", **options: Any) -> Path:
    """A sound checkpoint."""
    save_model(random_model(model), directory, **options)
    return directory


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()), **changes)))


def edit_tensors(path: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)
