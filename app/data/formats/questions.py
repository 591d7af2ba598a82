"""Rows whose columns are the sides of a conversation: alpaca's instructions, questions with answers."""

from typing import Any

from app.config.schema import Columns
from app.data.formats.columns import optional, optional_text, text
from app.data.formats.conversation import converse
from app.data.shapes import Conversation, Message, Row, RowProblem, kind_of


def instruction(row: Row, columns: Columns) -> Conversation:
    """What to do, perhaps with what to do it to, perhaps after earlier turns; and what came of it."""
    asked = text(row, columns.instruction)
    more = optional_text(row, columns.input)
    question = f"{asked}\n\n{more}" if more.strip() else asked
    earlier = _history(optional(row, columns.history), columns.history)
    return converse([*earlier, *_pair(question, text(row, columns.output))], row, columns)


def question_answer(row: Row, columns: Columns) -> Conversation:
    """A question and its answer."""
    return converse(_pair(text(row, columns.question), text(row, columns.answer)), row, columns)


def _history(found: Any, column: str | None) -> list[Message]:
    """Earlier turns, `[[question, answer], ...]`."""
    if found is None:
        return []
    if not isinstance(found, list):
        raise RowProblem(f"column {column!r} must be a list of [question, answer], found {kind_of(found)}")
    turns: list[Message] = []
    for index, pair in enumerate(found):
        if not isinstance(pair, list) or [type(side) for side in pair] != [str, str]:
            raise RowProblem(f"column {column!r}: turn {index} must be two texts, [question, answer]")
        turns += _pair(*pair)
    return turns


def _pair(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
