"""Plain data into a typed section: every unknown key, wrong type, wrong choice and missing value, all at once."""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

from omegaconf import MISSING, OmegaConf, ValidationError

from app.config.groups import choices_by_group
from app.config.schema import CHOICES, LIMITS, Limits
from app.config.suggest import did_you_mean, did_you_mean_key
from app.errors import ConfigError

Section = TypeVar("Section")

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[str]: "a list like [a, b]",
    dict[str, Any]: "a mapping",
}


def typed(schema: type[Section], data: Mapping[str, Any]) -> Section:
    """`data` as a `schema` object, or one ConfigError with every problem."""
    node = OmegaConf.structured(schema)
    problems = list(_fill(schema, data, node, ""))
    if problems:
        raise ConfigError(problems)
    result: Section = OmegaConf.to_object(node)
    return result


def leaf_keys(schema: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a schema that holds a value."""
    for name, kind in get_type_hints(schema).items():
        if is_dataclass(kind):
            yield from leaf_keys(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def unknown_key(schema: type, key: str) -> str | None:
    """The problem with a dotted key that is no key of `schema`; None for one that is, or that names a whole section."""
    known = list(leaf_keys(schema))
    if any(key == leaf or leaf.startswith(f"{key}.") or _inside_mapping(schema, key, leaf) for leaf in known):
        return None
    return f"{key} is not a key.{did_you_mean_key(key, known)}"


def _inside_mapping(schema: type, key: str, leaf: str) -> bool:
    return key.startswith(f"{leaf}.") and _type_of(schema, leaf) == dict[str, Any]


def _type_of(schema: Any, leaf: str) -> Any:
    for name in leaf.split("."):
        schema = get_type_hints(schema)[name]
    return schema


def _fill(schema: Any, data: Mapping[str, Any], node: Any, prefix: str) -> Iterator[str]:
    hints = get_type_hints(schema)
    for key in data:
        if key not in hints:
            yield f"{prefix}{key} is not a key.{did_you_mean_key(f'{prefix}{key}', [prefix + h for h in hints])}"
    for field in fields(schema):
        path, kind = prefix + field.name, hints[field.name]
        value = data.get(field.name, node._get_node(field.name))
        if is_dataclass(kind):
            inner = data.get(field.name, {})
            if isinstance(inner, Mapping):
                yield from _fill(kind, inner, node[field.name], f"{path}.")
            else:
                yield f"{path}={inner}: {path} is a section, give its keys, such as {path}.{_first_key(kind)}=..."
        elif field.name not in data or value == MISSING:
            if OmegaConf.is_missing(node, field.name):
                yield f"{path} has no value. Give {path}=..."
        else:
            yield from _set(node, field.name, value, path, kind, field.metadata)


def _set(
    node: Any, name: str, value: Any, path: str, kind: Any, metadata: Mapping[str, Any]
) -> Iterator[str]:
    try:
        node[name] = value
    except ValidationError:
        yield f"{path}={value}: expected {_expected(kind)}."
        return
    value = node[name]
    if value is None:
        return
    allowed = _allowed_names(path, metadata)
    if allowed and value not in allowed:
        yield f"{path}={value} is none of {', '.join(allowed)}.{did_you_mean(value, allowed) if len(allowed) > 1 else ''}"
    if LIMITS in metadata:
        yield from _outside(path, value, metadata[LIMITS])


def _allowed_names(path: str, metadata: Mapping[str, Any]) -> tuple[str, ...]:
    group, _, leaf = path.rpartition(".")
    if leaf == "kind":
        return choices_by_group()[group]
    return tuple(metadata.get(CHOICES, ()))


def _outside(path: str, value: float, limits: Limits) -> Iterator[str]:
    checks = (
        ("at least", limits.at_least, operator.ge),
        ("at most", limits.at_most, operator.le),
        ("above", limits.above, operator.gt),
        ("below", limits.below, operator.lt),
    )
    broken = [
        f"{words} {bound:g}"
        for words, bound, holds in checks
        if bound is not None and not holds(value, bound)
    ]
    if broken:
        yield f"{path}={value} must be {' and '.join(broken)}."


def _expected(kind: Any) -> str:
    optional = [part for part in getattr(kind, "__args__", ()) if part is not type(None)]
    if len(optional) == 1 and kind not in _WORDS:
        return f"{_WORDS[optional[0]]} or null"
    return _WORDS[kind]


def _first_key(schema: Any) -> str:
    return next(iter(get_type_hints(schema)))
