"""Plain data into a typed section: every unknown key, wrong type, wrong choice and missing value, all at once."""

import math
import operator
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_type_hints

from omegaconf import MISSING

from app.config.fields import CHOICES, LIMITS, SECTIONS, Limits
from app.config.groups import choices_by_group
from app.config.suggest import did_you_mean, did_you_mean_key
from app.config.values import converted, is_optional, shown
from app.errors import ConfigError

Section = TypeVar("Section")


def typed(schema: type[Section], data: Mapping[str, Any]) -> Section:
    """`data` as a `schema` object, or one ConfigError with every problem."""
    reading = _Reading(schema)
    result: Section = reading.section(schema, data, "")
    if reading.problems:
        raise ConfigError(reading.problems)
    return result


def key_problems(schema: type, data: Mapping[str, Any]) -> list[str]:
    """Only what is wrong with the keys of `data`; its values may be interpolations still."""
    return list(_key_problems(schema, schema, data, ""))


def leaf_keys(schema: Any) -> tuple[str, ...]:
    """Every dotted key of a schema that holds a value."""
    return tuple(key for key, kind in kinds(schema).items() if not is_dataclass(kind))


def kinds(schema: Any) -> dict[str, Any]:
    """The type of every dotted key of a schema, sections included."""
    return _kinds(schema)


@cache
def _kinds(schema: Hashable) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, kind in get_type_hints(schema).items():
        found[name] = kind
        if is_dataclass(kind):
            found |= {f"{name}.{inner}": its for inner, its in kinds(kind).items()}
    return found


def is_key(schema: type, key: str) -> bool:
    """Whether a dotted key is one of `schema`, names a section of it, or lies in a mapping that takes any key."""
    known = kinds(schema)
    return key in known or any(key.startswith(f"{m}.") for m, kind in known.items() if kind == dict[str, Any])


def _key_problems(root: Any, schema: Any, data: Mapping[str, Any], prefix: str) -> Iterator[str]:
    hints = get_type_hints(schema)
    named = {each.name: each.metadata[SECTIONS] for each in fields(schema) if SECTIONS in each.metadata}
    for key, value in data.items():
        path = f"{prefix}{key}"
        if key not in hints:
            yield f"{path} is not a key.{did_you_mean_key(path, kinds(root))}"
        elif is_dataclass(hints[key]):
            if isinstance(value, Mapping):
                yield from _key_problems(root, hints[key], value, f"{path}.")
            else:
                yield _no_section(path, value, hints[key])
        elif key in named:
            yield from _named_key_problems(named[key], value, path)


def _named_key_problems(schema: Any, value: Any, path: str) -> Iterator[str]:
    """Of sections by name; that `value` is no mapping at all is told with its type."""
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        if not isinstance(inner, Mapping):
            yield _no_section(f"{path}.{name}", inner, schema)
            continue
        for key in inner.keys() - get_type_hints(schema).keys():
            known = [f"{path}.{name}.{each}" for each in get_type_hints(schema)]
            yield f"{path}.{name}.{key} is not a key.{did_you_mean_key(f'{path}.{name}.{key}', known)}"


def _no_section(path: str, value: Any, schema: Any) -> str:
    first = next(iter(get_type_hints(schema)))
    return f"{path}={shown(value)}: {path} is a section. Give its keys, such as {path}.{first}=..."


@dataclass(slots=True)
class _Reading:
    """One pass over the data: what is read so far, and what was wrong with it."""

    root: Any
    problems: list[str] = field(default_factory=list)

    def section(self, schema: Any, data: Mapping[str, Any], prefix: str) -> Any:
        """A `schema` object; None once anything was wrong."""
        if not prefix:
            self.problems += _key_problems(self.root, schema, data, "")
        hints = get_type_hints(schema)
        values: dict[str, Any] = {}
        for each in fields(schema):
            path, kind = prefix + each.name, hints[each.name]
            given = data.get(each.name, MISSING)
            if is_dataclass(kind):
                inner = given if isinstance(given, Mapping) else {}
                if isinstance(given, Mapping) or given == MISSING:
                    values[each.name] = self.section(kind, inner, f"{path}.")
            elif given == MISSING:
                self._leave_out(path, each)
            elif SECTIONS in each.metadata and isinstance(given, Mapping):
                values[each.name] = self._named_sections(each.metadata[SECTIONS], given, path)
            else:
                values[each.name] = self._value(path, given, kind, each)
        return None if self.problems else schema(**values)

    def _named_sections(self, schema: Any, given: Mapping[str, Any], path: str) -> dict[str, Any]:
        sections = {str(name): inner for name, inner in given.items() if isinstance(inner, Mapping)}
        return {name: self.section(schema, inner, f"{path}.{name}.") for name, inner in sections.items()}

    def _leave_out(self, path: str, each: Field[Any]) -> None:
        if each.default_factory is NO_DEFAULT and each.default in (NO_DEFAULT, MISSING):
            self.problems.append(f"{path} has no value. Give {path}=...")

    def _value(self, path: str, given: Any, kind: Any, each: Field[Any]) -> Any:
        try:
            value = converted(given, kind)
        except ValueError as expected:
            self.problems.append(f"{path}={shown(given)}: expected {expected}.")
            return None
        if value == "" and each.default != "":
            or_null = f", or {path}=null" if is_optional(kind) else ""
            self.problems.append(f"{path}= is empty. Give a value{or_null}.")
        else:
            self.problems += _unfit(path, value, each.metadata)
        return value


def _unfit(path: str, value: Any, metadata: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a value of the right type."""
    allowed = _allowed_names(path, metadata)
    if allowed and value not in allowed:
        near = did_you_mean(value, allowed) if len(allowed) > 1 else ""
        yield f"{path}={value} is none of {', '.join(allowed)}.{near.partition(' Known')[0]}"
    if LIMITS in metadata and isinstance(value, int | float):
        yield from _outside(path, value, metadata[LIMITS])


def _allowed_names(path: str, metadata: Mapping[str, Any]) -> tuple[str, ...]:
    group, _, leaf = path.rpartition(".")
    if group and leaf == "kind":
        return choices_by_group()[group]
    return tuple(metadata.get(CHOICES, ()))


def _outside(path: str, value: float, limits: Limits) -> Iterator[str]:
    checks = (
        ("at least", limits.at_least, operator.ge),
        ("at most", limits.at_most, operator.le),
        ("above", limits.above, operator.gt),
        ("below", limits.below, operator.lt),
    )
    bounds = [(words, bound, holds) for words, bound, holds in checks if bound is not None]
    if not math.isfinite(value):
        yield f"{path}={value} must be a finite number."
    elif not all(holds(value, bound) for _, bound, holds in bounds):
        yield f"{path}={value} must be {' and '.join(f'{words} {bound}' for words, bound, _ in bounds)}."
