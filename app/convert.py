"""Command app.convert: a file of settings of another program, in the words of this one.

python -m app.convert config.yml                  what is carried, what is needless, what is lost, and the file
python -m app.convert config.yml to=mine.yaml     writes it; python -m app.train from=mine.yaml runs it

Reads YAML of Axolotl, LLaMA-Factory, torchtune, Unsloth and the command line interface of TRL. A file with an objective
that is not supported, such as a reward model, is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from app.config.command_line import Command
from app.config.commands import run_command
from app.config.conf_files import choices_by_group, read_yaml
from app.config.other_programs import Conversion
from app.config.settings_conversion import converted
from app.config.validate import format_value
from app.errors import ConfigError, gist
from app.files import write_text
from app.tracking.console import Console, open_console


@dataclass(kw_only=True, slots=True)
class ConvertConfig:
    """Options of app.convert: the file of another program, and the one to write."""

    file: str
    to: str | None = None


CONVERT = Command(schema=ConvertConfig, bare="file", example="python -m app.convert config.yml to=mine.yaml")


def convert(file: Path, to: Path | None, console: Console) -> int:
    """Say what becomes of each setting, and write the file."""
    try:
        data = read_yaml(file)
    except (OSError, ValueError, yaml.YAMLError) as fault:
        raise ConfigError(f"{file} cannot be read: {gist(fault)}. Give a YAML file of another program.") from fault
    if not isinstance(data, Mapping):
        raise ConfigError(f"{file} has no settings. Give a YAML file of another program.")
    if to is not None and to.exists():
        raise ConfigError(f"to={to}: it exists. Give another name.")
    found = converted(data)
    text = as_file(found, file.name)
    for line in _lines(found):
        console.say(line)
    counts = f"{len(found.carried)} settings carried, {len(found.needless)} needless, {len(found.lost)} lost"
    console.say(f"{found.facts['label']}: {counts}")
    if to is None:
        console.say(f"\n{text}")
    else:
        write_text(to, text)
        console.say(f"file    {to}\ntry it  python -m app.check from={to}")
    return 0


def as_file(found: Conversion, name: str) -> str:
    """The words of a conversion as a file for `from=`, groups first."""
    words = dict(sorted(found.words.items(), key=lambda word: word[0] not in choices_by_group()))
    return f"# From {name} of {found.facts['label']}.\n" + yaml.safe_dump(words, sort_keys=False, allow_unicode=True)


def _lines(found: Conversion) -> Iterator[str]:
    for word, group in (("carried", found.carried), ("needless", found.needless), ("lost", found.lost)):
        for name, text in group.items():
            value = f": {format_value(found.settings[name])}" if name in found.settings and word == "carried" else ""
            yield f"{word:<8} {name}{value}{' -> ' if word == 'carried' else '  '}{text}"
    for text in found.changed:
        yield f"{'changed':<8} {text}"


def _command(arguments: Sequence[str]) -> int:
    config = CONVERT.parse(arguments)
    to = None if config.to is None else Path(config.to).expanduser()
    return convert(Path(config.file).expanduser(), to, open_console())


def main() -> None:
    """Exit codes as of app.train."""
    run_command(_command, lambda: __doc__ or "")


if __name__ == "__main__":
    main()
