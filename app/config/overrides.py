"""Command-line overrides and settings of `from=FILE.yaml`, checked against conf/ and the schema before composing."""

import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from app.config.conf_files import choices_by_group
from app.config.dataset import WITHOUT_HELD_OUT_ROWS
from app.config.schema import RunConfig
from app.config.validate import (
    did_you_mean,
    did_you_mean_key,
    field_types,
    format_value,
    is_key,
    nearest_keys,
    of_other_program,
    takes_text,
    typed_only,
)
from app.errors import ConfigError, refuse

WARMUPS = ("schedule.warmup_steps", "schedule.warmup_fraction")
_ALTERNATIVES: tuple[Mapping[str, Any], ...] = (  # a run uses one key of each; the others have this value
    dict.fromkeys(WARMUPS),
    {f"dataset.{name}": none for name, none in WITHOUT_HELD_OUT_ROWS.items()},
)
RATE = "optimizer.lr"  # set by recipes, so another optimizer keeps it
_KEY = re.compile(r"[a-z_]\w*(\.[\w-]+)*", re.ASCII | re.IGNORECASE)  # canonical spelling of a key
_FILE_NAME = re.compile(r"[^/]+\.[a-z]\w*", re.ASCII | re.IGNORECASE)  # with an extension
_SWEPT = "sweep.space."  # prefix of the keys that a sweep varies
_MAX_SHOWN_CHARACTERS = 200


def replaced_alternatives(typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a typed alternative disables, with their off values, e.g. `eval_fraction`."""
    disabled: dict[str, Any] = {}
    for table in _ALTERNATIVES:
        chosen = [key for key, off in table.items() if typed.get(key) not in (None, off)]
        if len(chosen) == 1:
            disabled |= {key: off for key, off in table.items() if key not in typed}
    return disabled


def untrusted_problems(settings: Mapping[str, Any], place: str, allowed: Collection[str] = ()) -> Iterator[str]:
    """Yield problems with settings from untrusted sources: invalid names, and keys that must be typed on the command
    line for a reason that is not in `allowed`.
    """
    for key, value in settings.items():
        name = key.removeprefix(_SWEPT)
        shown, reason = key[:_MAX_SHOWN_CHARACTERS], typed_only(RunConfig, name)
        if not _KEY.fullmatch(key):
            yield f"{shown} in {place}: invalid setting name. Write section.key or group, without + ~ @ or /."
        elif reason and reason not in allowed and value is not None and value is not False:
            yield (
                f"{shown} in {place} is not accepted because it {reason}. If you trust the source, type "
                f"{shown}={format_value(value)[:_MAX_SHOWN_CHARACTERS]} on the command line."
            )


def flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Flatten nested data to dotted keys: `optimizer.lr`, x for `optimizer: {lr: x}`."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flat(f"{prefix}.{name}" if prefix else str(name), inner)
    else:
        yield prefix, value


def as_override(value: Any) -> str:
    """Format a value in Hydra's grammar."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(as_override, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{as_override(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, int | float):
        return repr(value)
    return QuotedString(str(value), Quote.double).with_quotes()


# ---- overrides


_MAX_KEY_CHARACTERS = 200  # Hydra looks for a file of that name
_MAX_DEPTH = 20  # of brackets; hundreds exceed the recursion limit
OPTIONAL_GROUPS = ("experiment", "debug")
_KEYS = field_types(RunConfig)
# groups that accept a path or hub ID instead of a name, with the choice that reads it
PLACES = {"model": ("folder", "a folder or a hub id"), "dataset": ("auto", "a file, a folder or a hub id")}


def values_in(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the override values by key as typed; unparsable values are returned as text."""
    values: dict[str, Any] = {}
    value: Any
    for text in (override for word in overrides for override in _with_place(word)):
        key, _, value = text.partition("=")
        with suppress(HydraException):
            value = parse_override(text).value()
        values |= flat(key, value)
    return values


def parse_override(text: str) -> Override:
    """Parse an override by Hydra's grammar; raise HydraException if it cannot be parsed or composed."""
    key, _, value = text.partition("=")
    depths = accumulate((sign in "([{") - (sign in ")]}") for sign in value if value[0] not in "\"'")
    if len(key) > _MAX_KEY_CHARACTERS or max(depths, default=0) > _MAX_DEPTH:
        raise HydraException("the key is too long or the brackets are nested too deeply")
    try:
        return OverridesParser.create().parse_override(text)
    except ValueError as fault:  # a number with thousands of digits
        raise HydraException(str(fault)) from fault


def check_overrides(arguments: Sequence[str]) -> list[str]:
    """Return the overrides in a form that always composes (`++`); raise one ConfigError with all problems."""
    valid, problems = partition_overrides(arguments)
    refuse(problems)
    return valid


def partition_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the valid overrides in a form that composes, and the problems of the others."""
    valid: list[str] = []
    problems: list[str] = []
    for text in (override for argument in arguments for override in _with_place(argument)):
        try:
            override = _parsed(text)
        except ConfigError as problem:
            problems += problem.problems
            continue
        faults = list(_problems(override, text))
        problems += faults
        if not faults:
            valid.append(_composable(override))
    return valid, problems


def _with_place(text: str) -> list[str]:
    """Expand `model=ORG/NAME` to `model=folder`, `model.path=ORG/NAME`; sweep values are expanded one by one."""
    group, _, value = text.partition("=")
    place = value.strip("'\"")
    if group not in PLACES or place in choices_by_group()[group] or set(place) & set(",()[]{}*"):
        return [text]
    # os.path does not raise for names that are too long
    is_place = "/" in place or "\\" in place or os.path.exists(place)  # noqa: PTH110
    return [f"{group}={PLACES[group][0]}", f"{group}.path={value}"] if is_place else [text]


def key_of(text: str) -> str:
    """Return the key of an override: `seed` for `++seed=1`."""
    return text.lstrip("+").partition("=")[0]


def values_of(overrides: Iterable[str]) -> dict[str, Any]:
    """Return choices by group and values by dotted key for overrides that compose."""
    parsed = (parse_override(text) for text in overrides if not text.startswith("~"))
    return {key: value for override in parsed for key, value in _flat(override.key_or_group, override.value())}


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Flatten sections to dotted keys: `dataset.path`, x for `dataset={path: x}`."""
    if isinstance(value, dict) and is_dataclass(_KEYS.get(key)):
        for name, inner in value.items():
            yield from _flat(f"{key}.{name}", inner)
    else:
        yield key, value


def _parsed(text: str) -> Override:
    key, equals, value = text.partition("=")
    if not key or not (equals or text.startswith("~")):
        suggestion = f" Did you mean from={text}?" if text.endswith((".yaml", ".yml")) else ""
        raise ConfigError(f"Unrecognized argument {text!r}. Settings are key=value.{suggestion}")
    try:
        return parse_override(text)
    except HydraException as fault:
        if takes_text(_KEYS.get(key_of(text))) and not any(sign in value for sign in "\"'\\,"):
            return parse_override(f'{key}="{value}"')
        reason = " ".join(str(fault).splitlines()[0].split())
        shown, name = text[:_MAX_KEY_CHARACTERS], key[:_MAX_KEY_CHARACTERS]
        quoted = '["..."]' if value.startswith("[") else '"..."'
        raise ConfigError(f"{shown!r} cannot be read: {reason}. Quote the value: '{name}={quoted}'.") from None


def _problems(override: Override, text: str) -> Iterator[str]:
    key = override.key_or_group
    other_command = _other_command(key.partition(".")[0], text)
    if other_command:
        yield other_command
    elif override.is_delete():
        if key not in OPTIONAL_GROUPS:
            yield f"{text}: settings cannot be removed. Set {key}=none, null or 0."
    elif override.package is not None:
        yield f"{text}: packages (@) are not supported. Write {key}=..."
    elif key not in choices_by_group() and not is_key(RunConfig, key):
        yield unknown_key(key, text.partition("=")[2])
    elif override.is_sweep_override():
        yield _sweep_problem(key, text.partition("=")[2])
    elif takes_text(_KEYS.get(key)):
        yield from () if key.startswith("tracker.") else unknown_user(text.removeprefix("varied_"))
    else:
        yield from wrong_choice(key, override.value())


def unknown_user(text: str) -> Iterator[str]:
    """Yield the problem of `key=~NAME/folder` for an unknown user: pathlib would raise."""
    place = text.partition("=")[2].strip("'\"")
    if place.startswith("~") and os.path.expanduser(place) == place:  # noqa: PTH111
        yield f"{text}: unknown user {place.partition('/')[0][1:]}. Write the full path, or ./{place}."


def _other_command(section: str, text: str) -> str | None:
    """Return the problem of a section that belongs to another command, with that command."""
    word = shlex.quote(text)
    if section == "sweep":
        return f"{text}: several runs make a sweep; add -m: finetune train -m {word} ..."
    if section == "hardware":
        key = key_of(text)
        return f"{text}: {key}= is an option of finetune check memory: finetune check memory {word} ..."
    return None


def _sweep_problem(key: str, value: str) -> str:
    kind, suggestion = _KEYS.get(key), ""
    if kind == list[str]:
        suggestion = f" For a list write {key}=[{value}]."
    elif key not in choices_by_group() and takes_text(kind):
        suggestion = f" For text with a comma write '{key}=\"{value}\"'."
    return f"{key}={value}: several values make a sweep; add -m: finetune train -m {key}=...{suggestion}"


def wrong_choice(group: str, choice: Any) -> Iterator[str]:
    """Yield the problem of a choice that is not in its group."""
    names = choices_by_group().get(group)
    if names is None or isinstance(choice, dict) or choice in names or (choice is None and group in OPTIONAL_GROUPS):
        return
    value = format_value(choice)
    _, place = PLACES.get(group, ("", ""))
    if place and _FILE_NAME.fullmatch(value):
        near = get_close_matches(value, os.listdir(), n=3)  # noqa: PTH208
        nearby = f" Similar: {', '.join(f'{group}={name}' for name in near)}." if near else ""
        yield f"{group}={value}: no such file in {Path.cwd()}.{nearby}"
        return
    suggestion = of_other_program(group, value) or did_you_mean(value, names)
    others = f" Or set {group}= to {place}." if place else ""
    yield f"{group}={value}: unknown {group}.{suggestion}{others}"


def unknown_key(key: str, value: str, options: Iterable[str] = ()) -> str:
    """Return the problem of an unknown key, with the most similar run setting or command option."""
    groups, keys = choices_by_group(), {*options, *_KEYS}
    near = [] if of_other_program(key, value) else nearest_keys(key, {*keys, *groups})
    if near and near[0] in groups:
        return f"Unknown setting {key}. Did you mean {near[0]}={'|'.join(groups[near[0]])}?"
    return f"Unknown setting {key}.{did_you_mean_key(key, keys, value)}"


def _composable(override: Override) -> str:
    """Return the override with `++`, which also sets keys that are not in the YAML; not for groups."""
    key, value = override.key_or_group, override.value()
    text = override.input_line or ""
    if override.is_delete():
        return text
    raw_value = text.partition("=")[2]
    if key in choices_by_group() and not isinstance(value, dict):
        return f"~{key}" if value is None else f"{key}={raw_value}"
    if isinstance(value, int | float) and takes_text(_KEYS.get(key)):
        return f'++{key}="{raw_value}"'  # `model.revision=12e4567` is text
    return f"++{key}={raw_value}"
