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
    assert unmask("generate", "hello", option_name(field), "32").exit_code == 0
    assert llm.options[field.name] == 32


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
