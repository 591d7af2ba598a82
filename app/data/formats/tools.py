"""Tools that a conversation may call, and calls of them, in the one form that chat templates are written for."""

import json
from typing import Any

from app.data.shapes import Message, RowProblem, kind_of


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
