"""Sweep presets: `sweep=NAME`, a file of conf/sweep, with the changes of `sweep.KEY=VALUE`."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from app.config import groups
from app.config.did_you_mean import did_you_mean
from app.config.fields import SECTIONS, choice, number
from app.config.overrides import parse_override
from app.config.schema import RunConfig
from app.config.unread_keys import is_unread, readers_of
from app.config.validate import format_value, parse_section
from app.errors import ConfigError, refuse
from app.sweeps.grid import MAX_TRIALS, Setting, too_many
from app.sweeps.search_space import Dimension, Range, as_read, compose_or_error, value_in
from app.sweeps.trials import key_of

GROUP = "sweep"
_SPACE = f"{GROUP}.space."
_OF_SEARCH = (f"{GROUP}.trials", f"{GROUP}.seed")
_OF_LADDER = f"{GROUP}.size"


@dataclass(kw_only=True, slots=True)
class Rung:
    """A rung of a ladder: what it changes, or the `reason` why it is not run; the figures that its source claims."""

    overrides: list[str] = field(default_factory=list)
    reason: str | None = None
    claimed: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class SweepConfig:
    """A file of conf/sweep. `trials` and `seed` are for a search: a grid has its own number of trials.

    A ladder has no space, but `base`, `rungs` and, for `size=small`, `small`: overrides, of which later ones win. One
    that is `planned` is for app.check memory alone.
    """

    proposer: str = choice("grid", "tpe", "rungs")
    space: dict[str, Any] = field(default_factory=dict)
    trials: int = number(12, at_least=1, at_most=MAX_TRIALS)
    seed: int = number(0, at_least=0, at_most=2**32 - 1)
    size: str = choice("full", "small", default="full")
    source: str = ""  # of the claimed figures, with its hardware
    base: list[str] = field(default_factory=list)
    small: list[str] = field(default_factory=list)
    rungs: dict[str, Any] = field(default_factory=dict, metadata={SECTIONS: Rung})
    planned: bool = False


@dataclass(frozen=True, slots=True)
class Preset:
    """A preset by its name, which is empty without `sweep=`."""

    name: str
    config: SweepConfig


NO_PRESET = Preset("", SweepConfig(proposer="grid"))


def is_sweep_key(text: str) -> bool:
    """Whether an override is for the sweep, not for its trials."""
    return key_of(text).partition(".")[0] == GROUP


def read_preset(words: Sequence[str]) -> Preset:
    """Read the overrides of the sweep; one ConfigError has all their problems."""
    overrides = _parsed(words)
    if not overrides:
        return NO_PRESET
    name = _name(overrides)
    data = groups.read_choice(GROUP, name)
    changes = {each.key_or_group: each.value() for each in overrides if each.key_or_group != GROUP}
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
            f"{key}: sweep={name} has rungs, which its file names. Leave it out; {_OF_LADDER}=small makes them small."
            for key in changes
            if key != _OF_LADDER
        )
    elif _OF_LADDER in changes:
        raise ConfigError(f"{_OF_LADDER} is of rungs, and sweep={name} has none. Leave it out.")
    if config.proposer == "grid" and not changes.keys().isdisjoint(_OF_SEARCH):
        raise ConfigError(
            f"{' and '.join(_OF_SEARCH)} are of a search: sweep={name} has a trial for each of its values. "
            "Leave them out, or choose sweep=optuna."
        )
    return Preset(name, config)


def dimensions_of(
    preset: Preset, space: Sequence[Dimension], settings: Sequence[Setting], extra: Sequence[str]
) -> tuple[list[Dimension], list[str]]:
    """The settings, then the dimensions of the preset; and messages about the latter.

    The command line wins: the preset does not vary a given key, except by multiples of the given value.
    """
    given = {setting.key: setting for setting in settings}
    candidates = [
        each for each in space if each.key not in given or (each.is_relative and not given[each.key].is_swept)
    ]
    unused = _unused(candidates, settings, extra)
    varied = [each for each in candidates if each.key not in unused]
    if preset.name and not varied:
        reasons = {each.key: "is given" for each in space} | unused
        why = "; ".join(f"{key} {reason}" for key, reason in reasons.items())
        raise ConfigError(f"sweep={preset.name} has nothing to vary: {why or 'its space is empty'}.")
    if preset.config.proposer == "grid":
        refuse(too_many([*settings, *(each for each in varied if isinstance(each, Setting))]))
    lines = [*map(_describe, varied), *(f"not {key}: it {reason}" for key, reason in unused.items())]
    return [*settings, *varied], [f"{'' if i else 'varied':8}{line}" for i, line in enumerate(lines)]


def _parsed(words: Sequence[str]) -> list[Override]:
    found: list[Override] = []
    problems: list[str] = []
    for text in words:
        try:
            found.append(override := parse_override(text))
        except HydraException as fault:
            problems.append(f"{text!r} cannot be read: {' '.join(str(fault).splitlines()[0].split())}.")
            continue
        key, given = override.key_or_group, text.partition("=")[2]
        if override.is_sweep_override():
            meant = f" Write {key}=[{given}]." if key.startswith(_SPACE) else ""
            problems.append(f"{text}: a sweep has one {key}.{meant}")
    refuse(problems)
    return found


def _name(overrides: Sequence[Override]) -> str:
    names = groups.choices_by_group()[GROUP]
    given = [each.value() for each in overrides if each.key_or_group == GROUP]
    if not given:
        raise ConfigError(
            f"{overrides[0].key_or_group} needs sweep=..., which it changes. Choose one of {', '.join(names)}."
        )
    if given[-1] not in names:
        near = did_you_mean(str(given[-1]), names).partition(" Known")[0]
        raise ConfigError(
            f"sweep={format_value(given[-1])}: there is no such sweep.{near} Choose one of {', '.join(names)}; "
            "values of your own need no name: optimizer.lr=1e-3,3e-4."
        )
    return str(given[-1])


def _unused(space: Sequence[Dimension], settings: Sequence[Setting], extra: Sequence[str]) -> dict[str, str]:
    """Keys that no trial reads, such as those of the adapter in full fine-tuning, with the reason."""
    keys = [each.key for each in space if readers_of(each.key)]
    combinations = as_read(itertools.product(*(setting.texts for setting in settings)), settings) if keys else ()
    runs = [run for texts in combinations if isinstance(run := compose_or_error((*texts, *extra)), RunConfig)]
    sections = {key: key.partition(".")[0] for key in keys if runs and all(is_unread(run, key) for run in runs)}
    return {key: f"changes nothing with {each}.kind={value_in(runs[0], each)}" for key, each in sections.items()}


def _describe(dimension: Dimension) -> str:
    texts = [text.partition("=")[2] for text in dimension.texts]
    if isinstance(dimension, Range):
        return f"{dimension.key} from {' to '.join(texts)}{', log' if dimension.log else ''}"
    return f"{dimension.key} {' '.join(texts)}"
