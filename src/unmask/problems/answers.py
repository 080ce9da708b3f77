"""Read final numbers out of worked answers."""

from __future__ import annotations

import re

_FINAL = re.compile(r"####\s*\$?\s*(-?)\s*\$?(\d[\d,]*)")


def extract_answers(text: str) -> list[int]:
    """Every number that follows a "####", in order; commas, signs, spaces and a dollar sign are understood."""
    return [int(sign + digits.replace(",", "")) for sign, digits in _FINAL.findall(text)]


def extract_answer(text: str) -> int | None:
    """The number after the last "####", or None when no number follows it."""
    _, mark, tail = text.rpartition("####")
    found = extract_answers(mark + tail)
    return found[0] if found else None
