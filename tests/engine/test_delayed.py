"""dKV-Cache, served: what the reference gave (horseee/dKV-Cache@49a76fc), row for row; and what must hold where it gave
nothing."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from engine.served import COMMON, Ask, bare, facts, serve, without_rows
from engine.served import load as served
from engine.test_served_golden import MODELS, commits, load
from oracles.flash import made_up_prompt
from oracles.golden import tiny_model
from unmask import LLM, Method, SamplingParams, methods
from unmask.cache.delayed import Delayed
from unmask.cache.policy import Limits
from unmask.core.canvas import Canvas
from unmask.engine.graphs import FixedSteps
from unmask.engine.outputs import CompletionOutput
from unmask.errors import MethodError
from unmask.eval import continuous
from unmask.eval.continuous import Way, compare
from unmask.methods import METHODS

Golden = dict[str, Any]
VARIANTS = {"decoded": "decode", "prefill": "prefill", "pd": "pd"}


def cases(model: str) -> list[Golden]:
    names = ("dkv_dream", "dkv_dream_pd") if model == "tiny-dream" else ("dkv_llada",)
    return [each for name in names for each in load(name, model)]


def row_of(each: Golden) -> Method:
    """The reference's choices for a case, as a row."""
    s = each["settings"]
    said = {"variant": VARIANTS[s["cache_type"]], "shift_type": s["shift_type"]} if "cache_type" in s else {}
    return bare("dkv-cache", options=said)


def asked(each: Golden) -> SamplingParams:
    s = each["settings"]
    return SamplingParams(
        max_tokens=s["gen_length"],
        block_length=s.get("block_length"),
        steps=s["steps"],
        alg=s.get("alg"),
        refresh_interval=s["cache_steps"],
        ignore_eos=True,
        trajectory=True,
    )


def engine(model: str, row: Method, *, fixed: bool = False, seats: int = 3) -> LLM:
    llm = LLM(tiny_model(model), method=row, tokenizer=None, max_num_seqs=seats)
    if fixed:
        llm.engine.fixed = FixedSteps(llm.engine.step_program, capture=lambda step: step)
    return llm


def generate(llm: LLM, golden: Sequence[Golden]) -> list[CompletionOutput]:
    prompts = [{"prompt_token_ids": each["prompt_ids"]} for each in golden]
    return [each.outputs[0] for each in llm.generate(prompts, [asked(each) for each in golden])]


def by_row(model: str) -> list[tuple[Method, list[Golden]]]:
    """The cases that one engine serves."""
    rows: dict[str, tuple[Method, list[Golden]]] = {}
    for each in cases(model):
        rows.setdefault(row_of(each).describe, (row_of(each), []))[1].append(each)
    return list(rows.values())


def rows_of(each: Golden) -> list[int]:
    """Rows of every pass. Under un_right the reference runs the last position, which scores nothing, a pass longer."""
    rows, s = list(each["rows_per_forward"]), each["settings"]
    if s.get("shift_type") == "un_right":
        last = next(number for number, step in enumerate(each["steps"]) if s["gen_length"] - 1 in step["pos"]) + 2
        rows[last] -= last % s["cache_steps"] != 0
    return rows


def check(got: CompletionOutput, want: Golden) -> None:
    assert got.token_ids == want["output_ids"], want["id"]
    assert commits(got) == [sorted(each["pos"]) for each in want["steps"]], want["id"]
    assert got.num_forward_passes == want["nfe"], want["id"]
    assert got.num_rows == sum(rows_of(want)), want["id"]


@pytest.mark.parametrize("fixed", [False, True], ids=["ragged", "fixed"])
@pytest.mark.parametrize("model", MODELS)
def test_what_the_reference_gave(model: str, fixed: bool) -> None:
    """In company, with requests that join late, and alone."""
    for row, golden in by_row(model):
        for got, want in zip(generate(engine(model, row, fixed=fixed, seats=2), golden), golden, strict=True):
            check(got, want)
        for want in golden:
            check(generate(engine(model, row, fixed=fixed), [want])[0], want)


@pytest.mark.parametrize("each", [each for model in MODELS for each in cases(model)], ids=lambda each: each["id"])
def test_the_rows_of_every_pass(each: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, rows = engine(each["model"], row_of(each)), []
    count = type(llm.engine.canvas).count_pass

    def counted(self: Canvas, num_rows_S: Tensor, **more: bool) -> None:
        rows.append(int(num_rows_S.sum()))
        count(self, num_rows_S, **more)

    monkeypatch.setattr(Canvas, "count_pass", counted)
    generate(llm, [each])
    assert [number for number in rows if number] == rows_of(each)


# --- negative controls of the golden data


@pytest.mark.parametrize(
    ("model", "settings"),
    [("tiny-llada", {"refresh_interval": 5}), ("tiny-dream", {"refresh_interval": 5}), ("tiny-dream", {"alg": None})],
)
def test_other_settings_give_other_answers(model: str, settings: dict[str, Any]) -> None:
    for row, golden in by_row(model):
        if row.option("variant") == "prefill":
            continue
        prompts = [{"prompt_token_ids": each["prompt_ids"]} for each in golden]
        said = [asked(each).replace(**settings) for each in golden]
        got = [each.outputs[0].token_ids for each in engine(model, row).generate(prompts, said)]
        assert got != [each["output_ids"] for each in golden]


def at_once(self: Delayed, canvas: Canvas) -> Tensor:  # noqa: ARG001
    return canvas.final_SN


@pytest.mark.parametrize("model", ["tiny-llada", "tiny-dream"])
def test_a_cache_without_the_delay_is_noticed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept as soon as it is committed keeps a MASK's keys and values."""
    monkeypatch.setattr(Delayed, "_known", at_once)
    golden = [(row, each) for row, rows in by_row(model) for each in rows if row.option("variant") != "prefill"]
    wrong = [generate(engine(model, row), [each])[0].token_ids != each["output_ids"] for row, each in golden]
    assert sum(wrong) > len(wrong) // 2


# --- which rows run, in plain words


@dataclass
class Seen:
    """What a seat was at one look, and what the policy said."""

    pass_: int
    prompt: int
    end: int
    commit_pass: list[int]
    """-1 undecided, 0 given."""
    block: list[int]
    candidates: set[int]
    rows: set[int]
    due: bool


def wanted(each: Seen, begun: int, interval: int, variant: str, shift_type: str, shift: int) -> set[int]:
    """Positions that must run; ``begun`` is the number of passes before the current block's first."""
    number, everything = each.pass_, set(range(each.end))
    if number == 0:
        return everything
    frozen = set(range(each.prompt - shift)) if variant != "decode" else set()
    since = number - begun
    renewed = since == 0 or (shift == 0 and since == 1) or (interval > 0 and since % interval == 0)
    if variant == "prefill" or renewed:
        return everything - frozen

    def known(pos: int) -> bool:
        return number > 1 if pos >= each.end else 0 <= each.commit_pass[pos] <= number - 1

    def kept(pos: int) -> bool:
        own, next_ = known(pos), known(pos + 1)
        if shift == 0:
            return own
        return {"un": next_, "un_right": own and next_, "right": own}[shift_type]

    scoring = {max(pos - shift, 0) for pos in each.candidates}
    return ({pos for pos in everything if not kept(pos)} | scoring) - frozen


def watched(row: Method, model: str, asks: Sequence[Ask], monkeypatch: pytest.MonkeyPatch) -> list[list[Seen]]:
    """Every look at every seat that leads, by request."""
    llm, looks, plain = served(model, row), {}, Delayed.rows

    def rows(self: Delayed, canvas: Canvas, candidate_SN: Tensor, limits: Limits) -> Tensor:
        run_SN, due_S = plain(self, canvas, candidate_SN, limits), self.due(canvas, limits)
        for answer in llm.engine.scheduler.running:
            seat, end = answer.seat, int(canvas.end_S[answer.seat])
            looks.setdefault(answer, {})[int(canvas.pass_S[seat])] = Seen(
                int(canvas.pass_S[seat]),
                int(canvas.prompt_S[seat]),
                end,
                canvas.commit_pass_SN[seat].tolist(),
                canvas.block_SN[seat].tolist(),
                set(candidate_SN[seat].nonzero()[:, 0].tolist()),
                set(run_SN[seat].nonzero()[:, 0].tolist()),
                bool(due_S[seat]),
            )
        return run_SN

    monkeypatch.setattr(Delayed, "rows", rows)
    serve(llm, asks)
    monkeypatch.undo()
    return [list(each.values()) for each in looks.values()]


def asks(model: str, frontier: str, seed: int) -> list[Ask]:
    """Mixed requests: blocks, an end of text, guidance, some tokens given, no prompt, several commits a pass."""
    r = random.Random(seed)
    out = [Ask((), SamplingParams(steps=5), (None, 7, 9, None, None, 7, None, None))]  # its own row scores the first
    for number in range(6):
        length = r.randint(1, 20)
        said: dict[str, Any] = {"refresh_interval": r.choice((None, 2, 3, 7)), "seed": number}
        said |= r.choice(({}, {"threshold": 0.5}, {"alg": "entropy"}, {"remasking": "random"}))
        said |= {"blocks": {"block_length": r.choice((0, 3, 5))}, "window": {"decode_window": 5}}.get(frontier, {})
        prompt = made_up_prompt(r.randint(1, 12), number)
        if number % 3 == 2:
            text = [r.choice((None, 7, 9)) for _ in range(length)] + [None]
            out.append(Ask(prompt if number % 2 else (), SamplingParams(**said), tuple(text), arrives=number))
            continue
        said |= {"cfg_scale": r.choice((0.0, 1.5)), "ignore_eos": True, "stop_token_ids": COMMON[model]}
        out.append(Ask(prompt, SamplingParams(max_tokens=length, **said), arrives=number))
    return out


@pytest.mark.parametrize("frontier", ["blocks", "window", "whole"])
@pytest.mark.parametrize("variant", ["decode", "prefill", "pd"])
@pytest.mark.parametrize(
    ("model", "shift_type"), [("tiny-llada-gqa", "un_right"), *(("tiny-dream", s) for s in ("un", "un_right", "right"))]
)
def test_the_rows_that_run(
    model: str, shift_type: str, variant: str, frontier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = bare("dkv-cache", frontier=frontier, options={"variant": variant, "shift_type": shift_type})
    shift = int(model == "tiny-dream")
    requests = asks(model, frontier, seed=1)
    some_kept = False
    for ask, looks in zip(requests, watched(row, model, requests, monkeypatch), strict=True):
        begun, current = 0, None
        for each in looks:
            if (now := min((each.block[pos] for pos in each.candidates), default=current)) != current:
                begun, current = each.pass_, now
            interval = ask.params.refresh_interval or 0
            assert each.rows == wanted(each, begun, interval, variant, shift_type, shift)
            whole = each.rows == set(range(each.end))
            some_kept |= not whole
            if each.due:
                assert whole, "a refresh is one of the whole canvas"
            else:
                answer = len(ask.given) if ask.given is not None else ask.params.max_tokens or 0
                limits = SimpleNamespace(refresh=1, track=1)
                assert len(each.rows) <= Delayed(shift=shift).most_rows(len(ask.prompt), answer, 1, limits)
            scoring = {max(pos - shift, 0) for pos in each.candidates}
            assert scoring <= each.rows, "every candidate is scored"
    assert some_kept
    assert Delayed(variant=variant).recurs == (variant == "decode")


@pytest.mark.parametrize("model", ["tiny-llada", "tiny-dream"])
@pytest.mark.parametrize("shift_type", ["un_right", "right", "un"])
def test_a_token_is_kept_after_it_ran(model: str, shift_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every committed token runs once, in the pass after it; under un, on shifted logits, those whose right neighbours
    were known before keep a MASK's keys and values: the control."""
    row = bare("dkv-cache", options={"shift_type": shift_type})
    said = SamplingParams(max_tokens=24, ignore_eos=True)
    requests = [Ask(made_up_prompt(9 + number, number), said) for number in range(4)]
    stale = 0
    for looks in watched(row, model, requests, monkeypatch):
        for each in looks:
            new = {pos for pos in range(each.end) if each.commit_pass[pos] == each.pass_ > 0}
            stale += len(new - each.rows)
    assert (stale > 0) == (shift_type == "un" and model == "tiny-dream")


# --- at the limit, and beside others


def test_refreshed_in_every_pass_it_is_no_cache() -> None:
    """Also the rows; and without that setting it is a cache."""
    for model, frontier in (("tiny-llada", "blocks"), ("tiny-dream", "blocks"), ("tiny-dream", "whole")):
        row = bare("dkv-cache", frontier=frontier)
        requests = asks(model, frontier, seed=2)
        every, never = (
            [dataclasses.replace(ask, params=ask.params.replace(refresh_interval=said)) for ask in requests]
            for said in (1, None)
        )
        want = serve(served(model, bare("dkv-cache", frontier=frontier, policy="recompute")), never)
        assert [facts(out) for out in serve(served(model, row), every)] == [facts(out) for out in want]
        assert [without_rows(out) for out in serve(served(model, row), never)] != [without_rows(out) for out in want]


OPTIONS = [{"variant": v, "shift_type": s} for v in ("decode", "prefill", "pd") for s in ("un", "un_right", "right")]


@pytest.mark.parametrize("fixed", [False, True], ids=["ragged", "fixed"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda each: "-".join(each.values()))
def test_a_crowd_is_everybody_alone(options: dict[str, str], fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(METHODS["dkv-cache"], options=options)
    for module in (methods, continuous):
        monkeypatch.setattr(module, "METHODS", {**METHODS, "dkv-cache": row})
    out = compare("dkv-cache", "dream", 16, seed=4, seats=4, way=Way(fixed=fixed))
    assert not out.different
    assert out.lost_pages == 0
    assert out.most_seats > 1


def test_a_row_says_what_is_kept() -> None:
    with pytest.raises(MethodError, match="did you mean 'prefill'"):
        bare("dkv-cache", options={"variant": "prefil"})
    with pytest.raises(MethodError, match="known: right, un, un_right"):
        bare("dkv-cache", options={"shift_type": "both"})
    with pytest.raises(MethodError, match="frontier 'pipeline'"):
        bare("dkv-cache", frontier="pipeline")
