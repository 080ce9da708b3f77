from __future__ import annotations

import dataclasses
import json
import typing

import pytest

from cli.fake_llm import TEXT
from unmask.cli.options import field_docs, make_params, option_name
from unmask.config import EngineConfig, SamplingParams
from unmask.errors import ConfigError

# A value for every field, as words of the command line; fields that exclude each other are given one at a time.
WORDS = {
    "n": ["2"],
    "max_tokens": ["64"],
    "min_tokens": ["3"],
    "stop": ["Q:"],
    "stop_token_ids": ["5"],
    "temperature": ["0.5"],
    "top_p": ["0.9"],
    "top_k": ["-1"],
    "min_p": ["0.1"],
    "seed": ["11"],
    "suppress_token_ids": ["6"],
    "cfg_scale": ["1.5"],
    "block_length": ["16"],
    "decode_window": ["8"],
    "steps": ["32"],
    "threshold": ["0.8"],
    "factor": ["1.0"],
    "entropy_bound": ["0.2"],
    "alg": ["entropy"],
    "remasking": ["random"],
    "alg_temp": ["0.3"],
    "eps": ["0.01"],
    "strict_threshold": [],
    "tau_add": ["0.1"],
    "tau_act": ["0.95"],
    "pipeline_depth": ["4"],
    "early_stop": [],
    "refresh_window": ["64"],
    "track": ["0"],
    "refresh_interval": ["8"],
    "answer_interval": ["4"],
    "drift_threshold": ["0.9"],
    "search": ["8"],
    "gamma": ["0.8"],
    "accept": ["product"],
    "isolation": ["reference"],
}
# The same for the engine, with the value that the words stand for.
ENGINE_WORDS = {
    "max_num_seqs": (["32"], 32),
    "max_model_len": (["32"], 32),
    "max_num_batched_tokens": (["32"], 32),
    "kv_cache_memory_bytes": (["1000000"], 1_000_000),
    "gpu_memory_utilization": (["0.5"], 0.5),
    "enable_prefix_caching": ([], True),
    "allow_attention_mismatch": ([], True),
    "enforce_eager": ([], True),
    "enable_torch_compile": ([], True),
    "kernels": (["reference"], "reference"),
    "quantization": (["fp8"], "fp8"),
}


@pytest.mark.parametrize("field", dataclasses.fields(SamplingParams), ids=lambda field: field.name)
def test_every_sampling_field_is_an_option(field, unmask, llm):
    default = field.default
    option = "--no-" + option_name(field)[2:] if default is True else option_name(field)
    result = unmask("generate", "hello", option, *([] if isinstance(default, bool) else WORDS[field.name]))
    assert result.exit_code == 0, result.stderr
    (_, _, params) = llm.calls[0]
    assert getattr(params, field.name) != default
    assert [f.name for f in dataclasses.fields(params) if getattr(params, f.name) != f.default] == [field.name]


@pytest.mark.parametrize("field", dataclasses.fields(EngineConfig), ids=lambda field: field.name)
def test_every_engine_field_is_an_option(field, unmask, llm):
    words, value = ENGINE_WORDS[field.name]
    assert unmask("generate", "hello", option_name(field), *words).exit_code == 0
    assert llm.options[field.name] == value
    assert EngineConfig(**{field.name: value}) != EngineConfig()


@pytest.mark.parametrize("field", dataclasses.fields(EngineConfig), ids=lambda field: field.name)
def test_chat_has_the_engine_options_too(field, unmask, llm):
    words, value = ENGINE_WORDS[field.name]
    assert unmask("chat", option_name(field), *words, stdin=b"hi\n").exit_code == 0
    assert llm.options[field.name] == value
    assert unmask("chat", stdin=b"hi\n").exit_code == 0
    assert field.name not in llm.options


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_engine_options_have_a_panel_of_their_own(verb, unmask):
    text = unmask(verb, "--help", COLUMNS="120").stdout
    panels = {panel.split(" ─")[0].split("─ ")[-1]: panel for panel in text.split("╭")[1:]}
    options = {option_name(field) for field in dataclasses.fields(EngineConfig)}
    assert {option for option in options if option in panels["Engine"]} == options
    assert not {option for option in options if f"{option} " in panels["Options"] + panels["Sampling"]}


@pytest.mark.parametrize("name", ["early_stop", "strict_threshold"])
@pytest.mark.parametrize(("prefix", "value"), [(["--"], True), (["--no-"], False), ([], None)])
def test_a_switch_that_is_open_can_be_put_on_and_off(name, prefix, value, unmask, llm):
    given = [prefix[0] + name.replace("_", "-")] if prefix else []
    assert unmask("generate", "hello", *given).exit_code == 0
    assert getattr(llm.calls[0][2], name) is value


def test_an_open_switch_of_the_engine_can_be_put_off(unmask, llm):
    assert unmask("generate", "hello", "--no-enable-prefix-caching").exit_code == 0
    assert llm.options["enable_prefix_caching"] is False
    assert unmask("generate", "hello").exit_code == 0
    assert "enable_prefix_caching" not in llm.options


@pytest.mark.parametrize("option", ["--no-ignore-eos", "--no-allow-attention-mismatch", "--skip-special-tokens"])
def test_a_switch_that_is_decided_has_one_option_only(option, unmask, llm):
    assert unmask("generate", "hello", option).exit_code == 2
    assert llm.calls == []


@pytest.mark.parametrize("cls", [SamplingParams, EngineConfig])
def test_every_field_has_help(cls):
    assert set(field_docs(cls)) == set(typing.get_type_hints(cls))
    assert all(field_docs(cls).values())


def test_help_shows_the_docs_of_the_fields(unmask):
    words = " ".join(unmask("generate", "--help", COLUMNS="200").stdout.replace("│", " ").split())
    assert "Classifier-free guidance" in words
    assert "--suppress-eos" in words


def test_a_repeated_option_collects(unmask, llm):
    assert unmask("generate", "x", "--stop", "a", "--stop", "b", "--stop-token-id", "4").exit_code == 0
    params = llm.calls[0][2]
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (4,))


def test_json_config_takes_other_names_and_yields_to_options():
    params = make_params({"max_tokens": 8}, json.dumps({"gen_length": 64, "confidence_threshold": 0.7}))
    assert (params.max_tokens, params.threshold) == (8, 0.7)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[1]", "must be a JSON object"), ('{"treshold": 1}', "did you mean 'threshold'")],
)
def test_a_bad_json_config_is_told(text, message):
    with pytest.raises(ConfigError, match=message):
        make_params({}, text)


def test_options_that_contradict_each_other(unmask, llm):
    result = unmask("generate", "x", "--steps", "8", "--threshold", "0.9")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: steps=8")
    assert llm.calls == []


def test_chat_has_the_sampling_options_too(unmask, llm):
    assert unmask("chat", "--threshold", "0.8", stdin=b"hi\n").stdout.startswith(TEXT)
    assert llm.calls[0][2].threshold == 0.8
