"""Elastic-Cache, served: what the oracle says of every layer of every step, alone and in company; what holds at its
end of the range; and that mistakes are noticed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.served import Ask, drive, facts, load
from oracles import elastic as oracle
from oracles.elastic import CASES, ElasticCase, ElasticRun, ElasticSettings
from oracles.flash import made_up_prompt
from oracles.golden import tiny_model
from unmask import LLM, SamplingParams
from unmask.cache import elastic as module
from unmask.cache.context import Part
from unmask.cache.elastic import Elastic, ElasticGate
from unmask.core.canvas import Canvas
from unmask.engine.outputs import CompletionOutput
from unmask.engine.request import Answer
from unmask.errors import ConfigError, MethodError
from unmask.eval.continuous import Way, compare
from unmask.methods import METHODS, Method, check_weights
from unmask.models.config import ModelConfig
from unmask.models.transformer import Transformer

BY_NAME = {case.name: case for case in CASES}
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def network(case: ElasticCase) -> Transformer:
    return tiny_model(case.model, case.eos_ids, torch.float64)


def row_of(s: ElasticSettings, **changes: Any) -> Method:
    said = {"cosine": s.cosine, "tested": s.tested, "tripping": s.tripping, "masks": s.masks}
    said["run_new"] = "yes" if s.run_new else "no"
    frontier = "block-window" if s.block_length else "window"
    axes = {"frontier": frontier, "policy": "elastic", "options": said}
    return Method(**{"name": "mine", "title": "mine", **axes, **changes})


def params_of(case: ElasticCase) -> SamplingParams:
    s = case.settings
    return SamplingParams(
        max_tokens=case.max_tokens,
        decode_window=s.window,
        block_length=s.block_length,
        threshold=s.threshold,
        steps=s.steps,
        track=s.num_tracked,
        drift_threshold=max(s.gamma, 0.0),  # weights are positive, and so is their cosine
        trajectory=True,
    )


def expected(case: ElasticCase) -> ElasticRun:
    return oracle.decode(network(case), case.prompt, case.max_tokens, case.settings, case.eos_ids)


# --- what the engine did, by request, step and layer


@dataclass
class Seen:
    """One pass of one request."""

    rows: list[set[int]]
    similarity: list[float | None]
    tripped: int | None
    tracked: list[set[int]]


@dataclass
class Watch:
    """Every pass of an engine from now on."""

    llm: LLM
    passes: dict[Answer, list[Seen]] = field(default_factory=dict)
    _gate: ElasticGate | None = None
    _seats: dict[int, Answer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        policy = self.llm.engine.axes.policy
        assert isinstance(policy, Elastic)
        gate = policy.gate

        def watched(*args: Any) -> ElasticGate:
            self._gate = gate(*args)
            self._seats = {answer.seat: answer for answer in self.llm.engine.scheduler.running}
            return self._gate

        policy.gate = watched  # type: ignore[method-assign, assignment]

    def note(self, answers: Sequence[Answer]) -> None:  # noqa: ARG002
        """After a step."""
        gate, self._gate = self._gate, None
        if gate is None:
            return
        tracked_LM = gate.pool.planes["tracked"][:, gate.context.write_M]
        first_S = gate.first_S.tolist()
        for seat, (first, stop) in enumerate(pairwise(first_S)):
            if first == stop:
                continue
            rows = [{row - first for row in at.tolist() if first <= row < stop} for at in gate.computed]
            tracked = [set(layer_A.nonzero()[:, 0].tolist()) for layer_A in tracked_LM[:, first:stop]]
            similarity = [None if each.isnan() else float(each) for each in (each[seat] for each in gate.similarity)]
            tripped = next((layer for layer, each in enumerate(gate.trips) if each[seat]), None)
            self.passes.setdefault(self._seats[seat], []).append(Seen(rows, similarity, tripped, tracked))


def run(cases: Sequence[ElasticCase], arrives: Sequence[int] = (0,), seats: int = 1) -> list[tuple[Any, list[Seen]]]:
    """Output and passes of each request; all have the settings' switches of the first."""
    llm = load(network(cases[0]), row_of(cases[0].settings), max_num_seqs=seats)
    watch = Watch(llm)
    asks = [Ask(case.prompt, params_of(case), arrives=at) for case, at in zip(cases, arrives, strict=True)]
    answers = drive(llm, asks, watch.note)
    return [(answer.output, watch.passes[answer]) for answer in answers]


def check(case: ElasticCase, got: CompletionOutput, passes: Sequence[Seen]) -> None:
    want = expected(case)
    assert min(want.margin, want.drift_margin, want.track_margin) > 1e-6, "too close to call"
    assert len(passes) == got.num_steps == got.num_forward_passes == want.num_passes
    for number, (seen, step) in enumerate(zip(passes, want.steps, strict=True)):
        assert seen.rows == [layer.rows for layer in step.layers], number
        assert seen.tripped == step.tripped, number
        assert seen.tracked == [set(layer.tracked) & set(layer.mass) for layer in step.layers], number
        for ours, layer in zip(seen.similarity, step.layers, strict=True):
            assert (ours is None) == (layer.similarity is None)
            assert ours is None or layer.similarity is None or abs(ours - layer.similarity) < 1e-6, number
    num_prompt, length = len(case.prompt), len(want.token_ids)
    steps = enumerate(want.steps, start=1)
    committed = {one.position - num_prompt: (one.token, at) for at, step in steps for one in step.commits}
    assert got.trajectory is not None
    told = {event.position: (event.token_id, event.num_pass) for event in got.trajectory}
    assert told == {place: each for place, each in committed.items() if place < length}
    assert (got.token_ids, got.finish_reason) == (want.token_ids, want.finish_reason)
    num_layers = len(want.steps[0].layers)
    by_pass = [sum(map(len, seen.rows)) / num_layers for seen in passes]
    assert abs(got.num_rows - sum(by_pass)) <= len(passes) / 2  # each pass is rounded


# --- the oracle


@each_case
def test_every_layer_of_every_step(case: ElasticCase) -> None:
    ((got, passes),) = run([case])
    check(case, got, passes)
    assert any(seen.tripped is not None for seen in passes)


def test_these_requests_trip_in_all_layers_and_in_none() -> None:
    tripped = {(case.model, step.tripped) for case in CASES for step in expected(case).steps[1:]}
    for model in ("tiny-llada", "tiny-llada-gqa"):
        num_layers = tiny_model(model).config.num_layers
        assert {layer for name, layer in tripped if name == model} == {None, *range(num_layers)}


def changed() -> list[Any]:
    pairs = [(case, change) for case in CASES for change in (*case.matters, {"run_new": False})]
    return [pytest.param(case, change, id=f"{case.name}-{change}") for case, change in pairs]


@pytest.mark.parametrize(("case", "change"), changed())
def test_every_switch(case: ElasticCase, change: dict[str, Any]) -> None:
    other = replace(case, settings=replace(case.settings, **change))
    ((got, passes),) = run([other])
    check(other, got, passes)


def beside(case: ElasticCase) -> list[ElasticCase]:
    """The request, and others with its switches that trip elsewhere."""
    s = case.settings
    never, always = replace(s, gamma=-1.0), replace(s, gamma=2.0)
    return [
        case,
        replace(case, prompt=made_up_prompt(21, 3), max_tokens=17, settings=s if s.steps is None else never),
        replace(case, prompt=made_up_prompt(5, 4), max_tokens=12, settings=never),
        replace(case, prompt=made_up_prompt(9, 5), max_tokens=20, settings=always),
    ]


@each_case
@pytest.mark.parametrize("arrives", [(0, 0, 0, 0), (3, 0, 5, 1), (1, 2, 0, 9)])
def test_in_company(case: ElasticCase, arrives: tuple[int, ...]) -> None:
    """Two seats and four requests: some join late, into pages that others have left."""
    cases = beside(case)
    together = run(cases, arrives, seats=2)
    for each, (got, passes) in zip(cases, together, strict=True):
        check(each, got, passes)


@pytest.mark.parametrize("network_name", ["llada", "llada-gqa"])
@pytest.mark.parametrize("fixed", [False, True])
def test_company_changes_nothing(network_name: str, fixed: bool) -> None:
    """Asked for captured passes it goes without them."""
    out = compare("elastic-cache", network_name, 24, seed=3, seats=4, way=Way(fixed=fixed))
    assert not out.different
    assert out.lost_pages == 0
    assert out.most_seats > 1


# --- the ends of the range


SATURATED = ElasticSettings(gamma=2.0, tripping="redo", window=6, threshold=0.7)


@pytest.mark.parametrize("model", ["tiny-llada", "tiny-llada-gqa"])
@pytest.mark.parametrize("masks", ["window", "all"])
def test_a_layer_that_always_trips_and_is_redone_is_no_cache(model: str, masks: str) -> None:
    case = ElasticCase("", model, made_up_prompt(11, 2), 20, replace(SATURATED, masks=masks), (318,), ())
    ask = Ask(case.prompt, params_of(case))
    ((got, passes),) = run([case])
    plain = Method(name="plain", title="plain", frontier="window")
    (want,) = drive(
        load(network(case), plain), [replace(ask, params=ask.params.replace(track=None, drift_threshold=None))]
    )
    assert facts(got) == facts(want.output)
    assert all(seen.tripped == 0 for seen in passes[1:])
    ((kept, _),) = run([replace(case, settings=replace(case.settings, tripping="keep"))])
    # The first layer is reused then: fewer rows a pass, and another answer.
    assert kept.num_rows * got.num_steps < got.num_rows * kept.num_steps


def test_viewers_see_what_was_recomputed() -> None:
    """Of passes that trip everything, of others what ran in all layers alike."""
    method = dataclasses.replace(METHODS["elastic-cache"], name="own")
    llm = LLM(tiny_model("tiny-llada"), method=method, tokenizer=None)
    gates, gate = list[ElasticGate](), llm.engine.axes.policy.gate
    llm.engine.axes.policy.gate = lambda *given: gates.append(gate(*given)) or gates[-1]  # type: ignore[method-assign]
    said = SamplingParams(max_tokens=24, decode_window=3, threshold=0.5, drift_threshold=0.9, ignore_eos=True)
    canvases = [each.canvas for each in llm.stream({"prompt_token_ids": [5, 6, 7, 8]}, said, canvas=True)]
    shown = [[cell.recomputed for cell in cells] for cells in canvases if cells is not None]
    ran = [each.plan.pos_M[torch.cat(each.computed)].tolist() for each in gates]
    assert shown == [[4 + n in positions for n in range(24)] for positions in ran]
    assert any(all(each) for each in shown[1:])
    assert not all(all(each) for each in shown)


def test_nothing_is_tested_where_nothing_is_tracked() -> None:
    """Then the similarity is 1: above 1 a threshold trips all the same."""
    case = BY_NAME["heads-union"]
    for gamma, tripped in ((0.97, None), (2.0, 0)):
        other = replace(case, settings=replace(case.settings, num_tracked=0, gamma=gamma))
        ((_, passes),) = run([other])
        assert {seen.tripped for seen in passes[1:]} == {tripped}


def test_an_infilled_canvas_runs_to_its_end() -> None:
    """Given tokens of the answer are decided, and may be tracked."""
    case = BY_NAME["heads-union"]
    given = tuple(7 + place if place % 3 == 0 else None for place in range(18))
    llm = load(network(case), row_of(case.settings), max_num_seqs=1)
    watch = Watch(llm)
    params = params_of(case).replace(max_tokens=None)
    (answer,) = drive(llm, [Ask(case.prompt, params, given=given)], watch.note)
    assert answer.output is not None
    assert all(answer.output.token_ids[at] == token for at, token in enumerate(given) if token is not None)
    assert any(min(layer, default=0) >= len(case.prompt) for seen in watch.passes[answer] for layer in seen.tracked)


# --- what it may not be combined with


@pytest.mark.parametrize("drafter", ["two-pass", "one-pass", "nested"])
def test_it_takes_no_drafter(drafter: str) -> None:
    with pytest.raises(MethodError, match="'elastic'"):
        row_of(ElasticSettings(), drafter=drafter)


def test_it_takes_no_guidance_and_no_shift() -> None:
    with pytest.raises(ConfigError, match=r"cfg_scale=1\.5 .* 'elastic-cache'"):
        METHODS["elastic-cache"].complete(SamplingParams(cfg_scale=1.5), {}, {"max_tokens": 8})
    dream: ModelConfig = tiny_model("tiny-dream").config
    for allow in (False, True):
        with pytest.raises(MethodError, match=r"'elastic-cache' .* row p - 1; .* 'flash-cache'"):
            check_weights(METHODS["elastic-cache"], dream, allow=allow)
    with pytest.raises(MethodError, match="row p - 1"):
        load("tiny-dream", "elastic-cache")


@pytest.mark.parametrize("said", [{"refresh_interval": 4}, {"refresh_window": 8}, {"block_length": 8}])
def test_it_refuses_what_it_does_not_read(said: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does not read"):
        METHODS["elastic-cache"].complete(SamplingParams(**said), {}, {"max_tokens": 8})


@pytest.mark.parametrize("options", [{"cosine": "head"}, {"tested": "all"}, {"masks": 1}, {"run_new": True}])
def test_options_that_do_not_exist(options: dict[str, Any]) -> None:
    with pytest.raises(MethodError):
        Method(name="mine", title="mine", frontier="window", policy="elastic", options=options)


def test_a_pass_of_it_is_never_captured() -> None:
    assert not load("tiny-llada", "elastic-cache").engine.axes.policy.static
    assert load("tiny-llada", "flash-cache").engine.axes.policy.static


class Operations(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_layer_takes_as_many_operations_whoever_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seats are a dimension and no loop."""
    case, run_layer = BY_NAME["heads-union"], ElasticGate.run
    counts: list[int] = []

    def counted(self: ElasticGate, *given: Any) -> Tensor:
        with Operations() as operations:
            out_MD = run_layer(self, *given)
        counts.append(operations.count)
        return out_MD

    monkeypatch.setattr(ElasticGate, "run", counted)
    run([case])
    alone, counts = counts, []
    run([case] * 5, [0] * 5, seats=5)
    assert all(ours <= theirs for ours, theirs in zip(counts, alone, strict=True))
    assert len(alone) > 10


# --- negative controls


def noticed(cases: Sequence[ElasticCase], seats: int = 1) -> None:
    outputs = run(cases, [0] * len(cases), seats)

    def check_all() -> None:
        for case, (got, passes) in zip(cases, outputs, strict=True):
            check(case, got, passes)

    with pytest.raises(AssertionError):
        check_all()


def test_a_test_against_the_renewed_keys_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = module.similarity
    monkeypatch.setattr(module, "similarity", lambda before, now, *rest: judge(now, now, *rest))  # noqa: ARG005
    noticed([BY_NAME["heads-union"]])


def test_inputs_that_are_not_kept_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that come back into a layer then bring what the pass began with."""
    monkeypatch.setattr(ElasticGate, "_from_memory", lambda self, index, x_MD: x_MD)  # noqa: ARG005
    noticed([BY_NAME["heads-union"]])


def test_queries_that_are_not_renewed_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    project = ElasticGate._project

    def stale(self: ElasticGate, layer: Any, normed_MD: Tensor, rows_P: Tensor) -> Part:
        plane_E = self.pool.planes["q"][layer.index]
        before_E = plane_E.clone()
        part = project(self, layer, normed_MD, rows_P)
        if self.tracked_LM.any():
            plane_E.copy_(torch.where(self.pool.planes["tracked"][layer.index][:, None, None], before_E, plane_E))
        return part

    monkeypatch.setattr(ElasticGate, "_project", stale)
    noticed([BY_NAME["heads-union-gqa"]])


def test_tracking_what_is_looked_at_least_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    mass = ElasticGate._mass_M
    monkeypatch.setattr(ElasticGate, "_mass_M", lambda self, index: -mass(self, index))
    noticed([BY_NAME["keys-own-gqa"]])


def test_a_trip_that_spreads_to_other_seats_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    test = ElasticGate._test

    def spreading(self: ElasticGate, *args: Any) -> Tensor:
        trips_S = test(self, *args)
        return trips_S.any().expand_as(trips_S)

    monkeypatch.setattr(ElasticGate, "_test", spreading)
    noticed(beside(BY_NAME["redo"])[:2], seats=2)


def test_what_was_just_committed_and_does_not_run_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Elastic.gate
    nothing: Callable[[Canvas], Tensor] = lambda canvas: torch.zeros_like(canvas.final_SN)  # noqa: E731

    def forgetful(self: Elastic, canvas: Canvas, *rest: Any) -> ElasticGate:
        blind = dataclasses.replace(canvas)
        blind.new_SN = lambda ago=0: nothing(canvas)  # type: ignore[method-assign] # noqa: ARG005
        return gate(self, blind, *rest)

    monkeypatch.setattr(Elastic, "gate", forgetful)
    noticed([BY_NAME["heads-union"]])
