"""Faults that users of other caches reported, each with its check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.served import bare, load
from oracles.d2f import block_kv
from oracles.flash import made_up_prompt
from oracles.golden import tiny_model
from stubs import Stub
from unmask import LLM, ConfigError, SamplingParams
from unmask.cache.policy import Dual, Limits
from unmask.core.canvas import Canvas
from unmask.engine.step import Look

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


@pytest.mark.parametrize("name", [*CACHED, "d2f"])
@pytest.mark.parametrize("model", ["tiny-llada", "tiny-dream"])
def test_b22_a_neighbour_does_not_touch_the_cache(model: str, name: str) -> None:
    """The first seat's K/V are those beside any other prompt, and beside none, while it decodes; another first prompt
    changes them."""
    first, others = made_up_prompt(11, 1), [[made_up_prompt(20, 2)], [made_up_prompt(3, 3), made_up_prompt(11, 4)], []]
    for num_steps in (1, 3):
        alone, *kept = (kv_of_first(load(model, bare(name)), [first, *rest], num_steps) for rest in reversed(others))
        for each in kept:
            torch.testing.assert_close(each, alone, atol=1e-12, rtol=0)
        changed = kv_of_first(load(model, bare(name)), [made_up_prompt(11, 5), *others[0]], num_steps)
        assert not torch.allclose(alone, changed, atol=1e-3)


# --- B23: https://github.com/NVlabs/Fast-dLLM/issues/52, https://github.com/tenstorrent/vllm-tt-plugin/pull/32

PROMPT, BLOCK, BLOCKS, STEPS = 10, 8, 3, 4
WHOLE = PROMPT + BLOCK * BLOCKS


def positions_run(method: str) -> list[list[int]]:
    """Positions of each pass of a request with three blocks of four steps."""
    stub = Stub(lambda _view: {7: 0.5})
    llm = LLM(model=stub, method=method, tokenizer=None)
    params = SamplingParams(max_tokens=BLOCK * BLOCKS, block_length=BLOCK, steps=BLOCKS * STEPS, ignore_eos=True)
    answers(llm, [list(range(1, PROMPT + 1))], params)
    ran = [sorted(sequence) for call in stub.calls for sequence in call.sequences]
    assert [len(positions) for positions in ran] == [call.num_rows for call in stub.calls]
    return ran


def rows_run(method: str) -> list[int]:
    """Rows of each of these passes."""
    return [len(positions) for positions in positions_run(method)]


def test_b23_one_whole_pass_a_block() -> None:
    """The rest are the block (dual), or it and what follows (prefix); without a cache all are whole."""
    behind = [BLOCK * (BLOCKS - block) for block in range(BLOCKS)]
    assert rows_run("vanilla") == [WHOLE] * BLOCKS * STEPS
    assert rows_run("fast-dllm-dual") == ([WHOLE] + [BLOCK] * (STEPS - 1)) * BLOCKS
    assert rows_run("fast-dllm-prefix") == [rows for rest in behind for rows in [WHOLE] + [rest] * (STEPS - 1)]


def test_b23_what_is_kept_is_not_run_inside_a_block() -> None:
    """The rows are those of the block, and of nothing before it."""
    for method, until_the_end in (("fast-dllm-dual", False), ("fast-dllm-prefix", True)):
        for number, positions in enumerate(positions_run(method)):
            start = PROMPT + BLOCK * (number // STEPS)
            stop = WHOLE if until_the_end else start + BLOCK
            assert positions == list(range(start, stop) if number % STEPS else range(WHOLE))


def test_b23_sealed_blocks_are_not_run_again() -> None:
    """One token a step: a block runs in its eight steps and in the first one of the next block."""
    stub = Stub(lambda _view: {7: 0.5})
    llm = LLM(model=stub, method=bare("d2f"), tokenizer=None, allow_attention_mismatch=True)
    said: dict[str, Any] = dict.fromkeys(("threshold", "tau_add", "tau_act"), 1.0)
    params = SamplingParams(max_tokens=BLOCK * BLOCKS, block_length=BLOCK, ignore_eos=True, **said)
    answers(llm, [list(range(1, PROMPT + 1))], params)
    starts = [PROMPT + BLOCK * block for block in range(BLOCKS)]
    for number, call in enumerate(stub.calls):
        (ran,) = call.sequences
        block, place = divmod(number, BLOCK)
        first = ([0, *starts][block] if place == 0 else starts[block]) if number else 0
        assert sorted(ran) == list(range(first, starts[block] + BLOCK))
    assert len(stub.calls) == BLOCK * BLOCKS


def test_b23_a_cache_that_is_always_rebuilt_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def due(self: Dual, canvas: Canvas, limits: Limits) -> Tensor:  # noqa: ARG001
        return torch.ones_like(canvas.active_S)

    monkeypatch.setattr(Dual, "due", due)
    assert rows_run("fast-dllm-dual") == [WHOLE] * BLOCKS * STEPS


def test_b23_prompts_run_once_under_the_other_caches() -> None:
    """The whole canvas once (flash-cache), or the prompt once with the first block (d2f)."""
    stub = Stub(lambda _view: {7: 0.95})
    llm = LLM(model=stub, method=bare("flash-cache"), tokenizer=None)
    window: dict[str, Any] = {"threshold": 0.99, "decode_window": 4, "refresh_window": 4, "track": 4, "max_tokens": 24}
    answers(llm, [list(range(1, 51))], SamplingParams(ignore_eos=True, **window))
    rows = [call.num_rows for call in stub.calls]
    assert rows[0] == 74
    assert max(rows[1:]) <= 8
    stub = Stub(lambda _view: {7: 0.95})
    llm = LLM(model=stub, method=bare("d2f"), tokenizer=None, allow_attention_mismatch=True)
    said: dict[str, Any] = {"threshold": 0.9, "tau_add": 0.5, "tau_act": 0.9, "pipeline_depth": 2}
    answers(llm, [list(range(1, 51))], SamplingParams(max_tokens=24, block_length=8, ignore_eos=True, **said))
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


def angles_of_rows(model: str, prompt: int, **params: Any) -> list[tuple[list[int], Tensor, list[int]]]:
    """Of each pass: the positions that ran, their rotated keys in the first layer, and all tokens before it."""
    llm, passes = load(model, bare("flash-cache")), list[tuple[list[int], Tensor, list[int]]]()
    program, pool = llm.engine.step_program, llm.engine.pool
    run = program.run

    def spy(look: Look) -> None:
        tokens = program.canvas.token_SN[0].tolist()
        run(look)
        ran_n = look.run_SN[0].nonzero()[:, 0]
        entry_n = pool.page_table_SP[0].long()[ran_n // 16] * 16 + ran_n % 16
        passes.append((ran_n.tolist(), pool.k[0, entry_n].clone(), tokens))

    program.run = spy  # type: ignore[method-assign]
    said = SamplingParams(decode_window=5, threshold=0.6, max_tokens=20, ignore_eos=True, **params)
    answers(llm, [made_up_prompt(prompt, 8)], said)
    return passes


@pytest.mark.parametrize("model", ["tiny-llada", "tiny-dream"])
def test_x2_rows_with_gaps_have_their_own_angles(model: str) -> None:
    """A key of the first layer depends on its token and its position alone. With the angles of rows that follow each
    other, as a cache that knows only how many there are would give them, the check fails."""
    network, with_gaps = tiny_model(model, None, torch.float64), 0
    for ran, keys, tokens in angles_of_rows(model, 30, track=6, refresh_window=9):
        exact, _ = block_kv(network, tokens, 0, len(tokens))[0]
        torch.testing.assert_close(keys, exact[ran], atol=1e-9, rtol=0)
        if max(ran) - min(ran) + 1 > len(ran):
            with_gaps += 1
            close = block_kv(network, [tokens[n] for n in ran], 0, len(ran))[0][0]
            assert not torch.allclose(keys, close, atol=1e-3)
    assert with_gaps > 3


def test_x2_everything_tracked_is_no_cache() -> None:
    said = SamplingParams(decode_window=5, threshold=0.6, max_tokens=20, ignore_eos=True)
    prompt, saturated = made_up_prompt(30, 8), said.replace(track=100, refresh_window=100)
    whole = answers(load("tiny-llada", bare("window")), [prompt], said)
    assert answers(load("tiny-llada", bare("flash-cache")), [prompt], saturated) == whole


def test_x2_shared_pages_are_not_written_by_who_reads_them() -> None:
    """A kept prompt's K/V are bit for bit the same after others have read them and written behind them."""
    llm, prompt = load("tiny-llada", bare("d2f"), max_num_seqs=4), made_up_prompt(37, 6)
    said = PARAMS.replace(tau_add=0.1, tau_act=0.9)
    answers(llm, [prompt], said)
    assert llm.engine.prefixes is not None
    prefix = llm.engine.prefixes.find(prompt)
    assert prefix is not None
    entries = (torch.tensor(prefix.pages)[:, None] * 16 + torch.arange(16)).flatten()
    before = [plane[:, entries].clone() for plane in (llm.engine.pool.k, llm.engine.pool.v)]
    cold = load("tiny-llada", bare("d2f"), enable_prefix_caching=False)
    asked = [said.replace(temperature=1.0, seed=seed) for seed in range(4)]
    got = llm.generate([{"prompt_token_ids": list(prompt)}] * 4, asked)
    want = cold.generate([{"prompt_token_ids": list(prompt)}] * 4, asked)
    assert [out.outputs[0].token_ids for out in got] == [out.outputs[0].token_ids for out in want]
    assert llm.engine.prefixes.num_hits == 5
    for old, plane in zip(before, (llm.engine.pool.k, llm.engine.pool.v)):
        assert torch.equal(plane[:, entries], old)
