"""What the small model knows and the sample data teaches it to say: 23 skills, their items and answers."""

import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from scripts.make_assets import words
from scripts.make_assets.world import World

HELD_OUT_PERCENT = 25
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that can be asked. Items of one key are the same knowledge and never stand on both sides."""

    key: str
    answer: str
    x: str
    y: str = ""

    def put(self, form: str) -> str:
        """The form with this item's values in it."""
        return form.format(x=self.x, y=self.y, answer=self.answer)


@dataclass(frozen=True, slots=True)
class Skill:
    """`share` is its weight in running text; an open skill's held-out items are kept out of that text too."""

    name: str
    share: float
    closed: bool
    draw: Callable[[random.Random], Item]

    def holds_out(self, item: Item) -> bool:
        """Whether the item is kept for evaluation."""
        return zlib.crc32(f"{self.name}|{item.key}".encode()) % 100 < HELD_OUT_PERCENT


def make_skills(world: World) -> list[Skill]:
    """All skills about that world, in a fixed order."""
    return [*_letters(), *_lists(), *_numbers(), *_tables(world)]


def _letters() -> list[Skill]:
    return [
        Skill("spell", 1.3, True, partial(_of_word, change=" ".join)),
        Skill("capitals", 1.0, True, partial(_of_word, change=str.upper)),
        Skill(
            "reverse", 1.3, False, partial(_of_letters, sizes=(3, 5), change=lambda x: " ".join(reversed(x)))
        ),
        Skill("sort", 1.6, False, partial(_of_letters, sizes=(3, 4), change=lambda x: " ".join(sorted(x)))),
        Skill("count", 1.0, False, partial(_of_letters, sizes=(2, 8), change=lambda x: str(len(x)))),
    ]


def _of_word(rng: random.Random, change: Callable[[str], str]) -> Item:
    word = rng.choice(words.NOUNS) if rng.random() < 0.5 else _invented_word(rng)
    return Item(word, change(word), word)


def _invented_word(rng: random.Random) -> str:
    syllables = (rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(2))
    end: str = rng.choice(["", *CONSONANTS])
    return "".join(syllables) + end


def _of_letters(rng: random.Random, sizes: tuple[int, int], change: Callable[[list[str]], str]) -> Item:
    letters = rng.sample(LETTERS, rng.randint(*sizes))
    text = " ".join(letters)
    return Item(text, change(letters), text)


def _lists() -> list[Skill]:
    return [
        Skill("first", 0.6, False, partial(_of_list, at=0)),
        Skill("last", 0.6, False, partial(_of_list, at=-1)),
    ]


def _of_list(rng: random.Random, at: int) -> Item:
    things = rng.sample(words.NOUNS, rng.randint(3, 6))
    text = ", ".join(things)
    return Item(text, things[at], text)


def _numbers() -> list[Skill]:
    spoken = [Item(str(n), words.in_words(n), str(n)) for n in range(200)]
    return [
        Skill("add", 2.0, True, partial(_of_pair, limit=20, change=lambda a, b: a + b)),
        Skill("subtract", 2.0, True, partial(_of_pair, limit=20, change=lambda a, b: a - b, falling=True)),
        Skill("larger", 1.0, False, partial(_of_pair, limit=99, change=max, distinct=True)),
        Skill("smaller", 1.0, False, partial(_of_pair, limit=99, change=min, distinct=True)),
        Skill("in_words", 0.6, True, _choice(spoken)),
    ]


def _of_pair(
    rng: random.Random,
    limit: int,
    change: Callable[[int, int], int],
    falling: bool = False,
    distinct: bool = False,
) -> Item:
    a, b = rng.sample(range(limit + 1), 2) if distinct else (rng.randint(0, limit), rng.randint(0, limit))
    low, high = min(a, b), max(a, b)
    if falling:
        a, b = high, low
    return Item(f"{low} {high}", str(change(a, b)), str(a), str(b))


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
        Skill("crop", 0.6, True, _table(world.crop)),
        Skill("trade", 0.5, True, _table(world.trade)),
        Skill("animal", 0.5, True, _table(world.animal)),
        Skill("colour", 0.5, True, _table(world.colour)),
        Skill("dish", 0.5, True, _table(world.dish)),
    ]


def _table(answers: Mapping[str, str]) -> Callable[[random.Random], Item]:
    return _choice([Item(x, answer, x) for x, answer in answers.items()])


def _choice(items: list[Item]) -> Callable[[random.Random], Item]:
    return lambda rng: rng.choice(items)
