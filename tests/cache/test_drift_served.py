"""Caches that choose rows, served, beside a plain loop for one request: every switch, alone and in company, ragged and
in fixed shape.

M rows, D hidden size
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles import drift as oracle
from oracles.drift import DriftRun, DriftSettings
from oracles.golden import tiny_model
from unmask import LLM, SamplingParams, methods
from unmask.cache import drift
from unmask.cache.drift import Drift, DriftGate
from unmask.engine.graphs import FixedSteps
from unmask.engine.outputs import CompletionOutput
from unmask.engine.step import Step
from unmask.errors import ConfigError
from unmask.eval.continuous import Way
from unmask.eval.continuous import compare as compare_loads
from unmask.methods import Method, registered

MODELS = ("tiny-llada", "tiny-llada-gqa", "tiny-dream")
NEVER = 1000
"""Passes."""
MARGIN = 2e-5
"""Decisions that were nearer than this, between two tokens or two rows, say nothing: arithmetic is fp32."""


@dataclass(frozen=True)
class Asked:
    """One request, and how its method has its switches."""

    model: str
    settings: DriftSettings
    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def options(self) -> dict[str, Any]:
        """The switches in the words of a row."""
        s, ratio = self.settings, self.settings.ratio
        out = {"identifier": s.identifier, "writes": s.kv, "refresh": "together" if s.together else "apart"}
        out |= {"curve": "uniform", "ratio": ratio} if isinstance(ratio, float) else {}
        out |= {"rank": s.rank} if s.identifier == "proxy" else {}
        out |= {"warmup": s.warmup} if s.warmup else {}
        out |= {"kept": "chosen"} if s.store == "scatter_selected" else {}
        out |= {"new_first": "yes"} if s.force_new == "union" else {}
        out |= {"reuse": s.reuse} if s.reuse != "delta" else {}
        out |= {"scored": s.region} if s.region != "answer" else {}
        first = {"sparse": "chosen", "full": "all", "gen_only": "needed"}[s.layer0]
        return out | ({"first_layer": first} if first != "needed" else {})

    @functools.cached_property
    def want(self) -> DriftRun:
        dream = self.model == "tiny-dream"
        return oracle.decode(tiny_model(self.model), self.prompt, self.params, self.settings, curve=dream)

    @property
    def clear(self) -> bool:
        return min(self.want.run.margin, self.want.drift_margin) > MARGIN


def asked(model: str, settings: DriftSettings, prompt: int = 7, seed: int = 0, **said: Any) -> Asked:
    rule = {"max_tokens": 16, "steps": 4} | ({"alg": "entropy"} if model == "tiny-dream" else {"block_length": 16})
    intervals = {"refresh_interval": settings.full_every or NEVER, "answer_interval": settings.answer_every or NEVER}
    params = SamplingParams(**{"ignore_eos": True, "trajectory": True} | rule | intervals | said)
    first_row = "saved" if settings.together else "stream"
    settings = replace(settings, first_row=first_row)
    return Asked(model, settings, tuple((37 * n * n + 11 * n + 5 * seed) % 300 for n in range(prompt)), params)


# --- what the engine does


@dataclass
class Seen:
    """One pass: of each layer the positions chosen and the stream behind it, one request at a time."""

    chosen: list[list[int]] = field(default_factory=list)
    streams: list[dict[int, Tensor]] = field(default_factory=list)


@dataclass
class Watch:
    passes: list[Seen] = field(default_factory=list)

    def run(self, gate: DriftGate, layer: Any, out_MD: Tensor) -> None:
        if layer.index == 0:
            self.passes.append(Seen())
        pos_M, real_M = gate.plan.pos_M, gate.plan.column_M < gate.plan.row_SE.shape[1] - 1
        self.passes[-1].chosen.append(pos_M[gate.chosen[-1]].tolist())
        rows = real_M.nonzero()[:, 0].tolist()
        self.passes[-1].streams.append({int(pos_M[row]): out_MD[row].clone() for row in rows})


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch, run = Watch(), DriftGate.run

    def watched(gate: DriftGate, layer: Any, x_MD: Tensor) -> Tensor:
        out_MD = run(gate, layer, x_MD)
        watch.run(gate, layer, out_MD)
        return out_MD

    monkeypatch.setattr(DriftGate, "run", watched)
    return watch


def engine(one: Asked, *, seats: int = 1, fixed: bool = False, **options: Any) -> LLM:
    shape = {"frontier": "whole", "schedule": "dream"} if one.model == "tiny-dream" else {"frontier": "blocks"}
    method = Method(name="drift", title="", policy="drift", options=one.options | options, **shape)
    llm = LLM(tiny_model(one.model), method=method, tokenizer=None, max_num_seqs=seats)
    if isinstance(one.settings.ratio, tuple):
        policy = llm.engine.axes.policy
        assert isinstance(policy, Drift)
        policy.ratios = list(one.settings.ratio)
    if fixed:
        llm.engine.fixed = FixedSteps(llm.engine.step_program, capture=lambda step: step)
    return llm


def answers(llm: LLM, *requests: Asked) -> list[CompletionOutput]:
    prompts = [{"prompt_token_ids": list(each.prompt)} for each in requests]
    return [each.outputs[0] for each in llm.generate(prompts, [each.params for each in requests])]


def commits(out: CompletionOutput | DriftRun) -> list[tuple[int, int]]:
    """Pass and position of each token."""
    if isinstance(out, DriftRun):
        return sorted((each.num_pass, each.position) for each in out.run.commits)
    assert out.trajectory is not None
    return sorted((each.num_pass, each.position) for each in out.trajectory)


def check(one: Asked, fixed: bool, watch: Watch) -> None:
    """One request alone: its tokens, and in every pass and layer the rows and what came of them."""
    watch.passes.clear()
    (out,) = answers(engine(one, fixed=fixed), one)
    assert list(out.token_ids) == one.want.run.token_ids
    assert commits(out) == commits(one.want)
    compare(watch, one)


def compare(watch: Watch, one: Asked) -> None:
    """What was seen, with the loop's."""
    passes = [each for each in watch.passes if each.chosen[0] or each.streams[0]]
    assert len(passes) == len(one.want.passes)
    for number, (got, want) in enumerate(zip(passes, one.want.passes)):
        for index, log in enumerate(want.layers):
            if index or one.settings.layer0 != "full":
                assert got.chosen[index] == log.rows, (number, index)
            for position, row_D in got.streams[index].items():
                want_D = want.streams[index + 1][position]
                torch.testing.assert_close(row_D, want_D, atol=2e-4, rtol=1e-3, msg=f"{number} {index} {position}")


# --- random switches


def drawn(seed: int) -> Asked:
    """A request and a method at random, as many switches away from their defaults as may be."""
    r = random.Random(seed)
    identifier, kv = r.choice(("value", "proxy", "input", "attention")), r.choice(("dense", "values", "sparse"))
    together, region = r.random() < 0.6, r.choice(("answer", "answer", "all"))
    store = r.choice(("overwrite_all", "scatter_selected"))
    if identifier == "value":  # V itself is kept: it is the writes that say of which rows
        store = "scatter_selected" if kv == "sparse" else "overwrite_all"
    settings = DriftSettings(
        identifier=identifier,
        rank=r.choice((8, 24, 0.25, 1)),
        ratio=r.choice((0.1, 0.25, 0.5, 0.0, (1.0, 0.4, 0.15))),
        kv=kv,
        store=store,
        reuse=r.choice(("delta", "absolute")),
        region=region,
        layer0="full" if region == "all" else r.choice(("full", "gen_only", "gen_only")),
        force_new=r.choice(("off", "union")),
        full_every=r.choice((None, 3, 5)),
        answer_every=r.choice((None, 2, 4)),
        together=together,
        warmup=r.choice((0, 1)) if together else 0,
    )
    return request(settings, r.choice(MODELS), seed)


def request(settings: DriftSettings, model: str, seed: int) -> Asked:
    """One of a method, with the intervals of its settings."""
    r = random.Random(seed + 1000)
    length = r.choice((12, 16, 23))
    rule: dict[str, Any] = {"steps": r.choice((4, 6, length))}
    if r.random() < 0.3:
        rule = {"steps": None, "threshold": r.choice((0.05, 0.3))}
    blocks = {} if model == "tiny-dream" else {"block_length": r.choice((8, length))}
    return asked(model, settings, prompt=r.choice((5, 9)), seed=seed, max_tokens=length, **blocks, **rule)


@pytest.mark.parametrize("fixed", [False, True], ids=["ragged", "fixed"])
@pytest.mark.parametrize("first", [0, 12, 24])
def test_a_request_alone(first: int, fixed: bool, watch: Watch) -> None:
    clear = [each for each in map(drawn, range(first, first + 12)) if each.clear]
    assert len(clear) >= 9
    for one in clear:
        try:
            check(one, fixed, watch)
        except AssertionError as error:
            raise AssertionError(f"{one}: {error}") from error


@pytest.mark.parametrize("fixed", [False, True], ids=["ragged", "fixed"])
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 5, 8])
def test_in_company(seed: int, fixed: bool) -> None:
    """Requests of other lengths, rules and intervals, up to three at a time: each has what the loop gives."""
    one, r = drawn(seed), random.Random(seed)
    intervals = [{"full_every": r.choice((None, 3, 5)), "answer_every": r.choice((None, 2, 4))} for _ in range(6)]
    crowd = [request(replace(one.settings, **each), one.model, seed + n) for n, each in enumerate(intervals)]
    outs = answers(engine(one, seats=3, fixed=fixed), *crowd)
    clear = [(out, each) for out, each in zip(outs, crowd) if each.clear]
    assert len(clear) >= 3
    for out, each in clear:
        assert (list(out.token_ids), commits(out)) == (each.want.run.token_ids, commits(each.want)), each


UNUSUAL = {
    "drift-paper": {"identifier": "proxy", "rank": 8, "writes": "sparse", "reuse": "absolute", "scored": "all"},
    "drift-attention": {"identifier": "attention", "kept": "chosen", "new_first": "yes", "first_layer": "all"},
}
UNUSUAL["drift-paper"] |= {"first_layer": "chosen", "new_first": "yes", "refresh": "together"}


@pytest.mark.parametrize("fixed", [False, True], ids=["ragged", "fixed"])
@pytest.mark.parametrize("network", ["llada-gqa", "dream"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_a_mixed_load_changes_nothing(name: str, network: str, fixed: bool) -> None:
    """With guidance, cancelled requests and sampling: everybody has what they have alone."""
    sampling = {"refresh_interval": 9, "answer_interval": 4, "threshold": 0.9, "block_length": 32}
    with registered(Method(name=name, title="", policy="drift", options=UNUSUAL[name], sampling=sampling)):
        out = compare_loads(name, network, 24, seed=3, seats=4, way=Way(fixed=fixed))
    assert not out.different
    assert out.lost_pages == 0
    assert out.most_seats > 1


# --- passes in which nothing is due

SPA = DriftSettings(rank=8, ratio=0.25, layer0="gen_only")
DLLM = DriftSettings(identifier="value", ratio=0.25, kv="values", layer0="gen_only", together=False)
PAPER = DriftSettings(**{**oracle.PAPER, "rank": 8})  # type: ignore[arg-type]
QUIET = {"full_every": None, "answer_every": None}
"""All passes but the first are partial."""


@pytest.mark.parametrize("fixed", [False, True], ids=["ragged", "fixed"])
@pytest.mark.parametrize("model", ["tiny-llada", "tiny-dream"])
@pytest.mark.parametrize(
    ("settings", "other"),
    [
        pytest.param(SPA, {"kv": "sparse"}, id="dense"),
        pytest.param(replace(SPA, kv="values"), {"kv": "dense"}, id="values"),
        pytest.param(replace(SPA, kv="sparse"), {"kv": "values"}, id="sparse"),
        pytest.param(replace(SPA, identifier="input"), {"identifier": "proxy", "rank": 2}, id="input"),
        pytest.param(replace(SPA, identifier="attention"), {"identifier": "input"}, id="attention"),
        pytest.param(replace(SPA, store="scatter_selected"), {"store": "overwrite_all"}, id="kept-chosen"),
        pytest.param(replace(SPA, reuse="absolute"), {"reuse": "delta"}, id="absolute"),
        pytest.param(replace(SPA, region="all", layer0="full"), {"region": "answer"}, id="scored-all"),
        pytest.param(replace(SPA, force_new="union", ratio=0.1), {"force_new": "off"}, id="new"),
        pytest.param(DLLM, {"kv": "sparse"}, id="dllm"),
        pytest.param(replace(DLLM, kv="dense"), {"kv": "values"}, id="dllm-dense"),
        pytest.param(replace(DLLM, ratio=0.0), {"ratio": 0.1}, id="dllm-nothing"),
    ],
)
def test_partial_passes(settings: DriftSettings, other: dict[str, Any], model: str, fixed: bool, watch: Watch) -> None:
    """Rows and streams are the loop's; and a loop with one switch otherwise has others: the control."""
    seeds = (asked(model, replace(settings, **QUIET), seed=seed, steps=6) for seed in range(9))
    one = next(each for each in seeds if each.clear)
    assert [each.kind for each in one.want.passes] == ["full", *["partial"] * (len(one.want.passes) - 1)]
    check(one, fixed, watch)
    with pytest.raises(AssertionError):
        compare(watch, replace(one, settings=replace(one.settings, **other)))


@pytest.mark.parametrize("fixed", [False, True], ids=["ragged", "fixed"])
@pytest.mark.parametrize("every", [(None, None), (5, 3)], ids=["paper", "refreshed"])
@pytest.mark.parametrize("settings", [PAPER, replace(PAPER, region="answer", reuse="delta", kv="dense")])
def test_the_first_layer_like_any_other(
    settings: DriftSettings, every: tuple[int | None, int | None], fixed: bool, watch: Watch
) -> None:
    """It has as many rows as tokens changed: all others are as they were, and a tie tells nothing."""
    prompt, changed = 8, 4
    ratio = changed / (16 + (prompt if settings.region == "all" else 0)) + 1e-9
    settings = replace(settings, ratio=ratio, full_every=every[0], answer_every=every[1])
    seeds = (asked("tiny-llada", settings, prompt=prompt, seed=seed, steps=4) for seed in range(9))
    one = next(each for each in seeds if each.clear)
    assert [len(each.layers[0].chosen) for each in one.want.passes if each.kind == "partial"] != []
    check(one, fixed, watch)
    first = [each.chosen[0] for each in watch.passes if each.streams[0]]
    assert any(len(each) == changed for each in first[1:])
    with pytest.raises(AssertionError):
        compare(watch, replace(one, settings=replace(one.settings, layer0="full")))


def test_the_prompt_in_the_first_layer_changes_nothing() -> None:
    for model in MODELS:
        one = asked(model, SPA, seed=3)
        needed, every = (answers(engine(one, first_layer=word), one)[0] for word in ("needed", "all"))
        assert (needed.token_ids, commits(needed)) == (every.token_ids, commits(every))
        assert needed.num_rows < every.num_rows


# --- what was committed last


@pytest.mark.parametrize("fixed", [False, True], ids=["ragged", "fixed"])
@pytest.mark.parametrize("new_first", ["yes", "no"])
def test_all_new_tokens_run(new_first: str, fixed: bool, watch: Watch) -> None:
    """Eight of 32 in a pass, where a tenth are chosen: they come on top. Without, most are left: the control."""
    one = asked("tiny-llada", replace(SPA, ratio=0.1), max_tokens=32, block_length=32, steps=4)
    (out,) = answers(engine(one, fixed=fixed, new_first=new_first), one)
    by_pass = [[len(one.prompt) + place for number, place in commits(out) if number == n] for n in range(1, 5)]
    partial = [each for each in watch.passes if each.streams[0]][1:]
    missed = sum(
        position not in layer for new, seen in zip(by_pass, partial) for layer in seen.chosen[1:] for position in new
    )
    assert len(by_pass[0]) == 8
    assert missed == 0 if new_first == "yes" else missed > 20
    assert max(len(layer) for seen in partial for layer in seen.chosen[1:]) <= (3 + 8 if new_first == "yes" else 3)


@pytest.mark.parametrize("fixed", [False, True], ids=["ragged", "fixed"])
def test_new_tokens_run_on_both_canvases_of_guidance(fixed: bool, watch: Watch) -> None:
    one = asked("tiny-llada", replace(SPA, ratio=0.0625), steps=4, cfg_scale=1.0)
    for new_first in ("yes", "no"):
        watch.passes.clear()
        (out,) = answers(engine(one, seats=2, fixed=fixed, new_first=new_first), one)
        new = [len(one.prompt) + place for number, place in commits(out) if number == 1]
        layers = next(each for each in watch.passes[1:] if each.streams[0]).chosen[1:]
        twice = [layer.count(position) == 2 for layer in layers for position in new]
        assert all(twice) == (new_first == "yes")


def test_fixed_shapes_grow_with_the_tokens_of_a_pass(watch: Watch) -> None:
    """A request that may commit more than any before it gets a step with room for them: a step keeps the room that it
    was captured with."""
    settings = replace(SPA, ratio=0.1, force_new="union")
    said: dict[str, Any] = {"max_tokens": 48}
    big = next(
        each
        for each in (asked("tiny-llada", settings, block_length=48, steps=2, seed=seed, **said) for seed in range(6))
        if each.clear
    )
    small = asked("tiny-llada", settings, block_length=4, steps=12, **said)
    llm = engine(big)
    policy, rooms = llm.engine.axes.policy, []
    assert isinstance(policy, Drift)

    def captured(step: Step) -> Callable[[], None]:
        assert step.budgets is not None
        rooms.append(policy.most_chosen(1, 48, step.budgets.num_scored))
        return step

    llm.engine.fixed = FixedSteps(llm.engine.step_program, capture=captured)
    answers(llm, small)
    assert rooms == [4 + 16]
    watch.passes.clear()
    (out,) = answers(llm, big)
    assert rooms == [4 + 16, 48]
    assert max(sum(commit.num_pass == n for commit in big.want.run.commits) for n in (1, 2)) == 24
    compare(watch, big)
    assert list(out.token_ids) == big.want.run.token_ids


# --- the ends of the range


@pytest.mark.parametrize("fixed", [False, True], ids=["ragged", "fixed"])
@pytest.mark.parametrize(
    "settings",
    [
        SPA,
        replace(SPA, kv="sparse", reuse="absolute", store="scatter_selected"),
        replace(SPA, identifier="attention", kv="values"),
        replace(SPA, layer0="sparse", force_new="union"),
        DLLM,
    ],
    ids=["spa", "absolute", "attention", "first-layer", "dllm"],
)
@pytest.mark.parametrize("model", ["tiny-llada-gqa", "tiny-dream"])
def test_all_rows_chosen_is_the_answer_anew(model: str, settings: DriftSettings, fixed: bool) -> None:
    """Over requests of several kinds at once; of a quarter of the rows it is not: the control."""
    crowd = [request(replace(settings, full_every=4), model, seed) for seed in range(6)]
    anew = [replace(each, params=each.params.replace(answer_interval=1)) for each in crowd]
    runs = [
        [(out.token_ids, commits(out)) for out in answers(engine(crowd[0], seats=3, fixed=fixed, ratio=ratio), *asks)]
        for ratio, asks in ((1, crowd), (1, anew), (0.1, crowd))
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.parametrize("fixed", [False, True], ids=["ragged", "fixed"])
@pytest.mark.parametrize("first_layer", ["needed", "chosen"])
@pytest.mark.parametrize("model", ["tiny-llada-gqa", "tiny-dream"])
def test_all_rows_of_the_canvas_chosen_is_no_cache(model: str, first_layer: str, fixed: bool) -> None:
    settings = replace(SPA, region="all", layer0="full", kv="sparse", reuse="absolute")
    crowd = [request(replace(settings, **QUIET), model, seed) for seed in range(6)]
    bare = [replace(each, params=each.params.replace(refresh_interval=1, answer_interval=1)) for each in crowd]
    runs = [
        [
            (out.token_ids, commits(out))
            for out in answers(engine(crowd[0], seats=3, fixed=fixed, ratio=ratio, first_layer=first_layer), *asks)
        ]
        for ratio, asks in ((1, crowd), (1, bare), (0.1, crowd))
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.parametrize("options", [{}, {"writes": "dense", "identifier": "proxy", "rank": 8, "curve": "auto"}])
def test_a_ratio_of_nothing_is_served(options: dict[str, Any], watch: Watch) -> None:
    """As dLLM-Cache has it: between refreshes layers behind the first compute no row of the answer."""
    method = Method(name="drift", title="", policy="drift", options={"ratio": 0, **options})
    llm = LLM(tiny_model("tiny-llada"), method=method, tokenizer=None)
    one = asked("tiny-llada", DLLM, answer_interval=3)
    answers(llm, one)
    passes = [each for each in watch.passes if each.streams[0]]
    assert [not any(each.chosen[1:]) for each in passes] == [False, True, True, False]


# --- what a policy refuses


def test_options_are_the_policys_words() -> None:
    for name, words in (
        ("identifier", drift.IDENTIFIERS),
        ("writes", drift.WRITES),
        ("reuse", drift.REUSE),
        ("scored", drift.SCORED),
        ("first_layer", drift.FIRST_LAYER),
    ):
        assert set(methods._ALLOWED[name]) == set(words)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"identifier": "values"}, r"identifier is 'values'; did you mean 'value'\?"),
        ({"writes": "sprase"}, r"writes is 'sprase'; did you mean 'sparse'\?"),
        ({"reuse": "deltas"}, r"reuse is 'deltas'; did you mean 'delta'\?"),
        ({"scored": "prompt"}, "scored is 'prompt'; known: all, answer"),
        ({"first_layer": "full"}, "first_layer is 'full'; known: all, chosen, needed"),
        ({"ratios": []}, "ratios has none"),
        ({"ratios": [0.5, 1.5]}, r"the ratio of layer 1 is 1.5; it lies in \[0, 1\]"),
        ({"ratios": [float("nan")]}, "the ratio of layer 0 is nan"),
        ({"warmup": -1}, "warmup is -1"),
        ({"identifier": "proxy"}, "rank is 0"),
        ({"proxies": torch.zeros(3, 8, 64)}, "proxies are not read with identifier 'value'"),
        ({"identifier": "proxy", "rank": 4, "proxies": torch.zeros(3, 8, 64)}, r"proxies are \[3, 8, 64\]; .* \[3, 4,"),
        (
            {"identifier": "proxy", "rank": 8, "proxies": torch.zeros(2, 8, 64)},
            r"proxies are \[2, 8, 64\]; of 3 ratios",
        ),
    ],
)
def test_a_policy_that_cannot_be(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Drift(**{"ratios": [0.25] * 3, **said})


def test_a_policy_of_another_network() -> None:
    model = tiny_model("tiny-llada")
    for policy, message in (
        (Drift([0.25] * 2), "ratios of 2 layers, and the network has 3"),
        (Drift([0.25] * 3, identifier="proxy", rank=8, proxies=torch.zeros(3, 8, 32)), "of rows of 32 numbers"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(model, method=Method(name="own", title="", policy=policy), tokenizer=None)
    llm = LLM(
        model, method=Method(name="own", title="", policy=Drift([0.25] * 3, identifier="proxy", rank=8)), tokenizer=None
    )
    with pytest.raises(ConfigError, match="'proxy' needs proxies"):
        answers(llm, asked("tiny-llada", SPA))
