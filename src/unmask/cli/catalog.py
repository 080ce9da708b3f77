"""Models whose layout the engine reads, and what they need. Plain arithmetic: no torch, no network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SHIPPED = "unmask-mini"
ASSETS = Path(__file__).parent.parent / "assets"
GB = 1e9
BYTES = {"float32": 4, "bfloat16": 2}
CANVAS = 1024
"""Tokens of the canvas for which `Model.memory` counts keys and values."""

TESTED = "tested end to end"
LAYOUT_ONLY = "layout tested, weights not fetched"
NOT_HERE = "not in this checkout"


DEFAULT_METHOD = {"llada": "confidence", "dream": "dream"}
"""What `LLM` takes for a checkpoint that recommends nothing, by layout."""


@dataclass(frozen=True)
class Sizes:
    """The dimensions of a transformer that decide its memory."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    qkv_bias: bool = False
    tie_embeddings: bool = False

    @property
    def num_parameters(self) -> int:
        d, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * d * q + 2 * d * kv + (q + 2 * kv if self.qkv_bias else 0)
        layer = attention + 3 * d * self.intermediate_size + 2 * d
        return self.vocab_size * d * (1 if self.tie_embeddings else 2) + self.num_layers * layer + d

    def weight_bytes(self, dtype: str) -> int:
        return self.num_parameters * BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BYTES[dtype]

    def memory(self, dtype: str, num_tokens: int = CANVAS) -> int:
        """Weights, with keys and values of one canvas."""
        return self.weight_bytes(dtype) + num_tokens * self.kv_bytes_per_token(dtype)


LLADA = Sizes(126464, 4096, 32, 32, 32, 128, 12288)
DREAM = Sizes(152064, 3584, 28, 28, 4, 128, 18944, qkv_bias=True)


@dataclass(frozen=True)
class Model:
    """One line of the catalogue."""

    name: str
    layout: str
    sizes: Sizes | None
    """None while no checkpoint is there to say."""
    licence: str | None
    """None: not known here; read the model's page."""
    method: str
    status: str = LAYOUT_ONLY


def shipped_dir() -> Path | None:
    """Where the model that ships lies; None in a checkout without it."""
    directory = ASSETS / SHIPPED
    complete = (directory / "config.json").exists() and any(directory.glob("*.safetensors"))
    return directory if complete else None


def shipped() -> Model:
    """The model that ships, with the sizes that its own config states."""
    directory = shipped_dir()
    if directory is None:
        return Model(SHIPPED, "llada", None, "Apache-2.0", DEFAULT_METHOD["llada"], NOT_HERE)
    from unmask.models.config import ModelConfig

    config = ModelConfig.from_pretrained(directory)
    sizes = Sizes(**{name: getattr(config, name) for name in Sizes.__dataclass_fields__})
    method = config.generation.get("method") or DEFAULT_METHOD[config.family]
    return Model(SHIPPED, config.family, sizes, "Apache-2.0", method, TESTED)


def _known(layout: str, sizes: Sizes, licences: dict[str, str | None]) -> list[Model]:
    return [Model(name, layout, sizes, licence, DEFAULT_METHOD[layout]) for name, licence in licences.items()]


PUBLISHED: tuple[Model, ...] = (
    *_known(
        "llada",
        LLADA,
        {"GSAI-ML/LLaDA-8B-Base": "MIT", "GSAI-ML/LLaDA-8B-Instruct": "MIT", "GSAI-ML/LLaDA-1.5": None},
    ),
    *_known(
        "dream",
        DREAM,
        {
            "Dream-org/Dream-v0-Base-7B": "Apache-2.0",
            "Dream-org/Dream-v0-Instruct-7B": "Apache-2.0",
            "Dream-org/Dream-Coder-v0-Instruct-7B": None,
            "apple/DiffuCoder-7B-Base": None,
            "apple/DiffuCoder-7B-Instruct": None,
            "apple/DiffuCoder-7B-cpGRPO": None,
        },
    ),
)


def known_models() -> list[Model]:
    """The one that ships, then the published ones."""
    return [shipped(), *PUBLISHED]
