"""The model that ships: it is what its record says, it solves what it was made for, and nothing upsets it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from unmask import LLM, SamplingParams
from unmask.cli.catalog import shipped_dir
from unmask.eval.word_problems import held_out, score
from unmask.models.loading import load_model
from unmask.train import load_config

ROOT = Path(__file__).parents[1]
RECORD = json.loads((ROOT / "docs" / "results" / "unmask-mini" / "run.json").read_text())
GSM8K = Path(__file__).parent / "data" / "gsm8k_sample.jsonl"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def foreign() -> list[str]:
    """Questions that it was not made for."""
    return [json.loads(line)["question"] for line in GSM8K.read_text(encoding="utf-8").splitlines()]


def plain(value: Any) -> Any:
    """As JSON has it: mappings with string keys, lists."""
    return json.loads(json.dumps(value, default=dataclasses.asdict))


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Every leaf by its path, so that a difference names itself."""
    if not isinstance(value, (dict, list)):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {path: leaf for key, part in items for path, leaf in flat(part, f"{name}.{key}").items()}


def test_the_packaged_config_is_the_one_that_made_it() -> None:
    ours, recorded = plain(load_config("unmask-mini").to_dict()), dict(RECORD["config"])
    assert Path(ours.pop("tokenizer")).name == Path(recorded.pop("tokenizer")).name == "unmask-mini"
    assert flat(ours) == flat(recorded)


def test_the_record_is_of_these_weights() -> None:
    directory = shipped_dir()
    assert directory is not None
    assert sum(parameter.numel() for parameter in load_model(directory).parameters()) == RECORD["parameters"]
    assert [stage["name"] for stage in RECORD["config"]["stages"]] == RECORD["done"]
    config = json.loads((directory / "config.json").read_text())
    shared = set(config) & set(RECORD["model"])
    assert {name: config[name] for name in shared} == {name: RECORD["model"][name] for name in shared}


def test_it_solves_problems_that_it_has_not_seen(llm: LLM) -> None:
    result = score(llm, held_out(60), SamplingParams())
    assert result.accuracy >= 0.9
    assert result.tokens_per_pass > 4
    assert result.num_length == 0


def test_foreign_questions_survive_the_tokenizer(llm: LLM, foreign: list[str]) -> None:
    assert len(foreign) == 100
    for question in foreign:
        assert llm.tokenizer.decode(llm.tokenizer.encode(question)) == question


def test_foreign_questions_are_answered_without_an_error(llm: LLM, foreign: list[str]) -> None:
    conversations = [[{"role": "user", "content": question}] for question in foreign]
    results = llm.chat(conversations, SamplingParams(max_tokens=16, steps=1, block_length=0))
    assert len(results) == 100
    for result in results:
        assert llm.tokenizer.decode(result.outputs[0].token_ids) == result.outputs[0].text


def test_a_long_request_fits(llm: LLM) -> None:
    assert llm.max_model_len == 1024
    words = "Sam has 7 grapes. " * 120
    ids = llm.tokenizer.encode(words)[:700]
    result = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=324, block_length=0, steps=2))[0]
    assert len(result.prompt_token_ids) == 700
    with pytest.raises(ValueError, match="ask for at most 324"):
        llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=325))


def test_several_problems_in_one_request(llm: LLM) -> None:
    result = score(llm, held_out(2, per_request=3), SamplingParams(max_tokens=256))
    assert result.num_problems == 6
    assert result.num_correct >= 4


def test_text_before_a_hole_is_cut_as_if_the_answer_stood_there() -> None:
    """A space before a number belongs to the token before it; with the hole in its place it must still do so."""
    llm = LLM()
    conversation = [{"role": "user", "content": "Tom has 57 pens and buys 25 more. How many pens does Tom have now?"}]
    whole = "He has 57 + 25 = 82 pens\n#### 82"
    for draft in (whole.replace("= 82", "= [[2]]"), whole.replace("82 pens", "[[2]] pens"), whole[:-2] + "[[2]]"):
        ids = llm.infill(draft, messages=conversation).outputs[0].token_ids
        assert len(ids) == len(llm.tokenizer.encode(whole)), draft
    filled = llm.infill(whole.replace("= 82", "= [[2]]"), messages=conversation)
    assert filled.outputs[0].token_ids == llm.tokenizer.encode(whole)
    assert filled.outputs[0].num_committed == 2
