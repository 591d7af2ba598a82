"""Runs of command lines, each composed once: by a copy of this process, while it loads torch and transformers itself.

What it loads takes seconds of one core. A machine has more, and composing a run takes a quarter of a second.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, combinations
from typing import Self

from app.config.load import compose_run
from app.config.schema import RunConfig
from app.errors import ConfigError
from app.plan.forked import Begun
from app.plan.knobs import NUMBERS, SPEED, Knob, candidates, turned

Words = tuple[str, ...]
_Found = dict[frozenset[str], RunConfig | None]  # their order means nothing


class Runs:
    """By what is typed for them."""

    def __init__(self) -> None:
        self._found: _Found = {}
        self._begun: Begun[_Found] | None = None

    @classmethod
    @contextmanager
    def begun(cls, lines: Sequence[Words]) -> Iterator[Self]:
        """With these on their way; nobody waits for what was not asked for."""
        runs = cls()
        if lines:
            runs._begun = Begun(partial(_composed, lines))
        try:
            yield runs
        finally:
            if runs._begun is not None:
                runs._begun.drop()

    def arrive(self) -> None:
        """Waits for those on their way."""
        if self._begun is not None:
            self._found |= self._begun.found() or {}

    def of(self, words: Words) -> RunConfig | None:
        """None where they do not go together."""
        if frozenset(words) not in self._found:
            self._found |= _composed([words])
        return self._found[frozenset(words)]


def _composed(lines: Sequence[Words]) -> _Found:
    return {frozenset(words): _run(words) for words in lines}


def _run(words: Words) -> RunConfig | None:
    try:
        return compose_run(words)
    except ConfigError:
        return None


def likely(overrides: Sequence[str], run: RunConfig, processes: int) -> list[Words]:
    """What may be asked for if a run does not fit: in bins that are still to be found, as if the smallest were."""
    if not isinstance(run.batching.tokens, int):
        run = replace(run, batching=replace(run.batching, tokens=run.dataset.max_length))
    knobs = candidates(run, processes)
    alone = [turned(overrides, [knob]) for knob in knobs]
    together = (turned(overrides, chosen) for chosen in _together(knobs))
    return [*alone, *{frozenset(words): words for words in together}.values()]


def _together(knobs: Sequence[Knob]) -> Iterator[Sequence[Knob]]:
    """All that cost nothing but speed, with some that cost more, as these are tried in the order of what they cost."""
    slower = [knob for knob in knobs if knob.costs == SPEED]
    coarser = [knob for knob in knobs if knob.costs == NUMBERS]
    some = chain.from_iterable(combinations(coarser, count) for count in range(len(coarser) + 1))
    return (both for chosen in some if len(both := [*slower, *chosen]) > 1)
