"""The command line, checked against conf/ and the schema before Hydra composes anything."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from app.config.arguments import SWEEPS
from app.config.groups import choices_by_group
from app.config.strict import kinds, unknown_key
from app.config.suggest import did_you_mean, nearest
from app.config.values import is_optional, is_text, shown
from app.errors import ConfigError

_CAN_BE_ABSENT = ("experiment", "debug")  # groups without a choice unless one is made


def check_overrides(arguments: Sequence[str], schema: type) -> list[str]:
    """The overrides in a form that composes whatever the YAML has (`++`), or one ConfigError with every problem."""
    checked, problems = [], []
    parse = OverridesParser.create().parse_override
    for text in arguments:
        try:
            override = _parse(parse, text, schema)
        except ConfigError as problem:
            problems += problem.problems
            continue
        found = list(_problems(override, text, schema))
        problems += found
        if not found:
            checked.append(_composable(override, text, schema))
    if problems:
        raise ConfigError(problems)
    return checked


def _parse(parse: Callable[[str], Override], text: str, schema: type) -> Override:
    key, equals, value = text.partition("=")
    if text.startswith("~"):
        equals = "="
    if not equals or not key:
        raise ConfigError(f"{text!r} is not an override. Write key=value or group=choice.")
    try:
        return parse(text)
    except HydraException as fault:
        if _takes_text(key.lstrip("+"), schema) and _can_be_quoted(value):
            return parse(f'{key}="{value}"')
        reason = " ".join(str(fault).splitlines()[0].split())
        raise ConfigError(f"{text!r} cannot be read: {reason}. Quote the value: '{key}=\"...\"'.") from None


def _problems(override: Override, text: str, schema: type) -> Iterator[str]:
    key = override.key_or_group
    if _is_hydra(key):
        return
    if override.is_delete():
        yield f"{text}: nothing can be taken out of a run.{_instead_of_taking_out(key, schema)}"
    elif override.package is not None:
        yield f"{text}: {key} has one place in a run. Write {key}=..."
    elif key not in choices_by_group() and (problem := unknown_key(schema, key)):
        yield problem + _near_group(key)
    elif override.is_sweep_override():
        yield _no_sweep(key, text.partition("=")[2], schema)
    elif key in choices_by_group():
        yield from _wrong_choice(key, override.value())


def _instead_of_taking_out(key: str, schema: type) -> str:
    names = choices_by_group().get(key, ())
    if key in _CAN_BE_ABSENT or is_optional(kinds(schema).get(key)):
        return f" Set {key}=null."
    return f" Set {key}=none." if "none" in names else ""


def _no_sweep(key: str, value: str, schema: type) -> str:
    kind = kinds(schema).get(key)
    meant = ""
    if kind == list[str]:
        meant = f" For a list write {key}=[{value}]."
    elif key not in choices_by_group() and is_text(kind):
        meant = f" For text with a comma in it write '{key}=\"{value}\"'."
    return f"{key}={value}: {SWEEPS}{meant}"


def _wrong_choice(group: str, choice: Any) -> Iterator[str]:
    names = choices_by_group()[group]
    if choice in names or (choice is None and group in _CAN_BE_ABSENT):
        return
    near = nearest(shown(choice), names)
    meant = f" Did you mean {near}?" if near else ""
    yield f"{group}={shown(choice)}: there is no such {group}.{meant} Choose {' or '.join(names)}."


def _near_group(key: str) -> str:
    """For `modle=llama`, which is nearer to a group than to any key."""
    groups = {name for name in choices_by_group() if nearest(key, [name])} if "." not in key else ()
    near = nearest(key, groups)
    return f" Or the group {near}, with {' or '.join(choices_by_group()[near])}?" if near else ""


def _composable(override: Override, text: str, schema: type) -> str:
    """`++` sets a key whether or not the YAML has it; Hydra knows no such form for groups."""
    key = override.key_or_group
    if _is_hydra(key):
        return text
    bare = text.lstrip("+")
    if key in choices_by_group():
        return f"~{key}" if override.value() is None else bare
    value = bare.partition("=")[2]
    typed_as_text = isinstance(override.value(), int | float) or not _is_readable(override, value)
    if typed_as_text and _takes_text(key, schema) and _can_be_quoted(value):
        return f'++{key}="{value}"'  # `model.revision=12e4567` is no number
    return f"++{bare}"


def _is_readable(override: Override, value: str) -> bool:
    """False for a value that was quoted in order to be read."""
    return override.input_line is not None and override.input_line.partition("=")[2] == value


def _takes_text(key: str, schema: type) -> bool:
    return is_text(kinds(schema).get(key))


def _can_be_quoted(value: str) -> bool:
    return not any(sign in value for sign in "\"'\\,")


def _is_hydra(key: str) -> bool:
    return key == "hydra" or key.startswith(("hydra.", "hydra/"))
