"""Rows that are text as it stands, without a chat template."""

from app.config.schema import Columns
from app.data.formats.columns import text, value
from app.data.shapes import Document, Row, RowProblem


def prompt_completion(row: Row, columns: Columns) -> Document:
    """Two texts, joined as they are."""
    for column in (columns.prompt, columns.completion):
        if isinstance(value(row, column), list):
            raise RowProblem(
                f"column {column!r} must be text, found a list; prompts and completions that are lists of messages"
                " are dataset.format=chat_completion"
            )
    prompt = text(row, columns.prompt)
    return Document(prompt + text(row, columns.completion), answer=len(prompt))


def document(row: Row, columns: Columns) -> Document:
    """One text."""
    found = text(row, columns.text)
    if not found.strip():
        raise RowProblem(f"column {columns.text!r} is empty")
    return Document(found)
