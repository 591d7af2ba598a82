"""Running text about the world of the skills, for pretraining."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from scripts.make_assets.forms import Forms
from scripts.make_assets.skills import Skill
from scripts.make_assets.world import World

ABOUT_ONE_SKILL = 0.45
ABOUT_ONE_PERSON = 0.07
REPORTED = 0.08
LONGEST = 4
PERSON_SKILLS = ("trade", "animal", "colour", "dish")


@dataclass(frozen=True, slots=True)
class Author:
    """Writer of documents of one to four sentences, without questions and instructions."""

    skills: Sequence[Skill]
    forms: Mapping[str, Forms]
    world: World

    def write(self, rng: random.Random) -> Iterator[str]:
        """Yield endless documents."""
        while True:
            yield " ".join(self._sentences(rng))

    def _sentences(self, rng: random.Random) -> list[str]:
        kind, length = rng.random(), rng.randint(1, LONGEST)
        if kind < ABOUT_ONE_PERSON:
            return self._portrait(rng)
        if kind < ABOUT_ONE_PERSON + ABOUT_ONE_SKILL:
            skill = self._pick(rng)
            return [self._sentence(rng, skill) for _ in range(length)]
        return [self._sentence(rng, self._pick(rng)) for _ in range(length)]

    def _pick(self, rng: random.Random) -> Skill:
        return rng.choices(self.skills, [skill.share for skill in self.skills])[0]

    def _sentence(self, rng: random.Random, skill: Skill) -> str:
        item = skill.draw(rng)
        while not skill.closed and skill.holds_out(item):
            item = skill.draw(rng)
        text = item.put(rng.choice(self.forms[skill.name].says))
        return f"{rng.choice(self.world.people)} said: {text}" if rng.random() < REPORTED else text

    def _portrait(self, rng: random.Random) -> list[str]:
        name = rng.choice(self.world.people)
        facts: list[Callable[[str], str]] = [
            lambda form: form.format(x=name, answer=self.world.trade[name]),
            lambda form: form.format(x=name, answer=self.world.animal[name]),
            lambda form: form.format(x=name, answer=self.world.colour[name]),
            lambda form: form.format(x=name, answer=self.world.dish[name]),
        ]
        sentences = [fact(rng.choice(self.forms[skill].says)) for skill, fact in zip(PERSON_SKILLS, facts, strict=True)]
        rng.shuffle(sentences)
        return sentences
