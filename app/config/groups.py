"""The folder conf/ with its groups and choices. Its listing is the only list of their names."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

import app
from app.errors import ConfigError

_INSTALLED = Path(app.__file__).parent / "conf"  # in a wheel
_CHECKOUT = Path(app.__file__).parent.parent / "conf"
CONF = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT


def choices_by_group() -> dict[str, tuple[str, ...]]:
    """The names that can be chosen, by group; files that start with `_` are parts of others."""
    return _choices_in(CONF)


@cache
def _choices_in(conf: Path) -> dict[str, tuple[str, ...]]:
    return {
        folder.name: tuple(sorted(f.stem for f in folder.glob("*.yaml") if not f.stem.startswith("_")))
        for folder in sorted(conf.iterdir())
        if folder.is_dir()
    }


def read_choice(group: str, name: str) -> dict[str, Any]:
    """Content of the file of a choice, where Hydra does not compose it."""
    file = CONF / group / f"{name}.yaml"
    try:
        facts = yaml.safe_load(file.read_text("utf-8"))
    except yaml.YAMLError as fault:
        raise ConfigError(f"{file}: {' '.join(str(fault).split())}") from fault
    if not isinstance(facts, dict):
        raise ConfigError(f"{file}: expected names and values, as in the other files of the folder.")
    return facts
