"""`from=FILE.yaml`: groups and keys of a file, as if each were typed in front of the command line."""

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from yaml import YAMLError

from app.config.dataset import WITHOUT_HELD_OUT_ROWS
from app.config.groups import choices_by_group
from app.config.schema import RunConfig
from app.config.validate import format_value, typed_only
from app.config.yaml_files import literal, read_yaml
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
