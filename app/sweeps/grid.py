"""Grid of a sweep: the values of each setting on the command line, in Hydra's grammar, and their combinations."""

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, RangeSweep, ValueType
from hydra.errors import HydraException

from app.config.groups import choices_by_group
from app.config.overrides import check_overrides, parse_override
from app.errors import ConfigError
from app.sweeps.trials import Outcome, Trial, key_of, name_of

MAX_TRIALS = 1000


@dataclass(frozen=True, slots=True)
class Setting:
    """A key with an override for each value.

    `is_relative`: the values are multiples, such as 0.5x, of the value without the sweep.
    """

    key: str
    texts: tuple[str, ...]
    is_relative: bool = False

    @property
    def is_swept(self) -> bool:
        """Whether the setting has several values."""
        return len(self.texts) > 1


class Grid:
    """Every combination of the values; the last setting changes fastest."""

    def __init__(self, combinations: Sequence[tuple[str, ...]], swept_keys: Collection[str]) -> None:
        digits = len(str(len(combinations)))
        self.points: Sequence[Trial] = [
            Trial(number, overrides, swept, name_of(number, digits, swept))
            for number, overrides in enumerate(combinations, 1)
            for swept in [tuple(text for text in overrides if key_of(text) in swept_keys)]
        ]
        self.count = len(self.points)

    def recall(self, _recorded: Sequence[Mapping[str, Any]], /) -> Sequence[Trial]:
        """All trials: they depend on the command alone."""
        return self.points

    def next(self, ended: Sequence[Outcome], /) -> Trial | None:
        return self.points[len(ended)] if len(ended) < self.count else None


def settings_of(overrides: Sequence[str]) -> tuple[list[Setting], list[str]]:
    """The settings in the given order, and their problems."""
    settings: list[Setting] = []
    problems: list[str] = []
    for text in overrides:
        try:
            settings.append(_setting(text))
        except ConfigError as problem:
            problems += problem.problems
    return settings, [*problems, *_given_twice(settings), *too_many(settings)]


def wrong_overrides(texts: Iterable[str]) -> dict[str, Sequence[str]]:
    """Problems of single overrides, whatever they are combined with."""
    wrong: dict[str, Sequence[str]] = {}
    for text in dict.fromkeys(texts):
        try:
            check_overrides([text])
        except ConfigError as problem:
            wrong[text] = problem.problems
    return wrong


def too_many(settings: Sequence[Setting]) -> Iterator[str]:
    """Problem of too many trials, found before a slip like range(1,1e9) fills the memory."""
    swept = [setting for setting in settings if setting.is_swept]
    if math.prod(len(setting.texts) for setting in swept) > MAX_TRIALS:
        keys = ", ".join(setting.key for setting in swept)
        yield f"{keys}: more than {MAX_TRIALS:,} trials in one sweep. Give fewer values."


def _given_twice(settings: Sequence[Setting]) -> Iterator[str]:
    count = Counter(setting.key for setting in settings)
    for key in dict.fromkeys(setting.key for setting in settings if setting.is_swept):
        if count[key] > 1:
            yield f"{key} is swept and given {count[key]} times. Give it once."


def _setting(text: str) -> Setting:
    try:
        override = parse_override(text)
    except HydraException:  # text that needs quotes, or an error: the validation of the run decides
        return Setting(key_of(text), (text,))
    _refuse(override, text)
    if not override.is_sweep_override():
        return Setting(override.key_or_group, (text,))
    values = _values(override, text)
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise ConfigError(f"{text}: {twice[0]} is there twice.")
    return Setting(override.key_or_group, tuple(f"{override.get_key_element()}={value}" for value in values))


def _refuse(override: Override, text: str) -> None:
    key, value = override.key_or_group, override.value()
    if key == "resume":
        reason = "a sweep resumes each trial from its own checkpoint. Leave it out, or give resume=auto"
    elif key == "output_dir" and override.is_sweep_override():
        reason = "one folder holds the whole sweep, with a folder for each trial in it. Give one"
    elif override.value_type == ValueType.INTERVAL_SWEEP:
        reason = (
            f"an interval has no list of values. Write them, as in {key}=1,2 or range(1,3); "
            f"sweep=optuna 'sweep.space.{key}={{low: ..., high: ...}}' searches it"
        )
    elif isinstance(value, ChoiceSweep | RangeSweep) and value.shuffle:
        reason = "shuffle gives another order each time, so the sweep could not be continued. Leave it out"
    else:
        return
    raise ConfigError(f"{text}: {reason}.")


def _values(override: Override, text: str) -> list[str]:
    """The swept values as Hydra writes them; those of a float range without rounding errors."""
    value = override.value()
    if isinstance(value, Glob):
        names = list(choices_by_group().get(override.key_or_group, ()))
        found = value.filter(names)
        if not found:
            raise ConfigError(f"{text}: glob chooses among the files of a group; none of {names} matches.")
        return found
    if isinstance(value, RangeSweep):
        numbers = itertools.islice(override.sweep_iterator(), MAX_TRIALS + 1)
        return [f"{each:.12g}" if isinstance(each, float) else str(each) for each in numbers]
    return list(override.sweep_string_iterator())
