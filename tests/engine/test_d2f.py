"""D2F in the served engine against plain loops: every step's rows, blocks, candidates, commits and end, and the answer
with its passes and rows; with the exact cache and without one, alone and among neighbours that come late."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from engine.served import Ask, bare, drive, load
from oracles.d2f import SETTINGS, D2FCase, D2FRun, decode
from oracles.golden import tiny_model
from unmask import LLM, SamplingParams
from unmask.core.canvas import CLOSED, FULL, OPEN, SEALED, TO_SEAL, Canvas
from unmask.decoding.frontier import FrontierView, Pipeline
from unmask.decoding.params import DecodeParams
from unmask.engine.outputs import CompletionOutput
from unmask.engine.request import Answer
from unmask.engine.step import Look
from unmask.models.transformer import Transformer

STATES = {OPEN: "active", FULL: "active", TO_SEAL: "sealing", SEALED: "sealed"}
RANKS = {"prob": None, "margin": "topk_margin", "entropy": "entropy"}
MODELS = sorted({case.model for case in SETTINGS})
METHODS = ["d2f", "d2f-uncached"]


@dataclass(frozen=True)
class Blocks:
    """A block as a pass found it."""

    start: int
    stop: int
    state: str
    full: bool
    """Of active ones; what becomes of the others no longer depends on it."""
    undecided: int


@dataclass
class Seen:
    """One step of one request."""

    rows: set[int]
    tokens: tuple[int, ...]
    """The prompt and the blocks that are there, before the pass."""
    blocks: list[Blocks]
    candidates: set[int]
    committed: dict[int, int]
    forced: set[int]
    end: int
    """After the step."""


# --- what the engine does


def watch(llm: LLM) -> dict[Answer, list[Seen]]:
    """The steps of every answer from now on."""
    program, seen = llm.engine.step_program, dict[Answer, list[Seen]]()
    run = program.run

    def spy(look: Look) -> None:
        canvas, running = program.canvas, list(llm.engine.scheduler.running)
        now = [found(canvas, answer, look) for answer in running]
        before = canvas.final_SN.clone()
        run(look)
        for answer, step in zip(running, now):
            seat = answer.seat
            step.end = int(canvas.end_S[seat])
            new = [int(n) for n in (canvas.final_SN[seat] & ~before[seat]).nonzero()[:, 0] if n < step.end]
            step.committed = {n: int(canvas.token_SN[seat, n]) for n in new}
            assert answer.params.threshold is not None
            step.forced = {n for n in new if canvas.commit_prob_SN[seat, n] <= answer.params.threshold}
            seen.setdefault(answer, []).append(step)

    program.run = spy  # type: ignore[method-assign]
    return seen


def found(canvas: Canvas, answer: Answer, look: Look) -> Seen:
    """A step before it runs."""
    seat, end = answer.seat, int(canvas.end_S[answer.seat])
    token_N, block_N, state_K = (x[seat].tolist() for x in (canvas.token_SN, canvas.block_SN, canvas.block_state_SK))
    blocks = []
    for number in range(1, block_N[end - 1] + 1):
        span = [n for n in range(end) if block_N[n] == number]
        if state_K[number] != CLOSED:
            state, masks = state_K[number], sum(token_N[n] == canvas.mask_token_id for n in span)
            blocks.append(Blocks(span[0], span[-1] + 1, STATES[state], state == FULL, masks))
    assert [each.start for each in blocks[1:]] == [each.stop for each in blocks[:-1]], "no gap between blocks"
    rows, candidates = ({int(n) for n in x[seat].nonzero()[:, 0]} for x in (look.run_SN, look.view.candidate_SN))
    return Seen(rows, tuple(token_N[: blocks[-1].stop]), blocks, candidates, {}, set(), end)


def ask_of(case: D2FCase) -> Ask:
    s = case.settings
    params = SamplingParams(
        max_tokens=case.max_tokens,
        block_length=s.block_length,
        tau_add=s.tau_add,
        tau_act=s.tau_act,
        threshold=s.threshold,
        strict_threshold=True,
        pipeline_depth=s.depth,
        early_stop=s.early_stop,
        alg=RANKS[s.rank],
        ignore_eos=True,
        stop_token_ids=case.eos_ids,
    )
    return Ask(case.prompt, params)


def served(
    method: str, cases: Sequence[D2FCase], seats: int, frontier: Pipeline | None = None
) -> list[tuple[CompletionOutput, list[Seen]]]:
    """Requests of one model. Nothing is recommended: what a case leaves unsaid is off."""
    llm = load(cases[0].model, bare(method), max_num_seqs=seats, enable_prefix_caching=False)
    llm.engine.step_program.frontier = frontier or llm.engine.step_program.frontier
    seen = watch(llm)
    answers = drive(llm, [ask_of(case) for case in cases])
    assert all(answer.output is not None for answer in answers)
    return [(answer.output, seen[answer]) for answer in answers if answer.output is not None]


# --- what it should do


def model_of(case: D2FCase) -> Transformer:
    return tiny_model(case.model, None, torch.float64)


@functools.cache
def run_of(name: str) -> D2FRun:
    case = next(case for case in SETTINGS if case.name == name)
    return decode(model_of(case), case.prompt, case.max_tokens, case.settings, case.eos_ids)


def wanted(case: D2FCase, *, cached: bool) -> list[Seen]:
    """Without a cache all that is visible runs: the blocks to come too, until an end of text says that none will."""
    steps, end, ended = [], len(case.prompt) + case.max_tokens, False
    for step in run_of(case.name).steps:
        rows = step.window if cached else set(range(end))
        active = [block for block in step.blocks if block.state == "active"]
        mask = model_of(case).config.mask_token_id
        open_ = {n for b in active for n in range(b.start, b.stop) if step.tokens[n] == mask}
        blocks = [Blocks(b.start, b.stop, b.state, b.full and b in active, b.undecided) for b in step.blocks]
        ended = ended or bool({*step.committed.values()} & {*case.eos_ids})
        end = step.end if case.settings.early_stop else step.blocks[-1].stop if ended else end
        steps.append(Seen(rows, step.tokens, blocks, open_, step.committed, step.forced, end))
    return steps


def check(case: D2FCase, got: tuple[CompletionOutput, list[Seen]], method: str) -> None:
    (out, steps), run, exact = got, run_of(case.name), wanted(case, cached=method == "d2f")
    for number, (mine, theirs) in enumerate(zip(steps, exact)):
        for name in vars(mine):
            assert getattr(mine, name) == getattr(theirs, name), f"{case.name}, step {number}, {name}"
    assert len(steps) == len(exact) == out.num_steps == out.num_forward_passes
    assert out.num_rows == sum(len(step.rows) for step in exact)
    assert (out.token_ids, out.finish_reason) == (run.token_ids, run.finish_reason)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", SETTINGS, ids=lambda case: case.name)
def test_alone(case: D2FCase, method: str) -> None:
    (got,) = served(method, [case], seats=1)
    check(case, got, method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_in_a_batch(model: str, method: str) -> None:
    """All settings of a model in three seats: whoever leaves makes room for one that is then in another phase."""
    cases = [case for case in SETTINGS if case.model == model]
    for case, got in zip(cases, served(method, cases, seats=3)):
        check(case, got, method)


# --- the check itself


@pytest.mark.parametrize("case", SETTINGS, ids=lambda case: case.name)
def test_a_setting_that_is_ignored_is_noticed(case: D2FCase) -> None:
    """Negative control: what a change of one setting does is seen."""
    settings = [dataclasses.replace(case.settings, **change) for change in case.matters]  # type: ignore[arg-type]
    for got in served("d2f", [dataclasses.replace(case, settings=each) for each in settings], seats=8):
        with pytest.raises(AssertionError):
            check(case, got, "d2f")


class BoundedByUndecided(Pipeline):
    """Complete blocks that wait for an earlier one do not count against the depth."""

    def _add(self, canvas: Canvas, params: DecodeParams) -> None:
        masks_SK = torch.zeros_like(canvas.block_state_SK, dtype=torch.int32)
        masks_SK.scatter_add_(1, canvas.block_SN.long(), canvas.undecided_SN().int())
        state_SK = canvas.block_state_SK.clone()
        waits_SK = (state_SK > CLOSED) & (state_SK < TO_SEAL) & (masks_SK == 0)
        canvas.block_state_SK.masked_fill_(waits_SK, SEALED)
        super()._add(canvas, params)
        canvas.block_state_SK.copy_(torch.where(waits_SK, state_SK, canvas.block_state_SK))


class SealedAtOnce(Pipeline):
    """A block is left alone as soon as it is complete, without the pass that runs it with all of its tokens."""

    def retire(self, canvas: Canvas, params: DecodeParams) -> None:
        super().retire(canvas, params)
        canvas.block_state_SK.masked_fill_(canvas.block_state_SK == TO_SEAL, SEALED)


class EndsOneStepLate(Pipeline):
    """Without early stop: that no more blocks come is found when the next pass is planned, so that one runs for nothing
    if all blocks were complete."""

    def advance(self, canvas: Canvas, params: DecodeParams) -> FrontierView:
        super()._stop_adding(canvas, params)
        return super().advance(canvas, params)

    def _stop_adding(self, canvas: Canvas, params: DecodeParams) -> None:
        pass


FAULTS = [
    (BoundedByUndecided, "reference-depth-2"),
    (SealedAtOnce, "defaults"),
    (EndsOneStepLate, "reference-ends-with-its-blocks"),
]


@pytest.mark.parametrize(("fault", "name"), FAULTS)
def test_a_broken_pipeline_is_noticed(fault: type[Pipeline], name: str) -> None:
    case = next(case for case in SETTINGS if case.name == name)
    (got,) = served("d2f", [case], seats=1, frontier=fault())
    with pytest.raises(AssertionError):
        check(case, got, "d2f")
