"""The command line, checked against conf/ and the schema before Hydra composes anything."""

from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from app.config.groups import choices_by_group
from app.config.strict import leaf_keys, unknown_key
from app.config.suggest import did_you_mean
from app.errors import ConfigError


def check_overrides(arguments: Sequence[str], schema: type) -> list[str]:
    """The overrides in a form that composes whatever the YAML has (`++`), or one ConfigError with every problem."""
    checked, problems = [], []
    parser = OverridesParser.create()
    for text in arguments:
        override = _parse(parser, text, problems)
        if override is None:
            continue
        found = list(_problems(override, schema))
        problems += found
        if not found:
            checked.append(_forced(override, text))
    if problems:
        raise ConfigError(problems)
    return checked


def _parse(parser: OverridesParser, text: str, problems: list[str]) -> Override | None:
    if "=" not in text and not text.startswith("~"):
        problems.append(f"{text!r} is not an override. Write key=value or group=choice.")
        return None
    try:
        return parser.parse_override(text)
    except HydraException as fault:
        problems.append(
            f"{text!r} cannot be read: {' '.join(str(fault).split())}. Quote values: key='\"...\"'."
        )
        return None


def _problems(override: Override, schema: type) -> Iterator[str]:
    key = override.key_or_group
    if _is_hydra(key):
        return
    if override.is_delete():
        yield f"~{key}: nothing can be taken out of a run. Set {key}=none or {key}=null."
    elif key in choices_by_group():
        yield from _wrong_choices(key, override)
    else:
        problem = unknown_key(schema, key)
        if problem:
            yield problem + _near_group(key, schema)


def _wrong_choices(group: str, override: Override) -> Iterator[str]:
    names = choices_by_group()[group]
    for value in _values(override):
        if value is None and group in _OPTIONAL_GROUPS:
            continue
        if value not in names:
            yield f"{group}={value}: there is no such {group}.{did_you_mean(str(value), names)}" + _listing(
                names
            )


_OPTIONAL_GROUPS = ("experiment", "debug")


def _listing(names: tuple[str, ...]) -> str:
    return f" ({', '.join(names)})" if names else ""


def _near_group(key: str, schema: type) -> str:
    if "." in key:
        return ""
    groups = [name for name in choices_by_group() if did_you_mean(key, [name]).startswith(" Did")]
    return f" Or the group {groups[0]}?" if groups and groups[0] not in set(leaf_keys(schema)) else ""


def _values(override: Override) -> list[Any]:
    return list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]


def _forced(override: Override, text: str) -> str:
    key = override.key_or_group
    if _is_hydra(key) or key in choices_by_group():
        return text
    return f"++{text.lstrip('+')}"


def _is_hydra(key: str) -> bool:
    return key == "hydra" or key.startswith(("hydra.", "hydra/"))
