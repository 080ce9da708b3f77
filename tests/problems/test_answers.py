from __future__ import annotations

import pytest

from unmask.problems import extract_answer, extract_answers


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", []),
        ("He has 5 + 3 = 8 pens", []),
        ("#### 8", [8]),
        ("####8", [8]),
        ("#### 1,234", [1234]),
        ("#### -7", [-7]),
        ("#### - 7", [-7]),
        ("#### $18", [18]),
        ("####   12  \nand more 9", [12]),
        ("#### 12.", [12]),
        ("1. a\n#### 3\n2. b\n#### 10", [3, 10]),
        ("#### none", []),
    ],
)
def test_extract_answers(text: str, numbers: list[int]) -> None:
    assert extract_answers(text) == numbers
    assert extract_answer(text) == (numbers[-1] if numbers else None)


def test_the_last_mark_decides() -> None:
    assert extract_answer("#### 3\n#### none") is None
