"""The commands that are not `app.train`: key=value against a small schema of their own, and how they end."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from app.config.platforms import require_platform
from app.config.strict import kinds, typed
from app.config.values import is_optional
from app.errors import AppError, ConfigError

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


def run_command(
    command: Callable[[Sequence[str]], int], told: Callable[[AppError], None] | None = None
) -> NoReturn:
    """`command` on the words of the command line; exit codes as of app.train. `told` may tell a problem."""
    try:
        require_platform()
        sys.exit(command(sys.argv[1:]))
    except AppError as problem:
        if told is not None:
            told(problem)
        sys.stderr.write(f"{problem.report()}\n")
        sys.exit(problem.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
