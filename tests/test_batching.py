"""The shipped model answers alone as it does in company; `scripts/soak batching` is the long form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unmask import LLM
from unmask.eval.batching import SETTINGS, differences

RESULT = Path(__file__).parents[1] / "docs" / "results" / "batching.json"


@pytest.mark.parametrize("method", SETTINGS)
def test_company_changes_nothing(method: str) -> None:
    """Every setting twice, unequal lengths, seats that are taken again."""
    alone, batched = (
        LLM(method=method, max_num_seqs=seats, allow_attention_mismatch=True, dtype="float32") for seats in (2, 7)
    )
    assert differences(alone, batched, 2 * len(SETTINGS[method])) == []


def test_a_difference_is_seen() -> None:
    """Negative control: an engine whose recommended threshold is another one differs where it is used."""
    other = LLM(max_num_seqs=7)
    other.model.config = other.model.config.__class__(
        **{**vars(other.model.config), "generation": {**other.model.config.generation, "threshold": 0.3}}
    )
    found = differences(LLM(max_num_seqs=2), other, len(SETTINGS["confidence"]))
    assert [each.request for each in found] == [0]
    assert found[0].alone != found[0].together


def test_the_long_run_found_at_most_one_in_five_hundred() -> None:
    result = json.loads(RESULT.read_text())
    assert result["num_requests"] >= 500
    assert set(result["requests"]) == set(SETTINGS)
    assert result["num_different"] * 500 <= result["num_requests"]
