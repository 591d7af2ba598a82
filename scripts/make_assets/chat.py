"""Chat rows: short questions and answers, some with a system line or a second turn."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scripts.make_assets.forms import Forms
from scripts.make_assets.skills import Item, Skill

SECOND_TURN = 0.15
SYSTEM_LINE = 0.10
NEW_PHRASING = 0.5  # fraction of the held-out rows
SYSTEM_LINES = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "Answer with the answer alone.",
    "You know this land and its people well.",
)


@dataclass(frozen=True, slots=True)
class Row:
    """Conversation, with its skill and items."""

    skill: Skill
    items: tuple[Item, ...]
    system: str | None
    questions: tuple[str, ...]

    def messages(self) -> list[dict[str, str]]:
        """Return the messages for chat templates."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for question, item in zip(self.questions, self.items, strict=True):
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": item.answer})
        return messages

    def line(self) -> str:
        """Return the row as a JSONL line."""
        return json.dumps({"messages": self.messages()}, ensure_ascii=False)


def make_rows(
    skills: Sequence[Skill], forms: Mapping[str, Forms], held_out: bool, per_skill: int, rng: random.Random
) -> list[Row]:
    """Return shuffled distinct rows, `per_skill` of each; in held-out rows all items are held out."""
    rows: dict[str, Row] = {}
    for skill in skills:
        target = len(rows) + per_skill
        while len(rows) < target:
            row = _row(skill, forms[skill.name], held_out, rng)
            first_item = f"{skill.name} {row.items[0].x}"
            rows.setdefault(first_item if held_out else row.line(), row)
    shuffled = list(rows.values())
    rng.shuffle(shuffled)
    return shuffled


def _row(skill: Skill, forms: Forms, held_out: bool, rng: random.Random) -> Row:
    new = held_out and rng.random() < NEW_PHRASING
    items = [_item(skill, held_out, rng)]
    questions = [items[0].put(rng.choice(forms.eval if new else forms.asks))]
    if rng.random() < SECOND_TURN:
        items.append(_item(skill, held_out, rng))
        questions.append(items[1].put(forms.follow))
    system = rng.choice(SYSTEM_LINES) if rng.random() < SYSTEM_LINE else None
    return Row(skill, tuple(items), system, tuple(questions))


def held_out_item(skill: Skill, rng: random.Random) -> Item:
    """Return a random held-out item."""
    return _item(skill, held_out=True, rng=rng)


def _item(skill: Skill, held_out: bool, rng: random.Random) -> Item:
    while True:
        item = skill.draw(rng)
        if skill.holds_out(item) is held_out:
            return item
