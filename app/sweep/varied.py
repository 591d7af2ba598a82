"""What the trials of a sweep differ in: the settings of the command line, and the space of a preset."""

import itertools
import math
from collections.abc import Sequence

from app.config.groups import choices_by_group
from app.config.load import compose_runs
from app.config.schema import RunConfig
from app.errors import ConfigError
from app.sweep.expansion import Setting, too_many
from app.sweep.preset import Preset
from app.sweep.relative import value_in
from app.sweep.space import Dimension, Range


def dimensions_of(
    preset: Preset, space: Sequence[Dimension], settings: Sequence[Setting], extra: Sequence[str]
) -> tuple[list[Dimension], list[str]]:
    """The settings first, then what is left of the preset's space; and what is said of it on the screen.

    The command line wins: a key that it gives is not varied by the preset, unless by multiples of what is given.
    """
    given = {setting.key: setting for setting in settings}
    kept = [
        each for each in space if each.key not in given or (each.is_relative and not given[each.key].is_swept)
    ]
    off = _off(kept, settings, extra)
    idle = {
        key: where[0] for key, where in off.items() if len(where) == math.prod(len(s.texts) for s in settings)
    }
    varied = [each for each in kept if each.key not in idle]
    _require_use(preset, space, varied, idle)
    if preset.config.proposer == "grid":
        _require_different_trials(varied, off)
    dimensions: list[Dimension] = [*settings, *varied]
    many = list(too_many([each for each in dimensions if isinstance(each, Setting)]))
    if many and preset.config.proposer == "grid":
        raise ConfigError(many)
    lines = [*map(_shown, varied), *(f"not {key}: {reason}" for key, reason in idle.items())]
    return dimensions, [f"{'' if number else 'varied':8}{line}" for number, line in enumerate(lines)]


def _off(
    space: Sequence[Dimension], settings: Sequence[Setting], extra: Sequence[str]
) -> dict[str, list[str]]:
    """Keys of sections that are off in some trials, such as those of the adapter in a full fine-tuning; each with what
    it says of these, once for each combination of the settings."""
    choices = choices_by_group()
    sections = {
        each.key: each.key.partition(".")[0]
        for each in space
        if "." in each.key and "none" in choices.get(each.key.partition(".")[0], ())
    }
    if not sections:
        return {}
    combinations = list(itertools.product(*(setting.texts for setting in settings)))
    runs = list(compose_runs([(*texts, *extra) for texts in combinations]))
    return {
        key: [
            f"it changes nothing with {section}.kind=none"
            for run in runs
            if isinstance(run, RunConfig) and value_in(run, section) == "none"
        ]
        for key, section in sections.items()
    }


def _require_different_trials(varied: Sequence[Dimension], off: dict[str, list[str]]) -> None:
    problems = [
        f"sweep.space.{each.key}: in some trials {off[each.key][0]}, so they would be the same run. Sweep them apart."
        for each in varied
        if off.get(each.key)
    ]
    if problems:
        raise ConfigError(problems)


def _require_use(
    preset: Preset, space: Sequence[Dimension], varied: Sequence[Dimension], idle: dict[str, str]
) -> None:
    """Nothing that was asked for is left out in silence."""
    problems = [
        f"sweep.space.{key}: {idle[key]}. Leave it out." for key in sorted(preset.given & idle.keys())
    ]
    if preset.name and not varied and not problems:
        reasons = [f"{key} {reason}" for key, reason in _reasons(space, idle)] or ["its space is empty"]
        problems.append(f"sweep={preset.name} has nothing to vary: {'; '.join(reasons)}.")
    if problems:
        raise ConfigError(problems)


def _reasons(space: Sequence[Dimension], idle: dict[str, str]) -> list[tuple[str, str]]:
    given = "is given, and what is given wins"
    return [(each.key, idle[each.key].removeprefix("it ") if each.key in idle else given) for each in space]


def _shown(dimension: Dimension) -> str:
    if isinstance(dimension, Range):
        low, high = (text.partition("=")[2] for text in dimension.texts)
        return f"{dimension.key} from {low} to {high}{', log' if dimension.log else ''}"
    return f"{dimension.key} {' '.join(text.partition('=')[2] for text in dimension.texts)}"
