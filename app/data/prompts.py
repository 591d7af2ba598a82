"""Prompts from a file: lines of text, or rows with a prompt or messages."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from app.config.did_you_mean import nearest
from app.data.columns import value
from app.data.readers import READERS, extension, read_file
from app.data.shapes import Broken, Message, Row
from app.errors import DataError

_LINES = (".txt", ".md")


def file_of(given: str) -> Path:
    """What `prompts=` names; refused where it is not there."""
    path = Path(given).expanduser()
    if not path.is_file():
        raise DataError(f"prompts={given}: no such file. Give a .txt with a prompt a line, or a .jsonl.")
    return path


def read_prompts(given: str, system: str | None) -> list[list[Message]]:
    """A conversation for each, ending with what is to be answered."""
    path = file_of(given)
    if extension(path) in _LINES:
        found = list(_lines(path, given))
    elif extension(path) in READERS:
        found = [_of_row(place, row, given) for place, row in read_file(path, given)]
    else:
        raise DataError(
            f"prompts={given}: files of this kind are not read. Give one of {', '.join((*_LINES, *READERS))}."
        )
    if not found:
        raise DataError(f"prompts={given}: it has no prompts.")
    return [_with_system(messages, system) for messages in found]


def read_examples(given: str, fields: Sequence[str]) -> list[list[str]]:
    """The texts to be labelled: of a line, or of the columns `fields` of a row; a single one may be called prompt."""
    path = file_of(given)
    if extension(path) in _LINES and len(fields) == 1:
        found = [[messages[0]["content"]] for messages in _lines(path, given)]
    elif extension(path) in READERS:
        found = [_texts_of(place, row, given, fields) for place, row in read_file(path, given)]
    else:
        raise DataError(
            f"prompts={given}: expected one of {', '.join(READERS)} with the columns {' and '.join(fields)}."
        )
    if not found:
        raise DataError(f"prompts={given}: it has no prompts.")
    return found


def _texts_of(place: str, row: Row | Broken, name: str, fields: Sequence[str]) -> list[str]:
    if isinstance(row, Broken):
        raise DataError(f"prompts={name}: {place}: {row.reason}")
    found = [value(row, field) for field in fields]
    if len(fields) == 1 and not isinstance(found[0], str):
        found = [row.get("prompt")]
    if not all(isinstance(text, str) and text.strip() for text in found):
        raise DataError(
            f"prompts={name}: {place}: expected text in {' and '.join(fields)}; found columns "
            f"{', '.join(row) or 'none'}."
        )
    return found


def asked(prompt: str, system: str | None) -> list[Message]:
    """One prompt as a conversation."""
    return _with_system([{"role": "user", "content": prompt}], system)


def _lines(path: Path, name: str) -> Iterator[list[Message]]:
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise DataError(
            f"prompts={name}: it is not UTF-8 text ({fault.reason} at byte {fault.start})."
        ) from fault
    yield from ([{"role": "user", "content": line}] for line in text.splitlines() if line.strip())


def _of_row(place: str, row: dict[str, Any] | Broken, name: str) -> list[Message]:
    if isinstance(row, Broken):
        raise DataError(f"prompts={name}: {place}: {row.reason}")
    if isinstance(row.get("prompt"), str):
        return [{"role": "user", "content": row["prompt"]}]
    messages = row.get("messages")
    if isinstance(messages, list) and messages and all(_is_message(m) for m in messages):
        kept = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        if kept:
            return [{"role": m["role"], "content": m["content"]} for m in kept]
    near = nearest("prompt", list(row))
    hint = f" Rename {near} to prompt." if near and near != "prompt" else ""
    raise DataError(
        f"prompts={name}: {place}: expected a column prompt with text, or messages with role and content; "
        f"found {', '.join(row) or 'nothing'}.{hint}"
    )


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
    )


def _with_system(messages: list[Message], system: str | None) -> list[Message]:
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]
