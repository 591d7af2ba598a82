"""`sweep=NAME` and `sweep.KEY=VALUE`: a file of conf/sweep and what the command line changes of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from app.config import groups
from app.config.did_you_mean import did_you_mean
from app.config.schema import choice, number
from app.config.validate import typed
from app.errors import ConfigError
from app.sweep.expansion import MOST_TRIALS
from app.sweep.trial import key_of

GROUP = "sweep"
_SPACE = f"{GROUP}.space."


@dataclass(kw_only=True, slots=True)
class SweepConfig:
    """What a file of conf/sweep says. `trials` and `seed` are those of a search: a grid has as many as it has."""

    proposer: str = choice("grid", "tpe")
    space: dict[str, Any] = field(default_factory=dict)
    trials: int | None = number(None, at_least=1, at_most=MOST_TRIALS)
    seed: int | None = number(None, at_least=0, at_most=2**32 - 1)


@dataclass(frozen=True, slots=True)
class Preset:
    """`given` are the keys of its space that the command line names; the name is empty without `sweep=`."""

    name: str
    config: SweepConfig
    given: frozenset[str] = frozenset()


NO_PRESET = Preset("", SweepConfig(proposer="grid"))


@dataclass(kw_only=True, slots=True)
class _Root:
    """So that messages name the keys as they are typed."""

    sweep: SweepConfig = field(default_factory=SweepConfig)


def is_of_the_sweep(text: str) -> bool:
    """Whether an override is about the sweep and not about its trials."""
    key = key_of(text)
    return key == GROUP or key.startswith(f"{GROUP}.")


def read_preset(words: Sequence[str]) -> Preset:
    """From the overrides that are of the sweep; one ConfigError with all that is wrong with them."""
    overrides = _parsed(words)
    if not overrides:
        return NO_PRESET
    name = _name(overrides)
    changes = {o.key_or_group: o.value() for o in overrides if o.key_or_group != GROUP}
    data = _from_file(name)
    for key, value in changes.items():
        _put(data, key, value)
    config = typed(_Root, {GROUP: data}).sweep
    _require_budget(name, config)
    spaces = frozenset(key.removeprefix(_SPACE) for key in changes if key.startswith(_SPACE))
    return Preset(name, config, spaces & config.space.keys())


def _parsed(words: Sequence[str]) -> list[Override]:
    parse = OverridesParser.create().parse_override
    found: list[Override] = []
    problems: list[str] = []
    for text in words:
        try:
            override = parse(text)
        except HydraException as fault:
            problems.append(f"{text!r} cannot be read: {' '.join(str(fault).splitlines()[0].split())}.")
            continue
        key = override.key_or_group
        if override.is_delete():
            problems.append(f"{text}: leave the setting out instead.")
        elif override.is_sweep_override():
            given = text.partition("=")[2]
            meant = f" Write {key}=[{given}]." if key.startswith(_SPACE) else ""
            problems.append(f"{text}: a sweep has one {key}.{meant}")
        found.append(override)
    if problems:
        raise ConfigError(problems)
    return found


def _name(overrides: Sequence[Override]) -> str:
    names = groups.choices_by_group()[GROUP]
    given = [o.value() for o in overrides if o.key_or_group == GROUP]
    if not given:
        raise ConfigError(
            f"{overrides[0].key_or_group} needs sweep=..., which it changes. Choose one of {', '.join(names)}."
        )
    name = given[-1]
    if name not in names:
        near = did_you_mean(str(name), names).partition(" Known")[0]
        raise ConfigError(
            f"sweep={name}: there is no such sweep.{near} Choose one of {', '.join(names)}; "
            "values of your own need no name: optimizer.lr=1e-3,3e-4."
        )
    return str(name)


def _from_file(name: str) -> dict[str, Any]:
    file = groups.CONF / GROUP / f"{name}.yaml"
    try:
        data = yaml.safe_load(file.read_text("utf-8"))
    except yaml.YAMLError as fault:
        raise ConfigError(f"{file}: {' '.join(str(fault).split())}") from fault
    if not isinstance(data, dict) or not isinstance(data.get("space", {}), dict):
        raise ConfigError(f"{file}: expected proposer: and space:, as in the other files of the folder.")
    return {**data, "space": dict(data.get("space", {}))}


def _require_budget(name: str, config: SweepConfig) -> None:
    """A search needs a number of trials, and a grid has its own."""
    if config.proposer == "tpe":
        config.seed = config.seed or 0
        if config.trials is None:
            raise ConfigError(f"{GROUP}.trials has no value. Give {GROUP}.trials=12.")
        return
    idle = [f"{GROUP}.{key}" for key in ("trials", "seed") if getattr(config, key) is not None]
    if idle:
        raise ConfigError(
            f"{' and '.join(idle)}: sweep={name} has a trial for each of its values. "
            "Leave that out, or choose sweep=optuna."
        )


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    """As the command line says it; null takes a key out of the space."""
    if key.startswith(_SPACE):
        data["space"].pop(key.removeprefix(_SPACE), None)
        if value is not None:
            data["space"][key.removeprefix(_SPACE)] = value
    elif key == f"{GROUP}.space" and not isinstance(value, Mapping):
        raise ConfigError(f"{key}={value}: give its keys, such as {_SPACE}optimizer.lr=[1e-3, 3e-4].")
    elif key == f"{GROUP}.space":
        data["space"] = dict(value)
    else:
        data[key.removeprefix(f"{GROUP}.")] = value
