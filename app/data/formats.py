"""What a row means: a conversation or a document. `FORMATS` has one entry for each shape of row."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from app.config.schema import Columns
from app.data.files import kind_of
from app.data.shapes import Conversation, Document, Message, Row, RowProblem

ROLES = ("system", "user", "assistant", "tool")
_OPTIONAL_INPUT = "input"
_LATER = {  # what would change the meaning of a message and is not read
    "tool_calls": "calls of tools are not supported yet",
    "function_call": "calls of tools are not supported yet",
    "weight": "weights of messages are not supported yet",
}


@dataclass(frozen=True, slots=True)
class Format:
    """`needs` are the fields of `dataset.columns` that every row must have."""

    needs: tuple[str, ...]
    read: Callable[[Row, Columns], Conversation | Document]


def read_row(row: Row, fmt: str, columns: Columns) -> Conversation | Document:
    """The meaning of one row; RowProblem says what is wrong with it."""
    for field in FORMATS[fmt].needs:
        if getattr(columns, field) not in row:
            raise RowProblem(_wrong_columns(row, field, fmt, columns))
    return FORMATS[fmt].read(row, columns)


def _wrong_columns(row: Row, field: str, fmt: str, columns: Columns) -> str:
    name = getattr(columns, field)
    found = ", ".join(map(str, row)) or "none"
    fitting = [
        other for other, shape in FORMATS.items() if all(getattr(columns, n) in row for n in shape.needs)
    ]
    advice = f"set dataset.columns.{field}=NAME"
    near = difflib.get_close_matches(name, list(map(str, row)), n=1)
    if near:
        advice = f"set dataset.columns.{field}={near[0]}"
    elif fitting:
        advice += f", or dataset.format={fitting[0]}, which these columns fit"
    return f"dataset.format={fmt} needs a column {name!r}; columns found: {found}; {advice}"


def _text(row: Row, column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise RowProblem(f"column {column!r} must be text, found {kind_of(value)}")
    return value


def _messages(row: Row, columns: Columns) -> Conversation:
    found = row[columns.messages]
    if not isinstance(found, list) or not found:
        what = "an empty list" if found == [] else kind_of(found)
        raise RowProblem(f"column {columns.messages!r} must be a list of messages, found {what}")
    if row.get("tools"):
        raise RowProblem("has a column 'tools': conversations with tools are not supported yet")
    return Conversation([_message(index, message) for index, message in enumerate(found)])


def _message(index: int, message: object) -> Message:
    if not isinstance(message, dict):
        raise RowProblem(f"message {index} must be an object with role and content, found {kind_of(message)}")
    given = {
        key: value for key, value in message.items() if value is not None
    }  # tables fill absent keys with null
    for key, reason in _LATER.items():
        if key in given and given[key] not in ([], {}, "", 1):  # what says nothing is no reason to refuse
            raise RowProblem(f"message {index} has {key!r}: {reason}")
    _check_role(index, given)
    content = given.get("content")
    if isinstance(content, list):
        raise RowProblem(
            f"message {index}: content in parts (images, audio) is not supported yet; it must be text"
        )
    if not isinstance(content, str):
        raise RowProblem(f"message {index}: content must be text, found {kind_of(content)}")
    return given


def _check_role(index: int, message: Message) -> None:
    allowed = ", ".join(ROLES)
    if "role" not in message:
        hint = (
            "; from/value is another convention: rename them to role and content" if "from" in message else ""
        )
        raise RowProblem(f"message {index} has no role; allowed: {allowed}{hint}")
    role = message["role"]
    if role not in ROLES:
        near = difflib.get_close_matches(str(role).lower(), ROLES, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RowProblem(f"message {index} has the role {role!r}; allowed: {allowed}{hint}")


def _instruction(row: Row, columns: Columns) -> Conversation:
    asked = _text(row, columns.instruction)
    if (
        columns.input != _OPTIONAL_INPUT and columns.input not in row
    ):  # asked for by name, so it must be there
        raise RowProblem(_wrong_columns(row, "input", "instruction", columns))
    more = _text(row, columns.input) if row.get(columns.input) is not None else ""
    question = f"{asked}\n\n{more}" if more.strip() else asked
    answer = _text(row, columns.output)
    return Conversation([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


def _prompt_completion(row: Row, columns: Columns) -> Document:
    prompt = _text(row, columns.prompt)
    return Document(prompt + _text(row, columns.completion), answer=len(prompt))


def _document(row: Row, columns: Columns) -> Document:
    text = _text(row, columns.text)
    if not text.strip():
        raise RowProblem(f"column {columns.text!r} is empty")
    return Document(text)


FORMATS: dict[str, Format] = {
    "messages": Format(("messages",), _messages),
    "instruction": Format(("instruction", "output"), _instruction),
    "prompt_completion": Format(("prompt", "completion"), _prompt_completion),
    "text": Format(("text",), _document),
}
