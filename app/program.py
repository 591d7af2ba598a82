"""Start command of the program, for the commands that it prints."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

# Set in the environment, so that child processes print the same commands.
STARTED_AS = "APP_STARTED_AS"
TYPED = "APP_TYPED"
COMMANDS = {
    "train": "fine-tune a model, or run a sweep",
    "check": "check data, memory or cluster before training",
    "generate": "generate text with a fine-tuned model",
    "evaluate": "evaluate a run, optionally compared with its base model",
    "export": "export an adapter, a merged or quantized model, or GGUF",
    "convert": "convert an Axolotl, LLaMA-Factory, ms-swift or TRL config",
    "schema": "print the JSON Schema of settings files, for editors",
    "report": "create an HTML report of a run, a sweep or a comparison",
    "board": "start, stop, watch and compare runs in a browser, chat",
    "reproduce": "repeat a run and compare the results",
    "completion": "print the completion script of bash, zsh or fish",
}
TARGETS = ("output_dir", "to", "output")  # synonyms of the key that sets where results go
_COMMAND = re.compile(rf"(?<![\w./-])finetune (?=(?:{'|'.join(COMMANDS)})\b)")
_WORD = r"""(?:'[^'\n]*'|"[^"\n]*"|[^\s'"])+"""
_CHECK = re.compile(rf"(finetune check data)((?: (?=['\"]?[\w.]+=){_WORD})+)")
# Printed commands contain source, format and columns; the other settings are not accepted by `finetune check data`.
_NOT_REPEATED = re.compile(
    r"dataset(=|\.(path|split|hub_config|revision|format|columns|leave_out|mix)\b)"
    r"|(output_dir|to|resume|dry_run|hardware|exact|answers)\b"
)


def remember_settings(arguments: Sequence[str]) -> None:
    """Store the settings of a command line for the commands that this process and its children print."""
    settings = [word for word in arguments if "=" in word and word[0] not in "-~"]
    os.environ[TYPED] = shlex.join(word for word in settings if not _NOT_REPEATED.match(word.lstrip("+")))


def command_text(name: str, *arguments: str) -> str:
    """Return a command of this program as text, to copy into a shell."""
    return shlex.join(["finetune", name, *arguments])


def resume_command(settings: Sequence[str], output_dir: str) -> str:
    """Return the command that resumes the run that was started with these settings."""
    others = [word for word in settings if _key(word) not in ("resume", *TARGETS)]
    return command_text("train", *others, f"output_dir={output_dir}", "resume=auto")


def with_target(key: str, arguments: Iterable[str]) -> list[str]:
    """Rename the synonyms of `key`, which sets where the results of a command go, to it."""
    return [
        f"{key}={value}" if equals and name.lstrip("+") in TARGETS else word
        for word in arguments
        for name, equals, value in (word.partition("="),)
    ]


def as_started(text: str) -> str:
    """Spell the commands in a text (`finetune train ...`) as this program was started, and add the typed settings to
    data checks.
    """
    text, name = _CHECK.sub(_with_settings, text), os.environ.get(STARTED_AS)
    return text if name == "finetune" else _COMMAND.sub(lambda _: f"{name} " if name else f"{_python()} -m app.", text)


def _python() -> str:
    """Return the command of this interpreter, which may differ from the shell's `python`."""
    if shutil.which("python") == sys.executable:
        return "python"
    interpreter = Path(sys.executable)
    is_below = interpreter.is_relative_to(Path.cwd())
    return shlex.quote(str(interpreter.relative_to(Path.cwd()) if is_below else interpreter))


def _with_settings(command: re.Match[str]) -> str:
    """Add the typed settings to a command, except those that it changes."""
    settings = shlex.split(os.environ.get(TYPED, ""))
    typed, words = [*map(_key, settings)], re.findall(_WORD, command[2])
    if "recipe" in typed:  # the typed recipe supports the format and may differ from the suggested one
        words = [word for word in words if _key(word) != "recipe"]
    changed = [*map(_key, words)]
    repeated = [shlex.quote(word) for word, key in zip(settings, typed, strict=True) if key not in changed]
    return " ".join([command[1], *repeated, *words])


def _key(word: str) -> str:
    return word.lstrip("+'\"").partition("=")[0]
