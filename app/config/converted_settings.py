"""Result of converting the settings of another program, and the conversion by tables of their names."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from app.config.conf_files import as_number, choices_by_group
from app.config.schema import RunConfig
from app.config.validate import field_types, format_value, is_key, setting_of, typed_only

PROGRAMS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("converted_files.yaml").read_text("utf-8")
)
UNSET: tuple[Any, ...] = (None, "", [], {}, False, "none", "None")
ADAPTER_RECIPES = ("lora", "qlora", "full")  # recipes selected by the adapter and quantization of a file
_MODEL_NAMES = ("base_model", "model_name_or_path", "model", "model.pretrained_model_name_or_path")


def program_of(settings: Collection[str]) -> str | None:
    """Return the program whose config has these settings, dotted or nested."""
    return next((name for name, facts in PROGRAMS.items() if {*facts["identified_by"]} & {*settings}), None)


@dataclass(kw_only=True, slots=True)
class Conversion:
    """Converted settings (`words`) of a file, and the result for each setting."""

    program: str
    settings: Mapping[str, Any]
    folder: Path = field(default_factory=Path)  # of the file, where the files it names are searched
    words: dict[str, Any] = field(default_factory=dict)
    converted: dict[str, str] = field(default_factory=dict)
    not_needed: dict[str, str] = field(default_factory=dict)
    not_converted: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, Any]:
        """Table entries for the program."""
        return PROGRAMS[self.program]

    @property
    def model(self) -> str:
        """Path or hub ID of the model; empty if the file names none."""
        names = (self.settings.get(name) for name in _MODEL_NAMES)
        return next((name for name in names if isinstance(name, str)), "")

    def has(self, *names: str) -> str:
        """Return the first of some settings that is set; empty if none is."""
        return next((name for name in names if self.settings.get(name) not in UNSET), "")

    def convert(self, name: str, **words: Any) -> None:
        """Record the keys and values of a converted setting. Write `__` for a dot in a keyword."""
        overrides = {key.replace("__", "."): value for key, value in words.items()}
        self.words |= overrides
        self.converted[name] = " ".join(f"{key}={format_value(value)}" for key, value in overrides.items())

    def near(self, path: str) -> Path | None:
        """Return the place of a file with a path relative to the working directory, the config or a folder above it."""
        places = [Path(), self.folder, *self.folder.resolve().parents[:_MAX_PARENTS]]
        # os.path does not raise for names that are too long
        return next((place / path for place in places if os.path.exists(place / path)), None)  # noqa: PTH110


_MAX_PARENTS = 4  # folders above a config to search, such as the root of a repository


def record_advice(conversion: Conversion, name: str, value: Any) -> None:
    """Record a setting that is not converted, with the advice in its table row."""
    row = setting_of(conversion.facts["columns"], name, value)
    if value in UNSET or (as_number(value) == 1 and name.endswith(("size", "degree", "dim"))):
        conversion.not_needed[name] = "not set"
    else:
        conversion.not_converted[name] = f"{row['here']}: {row['remark']}"


def by_table(conversion: Conversion, name: str, value: Any) -> None:
    """Convert a setting by the table row of its name or of name=value, else by a key of the same name."""
    facts = conversion.facts
    lookup_name = facts.get("alias", {}).get(name, name)
    reason, is_exact = _why_not_needed(facts["not_needed"], name, value)
    row = {} if is_exact else setting_of(facts["columns"], lookup_name, value)
    here, remark = row.get("here", ""), row.get("remark", "")
    section = _mapping_of(conversion, lookup_name)
    typed = next((key for key in (lookup_name, f"model.{lookup_name}", here) if typed_only(RunConfig, key)), "")
    if reason and not row:
        conversion.not_needed[name] = "not set" if value is None else reason
    elif typed:
        _record_typed_only(conversion, name, value, typed)
    elif section and not row and lookup_name.partition(".")[2].isidentifier():
        conversion.convert(name, **{f"{section}.{lookup_name.partition('.')[2]}": value})
    elif not row and (value is None or (value is False and lookup_name in choices_by_group())):
        conversion.not_needed[name] = "not set"
    elif is_key(RunConfig, lookup_name) and not row:
        conversion.convert(name, **{lookup_name: value})
    elif here:
        is_exact = bool(setting_of(facts["columns"], f"{lookup_name}={value}", ""))
        _convert_by_row(conversion, name, value, here, is_exact=is_exact)
    elif value in UNSET or remark.endswith("Leave it out."):
        conversion.not_needed[name] = remark or ("off" if value is False else "not set")
    else:
        conversion.not_converted[name] = remark or "no equivalent setting; see docs/keys.md"


def _why_not_needed(reasons: Mapping[str, str], name: str, value: Any) -> tuple[str, bool]:
    """Return why a setting has no effect on training, and whether its name is listed rather than a pattern."""
    for reason, names in reasons.items():
        if {name, f"{name}={format_value(value)}"} & {*names.split()}:
            return reason, True
    matching = (why for why, names in reasons.items() if any(fnmatch(name, pattern) for pattern in names.split()))
    return next(matching, ""), False


def _record_typed_only(conversion: Conversion, name: str, value: Any, key: str) -> None:
    """Record a setting whose key is accepted on the command line only."""
    if key == "cache_dir" or not value:
        conversion.not_needed[name] = f"set {key} on the command line" if value else "off"
    else:
        conversion.not_converted[name] = f"set on the command line only: {key}={format_value(value)}"


def _mapping_of(conversion: Conversion, name: str) -> str:
    """Return the key of the mapping that contains a setting; empty if there is none."""
    key = setting_of(conversion.facts["columns"], name.partition(".")[0], "").get("here", "") if "." in name else ""
    return str(key) if field_types(RunConfig).get(key) == dict[str, Any] else ""


def _convert_by_row(conversion: Conversion, name: str, value: Any, here: str, *, is_exact: bool) -> None:
    """Convert a setting by its table row."""
    words = dict(word.partition("=")[::2] for word in here.split())
    is_switch = any(words.values())
    count = as_number(value) if here.startswith("training.max_") else None
    if words.get("recipe") in ADAPTER_RECIPES:
        del words["recipe"]
    if value is None or (value in UNSET and is_switch and not is_exact) or (count is not None and count < 1):
        conversion.not_needed[name] = "not set"
    elif not words:
        conversion.not_needed[name] = "set by the recipe"
    elif is_switch:
        conversion.convert(
            name, **{key: value if text == "NAME" else yaml.safe_load(text) for key, text in words.items()}
        )
    elif here in choices_by_group() and value not in choices_by_group()[here]:
        conversion.not_converted[name] = (
            f"{here}={format_value(value)} is not supported. Choose one of {', '.join(choices_by_group()[here])}"
        )
    elif isinstance(value, str) and field_types(RunConfig).get(here) == list[str]:
        conversion.convert(name, **{here: [part.strip() for part in value.split(",")]})
    else:
        conversion.convert(name, **{here: value})
