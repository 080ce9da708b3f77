"""Passes whose rows are chosen layer by layer: what attention was told to read, in every layer, row by row.

L layers, E pool entries, M rows of a pass, P rows of a layer, S seats, N positions
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.served import COMMON, Ask, bare, load, serve
from engine.watched import canvas_entries
from oracles.flash import made_up_prompt
from unmask import LLM, SamplingParams, ops
from unmask.cache.drift import DriftGate
from unmask.cache.elastic import ElasticGate
from unmask.cache.pool import PAGE_SIZE
from unmask.engine.graphs import FixedSteps
from unmask.methods import FRONTIERS, Method

SPA = {"identifier": "proxy", "writes": "dense", "refresh": "together"}
METHODS = {
    "dllm-cache": bare("dllm-cache"),
    "spa-cache": bare("spa-cache", frontier="whole"),
    "drift-sparse": bare("dllm-cache", frontier="window", options={"identifier": "input", "writes": "sparse"}),
    "elastic-cache": bare("elastic-cache"),
    "elastic-redone": bare(
        "elastic-cache", frontier="block-window", options={"tripping": "redo", "masks": "all", "tested": "own"}
    ),
}
CASES = [
    pytest.param(method, model, fixed, id=f"{name}-{model}-{'fixed' if fixed else 'ragged'}")
    for name, method in METHODS.items()
    for model in ("tiny-llada-gqa", "tiny-dream")
    for fixed in (False, True)
    if method.policy != "elastic" or (model, fixed) == ("tiny-llada-gqa", False)  # no shift, and never captured
]


@dataclass
class Sights:
    """Everything that the rows of an engine's passes met, checked as it happens."""

    llm: LLM
    num_rows: int = 0
    most_seats: int = 0
    ends: set[int] = field(default_factory=set)
    some: bool = False
    """A layer attended fewer rows than its pass has."""
    packed: bool = False
    """A layer's rows were a part of a pass of fixed shape."""
    part: Tensor | None = None
    """Seats [P] of the rows that the last layer attended, padding left out."""
    held_LE: Tensor = field(init=False)
    """Whose an entry of a layer was when it was written last: seat * capacity + position, -1 none."""

    def __post_init__(self) -> None:
        self.held_LE = torch.full(self.llm.engine.pool.k.shape[:2], -1)

    def _layer(self, k_E: Tensor) -> int:
        return [each.data_ptr() for each in self.llm.engine.pool.k].index(k_E.data_ptr())

    def _owners(self) -> Tensor:
        """int64 [E]: whose each entry is now."""
        engine = self.llm.engine
        entry_SN = canvas_entries(engine.pool, engine.canvas.capacity)
        owner_E = torch.full(engine.pool.k.shape[1:2], -1)
        there_SN = entry_SN >= PAGE_SIZE  # the first page takes what padding writes
        owner_E[entry_SN[there_SN]] = torch.arange(entry_SN.numel()).view_as(entry_SN)[there_SN]
        return owner_E

    def wrote(self, k_E: Tensor, write_P: Tensor) -> None:
        entries = write_P[write_P >= PAGE_SIZE]
        self.held_LE[self._layer(k_E), entries] = self._owners()[entries]

    def attended(self, k_E: Tensor, sight: ops.Sight) -> None:
        """Each row meets each position of its own canvas up to the end, once, where a row of that position wrote."""
        canvas, layer = self.llm.engine.canvas, self._layer(k_E)
        assert sight.live_SJ is sight.shadow_SN is None, "nothing is tried ahead"
        entry_SN, rows = sight.entries(), (sight.see_M > 0).nonzero().flatten().tolist()
        for row in rows:
            seat = int(sight.seat_M[row])
            end = int(canvas.end_S[seat])
            met = self.held_LE[layer, entry_SN[seat, : int(sight.see_M[row])]].sort().values
            assert torch.equal(met, torch.arange(end) + seat * canvas.capacity), f"layer {layer}, seat {seat}"
            self.ends.add(end)
        self.part = sight.seat_M[rows]
        assert torch.equal(self.part.bincount(minlength=len(sight.num_rows_S)), sight.num_rows_S)
        self.num_rows += len(rows)
        self.most_seats = max(self.most_seats, len(self.part.unique()))

    def ran(self, gate: DriftGate | ElasticGate) -> None:
        """Behind a layer: who attended are the rows that it computed."""
        chosen = gate.chosen[-1] if isinstance(gate, DriftGate) else gate.computed[-1]
        assert self.part is not None
        assert torch.equal(self.part, gate.plan.seat_M[chosen])
        fewer = len(self.part) < int(gate.plan.num_rows_S.sum())
        self.some |= fewer
        self.packed |= fewer and gate.plan.per_seat is not None


def watched(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Sights:
    """All passes of this engine from now on."""
    sights, project, attend = Sights(llm), ops.project_and_store, ops.attend

    def projecting(*given: Any) -> Tensor:
        sights.wrote(given[-2], given[-3])
        return project(*given)

    def attending(q: Tensor, k_E: Tensor, v_E: Tensor, sight: ops.Sight, *rest: Any) -> Tensor:
        sights.attended(k_E, sight)
        return attend(q, k_E, v_E, sight, *rest)

    monkeypatch.setattr(ops, "project_and_store", projecting)
    monkeypatch.setattr(ops, "attend", attending)
    for kind in (DriftGate, ElasticGate):
        monkeypatch.setattr(kind, "run", partialmethod(_running, sights, kind.run))
    return sights


def _running(gate: Any, sights: Sights, run: Callable[..., Tensor], *given: Any) -> Tensor:
    out_MD = run(gate, *given)
    sights.ran(gate)
    return out_MD


def requests(method: Method, model: str) -> list[Ask]:
    """Of several lengths; some are guided, end early, begin late, have tokens given or no prompt."""
    r, out = random.Random(5), list[Ask]()
    for number, length in enumerate((14, 7, 12, 10, 9)):
        said: dict[str, Any] = {name: r.randint(3, 7) for name in FRONTIERS[method.frontier]}
        more = {"refresh_interval": 6, "answer_interval": 3, "track": 2, "drift_threshold": 0.97}
        said |= {name: value for name, value in more.items() if name in method.reads}
        said |= {"threshold": 0.6, "seed": number}
        prompt = made_up_prompt(r.randint(1, 24), number)
        if number == 3:
            text = [None if place % 2 else 7 for place in range(length)]
            out.append(Ask((), SamplingParams(**said), tuple(text), arrives=2))
            continue
        said |= {"cfg_scale": 1.5} if number % 2 and method.policy != "elastic" else {}
        said |= {"stop_token_ids": COMMON[model], "ignore_eos": True, "max_tokens": length}
        out.append(Ask(prompt, SamplingParams(**said), arrives=number))
    return out


def run(method: Method, model: str, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> Sights:
    llm = load(model, method)
    if fixed:
        llm.engine.fixed = FixedSteps(llm.engine.step_program, capture=lambda step: step)
    sights = watched(llm, monkeypatch)
    serve(llm, requests(method, model))
    return sights


@pytest.mark.parametrize(("method", "model", "fixed"), CASES)
def test_each_row_of_each_layer_sees_each_position_once(
    method: Method, model: str, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sights = run(method, model, fixed, monkeypatch)
    assert sights.num_rows > 500
    assert sights.most_seats > 1
    assert len(sights.ends) > 3, "some end earlier than others"
    assert sights.some, "every layer attended all rows"
    assert sights.packed == fixed


# --- negative controls


def of_other_rows(sight: ops.Sight) -> ops.Sight:
    """Seats and reach of other rows than those that a layer computes."""
    return replace(sight, seat_M=sight.seat_M.flip(0), see_M=sight.see_M.flip(0))


def one_less(sight: ops.Sight) -> ops.Sight:
    return replace(sight, see_M=(sight.see_M - 1).clamp(min=0))


def one_more(sight: ops.Sight) -> ops.Sight:
    return replace(sight, see_M=sight.see_M + (sight.see_M > 0))


def pages_twice(sight: ops.Sight) -> ops.Sight:
    """The second page of a canvas is its first once more."""
    pages_SP = sight.page_table_SP.clone()
    pages_SP[:, 1] = pages_SP[:, 0]
    return replace(sight, page_table_SP=pages_SP)


@pytest.mark.parametrize("method", [METHODS["dllm-cache"], METHODS["elastic-cache"]], ids=["drift", "elastic"])
@pytest.mark.parametrize("spoil", [of_other_rows, one_less, one_more, pages_twice])
def test_other_sights_are_noticed(
    spoil: Callable[[ops.Sight], ops.Sight], method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load("tiny-llada-gqa", method)
    watched(llm, monkeypatch)
    attend = ops.attend

    def wrong(q: Tensor, k_E: Tensor, v_E: Tensor, sight: ops.Sight, *rest: Any) -> Tensor:
        return attend(q, k_E, v_E, spoil(sight), *rest)

    monkeypatch.setattr(ops, "attend", wrong)
    with pytest.raises(AssertionError):
        serve(llm, requests(method, "tiny-llada-gqa"))
