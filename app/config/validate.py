"""Validation of plain data by a typed schema: all problems at once, with suggestions for misspelled names.

OmegaConf would interpolate `${...}` in any text, even in a prompt about the shell. Pydantic accepts true for the number
1, reports only one of two bounds, and doubles the time until a misspelled key is reported.
"""

import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, field, fields, is_dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args

import yaml
from omegaconf import MISSING

from app.config.conf_files import choices_by_group
from app.errors import refuse

CHOICES, LIMITS, SECTIONS, TYPE, TYPED_ONLY = "choices", "limits", "sections", "type", "typed_only"  # in metadata
# Values of TYPED_ONLY: why a key or section is accepted only on the command line, not from a file or run folder
RUNS_CODE, STARTS_PROCESSES = "decides which code runs", "starts processes or threads"
SENDS_FILES = "decides where files are sent"


class Epochs(str):
    """Text like `0.25epoch`."""


class TokenChoice(str):
    """The word `all` or `new`."""


class Balanced(str):
    """The text `balanced`."""


def choice(*names: str, default: str = MISSING) -> Any:
    """Return a text field that accepts one of `names`."""
    return field(default=default, metadata={CHOICES: names})


def number(default: Any = MISSING, kind: Any = None, **limits: float) -> Any:
    """Return a number field with `limits`: at_least, at_most, above, below; `kind` overrides the annotation."""
    return field(default=default, metadata={LIMITS: limits} | ({TYPE: kind} if kind else {}))


# ---- did you mean


_MAX_LISTED_NAMES = 8
_MIN_LEAF_RATIO = 0.5  # the shared section alone makes keys similar
PROGRAMS = ("axolotl", "llama_factory", "trl", "torchtune", "others")
_OF_RUNS = "optimizer.lr"  # key that only run schemas have


@cache
def other_programs() -> Sequence[dict[str, Any]]:
    """Return the settings of other programs and the corresponding keys; read only after an error."""
    rows: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("other_programs.yaml").read_text())
    return rows


def of_other_program(name: str, value: str = "") -> str:
    """Return ` Did you mean optimizer.lr?` for a setting of another program, else an empty string."""
    row = setting_of(reversed(PROGRAMS), name.lstrip("-").replace("-", "_"), value)
    here = row.get("here", "")
    choices = choices_by_group().get(here, (value,))
    if here and value and " " not in here and "=" not in here and not value.startswith(("[{", "{")):
        here = f"{here}={value if value in choices else '|'.join(choices)}"
    return "".join(f" {part}" for part in (here and f"Did you mean {here}?", row.get("remark")) if part)


@cache
def _rows_by_name(programs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return table rows by setting name; earlier programs take precedence."""
    return {
        name.lower(): row for program in reversed(programs) for row in other_programs() for name in row.get(program, ())
    }


def setting_of(programs: Iterable[str], name: str, value: Any) -> dict[str, Any]:
    """Return the table row of a setting by name and value, by name, or by its last part; empty if there is none."""
    rows = _rows_by_name(tuple(programs))
    leaf = name.rpartition(".")[2]
    text = str(value).lower()
    candidates = (f"{name}={text}", name, f"{leaf}={text}", leaf)
    return next((rows[candidate.lower()] for candidate in candidates if candidate.lower() in rows), {})


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the most similar name; a name with the same first letter may differ more."""
    by_lower = {other.lower(): other for other in sorted(names)}
    initial = [other for other in by_lower if other[:1] == name[:1].lower()]
    near = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6) or get_close_matches(
        name.lower(), initial, n=1, cutoff=0.4
    )
    return by_lower[near[0]] if near else None


def nearest_keys(key: str, keys: Iterable[str]) -> list[str]:
    """Return the most similar keys: nearly equal, same prefix, same last part, or similar within the section."""
    names = sorted(keys)
    section, _, leaf = key.rpartition(".")
    nearly_equal = get_close_matches(key, names, n=1, cutoff=0.88)
    if nearly_equal and SequenceMatcher(None, leaf, nearly_equal[0].rpartition(".")[2]).ratio() > _MIN_LEAF_RATIO:
        return nearly_equal
    longer = [other for other in names if other.startswith(f"{key}_")]
    same_leaf = [other for other in names if other.rpartition(".")[2] == leaf]
    if longer or same_leaf:
        return [*longer, *sorted(same_leaf, key=lambda other: -SequenceMatcher(None, key, other).ratio())][:3]
    siblings = {other.rpartition(".")[2]: other for other in names if other.rpartition(".")[0] == section}
    near = nearest(leaf, siblings)
    return [siblings[near]] if near else []


def did_you_mean(name: str, names: Iterable[str], *, listing: bool = True) -> str:
    """Return ` Did you mean x?` if a name is similar, else (`listing`) the first valid names."""
    choices = sorted(names)
    near = nearest(name, choices)
    if near:
        return f" Did you mean {near}?"
    return _listed(choices) if listing else ""


def _listed(names: Sequence[str]) -> str:
    """Return ` Choose one of a, b, c.`, shortened."""
    listed = ", ".join(names[:_MAX_LISTED_NAMES]) + (" and more" if len(names) > _MAX_LISTED_NAMES else "")
    return f" Choose one of {listed}." if names else ""


def did_you_mean_key(key: str, keys: Iterable[str], value: str = "") -> str:
    """Return a suggestion for a dotted key, which may be just its last part (`lr` for `optimizer.lr`)."""
    names = sorted(keys)
    suggestion = of_other_program(key, value) if _OF_RUNS in names else ""
    if suggestion:
        return suggestion
    near = nearest_keys(key, names)
    if near:
        return f" Did you mean {' or '.join(near)}?"
    section = key.rpartition(".")[0]
    siblings = [other for other in names if section and other.rpartition(".")[0] == section]
    if siblings or _OF_RUNS not in names:
        return _listed(siblings) if siblings else did_you_mean(key, names)
    return did_you_mean(key, names, listing=False) or " finetune train --help lists the settings."


# ---- validate


Section = TypeVar("Section")


def parse_section(schema: type[Section], data: Mapping[str, Any], prefix: str = "") -> Section:
    """Validate `data` as a `schema` object; raise one ConfigError with all problems, whose keys have the `prefix`."""
    problems: list[str] = []
    valid_keys = [f"{prefix}{key}" for key in field_types(schema)]
    result: Section = _section(schema, data, prefix, valid_keys, problems)
    refuse(problems)
    return result


def field_types(schema: Any) -> dict[str, Any]:
    """Return the type of each dotted key of a schema, including sections."""
    types: dict[str, Any] = {}
    for schema_field in fields(schema):
        section = section_type(schema_field.type)
        types[schema_field.name] = section or schema_field.metadata.get(TYPE, schema_field.type)
        if section:
            types |= {f"{schema_field.name}.{inner}": kind for inner, kind in field_types(section).items()}
    return types


def section_type(kind: Any) -> Any:
    """Return the dataclass of a section, which may be optional; None for a value."""
    (part, *others) = _optional_parts(kind)
    return part if is_dataclass(part) and not others else None


def leaf_keys(schema: Any) -> tuple[str, ...]:
    """Return the dotted keys of a schema without sections."""
    return tuple(key for key, kind in field_types(schema).items() if not is_dataclass(kind))


def is_key(schema: Any, key: str) -> bool:
    """Return whether `schema` has a dotted key, as a value, a section, or inside a mapping with free keys."""
    types = field_types(schema)
    return key in types or any(key.startswith(f"{m}.") for m, kind in types.items() if kind == dict[str, Any])


def typed_only(schema: Any, key: str) -> str:
    """Return why a key or its section is accepted only on the command line; empty if accepted everywhere."""
    name, _, inner = key.partition(".")
    schema_field = next((schema_field for schema_field in fields(schema) if schema_field.name == name), None)
    if schema_field is None:
        return ""
    reason: str = schema_field.metadata.get(TYPED_ONLY, "")
    return reason or (typed_only(schema_field.type, inner) if is_dataclass(schema_field.type) else "")


def _section(schema: Any, data: Any, prefix: str, valid_keys: Collection[str], problems: list[str]) -> Any:
    """Return a `schema` object, or None if there are problems."""
    schema_fields = {schema_field.name: schema_field for schema_field in fields(schema)}
    valid_keys = {*valid_keys, *(f"{prefix}{name}" for name in schema_fields)}
    if not isinstance(data, Mapping):
        path, example = prefix.rstrip("."), f"{prefix}{next(iter(schema_fields))}"
        value = format_value(data)
        advice = of_other_program(f"{path}={value}") or f" Set its keys, e.g. {example}=..."
        problems.append(f"{path}={value}: {path} is a section.{advice}")
        return None
    unknown = [f"{prefix}{key}" for key in data if key not in schema_fields]
    problems += [f"Unknown setting {path}.{did_you_mean_key(path, valid_keys)}" for path in unknown]
    values: dict[str, Any] = {}
    for name, schema_field in schema_fields.items():
        path, value = f"{prefix}{name}", data.get(name, MISSING)
        if section := section_type(schema_field.type):
            is_absent = value == MISSING and is_optional(schema_field.type)
            values[name] = (
                None
                if is_absent
                else _section(section, {} if value == MISSING else value, f"{path}.", valid_keys, problems)
            )
        elif SECTIONS in schema_field.metadata and isinstance(value, Mapping):
            entry_schema = schema_field.metadata[SECTIONS]
            values[name] = {
                str(key): _section(entry_schema, inner, f"{path}.{key}.", valid_keys, problems)
                for key, inner in value.items()
            }
        else:
            values[name] = _value(path, value, schema_field, problems)
    return None if problems else schema(**values)


def _value(path: str, raw: Any, schema_field: Field[Any], problems: list[str]) -> Any:
    if raw == MISSING:
        if schema_field.default_factory is not NO_DEFAULT:
            return schema_field.default_factory()
        if schema_field.default in (NO_DEFAULT, MISSING):
            choices = " or ".join(f"{path}={name}" for name in choices_of(path, schema_field.metadata))
            problems.append(f"{path}= is required. Set {f'{choices}.' if choices else f'{path}=...'}")
        return schema_field.default
    kind = schema_field.metadata.get(TYPE, schema_field.type)
    try:
        value = convert(raw, kind)
    except ValueError as expected:
        hint = " Use 0 for none." if raw is None and schema_field.metadata.get(LIMITS) == {"at_least": 0} else ""
        if isinstance(raw, str) and list[str] in _type_parts(kind):
            hint = f" Set {path}=[{raw}]."
        problems.append(f"{path}={format_value(raw)}: expected {expected}.{hint}")
        return None
    if value == "" and schema_field.default != "":
        or_null = f", or {path}=null" if is_optional(schema_field.type) else ""
        problems.append(f"{path}= is empty. Set a value{or_null}.")
    else:
        problems += _value_problems(path, value, schema_field.metadata)
    return value


def choices_of(path: str, metadata: Mapping[str, Any]) -> Collection[str]:
    """Return the choices of a key; empty if it is not a choice."""
    group, _, leaf = path.rpartition(".")
    names: Collection[str] = metadata.get(CHOICES, ())
    return choices_by_group()[group] if group and leaf == "kind" and not names else names


def _value_problems(path: str, value: Any, metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield violations of the choices and limits by a value of the right type."""
    allowed = choices_of(path, metadata)
    limits = metadata.get(LIMITS, {})
    if allowed and value not in allowed:
        near = did_you_mean(value, allowed, listing=False) if len(allowed) > 1 else ""
        near = of_other_program(f"{path}={value}") or near
        yield f"{path}={value}: expected one of {', '.join(allowed)}.{near}"
    if not limits or not isinstance(value, int | float):
        return
    if not math.isfinite(value):
        yield f"{path}={value} must be a finite number."
    elif not all(_LIMITS[name](value, bound) for name, bound in limits.items()):
        bounds = " and ".join(f"{name.replace('_', ' ')} {bound}" for name, bound in limits.items())
        yield f"{path}={value} must be {bounds}."


_LIMITS: dict[str, Callable[[Any, Any], bool]] = {
    "at_least": operator.ge,
    "at_most": operator.le,
    "above": operator.gt,
    "below": operator.lt,
}


def convert(value: Any, kind: Any) -> Any:
    """Convert `value` to `kind`, the type hint of a field; the ValueError names the expected type."""
    if value is None and is_optional(kind):
        return None
    for part in reversed(_type_parts(kind)):  # numbers before booleans: 0 and 1 are counts if numbers are allowed
        with suppress(ValueError, KeyError):
            return _read(value, part)
    raise ValueError(type_text(kind))


def type_text(kind: Any) -> str:
    """Return the accepted types of a field as text, such as `a whole number, auto or null`."""
    parts = _type_parts(kind)
    *others, last = (name for part in parts for name in _TYPES[part][2])
    expected = f"{', '.join(others)} or {last}" if others else last
    return expected + (" or null" if is_optional(kind) else "")


def _type_parts(kind: Any) -> list[Any]:
    """Return the types of a field; text in a union means only `auto`."""
    plain = _optional_parts(kind)
    return [part if len(plain) == 1 or part is not str else "auto" for part in plain]


def takes_text(kind: Any) -> bool:
    """Return whether a field is text."""
    return _optional_parts(kind) == (str,)


def number_type(kind: Any) -> type[int] | type[float] | None:
    """Return int or float for a numeric field, else None."""
    plain = _optional_parts(kind)
    if plain in ((float,), (float, str)):
        return float
    return int if plain in ((int,), (int, str), (int, Epochs)) else None


def is_optional(kind: Any) -> bool:
    """Return whether a field accepts null."""
    return NoneType in get_args(kind)


def format_value(value: Any) -> str:
    """Format a value as typed on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {format_value(inner)}' for key, inner in value.items())}}}"
    return str(value)


def _optional_parts(kind: Any) -> tuple[Any, ...]:
    parts = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return tuple(part for part in parts if part is not NoneType)


def _epochs(text: str) -> str:
    number = float(text.removesuffix("s").removesuffix("epoch")) if "epoch" in text else 0.0
    if not 0 < number < math.inf:
        raise ValueError(text)
    return f"{number:g}epoch"


_BOOLS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
# accepted types, the conversion, and names for error messages
_TYPES: dict[Any, tuple[tuple[type, ...], Callable[[Any], Any], tuple[str, ...]]] = {
    bool: ((bool, int, str), lambda value: _BOOLS[str(value).lower()], ("true", "false")),
    int: ((int, str), int, ("a whole number",)),
    float: ((int, float, str), float, ("a number",)),
    "auto": ((str,), {"auto": "auto"}.__getitem__, ("auto",)),
    Epochs: ((str,), _epochs, ("a fraction of an epoch like 0.25epoch",)),
    Balanced: ((str,), {"balanced": "balanced"}.__getitem__, ("balanced",)),
    # not floats: `12e4567`, a revision, would silently become `inf`
    str: ((int, str), str, ("text (quote it if it looks like another type)",)),
    TokenChoice: ((str,), {"all": "all", "new": "new"}.__getitem__, ("all", "new")),
    list[int]: ((list, tuple), lambda value: [_read(item, int) for item in value], ("a list like [3, 17]",)),
    list[str]: ((list, tuple), lambda value: [_read(item, str) for item in value], ("a list like [a, b]",)),
    list[float]: (
        (list, tuple),
        lambda value: [_read(item, float) for item in value],
        ("a list of numbers like [1, 2.5]",),
    ),
    dict[str, Any]: ((Mapping,), dict, ("a mapping like {a: 1, b: 2}",)),
}


def _read(value: Any, part: Any) -> Any:
    types, read, _ = _TYPES[part]
    if not isinstance(value, types) or (isinstance(value, bool) and part is not bool):
        raise ValueError(value)
    return read(value)
