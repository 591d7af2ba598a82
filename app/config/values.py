"""One plain value, from YAML or a command line, as the type of a field; and how it is shown in a message.

OmegaConf could convert too, but it takes `${...}` in any text for an interpolation, also in a prompt about the shell.
"""

from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, get_args

_BOOLS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def converted(value: Any, kind: Any) -> Any:
    """`value` as `kind`, the type hint of a field; ValueError with what was expected."""
    plain, optional = _without_none(kind)
    if value is None and optional:
        return None
    convert, words = _KINDS[plain]
    try:
        return convert(value)
    except ValueError:
        raise ValueError(words + (" or null" if optional else "")) from None


def is_text(kind: Any) -> bool:
    """Whether a field takes any text."""
    return _without_none(kind)[0] is str


def number_type(kind: Any) -> type[int] | type[float] | None:
    """Which kind of number a field takes, if it takes any."""
    plain = _without_none(kind)[0]
    if plain is float:
        return float
    return int if plain in (int, int | str) else None


def is_optional(kind: Any) -> bool:
    """Whether a field takes null."""
    return _without_none(kind)[1]


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


def _without_none(kind: Any) -> tuple[Any, bool]:
    parts = [part for part in get_args(kind) if part is not NoneType]
    optional = NoneType in get_args(kind)
    return (parts[0] if optional else kind), optional


def _whole_number(value: Any) -> int:
    if isinstance(value, int | str) and not isinstance(value, bool):
        return int(value)
    raise ValueError


def _whole_number_or_auto(value: Any) -> int | str:
    return "auto" if value == "auto" else _whole_number(value)


def _number(value: Any) -> float:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        return float(value)
    raise ValueError


def _true_or_false(value: Any) -> bool:
    if isinstance(value, bool | int | str) and str(value).lower() in _BOOLS:
        return _BOOLS[str(value).lower()]
    raise ValueError


def _true_or_false_or_how_many(value: Any) -> bool | int:
    """Here 0 and 1 are counts."""
    try:
        return _whole_number(value)
    except ValueError:
        return _true_or_false(value)


def _how_many_or_auto(value: Any) -> bool | int | str:
    return "auto" if value == "auto" else _true_or_false_or_how_many(value)


def _true_or_false_or_auto(value: Any) -> bool | str:
    return "auto" if value == "auto" else _true_or_false(value)


def _text(value: Any) -> str:
    # not numbers with a point or an exponent: `12e4567`, a revision, would silently become `inf`
    if isinstance(value, str | int) and not isinstance(value, bool):
        return str(value)
    raise ValueError


def _texts(value: Any) -> list[str]:
    if isinstance(value, list | tuple):
        return [_text(item) for item in value]
    raise ValueError


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise ValueError


_KINDS: dict[Any, tuple[Callable[[Any], Any], str]] = {
    int: (_whole_number, "a whole number"),
    int | str: (_whole_number_or_auto, "a whole number or auto"),
    float: (_number, "a number"),
    bool: (_true_or_false, "true or false"),
    bool | int: (_true_or_false_or_how_many, "true, false or a whole number"),
    bool | int | str: (_how_many_or_auto, "true, false, a whole number or auto"),
    bool | str: (_true_or_false_or_auto, "true, false or auto"),
    str: (_text, "text (in quotes, where it looks like something else)"),
    list[str]: (_texts, "a list like [a, b]"),
    dict[str, Any]: (_mapping, "a mapping like {a: 1, b: 2}"),
}
