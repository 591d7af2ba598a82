"""Knowledge of the tiny model and tasks of the sample data: 15 skills with their items and answers."""

import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from scripts.make_assets import words
from scripts.make_assets.world import World

HELD_OUT_PERCENT = 25


@dataclass(frozen=True, slots=True)
class Item:
    """Question with its answer; items with the same key are the same knowledge, and are all held out or none."""

    key: str
    answer: str
    x: str

    def put(self, form: str) -> str:
        """Return a form filled in with this item."""
        return form.format(x=self.x, answer=self.answer)


@dataclass(frozen=True, slots=True)
class Skill:
    """Skill; `share` is its weight in running text, which excludes held-out items of skills that are not `closed`."""

    name: str
    share: float
    closed: bool
    draw: Callable[[random.Random], Item]

    def holds_out(self, item: Item) -> bool:
        """Return whether the item is held out for evaluation."""
        return zlib.crc32(f"{self.name}|{item.key}".encode()) % 100 < HELD_OUT_PERCENT


def make_skills(world: World) -> list[Skill]:
    """Return all skills about a world, in a fixed order."""
    return [*_lists(), *_tables(world)]


def _lists() -> list[Skill]:
    return [Skill("first", 0.8, False, partial(_of_list, at=0)), Skill("last", 0.8, False, partial(_of_list, at=-1))]


def _of_list(rng: random.Random, at: int) -> Item:
    things = rng.sample(words.NOUNS, rng.randint(3, 6))
    text = ", ".join(things)
    return Item(text, things[at], text)


def _tables(world: World) -> list[Skill]:
    opposites = [Item(f"{a} {b}", y, x) for a, b in words.OPPOSITES for x, y in ((a, b), (b, a))]
    sequences = [*words.SEQUENCES, [str(number) for number in range(131)]]
    following = {x: answer for row in sequences for x, answer in pairwise(row)}
    kinds = {thing: kind for kind, things in words.KINDS.items() for thing in things}
    verbs = [*words.REGULAR_VERBS, *words.IRREGULAR_PASTS]
    return [
        Skill("plural", 0.8, True, _table({noun: words.plural(noun) for noun in words.NOUNS})),
        Skill("past", 0.8, True, _table({verb: words.past(verb) for verb in verbs})),
        Skill("opposite", 0.8, True, _choice(opposites)),
        Skill("kind", 0.8, True, _table(kinds)),
        Skill("next", 0.8, True, _table(following)),
        Skill("capital", 0.8, True, _table(world.capital)),
        Skill("crop", 0.8, True, _table(world.crop)),
        Skill("metal", 0.8, True, _table(world.metal)),
        Skill("feast", 0.8, True, _table(world.feast)),
        Skill("trade", 0.5, True, _table(world.trade)),
        Skill("animal", 0.6, True, _table(world.animal)),
        Skill("colour", 0.5, True, _table(world.colour)),
        Skill("dish", 0.5, True, _table(world.dish)),
    ]


def _table(answers: Mapping[str, str]) -> Callable[[random.Random], Item]:
    return _choice([Item(x, answer, x) for x, answer in answers.items()])


def _choice(items: list[Item]) -> Callable[[random.Random], Item]:
    return lambda rng: rng.choice(items)
