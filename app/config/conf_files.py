"""YAML files: untrusted files as plain data, and conf/, whose listing defines the groups and choices."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader
from yaml import AliasEvent, YAMLError, load

import app
from app.errors import ConfigError

MAX_BYTES, _MAX_DEPTH = 1 << 20, 32
_REFERENCE = re.compile(r"(\\*)\$\{")


def read_yaml(file: Path) -> Any:
    """Return the plain data of a YAML file; raise ValueError if it is too large, and YAMLError for aliases."""
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES >> 20} MB")
    return load(file.read_text(encoding="utf-8"), _FlatLoader)


class _FlatLoader(get_yaml_loader()):  # type: ignore[misc]
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.depth > _MAX_DEPTH or self.check_event(AliasEvent):
            raise YAMLError("it has an alias or is nested too deep")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def to_yaml(data: Mapping[str, Any]) -> str:
    """Format plain data as YAML for `read_yaml`."""
    return OmegaConf.to_yaml(OmegaConf.create(literal(data)), resolve=True)


def literal(value: Any) -> Any:
    """Return the data with each `${` escaped, so that OmegaConf does not interpolate it."""
    if isinstance(value, Mapping):
        return {key: literal(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [literal(inner) for inner in value]
    return _REFERENCE.sub(r"\1\1\\${", value) if isinstance(value, str) else value


def as_number(value: Any) -> float | None:
    """Convert a YAML value to a number, including 1e-5, which YAML reads as text; None for other values."""
    try:
        return None if isinstance(value, bool | None) else float(value)
    except (TypeError, ValueError):
        return None


# ---- groups


_INSTALLED = Path(app.__file__).parent / "conf"  # in a wheel
_CHECKOUT = Path(app.__file__).parent.parent / "conf"
CONF = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT


def choices_by_group() -> dict[str, tuple[str, ...]]:
    """Return the choices of each group; files that start with `_` are parts of others."""
    return _choices_in(CONF)


@cache
def _choices_in(conf: Path) -> dict[str, tuple[str, ...]]:
    return {
        folder.name: tuple(sorted(f.stem for f in folder.glob("*.yaml") if not f.stem.startswith("_")))
        for folder in sorted(conf.iterdir())
        if folder.is_dir()
    }


@cache
def purpose_of(group: str, name: str) -> str:
    """Return the comment on the first line of a choice's file, without its example command."""
    lines = (CONF / group / f"{name}.yaml").read_text("utf-8").splitlines()
    comment = next(line for line in lines if line.startswith("# ") and "@package" not in line)
    return comment[2:].partition("finetune ")[0].rstrip(" :.")


def read_choice(group: str, name: str) -> dict[str, Any]:
    """Return the content of a choice's file without composing it."""
    file = CONF / group / f"{name}.yaml"
    try:
        facts = yaml.safe_load(file.read_text("utf-8"))
    except yaml.YAMLError as fault:
        raise ConfigError(f"{file}: {' '.join(str(fault).split())}") from fault
    if not isinstance(facts, dict):
        raise ConfigError(f"{file}: expected keys and values, as in the other files of the folder.")
    return facts
