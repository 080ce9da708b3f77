"""What a user may set: ranges, other projects' names, what a recommendation fills, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from unmask.config import ALIASES, RECOMMENDABLE, EngineConfig, SamplingParams
from unmask.errors import ConfigError

# name: (values that hold, values that do not)
FIELDS: dict[str, tuple[list[Any], list[Any]]] = {
    "refresh_window": ([1, 64], [0, -1, 1.5, True, "8"]),
    "track": ([0, 64], [-1, 1.0, False]),
    "refresh_interval": ([1, 8], [0, 2.0]),
    "search": ([1, 8], [0, 1.0]),
    "gamma": ([0, 0.8, 1.5], [-0.1, float("nan"), "0.8", True]),
    "accept": (["agreement", "product"], ["agree", ""]),
    "isolation": (["strict", "reference"], ["none", ""]),
    "tau_add": ([0, 0.1, 1], [-0.1, 1.1, True]),
    "tau_act": ([0, 0.95, 1], [-0.1, 1.1]),
    "pipeline_depth": ([1, 4], [0, 1.0]),
    "early_stop": ([True, False], [1, 0, "no"]),
    "strict_threshold": ([True, False], [1, "yes"]),
}
ENGINE: dict[str, tuple[list[Any], list[Any]]] = {
    "kv_cache_memory_bytes": ([1, 2**40, None], [0, 1e9, True]),
    "gpu_memory_utilization": ([0.01, 1, 0.9], [0, 0.0, 1.01, None, True]),
    "enable_prefix_caching": ([True, False, None], [1, "on"]),
    "allow_attention_mismatch": ([True, False], [None, 1]),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_takes_what_is_in_range_and_is_unsaid_by_default(name: str) -> None:
    good, bad = FIELDS[name]
    assert getattr(SamplingParams(), name) is None
    assert name in RECOMMENDABLE
    for value in good:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(ConfigError, match=name):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ENGINE)
def test_the_engine_takes_what_is_in_range(name: str) -> None:
    good, bad = ENGINE[name]
    for value in good:
        assert getattr(EngineConfig(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(ConfigError, match=name):
            EngineConfig(**{name: value})


def test_what_the_engine_does_unasked() -> None:
    config = EngineConfig()
    assert (config.kv_cache_memory_bytes, config.gpu_memory_utilization) == (None, 0.9)
    assert (config.enable_prefix_caching, config.allow_attention_mismatch) == (None, False)


@pytest.mark.parametrize(
    ("alias", "field"),
    [
        ("tau_conf", "threshold"),
        ("skip_threshold", "threshold"),
        ("accept_threshold", "threshold"),
        ("block_add_threshold", "tau_add"),
        ("add_block_threshold", "tau_add"),
        ("add_new_block_threshold", "tau_add"),
        ("decoded_token_threshold", "tau_act"),
        ("complete_threshold", "tau_act"),
        ("verify_threshold", "gamma"),
    ],
)
def test_other_names_of_shares(alias: str, field: str) -> None:
    assert getattr(SamplingParams(**{alias: 0.5}), field) == 0.5
    with pytest.raises(ConfigError, match="given twice"):
        SamplingParams(**{alias: 0.5, field: 0.5})


def test_other_names_of_counts() -> None:
    assert SamplingParams(buffer_size=4).pipeline_depth == 4
    assert SamplingParams(cache_refresh_interval=8).refresh_interval == 8
    assert EngineConfig(max_num_rows=512).max_num_batched_tokens == 512


@pytest.mark.parametrize("name", ["track_num", "mask_num"])
def test_a_name_in_other_units_is_no_alias(name: str) -> None:
    """Flash-dLLM counts in units of 16 positions: taken as positions, its values would be 16 times too small."""
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{name: 4})


def test_every_alias_names_a_field_and_hides_none() -> None:
    fields = {field.name for cls in (SamplingParams, EngineConfig) for field in dataclasses.fields(cls)}
    assert set(ALIASES.values()) <= fields
    assert not set(ALIASES) & fields


def test_an_unknown_name_is_offered_one_that_would_be_taken() -> None:
    with pytest.raises(ConfigError, match="did you mean 'refresh_window'"):
        SamplingParams(refresh_windw=64)
    with pytest.raises(ConfigError, match="unknown sampling option 'max_num_rows'") as error:
        SamplingParams(max_num_rows=64)  # a name of the engine's
    assert "did you mean 'max_num_rows'" not in str(error.value)


def test_a_switch_that_was_said_is_not_filled() -> None:
    source = {"early_stop": True, "strict_threshold": True, "track": 64, "tau_add": 0.1}
    said = SamplingParams(early_stop=False, track=0, tau_add=0.0).filled(source)
    assert (said.early_stop, said.strict_threshold, said.track, said.tau_add) == (False, True, 0, 0.0)
    assert SamplingParams().filled(source).early_stop is True
