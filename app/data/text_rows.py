"""Plain text that holds rows: lines of JSON, or words with their tags. What to type to read them as rows."""

import json
import re
from collections.abc import Sequence

from app.config.dataset_schema import DatasetConfig
from app.data.columns import command
from app.data.data_file import DataFile, awk_of_tagged_words
from app.errors import DataError

_INSPECTED_LINES = 50
_MIN_LINES = 2
_TAG = re.compile(r"O|[BIESLU]-\S+")


def require_prose(file: DataFile, text: str) -> None:
    """DataError if the first lines of a text file are rows, with the commands that read them and that do not."""
    lines = [line for line in text[: 1 << 16].split("\n")[:_INSPECTED_LINES] if line.strip()]
    if len(lines) < _MIN_LINES:
        return
    if all(_is_object(line) for line in lines[:-1]):  # the last may be cut
        what, program, fmt = "lines are JSON objects", "cat", "auto"
    elif program := _program_of_tags([line.split() for line in lines]):
        what, fmt = "lines are words with their tags", "tagged_words"
    else:
        return
    as_rows, as_text = (
        f"{file.converted(made, '.jsonl')} && {command(name, {}, DatasetConfig(path=file.target(), split='train'))}"
        for made, name in ((program, fmt), ("jq -Rsc '{text: .}'", "text"))
    )
    raise DataError(
        f"{file.name}: its {what}, which would be trained as one plain text. To read them as rows, type: {as_rows}\n"
        f"    To train them as they are, type: {as_text}"
    )


def _is_object(line: str) -> bool:
    if not line.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _program_of_tags(lines: Sequence[Sequence[str]]) -> str:
    """Return the program that makes rows of lines of CoNLL; empty for other lines."""
    counts = [len(fields) for fields in lines]
    count = max(counts, key=counts.count)
    rows = [fields for fields in lines if len(fields) == count]
    if count < 2 or 2 * len(rows) < len(lines) or not all(_TAG.fullmatch(fields[-1]) for fields in rows):
        return ""
    is_numbered = all(fields[0].isdecimal() for fields in rows)
    is_nested = is_numbered and count > 2  # the tags of GermEval, which nested ones follow
    if not any("-" in fields[2 if is_nested else -1] for fields in rows):
        return ""
    word, tag = "$2" if is_numbered else "$1", "$3" if is_nested else "$NF"
    return awk_of_tagged_words(f'NF == {count} && {word} != "-DOCSTART-"', word, tag)
