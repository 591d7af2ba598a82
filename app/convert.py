"""Convert an Axolotl, LLaMA-Factory, ms-swift, AutoModel, torchtune, Unsloth or TRL config.

finetune convert config.yml                  print what happens to each setting, and the converted file
finetune convert config.yml to=mine.yaml     write the file; finetune train from=mine.yaml runs it
finetune convert train.sh                    the same for an ms-swift command in a shell script

finetune train from=config.yml converts and trains without a file. A config with an unsupported
objective, such as a reward model, is an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from app.config.command_line import Command
from app.config.commands import run_command
from app.config.conf_files import choices_by_group
from app.config.converted_settings import Conversion
from app.config.help import command_help
from app.config.json_schema import SCHEMA_FILE
from app.config.other_files import read_config
from app.config.settings_conversion import converted, report_lines
from app.errors import ConfigError, gist
from app.files import write_text
from app.program import command_text
from app.tracking.console import Console, open_console


@dataclass(kw_only=True, slots=True)
class ConvertConfig:
    """Options of finetune convert."""

    file: str  # config of another program, YAML or shell; may be typed without file=
    to: str | None = None  # new YAML file for finetune train from=; by default it is printed


CONVERT = Command(schema=ConvertConfig, bare="file", example="finetune convert config.yml to=mine.yaml")


def convert(file: Path, to: Path | None, console: Console) -> int:
    """Print the result for each setting, and write the converted file."""
    try:
        data = read_config(file)
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file. Give a config of another program.") from None
    except (OSError, ValueError, yaml.YAMLError) as fault:
        raise ConfigError(f"{file} cannot be read: {gist(fault)}. Give a config of another program.") from fault
    if not isinstance(data, Mapping):
        raise ConfigError(f"{file} has no settings. Give a config of another program.")
    if to is not None and to.exists():
        raise ConfigError(f"to={to} already exists. Choose another name.")
    conversion = converted(data, file.parent)
    text = as_file(conversion, file.name)
    for line in report_lines(conversion):
        console.say(line)
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


def _command(arguments: Sequence[str]) -> int:
    config = CONVERT.parse(arguments)
    to = None if config.to is None else Path(config.to).expanduser()
    return convert(Path(config.file).expanduser(), to, open_console())


def main() -> None:
    """Exit codes of finetune train."""
    run_command(_command, lambda _: command_help(__doc__, CONVERT))


if __name__ == "__main__":
    main()
