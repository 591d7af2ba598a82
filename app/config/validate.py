"""Validation of plain data by a typed schema: all problems at once, with suggestions for misspelled names.

OmegaConf would take `${...}` in any text for an interpolation, also in a prompt about the shell. Pydantic takes true
for the number 1, reports one bound of two, and doubles the time to the message about a misspelt key.
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
# Values of TYPED_ONLY: why a key or section is taken from the command line only, never from a file or run folder
RUNS_CODE, STARTS_PROCESSES = "decides which code runs", "starts processes or threads"


class Epochs(str):
    """A text like `0.25epoch`."""


class TokenChoice(str):
    """The word `all` or `new`."""


class Balanced(str):
    """The text `balanced`."""


def choice(*names: str, default: str = MISSING) -> Any:
    """A text field that takes one of `names`."""
    return field(default=default, metadata={CHOICES: names})


def number(default: Any = MISSING, kind: Any = None, **limits: float) -> Any:
    """A number field within `limits`: at_least, at_most, above, below; of `kind` where its annotation cannot say it."""
    return field(default=default, metadata={LIMITS: limits} | ({TYPE: kind} if kind else {}))


# ---- did you mean


_MAX_LISTED_NAMES = 12
_MIN_LEAF_RATIO = 0.5  # sections alone make keys alike
PROGRAMS = ("axolotl", "llama_factory", "trl", "torchtune", "others")
_OF_RUNS = "optimizer.lr"  # a key that only runs have


@cache
def other_programs() -> Sequence[dict[str, Any]]:
    """Settings of other programs, and their keys here; read at a mistake only."""
    rows: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("other_programs.yaml").read_text())
    return rows


def of_other_program(name: str, value: str = "") -> str:
    """` Did you mean optimizer.lr?` for a setting of another program; empty for any other name."""
    row = setting_of(reversed(PROGRAMS), name.lstrip("-").replace("-", "_"), value)
    here = row.get("here", "")
    choices = choices_by_group().get(here, (value,))
    if here and value and " " not in here and "=" not in here:
        here = f"{here}={value if value in choices else '|'.join(choices)}"
    return "".join(f" {part}" for part in (here and f"Did you mean {here}?", row.get("remark")) if part)


@cache
def _rows_by_name(programs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The rows of some programs, of which the first wins."""
    return {name.lower(): row for each in reversed(programs) for row in other_programs() for name in row.get(each, ())}


def setting_of(programs: Iterable[str], name: str, value: Any) -> dict[str, Any]:
    """The row of a setting of programs, by its name and value, its name, or the last part of it; else empty."""
    rows = _rows_by_name(tuple(programs))
    leaf = name.rpartition(".")[2]
    text = str(value).lower()
    wanted = (f"{name}={text}", name, f"{leaf}={text}", leaf)
    return next((rows[each.lower()] for each in wanted if each.lower() in rows), {})


def nearest(given: str, names: Iterable[str]) -> str | None:
    """The most similar name; one with the right first letter may differ more."""
    by_lower = {name.lower(): name for name in sorted(names)}
    initial = [name for name in by_lower if name[:1] == given[:1].lower()]
    near = get_close_matches(given.lower(), by_lower, n=1, cutoff=0.6) or get_close_matches(
        given.lower(), initial, n=1, cutoff=0.4
    )
    return by_lower[near[0]] if near else None


def nearest_keys(given: str, keys: Iterable[str]) -> list[str]:
    """The most similar dotted keys: nearly equal, begun so, with the same last part, or similar in the section."""
    known = sorted(keys)
    section, _, leaf = given.rpartition(".")
    nearly_equal = get_close_matches(given, known, n=1, cutoff=0.88)
    if nearly_equal and SequenceMatcher(None, leaf, nearly_equal[0].rpartition(".")[2]).ratio() > _MIN_LEAF_RATIO:
        return nearly_equal
    begun = [key for key in known if key.startswith(f"{given}_")]
    same_leaf = [key for key in known if key.rpartition(".")[2] == leaf]
    if begun or same_leaf:
        return [*begun, *sorted(same_leaf, key=lambda key: -SequenceMatcher(None, given, key).ratio())][:3]
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    near = nearest(leaf, siblings)
    return [siblings[near]] if near else []


def did_you_mean(given: str, known: Iterable[str], *, listing: bool = True) -> str:
    """` Did you mean x?` if a name is similar, else (`listing`) the first of the valid names."""
    names = sorted(known)
    near = nearest(given, names)
    if near:
        return f" Did you mean {near}?"
    return _listed(names) if listing else ""


def _listed(names: Sequence[str]) -> str:
    listed = ", ".join(names[:_MAX_LISTED_NAMES]) + (" and more" if len(names) > _MAX_LISTED_NAMES else "")
    return f" Known: {listed}." if names else ""


def did_you_mean_key(given: str, known: Iterable[str], value: str = "") -> str:
    """A suggestion for a dotted key, which may be given by its last part (`lr` for `optimizer.lr`)."""
    keys = sorted(known)
    meant = of_other_program(given, value) if _OF_RUNS in keys else ""
    if meant:
        return meant
    near = nearest_keys(given, keys)
    if near:
        return f" Did you mean {' or '.join(near)}?"
    section = given.rpartition(".")[0]
    siblings = [key for key in keys if section and key.rpartition(".")[0] == section]
    return _listed(siblings) if siblings else did_you_mean(given, keys)


# ---- validate


Section = TypeVar("Section")


def parse_section(schema: type[Section], data: Mapping[str, Any], prefix: str = "") -> Section:
    """Validate `data` as a `schema` object; one ConfigError has every problem, its keys as typed, with the `prefix`."""
    problems: list[str] = []
    known = [f"{prefix}{key}" for key in field_types(schema)]
    result: Section = _section(schema, data, prefix, known, problems)
    refuse(problems)
    return result


def field_types(schema: Any) -> dict[str, Any]:
    """The type of every dotted key of a schema, sections included."""
    found: dict[str, Any] = {}
    for each in fields(schema):
        section = section_type(each.type)
        found[each.name] = section or each.metadata.get(TYPE, each.type)
        if section:
            found |= {f"{each.name}.{inner}": kind for inner, kind in field_types(section).items()}
    return found


def section_type(kind: Any) -> Any:
    """Return the dataclass of a section, which may be optional; None for a value."""
    (part, *others) = _optional_parts(kind)
    return part if is_dataclass(part) and not others else None


def leaf_keys(schema: Any) -> tuple[str, ...]:
    """Every dotted key of a schema that has a value, not a section."""
    return tuple(key for key, kind in field_types(schema).items() if not is_dataclass(kind))


def is_key(schema: Any, key: str) -> bool:
    """Whether `schema` has the dotted key, as a value, a section, or inside a mapping that takes any key."""
    known = field_types(schema)
    return key in known or any(key.startswith(f"{m}.") for m, kind in known.items() if kind == dict[str, Any])


def typed_only(schema: Any, key: str) -> str:
    """Return why a key is accepted only on the command line, by its own mark or that of its section; empty if it is
    accepted everywhere.
    """
    name, _, inner = key.partition(".")
    each = next((each for each in fields(schema) if each.name == name), None)
    if each is None:
        return ""
    reason: str = each.metadata.get(TYPED_ONLY, "")
    return reason or (typed_only(each.type, inner) if is_dataclass(each.type) else "")


def _section(schema: Any, data: Any, prefix: str, known: Collection[str], problems: list[str]) -> Any:
    """A `schema` object, or None after any problem."""
    own = {each.name: each for each in fields(schema)}
    known = {*known, *(f"{prefix}{name}" for name in own)}
    if not isinstance(data, Mapping):
        path, example = prefix.rstrip("."), f"{prefix}{next(iter(own))}"
        problems.append(f"{path}={format_value(data)}: {path} is a section. Give its keys, such as {example}=...")
        return None
    unknown = [f"{prefix}{key}" for key in data if key not in own]
    problems += [f"{path} is not a key.{did_you_mean_key(path, known)}" for path in unknown]
    values: dict[str, Any] = {}
    for name, each in own.items():
        path, given = f"{prefix}{name}", data.get(name, MISSING)
        if section := section_type(each.type):
            is_absent = given == MISSING and is_optional(each.type)
            values[name] = (
                None if is_absent else _section(section, {} if given == MISSING else given, f"{path}.", known, problems)
            )
        elif SECTIONS in each.metadata and isinstance(given, Mapping):
            schema_of_each = each.metadata[SECTIONS]
            values[name] = {
                str(key): _section(schema_of_each, inner, f"{path}.{key}.", known, problems)
                for key, inner in given.items()
            }
        else:
            values[name] = _value(path, given, each, problems)
    return None if problems else schema(**values)


def _value(path: str, given: Any, each: Field[Any], problems: list[str]) -> Any:
    if given == MISSING:
        if each.default_factory is not NO_DEFAULT:
            return each.default_factory()
        if each.default in (NO_DEFAULT, MISSING):
            choices = " or ".join(f"{path}={name}" for name in _choices(path, each.metadata))
            problems.append(f"{path} has no value. Give {f'{choices}.' if choices else f'{path}=...'}")
        return each.default
    try:
        value = convert(given, each.metadata.get(TYPE, each.type))
    except ValueError as expected:
        or_zero = " 0 is none." if given is None and each.metadata.get(LIMITS) == {"at_least": 0} else ""
        problems.append(f"{path}={format_value(given)}: expected {expected}.{or_zero}")
        return None
    if value == "" and each.default != "":
        or_null = f", or {path}=null" if is_optional(each.type) else ""
        problems.append(f"{path}= is empty. Give a value{or_null}.")
    else:
        problems += _value_problems(path, value, each.metadata)
    return value


def _choices(path: str, metadata: Mapping[str, Any]) -> Collection[str]:
    """The names that a key takes; empty where it takes others."""
    group, _, leaf = path.rpartition(".")
    names: Collection[str] = metadata.get(CHOICES, ())
    return choices_by_group()[group] if group and leaf == "kind" and not names else names


def _value_problems(path: str, value: Any, metadata: Mapping[str, Any]) -> Iterator[str]:
    """Problems with a value of the right type: its choices and limits."""
    allowed = _choices(path, metadata)
    limits = metadata.get(LIMITS, {})
    if allowed and value not in allowed:
        near = did_you_mean(value, allowed, listing=False) if len(allowed) > 1 else ""
        near = of_other_program(f"{path}={value}") or near
        yield f"{path}={value} is none of {', '.join(allowed)}.{near}"
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
    """Convert `value` to `kind`, the type hint of a field; the ValueError says what was expected."""
    if value is None and is_optional(kind):
        return None
    for part in reversed(_type_parts(kind)):  # numbers before true and false: beside them 0 and 1 are counts
        with suppress(ValueError, KeyError):
            return _read(value, part)
    raise ValueError(type_text(kind))


def type_text(kind: Any) -> str:
    """What a field takes, such as `a whole number, auto or null`."""
    parts = _type_parts(kind)
    *others, last = (name for part in parts for name in _TYPES[part][2])
    expected = f"{', '.join(others)} or {last}" if others else last
    return expected + (" or null" if is_optional(kind) else "")


def _type_parts(kind: Any) -> list[Any]:
    """The types of a field; beside other types text is `auto` alone."""
    plain = _optional_parts(kind)
    return [part if len(plain) == 1 or part is not str else "auto" for part in plain]


def takes_text(kind: Any) -> bool:
    """Whether a field's type is text."""
    return _optional_parts(kind) == (str,)


def number_type(kind: Any) -> type[int] | type[float] | None:
    """int or float for a field that takes numbers, else None."""
    plain = _optional_parts(kind)
    if plain in ((float,), (float, str)):
        return float
    return int if plain in ((int,), (int, str), (int, Epochs)) else None


def is_optional(kind: Any) -> bool:
    """Whether a field takes null."""
    return NoneType in get_args(kind)


def format_value(value: Any) -> str:
    """A value as it is typed on the command line."""
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
# accepted types, the conversion, and the names for what was expected
_TYPES: dict[Any, tuple[tuple[type, ...], Callable[[Any], Any], tuple[str, ...]]] = {
    bool: ((bool, int, str), lambda value: _BOOLS[str(value).lower()], ("true", "false")),
    int: ((int, str), int, ("a whole number",)),
    float: ((int, float, str), float, ("a number",)),
    "auto": ((str,), {"auto": "auto"}.__getitem__, ("auto",)),
    Epochs: ((str,), _epochs, ("a part of an epoch like 0.25epoch",)),
    Balanced: ((str,), {"balanced": "balanced"}.__getitem__, ("balanced",)),
    # not numbers with a point or an exponent: `12e4567`, a revision, would silently become `inf`
    str: ((int, str), str, ("text (in quotes, where it looks like something else)",)),
    TokenChoice: ((str,), {"all": "all", "new": "new"}.__getitem__, ("all", "new")),
    list[int]: ((list, tuple), lambda value: [_read(each, int) for each in value], ("a list like [3, 17]",)),
    list[str]: ((list, tuple), lambda value: [_read(each, str) for each in value], ("a list like [a, b]",)),
    list[float]: (
        (list, tuple),
        lambda value: [_read(each, float) for each in value],
        ("a list of numbers like [1, 2.5]",),
    ),
    dict[str, Any]: ((Mapping,), dict, ("a mapping like {a: 1, b: 2}",)),
}


def _read(value: Any, part: Any) -> Any:
    types, read, _ = _TYPES[part]
    if not isinstance(value, types) or (isinstance(value, bool) and part is not bool):
        raise ValueError(value)
    return read(value)
