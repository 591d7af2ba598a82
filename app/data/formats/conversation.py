"""Messages, however they were written down, checked and brought into the form that chat templates know."""

import difflib
import json
from collections.abc import Sequence
from typing import Any

from app.config.schema import Columns
from app.data.formats.columns import optional, optional_text
from app.data.formats.tools import read_calls, read_tools
from app.data.shapes import Conversation, Message, Row, RowProblem, kind_of

ROLES = ("system", "user", "assistant", "tool")
_SAME_AS = {"developer": "system", "function": "tool"}  # names that the same roles had before or since
_LEAST, _MOST = 1e-6, 1e6  # a weight beyond them is a mistake, and lost or overflows in half precision
_READ = ("role", "content", "tool_calls", "function_call", "train", "weight")


def converse(said: Sequence[object], row: Row, columns: Columns) -> Conversation:
    """The conversation of `said`, with the columns of the row that belong to it."""
    messages: list[Message] = []
    marks: dict[int, bool] = {}
    weights: dict[int, float] = {}
    system = optional_text(row, columns.system)
    for index, given in enumerate(said):
        message, mark, weight = _message(index, given)
        if index == 0 and system.strip():
            messages = _opened(system, message, columns.system)
        if mark is not None:
            marks[len(messages)] = mark
        if weight not in (0.0, 1.0):
            weights[len(messages)] = weight
        messages.append(message)
    tools = None if columns.tools is None else read_tools(optional(row, columns.tools), columns.tools)
    return Conversation(messages, tools, marks, weights)


def _opened(system: str, first: Message, column: str | None) -> list[Message]:
    """What stands before the first message."""
    if first["role"] != "system":
        return [{"role": "system", "content": system}]
    if first["content"].strip() == system.strip():
        return []
    raise RowProblem(
        f"has a system message and another text in column {column!r}; set dataset.columns.system=null to"
        " leave the column unread"
    )


def _message(index: int, found: object) -> tuple[Message, bool | None, float]:
    """The message, whether it is marked as trained (True), not trained (False) or neither (None), and its weight."""
    if not isinstance(found, dict):
        raise RowProblem(f"message {index} must be an object with role and content, found {kind_of(found)}")
    given = {
        key: value for key, value in found.items() if value is not None
    }  # tables fill absent keys with null
    role = _role(index, given)
    calls = read_calls(index, {**given, "role": role})
    content = _content(index, role, given.get("content"), silent=bool(calls))
    message = {
        "role": role,
        "content": content,
        **{key: value for key, value in given.items() if key not in _READ},
    }
    if calls:
        message["tool_calls"] = calls
    weight = _weight(index, given.get("weight"))
    return message, _mark(index, given, weight), weight


def _role(index: int, message: Message) -> str:
    allowed = ", ".join(ROLES)
    if "role" not in message:
        hint = "; from/value is another convention: set dataset.format=sharegpt" if "from" in message else ""
        raise RowProblem(f"message {index} has no role; allowed: {allowed}{hint}")
    role = _SAME_AS.get(str(message["role"]), message["role"])
    if role not in ROLES:
        near = difflib.get_close_matches(str(role).lower(), ROLES, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RowProblem(f"message {index} has the role {role!r}; allowed: {allowed}{hint}")
    return str(role)


def _content(index: int, role: str, content: Any, *, silent: bool) -> str:
    """Text. One who calls tools may say nothing; what a tool returns may be an object."""
    if content is None and silent:
        return ""
    if isinstance(content, list):
        return "\n".join(_part(index, part) for part in content)
    if isinstance(content, dict) and role == "tool":
        return json.dumps(content, ensure_ascii=False)
    if not isinstance(content, str):
        raise RowProblem(f"message {index}: content must be text, found {kind_of(content)}")
    return content


def _part(index: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    what = (
        f"of type {kind!r}" if isinstance(kind, str) and kind != "text" else f"{kind_of(part)} without text"
    )
    raise RowProblem(
        f"message {index}: a part of its content is {what}; only parts like"
        ' {"type": "text", "text": "..."} can be trained on'
    )


def _mark(index: int, given: Message, weight: float) -> bool | None:
    """`train: false` or `weight: 0` takes a message out; `weight: 1` says nothing."""
    train = given.get("train")
    if not isinstance(train, bool | None):
        raise RowProblem(f"message {index}: train must be true or false, found {kind_of(train)}")
    if train is not None and "weight" in given and train != bool(weight):
        raise RowProblem(
            f"message {index} has train={json.dumps(train)} and weight={weight:g}: which of them?"
        )
    return False if weight == 0 else train


def _weight(index: int, given: Any) -> float:
    """How much each of its tokens counts in the loss."""
    if given is None:
        return 1.0
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not (given == 0 or _LEAST <= given <= _MOST):
        found = given if is_number else kind_of(given)
        raise RowProblem(
            f"message {index}: weight must be 0 (not trained) or a number from {_LEAST:g} to {_MOST:,.0f} (1 is that"
            f" of other messages), found {found}"
        )
    return float(given)
