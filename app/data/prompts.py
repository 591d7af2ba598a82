"""Prompts for generation from a file: lines of text, or rows with a prompt or messages."""

import json
from collections.abc import Sequence
from pathlib import Path

from app.data.columns import ABSENT, value
from app.data.formats import words_with_tags
from app.data.readers import READERS, TEXT_COLUMN, TEXT_FILES, read_file
from app.data.row_pipeline import POLICIES
from app.data.rows import Broken, DataFile, Message, RenderedText, Row, extension
from app.data.tokenizer import Encoder, Tokenizer, Tokens
from app.errors import DataError


def prompts_file(name: str) -> Path:
    """Return the file of `prompts=`; DataError if it does not exist."""
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataError(
            f"prompts={name}: no such file (pipes are not supported). Use a .txt with a prompt per line, or a .jsonl."
        )
    return path


def read_prompts(name: str, system: str | None) -> list[list[Message]]:
    """Read one conversation per prompt, ending with the message to answer."""
    return [_with_system(_of_row(location, row), system) for location, row in _rows(name)]


def read_prompt(location: str, line: str, system: str | None) -> tuple[list[Message], Row]:
    """Read one row as JSON; return its conversation and its columns."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as fault:
        raise DataError(f"{location}: not valid JSON ({fault}).") from fault
    row = row if isinstance(row, dict) else {}
    return _with_system(_of_row(location, row), system), row


def read_examples(name: str, fields: Sequence[str]) -> list[list[str]]:
    """Read the texts to classify: lines, or the columns `fields` of rows; a single column may be named prompt."""
    texts = []
    for location, row in _rows(name):
        example = [value(row, field) for field in fields]
        if len(fields) == 1 and not isinstance(example[0], str):
            example = [row.get("prompt")]
        if not all(isinstance(text, str) and text.strip() for text in example):
            raise DataError(
                f"{location}: expected text in {' and '.join(fields)}; found columns {', '.join(row) or 'none'}."
            )
        texts.append(example)
    return texts


def read_words(name: str, field: str) -> list[list[str]]:
    """Read the words to tag: of lines, or of the column `field` of rows, as a list or text."""
    texts = []
    for location, row in _rows(name):
        cell = row.get("prompt") if value(row, field) is ABSENT else value(row, field)
        words = cell.split() if isinstance(cell, str) else cell
        are_words = isinstance(words, list) and all(isinstance(word, str) and word.strip() for word in words)
        if not (words and are_words):
            raise DataError(f"{location}: expected words in {field}; found columns {', '.join(row) or 'none'}.")
        texts.append(words)
    return texts


def tokens_of_words(rows: Sequence[Sequence[str]], tokenizer: Tokenizer, max_length: int) -> list[Tokens]:
    """Return the tokens of the words of each row as in training, truncated to `max_length`.

    The mask has the first token of each word.
    """
    texts = [words_with_tags(words) for words in rows]
    rendered = [RenderedText(text.text, (), raw=True, label=text.label, words=text.words) for text in texts]
    samples = []
    for number, (words, tokens) in enumerate(zip(rows, Encoder(tokenizer).encode(rendered), strict=True), 1):
        without = len(words) - int(tokens.loss_mask.sum())
        fitted = [tokens] if len(tokens.ids) <= max_length else POLICIES["truncate"](tokens, max_length)
        if without:
            raise DataError(
                f"prompts: the tokenizer has no separate token for {without} of the {len(words)} words of text "
                f"{number}. Remove these words."
            )
        if not fitted:
            raise DataError(
                f"prompts: dataset.max_length={max_length} leaves no word of text {number}. Remove the text."
            )
        samples += fitted
    return samples


def _rows(name: str) -> list[tuple[str, Row]]:
    """Return all rows with key and location; each line of a text file is a prompt."""
    path, rows = prompts_file(name), list[tuple[str, Row]]()
    if extension(path) not in READERS:
        raise DataError(f"prompts={name}: unsupported file type. Use one of {', '.join(READERS)}.")
    for location, row in read_file(DataFile(path, name)):
        if isinstance(row, Broken):
            raise DataError(f"prompts={name}: {location}: {row.reason}")
        if extension(path) in TEXT_FILES:
            rows += [(location, {"prompt": line}) for line in row[TEXT_COLUMN].splitlines() if line.strip()]
        else:
            rows.append((location, row))
    if not rows:
        raise DataError(f"prompts={name}: no prompts in the file.")
    return [(f"prompts={name}: {location}", row) for location, row in rows]


def as_conversation(prompt: str, system: str | None) -> list[Message]:
    """Return the conversation of one prompt."""
    return _with_system([{"role": "user", "content": prompt}], system)


def _of_row(location: str, row: Row) -> list[Message]:
    if isinstance(row.get("prompt"), str):
        return [{"role": "user", "content": row["prompt"]}]
    messages = row.get("messages")
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        turns = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        if turns:
            return [{"role": m["role"], "content": m["content"]} for m in turns]
    raise DataError(
        f"{location}: expected a column prompt with text, or messages with role and content; "
        f"found {', '.join(row) or 'nothing'}."
    )


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
    )


def _with_system(messages: list[Message], system: str | None) -> list[Message]:
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]
