"""Rows that are text as it stands, without a chat template."""

from app.config.schema import Columns
from app.data.formats.columns import text
from app.data.shapes import Document, Row, RowProblem


def prompt_completion(row: Row, columns: Columns) -> Document:
    """Two texts, joined as they are."""
    prompt = text(row, columns.prompt)
    return Document(prompt + text(row, columns.completion), answer=len(prompt))


def document(row: Row, columns: Columns) -> Document:
    """One text."""
    found = text(row, columns.text)
    if not found.strip():
        raise RowProblem(f"column {columns.text!r} is empty")
    return Document(found)
