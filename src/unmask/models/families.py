"""What differs between model families, as data: config field names, refused settings, weight names, quirks.

The engine knows one transformer. A family says how its published files spell that transformer, and which values of
its config would be another transformer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from unmask.errors import CheckpointError

if TYPE_CHECKING:
    from unmask.models.config import ModelConfig

Json = Mapping[str, Any]


@dataclass(frozen=True)
class RealVocabulary:
    """Ids of a family's published vocabulary that its config files leave out; applied at that vocab_size only."""

    vocab_size: int
    extra_eos: tuple[int, ...]
    mask_token_id: int
    bos_token_id: int


@dataclass(frozen=True)
class Piece:
    """One tensor of a checkpoint file, and the rows [start, start + shape[0]) of our parameter that it fills."""

    name: str
    parameter: str
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Family:
    """One family's spelling. `weights` maps our parameters to the file's names; {i} is the layer."""

    name: str
    model_type: str
    architecture: str
    logit_shift: int
    real: RealVocabulary
    fields: Mapping[str, str]
    """ModelConfig field to config.json key, for the fields that must be there."""
    plain: Mapping[str, tuple[Any, ...]]
    """config.json key to the values that mean the maths of this engine; absent and null are allowed too."""
    explicit: tuple[str, ...]
    """Keys of `plain` that must be there: the published model class reads their absence as other maths."""
    weights: Mapping[str, str]
    read: Callable[[Json], dict[str, Any]]
    """The fields that need more than a look-up."""
    write: Callable[[ModelConfig], dict[str, Any]]

    def parse(self, config: Json, generation: Json) -> dict[str, Any]:
        """Keyword arguments of ModelConfig."""
        self._refuse_other_maths(config)
        values = {name: need(config, key, self) for name, key in self.fields.items()}
        values |= self.read(config) | self._special_ids(config, generation, values["vocab_size"])
        extra = config.get("unmask") or {}
        return {
            **values,
            "family": self.name,
            "logit_shift": self.logit_shift,
            "rope_theta": rope_theta(config, self),
            "attention": extra.get("attention", "full"),
            "generation": dict(generation.get("unmask") or {}),
        }

    def _refuse_other_maths(self, config: Json) -> None:
        for key in self.explicit:
            need(config, key, self)
        for key, plain in self.plain.items():
            value = config.get(key)
            if value is not None and value not in plain:
                raise CheckpointError(
                    f"config.json: {key} is {value!r}, and this engine computes {self.model_type} models with "
                    f"{' or '.join(map(repr, plain))} only; such a checkpoint is not supported"
                )

    def _special_ids(self, config: Json, generation: Json, vocab_size: int) -> dict[str, Any]:
        real = self.real if vocab_size == self.real.vocab_size else None
        eos = [*ids(config.get("eos_token_id")), *ids(generation.get("eos_token_id"))]
        mask = first(config.get("mask_token_id"), generation.get("mask_token_id"), real and real.mask_token_id)
        if mask is None:
            raise missing("mask_token_id", self)
        return {
            "mask_token_id": mask,
            "eos_token_ids": tuple(dict.fromkeys([*eos, *(real.extra_eos if real else ())])),
            "pad_token_id": first(config.get("pad_token_id"), generation.get("pad_token_id")),
            "bos_token_id": first(
                config.get("bos_token_id"), generation.get("bos_token_id"), real and real.bos_token_id
            ),
        }

    def to_json(self, config: ModelConfig) -> dict[str, Any]:
        """config.json of a model of this family."""
        eos = list(config.eos_token_ids)
        out: dict[str, Any] = {"model_type": self.model_type, "architectures": [self.architecture]}
        out |= {key: getattr(config, name) for name, key in self.fields.items()}
        out |= {"rope_theta": config.rope_theta, "mask_token_id": config.mask_token_id}
        out |= {"eos_token_id": eos[0] if len(eos) == 1 else eos, "pad_token_id": config.pad_token_id}
        out |= {"bos_token_id": config.bos_token_id} | self.write(config)
        return out | ({"unmask": {"attention": config.attention}} if config.attention != "full" else {})

    def pieces(self, config: ModelConfig) -> Iterator[Piece]:
        """Every tensor of a published checkpoint, with the slice of our parameter that it fills."""
        for parameter, parts in _parameters(config):
            start = 0
            for part, shape in parts:
                yield Piece(self._file_name(parameter, part), parameter, start, shape)
                start += shape[0]

    def _file_name(self, parameter: str, part: str) -> str:
        stem, _, kind = parameter.rpartition(".")
        if not stem.startswith("layers."):
            return f"{self.weights[stem]}.{kind}"
        _, layer, *inside = stem.split(".")
        name = self.weights[".".join(inside) + (f".{part}" if part else "")]
        return f"{name.format(i=layer)}.{kind}"


def _parameters(config: ModelConfig) -> Iterator[tuple[str, list[tuple[str, tuple[int, ...]]]]]:
    """Our parameters in order, each with its parts (name, shape), stacked along rows."""
    D, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    heads = [("q", query), ("k", key), ("v", key)]
    yield "embed.weight", [("", (V, D))]
    for i in range(config.num_layers):
        yield f"layers.{i}.attn_norm.weight", [("", (D,))]
        yield f"layers.{i}.attn.qkv.weight", [(part, (rows, D)) for part, rows in heads]
        if config.qkv_bias:
            yield f"layers.{i}.attn.qkv.bias", [(part, (rows,)) for part, rows in heads]
        yield f"layers.{i}.attn.out.weight", [("", (D, query))]
        yield f"layers.{i}.mlp_norm.weight", [("", (D,))]
        yield f"layers.{i}.mlp.gate_up.weight", [("gate", (F, D)), ("up", (F, D))]
        yield f"layers.{i}.mlp.down.weight", [("", (D, F))]
    yield "norm.weight", [("", (D,))]
    if not config.tie_embeddings:
        yield "lm_head.weight", [("", (V, D))]


def first(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)


def ids(value: Any) -> list[Any]:
    """eos_token_id comes as nothing, one id or a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def missing(key: str, family: Family) -> CheckpointError:
    return CheckpointError(
        f"config.json has no {key!r}, which a {family.model_type} model needs; "
        "take the file from the published checkpoint, values are never guessed"
    )


def need(config: Json, key: str, family: Family) -> Any:
    if config.get(key) is None:
        raise missing(key, family)
    return config[key]


def rope_theta(config: Json, family: Family) -> float:
    """The base of the rotation. `rope_scaling` and `rope_parameters` may repeat it, and must ask for nothing more."""
    theta = config.get("rope_theta")
    for key in ("rope_scaling", "rope_parameters"):
        nested = _plain_rope(key, config.get(key)).get("rope_theta")
        if theta is not None and nested is not None and nested != theta:
            raise CheckpointError(f"config.json: rope_theta is {theta!r}, but {key}.rope_theta is {nested!r}")
        theta = first(theta, nested)
    if theta is None:
        raise missing("rope_theta", family)
    if isinstance(theta, bool) or not isinstance(theta, (int, float)):
        raise CheckpointError(f"config.json: rope_theta is {theta!r}, expected a number")
    return float(theta)


def _plain_rope(key: str, value: Any) -> Json:
    """Absent, null, {} and the type "default" all mean rotation without scaling."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {key} is {value!r}, expected an object or null")
    for name, entry in value.items():
        plain = {"type": ("default", None), "rope_type": ("default", None), "partial_rotary_factor": (1, None)}
        if name != "rope_theta" and entry not in plain.get(name, (None,)):
            raise CheckpointError(
                f"config.json: {key}.{name} is {entry!r}; only rotation without scaling is supported "
                f'({key} null or {{"rope_type": "default"}})'
            )
    return value


def _whole(value: Any, parts: Any, what: str) -> int:
    if type(value) is not int or type(parts) is not int or parts < 1 or value % parts:
        raise CheckpointError(f"config.json: {what}: {value!r} does not divide into {parts!r} heads")
    return value // parts


# --- LLaDA ---


def _read_llada(config: Json) -> dict[str, Any]:
    if config.get("rope") is not True:
        raise CheckpointError(f"config.json: rope is {config.get('rope')!r}, expected true")
    heads = need(config, "n_heads", LLADA)
    if "n_kv_heads" not in config:
        raise missing("n_kv_heads", LLADA)
    return {
        "vocab_size": first(config.get("embedding_size"), need(config, "vocab_size", LLADA)),
        "num_kv_heads": first(config["n_kv_heads"], 1 if config.get("multi_query_attention") else heads),
        "head_dim": _whole(need(config, "d_model", LLADA), heads, "d_model"),
        "intermediate_size": _llada_mlp_size(config),
        "qkv_bias": bool(config.get("include_qkv_bias")),
    }


def _llada_mlp_size(config: Json) -> int:
    """mlp_hidden_size; only where it is null does mlp_ratio count."""
    size = config.get("mlp_hidden_size")
    if size is not None:
        return cast("int", size)
    ratio = need(config, "mlp_ratio", LLADA)
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)):
        raise CheckpointError(f"config.json: mlp_ratio is {ratio!r}, expected a number")
    return int(need(config, "d_model", LLADA) * ratio)


def _write_llada(config: ModelConfig) -> dict[str, Any]:
    return {
        "activation_type": "silu",
        "alibi": False,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "embedding_size": config.vocab_size,
        "include_bias": False,
        "include_qkv_bias": config.qkv_bias,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mlp_hidden_size": config.intermediate_size,
        "mlp_ratio": 4,
        "multi_query_attention": None,
        "n_kv_heads": config.num_kv_heads,
        "rope": True,
        "rope_full_precision": True,
        "scale_logits": False,
        "use_cache": False,
    }


LLADA = Family(
    name="llada",
    model_type="llada",
    architecture="LLaDAModelLM",
    logit_shift=0,
    # 126348 ends a chat turn and is in no config file; neither is the beginning of text.
    real=RealVocabulary(126464, extra_eos=(126081, 126348), mask_token_id=126336, bos_token_id=126080),
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "d_model",
        "num_layers": "n_layers",
        "num_heads": "n_heads",
        "norm_eps": "rms_norm_eps",
        "tie_embeddings": "weight_tying",
        "max_positions": "max_sequence_length",
    },
    # rope_full_precision is not here: false only means a coarser rotation than ours, which is always fp32.
    plain={
        "activation_type": ("silu",),
        "alibi": (False,),
        "attention_layer_norm": (False,),
        "bias_for_layer_norm": (False,),
        "block_group_size": (1,),
        "block_type": ("llama",),
        "clip_qkv": (),
        "include_bias": (False,),
        "input_emb_norm": (False,),
        "layer_norm_type": ("rms",),
        "layer_norm_with_affine": (True,),
        "quantization_config": (),
        "scale_logits": (False,),
    },
    explicit=("activation_type", "block_type", "include_bias", "layer_norm_type"),
    weights={
        "embed": "model.transformer.wte",
        "norm": "model.transformer.ln_f",
        "lm_head": "model.transformer.ff_out",
        "attn_norm": "model.transformer.blocks.{i}.attn_norm",
        "attn.qkv.q": "model.transformer.blocks.{i}.q_proj",
        "attn.qkv.k": "model.transformer.blocks.{i}.k_proj",
        "attn.qkv.v": "model.transformer.blocks.{i}.v_proj",
        "attn.out": "model.transformer.blocks.{i}.attn_out",
        "mlp_norm": "model.transformer.blocks.{i}.ff_norm",
        "mlp.gate_up.gate": "model.transformer.blocks.{i}.ff_proj",
        "mlp.gate_up.up": "model.transformer.blocks.{i}.up_proj",
        "mlp.down": "model.transformer.blocks.{i}.ff_out",
    },
    read=_read_llada,
    write=_write_llada,
)


# --- Dream ---


def _read_dream(config: Json) -> dict[str, Any]:
    heads = need(config, "num_attention_heads", DREAM)
    if config.get("layer_types") and set(config["layer_types"]) != {"full_attention"}:
        raise CheckpointError("config.json: layer_types must all be 'full_attention'; others are not supported")
    head_dim = config.get("head_dim")
    if head_dim is None:
        head_dim = _whole(need(config, "hidden_size", DREAM), heads, "hidden_size")
    return {
        "head_dim": head_dim,
        "qkv_bias": first(config.get("attention_bias"), True),
        # Absent means untied; a tied file then fails to load for want of its head tensor, never silently.
        "tie_embeddings": first(config.get("tie_word_embeddings"), False),
    }


def _write_dream(config: ModelConfig) -> dict[str, Any]:
    out: dict[str, Any] = {"hidden_act": "silu", "rope_scaling": None, "use_sliding_window": False}
    out["tie_word_embeddings"] = config.tie_embeddings
    if config.head_dim * config.num_heads != config.hidden_size:
        out["head_dim"] = config.head_dim
    if not config.qkv_bias:  # every published model has it, and no field for it
        out["attention_bias"] = False
    return out


DREAM = Family(
    name="dream",
    model_type="Dream",
    architecture="DreamModel",
    logit_shift=1,
    # <|im_end|> ends a chat turn; the config names the end of text only.
    real=RealVocabulary(152064, extra_eos=(151643, 151645), mask_token_id=151666, bos_token_id=151643),
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "intermediate_size": "intermediate_size",
        "norm_eps": "rms_norm_eps",
        "max_positions": "max_position_embeddings",
    },
    plain={
        "hidden_act": ("silu",),
        "mlp_bias": (False,),
        "quantization_config": (),
        "use_sliding_window": (False,),
    },
    explicit=(),
    weights={
        "embed": "model.embed_tokens",
        "norm": "model.norm",
        "lm_head": "lm_head",
        "attn_norm": "model.layers.{i}.input_layernorm",
        "attn.qkv.q": "model.layers.{i}.self_attn.q_proj",
        "attn.qkv.k": "model.layers.{i}.self_attn.k_proj",
        "attn.qkv.v": "model.layers.{i}.self_attn.v_proj",
        "attn.out": "model.layers.{i}.self_attn.o_proj",
        "mlp_norm": "model.layers.{i}.post_attention_layernorm",
        "mlp.gate_up.gate": "model.layers.{i}.mlp.gate_proj",
        "mlp.gate_up.up": "model.layers.{i}.mlp.up_proj",
        "mlp.down": "model.layers.{i}.mlp.down_proj",
    },
    read=_read_dream,
    write=_write_dream,
)

FAMILIES: Mapping[str, Family] = {family.name: family for family in (LLADA, DREAM)}


def parse(config: Json, generation: Json) -> dict[str, Any]:
    """Keyword arguments of ModelConfig from a checkpoint's two config files."""
    return _recognise(config).parse(config, generation)


def _recognise(config: Json) -> Family:
    model_type, architectures = config.get("model_type"), config.get("architectures") or []
    for family in FAMILIES.values():
        if model_type == family.model_type or (model_type is None and family.architecture in architectures):
            return family
    known = ", ".join(f"{family.model_type} ({family.architecture})" for family in FAMILIES.values())
    raise CheckpointError(
        f"config.json: model_type {model_type!r}, architectures {architectures!r}: no model that unmask knows; "
        f"known: {known}"
    )
