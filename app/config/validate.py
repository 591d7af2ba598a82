"""Plain data into a typed section: every unknown key, wrong type, wrong choice and missing value, all at once.

Neither library would do: OmegaConf takes `${...}` in any text for an interpolation, also in a prompt about the shell;
pydantic takes true for the number 1, tells one bound of two, and doubles the time to the message of a misspelt key.
"""

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args

from omegaconf import MISSING

from app.config.did_you_mean import did_you_mean, did_you_mean_key
from app.config.groups import choices_by_group
from app.config.schema import CHOICES, LIMITS, SECTIONS
from app.errors import refuse

Section = TypeVar("Section")


def typed(schema: type[Section], data: Mapping[str, Any]) -> Section:
    """`data` as a `schema` object, or one ConfigError with every problem."""
    problems = key_problems(schema, data)
    result: Section = _section(schema, data, "", problems)
    refuse(problems)
    return result


def key_problems(schema: Any, data: Mapping[str, Any]) -> list[str]:
    """Only what is wrong with the keys of `data`; its values may be interpolations still."""
    return list(_key_problems(schema, data, "", kinds(schema)))


def _kinds(schema: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in fields(schema):
        found[each.name] = each.type
        if is_dataclass(each.type):
            found |= {f"{each.name}.{inner}": kind for inner, kind in kinds(each.type).items()}
    return found


# the type of every dotted key of a schema, sections included
kinds: Callable[[Any], dict[str, Any]] = cache(_kinds)


def leaf_keys(schema: Any) -> tuple[str, ...]:
    """Every dotted key of a schema that holds a value."""
    return tuple(key for key, kind in kinds(schema).items() if not is_dataclass(kind))


def is_key(schema: Any, key: str) -> bool:
    """Whether a dotted key is one of `schema`, names a section of it, or lies in a mapping that takes any key."""
    known = kinds(schema)
    return key in known or any(key.startswith(f"{m}.") for m, kind in known.items() if kind == dict[str, Any])


def _key_problems(schema: Any, data: Mapping[str, Any], prefix: str, known: Collection[str]) -> Iterator[str]:
    of_schema = {each.name: each for each in fields(schema)}
    for key, value in data.items():
        path, each = f"{prefix}{key}", of_schema.get(key)
        if each is None:
            yield f"{path} is not a key.{did_you_mean_key(path, known)}"
        elif is_dataclass(each.type):
            yield from _section_problems(each.type, value, path, known)
        elif SECTIONS in each.metadata and isinstance(value, Mapping):
            inner = each.metadata[SECTIONS]
            for name, its in value.items():
                own = [f"{path}.{name}.{key}" for key in kinds(inner)]
                yield from _section_problems(inner, its, f"{path}.{name}", own)


def _section_problems(schema: Any, value: Any, path: str, known: Collection[str]) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from _key_problems(schema, value, f"{path}.", known)
    else:
        first = fields(schema)[0].name
        yield f"{path}={shown(value)}: {path} is a section. Give its keys, such as {path}.{first}=..."


def _section(schema: Any, data: Mapping[str, Any], prefix: str, problems: list[str]) -> Any:
    """A `schema` object; None once anything was wrong. What is no section is told with the keys."""
    values: dict[str, Any] = {}
    for each in fields(schema):
        path, given = prefix + each.name, data.get(each.name, MISSING)
        if is_dataclass(each.type):
            inner = given if isinstance(given, Mapping) else {}
            if given == MISSING or isinstance(given, Mapping):
                values[each.name] = _section(each.type, inner, f"{path}.", problems)
        elif given == MISSING:
            if each.default_factory is NO_DEFAULT and each.default in (NO_DEFAULT, MISSING):
                problems.append(f"{path} has no value. Give {path}=...")
        elif SECTIONS in each.metadata and isinstance(given, Mapping):
            values[each.name] = {
                str(name): _section(each.metadata[SECTIONS], inner, f"{path}.{name}.", problems)
                for name, inner in given.items()
                if isinstance(inner, Mapping)
            }
        else:
            values[each.name] = _value(path, given, each, problems)
    return None if problems else schema(**values)


def _value(path: str, given: Any, each: Field[Any], problems: list[str]) -> Any:
    try:
        value = converted(given, each.type)
    except ValueError as expected:
        problems.append(f"{path}={shown(given)}: expected {expected}.")
        return None
    if value == "" and each.default != "":
        or_null = f", or {path}=null" if is_optional(each.type) else ""
        problems.append(f"{path}= is empty. Give a value{or_null}.")
    else:
        problems += _unfit(path, value, each.metadata)
    return value


def _unfit(path: str, value: Any, metadata: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a value of the right type."""
    group, _, leaf = path.rpartition(".")
    allowed = choices_by_group()[group] if group and leaf == "kind" else metadata.get(CHOICES, ())
    limits = metadata.get(LIMITS, {})
    if allowed and value not in allowed:
        near = did_you_mean(value, allowed, listing=False) if len(allowed) > 1 else ""
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


def converted(value: Any, kind: Any) -> Any:
    """`value` as `kind`, the type hint of a field; ValueError with what was expected."""
    if value is None and is_optional(kind):
        return None
    plain = _without_none(kind)
    # beside other types text is `auto` alone
    parts = [part if len(plain) == 1 or part is not str else "auto" for part in plain]
    for part in reversed(parts):  # numbers before true and false: beside them 0 and 1 are counts
        with suppress(ValueError, KeyError):
            return _read(value, part)
    *others, last = (word for part in parts for word in _KINDS[part][2])
    expected = f"{', '.join(others)} or {last}" if others else last
    raise ValueError(expected + (" or null" if is_optional(kind) else ""))


def is_text(kind: Any) -> bool:
    """Whether a field takes any text."""
    return _without_none(kind) == (str,)


def number_type(kind: Any) -> type[int] | type[float] | None:
    """Which kind of number a field takes, if it takes any."""
    plain = _without_none(kind)
    if plain == (float,):
        return float
    return int if plain in ((int,), (int, str)) else None


def is_optional(kind: Any) -> bool:
    """Whether a field takes null."""
    return NoneType in get_args(kind)


def shown(value: Any) -> str:
    """A value as one would type it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {shown(inner)}' for key, inner in value.items())}}}"
    return str(value)


def _without_none(kind: Any) -> tuple[Any, ...]:
    parts = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return tuple(part for part in parts if part is not NoneType)


_BOOLS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
# types that are taken, how they are read, and the words for what was expected
_KINDS: dict[Any, tuple[tuple[type, ...], Callable[[Any], Any], tuple[str, ...]]] = {
    bool: ((bool, int, str), lambda value: _BOOLS[str(value).lower()], ("true", "false")),
    int: ((int, str), int, ("a whole number",)),
    float: ((int, float, str), float, ("a number",)),
    "auto": ((str,), {"auto": "auto"}.__getitem__, ("auto",)),
    # not numbers with a point or an exponent: `12e4567`, a revision, would silently become `inf`
    str: ((int, str), str, ("text (in quotes, where it looks like something else)",)),
    list[str]: ((list, tuple), lambda value: [_read(each, str) for each in value], ("a list like [a, b]",)),
    dict[str, Any]: ((Mapping,), dict, ("a mapping like {a: 1, b: 2}",)),
}


def _read(value: Any, part: Any) -> Any:
    types, read, _ = _KINDS[part]
    if not isinstance(value, types) or (isinstance(value, bool) and part is not bool):
        raise ValueError(value)
    return read(value)
