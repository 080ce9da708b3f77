"""Update ratios of the layers: the published numbers, their bounds, and curves found again from what they gave.

L layers, G positions of an answer
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles.golden import tiny_model
from unmask.cache.budget import MIN_RATIO, PUBLISHED, BudgetCurve, counts, fit, published, uniform
from unmask.engine.axes import Axes
from unmask.errors import ConfigError
from unmask.methods import Method

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "spa_budget.json"
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]
FORMS = ("released", "paper")

rho = st.floats(1e-6, 1)
curves = st.builds(
    lambda mu, p, s, e: BudgetCurve(mu, min(p, max(1e-6, p * s)), p, min(p, max(1e-6, p * e))),
    st.floats(0, 1),
    rho,
    st.floats(0, 1),
    st.floats(0, 1),
)


def ratios_of(case: dict[str, Any]) -> list[float]:
    """What we give for a golden case."""
    if "curve" in case:
        said = case["curve"]
        curve = BudgetCurve(said["peak_pos"], said["freq_start"], said["freq_peak"], said["freq_end"])
        peak = said["freq_peak"] * said["scale"]
        return curve.ratios(said["n_layers"], max_ratio=peak, min_ratio=said["freq_min"])
    if case["update_ratio_dist"] == "uniform":
        return uniform(len(case["ratio"]), case["max_update_ratio"])
    return published(case["model"]).ratios(
        len(case["ratio"]),
        max_ratio=case["max_update_ratio"],
        mean_ratio=case["avg_update_ratio"],
        min_ratio=case["min_update_ratio"],
    )


@pytest.mark.parametrize("case", CASES, ids=[each["id"] for each in CASES])
def test_golden_ratios_and_counts(case: dict[str, Any]) -> None:
    ratio_L = ratios_of(case)
    assert ratio_L == pytest.approx(case["ratio"], rel=1e-14)
    for num_positions, want in case["k"].items():
        assert counts(int(num_positions), ratio_L) == want


def test_the_golden_data_sees_the_form_the_bound_and_the_side() -> None:
    """Negative control: the paper's depths, no bound, and a bound on both sides each give other counts."""
    want = CASES[0]["k"]["256"]
    curve = published(CASES[0]["model"])
    assert counts(256, curve.ratios(32, max_ratio=0.25)) == want
    assert counts(256, curve.ratios(32, max_ratio=0.25, min_ratio=MIN_RATIO, form="paper")) != want
    assert counts(256, curve.ratios(32, max_ratio=0.25, min_ratio=0)) != want
    bound_L = curve.ratios(32, max_ratio=0.25, min_ratio=0.2)
    assert counts(256, [max(each, 0.2) for each in bound_L]) != counts(256, bound_L) == CASES[1]["k"]["256"]


def test_means_of_the_published_curves() -> None:
    """A quarter at most is 16% of the rows on average for LLaDA, and 19% for Dream."""
    layers = {"LLaDA-8B-Instruct": 32, "Dream-v0-Instruct-7B": 28}
    mean = {name: np.mean(PUBLISHED[name].ratios(num, max_ratio=0.25)) for name, num in layers.items()}
    assert mean["LLaDA-8B-Instruct"] == pytest.approx(0.1622, abs=5e-5)
    assert mean["Dream-v0-Instruct-7B"] == pytest.approx(0.1938, abs=5e-5)


@given(
    curves,
    st.integers(1, 40),
    st.one_of(st.none(), rho),
    st.floats(0, 1),
    st.sampled_from(FORMS),
    st.integers(1, 2000),
)
def test_bounds_and_two_monotone_sides(
    curve: BudgetCurve, num_layers: int, max_ratio: float | None, least: float, form: Any, num_positions: int
) -> None:
    peak = curve.rho_p if max_ratio is None else max_ratio
    ratio_L = curve.ratios(num_layers, max_ratio=max_ratio, min_ratio=least * peak, form=form)
    last = num_layers if form == "released" else max(1, num_layers - 1)
    depth_L = [layer / last for layer in range(num_layers)]
    if form == "paper" and num_layers == 1:
        depth_L = [curve.mu]
    before = [each for each, depth in zip(ratio_L, depth_L) if depth < curve.mu]
    behind = [each for each, depth in zip(ratio_L, depth_L) if depth >= curve.mu]
    assert len(ratio_L) == num_layers
    assert before == sorted(before)
    assert behind == sorted(behind, reverse=True)
    assert all(least * peak <= each <= peak for each in before)
    end = peak * curve.rho_e / curve.rho_p
    assert all(end * (1 - 1e-12) <= each <= peak for each in behind)
    num_L = counts(num_positions, ratio_L)
    assert all(1 <= num <= num_positions for num in num_L)
    assert all(num == 1 or num <= num_positions * each for num, each in zip(num_L, ratio_L))
    assert all(num > num_positions * each - 1 for num, each in zip(num_L, ratio_L))


@given(curves, st.integers(1, 40), st.sampled_from(FORMS), st.floats(1e-3, 1))
def test_a_mean_is_met_before_the_bound(curve: BudgetCurve, num_layers: int, form: Any, share: float) -> None:
    shape = curve.ratios(num_layers, max_ratio=1, min_ratio=0, form=form)
    mean = share * sum(shape) / num_layers
    ratio_L = curve.ratios(num_layers, mean_ratio=mean, min_ratio=0, form=form)
    assert sum(ratio_L) / num_layers == pytest.approx(mean, rel=1e-9)
    lifted = curve.ratios(num_layers, mean_ratio=mean, min_ratio=share / 2, form=form)
    assert all(a == b or a == share / 2 for a, b in zip(lifted, ratio_L))


@given(curves, st.integers(2, 40))
def test_the_papers_form_reaches_both_ends(curve: BudgetCurve, num_layers: int) -> None:
    ratio_L = curve.ratios(num_layers, form="paper")
    # With the peak at an end, that end has the peak's ratio.
    assert ratio_L[0] == pytest.approx(curve.rho_s if curve.mu > 0 else curve.rho_p)
    assert ratio_L[-1] == pytest.approx(curve.rho_e if curve.mu < 1 else curve.rho_p)


def test_the_papers_formula() -> None:
    """Layers from 1 on, peak at layer 9 of 17: written out, and its end differs from the released one's."""
    curve = BudgetCurve(0.5, 0.05, 0.3, 0.2)
    want = [0.3 * math.exp(math.log(0.05 / 0.3) * ((layer - 9) / 8) ** 2) for layer in range(1, 10)]
    want += [0.3 * math.exp(math.log(0.2 / 0.3) * ((layer - 9) / 8) ** 2) for layer in range(10, 18)]
    assert curve.ratios(17, form="paper") == pytest.approx(want)
    assert curve.ratios(17, min_ratio=0)[-1] > 0.2 * 1.05


def test_a_ratio_that_is_no_fraction_of_two_reaches_its_count() -> None:
    """The peak is the ratio asked, bit for bit: 0.3 * (0.25 / 0.3) could miss a whole row of 64."""
    for name in PUBLISHED:
        assert max(published(name).ratios(40, max_ratio=0.25)) == 0.25
    assert counts(3, [0.1, 1.0, 0.5]) == [1, 3, 1]


def test_a_peak_below_the_bound_lowers_it() -> None:
    """A row that asks for little gets little, down to nothing; the bound is held where it is said."""
    curve = PUBLISHED["LLaDA-8B-Instruct"]
    for peak in (0.05, 0.0):
        ratio_L = curve.ratios(32, max_ratio=peak)
        assert (max(ratio_L), ratio_L[0]) == (peak, peak)
        assert ratio_L[-1] == pytest.approx(peak * 0.6058, rel=1e-3)
    assert curve.ratios(8, mean_ratio=0) == uniform(8, 0) == [0] * 8
    assert counts(256, [0, 1e-6, 0.01]) == [0, 1, 2]


# --- rows of the table


def ratios_for(name: str, checkpoint: Path | None = None, **options: Any) -> list[float]:
    family, layers = ("dream", 28) if name.startswith("Dream") else ("llada", 32)
    config = replace(tiny_model(f"tiny-{family}").config, num_layers=layers)
    method = Method(name="mine", title="", policy="drift", options={"curve": "auto", **options})
    found: list[float] = Axes.of(method, config, None, checkpoint).policy.ratios  # type: ignore[attr-defined]
    return found


def checkpoint_of(parent: Path, *folders: str, **config: Any) -> Path:
    path = parent.joinpath(*folders)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("case", [case for case in CASES if "model" in case], ids=lambda case: case["id"])
def test_rows_have_the_golden_ratios(case: dict[str, Any], tmp_path: Path) -> None:
    """As options say them, of the network that the checkpoint's name says; and of no other one."""
    said = {"ratio": case["max_update_ratio"], "mean_ratio": case["avg_update_ratio"]}
    options = {name: value for name, value in said.items() if value is not None}
    if case["update_ratio_dist"] == "uniform":
        options["curve"] = "uniform"
    else:
        options["min_ratio"] = case["min_update_ratio"]
    got = ratios_for(case["model"], checkpoint_of(tmp_path, case["model"]), **options)
    assert got == pytest.approx(case["ratio"], rel=1e-14)
    if case["update_ratio_dist"] != "uniform":
        for other in set(PUBLISHED) - {case["model"]}:
            swapped = ratios_for(other, checkpoint_of(tmp_path, other), **options)
            assert len(swapped) != len(got) or swapped != pytest.approx(case["ratio"], rel=1e-3)


def test_the_name_goes_before_the_shape(tmp_path: Path) -> None:
    """LLaDA-1.5 has the layers of LLaDA-8B-Instruct. Its name may be the directory's, the hub's or the config's."""
    want = {name: ratios_for(name, checkpoint_of(tmp_path, name)) for name in PUBLISHED}
    assert want["LLaDA-1.5"] != want["LLaDA-8B-Instruct"]
    hub = ("hub", "models--GSAI-ML--LLaDA-1.5", "snapshots", "0a1b2c")
    for checkpoint in (
        checkpoint_of(tmp_path, "lower", "llada-1.5"),
        checkpoint_of(tmp_path, *hub),
        checkpoint_of(tmp_path, "mine", _name_or_path="GSAI-ML/LLaDA-1.5"),
        checkpoint_of(tmp_path, "tuned", "LLaDA-1.5", _name_or_path="GSAI-ML/LLaDA-8B-Instruct"),
    ):
        assert ratios_for("LLaDA-1.5", checkpoint) == want["LLaDA-1.5"], checkpoint
    for name in ("LLaDA-8B-Instruct", "Dream-v0-Instruct-7B"):  # of no name that is known, by shape
        for checkpoint in (None, checkpoint_of(tmp_path, f"my-{name}", _name_or_path=3)):
            assert ratios_for(name, checkpoint) == want[name]


def test_forms_and_bounds_of_a_rows_curve() -> None:
    curve = PUBLISHED["LLaDA-8B-Instruct"]
    name = "LLaDA-8B-Instruct"
    assert ratios_for(name, form="paper") == curve.ratios(32, max_ratio=0.25, form="paper")
    assert ratios_for(name, form="paper", min_ratio=0.1) == curve.ratios(
        32, max_ratio=0.25, min_ratio=0.1, form="paper"
    )
    own = (0.75, 0.03, 0.25, 0.13)
    assert ratios_for(name, curve=own) == curve.ratios(32, min_ratio=0)
    assert ratios_for(name, curve=own, min_ratio=1 / 16) == curve.ratios(32)
    assert ratios_for(name, curve=own, mean_ratio=0.1) == curve.ratios(32, mean_ratio=0.1, min_ratio=0)
    assert ratios_for(name, curve="uniform", mean_ratio=0.1) == [0.1] * 32
    assert ratios_for(name, ratio=0) == [0] * 32
    assert max(ratios_for(name, ratio=0.05)) == 0.05
    with pytest.raises(ConfigError, match=r"min_ratio is 0.2; it lies in \[0, 0.1\]"):
        ratios_for(name, ratio=0.1, min_ratio=0.2)
    with pytest.raises(ConfigError, match=r"mean_ratio is 0\.9"):
        ratios_for(name, mean_ratio=0.9)


@pytest.mark.parametrize(
    ("rank", "want"), [(1, 32), (1.0, 32), (0.5, 16), (0.34, 10), (0.001, 1), (2, 2), (32, 32), (128, 32)]
)
def test_a_rank_may_be_a_share(rank: float, want: int) -> None:
    """Of the values' width. The default is cut to it; what a row says is not."""
    config = replace(tiny_model("tiny-llada").config, num_heads=4, num_kv_heads=4, head_dim=8, hidden_size=32)
    method = Method(name="mine", title="", policy="drift", options={"identifier": "proxy", "rank": rank})
    assert Axes.of(method, config).policy.rank == want  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="rank=33, and the values of this network have 32 numbers; use at most 32"):
        Axes.of(replace(method, options={"identifier": "proxy", "rank": 33}), config)


@pytest.mark.parametrize("name", ["LLaDA-1.5", "GSAI-ML/LLaDA-1.5", "/models/LLaDA-1.5/"])
def test_published_by_name(name: str) -> None:
    assert published(name) is PUBLISHED["LLaDA-1.5"]


CURVE = BudgetCurve(0.5, 0.1, 0.4, 0.2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: BudgetCurve(1.5, 0.1, 0.4, 0.2), r"mu is 1.5; the peak lies in \[0, 1\]"),
        (lambda: BudgetCurve(math.nan, 0.1, 0.4, 0.2), "mu is nan"),
        (lambda: BudgetCurve(0.5, 0.1, 1.4, 0.2), r"rho_p is 1.4; it lies in \(0, 1\]"),
        (lambda: BudgetCurve(0.5, 0.1, 0.0, 0.2), "rho_p is 0.0"),
        (lambda: BudgetCurve(0.5, 0.5, 0.4, 0.2), r"rho_s is 0.5; it lies in \(0, rho_p\], and rho_p is 0.4"),
        (lambda: BudgetCurve(0.5, 0.1, 0.4, -0.2), "rho_e is -0.2"),
        (lambda: CURVE.ratios(0), "num_layers is 0; it is 1 or more"),
        (lambda: CURVE.ratios(8, max_ratio=1.01), r"max_ratio is 1.01; it lies in \[0, 1\]"),
        (lambda: CURVE.ratios(8, mean_ratio=0.9), r"mean_ratio is 0.9; it lies in \[0, 0.7"),
        (lambda: CURVE.ratios(8, mean_ratio=-0.1), "mean_ratio is -0.1"),
        (lambda: CURVE.ratios(8, max_ratio=0.2, mean_ratio=0.1), "give one"),
        (lambda: CURVE.ratios(8, min_ratio=0.5), r"min_ratio is 0.5; it lies in \[0, 0.4\]"),
        (lambda: CURVE.ratios(8, max_ratio=0.05, min_ratio=0.0625), r"min_ratio is 0.0625; it lies in \[0, 0.05\]"),
        (lambda: CURVE.ratios(8, form="papers"), "form is 'papers'; known: released, paper"),  # type: ignore[arg-type]
        (lambda: uniform(8, -0.1), r"ratio is -0.1; it lies in \[0, 1\]"),
        (lambda: uniform(8, math.nan), "ratio is nan"),
        (lambda: uniform(0, 0.5), "num_layers is 0"),
        (lambda: counts(0, [0.5]), "num_positions is 0"),
        (lambda: counts(8, [0.5, 1.5]), "ratio is 1.5"),
        (lambda: published("LLaDA-8B-instruct"), "did you mean 'LLaDA-8B-Instruct'?"),
        (lambda: fit([0.1, 0.2]), "drifts of 2 layers; a curve needs 3 or more"),
        (lambda: fit([0.1, 0.2, 0.0]), "the drift of layer 2 is 0.0"),
        (lambda: fit([0.1, math.nan, 0.2]), "the drift of layer 1 is nan"),
        (lambda: fit([math.inf, 0.1, 0.2]), "the drift of layer 0 is inf"),
    ],
)
def test_errors_name_the_value_and_its_range(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        call()


# --- fit ---


@settings(max_examples=30, deadline=None)
@given(st.floats(0.2, 0.8), st.floats(0.02, 0.8), st.floats(0.02, 0.8), st.floats(0.01, 1), st.integers(16, 40))
def test_a_curve_is_found_again(mu: float, start: float, end: float, peak: float, num_layers: int) -> None:
    curve = BudgetCurve(mu, start * peak, peak, end * peak)
    found = fit(curve.ratios(num_layers, min_ratio=0))
    assert found.mu == pytest.approx(mu, abs=1e-3)
    for name in ("rho_s", "rho_p", "rho_e"):
        assert getattr(found, name) == pytest.approx(getattr(curve, name), rel=5e-3), name


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_shape_does_not_depend_on_the_level(name: str) -> None:
    """Drifts of 5e-4 or of 1.5 make the same budget; a level above 1 is brought down to it."""
    shape_L, want_L = PUBLISHED[name].ratios(32, min_ratio=0), PUBLISHED[name].ratios(32, max_ratio=0.25)
    for level in (0.002, 6.0):
        found = fit([level * each for each in shape_L])
        assert found.rho_p == pytest.approx(min(1.0, level * PUBLISHED[name].rho_p))
        assert found.ratios(32, max_ratio=0.25) == pytest.approx(want_L)


def test_noise_moves_the_curve_little() -> None:
    curve, noise = BudgetCurve(0.6, 0.02, 0.3, 0.1), np.random.default_rng(0).normal(0, 0.1, 32)
    found = fit([each * math.exp(e) for each, e in zip(curve.ratios(32, min_ratio=0), noise)])
    assert found.mu == pytest.approx(0.6, abs=0.05)
    want_L = curve.ratios(32, max_ratio=0.25)
    assert max(abs(a / b - 1) for a, b in zip(found.ratios(32, max_ratio=0.25), want_L)) < 0.15
    # Negative control: another curve is not that near.
    other_L = BudgetCurve(0.7, 0.02, 0.3, 0.1).ratios(32, max_ratio=0.25)
    assert max(abs(a / b - 1) for a, b in zip(other_L, want_L)) > 0.15


def error(curve: BudgetCurve, drift_L: list[float]) -> float:
    """Squared, of the logarithms, at the best level: the fit's own may have been brought down to 1."""
    off_L = np.log(curve.ratios(len(drift_L), min_ratio=0)) - np.log(drift_L)
    return float(((off_L - off_L.mean()) ** 2).sum())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1e-3, 0.5), min_size=8, max_size=24), st.lists(curves, min_size=20, max_size=20))
def test_no_other_curve_is_nearer(drift_L: list[float], others: list[BudgetCurve]) -> None:
    """To drifts without any shape, too. Others with a layer alone on a side may follow that layer; fits do not."""
    found = error(fit(drift_L), drift_L)
    edge = 2 / len(drift_L)
    for other in [*others, BudgetCurve(0.5, 0.1, 0.1, 0.1)]:
        if edge <= other.mu <= 1 - 1.5 * edge:
            assert found <= error(other, drift_L) * 1.001 + 1e-9


@pytest.mark.parametrize("rising", [True, False], ids=["rising", "falling"])
def test_one_sided_drifts_peak_at_an_end(rising: bool) -> None:
    drift_L = [0.001 * 1.2**layer for layer in range(24)]
    found = fit(drift_L if rising else drift_L[::-1])
    assert found.mu == (1 if rising else 0)
    ratio_L = found.ratios(24, min_ratio=0)
    assert ratio_L == sorted(ratio_L, reverse=not rising)


def test_a_valley_is_flat() -> None:
    """No side may rise away from the peak: the nearest curve to a valley is a slope or a constant."""
    found = fit([0.5, 0.3, 0.2, 0.1, 0.1, 0.2, 0.3, 0.5])
    assert found.rho_s <= found.rho_p >= found.rho_e


def test_one_layer_alone_fixes_no_slope() -> None:
    """The last layer falls off. With the peak just before it, its fall would leave nothing at the end of the depth."""
    drift_L = [0.001 * 1.2**layer for layer in range(24)]
    drift_L[-1] = drift_L[-2] / 5
    found = fit(drift_L)
    assert found.rho_e > 1e-4
    assert found.ratios(24, min_ratio=0)[-1] < found.rho_p / 2  # but it is not ignored
