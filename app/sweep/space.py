"""What a preset varies: lists of values and ranges of numbers, read and checked before anything is composed."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from app.config.did_you_mean import did_you_mean
from app.config.groups import choices_by_group
from app.config.schema import RunConfig
from app.config.validate import kinds, number_type, shown
from app.errors import ConfigError
from app.sweep.checking import wrong_overrides
from app.sweep.expansion import Setting, settings_of

_PARTS = ("low", "high", "log", "step")
_TIMES = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)x", re.IGNORECASE)
_BARE = re.compile(r"[A-Za-z0-9_./+-]+", re.ASCII)
_SLACK = 1e-9
_DIGITS = 4  # of a number that a search chose: more would only be harder to read


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, both included; multiples of what the key has without it, if `is_relative`."""

    key: str
    low: float
    high: float
    log: bool = False
    step: float | None = None
    is_whole: bool = False
    is_relative: bool = False

    is_swept = True

    def text(self, number: float) -> str:
        """The override."""
        short = f"{number:g}"
        return (
            f"{self.key}={short if float(short) == number else repr(number)}{'x' if self.is_relative else ''}"
        )

    @property
    def texts(self) -> tuple[str, ...]:
        """The ends."""
        return self.text(self.low), self.text(self.high)

    @property
    def count(self) -> int | None:
        """Of its numbers; None when they lie densely."""
        step = self._step
        return None if step is None else math.floor((self.high - self.low) / step + _SLACK) + 1

    def numbers(self) -> list[float]:
        """All of them, where they can be counted; else none."""
        return [self.rounded(self.low + each * (self._step or 0)) for each in range(self.count or 0)]

    def has(self, number: float) -> bool:
        """Whether it lies in the range, and on a step of it."""
        if not self.low <= number <= self.high:
            return False
        return self._step is None or abs((number - self.low) / self._step % 1 - 0.5) > 0.5 - _SLACK

    @property
    def _step(self) -> float | None:
        return self.step or (1 if self.is_whole else None)

    def rounded(self, number: float) -> float:
        """To a few digits, and never out of the range; sums of steps without their error: 0.3, not 0.300000001."""
        if self.is_whole:
            return int(number)
        if self.step is not None:
            return float(f"{number:.12g}")
        near = float(f"{number:.{_DIGITS}g}")
        return near if self.low <= near <= self.high else number


Dimension = Setting | Range


def times(value: Any) -> float | None:
    """0.5 for `0.5x`, and None for what is no multiple."""
    found = _TIMES.fullmatch(value) if isinstance(value, str) else None
    try:
        return float(found[1]) if found else None
    except ValueError:
        return None


def dimensions_in(space: Mapping[str, Any]) -> tuple[list[Dimension], list[str]]:
    """In the order of the space; and everything that is wrong with it."""
    found: list[Dimension] = []
    problems: list[str] = []
    for key, given in space.items():
        try:
            found.append(_range(key, given) if isinstance(given, Mapping) else _setting(key, given))
        except ConfigError as problem:
            problems += problem.problems
    return found, problems


def named(key: str, given: Any) -> str:
    """As it is typed."""
    return f"sweep.space.{key}={shown(given)}"


def ends(dimensions: Sequence[Dimension], most: int) -> list[tuple[str, ...]]:
    """Every combination of values and ends; when these are too many, each value with the first ones of the others."""
    choices = [dimension.texts for dimension in dimensions]
    if math.prod(map(len, choices)) <= most:
        return list(itertools.product(*choices))
    first = [texts[0] for texts in choices]
    varied = [
        (*first[:place], text, *first[place + 1 :])
        for place, texts in enumerate(choices)
        for text in texts[1:]
    ]
    return [tuple(first), *varied]


def _setting(key: str, given: Any) -> Setting:
    if not isinstance(given, list) or not given:
        raise ConfigError(f"{named(key, given)}: expected values, [a, b], or a range, {{low: 1, high: 2}}.")
    factors = [times(value) for value in given]
    is_relative = any(factor is not None for factor in factors)
    (setting,), problems = _read(f"{key}={','.join(_written(value) for value in given)}")
    if is_relative and _number_type(key, given):
        if not all(factors):
            problems.append(f"{named(key, given)}: multiples (0.5x, above 0) and values do not go together.")
    else:
        problems += _wrong(setting.texts)
    if problems:
        raise ConfigError(problems)
    return Setting(key, setting.texts, setting.same, is_relative)


def _read(text: str) -> tuple[list[Setting], list[str]]:
    settings, problems = settings_of([text])
    return (settings, problems) if settings else ([Setting("", (), ())], problems)


def _wrong(texts: Sequence[str]) -> list[str]:
    return [problem for several in wrong_overrides(texts).values() for problem in several]


def _number_type(key: str, given: Any) -> type[int] | type[float]:
    """Of a key that must take numbers."""
    kind = kinds(RunConfig).get(key)
    if kind is None and key not in choices_by_group():
        raise ConfigError(_wrong([f"{key}=1"]))
    found = number_type(kind)
    if found is None:
        raise ConfigError(f"{named(key, given)}: {key} takes no numbers. Give a list of values.")
    return found


def _range(key: str, given: Mapping[str, Any]) -> Range:
    problems = [
        f"{named(key, given)}: {part} is no part of a range.{did_you_mean(str(part), _PARTS)}"
        for part in given
        if part not in _PARTS
    ]
    problems += [f"{named(key, given)}: {part} is missing." for part in ("low", "high") if part not in given]
    is_whole = _number_type(key, given) is int
    if problems:
        raise ConfigError(problems)
    factors = [times(given[part]) for part in ("low", "high")]
    is_relative = any(factor is not None for factor in factors)
    numbers = factors if is_relative else [_number(given[part]) for part in ("low", "high")]
    step = _number(given["step"]) if given.get("step") is not None else None
    problem = _fault(given, numbers, step, is_whole=is_whole and not is_relative)
    if problem:
        raise ConfigError(f"{named(key, given)}: {problem}")
    low, high = (number for number in numbers if number is not None)
    if is_whole and not is_relative:
        return Range(key, int(low), int(high), given.get("log", False), step and int(step), is_whole=True)
    return Range(key, low, high, given.get("log", False), step, is_relative=is_relative)


def _number(value: Any) -> float | None:
    """YAML takes 1e-5 for text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _fault(
    given: Mapping[str, Any], ends: Sequence[float | None], step: float | None, *, is_whole: bool
) -> str:
    """What is wrong with the numbers of a range, nothing if nothing is."""
    low, high = ends
    if low is None or high is None or not math.isfinite(high - low):
        return "low and high must be numbers, or both multiples of the run's own value, such as 0.1x and 10x."
    faults = (
        (low >= high, "low must be below high."),
        (not isinstance(given.get("log", False), bool), "log must be true or false."),
        (given.get("log") is True and low <= 0, "low must be above 0 for log."),
        (
            given.get("step") is not None and not (step and 0 < step <= high - low),
            "step must be above 0 and fit in.",
        ),
        (given.get("step") is not None and given.get("log") is True, "step and log do not go together."),
        (is_whole and any(n is not None and n != int(n) for n in (*ends, step)), "expected whole numbers."),
    )
    return next((words for is_so, words in faults if is_so), "")


def _written(value: Any) -> str:
    """As Hydra's grammar takes it."""
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}: {_written(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, str) and not _BARE.fullmatch(value):
        quoted: str = QuotedString(value, Quote.single).with_quotes()
        return quoted
    return shown(value)
