"""The folder conf/ with its groups and choices. Its listing is the only list of their names."""

from functools import cache
from pathlib import Path

import app

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
