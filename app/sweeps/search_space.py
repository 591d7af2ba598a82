"""Search space of a sweep: lists of values, ranges of numbers, and multiples (0.5x) of the run's own value."""

import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from app.config.groups import choices_by_group
from app.config.load import compose_run
from app.config.schema import RunConfig
from app.config.unread_keys import is_unread, readers_of
from app.config.validate import field_types, format_value, number_type
from app.config.yaml_files import as_number
from app.errors import ConfigError, refuse
from app.sweeps.grid import Setting, settings_of, wrong_overrides
from app.sweeps.trials import key_of

_MULTIPLE = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)x", re.IGNORECASE)
_UNQUOTED = re.compile(r"[A-Za-z0-9_./+-]+", re.ASCII)
_STEP_TOLERANCE = 1e-9  # fraction of a step
_SIGNIFICANT_DIGITS = 4  # of a proposed number


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, both included; multiples of the run's own value if `is_relative`."""

    key: str
    low: float
    high: float
    log: bool = False
    step: float | None = None
    is_whole: bool = False
    is_relative: bool = False

    is_swept = True

    def text(self, number: float) -> str:
        """The override with a number."""
        short = f"{number:g}"
        written = short if float(short) == number else repr(number)
        return f"{self.key}={written}{'x' if self.is_relative else ''}"

    @property
    def texts(self) -> tuple[str, ...]:
        """The overrides of both ends."""
        return self.text(self.low), self.text(self.high)

    @property
    def count(self) -> float:
        """How many numbers it has; infinity for a continuous range."""
        step = self._step
        return math.inf if step is None else math.floor((self.high - self.low) / step + _STEP_TOLERANCE) + 1

    @property
    def _step(self) -> float | None:
        return self.step or (1 if self.is_whole else None)

    def number(self, place: float) -> float:
        """The number at a place of a range that is not continuous."""
        return self.rounded(self.low + place * (self._step or 0))

    def has(self, number: float) -> bool:
        """Whether a number lies in the range and on a step."""
        if not self.low <= number <= self.high:
            return False
        return self._step is None or abs((number - self.low) / self._step % 1 - 0.5) > 0.5 - _STEP_TOLERANCE

    def rounded(self, number: float) -> float:
        """Round a proposed number to few digits inside the range, and remove rounding errors of steps."""
        if self.is_whole:
            return int(number)
        if self.step is not None:
            return float(f"{number:.12g}")
        return min(max(float(f"{number:.{_SIGNIFICANT_DIGITS}g}"), self.low), self.high)


Dimension = Setting | Range


def parse_multiple(value: Any) -> float | None:
    """0.5 for `0.5x`; None for other values."""
    found = _MULTIPLE.fullmatch(value) if isinstance(value, str) else None
    return as_number(found[1]) if found else None


def dimensions_in(space: Mapping[str, Any]) -> tuple[list[Dimension], list[str]]:
    """The dimensions in the order of the space, and their problems."""
    found: list[Dimension] = []
    problems: list[str] = []
    for key, given in space.items():
        try:
            found.append(_range(key, given) if isinstance(given, Mapping) else _setting(key, given))
        except ConfigError as problem:
            problems += problem.problems
    return found, problems


def corners(dimensions: Sequence[Dimension]) -> list[tuple[str, ...]]:
    """Each value, or end of a range, with the first ones of the other dimensions and every choice of the groups."""
    groups = choices_by_group()
    firsts = itertools.product(*(each.texts if each.key in groups else each.texts[:1] for each in dimensions))
    places = [(at, text) for at, each in enumerate(dimensions) for text in each.texts]
    return list(dict.fromkeys((*first[:at], text, *first[at + 1 :]) for first in firsts for at, text in places)) or [()]


def compose_or_error(overrides: Sequence[str]) -> RunConfig | ConfigError:
    """The run of the overrides, or its problems."""
    try:
        return compose_run(overrides)
    except ConfigError as problem:
        return problem


def value_in(run: RunConfig, key: str) -> Any:
    """The value of a run at a dotted key; for a section, its kind."""
    value: Any = run
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return getattr(value, "kind", None) if is_dataclass(value) else value


def as_read(combinations: Iterable[tuple[str, ...]], dimensions: Sequence[Dimension]) -> list[tuple[str, ...]]:
    """The different trials once each of them is without the keys that its run does not read.

    Where no group is swept, all trials read the same, and a key that they do not is refused as in a run.
    """
    groups = choices_by_group()
    if not any(each.is_swept and each.key.removesuffix(".kind") in groups for each in dimensions):
        return list(combinations)
    return list(dict.fromkeys(map(without_unread, combinations)))


def without_unread(texts: tuple[str, ...]) -> tuple[str, ...]:
    """The overrides of a trial but for the keys that its run does not read."""
    others = [text for text in texts if not readers_of(key_of(text)) and not parse_multiple(text.partition("=")[2])]
    run = compose_or_error(others)
    return texts if isinstance(run, ConfigError) else tuple(text for text in texts if not is_unread(run, key_of(text)))


def multiply_out(combinations: Sequence[tuple[str, ...]], relative: Collection[str]) -> list[tuple[str, ...]]:
    """The overrides of each trial, with numbers in place of multiples for the keys in `relative`.

    A number given for such a key is the base of the multiples, which replace it.
    """
    if not relative:
        return list(combinations)

    def is_multiple(text: str) -> bool:
        return key_of(text) in relative and parse_multiple(text.partition("=")[2]) is not None

    runs = [compose_or_error([text for text in texts if not is_multiple(text)]) for texts in combinations]
    refuse(dict.fromkeys(problem for run in runs if isinstance(run, ConfigError) for problem in run.problems))
    found = []
    for texts, run in zip(combinations, runs, strict=True):
        assert isinstance(run, RunConfig)
        multiples = {key_of(text) for text in texts if is_multiple(text)}
        remaining = [text for text in texts if is_multiple(text) or key_of(text) not in multiples]
        found.append(tuple(_multiplied(text, run) if is_multiple(text) else text for text in remaining))
    return found


def _multiplied(text: str, run: RunConfig) -> str:
    key, _, multiple = text.partition("=")
    base, factor = value_in(run, key), parse_multiple(multiple)
    if not isinstance(base, int | float) or factor is None:
        raise ConfigError(
            f"{text}: {key} has no number in this run that could be multiplied. Give numbers in sweep.space.{key}."
        )
    if number_type(field_types(RunConfig)[key]) is int:
        return f"{key}={max(1, round(base * factor))}"
    return f"{key}={base * factor:.{_SIGNIFICANT_DIGITS}g}"


def _as_typed(key: str, given: Any) -> str:
    return f"sweep.space.{key}={format_value(given)}"


def _setting(key: str, given: Any) -> Setting:
    if not isinstance(given, list) or not given:
        raise ConfigError(f"{_as_typed(key, given)}: expected values, [a, b], or a range, {{low: 1, high: 2}}.")
    factors = [parse_multiple(value) for value in given]
    is_relative = any(factor is not None for factor in factors)
    settings, problems = settings_of([f"{key}={','.join(map(_as_override_value, given))}"])
    if is_relative:
        _number_type(key, given)
        if not all(factors):
            problems.append(f"{_as_typed(key, given)}: multiples (0.5x, above 0) and values do not go together.")
    elif settings:
        problems += _override_problems(settings[0].texts)
    refuse(problems)
    return replace(settings[0], is_relative=is_relative)


def _override_problems(texts: Sequence[str]) -> list[str]:
    return [problem for several in wrong_overrides(texts).values() for problem in several]


def _number_type(key: str, given: Any) -> type[int] | type[float]:
    """int or float for a key, which must take numbers."""
    kind = field_types(RunConfig).get(key)
    if kind is None and key not in choices_by_group():
        raise ConfigError(_override_problems([f"{key}=1"]))
    found = number_type(kind)
    if found is None:
        raise ConfigError(f"{_as_typed(key, given)}: {key} takes no numbers. Give a list of values.")
    return found


def _range(key: str, given: Mapping[str, Any]) -> Range:
    typed = _as_typed(key, given)
    takes_whole = _number_type(key, given) is int
    if not {"low", "high"} <= given.keys() <= {"low", "high", "log", "step"}:
        raise ConfigError(f"{typed}: expected low: and high:, with log: true or step: if wanted.")
    multiples = parse_multiple(given["low"]), parse_multiple(given["high"])
    is_relative = any(multiples)
    low, high = multiples if is_relative else (as_number(given["low"]), as_number(given["high"]))
    log, step = bool(given.get("log")), as_number(given.get("step"))
    if low is None or high is None or not math.isfinite(high - low):
        raise ConfigError(
            f"{typed}: low and high must be numbers, or both multiples of the run's own value, such as 0.1x and 10x."
        )
    is_whole = takes_whole and not is_relative
    faults = {
        "low must be below high.": low >= high,
        "low must be above 0 for log.": log and low <= 0,
        "log must be true or false.": not isinstance(given.get("log", False), bool),
        "step must be a number above 0, and does not go with log.": "step" in given and (log or not step or step < 0),
        "expected whole numbers.": is_whole and any(each % 1 for each in (low, high, step or 0)),
    }
    refuse(f"{typed}: {fault}" for fault, is_there in faults.items() if is_there)
    return Range(key, low, high, log, step, is_whole=is_whole, is_relative=is_relative)


def _as_override_value(value: Any) -> str:
    """A value in Hydra's override grammar."""
    if isinstance(value, list):
        return f"[{','.join(map(_as_override_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}: {_as_override_value(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, str) and not _UNQUOTED.fullmatch(value):
        quoted: str = QuotedString(value, Quote.single).with_quotes()
        return quoted
    return format_value(value)
