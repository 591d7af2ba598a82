"""Conversations of rows, in the form that chat templates expect.

OpenAI messages, ShareGPT turns, or messages in two columns; with tools and tool calls.
"""

import difflib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from app.config.schema import Columns
from app.data.columns import optional, optional_text, value
from app.data.roles import judgment
from app.data.rows import AnswerPair, Conversation, LabeledAnswer, Message, Row, RowProblem, kind_of

_ROLE_NAMES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bot"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("observation", "tool", "function", "function_response"), "tool"),
}
SPEAKERS = {**_ROLE_NAMES, "function_call": "assistant"}
ROLES = ("system", "user", "assistant", "tool")
_MIN_WEIGHT, _MAX_WEIGHT = 1e-6, 1e6  # others are likely a mistake, and underflow or overflow in half precision
_READ_KEYS = ("role", "content", "tool_calls", "function_call", "train", "weight")
_READ_PARTS = ("text", "reasoning", "tool_call")
# names in Axolotl, LLaMA-Factory, ms-swift and XTuner; a numeric `loss` is a measurement
_KEY_ALIASES = {"training": "train", "loss_weight": "weight", "loss": "train"}


def speaker_of(message: Any) -> str | None:
    """Return the role of a message or turn, as templates call it; None for an unknown name."""
    return SPEAKERS.get(str(message.get("role", message.get("from")))) if isinstance(message, dict) else None


def messages(row: Row, columns: Columns) -> Conversation:
    """Read `[{"role": ..., "content": ...}, ...]`."""
    return read_conversation(_message_list(row, columns.messages), row, columns)


def sharegpt(row: Row, columns: Columns) -> Conversation:
    """Read `[{"from": ..., "value": ...}, ...]`."""
    turns = _message_list(row, columns.conversations)
    return read_conversation([_turn(index, turn) for index, turn in enumerate(turns)], row, columns)


def chat_completion(row: Row, columns: Columns) -> Conversation:
    """Read two lists of messages, prompt and completion, as one conversation; the completion may be one text."""
    prompt, answer = _message_list(row, columns.prompt), parsed_list(value(row, columns.completion))
    is_text = isinstance(answer, str)
    completion = [{"role": "assistant", "content": answer}] if is_text else _message_list(row, columns.completion)
    whole = read_conversation([*prompt, *completion], row, columns)
    return replace(whole, completion_start=len(whole.messages) - len(completion))


def preference(row: Row, columns: Columns) -> AnswerPair:
    """Read two answers to one prompt: texts, messages, or whole chats with a common start."""
    sides = [_answered(row, name, columns) for name in (columns.chosen, columns.rejected)]
    chosen, rejected = (side.messages for side in sides)
    pairs = zip(chosen, rejected, strict=False)
    start = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(chosen), len(rejected)))
    start -= chosen == rejected  # the caller drops equal chats: their last messages are the answers
    answers = chosen[start:], rejected[start:]
    if start == 0 or not all(answers) or {side[0]["role"] for side in answers} != {"assistant"}:
        raise RowProblem("the chosen and rejected answers have different prompts")
    for name, answer in zip((columns.chosen, columns.rejected), answers, strict=True):
        _require_answer(answer, name)
    return AnswerPair(*(replace(side, completion_start=start) for side in sides))


def preference_label(row: Row, columns: Columns) -> LabeledAnswer:
    """Read one answer and its label; without a prompt, the answer is the end of a whole chat."""
    whole = _answered(row, columns.completion, columns)
    roles = [message["role"] for message in whole.messages]
    last_asked = next((at for at in range(len(roles), 0, -1) if roles[at - 1] not in ("assistant", "tool")), 0)
    start = whole.completion_start or last_asked
    if start in (0, len(roles)):
        raise RowProblem(f"column {columns.completion!r} has no answer to a prompt")
    _require_answer(whole.messages[start:], columns.completion)
    return LabeledAnswer(replace(whole, completion_start=start), is_good=answer_label(row, columns.label))


def answer_label(row: Row, column: str) -> bool:
    """Return the label of an answer, which may be text or a number."""
    cell = value(row, column)
    label = judgment(cell)
    if label is None:
        shown = repr(cell) if isinstance(cell, str | int | float) else kind_of(cell)
        raise RowProblem(f"column {column!r} must be true (good answer) or false (bad answer), found {shown}")
    return label


def _answered(row: Row, column: str, columns: Columns) -> Conversation:
    """Return the prompt and the answer of a column, which may repeat the prompt."""
    prompt = _turns(row, columns.prompt, "user") if optional(row, columns.prompt) is not None else []
    turns = _turns(row, column, "assistant")
    answer = turns[len(prompt) :] if turns[: len(prompt)] == prompt else turns
    whole = read_conversation([*prompt, *answer], row, columns)
    return replace(whole, completion_start=len(whole.messages) - len(answer) if prompt else 0)


def _require_answer(messages: Sequence[Message], column: str) -> None:
    if not any(message["content"].strip() or "tool_calls" in message for message in messages):
        raise RowProblem(f"column {column!r} has an empty answer")


def _turns(row: Row, column: str, speaker: str) -> list[Any]:
    """Return the messages of a column with a list of messages, one message, or its text."""
    turns = value(row, column)
    if isinstance(turns, str):
        return [{"role": speaker, "content": turns}]
    turns = [turns] if isinstance(turns, dict) else _message_list(row, column)
    return [_turn(at, turn) if isinstance(turn, dict) and "from" in turn else turn for at, turn in enumerate(turns)]


def parsed_list(cell: Any) -> Any:
    """Parse a list that is stored as JSON text, as in CSV; return other values unchanged."""
    if not isinstance(cell, str) or not cell.lstrip().startswith("["):
        return cell
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        return cell


def _message_list(row: Row, column: str) -> list[Any]:
    turns = parsed_list(value(row, column))
    if not isinstance(turns, list) or not turns:
        shown = "an empty list" if turns == [] else kind_of(turns)
        raise RowProblem(f"column {column!r} must be a list of messages, found {shown}")
    return turns


def _turn(index: int, turn: object) -> Message:
    if not isinstance(turn, dict):
        raise RowProblem(f"message {index} must be an object with from and value, found {kind_of(turn)}")
    allowed = ", ".join(SPEAKERS)
    if "from" not in turn:
        hint = "; for role/content messages, set dataset.format=messages" if "role" in turn else ""
        raise RowProblem(f"message {index} has no from; allowed: {allowed}{hint}")
    speaker, text = turn["from"], turn.get("value")
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise RowProblem(f"message {index}: unknown from {speaker!r}; allowed: {allowed}")
    rest = {key: inner for key, inner in turn.items() if key not in ("from", "value")}
    if speaker == "function_call" and isinstance(text, str):
        calls = _parsed(text, f"message {index}: the function_call")  # one call or a list
        return {**rest, "role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]}
    return {**rest, "role": SPEAKERS[speaker], "content": text}


def read_conversation(turns: Sequence[object], row: Row, columns: Columns) -> Conversation:
    """Check messages and add the columns `system` and `tools` of the row."""
    messages: list[Message] = []
    trained: dict[int, bool] = {}
    weights: dict[int, float] = {}
    system = optional_text(row, columns.system)
    for index, turn in enumerate(turns):
        message, is_trained, weight = _message(index, turn)
        if index == 0 and system.strip():
            messages = _system_messages(system, message, columns.system)
        if is_trained is not None:
            trained[len(messages)] = is_trained
        if weight not in (0.0, 1.0):
            weights[len(messages)] = weight
        messages.append(message)
    column = tools_column(row, columns)
    tools = None if column is None else read_tools(optional(row, column), column)
    return Conversation(messages, tools, trained, weights, options=_options(row, columns.chat_template_kwargs))


def tools_column(row: Row, columns: Columns) -> str | None:
    """Return the column with the tools of a row; formerly `functions` in the OpenAI format."""
    older = row.get("functions")
    is_older = isinstance(older, list) and bool(older) and all(isinstance(f, dict) and "name" in f for f in older)
    return "functions" if columns.tools == "tools" and row.get("tools") is None and is_older else columns.tools


def _options(row: Row, column: str | None) -> dict[str, Any]:
    """Return chat template options from an object or its JSON text."""
    options = optional(row, column)
    if isinstance(options, str):
        options = _parsed(options, f"column {column!r}") if options.strip() else None
    if not isinstance(options, dict | None):
        raise RowProblem(f"column {column!r} must be an object, found {kind_of(options)}")
    return {str(name): inner for name, inner in (options or {}).items() if inner is not None}


def _system_messages(system: str, first: Message, column: str | None) -> list[Message]:
    """Return the system message to insert before the first message, if any."""
    if first["role"] != "system":
        return [{"role": "system", "content": system}]
    if first["content"].strip() == system.strip():
        return []
    raise RowProblem(
        f"found a system message and a different text in column {column!r}; set dataset.columns.system=null to"
        " ignore the column"
    )


def _message(index: int, turn: object) -> tuple[Message, bool | None, float]:
    """Return the message, its train flag (None: unset), and its weight."""
    if not isinstance(turn, dict):
        raise RowProblem(f"message {index} must be an object with role and content, found {kind_of(turn)}")
    fields: Message = {
        str(key) if key == "loss" and not isinstance(value, bool) else _KEY_ALIASES.get(key, str(key)): value
        for key, value in turn.items()
        if value is not None  # tables store absent keys as null
    }
    role = _role(index, fields)
    fields = _without_parts(index, fields)
    calls = _calls(index, {**fields, "role": role})
    content = fields.get("content")
    if content is None and calls:
        content = ""
    elif isinstance(content, dict) and role == "tool":
        content = json.dumps(content, ensure_ascii=False, default=str)  # tables may have dates
    elif not isinstance(content, str):
        raise RowProblem(f"message {index}: content must be text, found {kind_of(content)}")
    others = {key: value for key, value in fields.items() if key not in _READ_KEYS}
    message = {"role": role, "content": content, **others}
    if calls:
        message["tool_calls"] = calls
    weight, train = _weight(index, fields.get("weight")), fields.get("train")
    if not isinstance(train, bool | None):
        raise RowProblem(f"message {index}: train must be true or false, found {kind_of(train)}")
    return message, False if weight == 0 else train, weight  # a weight of 1 is the default


def _role(index: int, message: Message) -> str:
    allowed = ", ".join(ROLES)
    if "role" not in message:
        hint = "; for from/value messages, set dataset.format=sharegpt" if "from" in message else ""
        raise RowProblem(f"message {index} has no role; allowed: {allowed}{hint}")
    role = _ROLE_NAMES.get(str(message["role"]), message["role"])
    if role not in ROLES:
        near = difflib.get_close_matches(str(role).lower(), ROLES, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RowProblem(f"message {index}: unknown role {role!r}; allowed: {allowed}{hint}")
    return str(role)


def _without_parts(index: int, message: Message) -> Message:
    """Return the message with its content parts split into text, reasoning and tool calls."""
    if not isinstance(message.get("content"), list):
        return message
    parts = [_part(index, part) for part in message["content"]]
    thoughts = [text for kind, text in parts if kind == "reasoning"]
    calls = [_parsed(text, f"message {index}: a tool_call") for kind, text in parts if kind == "tool_call"]
    merged: Message = {"content": "\n".join(text for kind, text in parts if kind == "text")}
    if thoughts:
        merged["reasoning_content"] = "\n".join(thoughts)
    other_calls = message.get("tool_calls", [])
    if calls and isinstance(other_calls, list):
        merged["tool_calls"] = [*other_calls, *calls]
    return {**message, **merged}


def _part(index: int, part: Any) -> tuple[str, str]:
    """Return type and text of a content part; the text is under the type name or `value`."""
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(kind, part.get("value")) if kind in _READ_PARTS else None
    if isinstance(text, str):
        return str(kind), text
    raise RowProblem(
        f"message {index}: unsupported content part of type {kind!r}; supported are"
        ' {"type": "text", "text": "..."} and the types reasoning and tool_call'
    )


def _weight(index: int, weight: Any) -> float:
    """Return the loss weight of the tokens of a message."""
    if weight is None:
        return 1.0
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not (weight == 0 or _MIN_WEIGHT <= weight <= _MAX_WEIGHT):
        shown = str(weight)[:20] if is_number else kind_of(weight)
        raise RowProblem(
            f"message {index}: weight must be 0 (not trained) or a number from {_MIN_WEIGHT:g} to"
            f" {_MAX_WEIGHT:,.0f} (default 1), found {shown}"
        )
    return float(weight)


def read_tools(tools: Any, column: str) -> list[dict[str, Any]] | None:
    """Read a list of tools or its JSON text; nulls in JSON text belong to the schema and are not removed."""
    is_text = isinstance(tools, str)
    tools = tools if not is_text else _parsed(tools, f"column {column!r}") if tools.strip() else None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise RowProblem(f"column {column!r} must be a list of tools, found {kind_of(tools)}")
    return [_tool(index, tool if is_text else _without_nulls(tool), column) for index, tool in enumerate(tools)]


def _tool(index: int, tool: Any, column: str) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowProblem(
            f"column {column!r}: tool {index} must be an object with name, or with function.name; found {kind_of(tool)}"
        )
    return tool if "function" in tool else {"type": "function", "function": tool}


def _without_nulls(value: Any) -> Any:
    """Remove nulls, which tables store for absent keys."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _calls(index: int, message: Message) -> list[Message]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RowProblem(f"message {index}: tool_calls must be a list, found {kind_of(calls)}")
    if message.get("function_call"):
        calls = [*calls, message["function_call"]]
    if calls and message["role"] != "assistant":
        raise RowProblem(f"message {index} has tool calls, but its role is {message['role']}, not assistant")
    return [_call(f"message {index}: tool call {at}", call) for at, call in enumerate(calls)]


def _call(where: str, call: Any) -> Message:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowProblem(f"{where} must be an object with function.name and function.arguments, found {kind_of(call)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{where}: arguments") if arguments.strip() else {}
    if not isinstance(arguments, dict | None):
        twice = ": it is JSON-encoded twice" if isinstance(arguments, str) else ""
        raise RowProblem(f"{where}: arguments must be an object, found {kind_of(arguments)}{twice}")
    identity = {"id": call["id"]} if call.get("id") else {}
    named = {"name": function["name"], "arguments": arguments or {}}
    return {**identity, "type": "function", "function": named}


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RowProblem(f"{where} is not valid JSON: {error.msg} at character {error.colno}") from error
