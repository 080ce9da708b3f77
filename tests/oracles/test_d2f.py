"""The oracle of D2F decoding itself: against the reference's runs and forwards, against runs with a cache, and against
what the method promises."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from oracles import decoding, flash
from oracles.d2f import (
    SETTINGS,
    Block,
    D2FCase,
    D2FRun,
    D2FSettings,
    Decoder,
    block_causal_logits,
    block_kv,
    decode,
    predict,
    spans_of,
)
from oracles.flash import Row, empty_memory, made_up_prompt
from oracles.golden import ROOT, tiny_model
from unmask.config import SamplingParams
from unmask.models.attention import DenseContext
from unmask.models.transformer import Transformer

MODELS = ["tiny-llada", "tiny-llada-gqa", "tiny-dream"]
PROMPTS = [made_up_prompt(length, seed) for length, seed in ((1, 0), (5, 1), (12, 2), (31, 3))]
RANKS = {None: "prob", "neg_entropy": "entropy", "margin_confidence": "margin"}
REFERENCE_STATES = {"active": "active", "sealing": "to_cache", "sealed": "in_cache"}
each_case = pytest.mark.parametrize("case", SETTINGS, ids=lambda case: case.name)
exactly = functools.partial(torch.testing.assert_close, atol=1e-9, rtol=1e-9)


def model_of(name: str, dtype: torch.dtype = torch.float64) -> Transformer:
    return tiny_model(name, None, dtype)


@functools.cache
def run_of(name: str) -> D2FRun:
    case = next(case for case in SETTINGS if case.name == name)
    return decode(model_of(case.model), case.prompt, case.max_tokens, case.settings, case.eos_ids)


def commits(run: D2FRun) -> list[dict[int, int]]:
    return [step.committed for step in run.steps]


def cut_at(positions: dict[int, int], stop: int) -> dict[int, int]:
    return {n: token for n, token in positions.items() if n < stop}


def golden(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = []
    for family in ("llada", "dream"):
        cases += json.loads((ROOT / f"{name}_{family}.json").read_text())["cases"]
    return cases


# --- the reference


def reference_settings(said: dict[str, Any]) -> D2FSettings:
    return D2FSettings(
        block_length=said["block_size"],
        tau_add=said["block_add_threshold"],
        tau_act=said["decoded_token_threshold"],
        threshold=said["skip_threshold"],
        early_stop=False,
        rank=RANKS[said.get("sampling_strategy")],
    )


@pytest.mark.parametrize("case", golden("d2f"), ids=lambda case: case["id"])
def test_equals_the_reference(case: dict[str, Any]) -> None:
    said, prompt = case["settings"], case["prompt_ids"]
    assert tiny_model(case["model"]).config.mask_token_id == said["mask_token_id"]
    max_tokens = said["max_new_tokens"] // said["block_size"] * said["block_size"]
    run = decode(tiny_model(case["model"]), prompt, max_tokens, reference_settings(said), [said["eos_token_id"]])
    assert run.canvas == [*prompt, *case["output_ids"]]
    assert run.num_passes == case["nfe"] == len(case["steps"])
    for mine, theirs in zip(run.steps, case["steps"]):
        found = {n + len(prompt): token for n, token in zip(theirs["pos"], theirs["tok"])}
        assert mine.committed == found
        blocks = [[REFERENCE_STATES[block.state], block.full, block.undecided] for block in mine.blocks]
        assert blocks == theirs["blocks"]
        assert mine.window == set(range(theirs["window_start"], theirs["window_start"] + theirs["window_len"]))
        final = sum(block.stop - block.start for block in mine.blocks if block.state == "sealing")
        assert final + (len(prompt) if mine is run.steps[0] else 0) == theirs["commit_tokens"]
    gaps = [gap for gap in case["gaps"].values() if gap is not None]
    assert run.margin == pytest.approx(min(gaps), abs=1e-4)


def test_the_reference_cases_have_an_end_of_text_and_all_ranks() -> None:
    cases = golden("d2f")
    assert len(cases) == 21
    assert sum(len(case["output_ids"]) < case["settings"]["max_new_tokens"] - 8 for case in cases) >= 2
    assert {case["settings"].get("sampling_strategy") for case in cases} == set(RANKS)


@pytest.mark.parametrize("case", golden("d2f_forward"), ids=lambda case: case["id"])
def test_equals_the_reference_forward(case: dict[str, Any]) -> None:
    family = "dream" if case["model"] == "tiny-dream" else "llada"
    expected = load_file(ROOT / f"d2f_forward_{family}_logits.safetensors")[case["logits_key"]]
    model = tiny_model(case["model"])
    if "attention_mask" not in case:
        found = block_causal_logits(model, case["input_ids"], case["prompt_length"], case["block_size"])
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)
        return
    for tokens, real, rows in zip(case["input_ids"], case["attention_mask"], expected, strict=True):
        start = real.index(1)
        found = block_causal_logits(model, tokens[start:], len(tokens) - start, 1)  # one block: no order in it
        torch.testing.assert_close(found, rows[start:], atol=1e-3, rtol=1e-4)


# --- the network


def random_text(model: Transformer, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 300, (length,), generator=generator)
    tokens[torch.rand(length, generator=generator) < 0.3] = model.config.mask_token_id
    return tokens.tolist()


def visible(length: int, prompt_len: int, block_length: int) -> Tensor:
    """bool [N, N] from the definition: a block's number is at most that of the row's block."""
    number = [0 if n < prompt_len else 1 + (n - prompt_len) // block_length for n in range(length)]
    return torch.tensor([[key <= query for key in number] for query in number])


class Keeping(DenseContext):
    """Keeps the keys and values of every layer."""

    def __init__(self, mask: Tensor, model: Transformer) -> None:
        super().__init__(torch.arange(len(mask)), mask=mask, rope=model.rope)
        self.stored: list[tuple[Tensor, Tensor]] = []

    def attend(self, layer: int, q: Tensor) -> Tensor:
        assert self._kv is not None
        self.stored.append((self._kv[0][0], self._kv[1][0]))
        return super().attend(layer, q)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("length", "prompt_len", "block_length"), [(24, 7, 5), (20, 0, 6), (9, 9, 4), (13, 3, 1)])
def test_the_forward_is_one_with_the_mask_of_the_definition(
    name: str, length: int, prompt_len: int, block_length: int
) -> None:
    model, tokens = model_of(name), random_text(model_of(name), length, length)
    context = Keeping(visible(length, prompt_len, block_length), model)
    with torch.inference_mode():
        expected = model.logits(model(torch.tensor([tokens]), context))[0]
    exactly(block_causal_logits(model, tokens, prompt_len, block_length), expected)
    for mine, theirs in zip(block_kv(model, tokens, prompt_len, block_length), context.stored, strict=True):
        exactly(mine, theirs)
    other = block_causal_logits(model, tokens, prompt_len, block_length + 1)
    assert (length == prompt_len) == ((other - expected).abs().max() < 1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_a_block_never_changes_what_is_before_it(name: str) -> None:
    model, tokens = model_of(name), random_text(model_of(name), 22, 1)
    whole, kv = block_causal_logits(model, tokens, 6, 5), block_kv(model, tokens, 6, 5)
    for stop in (6, 11, 16, 21):
        exactly(block_causal_logits(model, tokens[:stop], 6, 5), whole[:stop])
        for mine, theirs in zip(block_kv(model, tokens[:stop], 6, 5), kv, strict=True):
            exactly(mine, (theirs[0][:stop], theirs[1][:stop]))
    assert (block_causal_logits(model, tokens[:13], 6, 5)[11:] - whole[11:13]).abs().max() > 1e-3


def test_spans() -> None:
    assert spans_of(9, 3, 4) == [range(3), range(3, 7), range(7, 9)]
    assert spans_of(3, 3, 4) == [range(3)]
    assert spans_of(5, 0, 4) == [range(4), range(4, 5)]


def test_a_prediction() -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 5.0])
    one = predict(logits, 7, 3)
    probs = torch.softmax(logits, 0).tolist()
    assert (one.position, one.token, one.lead) == (7, 1, 0.0)
    assert one.probability == pytest.approx(probs[1]) == pytest.approx(one.score("prob"))
    assert one.neg_entropy == pytest.approx(float((torch.tensor(probs) * torch.tensor(probs).log()).sum()))
    assert predict(torch.tensor([3.0, 0.0, 1.0, 9.0]), 0, 3).lead == pytest.approx(
        float(torch.softmax(torch.tensor([3.0, 0.0, 1.0, 9.0]), 0)[[0, 2]].diff().neg())
    )


# --- the limits


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("max_tokens", "block_length"), [(18, 6), (11, 1), (13, 13), (17, 40)])
def test_taus_of_one_decode_one_token_at_a_time_block_by_block(name: str, max_tokens: int, block_length: int) -> None:
    """With a block for the whole answer: plain low-confidence decoding in which the prompt does not see the answer."""
    model = model_of(name)
    settings = D2FSettings(block_length=block_length, tau_add=1, tau_act=1, threshold=1)
    for prompt in PROMPTS[::2]:

        def network(canvas: Sequence[int], num_prompt: int = len(prompt)) -> Tensor:
            return block_causal_logits(model, canvas, num_prompt, block_length)

        free = decode(model, prompt, max_tokens, settings)
        for eos_id in (free.token_ids[0], free.token_ids[7]):
            mine = decode(model, prompt, max_tokens, settings, [eos_id])
            params = SamplingParams(max_tokens=max_tokens, steps=max_tokens, block_length=block_length)
            family = dataclasses.replace(decoding.family_of(model), eos_ids=(eos_id,))
            theirs = decoding.decode(network, family, prompt, params)
            assert mine.token_ids == theirs.token_ids
            assert mine.finish_reason == theirs.finish_reason
            assert mine.num_passes == theirs.num_passes
            passes = [
                {c.position + len(prompt): c.token_id for c in theirs.commits if c.num_pass == number}
                for number in range(1, theirs.num_passes + 1)
            ]
            stop = len(prompt) + len(mine.token_ids)
            assert [cut_at(found, stop) for found in commits(mine)] == passes
            assert all(len(step.committed) == 1 for step in mine.steps)


@pytest.mark.parametrize("name", MODELS)
def test_bounds_that_do_not_bind(name: str) -> None:
    settings = D2FSettings(block_length=5, tau_act=0.4, threshold=0.7)
    depths = []
    for prompt in PROMPTS:
        run = decode(model_of(name), prompt, 23, settings)
        depths += [sum(block.state == "active" for block in step.blocks) for step in run.steps]
        for change in ({"depth": 5}, {"early_stop": False}):
            assert commits(decode(model_of(name), prompt, 23, dataclasses.replace(settings, **change))) == commits(run)
    assert max(depths) > 2


@pytest.mark.parametrize("name", MODELS)
def test_a_sequential_pipeline_has_depth_one(name: str) -> None:
    settings = D2FSettings(block_length=5, tau_add=1, threshold=0.7)
    bounded = dataclasses.replace(settings, tau_add=0.0, depth=1)
    for prompt in PROMPTS:
        run = decode(model_of(name), prompt, 23, settings)
        assert commits(decode(model_of(name), prompt, 23, bounded)) == commits(run)


# --- with a cache


class Cached(Decoder):
    """Runs the window only, on top of remembered keys and values; `fault` breaks it in a known way."""

    fault = ""

    def __init__(self, case: D2FCase) -> None:
        super().__init__(model_of(case.model), case.prompt, case.max_tokens, case.settings, case.eos_ids)
        self.memory = empty_memory(self.model)

    def forward(self, window: set[int]) -> dict[int, Tensor]:
        sealing = {n for block in self.blocks if block.state == "sealing" for n in range(block.start, block.stop)}
        rows = []
        for span in spans_of(len(self.tokens), self.num_prompt, self.settings.block_length):
            stop = len(self.tokens) if self.fault == "the window sees itself" else span.stop
            sees = tuple(("canvas", n) for n in range(stop))
            rows += [Row(self.tokens[n], n, ("canvas", n), sees) for n in span if n in window]
        if self.fault == "nothing is sealed":
            rows = [row for row in rows if row.position not in sealing]
        logits, _ = flash.forward(self.model, self.memory, rows)
        found = {row.position: one for row, one in zip(rows, logits)}
        if self.fault == "the row of the last commit":
            found = {n: one for n, one in found.items() if n not in sealing}
        return found


@each_case
def test_the_window_is_all_that_has_to_run(case: D2FCase) -> None:
    cached = Cached(case)
    cached.run()
    run = run_of(case.name)
    assert commits(cached.out) == commits(run)
    assert cached.out.canvas == run.canvas
    assert cached.out.steps == run.steps


@each_case
def test_sealed_entries_are_those_of_a_fresh_forward_of_the_final_text(case: D2FCase) -> None:
    cached = Cached(case)
    cached.run()
    sealed = [block for block in cached.blocks if block.state == "sealed"]
    stop = sealed[-1].stop if sealed else cached.num_prompt
    fresh = block_kv(cached.model, cached.out.canvas, cached.num_prompt, case.settings.block_length)
    for here, (k, v) in zip(cached.memory, fresh, strict=True):
        exactly(torch.stack([here["canvas", n][0] for n in range(stop)]), k[:stop])
        exactly(torch.stack([here["canvas", n][1] for n in range(stop)]), v[:stop])


def test_some_are_sealed_together() -> None:
    steps = [step for case in SETTINGS for step in run_of(case.name).steps]
    assert any(sum(block.state == "sealing" for block in step.blocks) > 1 for step in steps)


FAULTS = ["the window sees itself", "nothing is sealed", "the row of the last commit"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_cache_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cached, "fault", fault)
    shifted = [case for case in SETTINGS if case.model == "tiny-dream"]
    cases = shifted if fault == "the row of the last commit" else SETTINGS
    noticed = (case.name for case in cases if commits(Cached(case).run()) != commits(run_of(case.name)))
    assert len(list(itertools.islice(noticed, 5))) == 5


class Compared(Decoder):
    """Holds every row that is not run against a fresh forward."""

    def forward(self, window: set[int]) -> dict[int, Tensor]:
        fresh = block_causal_logits(self.model, self.tokens, self.num_prompt, self.settings.block_length)
        others = sorted(set(range(len(self.tokens))) - window)
        if others:
            exactly(torch.stack([self.rows[n] for n in others]), fresh[others])
        return {n: fresh[n] for n in window}


@each_case
def test_rows_that_no_longer_run_are_those_of_a_fresh_forward(case: D2FCase) -> None:
    run = Compared(model_of(case.model), case.prompt, case.max_tokens, case.settings, case.eos_ids).run()
    assert commits(run) == commits(run_of(case.name))


# --- the rules, read off the steps


def size(block: Block) -> int:
    return block.stop - block.start


def decided_to(block: Block | None) -> float:
    """The prompt: 1."""
    return 1.0 if block is None else (size(block) - block.undecided) / size(block)


@each_case
def test_blocks_follow_the_rules(case: D2FCase) -> None:
    s, start, last = case.settings, len(case.prompt), len(case.prompt) + case.max_tokens
    mask = model_of(case.model).config.mask_token_id
    canvas, end, before, ended = list(case.prompt), last, list[Block](), False
    sealed: dict[int, int] = {}
    for number, step in enumerate(run_of(case.name).steps):
        # What is left of the blocks of the step before, and one more if it may be added.
        left = [(block.start, min(block.stop, end)) for block in before if block.start < end]
        counts = [canvas[low:high].count(mask) for low, high in left]
        may_add = (left[-1][1] if left else start) < end and not ended
        may_add = may_add and (not left or 1 - counts[-1] / (left[-1][1] - left[-1][0]) >= s.tau_add - 1e-9)
        flying = len(counts) - next((place for place, count in enumerate(counts) if count), len(counts))
        may_add = may_add and (s.depth is None or flying < s.depth)
        if may_add:
            low = left[-1][1] if left else start
            left.append((low, min(low + s.block_length, last)))
            canvas += [mask] * (left[-1][1] - low)
        assert [(block.start, block.stop) for block in step.blocks] == left
        assert list(step.tokens) == canvas
        assert [block.undecided for block in step.blocks] == [canvas[low:high].count(mask) for low, high in left]
        # Full: the block before is, or once was, decided far enough.
        for own, previous in zip(step.blocks, [None, *step.blocks]):
            assert own.full == (decided_to(previous) >= s.tau_act)
        # States: sealed, then sealing, then active; complete ones with nothing active before them are sealing once.
        states = [block.state for block in step.blocks]
        assert states == sorted(states, key=["sealed", "sealing", "active"].index)
        for index, block in enumerate(step.blocks):
            front = all(not other.undecided for other in step.blocks[: index + 1])
            assert (block.state != "active") == front
            if block.state == "sealing":
                assert sealed.setdefault(index, number) == number
            assert (block.state == "sealed") == (index in sealed and sealed[index] < number)
        running = [block for block in step.blocks if block.state != "sealed"]
        assert step.window == set(range(0 if number == 0 else running[0].start, running[-1].stop))
        assert step.num_rows == sum(map(size, running)) + (start if number == 0 else 0)
        # Commits.
        assert step.committed
        assert all(canvas[n] == mask for n in step.committed)
        for n, token in step.committed.items():
            canvas[n] = token
            ended = ended or (token in case.eos_ids and not s.early_stop)
        stops = [n + 1 for n in range(start, len(canvas)) if canvas[n] in case.eos_ids]
        end = min([last, *stops]) if s.early_stop else last
        assert step.end == end
        canvas, before = canvas[:end], list(step.blocks)
    assert mask not in canvas
    assert canvas == run_of(case.name).canvas
    assert len(canvas) == end or ended


@each_case
def test_commits_follow_the_rules(case: D2FCase) -> None:
    s, model = case.settings, model_of(case.model)
    mask, shift = model.config.mask_token_id, model.config.logit_shift
    for step in run_of(case.name).steps:
        probs = torch.softmax(block_causal_logits(model, step.tokens, len(case.prompt), s.block_length).float(), -1)
        found, forced = dict[int, int](), set[int]()
        for block in step.blocks:
            candidates = [n for n in range(block.start, block.stop) if step.tokens[n] == mask]
            rows = {n: probs[n - shift] for n in candidates}
            best = {n: row.index_fill(0, torch.tensor(mask), 0).topk(2) for n, row in rows.items()}
            chosen = [n for n in candidates if best[n].values[0] > s.threshold]
            if candidates and block.full and not chosen:
                scores = {
                    "prob": {n: float(best[n].values[0]) for n in candidates},
                    "margin": {n: float(best[n].values[0] - best[n].values[1]) for n in candidates},
                    "entropy": {n: float((row * row.clamp(min=1e-30).log()).sum()) for n, row in rows.items()},
                }[s.rank]
                chosen = [max(candidates, key=scores.__getitem__)]
                forced |= set(chosen)
            found |= {n: int(best[n].indices[0]) for n in chosen}
        assert step.committed == {n: token for n, token in found.items() if n < step.end}
        assert step.forced == {n for n in forced if n < step.end}


class Undecided(Decoder):
    """Every row gives two tokens one half each."""

    def forward(self, window: set[int]) -> dict[int, Tensor]:
        logits = torch.full((self.model.config.vocab_size,), -torch.inf)
        logits[[7, 9]] = 0
        return dict.fromkeys(window, logits)


@pytest.mark.parametrize("rank", ["prob", "margin", "entropy"])
def test_ties_and_the_strict_threshold(rank: str) -> None:
    for name in MODELS:
        settings = D2FSettings(block_length=3, tau_add=1, threshold=0.5, rank=rank)
        run = Undecided(model_of(name), [1, 2], 5, settings).run()
        assert commits(run) == [{n: 7} for n in range(2, 7)]
        assert [step.forced for step in run.steps] == [{n} for n in range(2, 7)]
        run = Undecided(model_of(name), [1, 2], 5, dataclasses.replace(settings, threshold=0.499)).run()
        assert commits(run) == [{2: 7, 3: 7, 4: 7}, {5: 7, 6: 7}]
        assert run.margin == 0, "the second best token is as good"


# --- what every run promises


def test_every_run_ends_in_time_and_without_mask() -> None:
    """Many short runs, and the rarer events do happen among them."""
    events = dict.fromkeys(
        ("first", "last", "none", "moved", "block gone", "tail gone", "gone at once", "waits", "none committed"), 0
    )
    generator = torch.Generator().manual_seed(2)
    for number in range(100):
        model = model_of(MODELS[number % 3])
        mask = model.config.mask_token_id
        draw = torch.randint(0, 300, (20,), generator=generator).tolist()
        prompt, max_tokens = draw[10 : 11 + draw[0] % 9], 1 + draw[1] % 22
        settings = D2FSettings(
            block_length=1 + draw[2] % 8,
            tau_add=(0.0, 0.1, 0.5, 1.0)[draw[3] % 4],
            tau_act=(0.0, 0.3, 0.6, 1.0)[draw[4] % 4],
            threshold=(0.3, 0.6, 0.9)[draw[5] % 3],
            depth=(None, None, 1, 2)[draw[6] % 4],
            rank=("prob", "margin", "entropy")[draw[7] % 3],
        )
        free = decode(model, prompt, max_tokens, settings)
        eos_ids = {free.canvas[len(prompt) + draw[8] % max_tokens] if number % 7 else draw[9]}
        run = decode(model, prompt, max_tokens, settings, eos_ids)
        reference = decode(model, prompt, max_tokens, dataclasses.replace(settings, early_stop=False), eos_ids)
        for one in (free, run, reference):
            assert one.canvas[: len(prompt)] == prompt
            assert mask not in one.canvas
            assert 1 <= one.num_passes <= max_tokens
            assert one.num_rows == sum(len(step.window) for step in one.steps)
            assert all(step.committed for step in one.steps)
            decided = [n for step in one.steps for n in step.committed]
            assert len(decided) == len(set(decided))
        assert len(free.canvas) == len(prompt) + max_tokens
        assert free.finish_reason == "length"
        assert run.finish_reason == reference.finish_reason
        assert not eos_ids & {*run.token_ids, *reference.token_ids}
        answer = run.canvas[len(prompt) :]
        assert run.token_ids == (answer[:-1] if run.finish_reason == "stop" else answer)
        assert not eos_ids & set(answer[:-1])
        assert run.finish_reason == "stop" or len(answer) == max_tokens

        first = next((n for n, step in enumerate(free.steps) if eos_ids & set(step.committed.values())), None)
        assert commits(run)[:first] == commits(free)[:first] == commits(reference)[:first]
        events["first"] += run.finish_reason == "stop" and len(answer) == 1
        events["last"] += run.finish_reason == "stop" and len(answer) == max_tokens
        events["none"] += run.finish_reason == "length"
        if first is not None:
            events["gone at once"] += len(run.steps[first].committed) < len(reference.steps[first].committed)
        for step in free.steps:
            events["waits"] += any(block.state == "active" and not block.undecided for block in step.blocks)
            ids = [set(range(block.start, block.stop)) for block in step.blocks if block.undecided]
            events["none committed"] += any(not here & set(step.committed) for here in ids)
        for step, after in itertools.pairwise(run.steps):
            events["moved"] += len(prompt) + max_tokens > step.end > after.end
            events["block gone"] += len(after.blocks) < len(step.blocks)
            events["tail gone"] += any(b.stop < a.stop for a, b in zip(step.blocks, after.blocks))
    assert all(events.values()), events


def test_end_of_text_in_the_prompt_means_nothing() -> None:
    for early_stop in (True, False):
        settings = D2FSettings(block_length=4, early_stop=early_stop)
        run = decode(model_of("tiny-llada"), [93, 5, 93], 8, settings, [93])
        assert run.canvas[:3] == [93, 5, 93]
        assert run.steps[0].end > 3


def test_nothing_to_decode() -> None:
    run = decode(model_of("tiny-llada"), [5, 6], 0, D2FSettings())
    assert (run.canvas, run.token_ids, run.num_passes, run.finish_reason) == ([5, 6], [], 0, "length")


# --- the named settings


def has_speculative_end(case: D2FCase) -> bool:
    mask = model_of(case.model).config.mask_token_id
    for step in run_of(case.name).steps:
        tokens = dict(enumerate(step.tokens)) | step.committed
        for block in step.blocks:
            ends = any(step.committed.get(n) in case.eos_ids for n in range(block.start, block.stop))
            if ends and any(tokens[n] == mask for n in range(len(case.prompt), block.start)):
                return True
    return False


@each_case
def test_the_named_settings(case: D2FCase) -> None:
    """Each ends where it says, no decision is so close that rounding could turn it, and its switches matter."""
    run = run_of(case.name)
    assert case.ends == ("never" if run.finish_reason == "length" else "middle" if run.token_ids else "start")
    assert len(run.token_ids) + 1 < case.max_tokens or case.ends == "never"
    assert has_speculative_end(case) == case.speculative
    assert run.margin > 1e-4
    for change in case.matters:
        settings = dataclasses.replace(case.settings, **change)  # type: ignore[arg-type]
        other = decode(model_of(case.model), case.prompt, case.max_tokens, settings, case.eos_ids)
        assert commits(other) != commits(run), change


@each_case
def test_single_precision_decides_the_same(case: D2FCase) -> None:
    run = decode(model_of(case.model, torch.float32), case.prompt, case.max_tokens, case.settings, case.eos_ids)
    assert commits(run) == commits(run_of(case.name))
    assert run.steps == run_of(case.name).steps


def test_the_named_settings_cover_the_method() -> None:
    assert len({case.name for case in SETTINGS}) == len(SETTINGS) >= 14
    assert {(case.model, case.ends) for case in SETTINGS} >= {(model, "never") for model in MODELS}
    assert {case.ends for case in SETTINGS} == {"start", "middle", "never"}
    assert {case.settings.depth for case in SETTINGS} >= {None, 1, 2}
    assert {(case.settings.early_stop, case.speculative) for case in SETTINGS} == set(
        itertools.product((True, False), repeat=2)
    )
    assert any(case.max_tokens % case.settings.block_length for case in SETTINGS)
    changed = {name for case in SETTINGS for change in case.matters for name in change}
    assert changed == {field.name for field in dataclasses.fields(D2FSettings)}
    assert {case.settings.rank for case in SETTINGS} == {"prob", "margin", "entropy"}
    pairs = {case.name: list(itertools.pairwise(run_of(case.name).steps)) for case in SETTINGS}
    assert sum(any(len(b.blocks) < len(a.blocks) for a, b in steps) for steps in pairs.values()) >= 4
