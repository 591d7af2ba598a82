"""The invented world: lands with a capital, a crop, a metal and a feast, people with trade, animal, colour and dish."""

import random
from dataclasses import dataclass
from itertools import product

from scripts.make_assets.words import listed

SIZE = 200  # number of lands and of people: enough to hold out 40 of each


@dataclass(frozen=True, slots=True)
class World:
    """Facts of the world: tables from names to values."""

    capital: dict[str, str]
    crop: dict[str, str]
    metal: dict[str, str]
    feast: dict[str, str]
    trade: dict[str, str]
    animal: dict[str, str]
    colour: dict[str, str]
    dish: dict[str, str]

    @property
    def people(self) -> list[str]:
        """Names of all people, in a fixed order."""
        return list(self.trade)


def invent(seed: str) -> World:
    """Return the world of a seed."""
    rng = random.Random(seed)
    people, lands, towns = (_names(what, rng) for what in ("person", "land", "town"))
    return World(
        capital=dict(zip(lands, towns, strict=True)),
        crop=_give(lands, "crops", rng),
        trade=_give(people, "trades", rng),
        animal=_give(people, "animals", rng),
        colour=_give(people, "colours", rng),
        dish=_give(people, "dishes", rng),
        metal=_give(lands, "metals", rng),
        feast=_give(lands, "months", rng),
    )


def _names(what: str, rng: random.Random) -> list[str]:
    parts = product(listed(f"{what}_starts"), listed(f"{what}_ends"))
    return rng.sample([start + end for start, end in parts], SIZE)


def _give(names: list[str], what: str, rng: random.Random) -> dict[str, str]:
    values = listed(what)
    return {name: rng.choice(values) for name in names}
