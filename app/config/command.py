"""The arguments of the commands that are not `app.train`: key=value against a small schema of their own."""

from collections.abc import Sequence
from typing import Any, TypeVar

from app.config.strict import typed
from app.errors import ConfigError

Section = TypeVar("Section")


def parse_command(arguments: Sequence[str], schema: type[Section]) -> Section:
    """`key=value ...` as a `schema` object. A value is the text after the first `=`, so prompts need no quoting rules."""
    data: dict[str, Any] = {}
    problems = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals:
            data[key] = value
        else:
            problems.append(f"{argument!r} is not key=value.")
    if problems:
        raise ConfigError(problems)
    return typed(schema, data)
