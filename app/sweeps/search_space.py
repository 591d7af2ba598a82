"""Search space of a sweep: presets of conf/sweep, values in Hydra's grammar, ranges and multiples, and their grid."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, Quote, QuotedString, RangeSweep, ValueType
from hydra.errors import HydraException

from app.config import conf_files
from app.config.conf_files import as_number, choices_by_group
from app.config.load import compose_run
from app.config.overrides import check_overrides, parse_override
from app.config.rules import is_unread, readers_of
from app.config.schema import RunConfig
from app.config.validate import (
    SECTIONS,
    choice,
    did_you_mean,
    field_types,
    format_value,
    number,
    number_type,
    parse_section,
)
from app.errors import ConfigError, refuse
from app.sweeps.trials import Outcome, Trial, key_of, name_of

MAX_TRIALS = 1000


@dataclass(frozen=True, slots=True)
class Setting:
    """A key with an override for each value.

    `is_relative`: the values are multiples, e.g. 0.5x, of the value without the sweep.
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
        """Return all trials: they depend only on the command."""
        return self.points

    def next(self, ended: Sequence[Outcome], /) -> Trial | None:
        return self.points[len(ended)] if len(ended) < self.count else None


def settings_of(overrides: Sequence[str]) -> tuple[list[Setting], list[str]]:
    """Return the settings in their order, and their problems."""
    settings: list[Setting] = []
    problems: list[str] = []
    for text in overrides:
        try:
            settings.append(_typed_setting(text))
        except ConfigError as problem:
            problems += problem.problems
    return settings, [*problems, *_duplicate_problems(settings), *too_many(settings)]


def wrong_overrides(texts: Iterable[str]) -> dict[str, Sequence[str]]:
    """Return the problems of single overrides, independent of other overrides."""
    problems: dict[str, Sequence[str]] = {}
    for text in dict.fromkeys(texts):
        try:
            check_overrides([text])
        except ConfigError as problem:
            problems[text] = problem.problems
    return problems


def too_many(settings: Sequence[Setting]) -> Iterator[str]:
    """Yield the problem of too many trials, before a mistake like range(1,1e9) fills the memory."""
    swept = [setting for setting in settings if setting.is_swept]
    if math.prod(len(setting.texts) for setting in swept) > MAX_TRIALS:
        keys = ", ".join(setting.key for setting in swept)
        yield f"{keys}: more than {MAX_TRIALS:,} trials in one sweep. Use fewer values."


def _duplicate_problems(settings: Sequence[Setting]) -> Iterator[str]:
    count = Counter(setting.key for setting in settings)
    for key in dict.fromkeys(setting.key for setting in settings if setting.is_swept):
        if count[key] > 1:
            yield f"{key} has several values and is set {count[key]} times. Set it once."


def _typed_setting(text: str) -> Setting:
    try:
        override = parse_override(text)
    except HydraException:  # text that needs quotes, or an error: the run validates it
        return Setting(key_of(text), (text,))
    _refuse(override, text)
    if not override.is_sweep_override():
        return Setting(override.key_or_group, (text,))
    values = _values(override, text)
    duplicates = [value for value, count in Counter(values).items() if count > 1]
    if duplicates:
        raise ConfigError(f"{text}: duplicate value {duplicates[0]}.")
    return Setting(override.key_or_group, tuple(f"{override.get_key_element()}={value}" for value in values))


def _refuse(override: Override, text: str) -> None:
    key, value = override.key_or_group, override.value()
    if key == "resume":
        reason = "a sweep resumes each trial from its own checkpoint. Remove it, or set resume=auto"
    elif key == "output_dir" and override.is_sweep_override():
        reason = "a sweep has one folder, with a subfolder for each trial. Set one folder"
    elif override.value_type == ValueType.INTERVAL_SWEEP:
        reason = (
            f"a grid needs a list of values, not an interval. Use {key}=1,2 or range(1,3); to search an interval: "
            f"sweep=optuna 'sweep.space.{key}={{low: ..., high: ...}}'"
        )
    elif isinstance(value, ChoiceSweep | RangeSweep) and value.shuffle:
        reason = "shuffle changes the order each time, so the sweep could not be resumed. Remove it"
    else:
        return
    raise ConfigError(f"{text}: {reason}.")


def _values(override: Override, text: str) -> list[str]:
    """Return the swept values as Hydra writes them, float ranges without rounding errors."""
    value = override.value()
    if isinstance(value, Glob):
        names = list(choices_by_group().get(override.key_or_group, ()))
        matches = value.filter(names)
        if not matches:
            raise ConfigError(f"{text}: glob selects files of a group, and none of {names} matches.")
        return matches
    if isinstance(value, RangeSweep):
        numbers = itertools.islice(override.sweep_iterator(), MAX_TRIALS + 1)
        return [f"{item:.12g}" if isinstance(item, float) else str(item) for item in numbers]
    return list(override.sweep_string_iterator())


# ---- search space


_MULTIPLE = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)x", re.IGNORECASE)
_UNQUOTED = re.compile(r"[A-Za-z0-9_./+-]+", re.ASCII)
_STEP_TOLERANCE = 1e-9  # fraction of a step
_SIGNIFICANT_DIGITS = 4  # in a proposed number


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, inclusive; multiples of the value of the run if `is_relative`."""

    key: str
    low: float
    high: float
    log: bool = False
    step: float | None = None
    is_whole: bool = False
    is_relative: bool = False

    is_swept = True

    def text(self, number: float) -> str:
        """Return the override with a number."""
        short = f"{number:g}"
        written = short if float(short) == number else repr(number)
        return f"{self.key}={written}{'x' if self.is_relative else ''}"

    @property
    def texts(self) -> tuple[str, ...]:
        """The overrides of both ends."""
        return self.text(self.low), self.text(self.high)

    @property
    def count(self) -> float:
        """Number of values; infinity for a continuous range."""
        step = self._step
        return math.inf if step is None else math.floor((self.high - self.low) / step + _STEP_TOLERANCE) + 1

    @property
    def _step(self) -> float | None:
        return self.step or (1 if self.is_whole else None)

    def number(self, place: float) -> float:
        """Return the number at an index of a range that is not continuous."""
        return self.rounded(self.low + place * (self._step or 0))

    def has(self, number: float) -> bool:
        """Return whether a number is in the range and on a step."""
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
    """Return 0.5 for `0.5x`; None for other values."""
    match = _MULTIPLE.fullmatch(value) if isinstance(value, str) else None
    return as_number(match[1]) if match else None


def dimensions_in(space: Mapping[str, Any]) -> tuple[list[Dimension], list[str]]:
    """Return the dimensions in the order of the space, and their problems."""
    dimensions: list[Dimension] = []
    problems: list[str] = []
    for key, values in space.items():
        try:
            dimensions.append(_range(key, values) if isinstance(values, Mapping) else _yaml_setting(key, values))
        except ConfigError as problem:
            problems += problem.problems
    return dimensions, problems


def corners(dimensions: Sequence[Dimension]) -> list[tuple[str, ...]]:
    """Return each value, or end of a range, with the first of the other dimensions and every choice of the groups."""
    groups = choices_by_group()
    firsts = itertools.product(
        *(dimension.texts if dimension.key in groups else dimension.texts[:1] for dimension in dimensions)
    )
    places = [(at, text) for at, dimension in enumerate(dimensions) for text in dimension.texts]
    return list(dict.fromkeys((*first[:at], text, *first[at + 1 :]) for first in firsts for at, text in places)) or [()]


def compose_or_error(overrides: Sequence[str]) -> RunConfig | ConfigError:
    """Return the run of the overrides, or its problems."""
    try:
        return compose_run(overrides)
    except ConfigError as problem:
        return problem


def value_in(run: RunConfig, key: str) -> Any:
    """Return the value of a run at a dotted key; for a section, its kind."""
    value: Any = run
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return getattr(value, "kind", None) if is_dataclass(value) else value


def as_read(combinations: Iterable[tuple[str, ...]], dimensions: Sequence[Dimension]) -> list[tuple[str, ...]]:
    """Return the different trials without the keys that their runs do not use.

    If no group is swept, all trials use the same keys, and an unused key is refused as in a run.
    """
    groups = choices_by_group()
    if not any(dimension.is_swept and dimension.key.removesuffix(".kind") in groups for dimension in dimensions):
        return list(combinations)
    return list(dict.fromkeys(map(without_unread, combinations)))


def without_unread(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the overrides of a trial without keys that its run does not use."""
    others = [text for text in texts if not readers_of(key_of(text)) and not parse_multiple(text.partition("=")[2])]
    run = compose_or_error(others)
    return texts if isinstance(run, ConfigError) else tuple(text for text in texts if not is_unread(run, key_of(text)))


def multiply_out(combinations: Sequence[tuple[str, ...]], relative: Collection[str]) -> list[tuple[str, ...]]:
    """Return the overrides of each trial, with numbers instead of multiples for the keys in `relative`.

    A number set for such a key is the base of the multiples, which replace it.
    """
    if not relative:
        return list(combinations)

    def is_multiple(text: str) -> bool:
        return key_of(text) in relative and parse_multiple(text.partition("=")[2]) is not None

    runs = [compose_or_error([text for text in texts if not is_multiple(text)]) for texts in combinations]
    refuse(dict.fromkeys(problem for run in runs if isinstance(run, ConfigError) for problem in run.problems))
    trials = []
    for texts, run in zip(combinations, runs, strict=True):
        assert isinstance(run, RunConfig)
        multiples = {key_of(text) for text in texts if is_multiple(text)}
        remaining = [text for text in texts if is_multiple(text) or key_of(text) not in multiples]
        trials.append(tuple(_multiplied(text, run) if is_multiple(text) else text for text in remaining))
    return trials


def _multiplied(text: str, run: RunConfig) -> str:
    key, _, multiple = text.partition("=")
    base, factor = value_in(run, key), parse_multiple(multiple)
    if not isinstance(base, int | float) or factor is None:
        raise ConfigError(
            f"{text}: {key} is not a number in this run, so it cannot be multiplied. Set numbers in sweep.space.{key}."
        )
    if number_type(field_types(RunConfig)[key]) is int:
        return f"{key}={max(1, round(base * factor))}"
    return f"{key}={base * factor:.{_SIGNIFICANT_DIGITS}g}"


def _as_typed(key: str, value: Any) -> str:
    return f"sweep.space.{key}={format_value(value)}"


def _yaml_setting(key: str, values: Any) -> Setting:
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{_as_typed(key, values)}: expected values, [a, b], or a range, {{low: 1, high: 2}}.")
    factors = [parse_multiple(value) for value in values]
    is_relative = any(factor is not None for factor in factors)
    settings, problems = settings_of([f"{key}={','.join(map(_as_override_value, values))}"])
    if is_relative:
        _number_type(key, values)
        if not all(factors):
            problems.append(f"{_as_typed(key, values)}: multiples (0.5x, above 0) and values cannot be mixed.")
    elif settings:
        problems += _override_problems(settings[0].texts)
    refuse(problems)
    return replace(settings[0], is_relative=is_relative)


def _override_problems(texts: Sequence[str]) -> list[str]:
    return [problem for several in wrong_overrides(texts).values() for problem in several]


def _number_type(key: str, value: Any) -> type[int] | type[float]:
    """Return int or float for a key; raise if it is not a number."""
    kind = field_types(RunConfig).get(key)
    if kind is None and key not in choices_by_group():
        raise ConfigError(_override_problems([f"{key}=1"]))
    type_ = number_type(kind)
    if type_ is None:
        raise ConfigError(f"{_as_typed(key, value)}: {key} is not a number. Set a list of values.")
    return type_


def _range(key: str, bounds: Mapping[str, Any]) -> Range:
    typed = _as_typed(key, bounds)
    takes_whole = _number_type(key, bounds) is int
    if not {"low", "high"} <= bounds.keys() <= {"low", "high", "log", "step"}:
        raise ConfigError(f"{typed}: expected low: and high:, optionally log: true or step:.")
    multiples = parse_multiple(bounds["low"]), parse_multiple(bounds["high"])
    is_relative = any(multiples)
    low, high = multiples if is_relative else (as_number(bounds["low"]), as_number(bounds["high"]))
    log, step = bool(bounds.get("log")), as_number(bounds.get("step"))
    if low is None or high is None or not math.isfinite(high - low):
        raise ConfigError(
            f"{typed}: low and high must be numbers, or both multiples of the value of the run, e.g. 0.1x and 10x."
        )
    is_whole = takes_whole and not is_relative
    faults = {
        "low must be below high.": low >= high,
        "low must be above 0 for log.": log and low <= 0,
        "log must be true or false.": not isinstance(bounds.get("log", False), bool),
        "step must be a number above 0, without log.": "step" in bounds and (log or not step or step < 0),
        "expected whole numbers.": is_whole and any(bound % 1 for bound in (low, high, step or 0)),
    }
    refuse(f"{typed}: {fault}" for fault, is_there in faults.items() if is_there)
    return Range(key, low, high, log, step, is_whole=is_whole, is_relative=is_relative)


def _as_override_value(value: Any) -> str:
    """Return a value in Hydra's override grammar."""
    if isinstance(value, list):
        return f"[{','.join(map(_as_override_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}: {_as_override_value(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, str) and not _UNQUOTED.fullmatch(value):
        quoted: str = QuotedString(value, Quote.single).with_quotes()
        return quoted
    return format_value(value)


# ---- preset


GROUP = "sweep"
_SPACE = f"{GROUP}.space."
_OF_SEARCH = (f"{GROUP}.trials", f"{GROUP}.seed")
_OF_LADDER = (f"{GROUP}.size", f"{GROUP}.repeats")


@dataclass(kw_only=True, slots=True)
class Rung:
    """A rung of a ladder: its overrides, or the `reason` why it is not run; the figures claimed by its source."""

    overrides: list[str] = field(default_factory=list)
    reason: str | None = None
    claimed: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class SweepConfig:
    """A file of conf/sweep. `trials` and `seed` are for a search: the values of a grid determine its trials.

    A ladder has no space, but overrides in `base`, `rungs` and `full` or `small`, by size: later ones win. It runs all
    rungs `repeats` times. A `planned` ladder is only for finetune check memory.
    """

    proposer: str = choice("grid", "tpe", "rungs")
    space: dict[str, Any] = field(default_factory=dict)
    trials: int = number(12, at_least=1, at_most=MAX_TRIALS)
    seed: int = number(0, at_least=0, at_most=2**32 - 1)
    size: str = choice("full", "small", default="full")
    repeats: int = number(2, at_least=1, at_most=10)  # of each rung
    source: str = ""  # source of the claimed figures, with its hardware
    base: list[str] = field(default_factory=list)
    full: list[str] = field(default_factory=list)
    small: list[str] = field(default_factory=list)
    rungs: dict[str, Any] = field(default_factory=dict, metadata={SECTIONS: Rung})
    planned: bool = False


@dataclass(frozen=True, slots=True)
class Preset:
    """A preset and its name, empty without `sweep=`."""

    name: str
    config: SweepConfig


NO_PRESET = Preset("", SweepConfig(proposer="grid"))


def is_sweep_key(text: str) -> bool:
    """Return whether an override is for the sweep, not for its trials."""
    return key_of(text).partition(".")[0] == GROUP


def read_preset(words: Sequence[str]) -> Preset:
    """Read the overrides of the sweep; report all problems in one ConfigError."""
    overrides = _parsed(words)
    if not overrides:
        return NO_PRESET
    name = _name(overrides)
    data = conf_files.read_choice(GROUP, name)
    changes = {override.key_or_group: override.value() for override in overrides if override.key_or_group != GROUP}
    whole = {key: value for key, value in changes.items() if not key.startswith(_SPACE)}
    data |= {
        key.removeprefix(f"{GROUP}."): dict(value) if isinstance(value, Mapping) else value
        for key, value in whole.items()
    }
    config = parse_section(SweepConfig, data, f"{GROUP}.")
    for key in changes.keys() - whole.keys():
        config.space.pop(key.removeprefix(_SPACE), None)  # null removes a key from the space
    config.space.update({k.removeprefix(_SPACE): v for k, v in changes.items() if k not in whole and v is not None})
    if config.proposer == "rungs":
        refuse(
            f"{key}: the rungs of sweep={name} are set in its file. Remove it; a ladder has {GROUP}.size=small and "
            f"{GROUP}.repeats."
            for key in changes
            if key not in _OF_LADDER
        )
    else:
        refuse(
            f"{key} is only for ladders, and sweep={name} has no rungs. Remove it."
            for key in _OF_LADDER
            if key in changes
        )
    if config.proposer == "grid" and not changes.keys().isdisjoint(_OF_SEARCH):
        raise ConfigError(
            f"{' and '.join(_OF_SEARCH)} are only for a search: sweep={name} runs a trial for each of its values. "
            "Remove them, or choose sweep=optuna."
        )
    return Preset(name, config)


def dimensions_of(
    preset: Preset, space: Sequence[Dimension], settings: Sequence[Setting], extra: Sequence[str]
) -> tuple[list[Dimension], list[str]]:
    """Return the settings, then the dimensions of the preset; and messages about the latter.

    The command line wins: the preset does not vary a key set there, except by multiples of its value.
    """
    fixed = {setting.key: setting for setting in settings}
    candidates = [
        dimension
        for dimension in space
        if dimension.key not in fixed or (dimension.is_relative and not fixed[dimension.key].is_swept)
    ]
    unused = _unused(candidates, settings, extra)
    varied = [dimension for dimension in candidates if dimension.key not in unused]
    if preset.name and not varied:
        reasons = {dimension.key: "is already set" for dimension in space} | unused
        why = "; ".join(f"{key} {reason}" for key, reason in reasons.items())
        raise ConfigError(f"sweep={preset.name} has nothing to vary: {why or 'its space is empty'}.")
    if preset.config.proposer == "grid":
        refuse(too_many([*settings, *(dimension for dimension in varied if isinstance(dimension, Setting))]))
    lines = [*map(_describe, varied), *(f"{key} is not varied: it {reason}" for key, reason in unused.items())]
    return [*settings, *varied], [f"{'' if i else 'varied':8}{line}" for i, line in enumerate(lines)]


def _parsed(words: Sequence[str]) -> list[Override]:
    parsed: list[Override] = []
    problems: list[str] = []
    for text in words:
        try:
            parsed.append(override := parse_override(text))
        except HydraException as fault:
            problems.append(f"{text!r} cannot be read: {' '.join(str(fault).splitlines()[0].split())}.")
            continue
        key, value = override.key_or_group, text.partition("=")[2]
        if override.is_sweep_override():
            fix = f" Use {key}=[{value}]." if key.startswith(_SPACE) else ""
            problems.append(f"{text}: {key} takes one value.{fix}")
    refuse(problems)
    return parsed


def _name(overrides: Sequence[Override]) -> str:
    names = conf_files.choices_by_group()[GROUP]
    chosen = [override.value() for override in overrides if override.key_or_group == GROUP]
    if not chosen:
        raise ConfigError(f"{overrides[0].key_or_group} also needs sweep=NAME. Choose one of {', '.join(names)}.")
    if chosen[-1] not in names:
        near = did_you_mean(str(chosen[-1]), names, listing=False)
        raise ConfigError(
            f"sweep={format_value(chosen[-1])}: unknown sweep.{near} Choose one of {', '.join(names)}; "
            "or list values without a name: optimizer.lr=1e-3,3e-4."
        )
    return str(chosen[-1])


def _unused(space: Sequence[Dimension], settings: Sequence[Setting], extra: Sequence[str]) -> dict[str, str]:
    """Return keys that no trial uses, such as adapter keys in full fine-tuning, with the reason."""
    keys = [dimension.key for dimension in space if readers_of(dimension.key)]
    combinations = as_read(itertools.product(*(setting.texts for setting in settings)), settings) if keys else ()
    runs = [run for texts in combinations if isinstance(run := compose_or_error((*texts, *extra)), RunConfig)]
    sections = {key: key.partition(".")[0] for key in keys if runs and all(is_unread(run, key) for run in runs)}
    return {key: f"has no effect with {section}.kind={value_in(runs[0], section)}" for key, section in sections.items()}


def _describe(dimension: Dimension) -> str:
    texts = [text.partition("=")[2] for text in dimension.texts]
    if isinstance(dimension, Range):
        return f"{dimension.key} from {' to '.join(texts)}{', log' if dimension.log else ''}"
    return f"{dimension.key} {' '.join(texts)}"
