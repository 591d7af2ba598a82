"""The commands that are not `app.train`: key=value against a small schema of their own, and how they end."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

from app.config.platforms import require_platform
from app.config.strict import kinds, typed
from app.config.values import is_optional
from app.errors import AppError, ConfigError

Section = TypeVar("Section")


def parse_command(
    arguments: Sequence[str], schema: type[Section], problems_of: Callable[[Section], Iterable[str]]
) -> Section:
    """`key=value ...` as a sound `schema` object. A value is all text after the first `=`: prompts need no quotes."""
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
    config = typed(schema, data)
    problems = list(problems_of(config))
    if problems:
        raise ConfigError(problems)
    return config


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
