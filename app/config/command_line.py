"""Parsers for the options and run settings of commands, and the text of `--help` and `--version`."""

import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import omegaconf
from hydra.errors import HydraException

from app import __version__
from app.config.conf_files import choices_by_group, purpose_of
from app.config.load import default_choices
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
from app.config.validate import (
    CHOICES,
    field_types,
    format_value,
    is_key,
    is_optional,
    leaf_keys,
    parse_section,
    section_type,
    takes_text,
    type_text,
)
from app.errors import ConfigError, refuse
from app.program import as_started

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
        for text in arguments:
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


# ---- help


_WIDTH = 110
_LISTED_GROUPS = ("recipe", "model", "dataset", "task", "sweep")  # with a line for each choice
_FRAME = """\
Fine-tune a language model.

  finetune train                                     the included model and dataset
  finetune train recipe=qlora model=llama dataset=messages dataset.path=chat.jsonl
  finetune train model.path=DIR dataset=text dataset.path=books/ optimizer.lr=1e-4
  finetune train output_dir=runs/mine resume=auto    resume a run
  finetune train from=runs/mine optimizer.lr=1e-4    start from the settings of a run
  finetune train from=mine.yaml optimizer.lr=1e-4    start from a file; typed settings win
  finetune train -m recipe=lora,full optimizer.lr=1e-3,3e-4   a sweep
  finetune train model=llama dry_run=true            print the plan without loading weights
  finetune train recipe=qlora --cfg job              print all keys and values

group=choice selects one of these presets (*: default), key=value sets one key:

{groups}

Before training: finetune check data, finetune check memory (same arguments)
After training: finetune generate, evaluate, export, report or reproduce with run=DIR; finetune board DIR
Docs: docs/config.md (settings), docs/data.md (datasets)
"""


def print_help_or_version(arguments: Sequence[str], help_text: Callable[[], str]) -> bool:
    """Print the text for `--help` or `--version`, else return False. Hydra's own help would show internals."""
    if {"-h", "--help"} & {*arguments}:
        sys.stdout.write(as_started(help_text()))
    elif "--version" in arguments:
        sys.stdout.write(f"app-finetune {__version__}\n")
    else:
        return False
    return True


def help_text() -> str:
    """Return the help of finetune train."""
    chosen = default_choices()
    lines = []
    for group, names in choices_by_group().items():
        starred = {name: f"{name}*" if chosen.get(group) == name else name for name in names}
        if group in _LISTED_GROUPS:
            lines.append(f"  {group}")
            for name, word in starred.items():
                purpose = textwrap.shorten(purpose_of(group, name), _WIDTH - 26, placeholder=" ...")
                lines.append(f"    {word:<22}{purpose}")
        elif names:
            words = " ".join(starred.values()) + (" (of finetune check memory)" if group == "hardware" else "")
            lines.append(textwrap.fill(words, _WIDTH, initial_indent=f"  {group:<14}", subsequent_indent=" " * 16))
    return _FRAME.format(groups="\n".join(lines))


def command_help(usage: str, command: Command[Any]) -> str:
    """Return the help of another command: `usage`, its options and the run settings that it accepts."""
    of_schema = dict(_leaf_fields(command.schema))
    option = {key: command.typed_as.get(key, key) for key in command.options}
    options = {key: of_schema[name] for key, name in option.items() if name in of_schema}
    width = max(map(len, options)) + 4
    lines = [f"  {name + '=':<{width}}{_takes(option_field)}" for name, option_field in options.items()]
    also = f"As in finetune train, by default those of the run: {', '.join(command.allowed)}"
    settings = ["", *textwrap.wrap(also, _WIDTH, break_on_hyphens=False)] if command.allowed else []
    return "\n".join([usage, *lines, *settings, ""])


def _leaf_fields(schema: type, prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """Yield the fields of a schema that are not sections, with their dotted keys."""
    for schema_field in fields(schema):
        if section := section_type(schema_field.type):
            yield from _leaf_fields(section, f"{prefix}{schema_field.name}.")
        else:
            yield f"{prefix}{schema_field.name}", schema_field


def _takes(option_field: Field[Any]) -> str:
    """Return the accepted values of a key, and its default."""
    choices = option_field.metadata.get(CHOICES)
    takes = ", ".join(choices) if choices else "text" if takes_text(option_field.type) else type_text(option_field.type)
    has_default = option_field.default not in (MISSING, omegaconf.MISSING, None)
    return f"{takes} (default {format_value(option_field.default)})" if has_default else takes
