"""Print the JSON Schema of settings files and run.yaml, for completion and checks in an editor.

finetune schema                            print it
finetune schema to=finetune.schema.json    write the file

docs/config.md#editor-support shows the settings of an editor.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.config.command_line import Command
from app.config.commands import run_command
from app.config.help import command_help
from app.config.json_schema import settings_schema
from app.errors import ConfigError
from app.files import write_text


@dataclass(kw_only=True, slots=True)
class SchemaConfig:
    """Options of finetune schema."""

    to: str | None = None  # file to write; by default the schema is printed


SCHEMA = Command(schema=SchemaConfig)


def _command(arguments: Sequence[str]) -> int:
    config = SCHEMA.parse(arguments)
    text = json.dumps(settings_schema(), indent=2, ensure_ascii=False) + "\n"
    if config.to is None:
        sys.stdout.write(text)
        return 0
    to = Path(config.to).expanduser()
    if to.exists():
        raise ConfigError(f"to={to} already exists. Choose another name, or delete it first.")
    write_text(to, text)
    sys.stdout.write(f"file    {to}\n")
    return 0


def main() -> None:
    """Exit codes of finetune train."""
    run_command(_command, lambda _: command_help(__doc__, SCHEMA))


if __name__ == "__main__":
    main()
