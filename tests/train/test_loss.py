"""The loss against a plain loop in fp64, through a real model."""

import math

import pytest
import torch

from unmask.train.loss import forward_logits, forward_loss, weighted_loss
from unmask.train.modelling import model_config, new_model

from .helpers import small_ar_config, small_config, tiny_model


def test_weighted_loss_is_the_plain_sum():
    torch.manual_seed(0)
    logits, target = torch.randn(3, 5, 7, dtype=torch.float64), torch.randint(0, 7, (3, 5))
    weight = torch.rand(3, 5, dtype=torch.float64) * (torch.rand(3, 5) < 0.5)
    expected = 0.0
    for b in range(3):
        for n in range(5):
            scores = logits[b, n].tolist()
            expected -= float(weight[b, n]) * math.log(
                math.exp(scores[target[b, n]]) / sum(math.exp(s) for s in scores)
            )
    assert abs(float(weighted_loss(logits, target, weight)) - expected) < 1e-12


def test_positions_past_the_visible_end_change_nothing():
    model = tiny_model().double()
    token = torch.randint(3, 20, (2, 12))
    see, weight = torch.tensor([7, 9]), torch.rand(2, 12, dtype=torch.float64)
    past = torch.arange(12) >= see[:, None]
    weight[past] = 0
    other = token.masked_fill(past, 5)
    assert torch.equal(forward_loss(model, token, see, token, weight), forward_loss(model, other, see, token, weight))
    inside = token.clone()
    inside[:, 6] = 5
    assert not torch.equal(forward_logits(model, token, see)[:, 0], forward_logits(model, inside, see)[:, 0])


@pytest.mark.parametrize("config", [small_config(), small_ar_config()], ids=["full", "causal"])
def test_compiled_graph_is_whole_and_equal(config):
    model = new_model(model_config(config), 0, torch.device("cpu"))
    token, see, weight = torch.randint(3, 20, (2, 12)), torch.tensor([7, 9]), torch.rand(2, 12)
    model.rope.reserve(model.config.max_positions, "cpu")
    compiled = torch.compile(forward_loss, backend="aot_eager", dynamic=False, fullgraph=True)
    loss, eager = (f(model, token, see, token, weight) for f in (compiled, forward_loss))
    assert torch.allclose(loss, eager, atol=1e-5)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
