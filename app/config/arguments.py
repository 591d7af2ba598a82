"""Command line of a run: switches, and `from=FILE` with its settings, converted if they are of another program."""

import os
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from yaml import YAMLError

from app.config.conf_files import choices_by_group, literal
from app.config.other_files import read_config
from app.config.overrides import RATE, as_override, flat, replaced_alternatives, untrusted_problems, values_in
from app.config.schema import RunConfig
from app.config.validate import is_key, of_other_program
from app.errors import ConfigError, gist, refuse
from app.program import with_target

_FROM = "varied_from="  # schema key of `from=`
_MIN_OTHER_SETTINGS = 3  # of a file without any setting of this program, below which a name may be misspelled


def is_sweep(arguments: Sequence[str]) -> bool:
    """Return whether the arguments contain `-m`; invalid ones are reported as those of a single run."""
    try:
        return _starts_sweep(_read(arguments)[1])
    except ConfigError:
        return False


class Arguments(NamedTuple):
    """A command line: overrides, including those of `from=FILE`, switches, and lines on the settings of each file.

    The lines report the conversion of another program's settings, and what typed groups replace.
    """

    overrides: list[str]
    switches: list[str]
    notes: list[str]


def split_arguments(arguments: Sequence[str], *, sweep: bool = False) -> Arguments:
    """Split a command line; raise ConfigError for unknown switches and for those that a sweep does not support."""
    overrides, switches, problems = _read(arguments)
    others = [word for word in switches if word not in ("-m", "--multirun")]
    if sweep and others and not problems:
        problems.append(
            f"{' '.join(others)} applies to one run and cannot be combined with -m. Leave out one of them; "
            "dry_run=true prints the plan of every trial."
        )
    if _starts_sweep(switches) and not sweep:
        problems.append("-m starts a sweep, but this command takes one run. Leave it out.")
    refuse(problems)
    if not any(map(names_file, overrides)):
        return Arguments(overrides, switches, [])
    typed = values_in([word for word in overrides if not names_file(word)])
    words, notes = with_settings(overrides, {key.lstrip("+"): value for key, value in typed.items()})
    return Arguments(words, switches, notes)


# ---- from=FILE


def names_file(word: str) -> bool:
    """Return whether an argument is `from=FILE`, not `from=RUN`."""
    place = _place(word.removeprefix(_FROM).strip("'\""))
    return word.startswith(_FROM) and (place.suffix in (".yaml", ".yml") or os.path.isfile(place))  # noqa: PTH113


def _place(path: str) -> Path:
    try:
        return Path(os.path.expanduser(path))  # noqa: PTH111 (Path's raises for an unknown user)
    except ValueError:  # Python 3.13: a null byte in a user name
        return Path(path)


def with_settings(words: Sequence[str], typed: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the arguments with each `from=FILE` replaced by its settings, and lines on converted and unused ones.

    `typed` values take precedence: a key over the same key and its alternatives, a group over its whole section.
    """
    settings: dict[str, Any] = {}
    notes: list[str] = []
    problems: list[str] = []
    replaced = {*typed, *replaced_alternatives(typed)}
    for path in (word.removeprefix(_FROM).strip("'\"") for word in words if names_file(word)):
        content, lines = _settings(path)
        notes += lines
        unused = {key: group for key in content if (group := _typed_group(key, typed)) and key not in typed}
        used = {key: value for key, value in content.items() if key not in {*replaced, *unused}}
        problems += untrusted_problems(used, path)
        settings |= used
        for group in dict.fromkeys(unused.values()):
            keys = [key for key in unused if unused[key] == group]
            word = next(word for word in reversed(words) if word.lstrip("+").startswith(f"{group}="))
            notes.append(f"{'note':8}from={path}: {word} replaces {', '.join(keys)}")
    refuse(problems)
    of_files = [f"{key}={as_override(value)}" for key, value in settings.items()]
    return [*of_files, *(word for word in words if not names_file(word))], notes


def _typed_group(key: str, typed: Collection[str]) -> str:
    """Return the typed group that replaces the section of a key; empty if there is none."""
    section = key.partition(".")[0]
    return section if section in typed and section in choices_by_group() and key != RATE else ""


def _settings(path: str) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a file, and the lines of their conversion if it is a config of another program."""
    file = _place(path)
    if file.name == "run.yaml" and (file.parent / "manifest.json").is_file():
        raise ConfigError(f"from={path}: this is the run.yaml of a run. Use its folder: from={file.parent}")
    try:
        data = read_config(file)
    except FileNotFoundError:
        raise ConfigError(f"from={path}: no such file. Give a YAML settings file or the output_dir of a run.") from None
    except (OSError, ValueError, YAMLError) as fault:
        raise ConfigError(f"from={path}: settings cannot be read: {gist(fault)}. Fix the file.") from fault
    if not isinstance(data, Mapping):
        raise ConfigError(f"from={path}: the file has no settings. Write them as key: value, e.g. recipe: lora.")
    count = sum(is_key(RunConfig, str(key)) or key in choices_by_group() for key in data)
    if 2 * count > len(data):
        return dict(flat("", literal(data))), []
    return _of_other_program(path, file.parent, data, count)


def _of_other_program(path: str, folder: Path, data: Mapping[str, Any], count: int) -> tuple[dict[str, Any], list[str]]:
    """Return the converted settings of another program, and the lines of the conversion.

    `count` settings have names of this program, so that a file of no program is reported setting by setting.
    """
    from app.config.converted_settings import PROGRAMS, program_of  # tables that other files do not need
    from app.config.settings_conversion import converted, report_lines

    if program_of({*data, *dict(flat("", data))}):
        try:
            conversion = converted(data, folder)
        except ConfigError as refusal:
            raise ConfigError([f"from={path}: {problem}" for problem in refusal.problems]) from refusal
        return dict(flat("", literal(conversion.words))), [*report_lines(conversion)]
    if not count and len(data) >= _MIN_OTHER_SETTINGS:
        labels = ", ".join(facts["label"] for facts in PROGRAMS.values())
        raise ConfigError(
            f"from={path}: none of its {len(data)} settings is one of this program, and it is not a config of {labels}."
            " Write settings as key: value, e.g. recipe: lora."
        )
    return dict(flat("", literal(data))), []


# ---- switches


_SWITCHES = ("-m", "--multirun", "-h", "--help", "--version")
_PRINTS_SETTINGS = ("-c", "--cfg")  # with `job`
_OF_HYDRA = ("--config-path", "--config-name", "--config-dir")  # not supported: configs live in conf/


def _starts_sweep(switches: Sequence[str]) -> bool:
    return "-m" in switches or "--multirun" in switches


def _read(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the overrides, the switches, and problems with the switches."""
    overrides, switches, problems = list[str](), list[str](), list[str]()
    words = deque(with_target("output_dir", arguments))
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
        return f"{name} is not supported: configs live in conf/. Choose them with group=choice; --help lists them."
    setting = f" Settings are written without dashes: {name.lstrip('-').replace('-', '_')}={value or '...'}"
    return f"Unknown option {word}.{of_other_program(name, value) or setting}"


def _as_key(word: str) -> str:
    """Rename `from=RUN` to `varied_from=RUN`: a Python keyword cannot be a schema field."""
    return f"varied_{word}" if word.startswith("from=") else word
