"""Config files of other programs as plain data: YAML, or the command in a shell script."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from app.config.conf_files import MAX_BYTES, read_yaml

_SCRIPTS = (".sh", ".bash")
_TUNERS = ("train_type", "tuner_type")


def read_config(file: Path) -> Any:
    """Return the settings of a YAML file, or of `swift sft` in a shell script; ValueError if it has no such command."""
    if file.suffix not in _SCRIPTS:
        return read_yaml(file)
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES >> 20} MB")
    lines = file.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    commands = (line for line in lines if "sft" in line and not line.lstrip().startswith("#"))
    words = next((words for command in commands if (words := _arguments(shlex.split(command)))), None)
    if words is None:
        raise ValueError("it has no command swift sft --model ...")
    settings = dict(_settings(words))
    return settings if {*_TUNERS} & {*settings} else {_TUNERS[-1]: "lora", **settings}  # the default of ms-swift


def _arguments(words: Sequence[str]) -> Sequence[str]:
    """Return the arguments of `swift sft` in a command line, also after `torchrun .../sft.py`; empty for others."""
    end = next((number for number, word in enumerate(words) if word.startswith(("#", ";", "&", "|"))), len(words))
    for number, word in enumerate(words[:end]):
        if word.endswith("swift/cli/sft.py") or (word == "sft" and words[:number][-1:] == ["swift"]):
            return words[number + 1 : end]
    return ()


def _settings(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield names and values of `--name VALUE ...` and `--name=VALUE`; a name without a value is a switch."""
    starts = [number for number, word in enumerate(words) if word.startswith("--")]
    for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
        name, equals, value = words[start].removeprefix("--").partition("=")
        values = [value] if equals else words[start + 1 : end]
        if values and values[0].startswith("$("):  # computed by the shell
            values = [" ".join(values)]
        parsed = [_parsed(text) for text in values]
        yield name.replace("-", "_"), parsed[0] if len(parsed) == 1 else parsed or True


def _parsed(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, bool | int | float | None) else text
