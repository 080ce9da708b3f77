"""What a model is: sizes, constants of the maths, special ids. Read from the checkpoint, never assumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unmask.errors import CheckpointError
from unmask.models import families

ATTENTION_KINDS = ("full", "block_causal")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The facts about a model that any part of the engine may need."""

    family: str
    """A name in `families.FAMILIES`: whose layout and weight names the checkpoint has."""
    vocab_size: int
    """Rows of the embedding and of the head; the tokenizer may know fewer ids."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Key heads; equal to num_heads, or a divisor of it."""
    head_dim: int
    intermediate_size: int
    rope_theta: float
    norm_eps: float
    qkv_bias: bool
    tie_embeddings: bool
    max_positions: int
    """Longest canvas the weights were made for."""
    logit_shift: int
    """Position p is scored from the output row p - logit_shift: 0 LLaDA, 1 Dream."""
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    """Every id that ends an answer: end of text, and end of turn where the family has one."""
    pad_token_id: int | None
    bos_token_id: int | None
    attention: str = "full"
    """What the weights were trained for: "full" or "block_causal"."""
    generation: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The checkpoint's recommended sampling settings: the key "unmask" of generation_config.json."""

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_ids()
        if self.family not in families.FAMILIES:
            raise CheckpointError(f"unknown model family {self.family!r}; known: {', '.join(families.FAMILIES)}")
        if self.attention not in ATTENTION_KINDS:
            raise CheckpointError(f"attention is {self.attention!r}, expected one of {', '.join(ATTENTION_KINDS)}")

    def _check_sizes(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "intermediate_size", "max_positions"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise CheckpointError(f"{name} is {value!r}, expected a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim {self.head_dim} is odd; rotary position embedding needs pairs")
        for name in ("qkv_bias", "tie_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise CheckpointError(f"{name} is {getattr(self, name)!r}, expected true or false")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise CheckpointError(f"{name} is {value!r}, expected a positive number")

    def _check_ids(self) -> None:
        named = [("mask_token_id", self.mask_token_id), ("pad_token_id", self.pad_token_id)]
        named += [("bos_token_id", self.bos_token_id), *(("eos_token_id", id) for id in self.eos_token_ids)]
        for name, value in named:
            optional = value is None and name != "mask_token_id"
            if not optional and not (type(value) is int and 0 <= value < self.vocab_size):
                raise CheckpointError(f"{name} is {value!r}, expected an id in [0, {self.vocab_size})")
        if self.mask_token_id in self.eos_token_ids:
            raise CheckpointError(f"mask_token_id {self.mask_token_id} is also an eos_token_id")

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> ModelConfig:
        """The config of a checkpoint directory: config.json, with generation_config.json where there is one."""
        directory = Path(directory)
        config, generation = directory / "config.json", directory / "generation_config.json"
        parsed = read_json(config), read_json(generation) if generation.exists() else None
        try:
            return cls.from_dict(*parsed)
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}") from None

    @classmethod
    def from_dict(cls, config_json: Mapping[str, Any], generation_json: Mapping[str, Any] | None = None) -> ModelConfig:
        """From the parsed config.json and generation_config.json, in the layout of any known family.

        CheckpointError, which names the field: one that is missing or out of range, or a value whose maths this
        engine does not do.
        """
        return cls(**families.parse(config_json, generation_json or {}))

    def to_dict(self) -> dict[str, Any]:
        """config.json in the family's own field names; `from_dict` reads it back (`generation` apart, which lives
        in generation_config.json)."""
        return families.FAMILIES[self.family].to_json(self)

    def generation_dict(self) -> dict[str, Any]:
        """generation_config.json: the special ids and, where there are any, the recommended settings."""
        ids = {"eos_token_id": list(self.eos_token_ids), "pad_token_id": self.pad_token_id}
        ids |= {"bos_token_id": self.bos_token_id, "mask_token_id": self.mask_token_id}
        return ids | ({"unmask": dict(self.generation)} if self.generation else {})


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} does not exist; a checkpoint directory holds config.json and *.safetensors"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable as JSON: {error}; download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value
