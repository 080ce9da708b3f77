"""What a profile measures, held against plain definitions; each promise beside a network that breaks it.

N positions, D hidden size, L layers, H heads
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.checkpoints import random_model
from unmask import LLM, Method
from unmask.bench import profile, profile_plot
from unmask.bench.profile import Asked, fitted, paste, rounded
from unmask.bench.profile_watch import (
    GROUPS,
    IDENTIFIERS,
    LEAST,
    PICKS,
    Drifts,
    Watched,
    Watcher,
    attention_mass,
    furthest,
)
from unmask.bench.results import Results
from unmask.cache.budget import PUBLISHED, BudgetCurve
from unmask.cache.proxy import proxies
from unmask.engine.axes import Axes
from unmask.errors import ConfigError, MethodError
from unmask.models.attention import DenseContext
from unmask.models.transformer import Transformer

PROMPTS: Any = [
    {"prompt_token_ids": list(range(first, first + length))} for first, length in ((3, 40), (50, 25), (9, 33))
]
ASKED = Asked(threshold=0.001, max_tokens=14, block_length=7, above=0.02, rank=8, ratio=0.25, window=4, seats=3)
RANKS = (1, 8, 64)
TOPS = (4, 8)


def quiet(_: str) -> None:
    pass


def network(seed: int = 0, **changes: Any) -> Transformer:
    """fp64: equal rows have equal vectors, whatever runs beside them."""
    return random_model(seed=seed, **changes).double()


def unmoved(model: Transformer) -> Transformer:
    """All tokens alike: what a pass commits changes nothing."""
    with torch.no_grad():
        model.embed.weight[:] = model.embed.weight[0]
    return model


def watched(
    model: Transformer,
    prompts: Any = PROMPTS,
    *,
    seats: int = 3,
    proxy_LrD: Tensor | None = None,
    rule: str = "one",
    engine: type[Watched] = Watched,
) -> tuple[Watcher, Any, list[list[int]]]:
    """What a watcher saw of some requests, the network that told it, and their answers."""
    watcher = Watcher(
        model,
        proxies(model, 1) if proxy_LrD is None else proxy_LrD,
        rank=8,
        ranks=RANKS,
        ratios=[0.25] * model.config.num_layers,
        above=0.02,
        thresholds=[0.02, 0.1],
        tops=TOPS,
        window=4,
    )
    told = engine(model, watcher)
    llm = LLM(told, method="confidence", max_num_seqs=seats, enforce_eager=True)
    watcher.engine = llm.engine
    answers = llm.generate(prompts, replace(ASKED, rules=(rule,)).params(rule))
    return watcher, told, [each.outputs[0].token_ids for each in answers]


@pytest.fixture(scope="module")
def seen() -> tuple[Watcher, Any, list[list[int]]]:
    return watched(network())


# --- drift


class Recording(Watched):
    """Keeps the tokens of each pass."""

    def __init__(self, inner: Transformer, watcher: Watcher) -> None:
        super().__init__(inner, watcher)
        self.canvases: list[Tensor] = []

    def __call__(self, token: Tensor, ctx: Any) -> Tensor:
        self.canvases.append(token.clone().long())
        return super().__call__(token, ctx)


def values_of(model: Transformer, token_N: Tensor) -> list[Tensor]:
    """[N, D] by layer, by the model's plain forward."""
    found: list[Tensor] = []
    size = model.config.num_kv_heads * model.config.head_dim
    hooks = [
        layer.get_submodule("attn.qkv").register_forward_hook(lambda *args: found.append(args[2][0, :, -size:]))
        for layer in model.layers
    ]
    with torch.no_grad():
        model(token_N[None], DenseContext(torch.arange(len(token_N)), rope=model.rope))
    for hook in hooks:
        hook.remove()
    return found


def test_drifts_are_those_of_plain_forwards() -> None:
    model, prompt = network(), 40
    watcher, told, _ = watched(model, PROMPTS[:1], engine=Recording)
    drifts_L: list[list[Tensor]] = [[] for _ in model.layers]
    canvases = told.canvases
    assert len(canvases) > 10
    for before, after in pairwise(canvases):
        num = len(after)  # an end of text makes canvases shorter
        for layer, (old, new) in enumerate(zip(values_of(model, before), values_of(model, after))):
            cosine_N = torch.cosine_similarity(old[prompt:num], new[prompt:num], dim=1)
            drifts_L[layer].append(1 - cosine_N)
    for layer, parts in enumerate(drifts_L):
        drift = torch.cat(parts)
        found = watcher.drifts["value"]
        assert int(found.count_LG[layer, 0]) == len(drift)
        assert float(found.total_LG[layer, 0]) == pytest.approx(float(drift.sum()), rel=1e-6)
        assert int(found.above_LGT[layer, 0, 0]) == int((drift > 0.02).sum())
    share = watcher.told_LP("share value")[:, 1:]
    plain = torch.stack([torch.stack([(part > 0.02).double().mean() for part in parts]) for parts in drifts_L])
    assert torch.allclose(share[:, -plain.shape[1] :], plain[:, -share.shape[1] :])


def test_counts_match_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    drift_m = torch.rand(4000, generator=generator).pow(4) * 2
    group_Gm = torch.rand(3, 4000, generator=generator) < torch.tensor([[0.9], [0.3], [0.05]])
    drifts = Drifts(2, [0.1, 0.5], torch.device("cpu"))
    for part_m, part_Gm in zip(drift_m.chunk(5), group_Gm.chunk(5, 1)):
        drifts.add(1, part_m, part_Gm)
    assert not drifts.count_LG[0].any()
    for g in range(3):
        mine = drift_m[group_Gm[g]]
        assert int(drifts.count_LG[1, g]) == len(mine)
        assert float(drifts.total_LG[1, g] / len(mine)) == pytest.approx(float(mine.mean()))
        assert drifts.above_LGT[1, g].tolist() == [int((mine > each).sum()) for each in (0.1, 0.5)]
        for share in (0.1, 0.5, 0.9, 0.99):
            exact = float(mine.sort().values[math.ceil(share * len(mine)) - 1])
            assert float(drifts.quantile_LG(share)[1, g]) == pytest.approx(exact, rel=0.02)
    assert drifts.quantile_LG(0.5)[0].isnan().all()


def test_what_does_not_change_does_not_drift(seen: Any) -> None:
    still, _, _ = watched(unmoved(network()))
    for name in IDENTIFIERS:
        assert float(still.drifts[name].quantile_LG(1.0).max()) < 1e-7, name
        assert not still.drifts[name].above_LGT.any()
        assert seen[0].drifts[name].above_LGT.any(), "a network that is moved"


def test_layer_0_moves_only_what_was_committed(seen: Any) -> None:
    """Its undecided rows are as they were; those of deeper layers are not."""
    watcher, _, _ = seen
    undecided = GROUPS.index("undecided")
    drifts = watcher.drifts["value"]
    assert float(drifts.total_LG[0, undecided]) == pytest.approx(0, abs=1e-9)
    assert float(drifts.total_LG[2, undecided]) > 1
    assert float(drifts.total_LG[0, 0]) > 0


def test_requests_do_not_meet(seen: Any) -> None:
    """One seat after the other shows what three at a time show: a seat that is taken again has no pass before."""
    one, three = watched(network(), seats=1)[0], seen[0]
    for name in IDENTIFIERS:
        assert torch.equal(one.drifts[name].count_LG, three.drifts[name].count_LG)
        assert torch.allclose(one.drifts[name].total_LG, three.drifts[name].total_LG)
    other = watched(network(), PROMPTS[:1], seats=1)[0]
    assert not torch.equal(other.drifts["value"].count_LG, three.drifts["value"].count_LG)


def test_watching_changes_no_answer(seen: Any) -> None:
    llm = LLM(network(), method="confidence")
    plain = llm.generate(PROMPTS, ASKED.params("one"))
    assert [each.outputs[0].token_ids for each in plain] == seen[2]


# --- proxies


def test_proxies_of_full_rank_choose_what_values_choose(seen: Any) -> None:
    watcher = seen[0]
    full, short = (watcher.told_LP(f"overlap {rank}") for rank in (64, 1))
    assert full.shape[0] == 2, "the first layer chooses nothing"
    assert full.nanmean() > 0.999
    assert watcher.told_LP("covered 64").nanmean() > 0.9999
    assert short.nanmean() < 0.9
    assert not watcher.told_LP("covered 1").gt(1 + 1e-6).any()


def test_wrong_proxies_are_seen() -> None:
    """Proxies that are all 0 have not drifted anywhere: the leftmost rows are chosen."""
    model = network()
    blind, _, _ = watched(model, proxy_LrD=torch.zeros_like(proxies(model, 1)))
    assert not blind.drifts["proxy"].above_LGT.any()
    assert blind.told_LP("overlap 64").nanmean() < 0.9
    assert blind.drifts["value"].above_LGT.any()


def test_random_choices_agree_by_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.rand(400, 64, generator=generator) for _ in range(2))
    count_S = torch.full((400,), 16)
    chosen, wanted = furthest(one, count_S), furthest(other, count_S)
    assert (chosen.sum(1) == 16).all()
    assert float((chosen & wanted).sum(1).double().mean() / 16) == pytest.approx(16 / 64, abs=0.01)
    assert torch.equal(chosen, furthest(one, count_S))


def test_furthest_takes_the_leftmost_of_equals() -> None:
    drift = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0], [-1.0, -1.0, 0.0, 0.0, 5.0]])
    assert furthest(drift, torch.tensor([3, 2])).nonzero().tolist() == [[0, 1], [0, 2], [0, 3], [1, 2], [1, 4]]


# --- attention


def test_attention_mass_is_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 4, 8, generator=generator)
    k = torch.randn(2, 7, 2, 8, generator=generator)
    seen_SWN = (torch.arange(7) < torch.tensor([7, 5])[:, None])[:, None].expand(2, 3, 7)
    asks_SW = torch.tensor([[True, True, False], [True, False, False]])
    mass, logits = attention_mass(q, k, seen_SWN, asks_SW)
    for s, (num, reach) in enumerate(((2, 7), (1, 5))):
        keys = k[s, :reach].repeat_interleave(2, 1)
        scores = torch.einsum("whd,nhd->whn", q[s, :num], keys) / math.sqrt(8)
        assert torch.allclose(mass[s, :reach], scores.softmax(-1).mean((0, 1)))
        assert torch.allclose(logits[s, :reach], scores.mean((0, 1)), atol=1e-6)
    assert not mass[1, 5:].any()
    assert torch.allclose(mass.sum(1), torch.ones(2))
    nobody, _ = attention_mass(q, k, seen_SWN, torch.zeros_like(asks_SW))
    assert not nobody.any()


def test_attention_adds_up(seen: Any) -> None:
    """All positions hold all of it; more decided ones hold more; none hold more than those looked at most."""
    watcher = seen[0]
    mass_LS = watcher.mass_LSN.sum(-1)
    assert torch.allclose(mass_LS[mass_LS > 0], torch.ones(()), atol=1e-5)
    own = {top: watcher.told_LP(f"own {top}") for top in TOPS}
    everything = watcher.told_LP("decided")
    assert everything.shape[0] == 3
    for top in TOPS:
        for pick in PICKS[1:]:
            some = watcher.told_LP(f"{pick} {top}")
            assert (some <= own[top] + 1e-6)[~some.isnan()].all()
            assert some.nanmean() < own[top].nanmean()
        assert (own[top] <= everything + 1e-6)[~own[top].isnan()].all()
    assert own[4].nanmean() < own[8].nanmean()


def test_random_positions_hold_their_share(seen: Any) -> None:
    watcher = seen[0]
    some, decided, count = (watcher.told_LP(name) for name in ("random 8", "decided", "num_decided"))
    by_chance = decided * 8 / count
    assert float(some.nanmean()) == pytest.approx(float(by_chance.nanmean()), rel=0.15)
    assert float(watcher.told_LP("own 8").nanmean()) > 1.03 * float(by_chance.nanmean())


# --- budgets


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_curve_is_found_again(name: str) -> None:
    known = PUBLISHED[name]
    found = fitted(known.ratios(32, min_ratio=0))
    for number in ("mu", "rho_s", "rho_p", "rho_e"):
        assert found[number] == pytest.approx(getattr(known, number), rel=0.01)
    assert found["residual"] < 0.002
    assert found["worst"] < 0.001
    assert found["residual_flat"] > 0.1, "one share for all layers does not fit it"


def test_a_zigzag_is_no_curve() -> None:
    assert fitted([0.02, 0.4] * 8)["residual"] > 0.5


def test_what_is_printed_runs() -> None:
    curve = rounded(BudgetCurve(0.61234567, 0.012345678, 0.34567891, 0.11111111))
    options = eval(paste(curve))
    sampling = {"threshold": 2.0, "refresh_interval": 50, "answer_interval": 7}
    llm = LLM(network(), method=Method(name="measured", title="", policy="drift", options=options, sampling=sampling))
    assert llm.engine.axes.policy.ratios == pytest.approx(curve.ratios(3, min_ratio=0))
    output = llm.generate(PROMPTS, ASKED.params("one"))[0].outputs[0]
    assert output.num_rows < (40 + 14) * output.num_forward_passes
    for wrong in ("0.6,0.01,0.3,0.1", (0.6, 0.4, 0.3, 0.1), (0.6, 0.01, 0.3), (1.6, 0.01, 0.3, 0.1), None):
        with pytest.raises(MethodError, match="curve"):
            Method(name="measured", title="", policy="drift", options={"curve": wrong})


# --- result files


@pytest.fixture(scope="module")
def result(tmp_path_factory: Any) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("profile")
    results = Results("profile", "cpu", out)
    facts = {"model": "tiny", "dtype": "float64", "prompts": "own"}
    profile.run(results, network(), None, PROMPTS, ASKED, facts=facts, tell=quiet)
    return json.loads((out / "profile.json").read_text()), out


def keys(rows: Sequence[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


def test_files_are_complete(result: Any) -> None:
    data, out = result
    assert {"device", "versions", "date", "commit", "threads"} <= set(data["environment"])
    assert data["network"]["num_layers"] == 3
    for rule in ("one", "threshold"):
        drift = profile_plot.select(data, rule, part="drift")
        assert sorted(keys(drift, "identifier", "group", "layer")) == sorted(
            (name, group, layer) for name in IDENTIFIERS for group in GROUPS for layer in range(3)
        )
        assert all(set(row["above"]) == {"0.01", "0.02", "0.05", "0.1", "0.2"} for row in drift)
        assert all(("most_above" in row) == (row["group"] == "answer") for row in drift)
        attention = profile_plot.select(data, rule, part="attention")
        assert set(keys(attention, "top", "layer")) == {(top, layer) for top in (8, 16, 32) for layer in range(3)}, (
            "no pass has more than 64 decided positions"
        )
        agreement = profile_plot.select(data, rule, part="agreement")
        assert sorted(keys(agreement, "rank", "layer")) == [(rank, layer) for rank in data["ranks"] for layer in (1, 2)]
        assert {row["ratio"] for row in agreement} == {0.25}
        assert len([each for each in data["fits"] if each["rule"] == rule]) == 2 * len(IDENTIFIERS)
        assert data[f"passes_{rule}"] > 3
    assert data["passes_threshold"] < data["passes_one"]
    assert data["ranks"] == [1, 2, 4, 8, 16, 32, 64]
    with (out / "profile.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(data["rows"])
    assert {"above.0.02", "quantile.0.5", "own", "overlap", "device", "commit"} <= set(lines[0])


def test_numbers_are_what_json_can_say() -> None:
    assert profile.short({"a": [math.nan, 1 / 3], "b": 7, "c": "x"}) == {"a": [None, 0.333333], "b": 7, "c": "x"}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"rules": ("two",)}, "'two'"),
        ({"rules": ()}, "no rule"),
        ({"above": 0}, "above is 0"),
        ({"ratio": 1.5}, "ratio is 1.5"),
        ({"window": 0}, "window is 0"),
    ],
)
def test_what_cannot_be_asked(given: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Asked(**given)


def test_two_layers_have_no_curve(tmp_path: Path) -> None:
    results = Results("profile", "cpu", tmp_path)
    profile.run(results, network(n_layers=2), None, PROMPTS, replace(ASKED, rules=("threshold",)), tell=quiet)
    assert results.data["fits"] == []
    assert profile_plot.select(results.data, "threshold", part="agreement")


# --- pages


SECTIONS = ("profile-seen", "profile-drift", "profile-budgets", "profile-code", "profile-attention", "profile-proxies")


@pytest.mark.parametrize("name", SECTIONS)
def test_without_results_a_section_stays(docs: Any, name: str) -> None:
    page = f"<!-- begin {name} -->\nas it was\n<!-- end {name} -->\n"
    assert docs.fresh(page) == page


def test_sections(docs: Any, result: Any) -> None:
    data, _ = result
    (docs.results.RESULTS / "profile.json").write_text(json.dumps(data))
    (docs.results.RESULTS / "profile_other.json").write_text(json.dumps(data | {"model": "other"}))
    page = "".join(f"<!-- begin {name} -->\n<!-- end {name} -->\n" for name in SECTIONS)
    made = docs.fresh(page, docs.results.ROOT / "docs")
    assert made.count("One token a pass:\n\n| layer") == 2 * 3
    assert "(results/profile_other.svg)" in made
    assert made.count("`other`:") == 5
    names: dict[str, Any] = {}
    exec(docs.TABLES["profile-code"]().split("```")[1].removeprefix("python"), names)
    assert Axes.of(names["method"], network().config).policy.ratios == pytest.approx(
        next(each for each in data["fits"] if each["of"] == "most")["curve"], rel=1e-4
    )


def test_the_picture(result: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    data = result[0] | {"rows": profile_plot.select(result[0], "one")}
    for name in ("one.svg", "two.svg"):
        profile_plot.draw(data, tmp_path / name)
    drawn = (tmp_path / "one.svg").read_bytes()
    assert drawn == (tmp_path / "two.svg").read_bytes()
    assert drawn.count(b"<svg") == 1


def test_less_than_the_least_is_no_drift() -> None:
    drifts = Drifts(1, [0.1], torch.device("cpu"))
    drifts.add(0, torch.tensor([0.0, LEAST / 2, 2.0]), torch.ones(3, 3, dtype=torch.bool))
    assert drifts.quantile_LG(0.5)[0].tolist() == [0, 0, 0]
    assert float(drifts.quantile_LG(1.0)[0, 0]) == pytest.approx(2, rel=0.05)
