"""config.json: every fact read from it, every other maths refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unmask.errors import CheckpointError
from unmask.models.config import ModelConfig

from .checkpoints import GOLDEN, MODELS, golden_json

CONFIGS = Path(__file__).parent / "configs"


def real(name: str) -> ModelConfig:
    return ModelConfig.from_dict(json.loads((CONFIGS / f"{name}.json").read_text()))


@pytest.mark.parametrize("model", MODELS)
def test_round_trip(model: str) -> None:
    config = ModelConfig.from_pretrained(GOLDEN / "models" / model)
    assert ModelConfig.from_dict(config.to_dict(), config.generation_dict()) == config
    assert hash(config) == hash(ModelConfig.from_dict(config.to_dict()))


def test_everything_comes_from_the_file() -> None:
    changes: dict[str, Any] = {"d_model": 96, "n_layers": 5, "n_heads": 6, "n_kv_heads": 3, "mlp_hidden_size": 56}
    changes |= {"vocab_size": 1013, "embedding_size": 1024, "rope_theta": 12345.0, "rms_norm_eps": 3e-4}
    changes |= {"max_sequence_length": 77, "weight_tying": True, "include_qkv_bias": True, "mask_token_id": 1000}
    changes |= {"eos_token_id": [11, 12], "pad_token_id": 13, "unmask": {"attention": "block_causal"}}
    config = ModelConfig.from_dict(golden_json("tiny-llada", **changes), {"unmask": {"steps": 9}})
    assert config == ModelConfig(
        family="llada", vocab_size=1024, hidden_size=96, num_layers=5, num_heads=6, num_kv_heads=3, head_dim=16,
        intermediate_size=56, rope_theta=12345.0, norm_eps=3e-4, qkv_bias=True, tie_embeddings=True,
        max_positions=77, logit_shift=0, mask_token_id=1000, eos_token_ids=(11, 12), pad_token_id=13,
        bos_token_id=None, attention="block_causal", generation={"steps": 9},
    )  # fmt: skip
    assert ModelConfig.from_dict(config.to_dict(), config.generation_dict()) == config


def test_sizes_that_null_defers() -> None:
    config = ModelConfig.from_dict(golden_json("tiny-llada", n_kv_heads=None, mlp_hidden_size=None, mlp_ratio=3))
    assert (config.num_kv_heads, config.intermediate_size) == (4, 192)
    multi_query = golden_json("tiny-llada", n_kv_heads=None, multi_query_attention=True)
    assert ModelConfig.from_dict(multi_query).num_kv_heads == 1
    wide = ModelConfig.from_dict(golden_json("tiny-dream", head_dim=32))
    assert wide.head_dim == 32
    assert ModelConfig.from_dict(wide.to_dict(), wide.generation_dict()) == wide


def test_special_ids() -> None:
    assert real("llada-8b").eos_token_ids == (126081, 126348)
    assert real("dream-7b").eos_token_ids == (151643, 151645)
    assert real("llada-8b").mask_token_id == 126336
    dream = ModelConfig.from_pretrained(GOLDEN / "models" / "tiny-dream")  # generation_config.json has null
    assert (dream.mask_token_id, dream.eos_token_ids, dream.logit_shift) == (317, (316,), 1)
    from_generation = ModelConfig.from_dict(golden_json("tiny-llada", eos_token_id=...), {"eos_token_id": [7, 8]})
    assert from_generation.eos_token_ids == (7, 8)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", [..., None, {}, {"type": "default"}, {"rope_type": "default"}])
@pytest.mark.parametrize("model", MODELS)
def test_plain_rope(model: str, key: str, value: Any) -> None:
    assert ModelConfig.from_dict(golden_json(model, **{key: value})) == ModelConfig.from_dict(golden_json(model))


def test_rope_theta_may_be_nested() -> None:
    nested = {"rope_type": "default", "rope_theta": 7e5}
    config = ModelConfig.from_dict(golden_json("tiny-dream", rope_theta=..., rope_parameters=nested))
    assert config.rope_theta == 7e5
    with pytest.raises(CheckpointError, match=r"rope_theta is 1000000.0, but rope_parameters.rope_theta is 700000.0"):
        ModelConfig.from_dict(golden_json("tiny-dream", rope_parameters=nested))


OTHER_MATHS = [
    *[("tiny-llada", {"rope_scaling": v}) for v in ({"type": "linear", "factor": 2.0}, {"rope_type": "yarn"}, "yarn")],
    *[("tiny-dream", {"rope_scaling": v}) for v in ({"type": "dynamic"}, {"factor": 2.0}, [1])],
    ("tiny-llada", {"rope": False}),
    ("tiny-llada", {"rope": ...}),
    ("tiny-llada", {"layer_norm_type": "default"}),
    ("tiny-llada", {"layer_norm_type": ...}),
    ("tiny-llada", {"layer_norm_with_affine": False}),
    ("tiny-llada", {"bias_for_layer_norm": True}),
    ("tiny-llada", {"attention_layer_norm": True}),
    ("tiny-llada", {"alibi": True}),
    ("tiny-llada", {"block_group_size": 4}),
    ("tiny-llada", {"block_type": "sequential"}),
    ("tiny-llada", {"activation_type": "gelu"}),
    ("tiny-llada", {"activation_type": ...}),
    ("tiny-llada", {"include_bias": True}),
    ("tiny-llada", {"scale_logits": True}),
    ("tiny-llada", {"input_emb_norm": True}),
    ("tiny-llada", {"clip_qkv": 8.0}),
    ("tiny-llada", {"quantization_config": {"bits": 4}}),
    ("tiny-dream", {"hidden_act": "gelu"}),
    ("tiny-dream", {"use_sliding_window": True}),
    ("tiny-dream", {"mlp_bias": True}),
    ("tiny-dream", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("tiny-dream", {"quantization_config": {"bits": 4}}),
]


@pytest.mark.parametrize(("model", "changes"), OTHER_MATHS)
def test_other_maths_is_refused_by_name(model: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=rf"\b{next(iter(changes))}\b"):
        ModelConfig.from_dict(golden_json(model, **changes))


NEEDED = [
    *[("tiny-llada", k) for k in ("d_model", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "rope_theta")],
    *[("tiny-llada", k) for k in ("rms_norm_eps", "weight_tying", "max_sequence_length", "mask_token_id")],
    *[("tiny-dream", k) for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")],
    *[("tiny-dream", k) for k in ("intermediate_size", "vocab_size", "rope_theta", "rms_norm_eps")],
    *[("tiny-dream", k) for k in ("max_position_embeddings", "mask_token_id")],
]


@pytest.mark.parametrize(("model", "key"), NEEDED)
def test_missing_field_is_named(model: str, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"'{key}'"):
        ModelConfig.from_dict(golden_json(model, **{key: ...}))


WRONG = [
    ({"n_layers": 0}, "num_layers is 0"),
    ({"n_layers": "3"}, "num_layers is '3'"),
    ({"n_heads": 5}, "d_model: 64 does not divide into 5 heads"),
    ({"n_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
    ({"rms_norm_eps": -1.0}, "norm_eps is -1.0"),
    ({"rope_theta": "big"}, "rope_theta is 'big'"),
    ({"weight_tying": "yes"}, "tie_embeddings is 'yes'"),
    ({"mask_token_id": 320}, r"mask_token_id is 320, expected an id in \[0, 320\)"),
    ({"eos_token_id": [1, -1]}, "eos_token_id is -1"),
    ({"mask_token_id": 318}, "mask_token_id 318 is also an eos_token_id"),
    ({"unmask": {"attention": "causal"}}, "attention is 'causal'"),
    ({"mlp_hidden_size": None, "mlp_ratio": "4"}, "mlp_ratio is '4'"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict(golden_json("tiny-llada", **changes))


def test_unknown_model_lists_the_known() -> None:
    with pytest.raises(CheckpointError, match=r"model_type 'llama'.*known: llada \(LLaDAModelLM\), Dream"):
        ModelConfig.from_dict({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    by_architecture = golden_json("tiny-dream", model_type=...)
    assert ModelConfig.from_dict(by_architecture).family == "dream"
