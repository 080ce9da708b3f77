"""What every problem promises: right answers, sane English, a stable stream and a held-out split."""

from __future__ import annotations

import hashlib
import os
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from unmask.problems import Problem, extract_answers, iter_problems, make_problem, make_problems
from unmask.problems.compose import STEP_WEIGHTS, STEPS_IN_REQUEST, is_reserved
from unmask.problems.everyday import WIDE_SETTINGS, WIDE_WHOLES
from unmask.problems.plan import execute
from unmask.problems.verify import equations, verify, wrong_equations
from unmask.problems.words import CROWDS, FOODS, GOODS, PEOPLE, TASKS, THINGS

GOLDEN = {
    False: "f7e2061605e0b57c2a15b737e20c5f0868b39694c989436aa44ab76349a43b8c",
    True: "24c7f48742e9803e3bc6d384222227bc874e85c7fd093065047d56cb7232b04a",
}
"""Of the first stock of phrases, and of all of them."""

MAIN = {p.name for s in (*WIDE_SETTINGS, *WIDE_WHOLES) for p in s.openers}
ALL = MAIN | {p.name for s in WIDE_SETTINGS for p in (*s.moves, *s.closers)}


@pytest.fixture(scope="module")
def train() -> list[Problem]:
    return list(iter_problems(11, 12_000))


@pytest.fixture(scope="module")
def test() -> list[Problem]:
    return list(iter_problems(12, 12_000, split="test"))


def digest(n: int, wide: bool) -> str:
    text = "\0".join(f"{p['question']}\0{p['answer']}" for p in make_problems(0, n, wide=wide))
    return hashlib.sha256(text.encode()).hexdigest()


def test_every_problem_is_sound(train: list[Problem], test: list[Problem]) -> None:
    for problem in (*train, *test):
        verify(problem)


def test_values_stay_small(train: list[Problem]) -> None:
    results = [r for p in train for r in execute(p.plan)]
    assert 0 <= min(results) <= max(results) <= 999
    assert sum(r < 200 for r in results) > 0.85 * len(results)


@pytest.mark.parametrize(
    ("answer", "question"),
    [("He has 2 + 3 = 6 pens\n#### 6", None), ("He has 2 + 3 = 5 pens\n#### 6", None), (None, "Tom has some pens?")],
)
def test_verify_rejects(answer: str | None, question: str | None) -> None:
    good = next(iter_problems(1, 1, max_steps=1))
    with pytest.raises(ValueError, match="problem"):
        verify(replace(good, answer=answer or good.answer, question=question or good.question))


def test_wrong_equations_are_found() -> None:
    assert wrong_equations("a 2 + 3 = 5\nb 20% of 50 = 11") == [(20, "%", 50, 11)]
    assert equations("He has 8 / 2 = 4 pens") == [(8, "/", 2, 4)]


@pytest.mark.parametrize("wide", [False, True])
def test_first_problems_never_change(wide: bool) -> None:
    assert digest(200, wide) == GOLDEN[wide]


def test_plain_everyday_questions_are_among_them() -> None:
    plain = [
        r"\w+ has \d+ \w+\. \w+ buys \d+ \w+ with \d+ \w+ each\. How many \w+ does \w+ have now\?",
        r"\w+ (had|bought|found) \d+ \w+\. \w+ (gave|lost|sold) .*\. How many \w+ does \w+ have left\?",
        r"\w+ has \$\d+\. \w+ buys \d+ \w+ for \$\d+ each\. How much money does \w+ have left\?",
    ]
    more = list(iter_problems(14, 20_000, max_steps=2))
    for pattern in plain:
        assert any(re.fullmatch(pattern, p.question) for p in more), pattern


def test_another_process_makes_the_same() -> None:
    code = "from unmask.problems import make_problems as m; print(list(m(3, 40)) + list(m(3, 4, per_request=4)))"
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert out.stdout.strip() == str(list(make_problems(3, 40)) + list(make_problems(3, 4, per_request=4)))


@pytest.mark.parametrize("per_request", [1, 3])
def test_a_problem_does_not_depend_on_how_many_are_asked_for(per_request: int) -> None:
    many = list(make_problems(5, 30, per_request=per_request))
    assert list(make_problems(5, 7, per_request=per_request)) == many[:7]
    assert list(make_problems(5, 10, per_request=per_request, start=20)) == many[20:]


def test_make_problems_is_lazy() -> None:
    assert next(make_problems(5, 10**12))["question"]


def test_seeds_and_splits_differ() -> None:
    streams = [list(make_problems(s, 20, split=split)) for s in (1, 2) for split in ("train", "test")]
    assert len({str(stream) for stream in streams}) == 4


def test_splits_are_disjoint_and_cover_everything(train: list[Problem], test: list[Problem]) -> None:
    assert not {p.combo for p in train} & {p.combo for p in test}
    assert not {p.question for p in train} & {p.question for p in test}
    assert not any(is_reserved(*p.combo) for p in train)
    assert all(is_reserved(*p.combo) for p in test)
    for problems in (train, test):
        assert {p.combo[0] for p in problems} == MAIN
        assert {t for p in problems for t in p.templates} == ALL
        assert {p.num_steps for p in problems} == {1, 2, 3, 4, 5}


def test_one_combination_in_ten_is_reserved() -> None:
    combos = [(t, p.name, i.one) for t in sorted(MAIN) for p in PEOPLE for i in THINGS]
    share = sum(is_reserved(*combo) for combo in combos) / len(combos)
    assert share == pytest.approx(0.10, abs=0.01)


def test_the_main_name_and_item_are_in_the_question(train: list[Problem]) -> None:
    forms = {i.one: i for listing in (THINGS, FOODS, GOODS, TASKS, CROWDS) for i in listing}
    for p in train:
        _, name, item = p.combo
        assert name in p.question
        assert item in p.question or forms[item].many in p.question


def test_there_is_enough_variety() -> None:
    assert len(ALL) >= 60
    assert len({p.name for p in PEOPLE}) == len(PEOPLE) >= 80
    assert len({i.one for listing in (THINGS, FOODS, GOODS, TASKS, CROWDS) for i in listing}) >= 80
    names = [p.name for s in (*WIDE_SETTINGS, *WIDE_WHOLES) for p in (*s.openers, *s.moves, *s.closers)]
    assert len(names) == len(set(names))


def test_english_is_sane(train: list[Problem]) -> None:
    plurals = {i.many for listing in (THINGS, FOODS, GOODS, TASKS, CROWDS) for i in listing if i.one != i.many}
    for p in train:
        for text in (p.question, *p.answer.split("\n")):
            assert text == text.strip()
            assert not re.search(r" {2}|[{}|]| [.,?]", text)
            assert not any(words in plurals for words in re.findall(r"(?<![\d-])\b1 (\w+)", text))
            assert text[0].isupper() or text.startswith("####")
        assert p.question.endswith("?")
        assert all(sentence[0].isupper() for sentence in re.split(r"(?<=[.?]) ", p.question))
        assert not re.search(r"\ba [aeiou]", p.question.replace("a us", ""))


def test_pronouns_go_with_the_name() -> None:
    women = {p.name for p in PEOPLE if p.he == "she"}
    for p in iter_problems(21, 4_000):
        wrong = r"\b([Hh]e|[Hh]is|him)\b" if p.combo[1] in women else r"\b([Ss]he|[Hh]er)\b"
        assert not re.search(wrong, f"{p.question}\n{p.answer}"), p.question


def test_shares(train: list[Problem]) -> None:
    assert 0.2 < sum(p.distracted for p in train) / len(train) < 0.3
    counts = Counter(p.num_steps for p in train)
    for steps, weight in enumerate(STEP_WEIGHTS, 1):
        assert counts[steps] / len(train) == pytest.approx(weight / 100, abs=0.02)
    kinds = Counter(kind for p in train for kind in p.kinds)
    assert set(kinds) == {"add", "subtract", "multiply", "divide", "percent"}
    assert min(kinds.values()) > 0.02 * sum(kinds.values())


def test_a_distractor_holds_a_number_that_is_not_needed() -> None:
    problem = next(p for p in iter_problems(1, 100) if p.distracted)
    used = {x for a, _, b, _ in equations(problem.answer) for x in (a, b)}
    stated = [int(digits) for digits in re.findall(r"\d+", problem.question)]
    assert len(stated) > len(set(stated) & used) or len(stated) > len(set(stated))


def test_the_same_question_always_has_the_same_answer(train: list[Problem], test: list[Problem]) -> None:
    answers: dict[str, str] = {}
    assert all(answers.setdefault(p.question, p.answer) == p.answer for p in (*train, *test))


def test_requests_number_their_problems() -> None:
    for request in make_problems(2, 50, per_request=4):
        assert [line[:3] for line in request["question"].split("\n")] == ["1. ", "2. ", "3. ", "4. "]
        assert len(extract_answers(request["answer"])) == 4
        assert not wrong_equations(request["answer"])
        steps = [part.count("\n") for part in re.split(r"(?m)^#### \d+\n?", request["answer"])]
        assert max(steps) <= STEPS_IN_REQUEST


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_steps_can_be_fixed(steps: int) -> None:
    rng = random.Random(4)
    assert {make_problem(rng, min_steps=steps, max_steps=steps).num_steps for _ in range(30)} == {steps}


@pytest.mark.parametrize(
    "options",
    [{"split": "dev"}, {"min_steps": 0}, {"max_steps": 6}, {"min_steps": 3, "max_steps": 2}, {"per_request": 0}],
)
def test_bad_options_are_refused_at_once(options: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        make_problems(1, 1, **options)
