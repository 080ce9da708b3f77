"""Put parts together into problems.

Every draw goes through `random.Random.random`, the one stream Python promises to keep between versions, so a
problem is the same bytes on every interpreter. A problem's main template (its opener or whole), main name and
main item decide its split: one combination in ten is reserved for tests.
"""

from __future__ import annotations

import hashlib
import random
import zlib
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Literal, NamedTuple, TypeVar

from unmask.problems.everyday import WIDE_SETTINGS, WIDE_WHOLES
from unmask.problems.parts import Formula, Numbers, Part, Setting, between, pick
from unmask.problems.plan import Operand, Ref, Step, apply
from unmask.problems.stories import SETTINGS
from unmask.problems.wholes import WHOLES
from unmask.problems.words import BOXES, COLORS, PEOPLE, PLACES, RELATIVES, THINGS, Item, Person

T = TypeVar("T")
Split = Literal["train", "test"]

STEP_WEIGHTS = (15, 30, 28, 17, 10)
"""How often a problem has 1, 2, 3, 4 and 5 steps, in per cent."""
RESERVED = 10
"""Combinations reserved for the test split, in per cent."""
WHOLE = 0.3
"""Share of problems told as a whole rather than chained, where wholes of that many steps exist."""
CLOSED_BY_STEP = 0.6
"""Share of chained problems whose closing question takes a step of its own."""
DISTRACTED = 0.27
"""Share of stories that get a sentence with a number that does not matter."""
MAX_LENGTH = 122
"""Longest question and answer, by `_length`: longer problems are drawn again."""
STEPS_IN_REQUEST = 3
"""Most steps of a problem that shares its request with two or more others, so that four fit 512 tokens."""

_NO_DIGITS = {ord(digit): None for digit in "0123456789"}

CONNECTIVES = ("Then", "Later,", "After that,", "Next,", "The next day,")
DISTRACTORS = (
    ("{N} is {z} years old.", 7, 60),
    ("{N} lives {z} miles from the {place}.", 2, 40),
    ("{N} also owns {z} {junk}.", 3, 60),
    ("It is {z} degrees outside.", 40, 90),
    ("There are {z} people at the {place}.", 10, 90),
    ("The {place} is open {z} hours a day.", 4, 12),
    ("{N} carries a bag that weighs {z} pounds.", 4, 30),
    ("A {toy} costs ${z} in the shop.", 2, 40),
)


@dataclass(frozen=True)
class Problem:
    """A word problem with its worked answer, the plan behind it and the combination that fixes its split."""

    question: str
    answer: str
    value: int
    num_steps: int
    kinds: tuple[str, ...]
    plan: tuple[Step, ...]
    templates: tuple[str, ...]
    combo: tuple[str, str, str]
    distracted: bool


@dataclass
class _Draft:
    """A problem being told: sentences and answer lines so far, and the running value with its origin."""

    rng: random.Random
    words: dict[str, str]
    story: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    plan: list[Step] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    value: int = 0
    origin: Operand = 0
    named: bool = False

    def add(self, part: Part) -> bool:
        """Tell one part; False, with nothing changed, when no numbers fit the running value."""
        numbers = _draw(part, self.rng, self.value)
        if numbers is None:
            return False
        self._tell(pick(self.rng, part.texts), numbers)
        self._work(part.steps, numbers)
        return True

    def _tell(self, text: str, numbers: Numbers) -> None:
        pronoun = "{N}" in text.partition("{S}")[0] or (self.named and self.rng.random() < 0.75)
        self.words["S"] = self.words["He"] if pronoun else self.words["N"]
        # A pronoun after somebody else, or before any name, would be unclear: the next part says the name.
        others = any(slot in text for slot in ("{K}", "{G}", "{M}", "{kin}"))
        self.named = not others and (self.named or "{N}" in text or "{S}" in text)
        if self.story and text.startswith("{S}") and "?" not in text and self.rng.random() < 0.35:
            subject = self.words["he"] if pronoun else self.words["N"]
            text = f"{pick(self.rng, CONNECTIVES)} {subject}{text[3:]}"
        self.story += text.format(**self.words, **dict(zip("abcd", numbers))).split(" | ")

    def _work(self, steps: Sequence[Formula], numbers: Numbers) -> None:
        base = len(self.plan)
        start = self.value, self.origin
        if not steps and numbers:
            self.value = self.origin = numbers[0]
        for formula in steps:
            left, a = self._operand(formula.left, numbers, base, start)
            right, b = self._operand(formula.right, numbers, base, start)
            step = Step(formula.op, left, right)
            self.value, self.origin = apply(step.op, a, b), Ref(len(self.plan))
            self.plan.append(step)
            self.results.append(self.value)
            self.lines.append(formula.line.format(**self.words, eq=_equation(step.op, a, b, self.value)))

    def _operand(self, symbol: str, numbers: Numbers, base: int, start: tuple[int, Operand]) -> tuple[Operand, int]:
        """What a formula's symbol stands for: where it comes from, and its value."""
        if symbol == "v":
            return start[1], start[0]
        if symbol[0] == "s":
            index = base + int(symbol[1:]) - 1
            return Ref(index), self.results[index]
        number = numbers["abcd".index(symbol)] if symbol in "abcd" else int(symbol)
        return number, number


def _equation(op: str, a: int, b: int, result: int) -> str:
    return f"{a}% of {b} = {result}" if op == "%" else f"{a} {op} {b} = {result}"


def _draw(part: Part, rng: random.Random, value: int, tries: int = 12) -> Numbers | None:
    for _ in range(tries):
        numbers = part.draw(rng, value)
        if numbers is not None:
            return numbers
    return None


def is_reserved(template: str, name: str, item: str) -> bool:
    """Whether a combination belongs to the test split; a stable hash decides."""
    return zlib.crc32(f"{template}|{name}|{item}".encode()) % 100 < RESERVED


class _Stock(NamedTuple):
    """What a problem may begin with: wholes by their steps, and openers of at most so many steps."""

    wholes: dict[int, list[tuple[Setting, Part]]]
    openers_up_to: dict[int, list[tuple[Setting, Part]]]


def _stock(settings: Sequence[Setting], wholes: Sequence[Setting]) -> _Stock:
    openers = _by_steps(settings)
    return _Stock(_by_steps(wholes), {n: [pair for k in range(n + 1) for pair in openers[k]] for n in range(1, 6)})


def _by_steps(settings: Sequence[Setting]) -> dict[int, list[tuple[Setting, Part]]]:
    table: dict[int, list[tuple[Setting, Part]]] = {n: [] for n in range(6)}
    for setting in settings:
        for opener in setting.openers:
            table[len(opener.steps)].append((setting, opener))
    return table


_FIRST, _WIDE = _stock(SETTINGS, WHOLES), _stock(WIDE_SETTINGS, WIDE_WHOLES)


def _cast(rng: random.Random, setting: Setting, template: str, split: Split) -> tuple[Person, Item]:
    """The main person and item, drawn until the combination belongs to the split."""
    while True:
        who, item = pick(rng, PEOPLE), pick(rng, setting.items)
        if is_reserved(template, who.name, item.one) == (split == "test"):
            return who, item


def _words(rng: random.Random, setting: Setting, who: Person, item: Item) -> dict[str, str]:
    """What every slot but the numbers reads in this problem."""
    m, k, g = _others(rng, PEOPLE, who, count=3)
    (other,) = _others(rng, setting.items, item, count=1)
    c1, c2, c3 = _others(rng, COLORS, count=3)
    junk, toy = _others(rng, THINGS, item, other, count=2)
    box, tub = _others(rng, BOXES, count=2)
    return {
        "N": who.name, "he": who.he, "his": who.his, "him": who.him,
        "He": who.he.capitalize(), "His": who.his.capitalize(),
        "M": m.name, "K": k.name, "G": g.name,
        "item": item.one, "items": item.many, "other": other.one, "others": other.many,
        "junk": junk.many, "toy": toy.one, "box": box.one, "boxes": box.many,
        "tub": tub.one,
        "tubs": tub.many,
        "c1": c1, "c2": c2, "c3": c3, "place": pick(rng, PLACES), "kin": pick(rng, RELATIVES),
    }  # fmt: skip


def _others(rng: random.Random, options: Sequence[T], *taken: T, count: int) -> list[T]:
    """Distinct options, none of them already taken."""
    chosen: list[T] = []
    while len(chosen) < count:
        option = pick(rng, options)
        if option not in taken and option not in chosen:
            chosen.append(option)
    return chosen


def _add_any(draft: _Draft, parts: Sequence[Part], used: list[str], tries: int = 8) -> Part | None:
    """Tell one of the parts not used yet; None when no numbers would fit."""
    fresh = [part for part in parts if part.name not in used]
    for _ in range(tries if fresh else 0):
        part = pick(draft.rng, fresh)
        if draft.add(part):
            used.append(part.name)
            return part
    return None


def _fitting(rng: random.Random, moves: Sequence[Part], left: int) -> list[Part]:
    """Moves of at most so many steps; in a long story mostly those of two, which tell more in fewer words."""
    low = 2 if left >= 3 and rng.random() < 0.75 else 1
    return [move for move in moves if low <= len(move.steps) <= left]


def _continue(draft: _Draft, setting: Setting, used: list[str], left: int) -> bool:
    """Moves and a closer that take exactly `left` steps; False when the numbers do not allow it."""
    closing = 1 if left and draft.rng.random() < CLOSED_BY_STEP else 0
    while left > closing:
        part = _add_any(draft, _fitting(draft.rng, setting.moves, left - closing), used)
        if part is None:
            return False
        left -= len(part.steps)
    return _add_any(draft, [c for c in setting.closers if len(c.steps) == closing], used) is not None


def _distract(draft: _Draft) -> None:
    """Slip in a sentence that changes nothing, anywhere between the first sentence and the question."""
    text, low, high = pick(draft.rng, DISTRACTORS)
    sentence = text.format(**draft.words, z=between(draft.rng, low, high))
    draft.story.insert(between(draft.rng, 1, len(draft.story) - 1), sentence)


def _attempt(rng: random.Random, split: Split, num_steps: int, stock: _Stock) -> Problem | None:
    """One try at a problem of so many steps; None when numbers or length do not work out."""
    whole = bool(stock.wholes[num_steps]) and rng.random() < WHOLE
    setting, opener = pick(rng, stock.wholes[num_steps] if whole else stock.openers_up_to[num_steps])
    who, item = _cast(rng, setting, opener.name, split)
    draft = _Draft(rng, _words(rng, setting, who, item))
    used = [opener.name]
    if not draft.add(opener):
        return None
    if not whole and not _continue(draft, setting, used, num_steps - len(opener.steps)):
        return None
    distracted = rng.random() < DISTRACTED
    if distracted:
        _distract(draft)
    return _finish(draft, tuple(used), (opener.name, who.name, item.one), distracted)


def _finish(draft: _Draft, templates: tuple[str, ...], combo: tuple[str, str, str], distracted: bool) -> Problem | None:
    question = " ".join(draft.story)
    answer = "\n".join((*draft.lines, f"#### {draft.value}"))
    if _length(question + answer) > MAX_LENGTH:
        return None
    kinds = tuple(step.kind for step in draft.plan)
    plan = tuple(draft.plan)
    return Problem(question, answer, draft.value, len(plan), kinds, plan, templates, combo, distracted)


def _length(text: str) -> float:
    """About how many tokens `unmask-mini` spends on a text; fitted to its tokenizer, which is made later."""
    letters = text.translate(_NO_DIGITS)
    return 0.24 * len(text) + 0.77 * (len(text) - len(letters)) + 0.2 * letters.count(" ")


def _check(split: str, min_steps: int, max_steps: int) -> None:
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r} is unknown; use 'train' or 'test'")
    if not 1 <= min_steps <= max_steps <= len(STEP_WEIGHTS):
        limit = len(STEP_WEIGHTS)
        raise ValueError(f"steps {min_steps}..{max_steps} are not a range within 1..{limit}")


def make_problem(
    rng: random.Random, *, split: Split = "train", min_steps: int = 1, max_steps: int = 5, wide: bool = True
) -> Problem:
    """One problem, drawn from `rng`; equal states of `rng` give equal problems."""
    _check(split, min_steps, max_steps)
    bounds = list(accumulate(STEP_WEIGHTS[min_steps - 1 : max_steps]))
    num_steps = min_steps + bisect(bounds, rng.random() * bounds[-1])
    while True:
        problem = _attempt(rng, split, num_steps, _WIDE if wide else _FIRST)
        if problem is not None:
            return problem


def _seeded(seed: int, split: Split, index: int) -> random.Random:
    """The stream of problem `index`: it depends on nothing else, so workers can take any share."""
    digest = hashlib.blake2b(f"unmask problems/{seed}/{split}/{index}".encode(), digest_size=16).digest()
    return random.Random(int.from_bytes(digest, "big"))


def iter_problems(
    seed: int,
    n: int,
    *,
    split: Split = "train",
    min_steps: int = 1,
    max_steps: int = 5,
    start: int = 0,
    wide: bool = True,
) -> Iterator[Problem]:
    """Problems `start` to `start + n` of a seed, with their plans; problem i is the same whatever n is.

    Without `wide` they are told in the first stock of phrases only, from which the tokenizer was made.
    """
    for index in range(start, start + n):
        rng = _seeded(seed, split, index)
        yield make_problem(rng, split=split, min_steps=min_steps, max_steps=max_steps, wide=wide)


def make_problems(
    seed: int,
    n: int,
    *,
    split: Split = "train",
    min_steps: int = 1,
    max_steps: int = 5,
    per_request: int = 1,
    start: int = 0,
    wide: bool = True,
) -> Iterator[dict[str, str]]:
    """Yield `n` requests, each {"question", "answer"}, lazily; request i is the same whatever `n` is.

    `per_request` above one numbers that many problems in one question and answers them in order, each with
    its own "#### N" line; with three or more, no problem has over `STEPS_IN_REQUEST` steps.
    `start` skips requests at no cost, so that workers can share the work. `wide`: see `iter_problems`.
    """
    if per_request < 1:
        raise ValueError(f"per_request is {per_request}; ask for at least one problem a request")
    if per_request >= 3:
        max_steps = min(max_steps, STEPS_IN_REQUEST)
    _check(split, min_steps, max_steps)
    draw = partial(iter_problems, seed, per_request, split=split, min_steps=min_steps, max_steps=max_steps, wide=wide)
    return (_joined(list(draw(start=request * per_request))) for request in range(start, start + n))


def _joined(problems: Sequence[Problem]) -> dict[str, str]:
    """One request of one or more problems."""
    if len(problems) == 1:
        return {"question": problems[0].question, "answer": problems[0].answer}
    return {
        "question": "\n".join(f"{i}. {p.question}" for i, p in enumerate(problems, 1)),
        "answer": "\n".join(f"{i}. {p.answer}" for i, p in enumerate(problems, 1)),
    }
