"""Left to right in the served engine against a plain loop that runs the whole text for every token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from train.helpers import small_ar_config
from unmask import LLM, SamplingParams
from unmask.errors import MethodError
from unmask.models.loading import load_model
from unmask.models.transformer import Transformer
from unmask.train.loss import forward_logits
from unmask.train.modelling import export, model_config, new_model

MAX_TOKENS = 24
END = 0
PROMPTS = [[1, 3, 300, 400, 5], [1, 3, 700, 800, 900, 310, 320, 330, 5], [1, 3, 5], [1, 3, *range(500, 540), 5]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_ar_config()
    model = new_model(model_config(config), 0, torch.device("cpu"))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.endswith("norm.weight"):
                weight.mul_(12)  # far from the ties of fresh weights, and other tokens in other places
    weights = dict(model.named_parameters())
    out = tmp_path_factory.mktemp("ar") / "model"
    return export(weights, model.config, out, config.tokenizer, config.run.max_shard_bytes)


@torch.no_grad()
def plain(model: Transformer, prompt: Sequence[int]) -> list[int]:
    """The most probable next token, again and again, up to an end of text."""
    ids, reach = list(prompt), torch.tensor([len(prompt)])
    while len(ids) < len(prompt) + MAX_TOKENS:
        logits = forward_logits(model, torch.tensor([[*ids, END]]), reach)[0, len(ids)]
        logits[model.config.mask_token_id] = -torch.inf
        ids.append(int(logits.argmax()))
        if ids[-1] == END:
            break
    return ids[len(prompt) :]


def answers(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[tuple[list[int], int]]:
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    results = llm.generate(asked, SamplingParams(max_tokens=MAX_TOKENS))
    return [(list(r.outputs[0].token_ids), r.outputs[0].num_forward_passes) for r in results]


def test_greedy_decoding_equals_a_plain_loop_alone_and_in_a_batch(directory: Path) -> None:
    model = load_model(directory, dtype=torch.float32)
    llm = LLM(str(directory), device="cpu", dtype="float32", max_num_seqs=4)
    together = answers(llm, PROMPTS)
    for prompt, (ids, passes) in zip(PROMPTS, together):
        wanted = plain(model, prompt)
        assert len(set(wanted)) > 3
        assert [*ids, END][: len(wanted)] == wanted
        assert answers(llm, [prompt]) == [(ids, passes)]
        assert passes == len(wanted)


def test_such_weights_are_decoded_so_without_being_told(directory: Path) -> None:
    with pytest.raises(MethodError, match="trained for block-causal"):
        LLM(str(directory), device="cpu", method="confidence")
