"""Print the completion script of a shell, for commands, settings, choices and file names.

finetune completion bash
finetune completion zsh
finetune completion fish

The script has all words in it and starts no Python; print it again after an update. docs/config.md#completion shows
where to put it.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass
from importlib.resources import files
from typing import Any, get_args

from app.board import BOARD
from app.config.command_line import Command
from app.config.commands import CHECK, CHECKS, GENERATE, REPORT, run_command
from app.config.conf_files import choices_by_group
from app.config.finished_run import EVALUATE, EXPORT, REPRODUCE
from app.config.help import command_help, leaves
from app.config.overrides import PLACES
from app.config.schema import RunConfig
from app.config.validate import TYPE, TokenChoice, choice, choices_of
from app.convert import CONVERT
from app.program import COMMANDS
from app.schema import SCHEMA

SHELLS = ("bash", "zsh", "fish")


@dataclass(kw_only=True, slots=True)
class CompletionConfig:
    """Options of finetune completion."""

    shell: str = choice(*SHELLS)  # shell of the script; may be typed without shell=


COMPLETION = Command(schema=CompletionConfig, bare="shell", example="finetune completion bash")
TRAIN = Command(schema=RunConfig, allowed=("",))
_PARSERS: Mapping[str, Command[Any]] = {
    "train": TRAIN,
    "check": CHECK,
    "generate": GENERATE,
    "evaluate": EVALUATE,
    "export": EXPORT,
    "convert": CONVERT,
    "schema": SCHEMA,
    "completion": COMPLETION,
    "report": REPORT,
    "board": BOARD,
    "reproduce": REPRODUCE,
}
_FILES = "/"  # in a list of words: names of files and folders
FILE_KEYS = {
    *("adapter.start", "cache_dir", "dataset.eval_path", "dataset.path", "eval.also", "from", "model.chat_template"),
    *("model.path", "model.tokenizer", "output_dir", "resume"),
    *("adapters", "file", "folder", "llama_cpp", "model", "output", "prompts", "run", "runs", "sweep", "to"),
}
_WORDS = {"train": ("-m", "--cfg"), "check": CHECKS}  # without a key
_GROUPS_OF = {"sweep": "train", "hardware": "check"}  # groups of one command


def words_of(name: str) -> list[str]:
    """Return the words that may follow a command: `key=` with the values of the key, or a word without a key."""
    command = _PARSERS[name]
    words = [*_WORDS.get(name, ()), "--help"]
    lines = [*_option_lines(command), *_setting_lines(command)]
    if command.bare:
        words += next(line for line in lines if line.startswith(f"{command.bare}=")).partition("=")[2].split()
    for group, names in choices_by_group().items():
        if _GROUPS_OF.get(group, name) == name and _is_allowed(command, group):
            lines.append(_line(group, [*names, _FILES] if group in PLACES else names))
    return words + sorted(lines)


def _option_lines(command: Command[Any]) -> Iterator[str]:
    typed = {option: key for key, option in command.typed_as.items()}
    for name, entry, _ in leaves(command.schema):
        key = typed.get(name, name)
        if key in command.options:
            yield _line(key, _values(key, entry))


def _setting_lines(command: Command[Any]) -> Iterator[str]:
    for name, entry, _ in leaves(RunConfig):
        key = "from" if name == "varied_from" else name
        if _is_allowed(command, key):
            yield _line(key, _values(key, entry))


def _is_allowed(command: Command[Any], key: str) -> bool:
    """Return whether a command accepts a key of a run: the key, its section or every key is allowed."""
    parts = key.split(".")
    return any(".".join(parts[:end]) in command.allowed for end in range(len(parts) + 1))


def _values(key: str, entry: Field[Any]) -> Sequence[str]:
    """Return the words that a key accepts; empty if its values are numbers or other text."""
    if key in FILE_KEYS:
        return ["auto", _FILES] if key == "resume" else [_FILES]
    if names := choices_of(key, entry.metadata):
        return [*names]
    kind = entry.metadata.get(TYPE, entry.type)
    parts = get_args(kind) or (kind,)
    words = {bool: ("true", "false"), TokenChoice: ("all", "new")}
    is_automatic = str in parts and {int, float, bool} & {*parts}
    return [*(word for part in parts for word in words.get(part, ())), *(["auto"] if is_automatic else [])]


def _line(key: str, values: Sequence[str]) -> str:
    return f"{key}={' '.join(values)}"


def script(shell: str) -> str:
    """Return the completion script of a shell, with the words of every command."""
    table = {**{name: words_of(name) for name in COMMANDS}, "help": [*COMMANDS]}
    case = "    case {}\n        {}\n" if shell == "fish" else "    {})\n        {}\n        ;;\n"
    lists = {name: "printf '%s\\n' '" + "\n".join(words) + "'" for name, words in table.items()}
    text = (files("app.assets") / f"completion.{shell}").read_text("utf-8")
    text = text.replace("    @SETTINGS@\n", "".join(case.format(name, words) for name, words in lists.items()))
    return text.replace("@COMMANDS@", " ".join(table))


def _command(arguments: Sequence[str]) -> int:
    sys.stdout.write(script(COMPLETION.parse(arguments).shell))
    return 0


def main() -> None:
    """Exit codes of finetune train."""
    run_command(_command, lambda _: command_help(__doc__, COMPLETION))


if __name__ == "__main__":
    main()
