"""The forward pass without a cache: golden logits, and the same rows alone and padded."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from unmask.models.attention import DenseContext, RopeTable
from unmask.models.loading import load_model
from unmask.models.transformer import Transformer

from .checkpoints import GOLDEN, MODELS, random_model


def golden_cases() -> list[Any]:
    cases = []
    for family in ("llada", "dream"):
        for case in json.loads((GOLDEN / f"forward_{family}.json").read_text())["cases"]:
            cases.append(pytest.param(family, case, id=case["id"]))
    return cases


def alone(model: Transformer, token_N: Tensor) -> Tensor:
    """Logits [N, V] of one sequence by itself."""
    ctx = DenseContext(torch.arange(len(token_N)), rope=model.rope)
    return model.logits(model(token_N.unsqueeze(0), ctx))[0]


def padded(model: Transformer, token_BN: Tensor, **see: Tensor) -> Tensor:
    return model.logits(model(token_BN, DenseContext(torch.arange(token_BN.shape[1]), rope=model.rope, **see)))


def same(ours: Tensor, expected: Tensor) -> None:
    """Equal up to the order of sums: logits reach 30."""
    tolerance = 1e-10 if ours.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


@pytest.fixture(params=[(name, dtype) for name in MODELS for dtype in ("float64", "float32")], ids="-".join)
def model(request: pytest.FixtureRequest) -> Transformer:
    name, dtype = request.param
    return load_model(GOLDEN / "models" / name, dtype=dtype)


@pytest.fixture
def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 300, (n,), generator=generator) for n in (3, 7, 12)]


@torch.no_grad()
@pytest.mark.parametrize(("family", "case"), golden_cases())
def test_golden_logits(family: str, case: dict[str, Any]) -> None:
    model = load_model(GOLDEN / "models" / case["model"])
    expected = load_file(GOLDEN / f"forward_{family}_logits.safetensors")[case["logits_key"]]
    token = torch.tensor(case["input_ids"])
    if "attention_mask" not in case:
        ours = alone(model, token)
    else:
        real = torch.tensor(case["attention_mask"]).bool()
        mask = real.unsqueeze(1) & real.unsqueeze(2)
        ctx = DenseContext(torch.tensor(case["position_ids"]), mask=mask, rope=model.rope)
        ours = model.logits(model(token, ctx))
        assert ours.isfinite().all()
        ours, expected = ours[real], expected[real]
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-4)


@torch.no_grad()
def test_unequal_lengths_equal_each_alone(model: Transformer, sequences: list[Tensor]) -> None:
    lengths = torch.tensor([len(s) for s in sequences])
    batch = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=model.config.pad_token_id or 0)
    ours = padded(model, batch, see=lengths)
    for row, sequence in zip(ours, sequences):
        same(row[: len(sequence)], alone(model, sequence))
    assert not torch.allclose(padded(model, batch)[0, :3], alone(model, sequences[0]), atol=1e-3)  # without `see`


@torch.no_grad()
def test_padding_is_never_seen(model: Transformer, sequences: list[Tensor]) -> None:
    lengths = torch.tensor([len(s) for s in sequences])
    batch = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    noise = torch.randint(0, 320, batch.shape, generator=torch.Generator().manual_seed(1))
    real = torch.arange(batch.shape[1]) < lengths.unsqueeze(-1)
    before, after = (padded(model, t, see=lengths)[real] for t in (batch, torch.where(real, batch, noise)))
    assert torch.equal(before, after)
    seen = batch.clone()
    seen[0, 1] += 1
    assert not torch.allclose(padded(model, seen, see=lengths)[0, 0], before[0], atol=1e-3)


@torch.no_grad()
def test_left_padding_with_masks_and_positions(model: Transformer, sequences: list[Tensor]) -> None:
    """Positions start at 0 on the first real token; one sequence is padding only."""
    width = 12
    batch, real = torch.full((4, width), 9), torch.zeros(4, width, dtype=torch.bool)
    for b, sequence in enumerate(sequences):
        batch[b, -len(sequence) :], real[b, -len(sequence) :] = sequence, True
    pos = (real.cumsum(-1) - 1).clamp(min=0)
    mask = real.unsqueeze(1) & real.unsqueeze(2)
    ours = model.logits(model(batch, DenseContext(pos, mask=mask, rope=model.rope)))
    assert ours.isfinite().all()
    for b, sequence in enumerate(sequences):
        same(ours[b, -len(sequence) :], alone(model, sequence))


@torch.no_grad()
def test_a_pad_id_inside_a_prompt_is_attended(model: Transformer) -> None:
    pad = model.config.pad_token_id
    assert pad is not None
    assert pad in model.config.eos_token_ids
    prompt = torch.tensor([5, pad, 6, pad, 7])
    batch = torch.zeros(2, 9, dtype=torch.long)
    batch[0, :5], batch[1] = prompt, torch.arange(9)
    see = torch.tensor([5, 9])
    before = padded(model, batch, see=see)
    same(before[0, :5], alone(model, prompt))
    batch[0, 1] = 8
    assert not torch.allclose(padded(model, batch, see=see)[0, 0], before[0, 0], atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_that_sees_nothing_stays_finite(name: str, dtype: torch.dtype) -> None:
    token = torch.randint(0, 300, (2, 8), generator=torch.Generator().manual_seed(6))
    model = load_model(GOLDEN / "models" / name, dtype=dtype)
    ours = padded(model, token, see=torch.tensor([8, 0]))
    assert ours.dtype == dtype
    assert ours.isfinite().all()
    if dtype == torch.float32:
        same(ours[0], alone(model, token[0]))


@torch.no_grad()
def test_sequences_of_a_batch_do_not_see_each_other(model: Transformer) -> None:
    token = torch.randint(0, 300, (2, 8), generator=torch.Generator().manual_seed(8))
    before = padded(model, token)
    token[1] = token[1].flip(0)
    assert torch.equal(padded(model, token)[0], before[0])


def test_gradients_reach_every_parameter() -> None:
    for name in ("tiny-llada", "tiny-dream"):
        model = random_model(name)
        with torch.inference_mode():  # the rotation table of an inference pass must still serve a training pass
            alone(model, torch.arange(9))
        alone(model, torch.arange(9)).logsumexp(-1).sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_initial_weights() -> None:
    torch.manual_seed(0)
    model = Transformer(random_model("tiny-dream").config).requires_grad_(False)
    assert model.layers[0].attn_norm.weight.eq(1).all()
    assert model.layers[0].attn.qkv.bias.eq(0).all()
    assert model.layers[1].mlp.gate_up.weight.std() == pytest.approx(0.02, rel=0.05)
    assert model.layers[1].mlp.down.weight.std() == pytest.approx(0.02 / 6**0.5, rel=0.05)


def test_rope_table_grows_without_changing() -> None:
    table = RopeTable(16, 10_000.0, 64)
    cos, sin = table.at(torch.arange(5))
    assert len(table.reserve(1, "cpu")[0]) == 5
    again_cos, again_sin = table.at(torch.tensor([[200, 4], [3, 2]]))
    assert torch.equal(again_cos[0, 1], cos[4])
    assert torch.equal(again_sin[1, 0], sin[3])
    exact = torch.arange(201, dtype=torch.float64)[:, None] * 10_000.0 ** (-torch.arange(0, 16, 2).double() / 16)
    torch.testing.assert_close(table.reserve(201, "cpu")[0][:201].double(), exact.cos(), atol=3e-5, rtol=0)
