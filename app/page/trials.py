"""The trials of a sweep as sweep.json has them, without trust in what it says."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.page.figures import number


@dataclass(frozen=True, slots=True)
class KeptTrial:
    """`values` are the swept settings, by key."""

    number: int
    folder: Path
    status: str
    objective: float | None
    steps: float | None
    tokens_per_second: float | None
    seconds: float | None
    values: Mapping[str, str]
    overrides: tuple[str, ...]
    error: str | None


@dataclass(frozen=True, slots=True)
class KeptSweep:
    """`trials` in the order of the file."""

    folder: Path
    command: tuple[str, ...]
    trials: tuple[KeptTrial, ...]

    @property
    def keys(self) -> list[str]:
        """Of the swept settings."""
        return list(dict.fromkeys(key for trial in self.trials for key in trial.values))

    def ranked(self) -> list[KeptTrial]:
        """The lowest objective first; those that have none last."""
        return sorted(
            self.trials, key=lambda each: (each.objective is None, each.objective or 0.0, each.number)
        )

    def best(self) -> KeptTrial | None:
        """Of those that finished, as the sweep itself says it."""
        return next(
            (each for each in self.ranked()[:1] if each.status == "finished" and each.objective is not None),
            None,
        )


def read_sweep(folder: Path) -> KeptSweep | None:
    """None where there is no sweep.json, or none that can be read."""
    try:
        values = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(values, dict):
        return None
    trials = [_trial(folder, each) for each in _list(values.get("trials")) if isinstance(each, dict)]
    return KeptSweep(folder, _texts(values.get("command")), tuple(trials))


def _trial(folder: Path, told: Mapping[str, Any]) -> KeptTrial:
    """Its folder lies in that of the sweep, wherever that was moved to."""
    settings = [text.lstrip("+").partition("=") for text in _texts(told.get("swept"))]
    return KeptTrial(
        number=int(number(told.get("number")) or 0),
        folder=folder / Path(str(told.get("folder") or "-")).name,
        status=str(told.get("status")),
        objective=number(told.get("objective")),
        steps=number(told.get("steps")),
        tokens_per_second=number(told.get("tokens_per_second")),
        seconds=number(told.get("seconds")),
        values={key: value for key, _, value in settings},
        overrides=_texts(told.get("overrides")),
        error=None if told.get("error") is None else str(told["error"]),
    )


def as_numbers(texts: Sequence[str]) -> list[float] | None:
    """All of them, if all are numbers."""
    try:
        found = [number(float(text)) for text in texts]
    except ValueError:
        return None
    known = [each for each in found if each is not None]
    return known if len(known) == len(texts) and known else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(each) for each in _list(value))
