"""Every cache has a setting at which it is no cache, or is exact: there the served engine gives the same tokens in the
same passes as with everything recomputed. In mixed batches, guided, drawn, ending early, and with tokens given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.served import COMMON, GOLDEN, Ask, answer_of, bare, facts, load, messages_of, serve, text_of, without_rows
from engine.test_d2f_promises import SealedAtOnce, pipelined
from oracles.flash import made_up_prompt
from unmask import LLM, SamplingParams
from unmask.engine import axes, prompts
from unmask.engine.graphs import FixedSteps
from unmask.engine.outputs import CompletionOutput
from unmask.methods import FRONTIERS, Method

drawn = settings(max_examples=6, deadline=None, derandomize=True)
LLADA = GOLDEN[:2]
BOTH = GOLDEN[1:]
"""Of each family."""


@dataclass(frozen=True)
class Pair:
    """A cache at the setting at which it is none, and what it should equal."""

    name: str
    method: Method
    saturated: Mapping[str, Any]
    """Fields of a request; for `unsaturated`, the negative control, others."""
    unsaturated: Mapping[str, Any]
    yardstick: Method
    yardstick_says: Mapping[str, Any]
    models: Sequence[str] = GOLDEN
    guided: bool = True
    told: Callable[[CompletionOutput], Any] = facts
    """What of an output must be equal."""
    unsaturated_method: Method | None = None
    """Where the setting is an option, not a field of a request."""
    fixed: bool = False
    """Its ordinary passes are to be of fixed shape: some of a saturated run are."""

    @property
    def leads(self) -> bool:
        """On Dream it decides a block's first position first, and so must the yardstick."""
        return self.method.policy in ("prefix", "dual")

    def engine(self, model: str, method: Method) -> LLM:
        llm = load(model, method)
        if self.fixed:
            llm.engine.fixed = FixedSteps(llm.engine.step_program, capture=lambda step: step)
        return llm


def by_step(out: CompletionOutput) -> Any:
    """A verifying method has two passes in a step."""
    return facts(replace(out, num_rows=0, num_forward_passes=0))


NO_TRACKING = {"track": 200, "refresh_window": 200}
TRACKING = {"track": 1, "refresh_window": 1}
FLASH = {"track": 6, "refresh_window": 9}
TWO_PASS = {"search": 4}
ALWAYS = {"refresh_interval": 1}
ANEW = {"refresh_interval": 1, "answer_interval": 1}
FEW = {"ratio": 0.25}
WRITES = ("dense", "values", "sparse")


def drift(frontier: str = "blocks", **options: Any) -> Method:
    return bare("dllm-cache", frontier=frontier, options=options)


def elastic(frontier: str = "window", **options: Any) -> Method:
    return bare("elastic-cache", frontier=frontier, options=options)


def plain(frontier: str) -> Method:
    """No cache."""
    return bare("confidence", frontier=frontier)


def drifting() -> Iterator[Pair]:
    """Everything is renewed in every pass; or the prompt is, and every row of the answer is chosen; or it is chosen
    where another run renews the answer, beside a prompt that is old in both."""
    spa = {"identifier": "proxy", "writes": "dense", "refresh": "together"}
    for name, frontier, options in (
        ("dllm-cache", "blocks", {}),
        ("spa-cache", "window", spa),
        ("drift-input", "whole", {"identifier": "input", "writes": "sparse", "kept": "chosen"}),
    ):
        yield Pair(name, drift(frontier, **options, **FEW), ANEW, {}, plain(frontier), {}, models=BOTH)
    for writes, frontier, options in zip(
        WRITES,
        ("blocks", "window", "whole"),
        ({"identifier": "proxy"}, {}, {"identifier": "input", "new_first": "yes"}),
    ):
        every, some = (drift(frontier, writes=writes, **options, ratio=ratio) for ratio in (1.0, 0.25))
        name = f"drift-all-chosen-{writes}"
        yield Pair(name, every, ALWAYS, ALWAYS, plain(frontier), {}, models=BOTH, unsaturated_method=some)
    every, some = (drift("blocks", **spa, ratio=ratio) for ratio in (1.0, 0.25))
    seldom, anew = {"refresh_interval": 4}, {"refresh_interval": 4, "answer_interval": 1}
    for fixed in (False, True):
        name = "drift-all-chosen-is-anew" + "-fixed" * fixed
        yield Pair(name, every, seldom, seldom, some, anew, models=BOTH, unsaturated_method=some, fixed=fixed)


def delayed() -> Iterator[Pair]:
    """With a refresh in every pass. What is kept for good, `prefill` and `pd`, has no such setting."""
    for variant, frontier in (("decode", "blocks"), ("decode", "window"), ("greedy", "blocks"), ("greedy", "whole")):
        said = {"frontier": frontier, "schedule": "even" if frontier == "window" else "family"}
        method = bare("dkv-cache", **said, options={"variant": variant})
        yardstick = bare("dkv-cache", **said, policy="recompute")
        yield Pair(f"dkv-{variant}-{frontier}", method, ALWAYS, {}, yardstick, {}, models=BOTH)


def elastics() -> Iterator[Pair]:
    """Every pass trips in the first layer, which is redone; or none does, and every position runs all the same."""
    for frontier, masks in (("window", "window"), ("blocks", "all"), ("block-window", "window")):
        method, never = elastic(frontier, tripping="redo", masks=masks), {"track": 2, "drift_threshold": 0.0}
        tripping = {"track": 2, "drift_threshold": 2.0}
        yield Pair(f"elastic-{frontier}", method, tripping, never, plain(frontier), {}, models=LLADA[1:], guided=False)
    kept = elastic(masks="all", tripping="keep")
    said = {"track": 200, "drift_threshold": 0.0}
    yield Pair(
        "elastic-all-tracked", kept, said, said | {"track": 1}, plain("window"), {}, models=LLADA[1:], guided=False
    )


PAIRS = [
    *(
        Pair(
            name,
            bare(name),
            {"refresh_interval": 1},
            {},
            bare(name, policy="recompute"),
            {},
        )
        for name in ("fast-dllm-dual", "fast-dllm-prefix")
    ),
    Pair("flash-cache", bare("flash-cache"), NO_TRACKING, TRACKING, bare("window"), {}),
    Pair(
        "flash-cache-refreshed",
        bare("flash-cache"),
        {**TRACKING, "refresh_interval": 1},
        TRACKING,
        bare("window"),
        {},
        models=GOLDEN[1:],
    ),
    Pair(
        "flash-verify",
        bare("flash-verify"),
        {**FLASH, **TWO_PASS, "gamma": 1.01},
        {**FLASH, **TWO_PASS, "gamma": 0.05},
        bare("flash-cache"),
        FLASH,
        models=LLADA,
        guided=False,
        told=by_step,
    ),
    Pair(
        "flash-verify-uncached",
        bare("flash-verify-uncached"),
        {**TWO_PASS, "gamma": 1.01, "isolation": "reference"},
        {**TWO_PASS, "gamma": 0.05, "accept": "product"},
        bare("window"),
        {},
        models=LLADA[:1],
        guided=False,
        told=by_step,
    ),
    *drifting(),
    *delayed(),
    *elastics(),
]
each_pair = pytest.mark.parametrize(
    ("pair", "model"),
    [(pair, model) for pair in PAIRS for model in pair.models],
    ids=lambda each: each if isinstance(each, str) else each.name,
)


@pytest.fixture
def leading(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """On Dream the caches of blocks decide a block's first position first, alone. `with leading():` makes engines that
    do so without a cache."""

    class Leading(nullcontext[None]):
        def __enter__(self) -> None:
            for module in (axes, prompts):
                monkeypatch.setattr(module, "leads", lambda _, shift: shift != 0)

        def __exit__(self, *error: object) -> None:
            monkeypatch.undo()

    return Leading


RULES: list[dict[str, Any]] = [
    {"threshold": 0.5},
    {"threshold": 0.9},
    {"threshold": 0.6, "alg": "entropy"},
    {"factor": 1.0},
    {"entropy_bound": 0.5},
    {"remasking": "random"},
    {"alg": "topk_margin"},
    {},
]


@st.composite
def asked(draw: st.DrawFn, pair: Pair, model: str) -> Ask:
    """A request: any rule, maybe guided or drawn, maybe an end of text, maybe some tokens given and no prompt."""
    length = draw(st.integers(1, 18))
    said = draw(st.sampled_from(RULES)) | {"seed": draw(st.integers(0, 9)), "trajectory": True}
    said |= {name: draw(st.integers(1, 9)) for name in FRONTIERS[pair.method.frontier]}
    said["temperature"] = draw(st.sampled_from([0.0, 0.0, 0.0, 1.0]))
    prompt = made_up_prompt(draw(st.integers(1, 20)), draw(st.integers(0, 9)))
    arrives = draw(st.integers(0, 6))
    if draw(st.integers(0, 2)) == 0:
        prompt = prompt if draw(st.booleans()) else ()
        given_ = [draw(st.one_of(st.none(), st.integers(0, 300))) for _ in range(length - 1)]
        given_.insert(draw(st.integers(0, length - 1)), None)
        return Ask(prompt, SamplingParams(**said), tuple(given_), arrives=arrives)
    said["cfg_scale"] = draw(st.sampled_from([0.0, 0.0, 1.5])) if pair.guided else 0.0
    ends = COMMON[model] if draw(st.booleans()) else ()
    said |= {"max_tokens": length, "ignore_eos": True, "stop_token_ids": ends}
    return Ask(prompt, SamplingParams(**said), arrives=arrives)


def saying(asks: Sequence[Ask], fields: Mapping[str, Any]) -> list[Ask]:
    return [replace(ask, params=ask.params.replace(**fields)) for ask in asks]


@each_pair
def test_a_saturated_cache_is_no_cache(
    pair: Pair, model: str, leading: Callable[[], AbstractContextManager[None]]
) -> None:
    """Token for token and pass for pass, and in as many rows where there is nothing more to run."""

    @drawn
    @given(st.lists(asked(pair, model), min_size=2, max_size=4))
    def check(asks: list[Ask]) -> None:
        got = serve(pair.engine(model, pair.method), saying(asks, pair.saturated))
        with leading() if pair.leads else nullcontext():
            want = serve(load(model, pair.yardstick), saying(asks, pair.yardstick_says))
        assert [pair.told(each) for each in got] == [pair.told(each) for each in want]

    check()


@each_pair
def test_an_unsaturated_cache_is_one(
    pair: Pair, model: str, leading: Callable[[], AbstractContextManager[None]]
) -> None:
    """Negative control: the comparison sees a cache that is one, and drafts that are accepted."""
    said: dict[str, Any] = {"max_tokens": 24, "threshold": 0.7, "ignore_eos": True, "trajectory": True}
    said |= dict.fromkeys(FRONTIERS[pair.method.frontier], 8)
    asks = [Ask(made_up_prompt(9 + seed, seed), SamplingParams(**said)) for seed in range(4)]
    with leading() if pair.leads else nullcontext():
        want = serve(load(model, pair.yardstick), saying(asks, pair.yardstick_says))
    runs = ((pair.method, pair.saturated, True), (pair.unsaturated_method or pair.method, pair.unsaturated, False))
    for method, fields, equal in runs:
        got = serve(pair.engine(model, method), saying(asks, fields))
        told = [[pair.told(replace(each, num_rows=0)) for each in outs] for outs in (got, want)]
        assert (told[0] == told[1]) == equal


# --- D2F's cache is exact whatever the setting


@pytest.mark.parametrize("model", GOLDEN)
def test_the_cache_of_sealed_blocks_is_exact(model: str) -> None:
    @drawn
    @given(st.lists(pipelined(model), min_size=2, max_size=4))
    def check(asks: list[Ask]) -> None:
        got, want = (serve(load(model, bare(name)), asks) for name in ("d2f", "d2f-uncached"))
        assert [without_rows(each) for each in got] == [without_rows(each) for each in want]
        assert all(mine.num_rows <= theirs.num_rows for mine, theirs in zip(got, want))

    check()


@pytest.mark.parametrize("model", LLADA)
def test_a_cache_of_unsealed_blocks_is_not(model: str) -> None:
    """Negative control. (On Dream nothing would score the first position of the next block: the run would not end.)"""
    params = SamplingParams(max_tokens=24, block_length=6, threshold=0.7, ignore_eos=True, trajectory=True)
    asks = [Ask(made_up_prompt(9 + seed, seed), params) for seed in range(4)]
    llm = load(model, bare("d2f"))
    llm.engine.step_program.frontier = SealedAtOnce()
    want = serve(load(model, bare("d2f-uncached")), asks)
    assert [without_rows(each) for each in serve(llm, asks)] != [without_rows(each) for each in want]


# --- infilling, through the door


SHAPES: dict[str, list[int | None]] = {
    "start": [None, None, 7, 8, 9, 10, 11, 12, 13],
    "inside": [7, 8, None, None, None, 12, 13, 14, 15, 16],
    "end": [7, 8, 9, 10, 11, 12, None, None],
    "a whole block between": [None, 8, 9, 7, 7, 7, 7, 7, None, None, 7, None, None],
    "every other": [None if n % 2 else n for n in range(14)],
    "blocks of given tokens first": [*range(20, 31), None, None, 9],
    "all": [None] * 9,
}
CACHES: list[tuple[Method, dict[str, Any], Method]] = [
    (bare("d2f"), {}, bare("d2f-uncached")),
    (bare("fast-dllm-dual"), ALWAYS, bare("fast-dllm-dual", policy="recompute")),
    (bare("fast-dllm-prefix"), ALWAYS, bare("fast-dllm-prefix", policy="recompute")),
    (bare("flash-cache"), NO_TRACKING, bare("window")),
    (drift(), ANEW, plain("blocks")),
    (drift("window", ratio=1.0), ALWAYS, plain("window")),
    (bare("dkv-cache"), ALWAYS, bare("dkv-cache", policy="recompute")),
    (elastic(tripping="redo"), {"track": 2, "drift_threshold": 2.0}, plain("window")),
]


@pytest.mark.parametrize("prompt", [0, 17], ids="prompt-{}".format)
@pytest.mark.parametrize(
    ("model", "method", "fields", "yardstick"),
    [
        pytest.param(model, *each, id="-".join((model, each[0].name, each[0].frontier)))
        for model in GOLDEN
        for each in CACHES
        if model in LLADA or each[0].policy != "elastic"  # it takes no shifted logits
    ],
)
def test_infilling(
    model: str,
    method: Method,
    fields: dict[str, Any],
    yardstick: Method,
    prompt: int,
    leading: Callable[[], AbstractContextManager[None]],
) -> None:
    """Given tokens stay as they are, every hole is filled, and the answers are those without a cache."""
    said: dict[str, Any] = {"threshold": 0.6, "trajectory": True}
    said |= {"decode_window": 4} if method.frontier == "window" else {"block_length": 4}
    texts = list(SHAPES.values())
    asks = [Ask(made_up_prompt(prompt, 1) if prompt else (), SamplingParams(**said), tuple(text)) for text in texts]
    llm = load(model, method)
    outs = [infill(llm, ask, fields) for ask in asks]
    with leading() if method.policy in ("prefix", "dual") else nullcontext():
        want = serve(load(model, yardstick), asks)
    for ask, out in zip(asks, outs):
        assert ask.given is not None
        assert all(pinned in (None, token) for pinned, token in zip(ask.given, out.token_ids, strict=True))
        assert out.finish_reason == "length"
        assert {event.position for event in out.trajectory or ()} == {
            place for place, token in enumerate(ask.given) if token is None
        }
    assert [without_rows(each) for each in outs] == [without_rows(each) for each in want]
    together = serve(llm, saying(asks, fields))
    assert [without_rows(each) for each in together] == [without_rows(each) for each in outs]


def infill(llm: LLM, ask: Ask, fields: Mapping[str, Any]) -> CompletionOutput:
    output = llm.infill(text_of(llm, ask), ask.params.replace(**fields), messages=messages_of(ask))
    assert output.prompt_token_ids == list(ask.prompt)
    return output.outputs[0]


def test_a_given_token_matters() -> None:
    """Negative control of the infilling tests: another given token, other answers."""
    for method, _, _ in CACHES:
        said = {"decode_window": 4} if method.frontier == "window" else {"block_length": 4}
        params = SamplingParams(threshold=0.6, **said)
        asks = [Ask((), params, (token, *SHAPES["inside"][1:])) for token in (7, 150)]
        one, other = (out.token_ids[1:] for out in serve(load("tiny-llada", method), asks))
        assert one != other
    assert answer_of(load("tiny-llada", method), asks[0]).prompt_ids == []
