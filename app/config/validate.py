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
from typing import Any, TypeVar, get_args, get_type_hints

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
    for name, kind in get_type_hints(schema).items():
        found[name] = kind
        if is_dataclass(kind):
            found |= {f"{name}.{inner}": its for inner, its in kinds(kind).items()}
    return found


kinds: Callable[[Any], dict[str, Any]] = cache(
    _kinds
)  # the type of every dotted key of a schema, sections included


def leaf_keys(schema: Any) -> tuple[str, ...]:
    """Every dotted key of a schema that holds a value."""
    return tuple(key for key, kind in kinds(schema).items() if not is_dataclass(kind))


def is_key(schema: Any, key: str) -> bool:
    """Whether a dotted key is one of `schema`, names a section of it, or lies in a mapping that takes any key."""
    known = kinds(schema)
    return key in known or any(key.startswith(f"{m}.") for m, kind in known.items() if kind == dict[str, Any])


def _key_problems(schema: Any, data: Mapping[str, Any], prefix: str, known: Collection[str]) -> Iterator[str]:
    hints = get_type_hints(schema)
    of_named = {each.name: each.metadata[SECTIONS] for each in fields(schema) if SECTIONS in each.metadata}
    for key, value in data.items():
        path = f"{prefix}{key}"
        if key not in hints:
            yield f"{path} is not a key.{did_you_mean_key(path, known)}"
        elif is_dataclass(hints[key]):
            yield from _section_problems(hints[key], value, path, known)
        elif key in of_named and isinstance(value, Mapping):
            for name, inner in value.items():
                here = f"{path}.{name}"
                own = [f"{here}.{each}" for each in get_type_hints(of_named[key])]
                yield from _section_problems(of_named[key], inner, here, own)


def _section_problems(schema: Any, value: Any, path: str, known: Collection[str]) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from _key_problems(schema, value, f"{path}.", known)
    else:
        first = next(iter(get_type_hints(schema)))
        yield f"{path}={shown(value)}: {path} is a section. Give its keys, such as {path}.{first}=..."


def _section(schema: Any, data: Mapping[str, Any], prefix: str, problems: list[str]) -> Any:
    """A `schema` object; None once anything was wrong. What is no section is told with the keys."""
    hints = get_type_hints(schema)
    values: dict[str, Any] = {}
    for each in fields(schema):
        path, kind, given = prefix + each.name, hints[each.name], data.get(each.name, MISSING)
        if is_dataclass(kind):
            inner = given if isinstance(given, Mapping) else {}
            if given == MISSING or isinstance(given, Mapping):
                values[each.name] = _section(kind, inner, f"{path}.", problems)
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
            values[each.name] = _value(path, given, kind, each, problems)
    return None if problems else schema(**values)


def _value(path: str, given: Any, kind: Any, each: Field[Any], problems: list[str]) -> Any:
    try:
        value = converted(given, kind)
    except ValueError as expected:
        problems.append(f"{path}={shown(given)}: expected {expected}.")
        return None
    if value == "" and each.default != "":
        or_null = f", or {path}=null" if is_optional(kind) else ""
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
        with suppress(ValueError):
            return _KINDS[part][0](value)
    words = [word for part in parts for word in _KINDS[part][1]]
    expected = " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
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


def _one_of(*types: type) -> Callable[[Any], Any]:
    """The value itself, if it is of these types; true and false are no numbers here."""

    def read(value: Any) -> Any:
        if isinstance(value, types) and not isinstance(value, bool):
            return value
        raise ValueError

    return read


def _true_or_false(value: Any) -> bool:
    word = str(value).lower() if isinstance(value, bool | int | str) else ""
    if word in {"true", "yes", "on", "1"}:
        return True
    if word in {"false", "no", "off", "0"}:
        return False
    raise ValueError


def _auto(value: Any) -> str:
    if value == "auto":
        return "auto"
    raise ValueError


_KINDS: dict[Any, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    bool: (_true_or_false, ("true", "false")),
    int: (lambda value: int(_one_of(int, str)(value)), ("a whole number",)),
    float: (lambda value: float(_one_of(int, float, str)(value)), ("a number",)),
    "auto": (_auto, ("auto",)),
    # not numbers with a point or an exponent: `12e4567`, a revision, would silently become `inf`
    str: (
        lambda value: str(_one_of(int, str)(value)),
        ("text (in quotes, where it looks like something else)",),
    ),
    list[str]: (
        lambda value: [str(_one_of(int, str)(item)) for item in _one_of(list, tuple)(value)],
        ("a list like [a, b]",),
    ),
    dict[str, Any]: (lambda value: dict(_one_of(Mapping)(value)), ("a mapping like {a: 1, b: 2}",)),
}
