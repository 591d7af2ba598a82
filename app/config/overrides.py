"""The command line, checked against conf/ and the schema before Hydra composes anything."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from app.config.groups import choices_by_group
from app.config.strict import is_key, kinds
from app.config.suggest import did_you_mean_key, nearest, nearest_keys
from app.config.values import is_optional, is_text, shown
from app.errors import ConfigError

_CAN_BE_ABSENT = ("experiment", "debug")  # groups without a choice unless one is made


def check_overrides(arguments: Sequence[str], schema: type) -> list[str]:
    """The overrides in a form that composes whatever the YAML has (`++`), or one ConfigError with every problem."""
    checked, problems = sort_overrides(arguments, schema)
    if problems:
        raise ConfigError(problems)
    return checked


def sort_overrides(arguments: Sequence[str], schema: type) -> tuple[list[str], list[str]]:
    """Those that can be composed, as above, and what is wrong with the others."""
    checked: list[str] = []
    problems: list[str] = []
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
            checked.append(_composable(override, schema))
    return checked, problems


def _parse(parse: Callable[[str], Override], text: str, schema: type) -> Override:
    key, equals, value = text.partition("=")
    if text.startswith("~"):
        equals = "="
    if not equals or not key:
        meant = f" Did you mean run={text}?" if _is_run(text, schema) else ""
        raise ConfigError(f"{text!r} is not an override. Write key=value or group=choice.{meant}")
    try:
        return parse(text)
    except HydraException as fault:
        if _takes_text(key.lstrip("+"), schema) and _can_be_quoted(value):
            return parse(f'{key}="{value}"')
        reason = " ".join(str(fault).splitlines()[0].split())
        raise ConfigError(f"{text!r} cannot be read: {reason}. Quote the value: '{key}=\"...\"'.") from None


def _is_run(text: str, schema: type) -> bool:
    """A folder, where the command is about one."""
    return "run" in kinds(schema) and Path(text).expanduser().is_dir()


def _problems(override: Override, text: str, schema: type) -> Iterator[str]:
    key = override.key_or_group
    if _is_hydra(key):
        return
    if _is_of_a_sweep(key):
        yield f"{text}: a sweep is several runs, and -m starts those: python -m app.train -m {shlex.quote(text)} ..."
    elif _is_of_a_check(key, schema):
        yield (
            f"{text}: {key} is asked by app.check, not by a run: python -m app.check memory {shlex.quote(text)} ..."
        )
    elif override.is_delete():
        if key not in _CAN_BE_ABSENT:
            yield f"{text}: nothing can be taken out of a run.{_instead_of_taking_out(key, schema)}"
    elif override.package is not None:
        yield f"{text}: {key} has one place in a run. Write {key}=..."
    elif key not in choices_by_group() and not is_key(schema, key):
        yield _unknown(key, schema)
    else:
        yield from _wrong_value(override, text, schema)


def _wrong_value(override: Override, text: str, schema: type) -> Iterator[str]:
    key = override.key_or_group
    if override.is_sweep_override():
        yield _no_sweep(key, text.partition("=")[2], schema)
    elif key in choices_by_group() and not isinstance(override.value(), dict):
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
    return (
        f"{key}={value}: several values are a sweep, which -m starts: python -m app.train -m {key}=...{meant}"
    )


def _wrong_choice(group: str, choice: Any) -> Iterator[str]:
    names = choices_by_group()[group]
    if choice in names or (choice is None and group in _CAN_BE_ABSENT):
        return
    near = nearest(shown(choice), names)
    meant = f" Did you mean {near}?" if near else ""
    yield f"{group}={shown(choice)}: there is no such {group}.{meant} Choose one of {', '.join(names)}."


def _unknown(key: str, schema: type) -> str:
    groups = choices_by_group()
    near = nearest_keys(key, {*kinds(schema), *groups})
    if near and near[0] in groups:
        return f"{key} is neither a key nor a group. Did you mean {near[0]}={'|'.join(groups[near[0]])}?"
    return f"{key} is not a key.{did_you_mean_key(key, kinds(schema))}"


def _composable(override: Override, schema: type) -> str:
    """`++` sets a key whether or not the YAML has it; Hydra knows no such form for groups."""
    key, value = override.key_or_group, override.value()
    text = override.input_line or ""
    if _is_hydra(key) or override.is_delete():
        return text
    given = text.partition("=")[2]
    if key in choices_by_group() and not isinstance(value, dict):
        return f"~{key}" if value is None else f"{key}={given}"
    if isinstance(value, int | float) and _takes_text(key, schema):
        return f'++{key}="{given}"'  # `model.revision=12e4567` is no number
    return f"++{key}={given}"


def _takes_text(key: str, schema: type) -> bool:
    return is_text(kinds(schema).get(key))


def _can_be_quoted(value: str) -> bool:
    return not any(sign in value for sign in "\"'\\,")


def _is_of_a_sweep(key: str) -> bool:
    return key == "sweep" or key.startswith("sweep.")


def _is_of_a_check(key: str, schema: type) -> bool:
    return key.partition(".")[0] == "hardware" and "hardware" not in kinds(schema)


def _is_hydra(key: str) -> bool:
    return key == "hydra" or key.startswith(("hydra.", "hydra/"))
