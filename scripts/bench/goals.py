"""What the figures are compared with, and whether they reach it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Ratios = Mapping[str, float]  # how many times as fast as each contender ours is


@dataclass(frozen=True, slots=True)
class Goal:
    """`against` a contender a factor, without one a speed. Fields that are None fit everything."""

    words: str
    at_least: float
    against: str | None = None
    device: str | None = None
    card: str | None = None
    model: str | None = None
    method: str | None = None
    tokens_per_step: int | None = None
    mix: str | None = None

    def fits(self, facts: Mapping[str, Any]) -> bool:
        """Whether it is about measurements like this line."""
        wanted = ("device", "model", "method", "tokens_per_step", "mix")
        alike = all(getattr(self, name) in (None, facts[name]) for name in wanted)
        return alike and (self.card is None or self.card in facts["hardware"]["name"])

    def said(self, speed: float | None, ratios: Ratios) -> str | None:
        """A sentence; None where nothing was measured that it could be held against."""
        reached = ratios.get(self.against) if self.against else speed
        if reached is None:
            return None
        figure = f"{reached:.2f}" if self.against else f"{reached:,.0f}"
        return f"{self.words}: {figure}, {'met' if reached >= self.at_least else '**missed**'}"


_BARE = 1 / 1.05
GOALS = [
    Goal("at least 1.5 times TRL, packed", 1.5, "trl", device="cpu"),
    Goal("at least 4 times TRL as it comes", 4.0, "trl_default", device="cpu"),
    Goal(
        "a step at most 1.05 times that of a bare loop (at least 0.95 times as fast)",
        _BARE,
        "bare",
        device="cpu",
    ),
    Goal(
        "at least 15,000 tokens/s", 15e3, card="H200", model="llama_8b", method="lora", tokens_per_step=16384
    ),
    Goal(
        "at least 14,000 tokens/s", 14e3, card="H200", model="llama_8b", method="qlora", tokens_per_step=16384
    ),
    Goal(
        "at least 11,000 tokens/s", 11e3, card="H200", model="llama_8b", method="full", tokens_per_step=16384
    ),
    Goal(
        "at least 60,000 tokens/s", 60e3, card="H200", model="llama_1b", method="lora", tokens_per_step=16384
    ),
    Goal(
        "at least 1,200 tokens/s",
        1.2e3,
        card="H200",
        model="llama_70b",
        method="qlora",
        tokens_per_step=16384,
    ),
]


def goals_for(facts: Mapping[str, Any], speed: float | None, ratios: Ratios) -> list[str]:
    """What can be said about these measurements; `speed` is that of ours."""
    return [words for goal in GOALS if goal.fits(facts) and (words := goal.said(speed, ratios)) is not None]
