"""Models in 8 bits: which weights, made how, counted how, and that they still answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unmask import LLM, SamplingParams
from unmask.errors import CheckpointError, ConfigError
from unmask.eval.word_problems import held_out, score
from unmask.models import quantization
from unmask.models.attention import DenseContext
from unmask.models.loading import load_model, save_model
from unmask.models.quantization import PRODUCTS, Fp8Linear, num_weight_bytes, quantize_
from unmask.models.transformer import Transformer
from unmask.ops.reference.fp8 import Fp8Weight, linear_fp8

from .checkpoints import MODELS, edit_json, random_model, write

PROMPT = "Tom has 3 apples and buys 4 more. How many apples does he have now?"
SAYS = SamplingParams(max_tokens=64, threshold=0.95, block_length=32)


def products(model: Transformer) -> list[nn.Module]:
    return [layer.get_submodule(name) for layer in model.layers for name in PRODUCTS]


def hidden(model: Transformer) -> torch.Tensor:
    token = torch.arange(12)[None] % model.config.vocab_size
    with torch.no_grad():
        return model(token, DenseContext(torch.arange(12), rope=model.rope))


def same(a: Transformer, b: Transformer) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(
        mine[name].dtype == theirs[name].dtype and torch.equal(mine[name].float(), theirs[name].float())
        for name in mine
    )


@pytest.mark.parametrize("name", MODELS)
def test_the_products_of_the_layers_and_nothing_else(name: str) -> None:
    model = random_model(name)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert quantize_(model, "fp8") is model
    assert all(isinstance(made, Fp8Linear) for made in products(model))
    assert {n for n, _ in model.named_parameters()} == {
        n for n in before if not any(f".{product}." in n for product in PRODUCTS)
    }
    for layer, made in enumerate(products(model)):
        kind = PRODUCTS[layer % len(PRODUCTS)]
        weight = before[f"layers.{layer // len(PRODUCTS)}.{kind}.weight"]
        assert torch.equal(made.weight.value_ND.float(), Fp8Weight.quantize(weight).value_ND.float())
        bias = before.get(f"layers.{layer // len(PRODUCTS)}.{kind}.bias")
        assert made.bias is None if bias is None else torch.equal(made.bias, bias)


@pytest.mark.parametrize("name", MODELS)
def test_hidden_rows_stay_near(name: str) -> None:
    model = random_model(name)
    exact = hidden(model)
    near = hidden(quantize_(model, "fp8"))
    assert 0 < (near - exact).norm() <= 0.2 * exact.norm()
    # Half a step of 3 bits of mantissa in every weight and row, through all layers; noise of that size four times over
    # is outside the bound.
    noisy = random_model(name)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for made in products(noisy):
            made.weight += 0.5 * made.weight.abs() * torch.randn(made.weight.shape, generator=generator).sign()
    assert (hidden(noisy) - exact).norm() > 0.2 * exact.norm()


def test_it_forwards_as_the_reference_and_twice_is_once() -> None:
    model = quantize_(random_model("tiny-dream"), "fp8")
    made = model.layers[0].attn.qkv
    x = torch.randn(2, 3, made.value.shape[1])
    assert torch.equal(made(x), linear_fp8(x, made.weight, made.bias))
    quantize_(model, "fp8")
    assert model.layers[0].attn.qkv is made


def test_weights_take_half_of_bf16() -> None:
    model = random_model("tiny-llada", d_model=256, n_heads=4, n_kv_heads=4, mlp_hidden_size=512).to(torch.bfloat16)
    kept = num_weight_bytes(model) - sum(num_weight_bytes(each) for each in products(model))
    before = num_weight_bytes(model) - kept
    quantize_(model, "fp8")
    after = num_weight_bytes(model) - kept
    channels = sum(len(made.weight) for made in products(model))
    assert after == before // 2 + 4 * channels
    assert after <= 0.52 * before


def test_only_one_product_is_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is quantised when those before it have been replaced."""
    model, replaced = random_model(), []
    quantize = Fp8Weight.quantize

    def watched(weight: torch.Tensor) -> Fp8Weight:
        replaced.append(sum(isinstance(each, Fp8Linear) for each in products(model)))
        return quantize(weight)

    monkeypatch.setattr(quantization.Fp8Weight, "quantize", staticmethod(watched))
    quantize_(model, "fp8")
    assert replaced == list(range(len(products(model))))


def test_a_change_of_dtype_leaves_the_8_bits_alone() -> None:
    model = quantize_(random_model("tiny-dream"), "fp8")
    weight = model.layers[0].attn.qkv.weight
    moved = model.to(torch.bfloat16).layers[0].attn.qkv
    assert moved.weight.value_ND.dtype == torch.float8_e4m3fn
    assert torch.equal(moved.weight.value_ND.float(), weight.value_ND.float())
    assert torch.equal(moved.weight.scale_N, weight.scale_N)
    assert (moved.bias.dtype, model.head.dtype) == (torch.bfloat16, torch.bfloat16)
    assert model.to("meta").layers[0].attn.qkv.value.is_meta


# --- while loading ---


@pytest.mark.parametrize("stage", [1, 1000, 10**9])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_loading_quantises_as_afterwards(
    name: str, dtype: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part by part, whatever the parts."""
    monkeypatch.setattr("unmask.models.loading.STAGE_BYTES", stage)
    write(tmp_path, name)
    loaded = load_model(tmp_path, dtype=dtype, quantization="fp8")
    assert same(loaded, quantize_(load_model(tmp_path, dtype=dtype), "fp8"))
    assert not loaded.training


def test_loading_never_makes_the_whole_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path)
    made: list[int] = []
    to_empty = Transformer.to_empty

    def counted(self: Transformer, **kwargs: Any) -> Transformer:
        made.append(num_weight_bytes(self))
        return to_empty(self, **kwargs)

    monkeypatch.setattr(Transformer, "to_empty", counted)
    loaded = load_model(tmp_path, dtype="float32", quantization="fp8")
    assert made == [num_weight_bytes(loaded)]


def test_a_quantised_model_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="save the one that it was made from"):
        save_model(quantize_(random_model(), "fp8"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- by option ---


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="quantization 'fp-8' is unknown; did you mean 'fp8'"):
        quantize_(random_model(), "fp-8")
    with pytest.raises(ConfigError, match="quantization 'int4' is unknown; known: fp8"):
        LLM(quantization="int4")


def test_a_gpu_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    for capability, refused in (((8, 0), True), ((8, 9), False), ((9, 0), False), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        if refused:
            with pytest.raises(ConfigError, match=r"needs compute capability 8\.9 .*; NVIDIA A100 has 8\.0: leave"):
                quantization.check_device("fp8", "cuda")
        else:
            quantization.check_device("fp8", "cuda:0")
    with pytest.raises(ConfigError, match="not on 'mps'"):
        quantization.check_device("fp8", "mps")


def test_a_network_that_is_already_there() -> None:
    with pytest.raises(ConfigError, match="quantize_"):
        LLM(random_model(), quantization="fp8", device="cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_shipped_model_answers_in_8_bits(dtype: str) -> None:
    llm = LLM(quantization="fp8", dtype=dtype, device="cpu", max_num_seqs=4)
    assert all(isinstance(made, Fp8Linear) for made in products(llm.model))
    assert score(llm, held_out(8, seed=1), SAYS).num_correct >= 7
    texts = [llm.chat([{"role": "user", "content": PROMPT}], SAYS)[0].outputs[0].text for _ in range(2)]
    assert texts[0] == texts[1]


# --- the method, where nobody names one ---


@pytest.mark.parametrize(
    ("attention", "recommended", "method"),
    [("full", None, "confidence"), ("block_causal", None, "d2f"), ("block_causal", "d2f-uncached", "d2f-uncached")],
)
def test_the_method_follows_the_attention(attention: str, recommended: str | None, method: str, tmp_path: Path) -> None:
    write(tmp_path)
    edit_json(tmp_path / "config.json", unmask={"attention": attention})
    settings = {"unmask": {"method": recommended}} if recommended else {}
    generation = json.loads((tmp_path / "generation_config.json").read_text()) | settings
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    model = load_model(tmp_path)
    assert model.config.attention == attention
    assert LLM(model, device="cpu").method.name == method
