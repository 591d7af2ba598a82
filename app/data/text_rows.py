"""Plain text that holds rows: lines of JSON, or words with their tags. What to type to read them as rows."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from app.errors import DataError

_INSPECTED_LINES = 50
_MIN_LINES = 2
_TAG = re.compile(r"O|[BIESLU]-\S+")
_UNPACK = {".gz": "gzip -dc", ".zst": "zstd -dc"}
_CHECK = "python -m app.check data"
_TAGGED_ROWS = (
    "import json, sys; parts = ([f for line in part.splitlines() if len(f := line.split()) == {count}] for part in"
    ' sys.stdin.read().split("\\n\\n")); [print(json.dumps({{"tokens": [f[{word}] for f in part], "tags": [f[{tag}] for'
    ' f in part]}})) for part in parts if part and part[0][{word}] != "-DOCSTART-"]'
)


def require_prose(path: Path, name: str, text: str) -> None:
    """DataError if the first lines of a text file are rows, with the commands that read them and that do not."""
    lines = [line for line in text[: 1 << 16].split("\n")[:_INSPECTED_LINES] if line.strip()]
    if len(lines) < _MIN_LINES:
        return
    shown = f"{_UNPACK.get(path.suffix.lower(), 'cat')} {shlex.quote(str(path))}"
    if all(_is_object(line) for line in lines[:-1]):  # the last may be cut
        what, made, checked = "lines are JSON objects", f"{shown} > NEW.jsonl", "dataset=auto"
    elif program := _program_of_tags([line.split() for line in lines]):
        what, made = "lines are words with their tags", f"{shown} | python -c {shlex.quote(program)} > NEW.jsonl"
        checked = "task=tokens dataset=tagged_words"
    else:
        return
    as_text = f"{shown} | jq -Rsc '{{text: .}}' > NEW.jsonl && {_CHECK} dataset=text dataset.path=NEW.jsonl"
    raise DataError(
        f"{name}: its {what}, which would be trained as one plain text. To read them as rows, type: {made} && {_CHECK}"
        f" {checked} dataset.path=NEW.jsonl\n    To train them as they are, type: {as_text}"
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
    word = int(all(fields[0].isdecimal() for fields in rows))  # a number of the word may come first
    tag = 2 if word and count > 2 else -1  # nested tags follow those of GermEval
    if not any("-" in fields[tag] for fields in rows):
        return ""
    return _TAGGED_ROWS.format(count=count, word=word, tag=tag)
