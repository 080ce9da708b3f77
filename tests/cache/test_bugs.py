"""Faults that users of other caches reported, each with its check."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.served import bare, load
from oracles.flash import made_up_prompt
from stubs import Stub
from unmask import LLM, ConfigError, SamplingParams
from unmask.cache.policy import Dual, Limits
from unmask.core.canvas import Canvas

CACHED = ("fast-dllm-prefix", "fast-dllm-dual")
PARAMS = SamplingParams(max_tokens=12, block_length=4, threshold=0.6, ignore_eos=True)


def answers(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams = PARAMS) -> list[list[int]]:
    outs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], [params] * len(prompts))
    return [out.outputs[0].token_ids for out in outs]


def kv_of_first(llm: LLM, prompts: Sequence[Sequence[int]], num_steps: int) -> Tensor:
    """K and V of the first request's canvas after so many steps."""
    engine = llm.engine
    made = [llm.prompts.request({"prompt_token_ids": list(prompt)}, PARAMS).answers[0] for prompt in prompts]
    for answer in made:
        engine.add(answer)
    for _ in range(num_steps):
        engine.step()
    pages = torch.tensor(engine.pool.pages(made[0].seat))
    entries = (pages[:, None] * 16 + torch.arange(16)).flatten()[: made[0].length]
    out = torch.stack([plane[:, entries] for plane in (engine.pool.k, engine.pool.v)]).clone()
    for answer in made:
        engine.abort(answer)
    return out


# --- B22: https://github.com/NVlabs/Fast-dLLM/pull/17, https://github.com/NVlabs/Fast-dLLM/pull/57


@pytest.mark.parametrize("lengths", [(9,), (9, 9), (9, 9, 9), (5, 14), (5, 1, 23)])
@pytest.mark.parametrize("model", ["tiny-llada", "tiny-dream"])
def test_b22_block_caches_in_batches(model: str, lengths: tuple[int, ...]) -> None:
    prompts = [made_up_prompt(length, seed) for seed, length in enumerate(lengths)]
    for name in CACHED:
        alone = [answers(load(model, bare(name)), [prompt])[0] for prompt in prompts]
        assert answers(load(model, bare(name)), prompts) == alone


def test_b22_a_neighbour_does_not_touch_the_cache() -> None:
    """The first seat's K/V are those beside any other prompt, while it decodes; another first prompt changes them."""
    first, others = made_up_prompt(11, 1), [made_up_prompt(20, 2), made_up_prompt(3, 3)]
    for num_steps in (1, 3):
        kept = [kv_of_first(load("tiny-llada", bare("fast-dllm-dual")), [first, other], num_steps) for other in others]
        torch.testing.assert_close(kept[0], kept[1], atol=1e-12, rtol=0)
        changed = kv_of_first(load("tiny-llada", bare("fast-dllm-dual")), [made_up_prompt(11, 5), others[0]], num_steps)
        assert not torch.allclose(kept[0], changed, atol=1e-3)


# --- B23: https://github.com/NVlabs/Fast-dLLM/issues/52, https://github.com/tenstorrent/vllm-tt-plugin/pull/32

PROMPT, BLOCK, BLOCKS, STEPS = 10, 8, 3, 4
WHOLE = PROMPT + BLOCK * BLOCKS


def rows_run(method: str) -> list[int]:
    """Rows of each pass of a request with three blocks of four steps."""
    stub = Stub(lambda _view: {7: 0.5})
    llm = LLM(model=stub, method=method, tokenizer=None)
    params = SamplingParams(max_tokens=BLOCK * BLOCKS, block_length=BLOCK, steps=BLOCKS * STEPS, ignore_eos=True)
    answers(llm, [list(range(1, PROMPT + 1))], params)
    return [call.num_rows for call in stub.calls]


def test_b23_one_whole_pass_a_block() -> None:
    """The rest are the block (dual), or it and what follows (prefix); without a cache all are whole."""
    behind = [BLOCK * (BLOCKS - block) for block in range(BLOCKS)]
    assert rows_run("vanilla") == [WHOLE] * BLOCKS * STEPS
    assert rows_run("fast-dllm-dual") == ([WHOLE] + [BLOCK] * (STEPS - 1)) * BLOCKS
    assert rows_run("fast-dllm-prefix") == [rows for rest in behind for rows in [WHOLE] + [rest] * (STEPS - 1)]


def test_b23_a_cache_that_is_always_rebuilt_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def due(self: Dual, canvas: Canvas, limits: Limits) -> Tensor:  # noqa: ARG001
        return torch.ones_like(canvas.active_S)

    monkeypatch.setattr(Dual, "due", due)
    assert rows_run("fast-dllm-dual") == [WHOLE] * BLOCKS * STEPS


def test_b23_prompts_run_once_under_the_other_caches() -> None:
    """The whole canvas once (flash-cache), or the prompt once with the first block (d2f)."""
    stub = Stub(lambda _view: {7: 0.95})
    llm = LLM(model=stub, method=bare("flash-cache"), tokenizer=None)
    window = {"threshold": 0.99, "decode_window": 4, "refresh_window": 4, "track": 4, "max_tokens": 24}
    answers(llm, [list(range(1, 51))], SamplingParams(ignore_eos=True, **window))
    rows = [call.num_rows for call in stub.calls]
    assert rows[0] == 74
    assert max(rows[1:]) <= 8
    stub = Stub(lambda _view: {7: 0.95})
    llm = LLM(model=stub, method=bare("d2f"), tokenizer=None, allow_attention_mismatch=True)
    said = {"threshold": 0.9, "tau_add": 0.5, "tau_act": 0.9, "pipeline_depth": 2, "max_tokens": 24, "block_length": 8}
    answers(llm, [list(range(1, 51))], SamplingParams(ignore_eos=True, **said))
    rows = [call.num_rows for call in stub.calls]
    assert rows[0] == 58
    assert max(rows[1:]) <= 16


# --- B25: https://github.com/tenstorrent/vllm/issues/415, https://github.com/tanishqkumar/ssd/issues/23


@pytest.mark.parametrize("model", ["tiny-llada", "tiny-dream"])
def test_b25_cold_warm_and_after_eviction(model: str) -> None:
    """Also a prompt that shares the leading tokens only, whose K/V differ from its first position on."""
    system = made_up_prompt(33, 4)
    prompts = [system, (*system, 5, 6), (*system[:32], 9), system[:16]]
    said = PARAMS.replace(tau_add=0.1, tau_act=0.9, pipeline_depth=3)
    cold = [answers(load(model, bare("d2f"), enable_prefix_caching=False), [prompt], said)[0] for prompt in prompts]
    llm = load(model, bare("d2f"), max_num_seqs=2)
    assert [answers(llm, [prompt], said)[0] for prompt in prompts] == cold
    assert [answers(llm, [prompt], said)[0] for prompt in prompts] == cold
    prefixes = llm.engine.prefixes
    assert prefixes is not None
    assert (prefixes.num_queries, prefixes.num_hits) == (8, 4)
    for seed in range(40):  # more prompts than the pool holds
        answers(llm, [made_up_prompt(100, 50 + seed)], said)
    assert [answers(llm, [prompt], said)[0] for prompt in prompts] == cold


@pytest.mark.parametrize("name", [*CACHED, "flash-cache", "confidence"])
def test_b25_no_reuse_where_a_prompt_depends_on_what_follows(name: str) -> None:
    with pytest.raises(ConfigError, match="depend on what follows"):
        load("tiny-llada", bare(name), enable_prefix_caching=True)
    assert load("tiny-llada", bare(name)).engine.prefixes is None


# --- from reading Fast-dLLM's modeling_llada.py: rows that do not follow each other had their neighbours' angles


def test_x2_rows_with_gaps_have_their_own_angles() -> None:
    """Everything tracked but the prompt's middle, in one engine; the yardstick recomputes all."""
    params = {"decode_window": 5, "threshold": 0.6, "max_tokens": 20, "ignore_eos": True}
    prompt = made_up_prompt(30, 8)
    whole = answers(load("tiny-llada", bare("window")), [prompt], SamplingParams(**params))
    saturated = SamplingParams(**params, track=100, refresh_window=100)
    assert answers(load("tiny-llada", bare("flash-cache")), [prompt], saturated) == whole
    llm = load("tiny-llada", bare("flash-cache"))
    ran: list[list[int]] = []
    program = llm.engine.step_program
    run = program.run
    program.run = lambda look: (ran.append(look.run_SN[0].nonzero()[:, 0].tolist()), run(look))[1]  # type: ignore
    answers(llm, [prompt], SamplingParams(**params, track=6, refresh_window=9))
    assert any(max(rows) - min(rows) + 1 > len(rows) for rows in ran), "some pass has gaps"
