"""Caches that choose rows inside the pass: outputs of their references, what holds at their ends, and in company."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.test_served_golden import LLADA, commits, load
from oracles.golden import tiny_model
from unmask import LLM, SamplingParams, ops
from unmask.cache import proxy
from unmask.cache.budget import counts
from unmask.cache.drift import Drift, DriftGate, Kinds
from unmask.core.canvas import Canvas
from unmask.engine.graphs import FixedSteps
from unmask.engine.outputs import CompletionOutput
from unmask.errors import MethodError
from unmask.eval.continuous import Way, compare
from unmask.methods import Method
from unmask.models.loading import resolve_checkpoint

DLLM = {"identifier": "value", "writes": "values", "refresh": "apart"}
SPA = {"identifier": "proxy", "writes": "dense", "refresh": "together"}
REFUSED = ("spa-dream-2", "spa-dream-4", "spa-llada-7", "spa-llada-10")  # bugs of the reference
EARLY = "spa-llada-8"  # its early stop fills up with padding: we end there
Case = dict[str, Any]


def row(model: str, schedule: str = "dream", **options: Any) -> Method:
    shape = {"frontier": "blocks"} if model in LLADA else {"frontier": "whole", "schedule": schedule}
    return Method(name="drift", title="drift", policy="drift", options=options, **shape)  # type: ignore[arg-type]


def engine(model: str, method: Method, ratios: Sequence[float] | None = None, seats: int = 2) -> LLM:
    llm = LLM(tiny_model(model), method=method, tokenizer=None, max_num_seqs=seats, allow_attention_mismatch=True)
    policy = llm.engine.axes.policy
    assert isinstance(policy, Drift)
    if ratios is not None:
        policy.ratios = list(ratios)
    return llm


def ask(llm: LLM, *requests: tuple[list[int], SamplingParams]) -> list[CompletionOutput]:
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    return [each.outputs[0] for each in llm.generate(prompts, [params for _, params in requests])]


def asked(case: Case, full: str, answer: str, **more: Any) -> tuple[list[int], SamplingParams]:
    s = case["settings"]
    said: dict[str, Any] = {"alg": s["alg"]} if "alg" in s else {"block_length": s["block_length"]}
    rules = {"threshold": s.get("threshold"), "factor": s.get("dynamic_threshold_factor")}
    said |= {name: value for name, value in rules.items() if value} or {"steps": s["steps"]}
    said |= {"refresh_interval": s[full], "answer_interval": s[answer]}
    return case["prompt_ids"], SamplingParams(
        **{"max_tokens": s["gen_length"], "ignore_eos": True, "trajectory": True} | said | more
    )


def check(got: CompletionOutput, want: Case) -> None:
    assert commits(got) == [sorted(each["pos"]) for each in want["steps"] if each["pos"]], want["id"]
    assert got.token_ids == want["output_ids"], want["id"]


def golden(name: str, *skipped: str) -> list[Any]:
    models = LLADA if name.endswith("llada") else ("tiny-dream",)
    cases = [each for model in models for each in load(name, model) if each["id"] not in skipped]
    return [pytest.param(each, id=each["id"]) for each in cases]


def dllm(case: Case) -> CompletionOutput:
    ratio = case["settings"]["transfer_ratio"]
    llm = engine(case["model"], row(case["model"], **DLLM), [ratio] * 8)
    return ask(llm, asked(case, "prompt_interval_steps", "gen_interval_steps"))[0]


def spa(case: Case, **more: Any) -> CompletionOutput:
    s, config = case["settings"], tiny_model(case["model"]).config
    rank = s["proxy_rank"]
    rank = rank if rank > 1 else int(rank * config.num_kv_heads * config.head_dim)
    # Its Dream commits one token a step at least, where Dream's curve begins with none and ends with two.
    schedule = "even" if s["steps"] == s["gen_length"] else "dream"
    llm = engine(case["model"], row(case["model"], schedule, rank=rank, warmup=s["n_warmup_steps"], **SPA))
    llm.engine.axes.policy.ratios = s["update_ratio"]  # type: ignore[attr-defined]
    return ask(llm, asked(case, "refresh_steps", "refresh_gen_steps", **more))[0]


# --- the references


@pytest.mark.parametrize("case", golden("dllm_cache_llada") + golden("dllm_cache_dream", "dllmcache-dream-2"))
def test_dllm_cache(case: Case) -> None:
    check(dllm(case), case)


def test_dllm_cache_where_the_reference_runs_a_pass_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dream's curve begins with a quota of 0. Such passes are not run here, so phases come one pass later; with the
    reference's phases its tokens come out."""
    (case,) = [each for each in load("dllm_cache_dream", "tiny-dream") if each["id"] == "dllmcache-dream-2"]
    with pytest.raises(AssertionError):
        check(dllm(case), case)
    kinds = Drift.kinds

    def shifted(self: Drift, canvas: Canvas, limits: Any) -> Kinds:
        later_S = torch.where(canvas.pass_S == 0, 0, canvas.pass_S + 1)
        return kinds(self, dataclasses.replace(canvas, pass_S=later_S), limits)

    monkeypatch.setattr(Drift, "kinds", shifted)
    check(dllm(case), case)


@pytest.mark.parametrize("case", golden("spa_llada", *REFUSED, EARLY) + golden("spa_dream", *REFUSED))
def test_spa_cache(case: Case) -> None:
    check(spa(case), case)


def test_spa_cache_ends_where_the_reference_fills_up() -> None:
    """Up to the end of text it is the same answer; the reference looks for it every eight passes only."""
    (case,) = [each for each in load("spa_llada", "tiny-llada") if each["id"] == EARLY]
    got, want = spa(case, ignore_eos=False, stop_token_ids=(case["settings"]["eot_id"],)), case["output_ids"]
    assert got.token_ids == want[: want.index(case["settings"]["eot_id"])]


# --- which rows


class Watch:
    """Rows that each pass and layer chose, by canvas position."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[list[list[int]]] = []
        run = DriftGate.run

        def watched(gate: DriftGate, layer: Any, x_MD: Tensor) -> Tensor:
            out_MD = run(gate, layer, x_MD)
            if layer.index == 0:
                self.passes.append([])
            self.passes[-1].append(gate.plan.pos_M[gate.chosen[-1]].tolist())
            return out_MD

        monkeypatch.setattr(DriftGate, "run", watched)


@pytest.mark.parametrize(
    ("name", "run"), [("dllm_cache_llada", dllm), ("dllm_cache_dream", dllm), ("spa_llada", spa), ("spa_dream", spa)]
)
def test_the_chosen_rows_are_the_references(
    name: str, run: Callable[[Case], CompletionOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [each.values[0] for each in golden(name, *REFUSED, EARLY, "dllmcache-dream-2")]
    cases = [each for each in cases if each.get("selected")]
    assert cases
    for case in cases:
        watch, prompt = Watch(monkeypatch), len(case["prompt_ids"])
        run(case)
        for want in case["selected"]:
            chosen = watch.passes[want["step"]][want["layer"]]
            assert [each - prompt for each in chosen if each >= prompt] == sorted(want["rows"]), (case["id"], want)


def test_a_token_that_was_just_committed_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``new_first`` whatever its drift; and the number stays where it is one of those that drifted most."""
    watch = Watch(monkeypatch)
    method = row("tiny-llada", **{**SPA, "new_first": "yes", "ratio": 0.25})
    params = SamplingParams(max_tokens=24, block_length=24, steps=24, trajectory=True, ignore_eos=True)
    (out,) = ask(engine("tiny-llada", method), ([5, 6, 7], params))
    for number, positions in enumerate(commits(out)[:-1], start=1):
        for layer in watch.passes[number][1:]:
            assert 3 + positions[0] in layer
            assert len(layer) == counts(24, [0.25])[0]


def test_rows_are_counted_by_what_the_layers_compute() -> None:
    """Passes of the first kind run everything, the others the answer in one layer of L and a quarter in the rest."""
    method = row("tiny-llada", **DLLM)
    params = SamplingParams(max_tokens=16, block_length=16, steps=16, ignore_eos=True)
    llm = engine("tiny-llada", method)
    (out,) = ask(llm, (list(range(1, 11)), params))
    num_layers = llm.model.config.num_layers
    partial = (16 + (num_layers - 1) * 4) / num_layers
    assert abs(out.num_rows - (26 + 15 * partial)) <= 15 * 0.5


@pytest.mark.parametrize("fixed", [False, True], ids=["ragged", "fixed"])
@pytest.mark.parametrize("model", ["tiny-llada", "tiny-dream"])
def test_viewers_see_what_was_recomputed(model: str, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a layer behind the first, which computes every row of the answer: the control."""
    watch, llm = Watch(monkeypatch), engine(model, row(model, ratio=0.2, **DLLM))
    if fixed:
        llm.engine.fixed = FixedSteps(llm.engine.step_program, capture=lambda step: step)
    params = SamplingParams(max_tokens=24, steps=12, answer_interval=5, ignore_eos=True)
    canvases = [each.canvas for each in llm.stream({"prompt_token_ids": [5, 6, 7, 8]}, params, canvas=True)]
    shown = [[cell.recomputed for cell in cells] for cells in canvases if cells is not None]
    passes = [layers for layers in watch.passes if layers[0]]
    unions = [set[int]().union(*layers[1:]) for layers in passes]
    assert shown == [[4 + n in union for n in range(24)] for union in unions]
    firsts = [[4 + n in layers[0] for n in range(24)] for layers in passes]
    assert [shown[n] == firsts[n] for n in range(12)] == [n % 5 == 0 for n in range(12)]


# --- proxies from start to start


def test_a_checkpoint_keeps_its_proxies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own and networks without a directory keep nothing, and other weights have their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    made: list[float] = []
    plain = proxy.proxies
    monkeypatch.setattr(proxy, "proxies", lambda *given: made.append(given[1]) or plain(*given))
    ours = resolve_checkpoint("unmask-mini")
    before, directory = sorted(ours.rglob("*")), tmp_path / "checkpoint"
    shutil.copytree(ours, directory)
    first, second = (LLM(directory, method="spa-cache", device="cpu") for _ in range(2))
    assert len(made) == 1
    policies = [llm.engine.axes.policy for llm in (first, second)]
    assert all(isinstance(each, Drift) and each.proxies is not None for each in policies)
    assert torch.equal(policies[0].proxies, policies[1].proxies)  # type: ignore[attr-defined]
    assert (directory / "unmask" / "proxy-float32.safetensors").exists()
    LLM(method="spa-cache", device="cpu")
    LLM(first.model, method="spa-cache", tokenizer=first.tokenizer)
    assert len(made) == 3
    assert sorted(ours.rglob("*")) == before
    assert not (tmp_path / "home").exists()
    LLM(directory, method="dllm-cache", device="cpu")  # asks for none
    LLM(directory, method=row("tiny-llada", rank=8, **SPA), device="cpu")  # the first rows of what is there
    assert len(made) == 3
    weights = load_file(directory / "model.safetensors")
    name = next(each for each in weights if "v_proj" in each)
    save_file(weights | {name: weights[name] * 2}, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="other value weights"):
        LLM(directory, method="spa-cache", device="cpu")
    assert len(made) == 4


# --- the ends of the range


@pytest.mark.parametrize("kind", [DLLM, SPA, {**SPA, "identifier": "input"}, {**DLLM, "writes": "sparse"}])
@pytest.mark.parametrize("model", [*LLADA, "tiny-dream"])
def test_refreshed_in_every_pass_it_is_no_cache(model: str, kind: dict[str, Any]) -> None:
    said: dict[str, Any] = {"max_tokens": 20, "steps": 10, "trajectory": True}
    said |= {"block_length": 10} if model in LLADA else {"alg": "entropy"}
    plain = dataclasses.replace(row(model, **kind), policy="recompute", options={})
    bare = LLM(tiny_model(model), method=plain, tokenizer=None, allow_attention_mismatch=True)
    (want,) = ask(bare, ([5, 6, 7, 8], SamplingParams(**said)))
    always = SamplingParams(refresh_interval=1, answer_interval=1, **said)
    (got,) = ask(engine(model, row(model, **kind)), ([5, 6, 7, 8], always))
    assert (got.token_ids, commits(got), got.num_rows) == (want.token_ids, commits(want), want.num_rows)
    (stale,) = ask(engine(model, row(model, ratio=0.1, **kind)), ([5, 6, 7, 8], SamplingParams(**said)))
    assert stale.num_rows < want.num_rows


@pytest.mark.parametrize("model", [*LLADA, "tiny-dream"])
def test_all_rows_chosen_is_the_answer_anew(model: str) -> None:
    said: dict[str, Any] = {"max_tokens": 20, "steps": 10, "trajectory": True, "refresh_interval": 4}
    said |= {"block_length": 10} if model in LLADA else {"alg": "entropy"}
    (all_chosen,) = ask(engine(model, row(model, ratio=1.0, **SPA)), ([5, 6, 7, 8], SamplingParams(**said)))
    (anew,) = ask(engine(model, row(model, **SPA)), ([5, 6, 7, 8], SamplingParams(answer_interval=1, **said)))
    assert (all_chosen.token_ids, commits(all_chosen)) == (anew.token_ids, commits(anew))


# --- in company


@pytest.mark.parametrize(
    ("method", "network"),
    [("dllm-cache", "llada"), ("dllm-cache", "dream"), ("spa-cache", "llada-gqa"), ("spa-cache", "dream")],
)
@pytest.mark.parametrize("fixed", [False, True])
def test_company_changes_nothing(method: str, network: str, fixed: bool) -> None:
    out = compare(method, network, 24, seed=3, seats=4, way=Way(fixed=fixed))
    assert not out.different
    assert out.lost_pages == 0
    assert out.most_seats > 1


# --- negative controls


def spoiled(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
    monkeypatch.setattr(owner, name, wrong)
    case = golden("spa_llada", *REFUSED, EARLY)[1].values[0]
    with pytest.raises(AssertionError):
        check(spa(case), case)


def test_choosing_what_drifted_least_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    furthest = ops.furthest
    spoiled(monkeypatch, ops, "furthest", lambda drift_M, *rest: furthest(-drift_M, *rest))


def test_additions_that_are_not_kept_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = DriftGate.run

    def forgetful(self: DriftGate, layer: Any, x_MD: Tensor) -> Tensor:
        self.pool.planes["delta"][layer.index].zero_()
        return run(self, layer, x_MD)

    spoiled(monkeypatch, DriftGate, "run", forgetful)


def test_identifiers_that_are_not_renewed_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    renew = DriftGate._renew

    def of_refreshes_only(self: DriftGate, *args: Any) -> Any:
        optional_M, self.optional_M = self.optional_M, torch.zeros_like(self.optional_M)
        drift_M = renew(self, *args)
        self.optional_M = optional_M
        return drift_M

    spoiled(monkeypatch, DriftGate, "_renew", of_refreshes_only)


@pytest.mark.parametrize("options", [{"identifier": "values"}, {"ratio": 1.5}, {"curve": "gauss"}, {"rank": 0}])
def test_options_that_do_not_exist(options: dict[str, Any]) -> None:
    with pytest.raises(MethodError):
        row("tiny-llada", **options)
