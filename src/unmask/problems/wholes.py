"""Whole problems that do not chain: comparisons, totals, groups with leftovers, two people, three shops.

A text reads "story | question", so that a distractor can go between the two. {M} and {K} are other people.
"""

from __future__ import annotations

from unmask.problems.parts import PERCENTS, Setting, divisor, given, less, more, part, percent, ranges, times, where
from unmask.problems.words import CROWDS, FOODS, GOODS, TASKS, THINGS


def _sale(price: int, discount: int, _: int) -> bool:
    """Whether the discount is a usual one and comes to whole dollars, two or more."""
    return discount in PERCENTS and price * discount % 100 == 0 and price * discount >= 200


BOTH = "They have {eq} {items}"

PAIRS = (
    part(
        "pair_difference",
        "{N} has {a} {items} and {M} has {b} {items}. | How many more {items} does {N} have than {M}?",
        given(less, 10, 150),
        "a - b: {N} has {eq} more {items}",
    ),
    part(
        "pair_times",
        "{M} has {a} {items}. {N} has {b} times as many as {M}. | How many {items} do they have together?",
        where(ranges((3, 40), (3, 9)), lambda a, b: a * b <= 200),
        "a * b: {N} has {eq} {items}",
        "a + s1: " + BOTH,
    ),
    part(
        "pair_twice",
        "{N} has twice as many {items} as {M}. {M} has {a} {items}. | How many {items} do they have in all?",
        ranges((4, 90)),
        "a * 2: {N} has {eq} {items}",
        "a + s1: " + BOTH,
    ),
    part(
        "pair_more",
        "{M} has {a} {items}. {N} has {b} more {items} than {M}. | How many {items} do they have together?",
        given(more),
        "a + b: {N} has {eq} {items}",
        "a + s1: " + BOTH,
    ),
    part(
        "pair_fewer",
        "{N} has {b} fewer {items} than {M}, who has {a}. | How many {items} do {N} and {M} have together?",
        given(less, 10, 120),
        "a - b: {N} has {eq} {items}",
        "a + s1: " + BOTH,
    ),
    part(
        "three_people",
        "{M} has {a} {items}. {N} has twice as many as {M}. {K} has {c} more than {N}. "
        "| How many {items} do the three of them have?",
        ranges((4, 50), (0, 0), (3, 40)),
        "a * 2: {N} has {eq} {items}",
        "s1 + c: {K} has {eq} {items}",
        "a + s1: {M} and {N} have {eq} {items}",
        "s3 + s2: " + BOTH,
    ),
    part(
        "three_fewer",
        "{M} has {a} {items}. {N} has {b} fewer than {M}, and {K} has {c} more than {M}. "
        "| How many {items} do {N} and {K} have together?",
        where(ranges((10, 90), (2, 60), (2, 60)), lambda a, b, _: b <= a - 2),
        "a - b: {N} has {eq} {items}",
        "a + c: {K} has {eq} {items}",
        "s1 + s2: " + BOTH,
    ),
    part(
        "pool_and_share",
        "{N} has {a} {items} and {M} has {b}. They put them together and share them equally in {c} {boxes}. "
        "| How many {items} are in each {box}?",
        where(ranges((5, 80), (5, 80), (2, 12)), lambda a, b, c: (a + b) % c == 0 and a + b >= 2 * c),
        "a + b: " + BOTH,
        "s1 / c: Each {box} has {eq} {items}",
    ),
    part(
        "leftover",
        "{N} has {a} {items}. {S} fills {b} {boxes} with {c} {items} each. | How many {items} are left over?",
        where(ranges((15, 120), (2, 9), (3, 12)), lambda a, b, c: b * c + 2 <= a <= b * c + 40),
        "b * c: The {boxes} hold {eq} {items}",
        "a - s1: There are {eq} {items} left",
    ),
    part(
        "two_givers",
        "{N} gets {a} {items} from {M} and {b} from {K}. {N} gives {c} of them away. "
        "| How many {items} does {he} keep?",
        where(ranges((5, 80), (5, 80), (2, 90)), lambda a, b, c: c <= a + b - 2),
        "a + b: {N} has {eq} {items}",
        "s1 - c: {N} keeps {eq} {items}",
    ),
    part(
        "colors_percent",
        "{N} has {a} {items}. Of these, {b}% are {c1} and the rest are {c2}. | How many {items} are {c2}?",
        given(percent, 8, 120),
        "b % a: There are {eq} {c1} {items}",
        "a - s1: There are {eq} {c2} {items}",
    ),
    part(
        "colors_three",
        "{N} has {a} {c1} {items}, {b} times as many {c2} ones and {c} fewer {c3} ones than {c2} ones. "
        "| How many {items} does {N} have in all?",
        where(ranges((4, 25), (3, 6), (2, 50)), lambda a, b, c: c <= a * b - 2),
        "a * b: There are {eq} {c2} {items}",
        "s1 - c: There are {eq} {c3} {items}",
        "a + s1: The first two colors make {eq} {items}",
        "s3 + s2: {He} has {eq} {items}",
    ),
)

TABLES = (
    part(
        "shared_then_each",
        "{N} makes {a} {items} and shares them equally among {b} people. Each person eats {c} of them. "
        "| How many {items} does each person have left?",
        where(
            ranges((10, 120), (2, 12), (2, 20)),
            lambda a, b, c: a % b == 0 and c <= a // b - 2,
        ),
        "a / b: Each person gets {eq} {items}",
        "s1 - c: Each person has {eq} {items}",
    ),
    part(
        "sold_two_prices",
        "{N} sells {a} big {items} at ${b} each and {c} small {items} at ${d} each. | How many dollars does {N} make?",
        ranges((2, 12), (3, 15), (2, 12), (2, 9)),
        "a * b: The big ones make {eq} dollars",
        "c * d: The small ones make {eq} dollars",
        "s1 + s2: {He} makes {eq} dollars",
    ),
    part(
        "sold_rest",
        "{N} makes {a} {items}, keeps {b} and sells the rest for ${c} each. | How many dollars does {N} get?",
        where(ranges((8, 70), (2, 50), (2, 9)), lambda a, b, c: b <= a - 2 and (a - b) * c <= 300),
        "a - b: {He} sells {eq} {items}",
        "s1 * c: {He} gets {eq} dollars",
    ),
    part(
        "eaten_daily",
        "{N} has {a} {items}. {S} eats {b} and {M} eats {c} of them every day. | How many are left after {d} days?",
        where(
            ranges((30, 150), (2, 6), (2, 6), (2, 9)),
            lambda a, b, c, d: (b + c) * d <= a - 2,
        ),
        "b + c: They eat {eq} {items} a day",
        "s1 * d: In all they eat {eq} {items}",
        "a - s2: There are {eq} {items} left",
    ),
)

BILLS = (
    part(
        "bill_change",
        "{N} buys {a} {items} at ${b} each and {c} {others} at ${d} each. {S} pays with $200. "
        "| How much change does {he} get?",
        where(ranges((2, 8), (2, 12), (2, 8), (2, 12)), lambda a, b, c, d: a * b + c * d <= 198),
        "a * b: The {items} cost {eq} dollars",
        "c * d: The {others} cost {eq} dollars",
        "s1 + s2: The cost is {eq} dollars",
        "200 - s3: {He} gets {eq} dollars back",
    ),
    part(
        "bill_friend",
        "A {item} that costs ${a} is {b}% off. {N} buys it. {M} buys a {other} for ${c}. "
        "| How many dollars do they pay together?",
        where(
            ranges((10, 120), (10, 80), (3, 60)),
            _sale,
        ),
        "b % a: The discount is {eq} dollars",
        "a - s1: {N} pays {eq} dollars",
        "s2 + c: They pay {eq} dollars",
    ),
    part(
        "cheaper_shop",
        "One shop sells {items} at ${a} each and another sells them at ${b} each. {N} needs {c} {items}. "
        "| How many dollars does {he} save in the cheaper shop?",
        where(ranges((5, 40), (3, 38), (2, 12)), lambda a, b, c: a - b >= 2 and (a - b) * c <= 200),
        "a - b: Each {item} is {eq} dollars cheaper",
        "s1 * c: {He} saves {eq} dollars",
    ),
    part(
        "saves_for",
        "{N} wants a {item} that costs ${a}. {S} has ${b} and saves ${c} every week. "
        "| How many weeks will it take {him}?",
        where(
            ranges((20, 150), (3, 90), (3, 12)),
            lambda a, b, c: a > b and (a - b) % c == 0 and 2 <= (a - b) // c <= 12,
        ),
        "a - b: {He} needs {eq} dollars",
        "s1 / c: It takes {eq} weeks",
    ),
)

CONTESTS = (
    part(
        "contest_rates",
        "{N} does {a} {items} a day for {b} days. {M} does {c} {items} a day for {d} days. "
        "| How many {items} do they do in all?",
        ranges((3, 20), (2, 9), (3, 20), (2, 9)),
        "b * a: {N} does {eq} {items}",
        "d * c: {M} does {eq} {items}",
        "s1 + s2: They do {eq} {items}",
    ),
    part(
        "contest_more",
        "{N} does {a} {items} a day and {M} does {b} {items} a day. "
        "| How many more {items} does {N} do than {M} in {c} days?",
        where(ranges((5, 40), (3, 38), (2, 12)), lambda a, b, c: a - b >= 2 and (a - b) * c <= 200),
        "a - b: {N} does {eq} more {items} a day",
        "s1 * c: {N} does {eq} more {items}",
    ),
    part(
        "rest_days",
        "{N} must do {a} {items}. {S} does {b} {items} on the first day and the rest in {c} equal days. "
        "| How many {items} does {he} do on each of those days?",
        where(
            ranges((20, 150), (3, 60), (2, 12)),
            lambda a, b, c: a - b >= 2 * c and (a - b) % c == 0,
        ),
        "a - b: There are {eq} {items} left",
        "s1 / c: {He} does {eq} {items} a day",
    ),
)

PENS = (
    part(
        "pens_percent",
        "{N} looks after {a} {items}. Of these, {b}% are old and the rest are young. "
        "| How many young {items} are there?",
        given(percent, 8, 120),
        "b % a: There are {eq} old {items}",
        "a - s1: There are {eq} young {items}",
    ),
    part(
        "two_kinds",
        "{N} counts {a} {items} and {b} times as many {others}. "
        "| How many {items} and {others} does {he} count together?",
        where(ranges((4, 40), (3, 8)), lambda a, b: a * b <= 200),
        "a * b: There are {eq} {others}",
        "a + s1: Together there are {eq}",
    ),
    part(
        "vans",
        "{N} takes {a} {items} and {b} {others} to the {place}. Each van has space for {c} of them. "
        "| How many vans are needed?",
        where(ranges((4, 60), (4, 60), (3, 12)), lambda a, b, c: (a + b) % c == 0 and a + b >= 2 * c),
        "a + b: Together there are {eq}",
        "s1 / c: They need {eq} vans",
    ),
    part(
        "feed_days",
        "{N} feeds {a} {items}. Each of them gets {b} cups a day. | How many cups does {N} need for {c} days?",
        where(ranges((3, 20), (2, 6), (2, 7)), lambda a, b, c: a * b * c <= 300),
        "a * b: That is {eq} cups a day",
        "s1 * c: {He} needs {eq} cups",
    ),
)

SINGLES = (
    part(
        "each_line",
        "{N} has {a} {items}. {S} puts them in {b} equal rows. | How many {items} are in each row?",
        given(divisor, 8, 120),
        "a / b: Each row has {eq} {items}",
    ),
    part(
        "each_cost",
        "One {item} costs ${a}. | How many dollars does {N} pay for {b} {items}?",
        given(times, 2, 40),
        "a * b: The {items} cost {eq} dollars",
    ),
)

WHOLES = (
    Setting("pairs", THINGS + FOODS, PAIRS),
    Setting("tables", FOODS, TABLES),
    Setting("bills", GOODS, BILLS),
    Setting("contests", TASKS, CONTESTS),
    Setting("pens", CROWDS, PENS),
    Setting("singles", THINGS + FOODS + GOODS, SINGLES),
)
