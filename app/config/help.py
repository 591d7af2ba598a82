"""Text of `--help`, and meanings of keys and options from the comments of their schema."""

import ast
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, NamedTuple

import omegaconf

from app import __version__
from app.config.command_line import Command
from app.config.conf_files import choices_by_group, purpose_of
from app.config.load import default_choices, default_values
from app.config.rules import readers_of
from app.config.schema import RunConfig
from app.config.validate import LIMITS, TYPE, choices_of, did_you_mean, format_value, section_type, type_text
from app.errors import ConfigError
from app.program import as_started

_COMMENT = re.compile(r"#\s+(.*)$")
_QUOTING_ADVICE = " (quote it if it looks like another type)"
_WIDTHS = (60, 80, 110)  # smallest, without a terminal, largest
_MAX_OPTION_WIDTH = 26  # of the left column; longer options have their text in the next line
_MAX_DEFAULT_CHARACTERS = 60
_FREE_SECTIONS = ("launch", "batching", "training", "eval", "checkpoint")  # named in the help: keys without choices
_FRAME = """\
Fine-tune a language model.

  finetune train                               the included model and dataset
  finetune train recipe=qlora model=llama dataset=chat.jsonl
  finetune train model.path=DIR dataset=text dataset.path=books/
  finetune train output_dir=runs/a resume=auto       resume a run
  finetune train from=runs/a optimizer.lr=1e-4       settings of a run, changed
  finetune train from=mine.yaml optimizer.lr=1e-4    settings of a file, changed
  finetune train -m recipe=lora,full optimizer.lr=1e-3,3e-4     a sweep
  finetune train model=llama dry_run=true      print the plan without weights
  finetune train recipe=qlora --cfg job        print all keys and values
  finetune train --help optimizer              choices and keys of a group

group=choice selects one of these presets (*: default), key=value sets one key:

{groups}

{sections}

Before training: finetune check data, finetune check memory (same arguments)
After training: finetune generate, evaluate, export, report or reproduce with
run=DIR; finetune board DIR
Docs: docs/config.md (settings), docs/data.md (datasets), docs/keys.md (keys)
"""
_LISTED_GROUPS = ("recipe", "model", "dataset", "task", "sweep")  # with a line for each choice


class Option(NamedTuple):
    """Option or key in a help text."""

    name: str
    meaning: str
    values: str
    default: str


def print_help_or_version(arguments: Sequence[str], help_text: Callable[[Sequence[str]], str]) -> bool:
    """Print the text for `--help` or `--version`, else return False. Hydra's own help would show internals."""
    if {"-h", "--help"} & {*arguments}:
        sys.stdout.write(as_started(help_text([word for word in arguments if not word.startswith("-")])))
    elif "--version" in arguments:
        sys.stdout.write(f"app-finetune {__version__}\n")
    else:
        return False
    return True


def train_help(names: Sequence[str] = ()) -> str:
    """Return the help of finetune train, or of the groups, sections and keys in `names`."""
    plain = [name for name in names if "=" not in name]
    if plain:
        return "\n".join(map(_section_help, plain))
    width, chosen = _width(), default_choices()
    lines = []
    for group, starred in ((group, _starred(group, chosen)) for group in choices_by_group()):
        if group in _LISTED_GROUPS:
            choices = _choice_lines(group, starred)
            lines += [f"  {group}"]
            lines += [line if len(line) <= width else f"{line[: width - 4].rstrip()} ..." for line in choices]
        elif starred:
            words = " ".join(starred.values()) + (" (of finetune check memory)" if group == "hardware" else "")
            lines.append(textwrap.fill(words, width, initial_indent=f"  {group:<14}", subsequent_indent=" " * 16))
    names_of_keys = ", ".join([*choices_by_group(), *_FREE_SECTIONS])
    sections = textwrap.fill(f"--help takes these names, or a key: {names_of_keys}", width)
    return _FRAME.format(groups="\n".join(lines), sections=sections)


def command_help(usage: str, command: Command[Any]) -> str:
    """Return the help of another command: `usage`, its options and the run settings that it accepts."""
    by_key = {key: (entry, meaning) for key, entry, meaning in leaves(command.schema)}
    options = []
    for key in command.options:
        if (name := command.typed_as.get(key, key)) in by_key:
            entry, meaning = by_key[name]
            values, default = _accepted(name, entry)
            options.append(Option(key, meaning, values.replace(" or null", ""), default))
    also = f"Settings as in finetune train, by default those of the run: {', '.join(command.allowed)}"
    settings = ["", *textwrap.wrap(also, _width(), break_on_hyphens=False)] if any(command.allowed) else []
    return "\n".join([*_usage_lines(usage), "", *_option_lines(options), *settings, ""])


def _usage_lines(usage: str) -> Iterator[str]:
    """Yield the lines of a usage text; comments of examples that are too long for the terminal get their own line."""
    width = _width()
    for line in usage.strip().splitlines():
        example, _, comment = (part.strip() for part in line.partition("   "))
        if len(line) <= width:
            yield line
        elif line.startswith("finetune "):
            yield from (example, f"    {comment}") if comment else (line,)
        else:
            yield from textwrap.wrap(line, width)


def _section_help(name: str) -> str:
    """Return the choices of a group and the keys of a section, or the line of one key."""
    matching = [leaf for leaf in leaves(RunConfig) if leaf[0] == name or leaf[0].startswith(f"{name}.")]
    groups = choices_by_group()
    if not matching and name not in groups:
        keys = [key for key, _, _ in leaves(RunConfig)]
        sections = [key.rpartition(".")[0] for key in keys if "." in key]
        raise ConfigError(f"--help {name}: unknown setting.{did_you_mean(name, [*groups, *sections, *keys])}")
    choices = []
    if name in groups:
        choice_lines = _choice_lines(name, _starred(name, default_choices()))
        lines = (textwrap.fill(line, _width(), subsequent_indent=" " * 26) for line in choice_lines)
        choices = [f"{name}=CHOICE (*: default)", *lines, ""]
    options, defaults = [], default_values()
    for key, entry, meaning in matching:
        if key == f"{name}.kind" and choices:
            continue
        values, default = _accepted(key, entry, _value_at(defaults, key))
        readers = readers_of(key)
        options.append(Option(key, f"{meaning} ({', '.join(readers)} only)" if readers else meaning, values, default))
    return "\n".join([*choices, *_option_lines(options), ""])


def _width() -> int:
    least, usual, most = _WIDTHS
    return min(max(shutil.get_terminal_size((usual, 24)).columns, least), most)


def _starred(group: str, chosen: Mapping[str, str | None]) -> dict[str, str]:
    """Return the choices of a group by name, the default with a star."""
    return {name: f"{name}*" if name == chosen.get(group) else name for name in choices_by_group()[group]}


def _choice_lines(group: str, starred: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each choice of a group, with its purpose."""
    for name, word in starred.items():
        yield f"    {word:<22}{purpose_of(group, name)}"


def _option_lines(options: Sequence[Option]) -> Iterator[str]:
    """Yield two columns: the options, and their meaning, values and default."""
    left = min(max((len(option.name) for option in options), default=0) + 3, _MAX_OPTION_WIDTH)
    for option in options:
        facts = "; ".join(part for part in (option.values, option.default and f"default {option.default}") if part)
        text = f"{option.meaning} [{facts}]" if option.meaning else f"[{facts}]"
        word = f"{option.name}="
        if len(word) >= left:
            yield f"  {word}"
            word = ""
        indent = " " * (left + 2)
        yield textwrap.fill(text, _width(), initial_indent=f"  {word:<{left}}", subsequent_indent=indent)


def leaves(schema: type, prefix: str = "") -> Iterator[tuple[str, Field[Any], str]]:
    """Yield the dotted key, field and meaning of everything in a schema that is not a section."""
    documentation = meanings(schema)
    for entry in fields(schema):
        if section := section_type(entry.type):
            yield from leaves(section, f"{prefix}{entry.name}.")
        else:
            yield f"{prefix}{entry.name}", entry, documentation.get(entry.name, "")


def _accepted(key: str, entry: Field[Any], default: Any = MISSING) -> tuple[str, str]:
    """Return the accepted values and the default as text."""
    value = entry.default if default is MISSING else default
    text = "" if value in (MISSING, omegaconf.MISSING, None, "") else format_value(value)
    text = re.sub(r"\$\{([^}]*)\}", r"\1", text)  # of another key
    return values_of(key, entry, "{}".format), "" if len(text) > _MAX_DEFAULT_CHARACTERS else text


def _value_at(values: Any, key: str) -> Any:
    """Return the value at a dotted key; MISSING if there is none."""
    value = values
    for name in key.split("."):
        value = value.get(name, MISSING) if isinstance(value, dict) else MISSING
    return value


def values_of(key: str, entry: Field[Any], as_name: Callable[[str], str]) -> str:
    """Return the accepted values of a key: choices, or the type with its limits."""
    if choices := choices_of(key, entry.metadata):
        return ", ".join(map(as_name, choices))
    limits = entry.metadata.get(LIMITS, {})
    bounds = " and ".join(f"{name.replace('_', ' ')} {bound}" for name, bound in limits.items())
    text = type_text(entry.metadata.get(TYPE, entry.type)).replace(_QUOTING_ADVICE, "")
    return f"{text}, {bounds}" if bounds else text


def meanings(section: type) -> dict[str, str]:
    """Return the documentation of each field: the comment after it, or in the line above."""
    comments: dict[str, str] = {}
    for base in reversed([kind for kind in section.__mro__ if is_dataclass(kind)]):
        comments.update(_comments(base))
    return comments


def _comments(section: type) -> Iterator[tuple[str, str]]:
    lines = inspect.getsource(section).splitlines()
    (body,) = ast.parse("\n".join(lines)).body
    assert isinstance(body, ast.ClassDef)
    for statement in body.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            after, above = lines[(statement.end_lineno or 0) - 1], lines[statement.lineno - 2].lstrip()
            if comment := _COMMENT.search(after) or _COMMENT.match(above):
                yield statement.target.id, comment[1]
