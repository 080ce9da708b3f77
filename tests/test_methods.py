"""The table of methods: what a row reads, what it may combine, and what it makes of weights and requests."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from unmask import methods
from unmask.config import FALLBACK, RECOMMENDABLE, SamplingParams
from unmask.errors import ConfigError, MethodError
from unmask.methods import (
    DRAFTERS,
    FRONTIERS,
    METHODS,
    OPTIONS,
    POLICIES,
    Method,
    check_prefix_caching,
    check_weights,
    leads,
    method_named,
)


@dataclass
class Weights:
    family: str = "llada"
    attention: str = "full"
    logit_shift: int = 0


DREAM = Weights("dream", logit_shift=1)
CAUSAL = Weights(attention="block_causal")


def row(**axes: Any) -> Method:
    return Method(name="mine", title="", **axes)


def complete(method: str | Method, checkpoint: dict[str, Any] | None = None, **said: Any) -> SamplingParams:
    chosen = method if isinstance(method, Method) else METHODS[method]
    return chosen.complete(SamplingParams(**said), checkpoint or {}, FALLBACK)


# --- the table


def test_no_torch_is_needed() -> None:
    check = "import sys, unmask.methods; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("fast-dllm-prefix", ("blocks", "prefix", "none", "family")),
        ("fast-dllm-dual", ("blocks", "dual", "none", "family")),
        ("flash-cache", ("window", "tracked", "none", "even")),
        ("flash-verify", ("window", "tracked", "two-pass", "even")),
        ("flash-verify-reference", ("window", "tracked", "two-pass", "even")),
        ("flash-dllm", ("window", "tracked", "two-pass", "even")),
        ("flash-verify-uncached", ("window", "recompute", "two-pass", "even")),
        ("dkv-cache", ("blocks", "delayed", "none", "family")),
        ("dllm-cache", ("blocks", "drift", "none", "even")),
        ("spa-cache", ("blocks", "drift", "none", "even")),
        ("elastic-cache", ("window", "elastic", "none", "even")),
        ("one-pass", ("window", "recompute", "one-pass", "even")),
        ("one-pass-cache", ("window", "tracked", "one-pass", "even")),
        ("freedave", ("blocks", "dual", "nested", "even")),
        ("d2f", ("pipeline", "block-causal", "none", "even")),
        ("d2f-uncached", ("pipeline", "recompute", "none", "even")),
        ("autoregressive", ("pipeline", "block-causal", "none", "even")),
    ],
)
def test_the_axes_of_a_row(name: str, axes: tuple[str, ...]) -> None:
    method = method_named(name)
    assert (method.frontier, method.policy, method.drafter, method.schedule) == axes


def test_every_row_runs_as_it_recommends_and_reads_it() -> None:
    for method in METHODS.values():
        said = SamplingParams(threshold=0.9) if method.frontier == "pipeline" else SamplingParams()
        assert method.complete(said, {}, FALLBACK).max_tokens == 128
        axis_fields = {name for axis in (FRONTIERS, POLICIES, DRAFTERS) for names in axis.values() for name in names}
        assert set(method.sampling) & axis_fields <= method.reads


def test_the_three_readings_of_flash_verify() -> None:
    ours, code, paper = (complete(f"flash-{name}") for name in ("verify", "verify-reference", "dllm"))
    assert (ours.accept, ours.isolation) == ("agreement", "strict")
    assert (code.accept, code.isolation) == ("product", "reference")
    assert (paper.accept, paper.isolation) == ("agreement", "reference")
    for params in (ours, code, paper):
        assert (params.search, params.gamma, params.threshold) == (8, 0.8, 0.9)
        assert (params.decode_window, params.refresh_window, params.track) == (16, 64, 64)


def test_cached_and_uncached_rows_recommend_the_same() -> None:
    assert METHODS["d2f"].sampling == METHODS["d2f-uncached"].sampling
    d2f = complete("d2f")
    assert (d2f.block_length, d2f.tau_add, d2f.tau_act, d2f.threshold, d2f.pipeline_depth) == (32, 0.1, 0.95, 0.9, 4)
    assert (d2f.strict_threshold, d2f.early_stop) == (True, None)
    cached, uncached = dict(METHODS["flash-verify"].sampling), METHODS["flash-verify-uncached"].sampling
    assert {k: v for k, v in cached.items() if k in METHODS["flash-verify-uncached"].reads | {"threshold"}} == uncached


# --- what a request may say

READERS = {
    "block_length": ("blocks", "block-window", "pipeline"),
    "decode_window": ("window", "block-window"),
    "tau_add": ("pipeline",),
    "tau_act": ("pipeline",),
    "pipeline_depth": ("pipeline",),
    "early_stop": ("pipeline",),
    "refresh_interval": ("prefix", "dual", "tracked", "delayed", "drift"),
    "answer_interval": ("drift",),
    "refresh_window": ("tracked",),
    "track": ("tracked", "elastic"),
    "drift_threshold": ("elastic",),
    "search": ("two-pass", "one-pass"),
    "gamma": ("two-pass", "one-pass"),
    "accept": ("two-pass", "one-pass"),
    "isolation": ("two-pass",),
}
VALUES: dict[str, Any] = {"accept": "product", "isolation": "reference", "early_stop": False, "track": 0, "gamma": 0.0}
VALUES |= {"tau_add": 0.0, "tau_act": 0.5}


@pytest.mark.parametrize("name", READERS)
def test_a_field_is_refused_where_nothing_reads_it(name: str) -> None:
    value = VALUES.get(name, 2)
    for method in METHODS.values():
        reads = bool({method.frontier, method.policy, method.drafter} & set(READERS[name]))
        if reads and (method.drafter, name) != ("nested", "refresh_interval"):
            assert getattr(complete(method, **{name: value}), name) == value
            continue
        with pytest.raises(ConfigError, match=f"does not read {name}; methods that do: ") as error:
            complete(method, **{name: value})
        named = str(error.value).split("methods that do: ")[1].split(", ")
        assert named == [row.name for row in METHODS.values() if name in row.reads]
        assert named


def test_the_whole_canvas_as_one_block_is_always_there() -> None:
    assert complete("dream", block_length=0).block_length == 0
    assert complete("window", block_length=0).block_length == 0


@pytest.mark.parametrize("name", ["confidence", "dream", "window", "flash-cache", "d2f"])
def test_a_recommendation_that_a_row_does_not_read_is_left_out(name: str) -> None:
    advice = {"method": name, "track": 48, "tau_add": 0.7, "decode_window": 24, "block_length": 8, "search": 4}
    params = complete(name, advice)
    for field, value in advice.items():
        if field in RECOMMENDABLE:
            unread = field not in METHODS[name].reads
            assert getattr(params, field) == (None if unread else value), field


def test_a_recommended_rule_belongs_to_the_recommended_method() -> None:
    advice = {"method": "d2f", "tau_add": 0.7, "block_length": 64}
    assert (complete("d2f", advice).tau_add, complete("d2f", advice).block_length) == (0.7, 64)
    other = complete("d2f-uncached", advice)
    assert (other.tau_add, other.block_length) == (0.1, 64)


def test_a_row_cannot_recommend_what_it_does_not_read() -> None:
    with pytest.raises(MethodError, match=r"recommends track=0, which its members \(window, recompute, none\)"):
        row(frontier="window", sampling={"track": 0})
    with pytest.raises(MethodError, match="recommends tau_add"):
        row(sampling={"block_add_threshold": 0.5})  # under another project's name
    assert row(frontier="window", policy="tracked", sampling={"track": 0}).sampling == {"track": 0}


def test_guidance_and_verification_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"cfg_scale=1\.5 .* 'flash-verify' .*\(flash-cache\)"):
        complete("flash-verify", cfg_scale=1.5)
    assert complete("flash-cache", cfg_scale=1.5).cfg_scale == 1.5
    assert complete("flash-verify", cfg_scale=0.0).cfg_scale == 0


def test_a_search_has_a_limit() -> None:
    with pytest.raises(ConfigError, match="search=9 is over the 8 that method 'flash-verify'"):
        complete("flash-verify", search=9)
    assert complete("flash-verify", search=8).search == 8
    wide = row(frontier="window", drafter="two-pass", options={"max_search": 16}, sampling={"threshold": 0.9})
    assert complete(wide, search=16).search == 16
    with pytest.raises(ConfigError, match="search=17 is over the 16"):
        complete(wide, search=17)
    with pytest.raises(MethodError, match="recommends search=9 over its option max_search=8"):
        row(drafter="two-pass", sampling={"search": 9})


@pytest.mark.parametrize("said", [{"steps": 8}, {"alg": "confidence_threshold_budget"}])
def test_a_pipeline_takes_no_fixed_schedule(said: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="'d2f' opens blocks as they fill"):
        complete("d2f", **said)
    assert complete("d2f", factor=1.0).factor == 1.0
    with pytest.raises(ConfigError, match="no threshold, factor or entropy_bound"):
        complete(row(frontier="pipeline"))


def test_origin_needs_dreams_schedule() -> None:
    assert complete("dream", alg="origin").alg == "origin"
    assert complete(row(schedule="family"), alg="origin").alg == "origin"  # these weights may be Dream's
    for method in ("confidence", "flash-cache", "d2f", row(frontier="window", schedule="dream")):
        with pytest.raises(ConfigError, match="alg='origin' needs Dream's schedule"):
            complete(method, alg="origin")


# --- what a row may combine


@pytest.mark.parametrize("frontier", FRONTIERS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_members_that_exclude_each_other(frontier: str, policy: str, drafter: str) -> None:
    legal = not (
        (policy == "block-causal" and frontier != "pipeline")
        or (frontier == "pipeline" and policy not in ("recompute", "block-causal"))
        or (policy in ("prefix", "dual") and frontier != "blocks")
        or (frontier == "pipeline" and drafter in ("two-pass", "one-pass"))
        or (policy in ("drift", "elastic") and drafter != "none")
        or (drafter == "nested" and policy not in ("dual", "prefix"))
    )
    axes = {"frontier": frontier, "policy": policy, "drafter": drafter}
    if legal:
        assert row(**axes).policy == policy
        return
    with pytest.raises(MethodError, match=r"method 'mine': .*; use ") as error:
        row(**axes)
    quoted = [name for name in (frontier, policy, drafter) if repr(name) in str(error.value).split("; use ")[0]]
    assert len(quoted) >= 2  # both sides


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"frontier": "windw"}, "did you mean 'window'"),
        ({"policy": "traked"}, "did you mean 'tracked'"),
        ({"drafter": "twopass"}, "did you mean 'two-pass'"),
        ({"schedule": "famly"}, "did you mean 'family'"),
    ],
)
def test_an_unknown_member(axes: dict[str, str], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        row(**axes)


TRACKED = {"frontier": "window", "policy": "tracked"}
TWO_PASS = {"frontier": "window", "drafter": "two-pass"}
DRIFT = {"policy": "drift"}
DELAYED = {"policy": "delayed"}


def test_options_have_defaults() -> None:
    both = row(**TRACKED | TWO_PASS, options={"mass": "softmax", "verify_rows": 48})
    assert dict(both.all_options) == OPTIONS["tracked"] | OPTIONS["two-pass"] | {"mass": "softmax", "verify_rows": 48}
    assert (both.option("mass"), both.option("max_search"), both.option("mass_last_layer")) == ("softmax", 8, None)
    assert dict(row().all_options) == {}
    assert "mass=softmax" in both.describe
    assert row(**TRACKED, options={"mass_first_layer": 0, "mass_last_layer": None}).option("mass_first_layer") == 0


@pytest.mark.parametrize(
    ("axes", "options", "message"),
    [
        (TRACKED, {"mas": "logits"}, "did you mean 'mass'"),
        (TRACKED, {"mass": "logit"}, "did you mean 'logits'"),
        (TRACKED, {"mass_rows": "window"}, "known: decode, refresh"),
        (TRACKED, {"mass_first_layer": -1}, "integer of at least 0, got -1"),
        (TRACKED, {"mass_first_layer": None}, "integer of at least 0, got None"),
        (TRACKED, {"mass_last_layer": 2}, r"mass_last_layer=2 .* mass_first_layer=2 .* at least 3"),
        (TRACKED, {"max_search": 4}, r"belongs to 'two-pass'; its members are 'tracked' and 'none'"),
        (TWO_PASS, {"mass": "logits"}, "belongs to 'tracked'"),
        (TWO_PASS, {"max_search": 0}, "integer of at least 1, got 0"),
        (TWO_PASS, {"max_search": 8.0}, "integer of at least 1"),
        (TWO_PASS, {"max_search": True}, "integer of at least 1"),
        (TWO_PASS, {"max_search": 17}, r"max_search=17 needs 34 rows .* at most 16"),
        (TWO_PASS, {"verify_rows": 65}, "at most 64 are possible"),
        ({}, {"mas": 1}, "its members have none"),
        (DRIFT, {"rank": 64}, r"rank=64 is not read with identifier='value'; .* identifier='proxy'"),
        (DRIFT, {"rank": 0, "identifier": "proxy"}, "an integer of at least 2, or a share .* got 0"),
        (DRIFT, {"rank": 8.5, "identifier": "proxy"}, "an integer of at least 2, or a share .* got 8.5"),
        (DRIFT, {"rank": True, "identifier": "proxy"}, "got True"),
        (DRIFT, {"warmup": 1}, r"warmup=1 is not read with refresh='apart'; .* refresh='together'"),
        (DRIFT, {"curve": (True,) * 4}, "four numbers as `unmask profile`"),
        (DRIFT, {"curve": "unifrom"}, "did you mean 'uniform'"),
        (DRIFT, {"identifier": "proxies"}, "did you mean 'proxy'"),
        (DRIFT, {"form": "paper"}, "curve='uniform' has the same ratio in all layers"),
        (DRIFT, {"min_ratio": 0.125}, "curve='uniform' has the same ratio in all layers"),
        (DRIFT, {"min_ratio": 2, "curve": "auto"}, "a number from 0 to 1, got 2"),
        (DRIFT, {"ratio": None}, "a number from 0 to 1, got None"),
        (DRIFT, {"ratio": 0.5, "mean_ratio": 0.2}, "use one of them"),
        (DRIFT, {"kept": "chosen"}, "writes='values' renews in every pass; use writes='sparse'"),
        (DELAYED, {"window": 8}, r"window=8 is not read with variant='decode'; .* variant='greedy'"),
        (DELAYED, {"variant": "greedy", "shift_type": "un"}, "shift_type='un' is not read with variant='greedy'"),
    ],
)
def test_options_that_are_wrong(axes: dict[str, str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        row(**axes, options=options)


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        (DRIFT, {"rank": 128, "warmup": 0, "ratio": 0}),
        (DRIFT, {"rank": 0.5, "identifier": "proxy"}),
        (DRIFT, {"rank": 1, "identifier": "proxy", "refresh": "together", "warmup": 1}),
        (DRIFT, {"curve": "auto", "min_ratio": 0.125, "form": "paper", "mean_ratio": 0.16}),
        (DRIFT, {"curve": "auto", "min_ratio": None, "mean_ratio": None}),
        (DRIFT, {"curve": (0.5, 0.1, 0.4, 0.2), "min_ratio": 0}),
        (DRIFT, {"kept": "chosen", "writes": "sparse"}),
        (DELAYED, {"window": 4, "shift_type": "un_right", "variant": "pd"}),
        (DELAYED, {"window": 8, "variant": "greedy"}),
    ],
)
def test_options_that_are_read(axes: dict[str, str], options: dict[str, Any]) -> None:
    """The table's own defaults may be said beside anything."""
    assert row(**axes, options=options).options == options


def test_an_option_that_a_row_does_not_have() -> None:
    with pytest.raises(MethodError, match="belongs to 'tracked'"):
        METHODS["confidence"].option("mass")
    with pytest.raises(MethodError, match="has no option 'max_serch'; did you mean 'max_search'"):
        METHODS["flash-verify"].option("max_serch")


# --- what weights it runs on


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.name)
def test_attention_that_the_weights_were_not_trained_for(method: Method) -> None:
    right, wrong = (CAUSAL, Weights()) if method.frontier == "pipeline" else (Weights(), CAUSAL)
    check_weights(method, right, allow=False)
    check_weights(method, wrong, allow=True)
    with pytest.raises(MethodError) as error:
        check_weights(method, wrong, allow=False)
    message = str(error.value)
    assert repr(method.name) in message
    assert "block-causal attention" in message
    assert "full attention" in message
    assert "allow_attention_mismatch=True / --allow-attention-mismatch" in message
    instead = METHODS["d2f" if wrong is CAUSAL else "confidence"]
    assert repr(instead.name) in message
    check_weights(instead, wrong, allow=False)  # the advice holds


@pytest.mark.parametrize("allow", [False, True])
def test_verification_needs_rows_that_score_themselves(allow: bool) -> None:
    with pytest.raises(MethodError, match=r"'flash-verify' .* row p - 1; .* 'flash-cache'"):
        check_weights(METHODS["flash-verify"], DREAM, allow=allow)
    check_weights(METHODS["flash-cache"], DREAM, allow=allow)
    check_weights(METHODS["flash-verify"], Weights("dream"), allow=allow)  # it is the shift that matters


def test_the_real_config_is_weights() -> None:
    from unmask.models.config import ModelConfig

    assert {"family", "attention", "logit_shift"} <= set(ModelConfig.__dataclass_fields__)


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.name)
def test_prefixes_are_shared_where_that_is_exact(method: Method) -> None:
    assert check_prefix_caching(method, False) is False
    exact = method.name in ("d2f", "autoregressive")
    assert check_prefix_caching(method, None) is exact
    if exact:
        assert check_prefix_caching(method, True) is True
        return
    with pytest.raises(MethodError, match=f"enable_prefix_caching=True.*{method.policy!r}.*'block-causal'"):
        check_prefix_caching(method, True)


def test_the_schedule_follows_the_family() -> None:
    dual = METHODS["fast-dllm-dual"]
    assert (dual.schedule_for(Weights()), dual.schedule_for(DREAM)) == ("even", "dream")
    assert METHODS["dream"].schedule_for(Weights()) == "dream"
    assert METHODS["vanilla"].schedule_for(DREAM) == "even"
    assert {method.schedule_for(DREAM) for method in METHODS.values()} == {"even", "dream"}


def test_who_leads() -> None:
    assert {name for name, method in METHODS.items() if leads(method, 1) and method.drafter == "none"} == {
        "fast-dllm-prefix",
        "fast-dllm-dual",
    }
    assert not any(leads(method, 0) for method in METHODS.values())


def test_a_table_of_members_is_complete() -> None:
    assert set(OPTIONS) <= set(POLICIES) | set(DRAFTERS)
    assert {name for options in OPTIONS.values() for name in options} == set(methods._ALLOWED)
    fields = {name for axis in (FRONTIERS, POLICIES, DRAFTERS) for names in axis.values() for name in names}
    assert fields == set(READERS)
    assert fields <= RECOMMENDABLE
