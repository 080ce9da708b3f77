"""The benchmark of the forward: it times two equal things, in the engine's way and bare."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oracles.golden import tiny_model
from unmask.bench import overhead
from unmask.bench.overhead import bare_forward, forward_ratio, our_forward


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-llada-gqa", "tiny-dream"])
@torch.inference_mode()
def test_both_forwards_are_equal(name: str) -> None:
    """Again and again on one pool, and with a length that fills no page."""
    model, generator = tiny_model(name), torch.Generator().manual_seed(0)
    engine = our_forward(model, 3, 21)
    for _ in range(2):
        token_BN = torch.randint(0, model.config.vocab_size, (3, 21), generator=generator)
        torch.testing.assert_close(engine(token_BN), bare_forward(model, token_BN), atol=1e-4, rtol=1e-4)


def test_the_result() -> None:
    found = forward_ratio(tiny_model("tiny-llada-gqa"), 2, 20, repeats=2)
    assert list(found) == ["num_seqs", "length", "relative_error", "ours_ms", "bare_ms", "ratio"]
    assert (found["num_seqs"], found["length"]) == (2, 20)
    assert found["ratio"] == found["ours_ms"] / found["bare_ms"] > 0


def test_unequal_forwards_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a bare forward that sees one token another way."""
    model = tiny_model("tiny-llada-gqa")

    def other(model: torch.nn.Module, token_BN: Tensor) -> Tensor:
        token_BN = token_BN.clone()
        token_BN[0, 0] = (token_BN[0, 0] + 1) % 300
        return bare_forward(model, token_BN)  # type: ignore[arg-type]

    monkeypatch.setattr(overhead, "bare_forward", other)
    with pytest.raises(ValueError, match="differs from ours"):
        forward_ratio(model, 2, 20, repeats=1)
