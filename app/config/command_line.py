"""Parsers for the options and run settings of commands."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from hydra.errors import HydraException

from app.config.conf_files import choices_by_group
from app.config.overrides import (
    check_overrides,
    key_of,
    parse_override,
    unknown_key,
    unknown_user,
    values_of,
    wrong_choice,
)
from app.config.rules import problems_of
from app.config.schema import RunConfig
from app.config.validate import field_types, is_key, is_optional, leaf_keys, parse_section
from app.errors import ConfigError, refuse
from app.program import TARGETS, with_target

Options = TypeVar("Options")

Changes = Mapping[str, Any]  # choices by group and values by dotted key
_RUN_FIELDS = field_types(RunConfig)
_FREE_TEXT = ("prompt", "second", "system")  # values may start with ~


class Typed(NamedTuple):
    """A parsed command line: options by key and as data of the schema, run settings by key and as typed."""

    options: dict[str, Any]
    data: dict[str, Any]
    settings: dict[str, Any]
    words: list[str]

    @property
    def changes(self) -> Changes:
        """Options and settings."""
        return {**self.settings, **self.options}


@dataclass(frozen=True, kw_only=True)
class Command(Generic[Options]):
    """Parser for one command.

    Options are the keys of `schema` that are not run settings; their value is the text after the first `=`, unquoted.
    All other arguments are run settings in Hydra's grammar. Their key or section must be in `allowed` ("" is the whole
    run); others are rejected with the reason in `why_not` for their section.
    """

    schema: type[Options]
    rules: Callable[[Options, Changes], Iterable[str]] = lambda _options, _changes: ()
    allowed: Collection[str] = ()
    why_not: Mapping[str, str] = field(default_factory=dict)
    typed_as: Mapping[str, str] = field(default_factory=dict)  # option by its key on the command line, if different
    bare: str = ""  # required option that may be typed without its key
    example: str = ""  # command line for the error if `bare` is missing

    @cached_property
    def options(self) -> dict[str, Any]:
        """Type of each option, by its key on the command line."""
        typed = {option: key for key, option in self.typed_as.items()}
        of_runs = _RUN_FIELDS if self.allowed else {}
        return {typed.get(key, key): kind for key, kind in field_types(self.schema).items() if key not in of_runs}

    def parse(self, arguments: Sequence[str]) -> Options:
        """Parse a command line without run settings; raise one ConfigError with all problems."""
        typed = self.read(arguments)
        return self.validated(typed.data, typed.changes)

    def validated(self, data: Mapping[str, Any], changes: Changes) -> Options:
        """Validate data against the schema and the rules; `changes` are the typed values."""
        options = parse_section(self.schema, data)
        of_run = problems_of(options) if isinstance(options, RunConfig) else ()
        refuse([*of_run, *self.rules(options, changes)])
        return options

    def read(self, arguments: Sequence[str]) -> Typed:
        """Split a command line into options and run settings; raise one ConfigError with all invalid arguments."""
        options, words, problems = dict[str, Any](), list[str](), list[str]()
        target = next((key for key in TARGETS if key in self.options or key in self.allowed), None)
        for text in arguments if target is None else with_target(target, arguments):
            try:
                if (key := key_of(text)) in self.options and "=" in text:
                    options[self.typed_as.get(key, key)] = self._value(key, text)
                elif self.bare and "=" not in text and not text.startswith("-"):
                    options[self.bare] = self._value(self.bare, f"{self.bare}={text}")
                elif not self.allowed and "=" in text:
                    options[key] = text.partition("=")[
                        2
                    ]  # unknown keys are reported with invalid values, by the schema
                else:
                    refuse(self._problems(text))
                    words.append(text)
            except ConfigError as problem:
                problems += problem.problems
        if self.bare and self.bare not in options:
            problems.append(f"{self.bare}= is required, e.g. {self.example}")
        try:
            settings = values_of(check_overrides(words))
        except ConfigError as problem:
            problems += problem.problems
        refuse(problems)
        return Typed(options, self._nested(options), settings, words)

    def _nested(self, options: Changes) -> dict[str, Any]:
        """Nest options as the schema does: `{answers: {rows: 4}}` for `answers.rows`."""
        data: dict[str, Any] = {}
        for key, value in options.items():
            section, _, leaf = key.rpartition(".")
            if is_dataclass(self.options.get(section)):
                data[section] = {**(data[section] if isinstance(data.get(section), dict) else {}), leaf: value}
            else:
                data[key] = value
        return data

    def _value(self, key: str, text: str) -> Any:
        """Return the text of an option, or a list parsed by Hydra's grammar, with or without brackets."""
        value, kind = text.partition("=")[2], self.options[key]
        if kind == list[str]:
            listed = value if value.startswith(("[", '"', "'")) else f"[{value}]"
            try:
                return parse_override(f"{key}={listed}").value()
            except HydraException as fault:
                raise ConfigError(f'{text}: expected a list like {key}="[a,b]" ({fault}).') from fault
        if self.allowed and key in choices_by_group():
            refuse(wrong_choice(key, value))
        if key not in _FREE_TEXT:
            refuse(unknown_user(text))
        return None if value == "null" and is_optional(kind) else value

    def _problems(self, text: str) -> Iterator[str]:
        """Yield the problem of an argument that is neither an option nor an allowed setting."""
        key, _, value = text.lstrip("+~").partition("=")
        if not self.allowed:
            yield f"Unrecognized argument {text!r}. Options are key=value: {', '.join(leaf_keys(self.schema))}."
        elif "=" not in text and not text.startswith("~"):
            is_run = "run" in self.options and Path(text).expanduser().is_dir()
            suggestion = f" Did you mean run={text}?" if is_run else ""
            yield f"Unrecognized argument {text!r}. Settings are key=value.{suggestion}"
        elif key not in choices_by_group() and not is_key(RunConfig, key):
            yield unknown_key(key, value, self.options)
        else:
            parts = key.split(".")
            sections = [".".join(parts[:end]) for end in range(len(parts), -1, -1)]  # the key, its sections, the run
            if not any(section in self.allowed for section in sections):
                reason = next(self.why_not[section] for section in sections if section in self.why_not)
                yield f"{text}: {key} does not apply, {reason}."
