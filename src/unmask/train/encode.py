"""From problems to rows of ids: [prompt | answer | end-of-text fill].

B rows, N positions
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unmask.errors import ConfigError
from unmask.problems import make_problems
from unmask.train.config import DataConfig, NoiseConfig, StageConfig

Array = Any  # numpy's own array types differ between its major versions

PLACEHOLDER = "apple"
MAX_TRIES = 64
VALIDATION_SEED = 1_000_003
RETRY_STRIDE = 1 << 40  # past every index that a run can reach


class Problem(NamedTuple):
    """One request: the conversation's user text and its answer."""

    question: str
    answer: str


class Group(NamedTuple):
    """Rows of one static shape: `token` int16 or int32 [B, N]; `prompt`, `end`, `see` int32 [B]."""

    token: Array
    prompt: Array
    end: Array
    see: Array

    @property
    def num_answer(self) -> int:
        """Positions of the answer regions."""
        return int((self.see - self.prompt).sum())

    def num_loss(self, loss_on_fill: bool) -> int:
        """Positions of the loss regions: the loss's denominator."""
        return self.num_answer if loss_on_fill else int((self.end + 1 - self.prompt).sum())


class Encoder:
    """Text to ids. The chat template is rendered once, and contents are put between its parts.

    Rendering it for every problem costs several times the encoding itself. Contents that would be encoded
    differently inside the template (a tokenizer that merges across its edges) are found out at the start, and such a
    template is rendered each time.
    """

    def __init__(self, tokenizer: Any, eos_id: int) -> None:
        self.tokenizer, self.eos_id = tokenizer, eos_id
        self.parts = self._split_template()

    def prompt(self, question: str) -> list[int]:
        """Ids of the conversation up to the answer."""
        if self.parts is None:
            return self._render(question)
        before, after = self.parts
        return [*before, *self.tokenizer.encode(question), *after]

    def answer(self, answer: str) -> list[int]:
        """Ids of the answer, without end-of-text."""
        return list(self.tokenizer.encode(answer))

    def _render(self, content: str) -> list[int]:
        return list(
            self.tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        )

    def _split_template(self) -> tuple[list[int], list[int]] | None:
        whole, inner = self._render(PLACEHOLDER), list(self.tokenizer.encode(PLACEHOLDER))
        starts = [i for i in range(len(whole)) if whole[i : i + len(inner)] == inner]
        if len(starts) != 1:
            return None
        before, after = whole[: starts[0]], whole[starts[0] + len(inner) :]
        probes = [p.question for n in (1, 3) for p in _problems(DataConfig(), VALIDATION_SEED, n, 0, 8)]
        same = all([*before, *self.tokenizer.encode(q), *after] == self._render(q) for q in probes)
        return (before, after) if same else None


def _problems(data: DataConfig, seed: int, count: int, start: int, num: int, wide: bool = True) -> Iterable[Problem]:
    """Requests [start, start + num) with `count` problems each.

    Every count has its own seed: requests of different sizes share no problem, whatever their indices.
    """
    made = make_problems(
        seed * 1000 + count,
        num,
        split=data.split,  # type: ignore[arg-type]
        min_steps=data.min_steps,
        max_steps=data.max_steps,
        per_request=count,
        start=start,
        wide=wide,
    )
    for problem in made:
        yield Problem(problem["question"], problem["answer"])


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What a worker must know to make a stage's batches; batch b has the requests [first + b * rows, ... + rows)."""

    stage: StageConfig
    data: DataConfig
    noise: NoiseConfig
    first: int = 0

    @property
    def num_rows(self) -> int:
        """Requests a batch."""
        return self.stage.batch_size

    def index(self, batch: int) -> int:
        """First request of a batch."""
        return self.first + batch * self.num_rows


class BatchMaker:
    """Makes the batches of a plan. Batch b depends on the plan and b only, not on who makes it."""

    def __init__(self, encoder: Encoder, plan: StagePlan) -> None:
        self.encoder, self.plan = encoder, plan

    def make(self, batch: int) -> list[Group]:
        """The groups of one step: the short rows, if any, then the others."""
        start, stage = self.plan.index(batch), self.plan.stage
        rng = np.random.default_rng([self.plan.data.seed, start])
        num_short = stage.num_short
        groups = []
        if num_short and stage.short_length is not None:
            counts = [1] * num_short
            groups.append(self._group(range(start, start + num_short), counts, stage.short_length, rng))
        num_long = stage.batch_size - num_short
        if num_long:
            sizes = list(stage.requests)
            counts = rng.choice(sizes, num_long, p=[stage.requests[n] for n in sizes]).tolist()
            rest = range(start + num_short, start + stage.batch_size)
            groups.append(self._group(rest, counts, stage.length, rng))
        return groups

    def _group(self, indices: Sequence[int], counts: Sequence[int], length: int, rng: Any) -> Group:
        num_rows, eos = len(indices), self.encoder.eos_id
        token = np.full((num_rows, length), eos, dtype=np.int32)
        prompt, end = np.empty(num_rows, np.int32), np.empty(num_rows, np.int32)
        for row, (index, count) in enumerate(zip(indices, counts)):
            question, answer = self._fitting(index, count, length)
            prompt[row], end[row] = len(question), len(question) + len(answer)
            token[row, : end[row]] = [*question, *answer]
        small = token.astype(np.int16) if token.max() < 2**15 else token
        return Group(small, prompt, end, self._visible_ends(end, length, rng))

    def _visible_ends(self, end: Array, length: int, rng: Any) -> Array:
        """[B]: uniform in [end + 1, length], so that one end-of-text at least is inside; now and then the length."""
        see = rng.integers(end + 1, length + 1)
        full = rng.random(len(end)) < self.plan.noise.full_length_share
        return np.where(full, length, see).astype(np.int32)

    def _fitting(self, index: int, count: int, length: int) -> tuple[list[int], list[int]]:
        """Prompt and answer of request `index`; of one with fewer problems, then of later indices that nobody else
        takes, until an end-of-text fits behind them."""
        data = self.plan.data
        for attempt in range(MAX_TRIES):
            size = max(1, count - attempt)
            start = index + RETRY_STRIDE * max(0, attempt - count + 1)
            (problem,) = _problems(data, data.seed, size, start, 1, self.plan.stage.wide)
            question, answer = self.encoder.prompt(problem.question), self.encoder.answer(problem.answer)
            if len(question) + len(answer) < length:
                return question, answer
        raise ConfigError(f"no problem fits into length {length} (the last had {len(question) + len(answer)} ids)")


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer of a directory.

    Raises:
        ConfigError: there is none, or it has no chat template.
    """
    from unmask.models.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_pretrained(directory)
    if tokenizer is None or not tokenizer.has_chat_template:
        raise ConfigError(f"[tokenizer] path {directory} holds no tokenizer with a chat template")
    return tokenizer


def load_encoder(directory: Path, eos_id: int) -> Encoder:
    """The encoder of a tokenizer directory; what a worker calls."""
    return Encoder(load_tokenizer(directory), eos_id)


def digit_ids(directory: Path) -> list[int]:
    """Ids of the ten digits.

    Raises:
        ConfigError: digits are no tokens of their own.
    """
    tokenizer = load_tokenizer(directory)
    ids = [tokenizer.token_to_id(str(digit)) for digit in range(10)]
    if None in ids:
        raise ConfigError(f"{directory}: its digits are no tokens of their own, and masks of numbers need them")
    return ids


def special_ids(directory: Path) -> dict[str, Any]:
    """Fields of `ModelConfig` that the tokenizer decides: vocabulary size and special ids."""
    tokenizer = load_tokenizer(directory)
    named = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    id = {name: tokenizer.token_to_id(named[f"{name}_token"]) for name in ("mask", "eos")}
    for name, value in id.items():
        if value is None:
            raise ConfigError(f"{directory}: its {name}_token is not in the vocabulary")
    bos = tokenizer.token_to_id(named["bos_token"]) if named.get("bos_token") else None
    return {
        "vocab_size": tokenizer.vocab_size,
        "mask_token_id": id["mask"],
        "eos_token_ids": (id["eos"],),
        "pad_token_id": id["eos"],
        "bos_token_id": bos,
    }
