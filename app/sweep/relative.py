"""`0.5x`: half of what a key has in the run without the sweep, which recipe, model and the other settings decide."""

from collections.abc import Collection, Sequence
from dataclasses import is_dataclass
from typing import Any

from app.config.load import compose_runs
from app.config.schema import RunConfig
from app.config.validate import kinds, number_type
from app.errors import ConfigError
from app.sweep.space import times
from app.sweep.trial import key_of

_DIGITS = 4


def settled(
    combinations: Sequence[Sequence[str]], relative: Collection[str], extra: Sequence[str] = ()
) -> list[tuple[str, ...]]:
    """The overrides of each trial, with numbers in place of the multiples that the keys `relative` have."""
    if not relative:
        return [tuple(texts) for texts in combinations]
    others = [tuple(text for text in texts if not _is_multiple(text, relative)) for texts in combinations]
    distinct = list(dict.fromkeys(others))
    runs = dict(zip(distinct, runs_of([(*texts, *extra) for texts in distinct]), strict=True))
    return [_settled(texts, runs[rest], relative) for texts, rest in zip(combinations, others, strict=True)]


def runs_of(commands: Sequence[Sequence[str]]) -> list[RunConfig]:
    """The runs; one ConfigError with everything that is wrong with them."""
    runs: list[RunConfig] = []
    problems: list[str] = []
    for run in compose_runs(commands):
        if isinstance(run, ConfigError):
            problems += run.problems
        else:
            runs.append(run)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return runs


def value_in(run: RunConfig, key: str) -> Any:
    """What a run has at a dotted key; of a group, the kind."""
    value: Any = run
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return getattr(value, "kind", None) if is_dataclass(value) else value


def _is_multiple(text: str, relative: Collection[str]) -> bool:
    return key_of(text) in relative and times(text.partition("=")[2]) is not None


def _settled(texts: Sequence[str], run: RunConfig, relative: Collection[str]) -> tuple[str, ...]:
    """A number that the user gave for the key is what the multiples were of; it has had its time."""
    multiples = {key_of(text) for text in texts if _is_multiple(text, relative)}
    kept = [text for text in texts if _is_multiple(text, relative) or key_of(text) not in multiples]
    return tuple(_number(text, run) if key_of(text) in multiples else text for text in kept)


def _number(text: str, run: RunConfig) -> str:
    key, _, multiple = text.partition("=")
    base, factor = value_in(run, key), times(multiple)
    if isinstance(base, bool) or not isinstance(base, int | float) or factor is None:
        raise ConfigError(
            f"{text}: {key} has no number in this run that could be multiplied. Give numbers in sweep.space.{key}."
        )
    if number_type(kinds(RunConfig)[key]) is int:
        return f"{key}={max(1, round(base * factor))}"
    return f"{key}={base * factor:.{_DIGITS}g}"
