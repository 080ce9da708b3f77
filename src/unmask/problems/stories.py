"""Chained stories: an opener, some moves and a closer of one setting, told in any combination.

Slots: {N} the person ({S} name or pronoun as a subject, {he} {his} {him}), {G} {K} {M} other people,
{items}/{item} the main item, {others} another one, {box}/{boxes} and {tub}/{tubs} containers, {c1} {c2}
colours, {place}, {kin} a relative.
"""

from __future__ import annotations

from unmask.problems.parts import (
    Setting,
    beyond,
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
    percent,
    product,
    ranges,
    times,
    twice,
    where,
)
from unmask.problems.words import CROWDS, FOODS, GOODS, TASKS, THINGS

HAS = "{He} has {eq} {items}"

OWNED_OPENERS = (
    part("has", ("{N} has {a} {items}.", "{N} starts the day with {a} {items}."), count),
    part("collects", "{N} collects {items} and owns {a} of them.", count),
    part(
        "boxes",
        ("{N} has {a} {boxes} with {b} {items} in each.", "{N} owns {a} {boxes}. Each {box} holds {b} {items}."),
        product(3, 25),
        "a * b: " + HAS,
    ),
    part("colors", "{N} has {a} {c1} {items} and {b} {c2} {items}.", ranges((4, 60), (4, 60)), "a + b: " + HAS),
    part(
        "colors_more",
        "{N} has {a} {c1} {items} and {b} more {c2} {items} than {c1} ones.",
        ranges((5, 50), (2, 30)),
        "a + b: {He} has {eq} {c2} {items}",
        "a + s1: " + HAS,
    ),
    part(
        "times_as_many",
        "{K} has {a} {items}. {N} has {b} times as many {items} as {K}.",
        where(ranges((3, 40), (3, 9)), lambda a, b: a * b <= 240),
        "a * b: " + HAS,
    ),
    part(
        "twice_as_many",
        ("{K} has {a} {items}. {N} has twice as many.", "{N} has twice as many {items} as {K}, who has {a}."),
        ranges((4, 70)),
        "a * 2: " + HAS,
    ),
    part(
        "half_as_many",
        "{N} has half as many {items} as {K}. {K} has {a} {items}.",
        where(ranges((8, 160)), lambda a: a % 2 == 0),
        "a / 2: " + HAS,
    ),
    part("more_than", "{K} has {a} {items}. {N} has {b} more than {K}.", given(more), "a + b: " + HAS),
    part("fewer_than", "{K} has {a} {items}. {N} has {b} fewer than {K}.", given(less, 10, 120), "a - b: " + HAS),
    part(
        "mixed_boxes",
        "{N} has {a} {boxes} of {b} {items} and {c} loose {items}.",
        ranges((2, 9), (3, 20), (2, 30)),
        "a * b: The {boxes} hold {eq} {items}",
        "s1 + c: " + HAS,
    ),
    part("dozens", "{N} buys {a} dozen {items}.", ranges((2, 9)), "a * 12: " + HAS),
)

OWNED_MOVES = (
    part("buys", ("{S} buys {a} more {items}.", "{S} buys another {a} {items}."), more, "v + a: " + HAS),
    part("finds", "{S} finds {a} more {items} at the {place}.", more, "v + a: " + HAS),
    part("gift", "{S} gets {a} {items} from {his} {kin}.", more, "v + a: " + HAS),
    part("loses", ("{S} loses {a} of {his} {items}.", "{S} loses {a} {items}."), less, "v - a: " + HAS),
    part("gives", "{S} gives {a} {items} to {G}.", less, "v - a: " + HAS),
    part("sells", "{S} sells {a} {items} at the {place}.", less, "v - a: " + HAS),
    part("gives_half", "{S} gives half of {his} {items} to {his} {kin}.", half, "v / 2: " + HAS),
    part("doubles", "{S} gets more and now has twice as many {items}.", twice, "v * 2: " + HAS),
    part(
        "buys_packs",
        ("{S} buys {a} packs of {b} {items} each.", "{S} buys {a} packs with {b} {items} in each pack."),
        groups,
        "a * b: {He} buys {eq} {items}",
        "v + s1: " + HAS,
    ),
    part(
        "gives_each",
        "{S} gives {b} {items} to each of {a} friends.",
        groups_out,
        "a * b: {He} gives {eq} {items}",
        "v - s1: " + HAS,
    ),
    part(
        "gives_percent",
        ("{S} gives away {a}% of {his} {items}.", "{S} sells {a}% of the {items}."),
        percent,
        "a % v: That is {eq} {items}",
        "v - s1: " + HAS,
    ),
    part(
        "grows_percent",
        "{S} adds {a}% more {items}.",
        percent,
        "a % v: That is {eq} {items}",
        "v + s1: " + HAS,
    ),
)

OWNED_CLOSERS = (
    part(
        "how_many",
        ("How many {items} does {N} have now?", "How many {items} does {N} have in the end?"),
        none,
    ),
    part("what_number", "What is the number of {items} that {N} has now?", none),
    part(
        "bags_each",
        "{S} puts the {items} in {a} {tubs} with the same number in each. How many {items} are in each {tub}?",
        divisor,
        "v / a: Each {tub} has {eq} {items}",
    ),
    part(
        "bags_of",
        "{S} puts the {items} in {tubs} of {a}. How many {tubs} does {he} need?",
        divisor,
        "v / a: {He} needs {eq} {tubs}",
    ),
    part(
        "shares",
        "{S} shares the {items} equally among {a} friends. How many {items} does each friend get?",
        divisor,
        "v / a: Each friend gets {eq} {items}",
    ),
    part(
        "needs_more",
        "{S} wants to have {a} {items}. How many more {items} does {he} need?",
        beyond,
        "a - v: {He} needs {eq} {items}",
    ),
    part(
        "sells_all",
        "{S} sells all the {items} for ${a} each. How many dollars does {he} get?",
        times,
        "v * a: {He} gets {eq} dollars",
    ),
    part(
        "percent_are",
        "If {a}% of the {items} are new, how many new {items} are there?",
        percent,
        "a % v: There are {eq} new {items}",
    ),
    part(
        "more_than_other",
        "{M} has {a} {items}. How many more {items} does {N} have than {M}?",
        less,
        "v - a: {He} has {eq} more {items}",
    ),
    part(
        "together",
        "{M} has {a} {items}. How many {items} do {N} and {M} have together?",
        more,
        "v + a: They have {eq} {items}",
    ),
)

FOOD_OPENERS = (
    part("bakes", ("{N} brings {a} {items} to the {place}.", "{N} has {a} fresh {items} for sale."), count),
    part(
        "per_day",
        "{N} packs {a} {items} a day for {b} days.",
        where(ranges((5, 40), (2, 9)), lambda a, b: a * b <= 240),
        "b * a: " + HAS,
    ),
    part(
        "trays",
        ("{N} fills {a} trays with {b} {items} each.", "{N} puts {b} {items} on each of {a} plates."),
        product(3, 20),
        "a * b: " + HAS,
    ),
    part(
        "two_times",
        "{N} gets {a} {items} in the morning and {b} in the evening.",
        ranges((5, 70), (5, 70)),
        "a + b: " + HAS,
    ),
    part(
        "two_trays",
        "{N} has {a} plates of {b} {items} and {c} plates of {d} {items}.",
        ranges((2, 8), (3, 12), (2, 8), (3, 12)),
        "a * b: The first plates hold {eq} {items}",
        "c * d: The others hold {eq} {items}",
        "s1 + s2: " + HAS,
    ),
    part(
        "second_day_twice",
        "{N} sorts {a} {items} on Monday and twice as many on Tuesday.",
        ranges((5, 60)),
        "a * 2: On Tuesday it is {eq} {items}",
        "a + s1: " + HAS,
    ),
)

FOOD_MOVES = (
    part("eats", ("{S} eats {a} {items}.", "{S} eats {a} of the {items}."), less, "v - a: " + HAS),
    part("bad", ("{S} throws {a} bad {items} away.", "{S} drops {a} {items} on the floor."), less, "v - a: " + HAS),
    part("brings", "{His} {kin} brings {a} more {items}.", more, "v + a: " + HAS),
    part("buys_food", "{S} buys {a} more {items} at the {place}.", more, "v + a: " + HAS),
    part("sells_half", "{S} sells half of the {items}.", half, "v / 2: " + HAS),
    part(
        "guests",
        "{S} gives {b} {items} to each of {a} guests.",
        groups_out,
        "a * b: The guests get {eq} {items}",
        "v - s1: " + HAS,
    ),
    part(
        "percent_bad",
        "{S} sees that {a}% of the {items} are bad and throws them away.",
        percent,
        "a % v: There are {eq} bad {items}",
        "v - s1: " + HAS,
    ),
    part(
        "more_trays",
        "{S} brings in {a} more trays of {b} {items} each.",
        groups,
        "a * b: The trays hold {eq} {items}",
        "v + s1: " + HAS,
    ),
)

FOOD_CLOSERS = (
    part("food_left", ("How many {items} does {he} have now?", "How many {items} does {N} still have?"), none),
    part(
        "food_boxes",
        "{S} packs the {items} in {tubs} of {a}. How many {tubs} does {he} fill?",
        divisor,
        "v / a: {He} fills {eq} {tubs}",
    ),
    part(
        "food_shared",
        "The {items} are shared equally by {a} people. How many {items} does each person get?",
        divisor,
        "v / a: Each person gets {eq} {items}",
    ),
    part(
        "food_sold",
        "{S} sells each {item} for ${a}. How much money does {he} make?",
        times,
        "v * a: {He} makes {eq} dollars",
    ),
    part(
        "food_days",
        "If {he} uses {a} {items} a day, how many days will the {items} last?",
        divisor,
        "v / a: They last {eq} days",
    ),
    part(
        "food_needs",
        "{S} needs {a} {items} for a party. How many more {items} must {he} get?",
        beyond,
        "a - v: {He} needs {eq} {items}",
    ),
)

COST = "The cost is {eq} dollars"

SHOP_OPENERS = (
    part("one_price", "{N} wants to buy a {item} that costs ${a}.", ranges((10, 120))),
    part(
        "price_count",
        ("{N} buys {a} {items} for ${b} each.", "{N} buys {a} {items}. Each {item} costs ${b}."),
        product(2, 30),
        "a * b: " + COST,
    ),
    part(
        "two_prices",
        "{N} buys a {item} for ${a} and a {other} for ${b}.",
        ranges((5, 90), (5, 90)),
        "a + b: " + COST,
    ),
    part(
        "two_counts",
        "{N} buys {a} {items} at ${b} each and {c} {others} at ${d} each.",
        ranges((2, 9), (2, 15), (2, 9), (2, 15)),
        "a * b: The {items} cost {eq} dollars",
        "c * d: The {others} cost {eq} dollars",
        "s1 + s2: " + COST,
    ),
    part(
        "count_and_one",
        "{N} buys {a} {items} at ${b} each and one {other} for ${c}.",
        ranges((2, 9), (2, 20), (3, 60)),
        "a * b: The {items} cost {eq} dollars",
        "s1 + c: " + COST,
    ),
    part(
        "price_times",
        "A {item} costs ${a}. A {other} costs {b} times as much. {N} buys one of each.",
        where(ranges((3, 40), (3, 8)), lambda a, b: a * b <= 200),
        "a * b: The {other} costs {eq} dollars",
        "a + s1: " + COST,
    ),
    part(
        "price_less",
        "{N} buys a {item} for ${a} and a {other} that costs ${b} less.",
        given(less, 10, 90),
        "a - b: The {other} costs {eq} dollars",
        "a + s1: " + COST,
    ),
)

SHOP_MOVES = (
    part("delivery", ("The shop adds ${a} for delivery.", "Delivery costs ${a} more."), more, "v + a: " + COST),
    part("coupon", "{S} uses a coupon for ${a} off.", less, "v - a: " + COST),
    part("lunch", "{S} also pays ${a} for lunch.", more, "v + a: " + COST),
    part("half_price", "Today everything is half price.", half, "v / 2: " + COST),
    part(
        "discount",
        ("The shop takes {a}% off.", "{S} gets {a}% off with a coupon."),
        percent,
        "a % v: The discount is {eq} dollars",
        "v - s1: " + COST,
    ),
    part("tax", "There is a tax of {a}%.", percent, "a % v: The tax is {eq} dollars", "v + s1: " + COST),
    part(
        "also_buys",
        "{S} also buys {a} drinks at ${b} each.",
        groups,
        "a * b: The drinks cost {eq} dollars",
        "v + s1: " + COST,
    ),
)

SHOP_CLOSERS = (
    part("total", ("How much does {N} pay in all?", "What is the total cost in dollars?"), none),
    part(
        "change",
        ("{S} pays with ${a}. How much change does {he} get?", "{S} had ${a}. How much money is left?"),
        beyond,
        "a - v: {He} gets {eq} dollars back",
    ),
    part(
        "split",
        "{S} splits the cost equally with friends, {a} people in all. How much does each person pay?",
        divisor,
        "v / a: Each person pays {eq} dollars",
    ),
    part(
        "paid_weekly",
        "{S} pays in {a} equal parts. How many dollars is each part?",
        divisor,
        "v / a: Each part is {eq} dollars",
    ),
    part(
        "short",
        "{S} has only ${a}. How many more dollars does {he} need?",
        less,
        "v - a: {He} needs {eq} dollars",
    ),
)

MONEY = "{He} has {eq} dollars"

EARN_OPENERS = (
    part("has_money", "{N} has ${a} and wants to buy {items}.", count),
    part(
        "hours",
        "{N} sells {items} and earns ${a} an hour. {S} works for {b} hours.",
        where(ranges((5, 25), (2, 9)), lambda a, b: a * b <= 240),
        "b * a: " + MONEY,
    ),
    part(
        "saves_weeks",
        "{N} wants to buy a {item}. {S} saves ${a} a week for {b} weeks.",
        where(ranges((3, 30), (2, 9)), lambda a, b: a * b <= 240),
        "b * a: " + MONEY,
    ),
    part(
        "sold_items",
        ("{N} sells {a} {items} for ${b} each.", "{N} makes {a} {items} and sells them at ${b} each."),
        product(2, 30),
        "a * b: " + MONEY,
    ),
    part(
        "profit",
        "{N} buys a {item} for ${a} and sells it for ${b}. {S} keeps the profit.",
        where(ranges((5, 90), (20, 200)), lambda a, b: b >= a + 2),
        "b - a: " + MONEY,
    ),
    part(
        "two_jobs",
        "{N} sells a {item} for ${a} and works {b} hours at ${c} an hour.",
        ranges((5, 80), (2, 9), (5, 20)),
        "b * c: {He} earns {eq} dollars",
        "a + s1: " + MONEY,
    ),
    part(
        "profit_each",
        "{N} buys {items} for ${a} each and sells {b} of them for ${c} each.",
        where(ranges((2, 20), (2, 12), (5, 30)), lambda a, b, c: c >= a + 2 and b * (c - a) <= 300),
        "c - a: Each {item} makes {eq} dollars",
        "b * s1: " + MONEY,
    ),
)

EARN_MOVES = (
    part("spends", ("{S} spends ${a} on food.", "{S} spends ${a} at the {place}."), less, "v - a: " + MONEY),
    part("gets_money", "{His} {kin} gives {him} ${a}.", more, "v + a: " + MONEY),
    part("tips", "{S} also gets ${a} in tips.", more, "v + a: " + MONEY),
    part("spends_half", "{S} spends half of the money.", half, "v / 2: " + MONEY),
    part(
        "charity",
        ("{S} gives {a}% of the money to charity.", "{S} pays {a}% of the money in tax."),
        percent,
        "a % v: That is {eq} dollars",
        "v - s1: " + MONEY,
    ),
    part(
        "buys_some",
        "{S} buys {a} tickets at ${b} each.",
        groups_out,
        "a * b: The tickets cost {eq} dollars",
        "v - s1: " + MONEY,
    ),
    part(
        "extra_days",
        "{S} earns ${b} a day for {a} more days.",
        groups,
        "a * b: {He} earns {eq} dollars",
        "v + s1: " + MONEY,
    ),
)

EARN_CLOSERS = (
    part(
        "money_now",
        ("How much money does {N} have now?", "How many dollars does {N} have in the end?"),
        none,
    ),
    part(
        "can_buy",
        "How many {items} at ${a} each can {he} buy with the money?",
        divisor,
        "v / a: {He} can buy {eq} {items}",
    ),
    part(
        "money_short",
        "A bike costs ${a}. How many more dollars does {N} need to buy it?",
        beyond,
        "a - v: {He} needs {eq} dollars",
    ),
    part(
        "money_days",
        "{S} spends ${a} a day. In how many days will the money be gone?",
        divisor,
        "v / a: It lasts {eq} days",
    ),
    part(
        "money_shared",
        "{S} splits the money equally among {a} children. How many dollars does each child get?",
        divisor,
        "v / a: Each child gets {eq} dollars",
    ),
)

DID = "{He} did {eq} {items}"

TASK_OPENERS = (
    part("done", "{N} finished {a} {items} last week.", count),
    part(
        "each_day",
        ("{N} did {a} {items} a day for {b} days.", "For {b} days, {N} did {a} {items} every day."),
        where(ranges((3, 40), (2, 9)), lambda a, b: a * b <= 240),
        "b * a: " + DID,
    ),
    part(
        "two_days",
        ("{N} did {a} {items} on Monday and {b} on Tuesday.", "{N} did {a} {items} at home and {b} at school."),
        ranges((5, 80), (5, 80)),
        "a + b: " + DID,
    ),
    part(
        "times_tuesday",
        "{N} did {a} {items} on Monday. On Tuesday {he} did {b} times as many.",
        where(ranges((3, 30), (3, 8)), lambda a, b: a * b <= 200),
        "a * b: On Tuesday {he} did {eq}",
        "a + s1: " + DID,
    ),
    part(
        "fewer_tuesday",
        "{N} did {a} {items} on Friday and {b} fewer than that on Sunday.",
        given(less, 10, 90),
        "a - b: On Sunday {he} did {eq}",
        "a + s1: " + DID,
    ),
    part(
        "sets",
        "{N} did {a} {items} an hour for {b} hours and then {c} {items} an hour for {d} hours.",
        ranges((3, 20), (2, 8), (3, 20), (2, 8)),
        "b * a: First {he} did {eq}",
        "d * c: Then {he} did {eq}",
        "s1 + s2: " + DID,
    ),
)

TASK_MOVES = (
    part("does_more", ("{S} did {a} more {items} at night.", "{S} did another {a} {items}."), more, "v + a: " + DID),
    part("helped", "{His} {kin} helped with {a} more {items}.", more, "v + a: {He} has {eq} {items}"),
    part("wrong", "{S} found that {a} {items} did not count.", less, "v - a: {He} has {eq} {items}"),
    part(
        "more_days",
        "{S} did {b} {items} a day for {a} more days.",
        groups,
        "a * b: That is {eq} more {items}",
        "v + s1: " + DID,
    ),
    part(
        "percent_more",
        ("{S} then did {a}% more.", "{S} then added {a}% more {items}."),
        percent,
        "a % v: That is {eq} more {items}",
        "v + s1: " + DID,
    ),
)

TASK_CLOSERS = (
    part("did_total", ("How many {items} is that?", "How many {items} does that make?"), none),
    part(
        "goal_left",
        "The goal is {a} {items}. How many {items} are left to reach the goal?",
        beyond,
        "a - v: There are {eq} {items} left",
    ),
    part(
        "paid_each",
        "{S} gets ${a} for each of these {items}. How many dollars does {he} get?",
        times,
        "v * a: {He} gets {eq} dollars",
    ),
    part(
        "rate",
        "It took {a} hours to do these {items}. How many {items} is that per hour?",
        divisor,
        "v / a: That is {eq} {items} per hour",
    ),
    part(
        "minutes",
        "Each of these {items} took {a} minutes. How many minutes did they take in all?",
        times,
        "v * a: They took {eq} minutes",
    ),
    part(
        "percent_good",
        "If {a}% of these {items} were easy, how many {items} were easy?",
        percent,
        "a % v: There were {eq} easy {items}",
    ),
)

ARE = "There are {eq} {items}"

CROWD_OPENERS = (
    part("sees", ("{N} sees {a} {items} at the {place}.", "{N} counts {a} {items} near the {place}."), count),
    part(
        "rows",
        ("{N} sees {a} rows of {b} {items}.", "{N} sees {a} groups with {b} {items} in each group."),
        product(3, 25),
        "a * b: " + ARE,
    ),
    part(
        "here_there",
        "{N} counts {a} {items} on the left and {b} {items} on the right.",
        ranges((5, 80), (5, 80)),
        "a + b: " + ARE,
    ),
    part(
        "here_there_times",
        "{N} sees {a} {items} inside and {b} times as many outside.",
        where(ranges((3, 30), (3, 8)), lambda a, b: a * b <= 200),
        "a * b: Outside there are {eq} {items}",
        "a + s1: " + ARE,
    ),
    part(
        "others_away",
        "{N} counts {a} animals and people at the {place}. All but {b} of them are {items}.",
        given(less, 10, 120),
        "a - b: " + ARE,
    ),
)

CROWD_MOVES = (
    part("arrive", ("Then {a} more {items} come.", "Soon {a} more {items} come."), more, "v + a: " + ARE),
    part("leave", ("Then {a} {items} leave.", "After an hour, {a} {items} leave."), less, "v - a: " + ARE),
    part("half_leave", "At noon, half of the {items} leave.", half, "v / 2: " + ARE),
    part("double_up", "By noon, there are twice as many {items}.", twice, "v * 2: " + ARE),
    part(
        "groups_come",
        "Then {a} groups of {b} {items} come.",
        groups,
        "a * b: The groups bring {eq} {items}",
        "v + s1: " + ARE,
    ),
    part(
        "groups_go",
        "At night, {a} groups of {b} {items} leave.",
        groups_out,
        "a * b: The groups take {eq} {items}",
        "v - s1: " + ARE,
    ),
    part(
        "percent_go",
        ("In the evening, {a}% of the {items} leave.", "When it rains, {a}% of the {items} leave."),
        percent,
        "a % v: That is {eq} {items}",
        "v - s1: " + ARE,
    ),
)

CROWD_CLOSERS = (
    part("crowd_now", ("How many {items} are there now?", "How many {items} does {N} see in the end?"), none),
    part(
        "lines",
        "The {items} stand in {a} equal lines. How many {items} are in each line?",
        divisor,
        "v / a: Each line has {eq} {items}",
    ),
    part(
        "pens",
        "Each room has space for {a} {items}. How many rooms are needed for all of them?",
        divisor,
        "v / a: They need {eq} rooms",
    ),
    part(
        "feed",
        "Each of the {items} gets {a} cups of water. How many cups of water is that?",
        times,
        "v * a: They get {eq} cups",
    ),
    part(
        "young",
        "If {a}% of the {items} are young, how many young {items} are there?",
        percent,
        "a % v: There are {eq} young {items}",
    ),
    part(
        "space",
        "There is space for {a} {items}. How many more {items} can come?",
        beyond,
        "a - v: There is space for {eq} {items}",
    ),
)

SETTINGS = (
    Setting("owned", THINGS, OWNED_OPENERS, OWNED_MOVES, OWNED_CLOSERS),
    Setting("food", FOODS, FOOD_OPENERS, FOOD_MOVES, FOOD_CLOSERS),
    Setting("shop", GOODS, SHOP_OPENERS, SHOP_MOVES, SHOP_CLOSERS),
    Setting("earn", GOODS, EARN_OPENERS, EARN_MOVES, EARN_CLOSERS),
    Setting("tasks", TASKS, TASK_OPENERS, TASK_MOVES, TASK_CLOSERS),
    Setting("crowd", CROWDS, CROWD_OPENERS, CROWD_MOVES, CROWD_CLOSERS),
)
