"""Text of `--help` and `--version`: the commands, their keys, and every group with its choices from conf/."""

import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

import omegaconf

from app import __version__
from app.config.command_line import Command
from app.config.fields import CHOICES
from app.config.groups import CONF, choices_by_group
from app.config.load import default_choices
from app.config.validate import format_value, section_type, takes_text, type_text
from app.program import as_started

_WIDTH = 110
_LISTED_GROUPS = ("recipe", "model", "dataset", "task", "sweep")  # with a line for each choice
_FRAME = """\
Fine-tune a language model.

  python -m app.train                                          the model and data that ship
  python -m app.train recipe=qlora model=llama dataset=messages dataset.path=chat.jsonl
  python -m app.train model.path=DIR dataset=text dataset.path=books/ optimizer.lr=1e-4
  python -m app.train output_dir=runs/mine resume=auto         go on after a stop
  python -m app.train from=runs/mine optimizer.lr=1e-4         the settings of a run, varied
  python -m app.train from=mine.yaml optimizer.lr=1e-4         the settings of a file; typed ones win
  python -m app.train -m recipe=lora,full optimizer.lr=1e-3,3e-4     a sweep
  python -m app.train model=llama dry_run=true                 the plan, without weights
  python -m app.train recipe=qlora --cfg job                   every key and its value

group=choice takes one of these (*: default), key=value sets one key of the result:

{groups}

Before, with the same words: python -m app.check data looks through the data, app.check memory plans the memory.
Then: python -m app.generate, app.evaluate, app.report, app.reproduce, app.export run=DIR; app.board DIR shows runs.
Keys are explained in docs/config.md, data in docs/data.md.
"""


def print_help_or_version(arguments: Sequence[str], help_text: Callable[[], str]) -> bool:
    """Print what `--help` or `--version` asks for; False if neither is given. Hydra's would show internal files."""
    if {"-h", "--help"} & {*arguments}:
        sys.stdout.write(as_started(help_text()))
    elif "--version" in arguments:
        sys.stdout.write(f"app-finetune {__version__}\n")
    else:
        return False
    return True


def help_text() -> str:
    """The help of app.train."""
    chosen = default_choices()
    lines = []
    for group, names in choices_by_group().items():
        starred = {name: f"{name}*" if chosen.get(group) == name else name for name in names}
        if group in _LISTED_GROUPS:
            lines.append(f"  {group}")
            for name, word in starred.items():
                text = (CONF / group / f"{name}.yaml").read_text("utf-8").splitlines()
                comment = next(line for line in text if line.startswith("# ") and "@package" not in line)
                purpose = comment[2:].partition("python -m")[0].rstrip(" :.")  # without the example command
                lines.append(f"    {word:<22}{textwrap.shorten(purpose, _WIDTH - 26, placeholder=' ...')}")
        elif names:
            words = " ".join(starred.values()) + (" (of app.check memory)" if group == "hardware" else "")
            lines.append(textwrap.fill(words, _WIDTH, initial_indent=f"  {group:<14}", subsequent_indent=" " * 16))
    return _FRAME.format(groups="\n".join(lines))


def command_help(usage: str, command: Command[Any]) -> str:
    """Return the help of another command: `usage`, its options, and the settings of a run that it takes."""
    of_schema = dict(_leaf_fields(command.schema))
    option = {key: command.typed_as.get(key, key) for key in command.options}
    own = {key: of_schema[name] for key, name in option.items() if name in of_schema}
    width = max(map(len, own)) + 4
    lines = [f"  {name + '=':<{width}}{_takes(each)}" for name, each in own.items()]
    also = f"As in app.train, and otherwise as the run had them: {', '.join(command.allowed)}"
    settings = ["", *textwrap.wrap(also, _WIDTH, break_on_hyphens=False)] if command.allowed else []
    return "\n".join([usage, *lines, *settings, ""])


def _leaf_fields(schema: type, prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """The fields of a schema that are no sections, by dotted key."""
    for each in fields(schema):
        if section := section_type(each.type):
            yield from _leaf_fields(section, f"{prefix}{each.name}.")
        else:
            yield f"{prefix}{each.name}", each


def _takes(each: Field[Any]) -> str:
    """Values that a key takes, and its default."""
    choices = each.metadata.get(CHOICES)
    takes = ", ".join(choices) if choices else "text" if takes_text(each.type) else type_text(each.type)
    has_default = each.default not in (MISSING, omegaconf.MISSING, None)
    return f"{takes} (default {format_value(each.default)})" if has_default else takes
