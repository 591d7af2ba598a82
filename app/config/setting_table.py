"""Settings of other programs by the tables of their names, and what becomes of a file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from app.config.did_you_mean import setting_of
from app.config.groups import choices_by_group
from app.config.schema import RunConfig
from app.config.validate import field_types, format_value, is_key, typed_only
from app.config.yaml_files import as_number

PROGRAMS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("converted_files.yaml").read_text("utf-8")
)
UNSET: tuple[Any, ...] = (None, "", [], {}, False, "none", "None")
OF_ADAPTERS = ("lora", "qlora", "full")  # recipes that follow from the adapter and the bits of the whole file


@dataclass(kw_only=True, slots=True)
class Conversion:
    """The settings of a file: `words` of this program, and what became of each setting."""

    program: str
    settings: Mapping[str, Any]
    words: dict[str, Any] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)
    needless: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, Any]:
        """What is known of files of the program."""
        return PROGRAMS[self.program]

    def has(self, *names: str) -> str:
        """The first of some settings that is set; empty for none."""
        return next((name for name in names if self.settings.get(name) not in UNSET), "")

    def carry(self, name: str, **words: Any) -> None:
        """Set words of this program for a setting; a dot in a key is written as two underscores."""
        given = {key.replace("__", "."): value for key, value in words.items()}
        self.words |= given
        self.carried[name] = " ".join(f"{key}={format_value(value)}" for key, value in given.items())


def lost(found: Conversion, name: str, value: Any) -> None:
    """A setting with advice in its row of the table, and without a translation."""
    row = setting_of(found.facts["columns"], name, value)
    if value in UNSET or (as_number(value) == 1 and name.endswith(("size", "degree", "dim"))):
        found.needless[name] = "it is not set"
    else:
        found.lost[name] = f"{row['here']}: {row['remark']}"


def by_table(found: Conversion, name: str, value: Any) -> None:
    """A setting by the row of its name, or of its name and value; by its name alone where it has one here."""
    facts = found.facts
    known = facts.get("alias", {}).get(name, name)
    needless = facts["needless"].split()
    row = {} if name in needless else setting_of(facts["columns"], known, value)
    here, remark = row.get("here", ""), row.get("remark", "")
    section = _mapping_of(found, known)
    if not row and any(fnmatch(name, pattern) for pattern in needless):
        found.needless[name] = "nothing here corresponds to it"
    elif here == "cache_dir":
        found.needless[name] = f"{here} has it, which is typed"
    elif typed := [key for key in (known, f"model.{known}", here) if typed_only(RunConfig, key)]:
        found.lost[name] = f"it must be typed: {typed[0]}={format_value(value)}" if value else "it is off"
    elif section and not row and known.partition(".")[2].isidentifier():
        found.carry(name, **{f"{section}.{known.partition('.')[2]}": value})
    elif not row and (value is None or (value is False and known in choices_by_group())):
        found.needless[name] = "it is not set"
    elif is_key(RunConfig, known) and not row:
        found.carry(name, **{known: value})
    elif not here and (value in UNSET or remark.endswith("Leave it out.")):
        found.needless[name] = remark or ("it is off" if value is False else "it is not set")
    elif not here:
        found.lost[name] = remark or "no setting of this program is known for it: docs/keys.md has all"
    else:
        is_exact = bool(setting_of(facts["columns"], f"{known}={value}", ""))
        _carry_here(found, name, value, here, is_exact=is_exact)


def _mapping_of(found: Conversion, name: str) -> str:
    """The key here of a setting that is a mapping, for one of its entries."""
    key = setting_of(found.facts["columns"], name.partition(".")[0], "").get("here", "") if "." in name else ""
    return str(key) if field_types(RunConfig).get(key) == dict[str, Any] else ""


def _carry_here(found: Conversion, name: str, value: Any, here: str, *, is_exact: bool) -> None:
    """Carry a setting by the words of its row in the table."""
    words = dict(word.partition("=")[::2] for word in here.split())
    is_switch = any(words.values())
    count = as_number(value) if here.startswith("training.max_") else None
    if words.get("recipe") in OF_ADAPTERS:
        del words["recipe"]
    if value is None or (value in UNSET and is_switch and not is_exact) or (count is not None and count < 1):
        found.needless[name] = "it is not set"
    elif not words:
        found.needless[name] = "the recipe has it"
    elif is_switch:
        found.carry(name, **{key: value if text == "NAME" else yaml.safe_load(text) for key, text in words.items()})
    elif here in choices_by_group() and value not in choices_by_group()[here]:
        found.lost[name] = f"{here}={format_value(value)} is not offered: {', '.join(choices_by_group()[here])} are"
    elif isinstance(value, str) and field_types(RunConfig).get(here) == list[str]:
        found.carry(name, **{here: [each.strip() for each in value.split(",")]})
    else:
        found.carry(name, **{here: value})
    if count is not None and count >= 1:
        found.changed.append(
            f"{name}: {format_value(value)}: a run also ends after training.epochs, whichever is first"
        )
