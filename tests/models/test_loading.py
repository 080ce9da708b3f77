"""Checkpoints: the published layouts, bit-identical round trips, bounded memory, and errors that name the culprit."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file

from unmask.errors import CheckpointError
from unmask.models import loading
from unmask.models.config import ModelConfig
from unmask.models.loading import load_model, resolve_checkpoint, save_model, weight_index
from unmask.models.transformer import Transformer

from .checkpoints import GOLDEN, MODELS, edit_json, edit_tensors, random_model, write

CONFIGS = Path(__file__).parent / "configs"
HEADS = {"tiny-llada": "model.transformer.ff_out.weight", "tiny-dream": "lm_head.weight"}
TIED = {"tiny-llada": "weight_tying", "tiny-dream": "tie_word_embeddings"}


def equal(a: Transformer, b: Transformer) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


# --- the published layouts ---


def test_llada_8b_index() -> None:
    index = weight_index(real("llada-8b"))
    assert len(index) == 291
    assert 2 * sum(map(math.prod, index.values())) == 16_031_162_368
    assert index["model.transformer.wte.weight"] == index["model.transformer.ff_out.weight"] == (126464, 4096)
    assert index["model.transformer.ln_f.weight"] == (4096,)
    block = "model.transformer.blocks.31."
    expected = {"attn_norm": (4096,), "ff_norm": (4096,), "ff_out": (4096, 12288)}
    expected |= dict.fromkeys(("q_proj", "k_proj", "v_proj", "attn_out"), (4096, 4096))
    expected |= dict.fromkeys(("ff_proj", "up_proj"), (12288, 4096))
    assert {n: s for n, s in index.items() if n.startswith(block)} == {
        f"{block}{name}.weight": shape for name, shape in expected.items()
    }


def test_dream_7b_index() -> None:
    index = weight_index(real("dream-7b"))
    assert len(index) == 339
    assert sum(map(math.prod, index.values())) == 7_615_616_512
    layer = "model.layers.27."
    expected: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_proj.bias"), (3584,)
    )
    expected |= {"self_attn.k_proj.bias": (512,), "self_attn.v_proj.bias": (512,)}
    expected |= dict.fromkeys(("self_attn.q_proj.weight", "self_attn.o_proj.weight"), (3584, 3584))
    expected |= dict.fromkeys(("self_attn.k_proj.weight", "self_attn.v_proj.weight"), (512, 3584))
    expected |= dict.fromkeys(("mlp.gate_proj.weight", "mlp.up_proj.weight"), (18944, 3584))
    expected |= {"mlp.down_proj.weight": (3584, 18944)}
    assert {n: s for n, s in index.items() if n.startswith(layer)} == {layer + n: s for n, s in expected.items()}
    assert index["lm_head.weight"] == index["model.embed_tokens.weight"] == (152064, 3584)


def real(name: str) -> ModelConfig:
    return ModelConfig.from_dict(json.loads((CONFIGS / f"{name}.json").read_text()))


@pytest.mark.parametrize("name", ["llada-8b", "dream-7b"])
def test_real_models_have_exactly_these_parameters(name: str) -> None:
    config = real(name)
    parameters = {n: tuple(p.shape) for n, p in Transformer(config, device="meta").named_parameters()}
    filled = dict.fromkeys(parameters, 0)
    for piece in loading.FAMILIES[config.family].pieces(config):
        assert piece.start == filled[piece.parameter]
        assert piece.shape[1:] == parameters[piece.parameter][1:]
        filled[piece.parameter] += piece.shape[0]
    assert filled == {n: shape[0] for n, shape in parameters.items()}


@pytest.mark.parametrize("model", MODELS)
def test_golden_files_match_the_index(model: str) -> None:
    stored = load_file(GOLDEN / "models" / model / "model.safetensors")
    config = ModelConfig.from_pretrained(GOLDEN / "models" / model)
    assert {name: tuple(t.shape) for name, t in stored.items()} == weight_index(config)


SMALL = {
    "llada-8b": {"d_model": 32, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 48, "embedding_size": 126464},
    "dream-7b": {"hidden_size": 28, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 48},
}


@pytest.mark.parametrize("name", ["llada-8b", "dream-7b"])
def test_real_layout_in_shards(name: str, tmp_path: Path) -> None:
    """All layers and the whole vocabulary of the real model, narrow, in several bf16 shards."""
    config = ModelConfig.from_dict(json.loads((CONFIGS / f"{name}.json").read_text()) | SMALL[name])
    model = Transformer(config, dtype=torch.bfloat16)
    save_model(model, tmp_path, max_shard_bytes=2 * 10**5)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(index["weight_map"]) == {"llada-8b": 291, "dream-7b": 339}[name]
    assert len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == 2 * sum(map(math.prod, weight_index(config).values()))
    loaded = load_model(tmp_path, dtype="bfloat16")
    assert loaded.config == config
    assert equal(loaded, model)


# --- round trips ---


@pytest.mark.parametrize("shard", [10**9, 50_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", MODELS)
def test_load_of_save_is_identical(model: str, dtype: torch.dtype, shard: int, tmp_path: Path) -> None:
    saved = random_model(model).to(dtype)
    save_model(saved, tmp_path, max_shard_bytes=shard)
    loaded = load_model(tmp_path, dtype=dtype)
    assert loaded.head.dtype == dtype
    assert equal(loaded, saved)
    assert loaded.config == ModelConfig.from_pretrained(tmp_path) == saved.config


def test_saved_in_the_published_form(tmp_path: Path) -> None:
    golden = GOLDEN / "models" / "tiny-dream"
    save_model(load_model(golden), tmp_path)
    ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(golden / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    published = json.loads((golden / "config.json").read_text())
    written = json.loads((tmp_path / "config.json").read_text())
    assert {key: published.get(key, value) for key, value in written.items()} == written


def test_save_replaces_an_earlier_save(tmp_path: Path) -> None:
    write(tmp_path, max_shard_bytes=50_000)
    second = random_model(seed=1)
    save_model(second, tmp_path)
    assert sorted(p.name for p in tmp_path.glob("model*")) == ["model.safetensors"]
    assert equal(load_model(tmp_path), second)
    write(tmp_path, max_shard_bytes=50_000)
    assert equal(load_model(tmp_path), random_model())


def test_save_copies_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "tokenizer.json").write_text("{}")
    write(tmp_path / "to", tokenizer_dir=tmp_path / "from")
    assert (tmp_path / "to" / "tokenizer.json").read_text() == "{}"
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no tokenizer file"):
        write(tmp_path / "to", tokenizer_dir=tmp_path / "empty")


@pytest.mark.parametrize("model", ["tiny-llada", "tiny-dream"])
def test_tied_head_loads_with_and_without_its_tensor(model: str, tmp_path: Path) -> None:
    tied = random_model(model, **{TIED[model]: True})
    assert tied.head is tied.embed.weight
    save_model(tied, tmp_path)
    file, head = tmp_path / "model.safetensors", HEADS[model]
    assert head not in load_file(file)
    assert equal(load_model(tmp_path), tied)
    embedding = {"tiny-llada": "model.transformer.wte.weight", "tiny-dream": "model.embed_tokens.weight"}[model]
    edit_tensors(file, lambda t: t.update({head: t[embedding].clone()}))
    assert equal(load_model(tmp_path), tied)
    edit_tensors(file, lambda t: t[head].add_(1))
    with pytest.raises(CheckpointError, match=f"'{head}' differs"):
        load_model(tmp_path)


def test_no_parameter_is_left_unwritten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path, "tiny-dream")
    to_empty = Transformer.to_empty

    def poisoned(self: Transformer, **kwargs: Any) -> Transformer:
        made = to_empty(self, **kwargs)
        for parameter in made.parameters():
            parameter.data.fill_(float("nan"))
        return made

    monkeypatch.setattr(Transformer, "to_empty", poisoned)
    assert all(p.isfinite().all() for p in load_model(tmp_path).parameters())


PEAK = """
import re, sys, torch
from unmask.models.loading import load_model
def high_water():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
load_model(sys.argv[1])  # pays for lazy imports and allocator arenas
before = high_water()
model = load_model(sys.argv[2])
print(high_water() - before, sum(p.numel() * p.element_size() for p in model.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("shard", [10**9, 20 * 10**6])
def test_memory_peak_is_the_model_and_one_tensor(shard: int, tmp_path: Path) -> None:
    changes = {"d_model": 512, "n_heads": 8, "n_kv_heads": 8, "mlp_hidden_size": 1024, "n_layers": 10}
    save_model(random_model("tiny-llada", **changes), tmp_path / "large", max_shard_bytes=shard)
    write(tmp_path / "small")
    command = [sys.executable, "-c", PEAK, str(tmp_path / "small"), str(tmp_path / "large")]
    peak, size = map(int, subprocess.run(command, capture_output=True, check=True, text=True).stdout.split())
    assert size > 100 * 10**6
    assert peak <= 1.15 * size


# --- dtype ---


def test_auto_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(random_model().to(torch.bfloat16), tmp_path)
    assert load_model(tmp_path).head.dtype == torch.float32
    assert load_model(tmp_path, dtype="bfloat16").head.dtype == torch.bfloat16
    assert load_model(tmp_path, device="meta").head.dtype == torch.bfloat16
    monkeypatch.setattr(loading, "SMALL_MODEL", 1000)
    assert load_model(tmp_path).head.dtype == torch.bfloat16
    edit_json(tmp_path / "config.json", torch_dtype=...)
    assert load_model(tmp_path).head.dtype == torch.bfloat16
    edit_json(tmp_path / "config.json", dtype="float32")
    assert load_model(tmp_path).head.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["int8", torch.int8, "fp8"])
def test_unknown_dtype(dtype: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="known: auto, float32, bfloat16"):
        load_model(write(tmp_path), dtype=dtype)


# --- where ---


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist: neither a directory, nor a hub id"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="did you mean 'unmask-mini'"):
        load_model("unmask-mni")


def test_a_file_instead(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file; give the directory"):
        load_model(write(tmp_path) / "model.safetensors")


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load_model(tmp_path)


def test_broken_config(tmp_path: Path) -> None:
    (write(tmp_path) / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not readable as JSON"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json holds a list"):
        load_model(tmp_path)


def test_built_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading.importlib.resources, "files", lambda _: tmp_path)
    with pytest.raises(CheckpointError, match="unmask-mini is missing from this installation"):
        resolve_checkpoint("unmask-mini")
    write(tmp_path / "assets" / "unmask-mini")
    assert equal(load_model("unmask-mini"), random_model())


def test_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(write(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert equal(load_model("org/name", revision="abc"), random_model())
    assert (asked["repo"], asked["revision"]) == ("org/name", "abc")
    assert not any(pattern.endswith(("py", "bin", "pt", "*")) for pattern in asked["allow_patterns"])


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"'org/name' is no local directory.*HF_TOKEN.*copy the files"):
        load_model("org/name")


# --- what ---


def test_pickles_are_refused(tmp_path: Path) -> None:
    (write(tmp_path) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin but no safetensors; such files are pickles"):
        load_model(tmp_path)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"weights\.pt but no safetensors"):
        load_model(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    (write(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no safetensors file at all"):
        load_model(tmp_path)


NAME = "model.transformer.blocks.1.k_proj.weight"


def test_missing_tensor(tmp_path: Path) -> None:
    edit_tensors(write(tmp_path) / "model.safetensors", lambda t: t.pop(NAME))
    with pytest.raises(CheckpointError, match=rf"'{NAME}' is missing: none of model\.safetensors"):
        load_model(tmp_path)


def test_missing_head_says_tied(tmp_path: Path) -> None:
    edit_tensors(write(tmp_path) / "model.safetensors", lambda t: t.pop(HEADS["tiny-llada"]))
    with pytest.raises(CheckpointError, match="if the head is the embedding"):
        load_model(tmp_path)


def test_unexpected_tensor(tmp_path: Path) -> None:
    edit_tensors(write(tmp_path) / "model.safetensors", lambda t: t.update({"q_norm.weight": torch.ones(4)}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: unexpected tensor 'q_norm\.weight' \[4\]"):
        load_model(tmp_path)


def test_wrong_shape(tmp_path: Path) -> None:
    edit_tensors(write(tmp_path) / "model.safetensors", lambda t: t.update({NAME: torch.ones(64, 63)}))
    with pytest.raises(CheckpointError, match=rf"'{NAME}' has shape \[64, 63\], and config.json makes it \[64, 64\]"):
        load_model(tmp_path)


def test_wrong_config_is_a_wrong_shape(tmp_path: Path) -> None:
    edit_json(write(tmp_path) / "config.json", embedding_size=333)
    with pytest.raises(CheckpointError, match=r"has shape \[320, 64\], and config.json makes it \[333, 64\]"):
        load_model(tmp_path)


def test_quantised_tensor(tmp_path: Path) -> None:
    edit_tensors(write(tmp_path) / "model.safetensors", lambda t: t.update({NAME: t[NAME].to(torch.int8)}))
    with pytest.raises(CheckpointError, match=f"'{NAME}' is stored as I8"):
        load_model(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_truncated_file(keep: int, tmp_path: Path) -> None:
    file = write(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole safetensors file"):
        load_model(tmp_path)


def test_index_names_a_missing_shard(tmp_path: Path) -> None:
    write(tmp_path, max_shard_bytes=50_000)
    shard = sorted(tmp_path.glob("model-*"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"names {shard.name}, which is not there"):
        load_model(tmp_path)


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    write(tmp_path, max_shard_bytes=50_000)
    index = tmp_path / "model.safetensors.index.json"
    sound = json.loads(index.read_text())
    shard = sound["weight_map"][NAME]
    edit_json(index, weight_map=sound["weight_map"] | {"ghost": shard})
    with pytest.raises(CheckpointError, match=rf"places tensor 'ghost' in {shard}"):
        load_model(tmp_path)
    edit_json(index, weight_map=["a"])
    with pytest.raises(CheckpointError, match="has no weight_map"):
        load_model(tmp_path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    write(tmp_path, max_shard_bytes=50_000)
    first = sorted(tmp_path.glob("model-*"))[0]
    edit_tensors(first, lambda t: t.update({NAME: torch.ones(64, 64)}))
    with pytest.raises(CheckpointError, match=f"tensor '{NAME}' is in model-"):
        load_model(tmp_path)
