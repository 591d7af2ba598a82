"""Overrides of the command line and of `from=FILE.yaml`, checked against conf/ and the schema before Hydra composes."""

import os
import re
import shlex
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from yaml import YAMLError

from app.config.conf_files import choices_by_group, literal, read_yaml
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
from app.errors import ConfigError, gist, refuse

WARMUPS = ("schedule.warmup_steps", "schedule.warmup_fraction")
_ALTERNATIVES: tuple[Mapping[str, Any], ...] = (  # a run has one key of each; the others have this value
    dict.fromkeys(WARMUPS),
    {f"dataset.{name}": none for name, none in WITHOUT_HELD_OUT_ROWS.items()},
)
RATE = "optimizer.lr"  # set by recipes, so another optimizer keeps it
_FROM = "varied_from="  # the word `from=` as a key of the schema
_KEY = re.compile(r"[a-z_]\w*(\.[\w-]+)*", re.ASCII | re.IGNORECASE)  # the one spelling of a key
_SWEPT = "sweep.space."  # before a key that a sweep varies
_MAX_SHOWN_CHARACTERS = 200


def names_file(word: str) -> bool:
    """Whether a word is `from=FILE`, not `from=RUN`."""
    place = _place(word.removeprefix(_FROM).strip("'\""))
    return word.startswith(_FROM) and (place.suffix in (".yaml", ".yml") or os.path.isfile(place))  # noqa: PTH113


def _place(given: str) -> Path:
    return Path(os.path.expanduser(given))  # noqa: PTH111 (Path's raises for a user that is not known)


def with_settings(words: Sequence[str], typed: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the words with each `from=FILE` replaced by the file's settings, and notes on settings that are not used.

    The `typed` values win: a key over the same key and its alternatives, a group over its whole section.
    """
    settings: dict[str, Any] = {}
    notes: list[str] = []
    problems: list[str] = []
    replaced = {*typed, *replaced_alternatives(typed)}
    for given in (word.removeprefix(_FROM).strip("'\"") for word in words if names_file(word)):
        content = _settings(given)
        unused = {key: group for key in content if (group := _typed_group(key, typed)) and key not in typed}
        used = {key: value for key, value in content.items() if key not in {*replaced, *unused}}
        problems += untrusted_problems(used, given)
        settings |= used
        for group in dict.fromkeys(unused.values()):
            keys = [key for key in unused if unused[key] == group]
            word = next(word for word in reversed(words) if word.lstrip("+").startswith(f"{group}="))
            notes.append(f"from={given}: {word} replaces {', '.join(keys)}")
    refuse(problems)
    of_files = [f"{key}={as_override(value)}" for key, value in settings.items()]
    return [*of_files, *(word for word in words if not names_file(word))], notes


def _typed_group(key: str, typed: Collection[str]) -> str:
    """Return the group that was typed and replaces the section of a key; empty if none does."""
    section = key.partition(".")[0]
    return section if section in typed and section in choices_by_group() and key != RATE else ""


def replaced_alternatives(typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a typed alternative switches off, with their values for off: `eval_path` replaces the
    `eval_fraction` of its group.
    """
    found: dict[str, Any] = {}
    for table in _ALTERNATIVES:
        chosen = [key for key, off in table.items() if typed.get(key) not in (None, off)]
        if len(chosen) == 1:
            found |= {key: off for key, off in table.items() if key not in typed}
    return found


def untrusted_problems(settings: Mapping[str, Any], place: str, allowed: Collection[str] = ()) -> Iterator[str]:
    """Problems with settings that may come from others: keys in another spelling, and keys that must be typed for other
    reasons than those `allowed`.
    """
    for key, value in settings.items():
        name = key.removeprefix(_SWEPT)
        shown, reason = key[:_MAX_SHOWN_CHARACTERS], typed_only(RunConfig, name)
        if not _KEY.fullmatch(key):
            yield f"{shown} in {place}: not the name of a setting. Write section.key or group, without + ~ @ or /."
        elif reason and reason not in allowed and value is not None and value is not False:
            yield (
                f"{shown} in {place} is not accepted, because it {reason}. If you trust the source, type "
                f"{shown}={format_value(value)[:_MAX_SHOWN_CHARACTERS]} on the command line."
            )


def _settings(given: str) -> dict[str, Any]:
    file = _place(given)
    if file.name == "run.yaml" and (file.parent / "manifest.json").is_file():
        raise ConfigError(f"from={given}: it is the run.yaml of a run. Give its folder: from={file.parent}")
    try:
        data = read_yaml(file)
    except FileNotFoundError:
        raise ConfigError(
            f"from={given}: there is no such file. Give a YAML file of settings, or the output_dir of a run."
        ) from None
    except (OSError, ValueError, YAMLError) as fault:
        raise ConfigError(f"from={given}: it cannot be read as settings: {gist(fault)}. Fix the file.") from fault
    if not isinstance(data, Mapping):
        raise ConfigError(f"from={given}: it has no settings. Write them as key: value, such as recipe: lora.")
    return dict(flat("", literal(data)))


def flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """`optimizer.lr`, x for `optimizer: {lr: x}`."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flat(f"{prefix}.{name}" if prefix else str(name), inner)
    else:
        yield prefix, value


def as_override(value: Any) -> str:
    """A value in Hydra's grammar."""
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


_SWITCHES = ("-m", "--multirun", "-h", "--help", "--version")
_PRINTS_SETTINGS = ("-c", "--cfg")  # with `job`
_OF_HYDRA = ("--config-path", "--config-name", "--config-dir")  # conf/ is the only configuration
_MAX_KEY_CHARACTERS = 200  # Hydra looks for a file of that name
_MAX_DEPTH = 20  # of brackets; hundreds exceed the recursion limit
_OPTIONAL_GROUPS = ("experiment", "debug")
_KEYS = field_types(RunConfig)
# groups that take a path or hub id in place of a name, with the choice that reads it
_PLACES = {"model": ("folder", "a folder or a hub id"), "dataset": ("auto", "a file, a folder or a hub id")}


def is_sweep(arguments: Sequence[str]) -> bool:
    """Whether `-m` is given; unreadable arguments are reported as those of a run."""
    try:
        return _starts_sweep(_read(arguments)[1])
    except ConfigError:
        return False


def split_arguments(arguments: Sequence[str], *, sweep: bool = False) -> tuple[list[str], list[str]]:
    """The overrides, with those of `from=FILE`, and the switches; ConfigError for an unknown switch, or one that a
    sweep cannot have.
    """
    overrides, switches, problems = _read(arguments)
    others = [word for word in switches if word not in ("-m", "--multirun")]
    if sweep and others and not problems:
        problems.append(
            f"{' '.join(others)} does not go with -m, because it is about one run. Leave out one of them; "
            "dry_run=true tells the plan of every trial."
        )
    if _starts_sweep(switches) and not sweep:
        problems.append("-m starts a sweep, and this is one run. Leave it out.")
    refuse(problems)
    return _with_settings(overrides)[0], switches


def settings_notes(arguments: Sequence[str]) -> list[str]:
    """Return a note for each `from=FILE` on the settings in it that typed groups replace."""
    return [f"{'note':8}{each}" for each in _with_settings(_read(arguments)[0])[1]]


def _with_settings(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    if not any(map(names_file, overrides)):
        return list(overrides), []
    typed = values_in([word for word in overrides if not names_file(word)])
    return with_settings(overrides, {key.lstrip("+"): value for key, value in typed.items()})


def values_in(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of overrides by key, each spelled as typed; text where Hydra's grammar cannot read it."""
    found: dict[str, Any] = {}
    value: Any
    for text in (each for word in overrides for each in _with_place(word)):
        key, _, value = text.partition("=")
        with suppress(HydraException):
            value = parse_override(text).value()
        found |= flat(key, value)
    return found


def _starts_sweep(switches: Sequence[str]) -> bool:
    return "-m" in switches or "--multirun" in switches


def _read(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the overrides, the switches, and problems with the switches."""
    overrides, switches, problems = list[str](), list[str](), list[str]()
    words = deque(arguments)
    while words:
        word = words.popleft()
        name, _, value = word.partition("=")
        if not word.startswith("-"):
            overrides.append(_as_key(word))
        elif word in _SWITCHES:
            switches.append(word)
        else:
            if not value and words and not words[0].startswith("-") and "=" not in words[0]:
                value = words.popleft()
            if name in _PRINTS_SETTINGS and value == "job":
                switches.append(f"{name} {value}")
            else:
                problems.append(_switch_problem(word, name, value))
    return overrides, switches, problems


def _switch_problem(word: str, name: str, value: str) -> str:
    if name in _PRINTS_SETTINGS:
        return f"{name} {value}".rstrip() + ": only --cfg job is supported. It prints every key and its value."
    if name in _OF_HYDRA:
        return (
            f"{name} is not in this program: its configurations are the files of conf/. Choose among them with "
            "group=choice; --help lists them."
        )
    setting = f" Settings have no dashes in front: {name.lstrip('-').replace('-', '_')}={value or '...'}"
    return f"{word}: there is no such switch.{of_other_program(name, value) or setting}"


def _as_key(word: str) -> str:
    """`varied_from=RUN` for `from=RUN`: a word of Python's cannot be a field of the schema."""
    return f"varied_{word}" if word.startswith("from=") else word


def parse_override(text: str) -> Override:
    """The override of a word by Hydra's grammar; HydraException for what cannot be read, or composed later."""
    key, _, value = text.partition("=")
    depths = accumulate((sign in "([{") - (sign in ")]}") for sign in value if value[0] not in "\"'")
    if len(key) > _MAX_KEY_CHARACTERS or max(depths, default=0) > _MAX_DEPTH:
        raise HydraException("its key is too long, or its brackets are nested too deeply")
    try:
        return OverridesParser.create().parse_override(text)
    except ValueError as fault:  # a number with thousands of digits
        raise HydraException(str(fault)) from fault


def check_overrides(arguments: Sequence[str]) -> list[str]:
    """The overrides in a form that always composes (`++`); one ConfigError has every problem."""
    valid, problems = partition_overrides(arguments)
    refuse(problems)
    return valid


def partition_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The valid overrides in a form that composes, and problems with the others."""
    valid: list[str] = []
    problems: list[str] = []
    for text in (each for given in arguments for each in _with_place(given)):
        try:
            override = _parsed(text)
        except ConfigError as problem:
            problems += problem.problems
            continue
        found = list(_problems(override, text))
        problems += found
        if not found:
            valid.append(_composable(override))
    return valid, problems


def _with_place(text: str) -> list[str]:
    """`model=folder`, `model.path=ORG/NAME` for `model=ORG/NAME`; of a sweep, each value by itself."""
    group, _, value = text.partition("=")
    place = value.strip("'\"")
    if group not in _PLACES or place in choices_by_group()[group] or set(place) & set(",()[]{}*"):
        return [text]
    # os.path: that of a name that is too long is no error
    is_place = "/" in place or "\\" in place or os.path.exists(place)  # noqa: PTH110
    return [f"{group}={_PLACES[group][0]}", f"{group}.path={value}"] if is_place else [text]


def key_of(text: str) -> str:
    """Key of an override: `seed` of `++seed=1`."""
    return text.lstrip("+").partition("=")[0]


def values_of(overrides: Iterable[str]) -> dict[str, Any]:
    """Return the choices by group and values by dotted key of overrides that compose."""
    parsed = (parse_override(text) for text in overrides if not text.startswith("~"))
    return {key: value for each in parsed for key, value in _flat(each.key_or_group, each.value())}


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """`dataset.path`, x for `dataset={path: x}`."""
    if isinstance(value, dict) and is_dataclass(_KEYS.get(key)):
        for name, inner in value.items():
            yield from _flat(f"{key}.{name}", inner)
    else:
        yield key, value


def _parsed(text: str) -> Override:
    key, equals, value = text.partition("=")
    if not key or not (equals or text.startswith("~")):
        meant = f" Did you mean from={text}?" if text.endswith((".yaml", ".yml")) else ""
        raise ConfigError(f"{text!r} is not an override. Write key=value or group=choice.{meant}")
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
        if key not in _OPTIONAL_GROUPS:
            yield f"{text}: nothing can be taken out of a run. Set {key} to null, none or 0, where it takes that."
    elif override.package is not None:
        yield f"{text}: {key} has one place in a run. Write {key}=..."
    elif key not in choices_by_group() and not is_key(RunConfig, key):
        yield unknown_key(key, text.partition("=")[2])
    elif override.is_sweep_override():
        yield _sweep_problem(key, text.partition("=")[2])
    elif takes_text(_KEYS.get(key)):
        yield from () if key.startswith("tracker.") else unknown_user(text.removeprefix("varied_"))
    else:
        yield from wrong_choice(key, override.value())


def unknown_user(text: str) -> Iterator[str]:
    """The problem with `key=~NAME/folder` where no user has the name: pathlib raises for it."""
    place = text.partition("=")[2].strip("'\"")
    if place.startswith("~") and os.path.expanduser(place) == place:  # noqa: PTH111
        yield f"{text}: there is no user {place.partition('/')[0][1:]}. Write the whole path, or ./{place}."


def _other_command(section: str, text: str) -> str | None:
    """Return where to type a section of another command."""
    word = shlex.quote(text)
    if section == "sweep":
        return f"{text}: a sweep is several runs, and -m starts those: python -m app.train -m {word} ..."
    if section == "hardware":
        key = key_of(text)
        return f"{text}: {key} is asked by app.check, not by a run: python -m app.check memory {word} ..."
    return None


def _sweep_problem(key: str, value: str) -> str:
    kind, meant = _KEYS.get(key), ""
    if kind == list[str]:
        meant = f" For a list write {key}=[{value}]."
    elif key not in choices_by_group() and takes_text(kind):
        meant = f" For text with a comma in it write '{key}=\"{value}\"'."
    return f"{key}={value}: several values are a sweep, which -m starts: python -m app.train -m {key}=...{meant}"


def wrong_choice(group: str, choice: Any) -> Iterator[str]:
    """Yield the problem of a choice that its group does not have."""
    names = choices_by_group().get(group)
    if names is None or isinstance(choice, dict) or choice in names or (choice is None and group in _OPTIONAL_GROUPS):
        return
    given = format_value(choice)
    meant = of_other_program(group, given) or did_you_mean(given, names, listing=False)
    _, place = _PLACES.get(group, ("", ""))
    others = f", or give {place}" if place else ""
    yield f"{group}={given}: there is no such {group}.{meant} Choose one of {', '.join(names)}{others}."


def unknown_key(key: str, value: str, options: Iterable[str] = ()) -> str:
    """Return the problem with an unknown key, and the nearest of a run or of the `options` of a command."""
    groups, known = choices_by_group(), {*options, *_KEYS}
    near = [] if of_other_program(key, value) else nearest_keys(key, {*known, *groups})
    if near and near[0] in groups:
        return f"{key} is neither a key nor a group. Did you mean {near[0]}={'|'.join(groups[near[0]])}?"
    return f"{key} is not a key.{did_you_mean_key(key, known, value)}"


def _composable(override: Override) -> str:
    """The override with `++`, which sets a key whether or not the YAML has it; groups have no such form."""
    key, value = override.key_or_group, override.value()
    text = override.input_line or ""
    if override.is_delete():
        return text
    given = text.partition("=")[2]
    if key in choices_by_group() and not isinstance(value, dict):
        return f"~{key}" if value is None else f"{key}={given}"
    if isinstance(value, int | float) and takes_text(_KEYS.get(key)):
        return f'++{key}="{given}"'  # `model.revision=12e4567` is no number
    return f"++{key}={given}"
