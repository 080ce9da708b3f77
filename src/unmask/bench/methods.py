"""Every method on a model that can be wrong: right answers beside the passes and rows that they took.

A cell is a method with what its requests say. Cells are asked the same held-out problems, the most wanted first, and
each is compared, problem by problem, with the cell that decides by the same rule in the same places and keeps nothing.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unmask.bench.results import Results
from unmask.bench.workers import side_by_side
from unmask.cache.pool import PAGE_SIZE, bytes_per_page
from unmask.config import FALLBACK, SamplingParams
from unmask.engine.llm import LLM
from unmask.engine.memory import planes_of
from unmask.engine.outputs import CompletionOutput
from unmask.errors import ConfigError, MethodError
from unmask.eval.paired import at_accuracy, aup, paired_difference
from unmask.eval.word_problems import held_out, num_correct
from unmask.methods import DRAFTERS, FRONTIERS, METHODS, OPTIONS, Method, method_named
from unmask.models.config import ModelConfig

DTYPE = "float32"
"""As the other accuracies that docs show."""
SEED = 20_261_130
MOST_ROWS = 1 << 18  # of a pass: nobody waits for rows, on any number of seats that is sensible here
ONE: Mapping[str, Any] = {"threshold": 2.0}
"""No prediction is that probable: a pass commits its best candidate only."""
RULES: Sequence[Mapping[str, Any]] = (
    ONE,
    {"threshold": 0.95},
    {"threshold": 0.9},
    {"factor": 1.0},
    {"entropy_bound": 0.1},
)
RULE_FIELDS = ("threshold", "strict_threshold", "factor", "entropy_bound", "steps", "alg", "remasking", "eps")
WINDOW: Mapping[str, Any] = {"decode_window": 16}
"""As wide as that of the methods with a cache: `window` itself recommends more."""
CACHES = (
    "fast-dllm-prefix",
    "fast-dllm-dual",
    "flash-cache",
    "spa-cache",
    "dllm-cache",
    "dkv-cache",
    "elastic-cache",
)
VERIFIERS = ("flash-verify", "one-pass", "one-pass-cache")
GAMMAS = (0.8, 0.9, 0.95, 0.99)
BASES = ("confidence", "window", *CACHES, "d2f")
"""Each policy, and each frontier without one."""
INTERVALS: Mapping[str, Sequence[float]] = {
    "refresh_interval": (1, 2, 4, 8, 16, 32, 64),
    "answer_interval": (1, 2, 4, 16, 64),
    "track": (0, 16, 32),
    "drift_threshold": (0.0, 0.5, 0.8, 0.95, 0.99, 2.0),
}
"""Of caches, over how many passes, how many rows, or below which similarity: from never to in every pass."""
MEASURED: Sequence[tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]] = (
    (RULES[1], {"curve": (0.7444, 0.4129, 0.5815, 0.4547), "ratio": 0.5815}, {"ratio": 0.522}),
    (ONE, {"curve": (0.3464, 0.02948, 0.1119, 0.08206), "ratio": 0.1119}, {"ratio": 0.0897}),
)
"""Budgets of `unmask profile` for the model that ships, by rule, and the same share in all layers: of proxies, the rows
of nine passes in ten (docs/profile.md; a test holds them to its result file)."""
VARIANTS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "dkv-cache": ({"variant": "prefill"}, {"variant": "pd"}, {"variant": "greedy"}),
    "spa-cache": (
        {"kept": "chosen"},
        {"new_first": "yes"},
        {"writes": "values"},
        {"writes": "sparse"},
        {"reuse": "absolute"},
        {"identifier": "input"},
        {"identifier": "attention"},
    ),
    "elastic-cache": (
        {"tripping": "redo"},
        {"masks": "all"},
        {"tested": "own"},
        {"cosine": "keys"},
        {"run_new": "no"},
    ),
    "flash-cache": ({"mass": "softmax"}, {"mass_rows": "refresh"}),
}
"""Options of caches, one away from the method that is named."""
BOTH_RULES = ("dkv-cache", "spa-cache")
"""Whose options are asked at one token a pass, too."""
DONORS = {"two-pass": "flash-verify", "one-pass": "one-pass", "nested": "freedave"}
"""Methods whose advice a drafter brings to another one."""
LISTED = ("vanilla", "dream", "flash-verify-uncached", "d2f-uncached")
COUNTED = ("num_forward_passes", "num_steps", "num_rows")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is asked."""

    name: str
    per_request: int
    max_tokens: int
    num_problems: int
    seats: int
    """On a GPU; 16 elsewhere."""


SETTINGS: Mapping[str, Setting] = {
    "short": Setting(name="short", per_request=1, max_tokens=128, num_problems=2000, seats=256),
    "long": Setting(name="long", per_request=6, max_tokens=512, num_problems=500, seats=64),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One method and what its requests say."""

    method: str
    sampling: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the method, for all requests."""
    drafter: str | None = None
    """Another one than the method's."""
    part: str = "first"

    @property
    def name(self) -> str:
        """Tells it from all others."""
        said = [f"{name}={value}" for name, value in {**self.sampling, **self.options}.items()]
        return " ".join([self.method, *(["+", self.drafter] if self.drafter else []), *said])

    def row(self) -> Method:
        """The method that runs.

        Raises:
            MethodError: its members exclude each other.
        """
        method = method_named(self.method)
        if self.drafter is not None:
            method = with_drafter(method, self.drafter)
        return replace(method, options={**method.options, **self.options})

    def values(self, config: ModelConfig, max_tokens: int) -> dict[str, Any]:
        """Whatever decides an answer: of its requests and of the method, with all that nobody said filled in.

        Raises:
            ConfigError: the method refuses what the requests say.
        """
        method = self.row()
        asked = SamplingParams(max_tokens=max_tokens, **self.sampling)
        params = method.complete(asked, config.generation, FALLBACK)
        names = (*RULE_FIELDS, *sorted(method.reads))
        said = {name: value for name in names if (value := getattr(params, name)) is not None}
        return said | dict(method.all_options)


BASELINE = Cell(method="confidence", sampling=ONE)


def with_drafter(method: Method, drafter: str) -> Method:
    """The method with another drafter, and what is recommended for that."""
    donor = method_named(DONORS[drafter])
    advice = {name: value for name, value in donor.sampling.items() if name in DRAFTERS[drafter]}
    name = f"{method.name} + {drafter}"
    return replace(method, name=name, drafter=drafter, sampling={**method.sampling, **advice})


# Which cells there are


def first_cells(max_tokens: int) -> Iterator[Cell]:
    """The most wanted: no cache, then each cache, then what is tried ahead, then other rules."""
    yield BASELINE
    for rule in RULES[1:3]:
        yield Cell(method="confidence", sampling=rule)
    for rule in RULES[:3]:
        yield Cell(method="window", sampling={**rule, **WINDOW})
    for method in CACHES:
        for rule in RULES[:3]:
            yield Cell(method=method, sampling=rule)
        if method == "spa-cache":
            for rule, budget, _ in MEASURED:
                yield Cell(method=method, sampling=rule, options=budget)
    yield from _ahead(max_tokens)
    for method in ("d2f", "d2f-uncached"):
        for rule in RULES[:3]:
            yield Cell(method=method, sampling=rule)
    for rule in RULES[3:]:
        yield Cell(method="confidence", sampling=rule)
    for method in ("vanilla", "dream"):
        for share in (1, 2, 4):
            yield Cell(method=method, sampling={"steps": max_tokens // share})
    for method in _others():
        for rule in RULES[:3]:
            yield Cell(method=method, sampling=rule)


def _others() -> list[str]:
    """Methods of the table whose members are together in no method above."""
    above = {_members(METHODS[name]) for name in (*BASES, *VERIFIERS, *DONORS.values(), *LISTED)}
    return [name for name, row in METHODS.items() if _members(row) not in above]


def _members(row: Method) -> tuple[str, ...]:
    return row.frontier, row.policy, row.drafter


def _ahead(max_tokens: int) -> Iterator[Cell]:
    """Drafters over the least probability that they try, and by other readings."""
    for method in VERIFIERS:
        for rule in RULES[:2]:
            for gamma in GAMMAS:
                yield Cell(method=method, sampling={**rule, "gamma": gamma})
        yield Cell(method=method, sampling={**RULES[2], "gamma": GAMMAS[0]})
    for rule in RULES[:2]:
        narrow = {**rule, "block_length": 16}
        for method in ("freedave", "fast-dllm-dual", "confidence"):  # the second is what the first promises to equal
            yield Cell(method=method, sampling=narrow)
    wide = {"block_width": max_tokens}  # of a view, which has all that follows the block, too
    yield Cell(method="fast-dllm-prefix", drafter="nested", sampling={**ONE, "block_length": 16}, options=wide)
    for method in ("flash-dllm", "flash-verify-reference", "flash-verify-uncached"):
        for rule in RULES[:2]:
            yield Cell(method=method, sampling=rule)


def curve_cells() -> Iterator[Cell]:
    """One value at a time, the others as the first cells have them."""
    held = {"window": WINDOW, **{name: {"gamma": GAMMAS[0]} for name in VERIFIERS}}
    for method in (*BASES, *VERIFIERS):
        for value in (0.99, 0.8, 0.7, 0.6, 0.5):
            yield Cell(method=method, sampling={"threshold": value, **held.get(method, {})}, part="curve")
    for method in ("spa-cache", "dllm-cache"):
        for rule in RULES[:2]:
            for ratio in (0.1, 0.5, 0.75, 1.0):
                yield Cell(method=method, sampling=rule, options={"ratio": ratio}, part="curve")
    for rank in (8, 32, 64, 320):
        yield Cell(method="spa-cache", sampling=ONE, options={"rank": rank}, part="curve")
    for method in VERIFIERS:
        for gamma in (0.3, 0.5, 0.7):
            yield Cell(method=method, sampling={**ONE, "gamma": gamma}, part="curve")
    for name, values in INTERVALS.items():
        for method in (each for each in CACHES if name in METHODS[each].reads):
            for rule in RULES[:2]:
                for value in values:
                    yield Cell(method=method, sampling={**rule, name: value}, part="curve")


def variant_cells() -> Iterator[Cell]:
    """What the options of caches change."""
    for rule, _, flat in MEASURED:
        yield Cell(method="spa-cache", sampling=rule, options=flat, part="variant")
    for method, changes in VARIANTS.items():
        for options in changes:
            for rule in (RULES[1], ONE) if method in BOTH_RULES else RULES[1:2]:
                yield Cell(method=method, sampling=rule, options=options, part="variant")


def grid_cells() -> Iterator[Cell]:
    """Every rule on every policy and drafter. What cannot be is asked once, for the method to say so."""
    for method in BASES:
        where = WINDOW if method == "window" else {}
        for rule in RULES[3:]:
            yield Cell(method=method, sampling={**rule, **where}, part="grid")
            if method == "d2f":
                yield Cell(method="d2f-uncached", sampling=rule, part="grid")
        for drafter in DONORS:
            if (named := _named(method, drafter)) is not None:
                rules = [] if drafter == "nested" else RULES[3:]  # it proves thresholds only
                yield from (Cell(method=named, sampling=rule, part="grid") for rule in rules)
                continue
            every = [Cell(method=method, drafter=drafter, sampling={**rule, **where}, part="grid") for rule in RULES]
            if not _can_be(every[0]):
                yield every[0]
            elif drafter != "nested":  # which is asked above, with room for its views
                yield from every


def _named(base: str, drafter: str) -> str | None:
    """The method of the table that is ``base`` with this drafter."""
    wanted = (*_members(METHODS[base])[:2], drafter)
    return next((name for name, row in METHODS.items() if _members(row) == wanted), None)


def _can_be(cell: Cell) -> bool:
    try:
        cell.row()
    except MethodError:
        return False
    return True


def cells(setting: Setting, *, curves: bool = False) -> list[Cell]:
    """All of a run in order, each once."""
    tokens = setting.max_tokens
    every = [*first_cells(tokens), *variant_cells(), *(curve_cells() if curves else ()), *grid_cells()]
    return list({cell.name: cell for cell in reversed(every)}.values())[::-1]


def only(every: Sequence[Cell], words: Sequence[str], config: ModelConfig, max_tokens: int) -> list[Cell]:
    """The cells with one of these words in their name, and those that they are compared with. A whole name means that
    cell alone.

    Raises:
        ConfigError: a word that is in no name.
    """
    names = {cell.name for cell in every}
    for word in words:
        if not any(word in cell.name for cell in every):
            raise ConfigError(f"no cell has {word!r} in its name; names are such as {every[-1].name!r}")
    mine = [c for c in every if any(word == c.name if word in names else word in c.name for word in words)]
    return _with_yardsticks(every, mine, config, max_tokens)


def chosen(every: Sequence[Cell], methods: Sequence[str], config: ModelConfig, max_tokens: int) -> list[Cell]:
    """The cells of these methods, and those that they are compared with."""
    mine = [cell for cell in every if cell.method in methods]
    return _with_yardsticks(every, [BASELINE, *mine], config, max_tokens)


def _with_yardsticks(every: Sequence[Cell], mine: Sequence[Cell], config: ModelConfig, max_tokens: int) -> list[Cell]:
    keys = {place(cell, config, max_tokens) for cell in mine} - {None}
    needed = [cell for cell in every if _keeps_nothing(cell) and place(cell, config, max_tokens) in keys]
    names = {cell.name for cell in (*needed, *mine)}
    return [cell for cell in every if cell.name in names]


def _keeps_nothing(cell: Cell) -> bool:
    method = method_named(cell.method)
    return _members(method)[1:] == ("recompute", "none") and cell.drafter is None


def place(cell: Cell, config: ModelConfig, max_tokens: int) -> str | None:
    """Where it may decide and by which rule: cells alike in this differ in what they keep and try only. None for one
    that is refused."""
    try:
        values, frontier = cell.values(config, max_tokens), cell.row().kinds[0]
    except ConfigError:
        return None
    names = (*RULE_FIELDS, *FRONTIERS[frontier])
    return " ".join([frontier, *(f"{name}={values[name]}" for name in names if name in values)])


# Measuring


class Bench:
    """One network, asked the same problems by one method after the other."""

    def __init__(
        self,
        setting: Setting,
        device: torch.device | str,
        *,
        problems: int | None = None,
        seats: int | None = None,
        dtype: str = DTYPE,
    ) -> None:
        count = -(-(problems or setting.num_problems) // setting.per_request)
        self.another = partial(Bench, setting, device, problems=problems, seats=seats, dtype=dtype)
        """Makes one that asks the same."""
        self.setting, self.device, self.dtype = setting, torch.device(device), dtype
        self.seats = seats or (setting.seats if self.device.type == "cuda" else 16)
        self.problems = held_out(count, seed=SEED, per_request=setting.per_request)
        first = LLM(method="confidence", device=device, dtype=dtype, **self._engine())
        self.network, self.tokenizer = first.model, first.tokenizer
        asked = ([{"role": "user", "content": problem["question"]}] for problem in self.problems)
        self.prompts = [{"prompt_token_ids": self.tokenizer.apply_chat_template(each)} for each in asked]
        """Encoded once for all cells: on a GPU that takes longer than some of them."""
        self._llm: LLM | None = first
        self._made: Method | None = first.method

    @property
    def config(self) -> ModelConfig:
        """Of the network."""
        return self.network.config

    def facts(self) -> dict[str, Any]:
        """Of every row alike."""
        setting = self.setting
        return {
            "model": "unmask-mini",
            "setting": setting.name,
            "seed": SEED,
            "dtype": self.dtype,
            "num_problems": len(self.problems) * setting.per_request,
            "per_request": setting.per_request,
            "max_tokens": setting.max_tokens,
            "seats": self.seats,
        }

    def _engine(self) -> dict[str, Any]:
        """Of every method. Prompts are asked again and again, and rows are counted: nobody may know them already."""
        return {"max_num_seqs": self.seats, "max_num_batched_tokens": MOST_ROWS, "enable_prefix_caching": False}

    def llm(self, cell: Cell) -> LLM:
        """An engine; that of the cell before it, if it has the same method.

        Raises:
            MethodError: the method cannot be, or not on these weights.
        """
        method = cell.row()
        if self._llm is None or method != self._made:
            self._llm = self._made = None  # its memory goes before more is taken
            self._tidy()
            wrong = method.attention != self.config.attention
            more = {**self._engine(), "allow_attention_mismatch": wrong}
            self._llm = LLM(self.network, method=method, tokenizer=self.tokenizer, device=self.device, **more)
            self._made = method
        return self._llm

    def measure(self, cell: Cell) -> tuple[dict[str, Any], list[int]]:
        """A row, and the right answers of every request.

        Raises:
            ConfigError: the method refuses the cell.
        """
        values = cell.values(self.config, self.setting.max_tokens)
        llm = self.llm(cell)
        params = SamplingParams(max_tokens=self.setting.max_tokens, **cell.sampling)
        start = time.perf_counter()
        answers = [result.outputs[0] for result in llm.generate(self.prompts, params)]
        seconds = time.perf_counter() - start
        right = [num_correct(answer.text, problem["answer"])[0] for answer, problem in zip(answers, self.problems)]
        row = self.about(cell) | {
            "place": place(cell, self.config, self.setting.max_tokens),
            "values": values,
            "attention_as_trained": llm.method.attention == self.config.attention,
            "num_requests": len(answers),
            "num_problems": len(answers) * self.setting.per_request,
            "num_correct": sum(right),
            "accuracy": sum(right) / (len(answers) * self.setting.per_request),
        }
        position = bytes_per_page(planes_of(llm.model, llm.engine.axes), self.config.num_layers) / PAGE_SIZE
        return row | counted(answers) | {"cache_bytes_per_position": position, "seconds": seconds}, right

    def about(self, cell: Cell) -> dict[str, Any]:
        """What a refused cell has too."""
        about = {"cell": cell.name, "part": cell.part, "method": cell.method, "said": {**cell.sampling, **cell.options}}
        base = method_named(cell.method)
        return about | {"frontier": base.frontier, "policy": base.policy, "drafter": cell.drafter or base.drafter}

    def _tidy(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def counted(answers: Sequence[CompletionOutput]) -> dict[str, Any]:
    """Useful tokens, those before the first end of text, over what was spent on them."""
    tokens = sum(len(answer.token_ids) for answer in answers)
    passes, steps, rows = (sum(getattr(answer, name) for answer in answers) for name in COUNTED)
    return {
        "num_tokens": tokens,
        "num_steps": steps,
        "num_passes": passes,
        "num_rows": rows,
        "num_length": sum(answer.finish_reason == "length" for answer in answers),
        "tokens_per_step": tokens / steps,
        "tokens_per_pass": tokens / passes,
        "tokens_per_row": tokens / rows,
        "rows_per_token": rows / max(tokens, 1),
        "passes_per_request": passes / len(answers),
    }


# The run


def run(
    results: Results,
    bench: Bench,
    every: Sequence[Cell],
    *,
    seconds: float = 600,
    workers: int = 1,
    tell: Callable[[str], None] = print,
) -> None:
    """Cell by cell, ``workers`` of them at a time in processes of their own, which share a GPU. A run that was cut goes
    on where it stopped; what is left out is named from the start."""
    ends = time.monotonic() + seconds
    resume(results, bench.facts())
    done = {row["cell"] for row in results.rows}
    waiting = [cell for cell in every if cell.name not in done]
    order = {cell.name: number for number, cell in enumerate(every)}
    left_out: list[str] = [cell.name for cell in waiting]
    results.data |= {**bench.facts(), "num_cells": len(every), "left_out": left_out}
    conclude(results)
    for cell, found in _ask(bench, waiting, workers, lambda: time.monotonic() <= ends):
        if isinstance(found, str):
            left_out[left_out.index(cell.name)] += f": {found}"
            continue
        row, right = found
        left_out.remove(cell.name)
        results.rows.append(row)
        results.rows.sort(key=lambda each: order.get(each["cell"], len(order)))
        results.data["right"][cell.name] = "".join(map(str, right))
        conclude(results)
        tell(f"{cell.name}: {outcome(row)}")


Found = tuple[dict[str, Any], list[int]] | str
"""A row, and the right answers of every request; or why there is no row."""


def _ask(
    bench: Bench, waiting: Sequence[Cell], workers: int, may_begin: Callable[[], bool]
) -> Iterator[tuple[Cell, Found]]:
    if workers > 1:
        yield from side_by_side(bench.another, (), attempt, waiting, workers=workers, may_begin=may_begin)
        return
    for cell in waiting:
        if not may_begin():
            return
        yield cell, attempt(bench, cell)


def attempt(bench: Bench, cell: Cell) -> Found:
    """A refusal is a row, too."""
    try:
        return bench.measure(cell)
    except torch.OutOfMemoryError as failure:
        return str(failure)[:200]
    except ConfigError as refusal:
        return {**bench.about(cell), "refused": str(refusal)}, []


def outcome(row: Mapping[str, Any]) -> str:
    """A line about a row."""
    if "refused" in row:
        return f"refused: {row['refused']}"
    told = (
        f"{row['accuracy']:.1%}, {row['tokens_per_pass']:.2f} tokens a pass, {row['rows_per_token']:.1f} rows a token"
    )
    return f"{told}, {row['seconds']:.1f} s"


def resume(results: Results, facts: Mapping[str, Any]) -> None:
    """Take over the rows of a file that the same code wrote on the same device about the same problems."""
    results.data["right"] = {}
    file = (results.out or Path()) / f"{results.name}.json"
    if results.out is None or not file.exists():
        return
    before, made = json.loads(file.read_text(encoding="utf-8")), results.data["environment"]
    same = all(before["environment"].get(name) == made[name] for name in ("device", "versions", "commit"))
    if same and all(before.get(name) == value for name, value in facts.items()):
        results.data |= {"rows": before["rows"], "right": before["right"]}


def conclude(results: Results) -> None:
    """What takes several rows, comparisons and curves; then both files."""
    rows, right = results.rows, results.data["right"]
    measured = [row for row in rows if "refused" not in row]
    plain = {
        row["place"]: row for row in reversed(measured) if (row["policy"], row["drafter"]) == ("recompute", "none")
    }
    slowest = next((row for row in measured if row["cell"] == BASELINE.name), None)
    for row in measured:  # what was compared stays so
        if row.get("to_no_cache") is None:
            row["to_no_cache"] = compared(row, plain.get(row["place"]), right)
        if row.get("to_one_a_pass") is None:
            row["to_one_a_pass"] = compared(row, slowest, right)
    gains(measured)
    results.note(curves=curves(measured))


RATES = ("tokens_per_step", "tokens_per_pass", "tokens_per_row")


def gains(rows: Sequence[dict[str, Any]]) -> None:
    """What trying ahead gains: each rate over that of the same method without it, at the same accuracy, whatever
    threshold that takes. None where its curve, of two points at least, is never as good.

    One token a pass is no point of that curve: it is as good as the strictest threshold, and anything between the two
    would lie between a tenth of the rate and all of it.
    """
    plain: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["drafter"] == "none" and row["values"].get("threshold", 2.0) <= 1:
            plain.setdefault(_without_rule(row), []).append(row)
    for row in rows:
        if row["drafter"] != "none":
            peers = plain.get(_without_rule(row), [])
            row["gains"] = {rate: _gain(row, peers, rate) for rate in RATES} if len(peers) > 1 else None


def _without_rule(row: Mapping[str, Any]) -> str:
    """The axes but the drafter, and what they read."""
    ahead = {*RULE_FIELDS, *DRAFTERS.get(row["drafter"], ()), *OPTIONS.get(row["drafter"], {})}
    held = {name: value for name, value in row["values"].items() if name not in ahead}
    return json.dumps([row["frontier"], row["policy"], held], sort_keys=True)


def _gain(row: Mapping[str, Any], peers: Sequence[Mapping[str, Any]], rate: str) -> float | None:
    best = at_accuracy([(peer["accuracy"], peer[rate]) for peer in peers], row["accuracy"])
    return None if best is None else row[rate] / best - 1


def compared(
    row: Mapping[str, Any], other: Mapping[str, Any] | None, right: Mapping[str, str]
) -> dict[str, Any] | None:
    """The difference of two rows' accuracies; None where there is no other."""
    if other is None or other["cell"] == row["cell"]:
        return None
    ours, theirs = ([int(digit) for digit in right[each["cell"]]] for each in (row, other))
    per_request = row["num_problems"] // row["num_requests"]
    return {"of": other["cell"], **paired_difference(ours, theirs, per_request).to_dict()}


CURVES = ("threshold", "gamma", "ratio", "rank", *INTERVALS)
FEWEST_POINTS = 3


def curves(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows that differ in one value only, in the order of that value, with AUP."""
    best = 100 * max((row["accuracy"] for row in rows), default=0.0)
    out = []
    for over in CURVES:
        groups: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            held = {name: value for name, value in row["values"].items() if name != over}
            groups.setdefault(json.dumps([row["method"], row["drafter"], held]), []).append(row)
        for group in groups.values():
            if len(points := {row["values"].get(over): row for row in group}) >= FEWEST_POINTS:
                out.append(_curve(over, points, best))
    return out


def _curve(over: str, points: Mapping[Any, Mapping[str, Any]], best: float) -> dict[str, Any]:
    values = sorted(points, key=lambda value: (value is None, value))  # None: at the method's own occasions only
    ordered = [points[value] for value in values]
    shared = [{name: value for name, value in row["said"].items() if name != over} for row in ordered]
    return {
        "method": ordered[0]["method"],
        "drafter": ordered[0]["drafter"],
        "over": over,
        "held": {name: value for said in shared for name, value in said.items()},
        "values": values,
        "cells": [row["cell"] for row in ordered],
        "aup": aup([(row["tokens_per_pass"], 100 * row["accuracy"]) for row in ordered], best),
    }
