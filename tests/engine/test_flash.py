"""Flash-Cache and Flash-Verify in the served engine against plain loops: every step's rows, window, tracked, searched,
context and accepted positions, its commits, and the answer with its passes and rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from engine.test_step import GOLDEN
from oracles.flash import SETTINGS, FlashCase, FlashRun, decode
from unmask import LLM, SamplingParams
from unmask.core.canvas import Canvas
from unmask.decoding.drafter import Prediction, Scratch, Search, TwoPass
from unmask.decoding.params import DecodeParams
from unmask.engine.outputs import CompletionOutput
from unmask.engine.step import Look, Step
from unmask.methods import Method
from unmask.models.loading import load_model
from unmask.models.transformer import Transformer

NAMES = [case.name for case in SETTINGS]


@dataclass
class Seen:
    """One step of one seat."""

    rows: set[int]
    window: list[int]
    tracked: set[int]
    context: set[int] = field(default_factory=set)
    searched: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    committed: dict[int, int] = field(default_factory=dict)


def _positions(row: torch.Tensor) -> list[int]:
    return [int(pos) for pos in row.nonzero()[:, 0]]


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, list[Seen]]]:
    """Steps by request, told apart by the first token of their prompts."""
    seen: dict[int, list[Seen]] = {}
    run, draft, accept = Step.run, TwoPass.draft, TwoPass.accept

    def key(canvas: Canvas, seat: int) -> int:
        return int(canvas.token_SN[seat, : int(canvas.prompt_S[seat])].long().sum())

    def running(canvas: Canvas) -> list[tuple[int, Seen]]:
        return [(s, seen[key(canvas, s)][-1]) for s in range(canvas.num_seats) if bool(canvas.active_S[s])]

    def spy_run(self: Step, look: Look) -> None:
        canvas = self.canvas
        for seat in range(canvas.num_seats):
            if bool(canvas.active_S[seat]):
                rows = set(_positions(look.run_SN[seat]))
                decided = set(_positions(canvas.final_SN[seat]))
                window = _positions(look.view.candidate_SN[seat])
                seen.setdefault(key(canvas, seat), []).append(Seen(rows, window, rows & decided))
        before, now = canvas.final_SN.clone(), running(canvas)
        run(self, look)
        for seat, step in now:
            new = canvas.final_SN[seat] & ~before[seat] & (canvas.pos_1N()[0] < canvas.end_S[seat])
            step.committed = {pos: int(canvas.token_SN[seat, pos]) for pos in _positions(new)}

    def spy_draft(self: TwoPass, canvas: Canvas, *rest: Any) -> tuple[Search, Scratch]:
        search, scratch = draft(self, canvas, *rest)
        for seat, step in running(canvas):
            valid = search.valid_SK[seat]
            step.searched, step.drafts = search.pos_SK[seat][valid].tolist(), search.token_SK[seat][valid].tolist()
            context = scratch.valid_SX[seat, : self.num_context]
            step.context = set(scratch.pos_SX[seat, : self.num_context][context].tolist())
        return search, scratch

    def spy_accept(self: TwoPass, canvas: Canvas, params: DecodeParams, search: Search, view: Prediction) -> Any:
        before, now = canvas.final_SN.clone(), running(canvas)
        out = accept(self, canvas, params, search, view)
        for seat, step in now:
            step.accepted = [pos for pos in step.searched if canvas.final_SN[seat, pos] and not before[seat, pos]]
        return out

    with monkeypatch.context() as patch:
        patch.setattr(Step, "run", spy_run)
        patch.setattr(TwoPass, "draft", spy_draft)
        patch.setattr(TwoPass, "accept", spy_accept)
        yield seen


def method_of(case: FlashCase) -> Method:
    """The table's row for a case's engine-wide switches."""
    s = case.settings
    options: dict[str, Any] = {
        "mass": "softmax" if s.softmax_mass else "logits",
        "mass_first_layer": s.score_layers,
        "mass_rows": s.mass_rows,
    }
    if s.verify:
        options |= {"verify_rows": s.verify_rows, "max_search": s.search}
    drafter = "two-pass" if s.verify else "none"
    return Method(name="flash", title="", frontier="window", policy="tracked", drafter=drafter, options=options)


def params_of(case: FlashCase) -> SamplingParams:
    s = case.settings
    said: dict[str, Any] = {"refresh_interval": s.full_refresh_every} if s.full_refresh_every else {}
    if s.verify:
        said |= {"search": s.search, "gamma": s.gamma, "accept": s.accept, "isolation": s.isolation}
    return SamplingParams(
        max_tokens=case.max_tokens,
        threshold=s.threshold,
        decode_window=s.decode_window,
        refresh_window=s.refresh_window,
        track=s.track,
        ignore_eos=True,
        stop_token_ids=case.eos_ids,
        trajectory=True,
        **said,
    )


def model_of(name: str) -> Transformer:
    return load_model(GOLDEN / "models" / name, dtype="float64")


def serve(case: FlashCase, requests: Sequence[FlashCase], seats: int = 8) -> list[CompletionOutput]:
    llm = LLM(model=model_of(case.model), method=method_of(case), tokenizer=None, max_num_seqs=seats)
    prompts = [{"prompt_token_ids": list(each.prompt)} for each in requests]
    return [out.outputs[0] for out in llm.generate(prompts, [params_of(each) for each in requests])]


def check(out: CompletionOutput, steps: list[Seen], want: FlashRun) -> None:
    assert out.token_ids == want.token_ids
    assert out.finish_reason == want.finish_reason
    assert out.num_forward_passes == want.num_passes
    assert out.num_rows == want.num_rows
    assert len(steps) == len(want.steps) == out.num_steps
    for number, (got, exact) in enumerate(zip(steps, want.steps)):
        for name in vars(got):
            assert getattr(got, name) == getattr(exact, name), f"step {number}, {name}"


def wanted(case: FlashCase) -> FlashRun:
    return decode(model_of(case.model), case.prompt, case.max_tokens, case.settings, case.eos_ids)


@pytest.mark.parametrize("case", SETTINGS, ids=NAMES)
def test_alone(case: FlashCase, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(monkeypatch) as seen:
        out = serve(case, [case])[0]
    (steps,) = seen.values()
    check(out, steps, wanted(case))


@pytest.mark.parametrize("case", SETTINGS, ids=NAMES)
def test_in_a_batch(case: FlashCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours of other lengths and settings, more than there are seats: they join late and in other phases."""
    others = [
        replace(
            case,
            prompt=tuple((7 * n + 13 * k) % 300 for n in range(3 + 9 * k)),
            max_tokens=9 + 5 * k,
            settings=replace(case.settings, threshold=0.3 + 0.1 * k, track=k, decode_window=3 + k),
        )
        for k in range(5)
    ]
    requests = [*others[:3], case, *others[3:]]
    with watched(monkeypatch) as seen:
        outs = serve(case, requests, seats=3)
    for each, out in zip(requests, outs):
        check(out, seen[sum(each.prompt)], wanted(each))


@pytest.mark.parametrize("case", [each for each in SETTINGS if each.settings.verify], ids=lambda case: case.name)
def test_the_check_notices_a_setting_that_is_ignored(case: FlashCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what a change of one setting does is seen."""
    for change in case.matters:
        if set(change) & {"verify"}:
            continue
        other = replace(case, settings=replace(case.settings, **change))  # type: ignore[arg-type]
        with watched(monkeypatch) as seen:
            out = serve(other, [other])[0]
        (steps,) = seen.values()
        with pytest.raises(AssertionError):
            check(out, steps, wanted(case))
