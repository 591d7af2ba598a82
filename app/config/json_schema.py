"""JSON Schema (draft 2020-12) of settings files and run.yaml, for editors with the YAML language server.

Values are those that `parse_section` accepts, as typed in YAML: `true` instead of `"yes"`, numbers without quotes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args

from omegaconf import MISSING

from app.config.conf_files import choices_by_group
from app.config.help import meanings
from app.config.load import default_choices, default_values
from app.config.overrides import OPTIONAL_GROUPS, PLACES
from app.config.rules import readers_of
from app.config.schema import RunConfig
from app.config.validate import LIMITS, SECTIONS, TYPE, Balanced, Epochs, TokenChoice, choices_of, typed_only

SCHEMA_FILE = "finetune.schema.json"  # next to the settings files that name it
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_LIMITS = {"at_least": "minimum", "at_most": "maximum", "above": "exclusiveMinimum", "below": "exclusiveMaximum"}
_TYPES: dict[Any, dict[str, Any]] = {
    bool: {"type": ["boolean"]},
    int: {"type": ["integer"]},
    float: {"type": ["number"]},
    str: {"type": ["string", "integer"]},  # a revision or a name of digits needs no quotes
    Epochs: {"type": ["string"], "pattern": r"^(?=[0-9.]*[1-9])([0-9]+\.?[0-9]*|\.[0-9]+)epochs?$"},
    TokenChoice: {"enum": ["all", "new"]},
    Balanced: {"const": "balanced"},
    list[int]: {"type": ["array"], "items": {"type": "integer"}},
    list[float]: {"type": ["array"], "items": {"type": "number"}},
    list[str]: {"type": ["array"], "items": {"type": ["string", "integer"]}},
    dict[str, Any]: {"type": ["object"]},
    NoneType: {"type": ["null"]},
}
_PLACE = {"type": "string", "pattern": r"[/\\.]"}  # path, file name or hub ID
_OF_SWEEPS = "sweep"  # group whose keys no run has
_NOT_IN_FILES = "hardware"  # group that finetune check accepts on the command line only
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")  # to another key
_ENTRY = "NAME"  # placeholder for entry names in the paths of definitions

Schema = dict[str, Any]


def settings_schema() -> Schema:
    """Return the schema of a settings file: groups, and keys in sections or with dots. run.yaml matches it too."""
    definitions: dict[str, Schema] = {}
    _add_section(RunConfig, "", default_values(), definitions)
    run, chosen = definitions.pop(""), default_choices()
    groups = {group: _group(group, chosen.get(group), definitions) for group in choices_by_group()}
    del groups[_NOT_IN_FILES]
    return {
        "$schema": _DIALECT,
        "title": "Settings of finetune train",
        **run,
        "properties": {**groups, **{key: schema for key, schema in run["properties"].items() if key not in groups}},
        "patternProperties": {**run["patternProperties"], rf"^{_OF_SWEEPS}\.": {}},
        "$defs": definitions,
    }


def _group(group: str, default: str | None, definitions: Mapping[str, Schema]) -> Schema:
    """Return the schema of a group: the name of a choice, or the keys of its section."""
    alternatives: list[Schema] = [{"enum": [*choices_by_group()[group]]}]
    values = [f"a choice of conf/{group}/"]
    if group in PLACES:
        alternatives.append(_PLACE)
        values.append(f"{PLACES[group][1]} (./NAME in the current directory)")
    if group in OPTIONAL_GROUPS:
        alternatives.append({"type": "null"})
    if group in definitions:
        alternatives.append({"$ref": f"#/$defs/{group}"})
        values.append("keys of the section")
    if group == _OF_SWEEPS:
        alternatives.append({"type": "object"})
    purpose = f"{definitions[group]['description']} " if group in definitions else ""
    schema: Schema = {"description": f"{purpose}Value: {', or '.join(values)}.", "anyOf": alternatives}
    return schema if default is None else {**schema, "default": default}


def _add_section(
    section: Any, path: str, defaults: Mapping[str, Any], definitions: dict[str, Schema], prefix: str = ""
) -> None:
    """Add the schemas of a section and of those in it to `definitions`, by their dotted path."""
    documentation, properties, patterns = meanings(section), dict[str, Schema](), dict[str, Schema]()
    for entry in fields(section):
        name, key = entry.name, f"{prefix}{entry.name}"
        if is_dataclass(entry.type):
            _add_section(entry.type, key, defaults.get(name, {}), definitions, f"{key}.")
            inner, place = definitions[key], f"#/$defs/{key}"
            properties[name] = {"$ref": place}
            properties |= {f"{name}.{leaf}": {"$ref": f"{place}/properties/{leaf}"} for leaf in inner["properties"]}
            patterns |= _below(name, inner["patternProperties"])
            continue
        properties[name] = {"description": description(key, documentation[name]), **_value(key, entry)}
        value = _default(entry, defaults)
        if isinstance(value, str) and (reference := _REFERENCE.fullmatch(value)):
            properties[name]["description"] += f" (default: {reference[1]})"
        elif not (isinstance(value, str) and "${" in value):  # depends on the time or the machine
            properties[name] |= {} if value is NO_DEFAULT else {"default": value}
        if SECTIONS in entry.metadata:
            entries = _entries(entry.metadata[SECTIONS], key, definitions)
            properties[name] |= {"patternProperties": entries, "additionalProperties": False}
            patterns |= _below(name, entries)
        elif entry.type == dict[str, Any]:
            patterns[rf"^{name}\."] = {}
    definitions[path] = {
        "description": section.__doc__ or "",
        "type": "object",
        "properties": properties,
        "patternProperties": patterns,
        "additionalProperties": False,
    }


def _entries(section: Any, key: str, definitions: dict[str, Schema]) -> dict[str, Schema]:
    """Return the patterns of a mapping of named sections: NAME, and NAME.KEY."""
    path = f"{key}.{_ENTRY}"
    _add_section(section, path, {}, definitions, f"{path}.")
    inner, place = definitions[path], f"#/$defs/{path}"
    leaves = {rf"^{leaf}$": {"$ref": f"{place}/properties/{leaf}"} for leaf in inner["properties"]}
    return {r"^[^.]+$": {"$ref": place}, **_below("[^.]+", {**leaves, **inner["patternProperties"]})}


def _below(name: str, patterns: Mapping[str, Schema]) -> dict[str, Schema]:
    """Prefix the patterns of a section with its name or name pattern."""
    return {rf"^{name}\.{pattern[1:]}": schema for pattern, schema in patterns.items()}


def description(key: str, meaning: str) -> str:
    """Return the meaning of a key, with the choices that read it, and whether files may set it."""
    readers = readers_of(key)
    text = f"{meaning} ({', '.join(readers)})" if readers else meaning
    return f"{text} (command line only)" if typed_only(RunConfig, key) else text


def _value(key: str, entry: Field[Any]) -> Schema:
    """Return the types, choices and limits of a key."""
    kind = entry.metadata.get(TYPE, entry.type)
    parts = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    alternatives: list[Schema] = []
    for part in parts:
        if part is str and len({*parts} - {NoneType}) > 1:  # text in a union is only `auto`
            alternatives.append({"const": "auto"})
        elif part is str and (names := choices_of(key, entry.metadata)):
            alternatives.append({"enum": [*names]})
        elif part is str and entry.default != "":
            alternatives.append({**_TYPES[str], "minLength": 1})
        else:
            alternatives.append(_TYPES[part])
    limits = {_LIMITS[name]: bound for name, bound in entry.metadata.get(LIMITS, {}).items()}
    return _merged(alternatives, limits)


def _merged(alternatives: Sequence[Schema], limits: Schema) -> Schema:
    """Merge alternatives into one schema. Typed ones are joined: constraints of one type do not affect the others."""
    typed = [part for part in alternatives if "type" in part]
    joined = {name: value for part in typed for name, value in part.items()} | limits
    types = [name for part in typed for name in part["type"]]
    joined["type"] = types if len(types) > 1 else "".join(types)
    others = [part for part in alternatives if "type" not in part]
    if not typed:
        return others[0] if len(others) == 1 else {"anyOf": others}
    return {"anyOf": [joined, *others]} if others else joined


def _default(entry: Field[Any], defaults: Mapping[str, Any]) -> Any:
    """Return the default of finetune train without arguments, with unresolved `${...}`; NO_DEFAULT if there is none."""
    value = defaults.get(entry.name, entry.default)
    if value is NO_DEFAULT and callable(entry.default_factory):
        value = entry.default_factory()
    of_model = isinstance(value, Mapping) and value
    return NO_DEFAULT if of_model or value in (MISSING, "") else value
