"""Muon, clipping, the average, the schedule."""

import pytest
import torch

from unmask.train.config import StageConfig
from unmask.train.ema import Ema, decay_at
from unmask.train.muon import Muon, orthogonalize
from unmask.train.schedule import lr_factor, progress


@pytest.mark.parametrize("shape", [(4, 16, 16), (2, 48, 16), (3, 16, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_orthogonalized_matrices_have_singular_values_near_one(shape, dtype):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape), dtype).float())
    assert values.min() > 0.3
    assert values.max() < 1.35


def _muon_update(rows, weight, grad):
    param = weight.clone().requires_grad_()
    param.grad = grad.clone()
    Muon({"w": param}, {"w": rows}, momentum=0.9).step(1.0)
    return weight - param.detach()


def test_fused_parts_are_orthogonalized_separately():
    torch.manual_seed(0)
    weight, grad = torch.randn(24, 8), torch.randn(24, 8)
    grad[:8] *= 100
    update = _muon_update([8, 8, 8], weight, grad)
    for part, g in zip(update.split(8), grad.split(8)):
        assert torch.allclose(part, orthogonalize(g[None], torch.float32)[0], atol=1e-3)
    whole = _muon_update([24], weight, grad)
    assert not torch.allclose(update, whole, atol=0.05)
    assert torch.allclose(whole, 3**0.5 * orthogonalize(grad[None], torch.float32)[0], atol=1e-3)


def test_the_average_follows_its_formula():
    weight = torch.zeros(3)
    ema = Ema([weight], 0.9)
    expected = 0.0
    for n in range(100):
        weight.fill_(float(n))
        ema.update()
        decay = min(0.9, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * n
    assert ema.average[0].tolist() == pytest.approx([expected] * 3, rel=1e-5)
    assert decay_at(10**6, 0.999) == 0.999
    with ema.applied():
        assert weight.tolist() == pytest.approx([expected] * 3, rel=1e-5)
    assert weight.tolist() == [99.0] * 3


def stage(**changes):
    return StageConfig(**{"name": "s", "steps": 100, "batch_size": 1, "length": 8, "warmup": 10} | changes)


def test_the_schedule_rises_stays_and_falls():
    s = stage(lr_scale=0.5, decay_fraction=0.4)
    factors = [lr_factor(s, i, progress(i, 100)) for i in range(101)]
    assert factors[0] == pytest.approx(0.05)
    assert factors[9:60] == pytest.approx([0.5] * 51)
    assert factors[80] == pytest.approx(0.25)
    assert factors[100] == 0
    assert lr_factor(stage(decay="none"), 99, 0.99) == 1


def test_progress_takes_the_clock_when_it_is_ahead():
    assert progress(10, 100, 5, 100) == 0.1
    assert progress(10, 100, 50, 100) == 0.5
    assert progress(10, 100, 100, 100) == 1
    s = stage(decay_fraction=0.5)
    assert lr_factor(s, 20, progress(20, 100, 75, 100)) == pytest.approx(0.5)
