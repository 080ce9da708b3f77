"""Prompts that were seen before, served by D2F: a hit gives what a miss gives, in as many rows less as the prompt has,
and every page is somebody's.

Cold is the same request in an engine that keeps nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.served import GOLDEN, Ask, answer_of, bare, drive, facts, load, pages, serve, without_rows
from oracles.flash import made_up_prompt
from unmask import LLM, MethodError, SamplingParams
from unmask.cache.pool import num_pages_for
from unmask.cache.prefix import Prefix, PrefixCache
from unmask.engine.outputs import CompletionOutput
from unmask.methods import METHODS

LENGTHS = [1, 15, 16, 17, 33]
BASE = SamplingParams(max_tokens=13, block_length=5, threshold=0.7, tau_act=0.5, trajectory=True, ignore_eos=True)
OTHERS = [
    BASE,
    BASE.replace(max_tokens=6, tau_act=1.0),
    BASE.replace(temperature=1.0, seed=3),
    BASE.replace(early_stop=False, stop_token_ids=(113, 272, 180)),
    BASE.replace(pipeline_depth=1, alg="entropy"),
]
models = pytest.mark.parametrize("model", GOLDEN)
lengths = pytest.mark.parametrize("length", LENGTHS)


def warm(model: str, **options: int) -> tuple[LLM, PrefixCache]:
    llm = load(model, bare("d2f"), **options)
    assert llm.engine.prefixes is not None, "on by itself"
    return llm, llm.engine.prefixes


def cold(model: str, ask: Ask) -> CompletionOutput:
    return _cold(model, replace(ask, arrives=0, leaves=None))


@cache
def _cold(model: str, ask: Ask) -> CompletionOutput:
    return serve(load(model, bare("d2f"), enable_prefix_caching=False), [ask])[0]


def check_hit(model: str, ask: Ask, out: CompletionOutput) -> None:
    """The same answer, and its prompt did not run."""
    want = cold(model, ask)
    assert without_rows(out) == without_rows(want)
    assert out.num_rows == want.num_rows - len(ask.prompt)


def check_miss(model: str, ask: Ask, out: CompletionOutput) -> None:
    assert facts(out) == facts(cold(model, ask))


def check_whole(llm: LLM) -> None:
    """Nobody is seated: what is used is what the cache keeps, and it can be had back."""
    pool, prefixes = llm.engine.pool, llm.engine.prefixes
    assert prefixes is not None
    assert pool.num_used == prefixes.num_pages
    prefixes.clear()
    assert (pool.num_used, prefixes.num_pages) == (0, 0)
    assert not llm.engine._found


# --- hits


@lengths
@models
def test_a_second_request_is_the_first_without_its_prompt(model: str, length: int) -> None:
    llm, prefixes = warm(model)
    asks = [Ask(made_up_prompt(length, 1), params) for params in OTHERS]
    for number, ask in enumerate(asks):
        (out,) = serve(llm, [ask])
        (check_hit if number else check_miss)(model, ask, out)
        assert prefixes.num_hits == number
    assert prefixes.num_pages == num_pages_for(length)
    check_whole(llm)


@models
def test_hits_beside_each_other_and_beside_the_donor(model: str) -> None:
    """Each writes its own answer, also into the page that the prompt fills in part."""
    llm, prefixes = warm(model, max_num_seqs=4)
    prompt = made_up_prompt(21, 2)
    asks = [Ask(prompt, params, arrives=min(number, 2)) for number, params in enumerate(OTHERS)]
    first, *others = serve(llm, asks)
    check_miss(model, asks[0], first)
    for ask, out in zip(asks[1:], others):
        check_hit(model, ask, out)
    assert prefixes.num_hits == len(asks) - 1
    check_whole(llm)


@models
def test_answers_of_one_request(model: str) -> None:
    """Those that are seated together are all cold; the rest find what the first has kept."""
    llm, prefixes = warm(model, max_num_seqs=2)
    params = BASE.replace(n=5, temperature=1.0, seed=4)
    prompt = made_up_prompt(18, 3)
    got = llm.generate({"prompt_token_ids": list(prompt)}, params)[0].outputs
    off = load(model, bare("d2f"), enable_prefix_caching=False, max_num_seqs=5)
    want = off.generate({"prompt_token_ids": list(prompt)}, params)[0].outputs
    assert [without_rows(each) for each in got] == [without_rows(each) for each in want]
    assert len({tuple(each.token_ids) for each in got}) > 2
    assert [theirs.num_rows - mine.num_rows for mine, theirs in zip(got, want)] == [0, 0, 18, 18, 18]
    assert prefixes.num_hits == 3
    check_whole(llm)


@pytest.mark.parametrize("leaves", [1, 2, 3])
@models
def test_the_donor_is_cancelled(model: str, leaves: int) -> None:
    """After its first pass the prompt's K/V are final, whatever becomes of its answer. Its pages go to others."""
    llm, prefixes = warm(model)
    prompt = made_up_prompt(20, 4)
    donor = Ask(prompt, BASE.replace(pipeline_depth=1), leaves=leaves)
    other = Ask(made_up_prompt(30, 5), BASE, arrives=leaves)
    ask = Ask(prompt, BASE.replace(max_tokens=9), arrives=leaves)
    answers = drive(llm, [donor, other, ask, replace(ask, arrives=leaves + 1)])
    assert answers[0].output is None, "it was not done"
    for answer in answers[2:]:
        assert answer.output is not None
        check_hit(model, ask, answer.output)
    assert prefixes.num_hits == 2
    check_whole(llm)


@models
def test_a_donor_that_never_ran_gives_nothing(model: str) -> None:
    llm, prefixes = warm(model)
    ask = Ask(made_up_prompt(20, 4), BASE)
    answer = answer_of(llm, ask)
    llm.engine.add(answer)
    llm.engine.abort(answer)
    assert prefixes.num_pages == 0
    (out,) = serve(llm, [ask])
    check_miss(model, ask, out)
    check_whole(llm)


@models
def test_infilling_finds_and_leaves_the_prompt_before_it(model: str) -> None:
    """The holes may begin anywhere. On Dream the row that scores the first one is kept only if that is asked for."""
    prompt, holes = made_up_prompt(18, 6), BASE.replace(ignore_eos=False)
    later = Ask(prompt, holes, (5, 6, None, None, 7, None, None))
    sooner = Ask(prompt, holes, (None, 6, None, None, 7, None, None))
    plain = Ask(prompt, BASE)
    shift = load(model, bare("d2f")).model.config.logit_shift
    for donor, asks in ((plain, [later, sooner]), (sooner, [later, plain]), (later, [later, sooner, plain])):
        llm, prefixes = warm(model)
        (out,) = serve(llm, [donor])
        check_miss(model, donor, out)
        keeps = not (shift and donor is later)
        assert (prefixes.num_pages > 0) == keeps
        if keeps:
            for ask in asks:
                (out,) = serve(llm, [ask])
                check_hit(model, ask, out)
        check_whole(llm)


# --- misses


@models
def test_leading_tokens_are_not_enough(model: str) -> None:
    """The prompt sees itself in both directions: whole pages of it differ with what follows them."""
    llm, prefixes = warm(model)
    prompt = made_up_prompt(33, 7)
    asks = [Ask(each, BASE) for each in (prompt, (*prompt[:32], 299), prompt[:32], (*prompt, 5), prompt[:16])]
    for ask, out in zip(asks, serve(llm, asks)):
        check_miss(model, ask, out)
    assert prefixes.num_hits == 0
    for ask, out in zip(asks, serve(llm, asks)):
        check_hit(model, ask, out)
    assert prefixes.num_hits == len(asks)
    check_whole(llm)


@models
def test_guided_requests_do_not_share(model: str) -> None:
    """Their twin has another prompt. They neither find nor leave anything."""
    llm, prefixes = warm(model)
    ask = Ask(made_up_prompt(19, 8), BASE)
    guided = replace(ask, params=BASE.replace(cfg_scale=1.5))
    for each, check in (
        (guided, check_miss),
        (guided, check_miss),
        (ask, check_miss),
        (guided, check_miss),
        (ask, check_hit),
    ):
        (out,) = serve(llm, [each])
        check(model, each, out)
    assert (prefixes.num_queries, prefixes.num_hits) == (2, 1)
    check_whole(llm)


@models
def test_after_eviction(model: str) -> None:
    """Cold, warm, evicted by others that take its pages, cold, warm: one answer."""
    llm, prefixes = warm(model, max_model_len=64, max_num_seqs=2, **pages(model, 6))
    assert llm.engine.pool.num_pages == 6
    asks = [Ask(made_up_prompt(length, 9), BASE) for length in (17, 33, 40, 32)]
    for check in (check_miss, check_hit):
        (out,) = serve(llm, asks[:1])
        check(model, asks[0], out)
    hits = prefixes.num_hits
    for _ in range(2):
        for ask, out in zip(asks[1:], serve(llm, asks[1:])):
            assert without_rows(out) == without_rows(cold(model, ask))
    assert prefixes.find(asks[0].prompt) is None, "others needed its pages"
    for check in (check_miss, check_hit):
        (out,) = serve(llm, asks[:1])
        check(model, asks[0], out)
    assert prefixes.num_hits > hits
    check_whole(llm)


@models
def test_a_canvas_that_fills_the_pool_evicts_its_own_prompt(model: str) -> None:
    llm, _ = warm(model, max_model_len=48, max_num_seqs=2, **pages(model, 3))
    ask = Ask(made_up_prompt(17, 9), BASE.replace(max_tokens=31))
    for _ in range(3):
        (out,) = serve(llm, [ask])
        check_miss(model, ask, out)
    short = replace(ask, params=BASE)
    for check in (check_miss, check_hit):
        (out,) = serve(llm, [short])
        check(model, short, out)
    check_whole(llm)


# --- whatever comes


@st.composite
def loads(draw: st.DrawFn) -> list[Ask]:
    """Requests with few prompts, some of which begin alike."""
    asks = []
    for _ in range(draw(st.integers(2, 9))):
        prompt = made_up_prompt(33, draw(st.integers(0, 1)))[: draw(st.sampled_from(LENGTHS))]
        params = draw(st.sampled_from(OTHERS)).replace(cfg_scale=draw(st.sampled_from([0.0] * 5 + [1.0])))
        arrives = draw(st.integers(0, 12))
        leaves = arrives + draw(st.integers(0, 5)) if draw(st.integers(0, 3)) == 0 else None
        asks.append(Ask(prompt, params, arrives=arrives, leaves=leaves))
    return asks


@pytest.mark.parametrize("num_pages", [4, 7, 50])
@models
def test_whatever_comes_and_goes(model: str, num_pages: int) -> None:
    """Every answer is the cold one, in its rows or in those without the prompt; nothing is lost."""
    hits = 0

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(loads())
    def check(asks: list[Ask]) -> None:
        nonlocal hits
        llm, prefixes = warm(model, max_model_len=64, **pages(model, num_pages))
        asks = [ask for ask in asks if fits(ask, num_pages)]
        for ask, answer in zip(asks, drive(llm, asks)):
            if answer.output is not None:
                want = cold(model, ask)
                assert without_rows(answer.output) == without_rows(want)
                assert answer.output.num_rows in (want.num_rows, want.num_rows - len(ask.prompt))
        hits += prefixes.num_hits
        check_whole(llm)

    check()
    assert hits > 1


def fits(ask: Ask, num_pages: int) -> bool:
    assert ask.params.max_tokens is not None
    seats = 2 if ask.params.cfg_scale else 1
    return seats * num_pages_for(len(ask.prompt) + ask.params.max_tokens) <= num_pages


# --- on and off


def test_off() -> None:
    llm = load("tiny-llada", bare("d2f"), enable_prefix_caching=False)
    assert llm.engine.prefixes is None
    ask = Ask(made_up_prompt(20, 1), BASE)
    first, second = serve(llm, [ask]), serve(llm, [ask])
    assert facts(first[0]) == facts(second[0])
    assert llm.engine.pool.num_used == 0


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].policy != "block-causal"])
def test_other_caches_cannot(name: str) -> None:
    """A prompt's K/V depend on what follows it there."""
    model = "tiny-llada"
    with pytest.raises(MethodError, match="enable_prefix_caching"):
        load(model, METHODS[name], enable_prefix_caching=True)
    assert load(model, METHODS[name]).engine.prefixes is None


# --- the checks themselves


@lengths
def test_broken_numbers_are_noticed(length: int) -> None:
    """Negative control: what a hit reads matters, and on Dream so does the kept row."""
    ask = Ask(made_up_prompt(length, 1), BASE)
    for model in GOLDEN[1:]:
        for broken in ("pages", "row"):
            llm, prefixes = warm(model)
            serve(llm, [ask])
            prefix = prefixes.find(ask.prompt)
            assert prefix is not None
            if broken == "pages":
                for page in prefix.pages:
                    llm.engine.pool.v[:, 16 * page : 16 * page + 16] *= -1
            elif prefix.hidden_D is None:
                continue
            else:
                with torch.inference_mode():
                    prefix.hidden_D.zero_()
            (out,) = serve(llm, [ask])
            with pytest.raises(AssertionError):
                check_hit(model, ask, out)


def test_a_cache_that_is_content_with_the_beginning_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a hit by the first page's tokens, as caches for causal models have them."""

    def find(self: PrefixCache, prompt: Sequence[int], *, count: bool = True) -> Prefix | None:  # noqa: ARG001
        alike = [each for key, each in self._prefixes.items() if key[:16] == tuple(prompt)[:16]]
        return next((each for each in alike if len(each.prompt) == len(prompt)), None)

    monkeypatch.setattr(PrefixCache, "find", find)
    prompt = made_up_prompt(33, 7)
    llm, _ = warm("tiny-llada")
    serve(llm, [Ask(prompt, BASE)])
    other = Ask((*prompt[:32], 299), BASE)
    (out,) = serve(llm, [other])
    assert without_rows(out) != without_rows(cold("tiny-llada", other))
