"""The words problems are told in: people with their pronouns, items in both numbers, containers, places."""

from __future__ import annotations

from typing import NamedTuple


class Person(NamedTuple):
    """A name with the pronouns that go with it."""

    name: str
    he: str
    his: str
    him: str


class Item(NamedTuple):
    """Something countable: `one` apple, `many` apples."""

    one: str
    many: str


def _people(names: str, he: str, his: str, him: str) -> tuple[Person, ...]:
    return tuple(Person(name, he, his, him) for name in names.split())


def _items(listing: str) -> tuple[Item, ...]:
    """Parse "pen, box/boxes": a bare word takes a plain s."""
    pairs = (entry.strip().partition("/") for entry in listing.split(","))
    return tuple(Item(one, many or one + "s") for one, _, many in pairs)


WOMEN = _people(
    "Amy Ana Anna Beth Cara Clara Dana Diana Ella Emma Eva Fiona Gina Grace Hana Helen Iris Ivy Jane Jenny "
    "Julia Kate Kim Lara Laura Lena Lily Lisa Lucy Maria Mary Mia Mina Nina Nora Olga Rosa Ruth Sara Tina "
    "Vera Zoe",
    "she", "her", "her",
)  # fmt: skip
MEN = _people(
    "Adam Alan Alex Andy Ben Bill Bob Carl Dan David Dean Eric Frank Fred Gary George Hank Henry Ian Ivan "
    "Jack James John Juan Ken Kevin Leo Luis Mark Max Mike Nick Noah Omar Paul Peter Raj Ryan Sam Tim "
    "Tom Victor",
    "he", "his", "him",
)  # fmt: skip
PEOPLE = WOMEN + MEN

THINGS = _items(
    "pen, pencil, marble, sticker, card, coin, stamp, book, toy, shell, button, bead, ball, block, ribbon, "
    "crayon, marker, magnet, badge, key, rock, feather, comic, puzzle, balloon, map, candle, ring"
)
FOODS = _items(
    "apple, pear, plum, melon, lemon, orange, egg, cookie, muffin, pie, cake, bun, roll, waffle, tart, "
    "potato/potatoes, carrot, pepper, onion, bagel, fig, grape, nut, donut, bean, nut bar"
)
GOODS = _items(
    "shirt, hat, pot, belt, cap, bag, lamp, plate, cup, mug, bowl, chair, rope, pillow, broom, "
    "ticket, plant, mat, game, kite, pan, tie, fan, basket, clock, vase, jacket, rug"
)
TASKS = _items(
    "lap, sum, page, flip, chart, squat, jump, dive, test, hop, bend, set, turn, chore, task, kick, spin, "
    "throw, lesson, trick, climb, drill"
)
CROWDS = _items(
    "kid, adult, player, guest, girl, boy, singer, farmer, worker, teacher, rider, "
    "driver, dog, cat, duck, horse, sheep/sheep, cow, goat, bird, hen, pig, lion, swan, fan, seal"
)
BOXES = _items("box/boxes, bag, basket, jar, tray, case, bin, pack, crate, bucket")
COLORS = ("red", "blue", "green", "black", "white", "pink", "brown", "gray")
PLACES = ("park", "school", "farm", "zoo", "beach", "market", "library", "museum", "lake", "fair")
RELATIVES = ("mother", "father", "sister", "brother", "aunt", "uncle", "cousin", "friend", "neighbor")
