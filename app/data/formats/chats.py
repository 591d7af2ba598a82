"""Rows that hold a conversation: OpenAI's messages, ShareGPT's turns, or messages in two columns."""

from dataclasses import replace
from typing import Any

from app.config.schema import Columns
from app.data.formats.columns import value
from app.data.formats.conversation import converse
from app.data.formats.tools import read_call_text
from app.data.shapes import Conversation, Message, Row, RowProblem, kind_of

SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bot"), "assistant"),
    "system": "system",
    "function_call": "assistant",
    **dict.fromkeys(("observation", "tool", "function_response"), "tool"),
}
_CALLS = "function_call"


def messages(row: Row, columns: Columns) -> Conversation:
    """`[{"role": ..., "content": ...}, ...]`."""
    return converse(_listed(row, columns.messages), row, columns)


def sharegpt(row: Row, columns: Columns) -> Conversation:
    """`[{"from": ..., "value": ...}, ...]`."""
    turns = _listed(row, columns.conversations)
    return converse([_turn(index, turn) for index, turn in enumerate(turns)], row, columns)


def chat_completion(row: Row, columns: Columns) -> Conversation:
    """Messages to read, and messages to write after them; both are counted as one conversation."""
    prompt, completion = (_side(row, column) for column in (columns.prompt, columns.completion))
    talk = converse([*prompt, *completion], row, columns)
    return replace(talk, answer=len(talk.messages) - len(completion))


def _side(row: Row, column: str) -> list[Any]:
    if isinstance(value(row, column), str):
        raise RowProblem(
            f"column {column!r} must be a list of messages, found text; rows whose prompt and completion are both"
            " text are dataset.format=prompt_completion"
        )
    return _listed(row, column)


def _listed(row: Row, column: str) -> list[Any]:
    found = value(row, column)
    if not isinstance(found, list) or not found:
        what = "an empty list" if found == [] else kind_of(found)
        raise RowProblem(f"column {column!r} must be a list of messages, found {what}")
    return found


def _turn(index: int, turn: object) -> Message:
    if not isinstance(turn, dict):
        raise RowProblem(f"message {index} must be an object with from and value, found {kind_of(turn)}")
    allowed = ", ".join(SPEAKERS)
    if "from" not in turn:
        hint = "; role/content is another convention: set dataset.format=messages" if "role" in turn else ""
        raise RowProblem(f"message {index} has no from; allowed: {allowed}{hint}")
    speaker, said = turn["from"], turn.get("value")
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise RowProblem(f"message {index} is from {speaker!r}; allowed: {allowed}")
    rest = {key: inner for key, inner in turn.items() if key not in ("from", "value")}
    if speaker == _CALLS and isinstance(said, str):
        calls = read_call_text(said, f"message {index}: the function_call")
        return {**rest, "role": "assistant", "tool_calls": calls}
    return {**rest, "role": SPEAKERS[speaker], "content": said}
