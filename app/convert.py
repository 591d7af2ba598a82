"""Convert an Axolotl, LLaMA-Factory, torchtune, Unsloth or TRL config (YAML).

finetune convert config.yml                  print what happens to each setting, and the converted file
finetune convert config.yml to=mine.yaml     write the file; finetune train from=mine.yaml runs it

A config with an unsupported objective, such as a reward model, is an error.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from app.config.command_line import Command
from app.config.commands import run_command
from app.config.conf_files import choices_by_group, read_yaml
from app.config.help import command_help
from app.config.json_schema import SCHEMA_FILE
from app.config.other_programs import Conversion
from app.config.settings_conversion import converted
from app.config.validate import format_value
from app.errors import ConfigError, gist
from app.files import write_text
from app.program import command_text
from app.tracking.console import Console, open_console


@dataclass(kw_only=True, slots=True)
class ConvertConfig:
    """Options of finetune convert."""

    file: str  # YAML config of another program; may be typed without file=
    to: str | None = None  # new YAML file for finetune train from=; by default it is printed


CONVERT = Command(schema=ConvertConfig, bare="file", example="finetune convert config.yml to=mine.yaml")


def convert(file: Path, to: Path | None, console: Console) -> int:
    """Print the result for each setting, and write the converted file."""
    try:
        data = read_yaml(file)
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file. Give a YAML config of another program.") from None
    except (OSError, ValueError, yaml.YAMLError) as fault:
        raise ConfigError(f"{file} cannot be read: {gist(fault)}. Give a YAML config of another program.") from fault
    if not isinstance(data, Mapping):
        raise ConfigError(f"{file} has no settings. Give a YAML config of another program.")
    if to is not None and to.exists():
        raise ConfigError(f"to={to} already exists. Choose another name.")
    conversion = converted(data)
    text = as_file(conversion, file.name)
    for line in _lines(conversion):
        console.say(line)
    counts = (
        f"{len(conversion.converted)} settings converted, {len(conversion.not_needed)} not needed, "
        f"{len(conversion.not_converted)} not converted"
    )
    console.say(f"{conversion.facts['label']}: {counts}")
    if to is None:
        console.say(f"\n{text}")
    else:
        write_text(to, text)
        console.say(f"file    {to}\nTry it  finetune check from={to}")
        if not (schema := to.with_name(SCHEMA_FILE)).exists():
            console.say(f"For completion in an editor: {command_text('schema', f'to={schema}')}")
    return 0


def as_file(conversion: Conversion, name: str) -> str:
    """Return the converted settings as a file for `from=`, groups first; its first line names the schema next to it."""
    words = dict(sorted(conversion.words.items(), key=lambda word: word[0] not in choices_by_group()))
    header = f"# yaml-language-server: $schema={SCHEMA_FILE}\n# Converted from {name} ({conversion.facts['label']}).\n"
    return header + yaml.safe_dump(words, sort_keys=False, allow_unicode=True)


def _lines(conversion: Conversion) -> Iterator[str]:
    groups = {
        "converted": conversion.converted,
        "not needed": conversion.not_needed,
        "not converted": conversion.not_converted,
    }
    settings = conversion.settings
    for label, group in groups.items():
        for name, text in group.items():
            value = f": {format_value(settings[name])}" if name in settings and label == "converted" else ""
            yield f"{label:<13} {name}{value}{' -> ' if label == 'converted' else '  '}{text}"
    for text in conversion.changed:
        yield f"{'changed':<13} {text}"


def _command(arguments: Sequence[str]) -> int:
    config = CONVERT.parse(arguments)
    to = None if config.to is None else Path(config.to).expanduser()
    return convert(Path(config.file).expanduser(), to, open_console())


def main() -> None:
    """Exit codes of finetune train."""
    run_command(_command, lambda _: command_help(__doc__, CONVERT))


if __name__ == "__main__":
    main()
