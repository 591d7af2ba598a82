"""Rows that hold a conversation, brought into the form that chat templates know.

OpenAI's messages, ShareGPT's turns, or messages in two columns; with tools, and calls of them.
"""

import difflib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from app.config.schema import Columns
from app.data.columns import optional, optional_text, value
from app.data.types import Conversation, Message, Row, RowProblem, kind_of

SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bot"), "assistant"),
    "system": "system",
    "function_call": "assistant",
    **dict.fromkeys(("observation", "tool", "function_response"), "tool"),
}
_CALLS = "function_call"
ROLES = ("system", "user", "assistant", "tool")
_SAME_AS = {"developer": "system", "function": "tool"}  # names that the same roles had before or since
_MIN_WEIGHT, _MAX_WEIGHT = (
    1e-6,
    1e6,
)  # a weight beyond them is a mistake, and lost or overflows in half precision
_READ_KEYS = ("role", "content", "tool_calls", "function_call", "train", "weight")


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
        **{key: value for key, value in given.items() if key not in _READ_KEYS},
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
    if not is_number or not (given == 0 or _MIN_WEIGHT <= given <= _MAX_WEIGHT):
        found = given if is_number else kind_of(given)
        raise RowProblem(
            f"message {index}: weight must be 0 (not trained) or a number from {_MIN_WEIGHT:g} to"
            f" {_MAX_WEIGHT:,.0f} (1 is that of other messages), found {found}"
        )
    return float(given)


def read_tools(found: Any, column: str) -> list[dict[str, Any]] | None:
    """The tools of a row: a list, or JSON text of one."""
    if isinstance(found, str):
        found = _parsed(found, f"column {column!r}") if found.strip() else None
    if found is None or found == []:
        return None
    if not isinstance(found, list):
        raise RowProblem(f"column {column!r} must be a list of tools, found {kind_of(found)}")
    return [_tool(index, tool, column) for index, tool in enumerate(found)]


def _tool(index: int, tool: Any, column: str) -> dict[str, Any]:
    given = _without_nulls(tool)
    function = given.get("function", given) if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowProblem(
            f"column {column!r}: tool {index} must be an object with a name, or with a function that has one;"
            f" found {kind_of(tool)}"
        )
    return given if "function" in given else {"type": "function", "function": given}


def _without_nulls(value: Any) -> Any:
    """Tables fill absent keys with null."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def read_calls(index: int, message: Message) -> list[Message]:
    """The calls that message `index` makes."""
    found = message.get("tool_calls") or []
    if not isinstance(found, list):
        raise RowProblem(f"message {index}: tool_calls must be a list, found {kind_of(found)}")
    if message.get("function_call"):
        found = [*found, message["function_call"]]
    if found and message["role"] != "assistant":
        raise RowProblem(f"message {index} calls tools, but is of {message['role']}, not of assistant")
    return [_call(f"message {index}: tool call {at}", call) for at, call in enumerate(found)]


def read_call_text(text: str, where: str) -> list[Message]:
    """Calls that stand as JSON text where a message's content would: one, or a list of them."""
    found = _parsed(text, where)
    return found if isinstance(found, list) else [found]


def _call(where: str, call: Any) -> Message:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowProblem(
            f"{where} must be an object with a function that has name and arguments, found {kind_of(call)}"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{where}: arguments") if arguments.strip() else {}
    if not isinstance(arguments, dict | None):
        raise RowProblem(f"{where}: arguments must be an object, found {kind_of(arguments)}")
    named = {"id": call["id"]} if call.get("id") else {}
    said = {"name": function["name"], "arguments": arguments or {}}
    return {**named, "type": "function", "function": said}


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RowProblem(f"{where} is no JSON: {error.msg} at character {error.colno}") from error
