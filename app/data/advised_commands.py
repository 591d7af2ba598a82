"""Commands shown in messages: settings to read rows, and shell commands to convert them."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from app.config.kinds import LABELED_FORMATS, ROW_FORMATS, TAGGED_FORMATS
from app.config.schema import DatasetConfig
from app.data.remote_files import without_folders
from app.data.roles import ROLES, named_like
from app.data.rows import DataFile

_PLAIN_VALUE = re.compile(r"[\w.*+/: -]+")
_SOURCE = ("path", "transform", "split", "hub_config", "revision")


def typed(key: str, fmt: str, columns: Mapping[str, str]) -> str:
    """Return the settings of a format and its columns in the section `key`."""
    return " ".join([f"{key}.format={fmt}", *_settings(key, _renamed(columns))])


def command(
    fmt: str,
    columns: Mapping[str, str],
    config: DatasetConfig | None,
    key: str = "dataset",
    leave_out: Sequence[str] = (),
) -> str:
    """Return the command that checks the rows of `config` as `fmt`; for a source of a mix, only its settings."""
    skipped = [*(config.leave_out if config else ()), *leave_out]
    last = [shlex.quote(f"dataset.leave_out=[{','.join(skipped)}]")] if skipped else []
    if key != "dataset" or (config and config.mix):
        return " ".join([typed(key, fmt, columns), *last])
    settings = {name: getattr(config, name) for name in _SOURCE} if config else {"path": "FILE"}
    source = {name: value for name, value in settings.items() if value not in (None, "train")}
    task = ["task=classification"] if fmt in LABELED_FORMATS else []
    task += ["task=tokens"] if fmt in TAGGED_FORMATS else []
    task += ROW_FORMATS[fmt].learnt_by[:1] if fmt in ROW_FORMATS else ()
    words = [*task, f"dataset={fmt}", *_settings(key, {**source, **_renamed(columns)}), *last]
    return " ".join(["finetune check data", *words])


def check_of_converted(file: DataFile, fmt: str = "messages") -> str:
    """Return the command that checks the rows converted from a file."""
    return command(fmt, {}, DatasetConfig(path=file.target(), split="train"))


def pair_format(asks: str, answers: str, others: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the format and columns for a question, its answer, and context, history and system among the `others`.

    Return an empty format if two inputs need the same field.
    """
    inputs = [path for path in others if named_like(ROLES["context"], [path])]
    if len(inputs) > 1:
        return "", {}
    more = "".join(inputs)
    history, system = (named_like(ROLES[role], others) for role in ("history", "system"))
    fmt, fields = "question_answer", ("question", "answer")
    if more or history:
        fmt, fields = "instruction", ("instruction", "output")
    chosen = {fields[0]: asks, fields[1]: answers, "input": more, "history": history, "system": system}
    return fmt, {name: path for name, path in chosen.items() if path}


def json_file(config: DatasetConfig | None) -> DataFile:
    """Return the JSON file that a section reads, or OLD.jsonl if it reads other files."""
    configured = without_folders((config.path if config else None) or "")
    path = Path(configured if configured.endswith((".jsonl", ".ndjson", ".json")) else "OLD.jsonl")
    return DataFile(path, path.name)


def _renamed(columns: Mapping[str, str]) -> dict[str, str]:
    return {f"columns.{name}": path for name, path in columns.items() if path != name}


def _settings(key: str, values: Mapping[str, str]) -> Iterator[str]:
    for name, value in values.items():
        shown = value if _PLAIN_VALUE.fullmatch(value) else "'" + value.replace("'", "\\'") + "'"
        yield shlex.quote(f"{key}.{name}={shown}")
