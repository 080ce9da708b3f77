"""Stories as people tell them who have not read ours: plain sentences, past tense, other closing questions.

`stories` and `wholes` are what the tokenizer and the first stages of training were made from, so what came later is
kept apart: `WIDE_SETTINGS` and `WIDE_WHOLES` hold both. The slots are those of `stories`.
"""

from __future__ import annotations

from dataclasses import replace

from unmask.problems.parts import (
    Setting,
    count,
    divisor,
    given,
    groups,
    groups_out,
    half,
    less,
    more,
    none,
    part,
    product,
    ranges,
    times,
    where,
)
from unmask.problems.stories import HAS, SETTINGS
from unmask.problems.wholes import BOTH, WHOLES
from unmask.problems.words import CROWDS, FOODS, GOODS, TASKS, THINGS

BUYS_BOXES = (
    "{S} buys {a} {boxes} with {b} {items} each.",
    "{S} buys {a} {boxes} of {b} {items}.",
    "{S} buys {a} {boxes} of {b} {items} each.",
    "{S} buys {a} more {boxes} with {b} {items} in each {box}.",
    "{S} buys {a} {boxes}. Each {box} has {b} {items}.",
)
GETS_BOXES = (
    "{S} gets {a} {boxes} with {b} {items} each.",
    "{S} gets {a} {boxes} of {b} {items} from {his} {kin}.",
    "{His} {kin} gives {him} {a} {boxes} with {b} {items} in each.",
)
BOXES_ADD = ("a * b: The {boxes} hold {eq} {items}", "v + s1: " + HAS)

OWNED_MOVES = (
    part("buys_boxes", BUYS_BOXES, groups, *BOXES_ADD),
    part("gets_boxes", GETS_BOXES, groups, *BOXES_ADD),
    part(
        "gives_boxes",
        ("{S} gives {G} {a} {boxes} of {b} {items}.", "{S} sells {a} {boxes} with {b} {items} each."),
        groups_out,
        "a * b: The {boxes} hold {eq} {items}",
        "v - s1: " + HAS,
    ),
    part("gives_to", ("{S} gives {G} {a} {items}.", "{S} gives {a} of the {items} to {G}."), less, "v - a: " + HAS),
    part("given_by", ("{G} gives {him} {a} more {items}.", "{G} gives {him} {a} {items}."), more, "v + a: " + HAS),
    part("gets_more", ("{S} gets {a} more {items}.", "{S} gets {a} {items}."), more, "v + a: " + HAS),
    part("uses", ("{S} uses {a} {items}.", "{S} gives away {a} {items}."), less, "v - a: " + HAS),
)

OWNED_CLOSERS = (
    part(
        "how_many_he",
        (
            "How many {items} does {he} have now?",
            "How many {items} does {he} have?",
            "How many {items} does {he} have in all?",
            "How many {items} does {he} have in total?",
            "How many {items} does {N} have in total?",
            "How many {items} does {N} have?",
            "How many does {he} have now?",
        ),
        none,
    ),
)

FOOD_MOVES = (
    part("food_boxes_bought", BUYS_BOXES, groups, *BOXES_ADD),
    part("eats_some", ("{S} uses {a} of the {items}.", "{G} eats {a} {items}."), less, "v - a: " + HAS),
    part("food_gives", ("{S} gives {a} {items} to {G}.", "{S} gives {G} {a} of the {items}."), less, "v - a: " + HAS),
)

FOOD_CLOSERS = (
    part(
        "food_now",
        (
            "How many {items} does {he} have left?",
            "How many {items} does {N} have now?",
            "How many {items} are there now?",
            "How many {items} are left?",
        ),
        none,
    ),
)

PAST_OPENERS = (
    part("had", ("{N} had {a} {items}.", "{N} bought {a} {items}.", "{N} started with {a} {items}."), count),
    part("made", ("{N} found {a} {items}.", "{N} got {a} {items} from {his} {kin}."), count),
    part(
        "bought_boxes",
        (
            "{N} bought {a} {boxes} of {b} {items}.",
            "{N} bought {a} {boxes} with {b} {items} each.",
            "{N} had {a} {boxes} with {b} {items} in each {box}.",
        ),
        product(3, 25),
        "a * b: " + HAS,
    ),
    part(
        "had_colors",
        "{N} had {a} {c1} {items} and {b} {c2} {items}.",
        ranges((4, 60), (4, 60)),
        "a + b: " + HAS,
    ),
)

PAST_MOVES = (
    part("bought", ("{S} bought {a} more {items}.", "{S} got {a} more {items}."), more, "v + a: " + HAS),
    part("found", ("{S} found {a} more {items}.", "{G} gave {him} {a} more {items}."), more, "v + a: " + HAS),
    part("gave", ("{S} gave {a} {items} to {G}.", "{S} gave {G} {a} {items}."), less, "v - a: " + HAS),
    part("gave_some", ("{S} gave {a} {items} to {his} {kin}.", "{S} gave away {a} {items}."), less, "v - a: " + HAS),
    part(
        "lost",
        ("{S} lost {a} of the {items}.", "{S} lost {a} {items}.", "{S} sold {a} {items}."),
        less,
        "v - a: " + HAS,
    ),
    part("gave_half", ("{S} gave half of the {items} to {G}.", "{S} sold half of the {items}."), half, "v / 2: " + HAS),
    part(
        "bought_packs",
        ("{S} bought {a} more {boxes} of {b} {items}.", "{S} bought {a} {boxes} with {b} {items} each."),
        groups,
        *BOXES_ADD,
    ),
    part(
        "gave_each",
        ("{S} gave {b} {items} to each of {a} friends.", "{S} gave {b} {items} each to {a} friends."),
        groups_out,
        "a * b: {He} gives {eq} {items}",
        "v - s1: " + HAS,
    ),
)

PAST_CLOSERS = (
    part(
        "has_left",
        (
            "How many {items} does {he} have left?",
            "How many {items} does {N} have left?",
            "How many {items} does {he} have now?",
            "How many {items} does {N} have now?",
            "How many {items} are left?",
        ),
        none,
    ),
    part(
        "shared_past",
        "{S} shared the {items} equally with friends, {a} people in all. How many {items} did each person get?",
        divisor,
        "v / a: Each person gets {eq} {items}",
    ),
    part(
        "sold_past",
        "{S} sold all the {items} for ${a} each. How much money did {he} make?",
        times,
        "v * a: {He} makes {eq} dollars",
    ),
)

LEFT = "{He} has {eq} {items} left"
NOW = (
    "How many {items} does {he} have now?",
    "How many {items} does {N} have now?",
    "How many {items} does {he} have in total?",
    "How many {items} does {N} have in all?",
)

PEOPLE_WHOLES = (
    part(
        "has_and_boxes",
        tuple(
            f"{{N}} has {{a}} {{items}}. {{S}} {gets} | {question}"
            for gets in (
                "buys {b} {boxes} with {c} {items} each.",
                "buys {b} {boxes} of {c} {items}.",
                "buys {b} {boxes} with {c} {items} in each {box}.",
                "buys {b} more {boxes}. Each {box} has {c} {items}.",
                "gets {b} {boxes} of {c} {items} each.",
            )
            for question in NOW
        ),
        ranges((3, 90), (2, 9), (2, 15)),
        "b * c: The {boxes} hold {eq} {items}",
        "a + s1: " + HAS,
    ),
    part(
        "has_and_more",
        tuple(
            f"{{N}} has {{a}} {{items}}{gets} | {question}"
            for gets in (
                ". {S} buys {b} more.",
                " and buys {b} more.",
                ". {M} gives {him} {b} more.",
                ". {S} finds {b} more {items}.",
            )
            for question in NOW
        ),
        given(more, 3, 90),
        "a + b: " + HAS,
    ),
    part(
        "two_have",
        "{N} has {a} {items}. {M} has {b} {items}. | How many {items} do they have together?",
        ranges((5, 90), (5, 90)),
        "a + b: " + BOTH,
    ),
    part(
        "two_have_total",
        "{N} has {a} {items} and {M} has {b} {items}. | How many {items} do they have in total?",
        ranges((5, 90), (5, 90)),
        "a + b: " + BOTH,
    ),
    part(
        "takes_out",
        "There are {a} {items} in a {box}. {N} takes out {b} of them. | How many {items} are left in the {box}?",
        given(less, 8, 150),
        "a - b: There are {eq} {items} left",
    ),
    part(
        "puts_in",
        "There are {a} {items} in a {box}. {N} puts in {b} more. | How many {items} are in the {box} now?",
        given(more),
        "a + b: There are {eq} {items}",
    ),
    part(
        "gives_left",
        tuple(
            f"{{N}} has {{a}} {{items}}{gives} | {question}"
            for gives in (
                " and gives {b} to {M}.",
                ". {S} gives {b} of them to {M}.",
                ". {S} gives {b} to {his} {kin}.",
                ". {S} loses {b}.",
            )
            for question in ("How many {items} does {N} have left?", "How many {items} are left?", *NOW[:2])
        ),
        given(less, 8, 150),
        "a - b: " + LEFT,
    ),
    part(
        "boxes_total",
        "{N} has {a} {boxes}. There are {b} {items} in each {box}. | How many {items} are there in total?",
        product(3, 25),
        "a * b: There are {eq} {items}",
    ),
    part(
        "divides",
        "{N} divides {a} {items} equally among {b} children. | How many {items} does each child get?",
        given(divisor, 8, 144),
        "a / b: Each child gets {eq} {items}",
    ),
    part(
        "packs_all",
        "{N} has {a} {items}. {S} puts {b} {items} in each {box}. | How many {boxes} does {he} need?",
        given(divisor, 8, 144),
        "a / b: {He} needs {eq} {boxes}",
    ),
    part(
        "gave_how_many",
        "{N} had {a} {items}. {S} gave some to {M} and has {b} left. | How many {items} did {N} give to {M}?",
        given(less, 8, 150),
        "a - b: {He} gives {eq} {items}",
    ),
    part(
        "buys_and_gives",
        "{N} has {a} {items}. {S} buys {b} more and gives {c} to {M}. | How many {items} does {he} have now?",
        where(ranges((5, 90), (3, 60), (2, 90)), lambda a, b, c: c <= a + b - 2),
        "a + b: " + HAS,
        "s1 - c: " + HAS,
    ),
    part(
        "loses_and_finds",
        "{N} has {a} {items}. {S} loses {b} of them and then finds {c} more. | How many {items} does {he} have now?",
        where(ranges((8, 90), (2, 60), (2, 60)), lambda a, b, _: b <= a - 2),
        "a - b: " + HAS,
        "s1 + c: " + HAS,
    ),
    part(
        "boxes_and_gives",
        "{N} has {a} {boxes} of {b} {items}. {S} gives {c} {items} to {M}. | How many {items} are left?",
        where(ranges((2, 9), (3, 15), (2, 90)), lambda a, b, c: c <= a * b - 2),
        "a * b: " + HAS,
        "s1 - c: " + LEFT,
    ),
    part(
        "all_three",
        "{N} has {a} {items}, {M} has {b} and {K} has {c}. | How many {items} do they have in all?",
        ranges((4, 60), (4, 60), (4, 60)),
        "a + b: {N} and {M} have {eq} {items}",
        "s1 + c: " + BOTH,
    ),
)

MONEY_WHOLES = (
    part(
        "buys_one",
        "{N} has ${a}. {S} buys a {item} for ${b}. | How much money does {he} have left?",
        given(less, 10, 150),
        "a - b: {He} has {eq} dollars left",
    ),
    part(
        "buys_some_left",
        "{N} has ${c}. {S} buys {a} {items} for ${b} each. | How much money does {he} have left?",
        where(ranges((2, 9), (2, 12), (20, 200)), lambda a, b, c: c >= a * b + 2),
        "a * b: The {items} cost {eq} dollars",
        "c - s1: {He} has {eq} dollars left",
    ),
    part(
        "one_price_many",
        "A {item} costs ${b}. {N} buys {a} {items}. | How much does {he} pay?",
        product(2, 30),
        "a * b: {He} pays {eq} dollars",
    ),
    part(
        "prices_two_kinds",
        "A {item} costs ${b} and a {other} costs ${d}. {N} buys {a} {items} and {c} {others}. "
        "| How much does {N} pay in total?",
        ranges((2, 9), (2, 12), (2, 9), (2, 12)),
        "a * b: The {items} cost {eq} dollars",
        "c * d: The {others} cost {eq} dollars",
        "s1 + s2: {He} pays {eq} dollars",
    ),
    part(
        "price_of_one",
        "{N} pays ${a} for {b} {items}. | How much does one {item} cost?",
        given(divisor, 8, 144),
        "a / b: One {item} costs {eq} dollars",
    ),
)

TASK_WHOLES = (
    part(
        "in_hours",
        "{N} does {b} {items} an hour. | How many {items} does {he} do in {a} hours?",
        product(3, 25),
        "a * b: {He} does {eq} {items}",
    ),
    part(
        "every_day_week",
        "{N} does {a} {items} every day. | How many {items} does {N} do in {b} days?",
        given(times, 3, 30),
        "b * a: {He} does {eq} {items}",
    ),
    part(
        "two_times_of_day",
        "{N} did {a} {items} in the morning and {b} in the evening. | How many {items} did {he} do in total?",
        ranges((4, 80), (4, 80)),
        "a + b: {He} did {eq} {items}",
    ),
)

CROWD_WHOLES = (
    part(
        "come_and_go",
        "{N} sees {a} {items} at the {place}. Then {b} more come and {c} leave. | How many {items} are there now?",
        where(ranges((5, 90), (3, 60), (2, 90)), lambda a, b, c: c <= a + b - 2),
        "a + b: There are {eq} {items}",
        "s1 - c: There are {eq} {items}",
    ),
    part(
        "two_groups",
        "There are {a} {items} and {b} {others} at the {place}, and {N} counts them. | How many is that in total?",
        ranges((4, 80), (4, 80)),
        "a + b: Together there are {eq}",
    ),
)

_MORE = {"owned": (OWNED_MOVES, OWNED_CLOSERS), "food": (FOOD_MOVES, FOOD_CLOSERS)}


def _widened(setting: Setting) -> Setting:
    moves, closers = _MORE.get(setting.name, ((), ()))
    return replace(setting, moves=setting.moves + moves, closers=setting.closers + closers)


WIDE_SETTINGS = (
    *map(_widened, SETTINGS),
    Setting("past", THINGS + FOODS, PAST_OPENERS, PAST_MOVES, PAST_CLOSERS),
)
WIDE_WHOLES = (
    *WHOLES,
    Setting("everyday_people", THINGS + FOODS, PEOPLE_WHOLES),
    Setting("everyday_money", GOODS, MONEY_WHOLES),
    Setting("everyday_tasks", TASKS, TASK_WHOLES),
    Setting("everyday_crowds", CROWDS, CROWD_WHOLES),
)
