"""Every method beside every other, on a CPU: which cells there are, what a row counts, and what is made of the rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from unmask.bench.methods import (
    BASES,
    CACHES,
    CURVES,
    FEWEST_POINTS,
    MEASURED,
    ONE,
    RATES,
    RULES,
    SETTINGS,
    Bench,
    Cell,
    Setting,
    cells,
    chosen,
    compared,
    counted,
    curves,
    gains,
    only,
    place,
    run,
)
from unmask.bench.results import Results
from unmask.cli.catalog import shipped_dir
from unmask.engine.outputs import CompletionOutput
from unmask.errors import ConfigError
from unmask.eval.paired import aup, paired_difference
from unmask.methods import _ALLOWED, DRAFTERS, METHODS, OPTIONS, POLICIES
from unmask.models.config import ModelConfig

SHORT = SETTINGS["short"]
TINY = Setting(name="short", per_request=1, max_tokens=48, num_problems=3, seats=4)
AT = {"threshold": 0.9}
FEW = [
    Cell(method="confidence", sampling=AT),
    Cell(method="fast-dllm-dual", sampling=AT),
    Cell(method="confidence", drafter="nested", sampling=ONE),
    Cell(method="freedave", sampling={"factor": 1.0}),
    Cell(method="flash-verify", sampling=AT),
    Cell(method="d2f", sampling=AT),
]


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    directory = shipped_dir()
    assert directory is not None
    return ModelConfig.from_pretrained(directory)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(TINY, "cpu")


def quiet(_: str) -> None:
    pass


# Cells


YARDSTICKS = {("whole", "recompute"): "dream, by its own schedule", ("pipeline", "recompute"): "d2f, without its cache"}
"""Pairs of frontier and policy that no drafter is tried on, and what they are there for."""
UNTRIED = {
    "shift_type": "is of networks with shifted logits",
    "curve": "is none but a budget's own for this network",
    "form": "is of a curve",
    "first_layer": "is one layer of nine",
    "scored": "is of prompts, which are short here",
}
"""Options of caches that are asked with their defaults only."""


def test_every_method_rule_and_drafter() -> None:
    every = cells(SHORT, curves=True)
    assert len({cell.name for cell in every}) == len(every)
    shown = {METHODS[cell.method].members for cell in every}
    assert shown == {row.members for row in METHODS.values()}
    pairs = {row.members[:2] for row in METHODS.values()}
    assert {METHODS[base].members[:2] for base in BASES} == pairs - set(YARDSTICKS)
    assert {policy for _, policy in pairs} == set(POLICIES)
    for pair in pairs:
        mine = [cell for cell in every if METHODS[cell.method].members[:2] == pair]
        tried = {cell.drafter or METHODS[cell.method].drafter for cell in mine}
        assert tried == ({"none"} if pair in YARDSTICKS else set(DRAFTERS)), pair
        rules = {name for cell in mine for name in cell.sampling}
        wanted = {"steps"} if pair == ("whole", "recompute") else {"threshold", "factor", "entropy_bound"}
        assert wanted <= rules, pair


def test_every_word_of_every_option_of_a_cache() -> None:
    """And a curve over every number that a cache's requests say."""
    every = cells(SHORT, curves=True)
    for base in BASES:
        row = METHODS[base]
        mine = [cell for cell in every if METHODS[cell.method].policy == row.policy and cell.drafter is None]
        for option in {*OPTIONS.get(row.policy, {})} - set(UNTRIED):
            if isinstance(words := _ALLOWED[option], tuple):
                asked = {cell.row().option(option) for cell in mine}
                assert asked == set(words), (base, option)
        for name in set(POLICIES[row.policy]) - {"refresh_window"}:
            own = [cell for cell in every if cell.method == base and name in cell.sampling]
            assert len({cell.sampling[name] for cell in own}) >= FEWEST_POINTS, (base, name)
            assert name in CURVES


def test_budgets_are_those_of_the_profile(config: ModelConfig) -> None:
    """Of the weights that ship, with the same share in all layers beside them."""
    profile = json.loads((Path(__file__).parents[2] / "docs" / "results" / "profile.json").read_text())
    found = {each["rule"]: each for each in profile["fits"] if (each["identifier"], each["of"]) == ("proxy", "most")}
    assert profile["threshold"] == RULES[1]["threshold"]
    for (rule, budget, flat), name in zip(MEASURED, ("threshold", "one"), strict=True):
        assert rule == {"threshold": RULES[1], "one": ONE}[name]
        assert budget["curve"] == tuple(found[name][each] for each in ("mu", "rho_s", "rho_p", "rho_e"))
        assert budget["ratio"] == found[name]["rho_p"]
        assert flat["ratio"] == pytest.approx(found[name]["mean_curve"], rel=1e-3)
    asked = [cell for cell in cells(SHORT) if "curve" in cell.options]
    assert [cell.part for cell in asked] == ["first"] * 2
    assert all(place(cell, config, 128) is not None for cell in asked)


def test_the_most_wanted_are_first() -> None:
    first = [cell.method for cell in cells(SHORT)]
    order = list(dict.fromkeys(first))
    assert order[:2] == ["confidence", "window"]
    assert order[2 : 2 + len(CACHES)] == list(CACHES)
    assert order[2 + len(CACHES) :][:4] == ["flash-verify", "one-pass", "one-pass-cache", "freedave"]
    assert cells(SHORT)[0].sampling == ONE
    for more, parts in ((False, ["first", "variant", "grid"]), (True, ["first", "variant", "curve", "grid"])):
        assert list(dict.fromkeys(cell.part for cell in cells(SHORT, curves=more))) == parts
    assert len(cells(SHORT)) <= 200
    assert len(cells(SHORT, curves=True)) <= 440


@pytest.mark.parametrize("method", [*CACHES, "flash-verify", "one-pass", "freedave", "d2f"])
def test_what_a_cell_is_compared_with_is_asked_before_it(method: str, config: ModelConfig) -> None:
    mine = [cell for cell in chosen(cells(SHORT), [method], config, 128) if cell.part == "first"]
    plain = {place(cell, config, 128) for cell in mine if METHODS[cell.method].policy == "recompute"}
    assert all(place(cell, config, 128) in plain for cell in mine if cell.method == method)
    assert {cell.method for cell in mine} - {method} <= {"confidence", "window", "d2f-uncached"}


def test_some_cells_and_what_they_are_compared_with(config: ModelConfig) -> None:
    every = cells(SHORT, curves=True)
    found = {cell.name for cell in only(every, ["flash-cache threshold=0.9"], config, 128)}
    assert found == {"flash-cache threshold=0.9", "window threshold=0.9 decode_window=16"}, "a whole name is one cell"
    found = {cell.name for cell in only(every, ["flash-cache threshold=0"], config, 128)}
    assert found > {"flash-cache threshold=0.9", "flash-cache threshold=0.95", "window threshold=0.9 decode_window=16"}
    assert {cell.method for cell in every if cell.name in found} == {"flash-cache", "window"}
    with pytest.raises(ConfigError, match="threshold=7"):
        only(every, ["threshold=0.9", "threshold=7"], config, 128)


def test_places(config: ModelConfig) -> None:
    cache, window = (place(Cell(method=name, sampling=AT), config, 128) for name in ("flash-cache", "window"))
    assert cache != window  # the one recommends 16 positions, the other 32
    assert cache == place(Cell(method="window", sampling={**AT, "decode_window": 16}), config, 128)
    assert cache == place(Cell(method="flash-verify", sampling={**AT, "gamma": 0.5}), config, 128)
    assert place(FEW[2], config, 128) is None


# A run


def test_rows_and_refusals(bench: Bench, tmp_path: Path) -> None:
    told: list[str] = []
    results = Results("methods_short", "cpu", tmp_path)
    run(results, bench, FEW, tell=told.append)
    rows = {row["cell"]: row for row in results.rows}
    assert list(rows) == [cell.name for cell in FEW]
    plain, dual, never, refused, verified, pipeline = rows.values()
    assert "policy 'recompute' recomputes" in never["refused"]
    assert "factor=1.0" in refused["refused"]
    for row in (plain, dual, verified, pipeline):
        assert row["num_requests"] == row["num_problems"] == 3
        assert row["num_correct"] == sum(map(int, results.data["right"][row["cell"]]))
        assert row["accuracy"] == row["num_correct"] / 3
        assert row["tokens_per_pass"] == row["num_tokens"] / row["num_passes"]
        assert row["rows_per_token"] == pytest.approx(1 / row["tokens_per_row"])
        assert row["cache_bytes_per_position"] == 2 * 5 * 64 * 4 * 9  # K and V, 5 heads of 64, fp32, 9 layers
    assert plain["num_steps"] == plain["num_passes"]
    assert verified["num_steps"] < verified["num_passes"]
    assert dual["num_rows"] < plain["num_rows"]
    assert (plain["attention_as_trained"], pipeline["attention_as_trained"]) == (True, False)
    assert plain["to_no_cache"] is plain["to_one_a_pass"] is None
    assert dual["to_no_cache"]["of"] == plain["cell"]
    assert dual["to_one_a_pass"] is None  # nobody was asked for that
    assert verified["to_no_cache"] is None  # nothing is without cache in its window
    assert sum("refused" in line for line in told) == 2
    assert json.loads((tmp_path / "methods_short.json").read_text())["rows"] == results.rows


def test_options_that_are_not_words(bench: Bench, tmp_path: Path) -> None:
    """A budget's four numbers go through the files, and a run that goes on knows the cell."""
    budget = next(cell for cell in cells(SHORT) if "curve" in cell.options)
    asked = [Cell(method="confidence", sampling=budget.sampling), budget]
    for _ in range(2):
        run(results := Results("methods_short", "cpu", tmp_path), bench, asked, tell=quiet)
    (row,) = [row for row in results.rows if row["cell"] == budget.name]
    assert row["values"]["ratio"] == row["said"]["ratio"] == budget.options["ratio"]
    assert list(row["said"]["curve"]) == list(budget.options["curve"])
    assert row["to_no_cache"]["of"] == asked[0].name


def test_a_cut_run_goes_on(bench: Bench, tmp_path: Path) -> None:
    first = Results("methods_short", "cpu", tmp_path)
    run(first, bench, FEW[:2], seconds=0, tell=quiet)
    assert first.data["left_out"] == [cell.name for cell in FEW[:2]]
    run(first := Results("methods_short", "cpu", tmp_path), bench, FEW[:1], tell=quiet)
    kept = dict(first.rows[0])
    told: list[str] = []
    again = Results("methods_short", "cpu", tmp_path)
    run(again, bench, FEW[:2], tell=told.append)
    assert len(told) == 1
    assert again.rows[0] == kept
    assert json.loads((tmp_path / "methods_short.json").read_text())["rows"] == again.rows
    assert again.rows[1]["to_no_cache"]["of"] == kept["cell"]
    assert again.data["left_out"] == []


def test_workers_find_the_same_rows(bench: Bench, tmp_path: Path) -> None:
    """In two processes, in whatever order; refusals come back too."""
    both = [Results(name, "cpu", tmp_path) for name in ("methods_one", "methods_two")]
    for results, workers in zip(both, (1, 2)):
        run(results, bench, FEW, workers=workers, tell=quiet)
    one, two = ([{**row, "seconds": 0} for row in results.rows] for results in both)
    assert one == two
    assert both[0].data["right"] == both[1].data["right"]
    assert len(one) == len(FEW)


def test_workers_begin_nothing_when_time_is_over(bench: Bench, tmp_path: Path) -> None:
    run(results := Results("methods_short", "cpu", tmp_path), bench, FEW, workers=2, seconds=0, tell=quiet)
    assert results.rows == []
    assert results.data["left_out"] == [cell.name for cell in FEW]


def test_other_problems_are_another_run(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "methods_short.json"
    run(Results("methods_short", "cpu", tmp_path), bench, FEW[:1], tell=quiet)
    file.write_text(file.read_text().replace('"max_tokens": 48', '"max_tokens": 49'))
    told: list[str] = []
    run(Results("methods_short", "cpu", tmp_path), bench, FEW[:1], tell=told.append)
    assert len(told) == 1


def test_asking_again_takes_the_same_rows(bench: Bench) -> None:
    """`d2f` could keep the prompts of the cell before."""
    (one, _), (two, _) = (bench.measure(FEW[-1]) for _ in range(2))
    assert one["num_rows"] == two["num_rows"] > 0


def test_several_problems_a_request() -> None:
    setting = Setting(name="long", per_request=2, max_tokens=96, num_problems=3, seats=2)
    results = Results("methods_long", "cpu", None)
    run(results, Bench(setting, "cpu"), FEW[:2], tell=quiet)
    assert [(row["num_requests"], row["num_problems"]) for row in results.rows] == [(2, 4), (2, 4)]
    ours, theirs = ([*map(int, results.data["right"][cell.name])] for cell in (FEW[1], FEW[0]))
    assert results.rows[1]["to_no_cache"] == {
        "of": FEW[0].name,
        **paired_difference(ours, theirs, 2).to_dict(),
    }


# What is made of rows


def test_counters() -> None:
    """Only what precedes the end of text is useful."""
    given = {"index": 0, "text": "", "finish_reason": "stop"}
    one = CompletionOutput(token_ids=[5] * 6, num_forward_passes=4, num_steps=2, num_rows=40, num_committed=9, **given)
    two = CompletionOutput(token_ids=[5] * 2, num_forward_passes=2, num_steps=2, num_rows=8, num_committed=2, **given)
    found = counted([one, two])
    assert [found[name] for name in ("num_tokens", "num_passes", "num_steps", "num_rows")] == [8, 6, 4, 48]
    assert (found["tokens_per_step"], found["tokens_per_pass"]) == (2, 8 / 6)
    assert (found["rows_per_token"], found["passes_per_request"]) == (6, 3)


def row(value: float | None, accuracy: float, rate: float, **more: Any) -> dict[str, Any]:
    values = {"refresh_interval": value} if value is not None else {}
    about = {"cell": f"at {value}", "method": "fast-dllm-dual", "drafter": "none", "said": dict(values)}
    return about | {"values": {**values, "threshold": 2.0}, "accuracy": accuracy, "tokens_per_pass": rate} | more


def test_curves() -> None:
    """Rows that differ in one value only; a value that is not there comes last."""
    rows = [row(None, 0.9, 3.0), row(8, 0.95, 2.0), row(2, 0.99, 1.0), row(4, 0.5, 9.0, method="fast-dllm-prefix")]
    (curve,) = curves(rows)
    assert (curve["over"], curve["values"], curve["cells"]) == (
        "refresh_interval",
        [2, 8, None],
        ["at 2", "at 8", "at None"],
    )
    assert curve["aup"] == aup([(1.0, 99.0), (2.0, 95.0)], 99.0)  # 90 is more than 5 under 99
    assert curves(rows[1:]) == []


def test_what_trying_ahead_gains() -> None:
    """Over the same policy's curve, in the middle of two points too; over another window's it says nothing."""

    def cell(drafter: str, accuracy: float, rate: float, **values: Any) -> dict[str, Any]:
        about = {
            "frontier": "window",
            "policy": "tracked",
            "drafter": drafter,
            "values": {"decode_window": 16, **values},
        }
        return about | {"accuracy": accuracy} | dict.fromkeys(RATES, rate)

    plain = [cell("none", 0.98, 4.0, threshold=0.9), cell("none", 0.96, 8.0, threshold=0.5)]
    plain.append(cell("none", 0.99, 1.0, **ONE))  # no point of the curve
    ahead = {"threshold": 0.9, "gamma": 0.8, "search": 8, "verify_rows": 32, "max_search": 8}
    better = cell("two-pass", 0.97, 9.0, **ahead)
    surer, elsewhere = (
        cell("two-pass", 0.99, 3.0, **ahead),
        cell("two-pass", 0.97, 9.0, **ahead | {"decode_window": 32}),
    )
    gains([*plain, better, surer, elsewhere])
    assert better["gains"] == dict.fromkeys(RATES, pytest.approx(0.5))
    assert surer["gains"] == dict.fromkeys(RATES)
    assert elsewhere["gains"] is None
    assert "gains" not in plain[0]


def test_nothing_is_compared_with_itself() -> None:
    one = {"cell": "a", "num_problems": 2, "num_requests": 2}
    assert compared(one, one, {"a": "10"}) is compared(one, None, {"a": "10"}) is None
    found = compared({**one, "cell": "b"}, one, {"a": "10", "b": "11"})
    assert found is not None
    assert (found["of"], found["difference"]) == ("a", 0.5)


# What scripts/docs makes of them


def measured(docs: Any, bench: Bench, asked: Sequence[Cell], **options: Any) -> str:
    run(Results("methods_short", "cpu", docs.results.RESULTS), bench, asked, tell=quiet, **options)
    table: str = docs.TABLES["methods-short"]()
    return table


def test_tables_and_a_picture(docs: Any, bench: Bench) -> None:
    rules = [Cell(method="confidence", sampling={"threshold": value}) for value in (0.95, 0.8, 0.5)]
    table = measured(docs, bench, [*rules, *FEW, Cell(method="fast-dllm-dual", sampling=ONE)])
    assert table.count("| `confidence` | threshold 0.") == 4
    assert "| `confidence` | threshold | - | 0.5: " in table  # and their curve
    assert "| `fast-dllm-dual` | one token a pass |" in table
    assert "`d2f` (weights not made for it)" in table
    assert "| `confidence` + nested | one token a pass | method" in table
    assert "3 held-out problems, 48 answer positions, float32" in table
    page = "<!-- begin methods-long -->\nas it was\n<!-- end methods-long -->\n"
    assert docs.fresh(page) == page
    pytest.importorskip("matplotlib")
    assert docs.draw() == ["methods_short.svg"]
    assert (docs.results.ROOT / "docs" / "methods_short.svg").stat().st_size > 0


def test_a_page_has_the_rows_of_its_methods(docs: Any, bench: Bench) -> None:
    rules = [Cell(method="confidence", sampling=rule) for rule in (ONE, {"factor": 1.0}, {"entropy_bound": 0.1})]
    measured(docs, bench, [*rules, Cell(method="fast-dllm-dual", sampling=ONE)])
    of_methods = docs.TABLES["method-results"]
    assert of_methods("factor").count("| `confidence` |") == 1  # another row's rule, in the same places
    assert "| `confidence` | entropy_bound 0.1 |" in of_methods("entropy-bound")
    assert of_methods("fast-dllm-prefix", "fast-dllm-dual").count("| `fast-dllm-dual` |") == 1
    assert of_methods("dream").count("Not measured yet.") == 2


def test_what_was_left_out_is_said(docs: Any, bench: Bench) -> None:
    assert "Left out for lack of time: 2 of 2 cells" in measured(docs, bench, FEW[:2], seconds=0)


def test_caches_beside_none(docs: Any, bench: Bench) -> None:
    waits = [{}, *({"refresh_interval": passes} for passes in (1, 2))]
    caches = [Cell(method="fast-dllm-dual", sampling={**AT, **more}) for more in waits]
    alone = Cell(method="flash-cache", sampling=AT)  # what decides in its places was not asked
    measured(docs, bench, [FEW[0], *caches, alone])
    rows = {row["cell"]: row for row in docs.results.single("methods_short")["rows"]}
    share = rows[caches[0].name]["num_rows"] / rows[FEW[0].name]["num_rows"]
    table = docs.TABLES["methods-compared"]("short")
    assert share < 1
    assert f"| {share:.1%} |" in table
    assert "flash-cache" not in table
    lines = docs.TABLES["methods-compared-curves"]("short").splitlines()
    assert [line for line in lines if f"; none: +0.0 ({share:.0%}, " in line and "1: +0.0 (100%, 1.00)" in line]


def test_what_drafts_gain(docs: Any, bench: Bench) -> None:
    rules = [Cell(method="flash-cache", sampling={"threshold": value}) for value in (0.99, 0.5)]
    measured(docs, bench, [*rules, FEW[4]])
    rows = {row["cell"]: row for row in docs.results.single("methods_short")["rows"]}
    gain = rows[FEW[4].name]["gains"]["tokens_per_step"]
    lines = docs.TABLES["methods-gained"]("short").splitlines()
    told = "-" if gain is None else f"{gain:+.1%}"
    assert [line for line in lines if line.startswith("| `flash-verify` | threshold 0.9 |") and f"| {told} |" in line]
    assert not [line for line in lines if line.startswith("| `flash-cache`")]
