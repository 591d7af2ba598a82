"""The arguments of the commands that are not `app.train`: key=value against a small schema of their own."""

from collections.abc import Sequence
from typing import Any, TypeVar

from app.config.strict import kinds, typed
from app.config.values import is_optional
from app.errors import ConfigError

Section = TypeVar("Section")


def parse_command(arguments: Sequence[str], schema: type[Section]) -> Section:
    """`key=value ...` as a `schema` object. A value is all text after the first `=`: prompts need no quoting rules."""
    data: dict[str, Any] = {}
    problems = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals:
            data[key] = None if value == "null" and is_optional(kinds(schema).get(key)) else value
        else:
            problems.append(f"{argument!r} is not key=value. Keys: {', '.join(kinds(schema))}.")
    if problems:
        raise ConfigError(problems)
    return typed(schema, data)
