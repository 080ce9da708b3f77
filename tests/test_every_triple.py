"""A small load for every legal triple of frontier, policy and drafter, in both forms of a pass: each request of the
crowd gets the answer that it gets alone, and no page is lost.

Which triples are legal is asked of the rules of the table of methods, so that a new member is among them by itself.
Larger loads, of the methods that have a name, are in `test_continuous`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from unmask.cache.pool import PagePool
from unmask.engine.llm import LLM
from unmask.engine.outputs import CompletionOutput
from unmask.errors import MethodError
from unmask.eval import continuous
from unmask.eval.continuous import Asked, Outcome, Way
from unmask.methods import DRAFTERS, FRONTIERS, METHODS, POLICIES, Method, check_weights, registered

NUM_REQUESTS, NUM_SEATS, SEED = 5, 4, 3
LONGEST = 14
NETWORKS = ("llada-gqa", "dream")
load, alone, network = continuous.load, continuous.alone, functools.cache(continuous.network)


def triples() -> Iterator[Method]:
    """All that the table does not refuse. The threshold is for those that have no other rule."""
    for members in itertools.product(FRONTIERS, POLICIES, DRAFTERS):
        axes = dict(zip(("frontier", "policy", "drafter"), members))
        try:
            yield Method(name=" ".join(members), title="", sampling={"threshold": 0.4}, **axes)
        except MethodError:
            continue


def served() -> Iterator[tuple[Method, str]]:
    """The triples, and the networks that they can run on."""
    for method, name in itertools.product(triples(), NETWORKS):
        try:
            check_weights(method, network(name).config, allow=True)
        except MethodError:
            continue
        yield method, name


SERVED = list(served())
TRIPLES = [pytest.param(method, name, id=f"{method.name} {name}".replace(" ", "-")) for method, name in SERVED]


def short(method: str, count: int, seed: int) -> list[Asked]:
    """The requests of a load, cut, two of them a step."""
    out = []
    for number, asked in enumerate(load(method, count, seed)):
        params = asked.params.replace(max_tokens=min(asked.params.max_tokens or LONGEST, LONGEST))
        out.append(dataclasses.replace(asked, prompt=asked.prompt[:LONGEST], params=params, arrives=number // 2))
    return out


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads that take a moment: short requests, networks made once, and each request alone once for both forms."""
    before: dict[tuple[str, int | None], CompletionOutput] = {}

    def once(llm: LLM, asked: Asked) -> CompletionOutput:
        key = llm.method.name, asked.params.seed
        if key not in before:
            before[key] = alone(llm, asked)
        return before[key]

    for name, value in (("load", short), ("alone", once), ("network", network)):
        monkeypatch.setattr(continuous, name, value)


def run(method: Method, name: str, *, fixed: bool) -> Outcome:
    with registered(method):
        return continuous.compare(method.name, name, NUM_REQUESTS, seed=SEED, seats=NUM_SEATS, way=Way(fixed=fixed))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("method", "name"), TRIPLES)
def test_a_crowd_is_everybody_alone(method: Method, name: str) -> None:
    for fixed in (False, True):
        found = run(method, name, fixed=fixed)
        assert found.different == []
        assert found.lost_pages == 0
        assert found.most_seats > 1, "nobody had company: the load shows nothing"
        assert found.num_cancelled < NUM_REQUESTS


def test_the_triples_are_those_of_the_table() -> None:
    """And every member of every axis is in one."""
    found = {method.kinds for method, _ in SERVED}
    assert found >= {method.kinds for method in METHODS.values()}
    for place, axis in enumerate((FRONTIERS, POLICIES, DRAFTERS)):
        assert {kinds[place] for kinds in found} == set(axis)


# --- negative control


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("name", "fixed"), [("llada-gqa", True), ("dream", False)], ids=["fixed", "ragged"])
def test_control_seats_that_share_pages(name: str, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noticed under every policy."""
    reserve = PagePool.reserve

    def careless(self: PagePool, seat: int, *rest: Any) -> bool:
        done = reserve(self, seat, *rest)
        pages_P = self.page_table_SP[seat]
        self.page_table_SP[seat] = torch.where(pages_P > 0, torch.arange(1, len(pages_P) + 1), 0)
        return done

    methods = {method.kinds[1]: method for method, where in reversed(SERVED) if where == name}
    for method in methods.values():  # what each gets alone is kept
        assert run(method, name, fixed=fixed).different == []
    monkeypatch.setattr(PagePool, "reserve", careless)
    noticed = {policy for policy, method in methods.items() if run(method, name, fixed=fixed).different}
    assert noticed == set(methods)
