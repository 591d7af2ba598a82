"""What a row means, and what is said about one that means nothing."""

import json
import math
from dataclasses import fields
from datetime import date
from typing import Any

import pytest
from omegaconf import OmegaConf

from app.config.conf_files import CONF
from app.config.kinds import ROW_FORMATS, fields_of
from app.config.schema import Columns
from app.data.conversations import ROLES
from app.data.formats import read_row
from app.data.rows import Conversation, Document, RowProblem
from tests.data.small import chat, config

CALL = {"name": "add", "arguments": {"a": 1, "b": "é"}}
ADD = {"name": "add", "description": "Adds.", "parameters": {}}
TOOL = {"type": "function", "function": ADD}


def columns(**names: str | None) -> Columns:
    return config("x", columns=names).columns


def read(row: dict[str, Any], fmt: str = "messages", **names: str | None) -> Any:
    return read_row(row, fmt, columns(**names))


def problem(row: dict[str, Any], fmt: str = "messages", **names: str | None) -> str:
    with pytest.raises(RowProblem) as found:
        read_row(row, fmt, columns(**names))
    return str(found.value)


def test_fields_of_formats_are_the_columns() -> None:
    known = {field.name for field in fields(Columns)}
    assert {name for fmt in ROW_FORMATS for name in fields_of(fmt)} == known


def test_columns_default_names_are_field_names() -> None:
    """Any other name must be there, so what may be absent has the name of its field."""
    policy = OmegaConf.load(CONF / "dataset" / "_policy.yaml")
    assert all(name == field for field, name in policy.columns.items())


def test_messages_read() -> None:
    said = [{"role": role, "content": role} for role in ROLES]
    assert read({"messages": said, "id": 3}) == Conversation(said)
    assert read({"chat": said}, messages="chat") == Conversation(said)


def test_messages_role_aliases() -> None:
    said = [{"role": "developer", "content": "a"}, {"role": "function", "name": "add", "content": "3"}]
    assert read({"messages": said}).messages == [
        {"role": "system", "content": "a"},
        {"role": "tool", "content": "3", "name": "add"},
    ]
    names = [("system", "developer"), ("user", "human"), ("assistant", "gpt"), ("tool", "observation")]
    expected = [{"role": role, "content": "a"} for role, _ in names]
    assert read({"messages": [{"role": name, "content": "a"} for _, name in names]}).messages == expected
    turns = [{"from": name, "value": "a"} for _, name in names]
    assert read({"conversations": turns}, "sharegpt").messages == expected


def test_messages_as_json_text() -> None:
    said = chat("[a]", "b")
    assert read({"messages": json.dumps(said)}) == Conversation([*said])
    turns = json.dumps([{"from": "human", "value": "[a]"}, {"from": "gpt", "value": "b"}], indent=1)
    assert read({"conversations": turns}, "sharegpt") == Conversation([*said])


@pytest.mark.parametrize(
    "empty",
    [{"tool_calls": []}, {"function_call": {}}, {"weight": 1}, {"name": None, "tool_calls": None, "train": None}],
)
def test_messages_empty_and_null_keys_are_absent(empty: dict[str, Any]) -> None:
    row = {"messages": [{**chat("hi")[0], **empty}], "tools": None, "system": None}
    assert read(row) == Conversation(chat("hi"))


def test_messages_other_keys_kept() -> None:
    said = [{"role": "user", "content": "hi", "name": "Ann"}, {**chat("", "b")[1], "reasoning_content": "hm"}]
    assert read({"messages": said}).messages == said


def test_messages_content_parts_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read({"messages": [{"role": "user", "content": parts}]}).messages == chat("a\nb")
    valued = [{"type": "text", "value": "a"}, {"type": "text", "value": "b"}]
    assert read({"messages": [{"role": "user", "content": valued}]}).messages == chat("a\nb")


def test_messages_thoughts_and_calls_among_parts_read() -> None:
    parts = [{"type": "reasoning", "value": "hm"}, {"type": "tool_call", "value": json.dumps(CALL)}]
    (message,) = read({"messages": [{"role": "assistant", "content": parts}]}).messages
    assert message["content"] == ""
    assert message["reasoning_content"] == "hm"
    assert [call["function"] for call in message["tool_calls"]] == [CALL]


@pytest.mark.parametrize(
    "calling",
    [
        {"content": None, "tool_calls": [{"type": "function", "function": CALL}]},
        {"content": "", "tool_calls": [{"function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}]},
        {"tool_calls": [CALL]},
        {"function_call": {**CALL, "arguments": '{"a": 1, "b": "\\u00e9"}'}},
    ],
)
def test_tool_calls_normalized(calling: dict[str, Any]) -> None:
    [_, said] = read({"messages": [*chat("1 + 2?"), {"role": "assistant", **calling}]}).messages
    assert said == {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}


def test_tool_calls_keep_id_and_content() -> None:
    calling = {"role": "assistant", "content": "Let me see.", "tool_calls": [{"id": "c1", "function": CALL}]}
    returned = {"role": "tool", "tool_call_id": "c1", "content": {"sum": "é", "on": date(2026, 1, 2)}}
    [said, answer] = read({"messages": [calling, returned]}).messages
    assert (said["content"], said["tool_calls"][0]["id"]) == ("Let me see.", "c1")
    assert answer == {"role": "tool", "tool_call_id": "c1", "content": '{"sum": "é", "on": "2026-01-02"}'}


@pytest.mark.parametrize("tools", [[TOOL], [ADD], json.dumps([TOOL]), [{**TOOL, "function": {**ADD, "strict": None}}]])
def test_tools_normalized(tools: object) -> None:
    assert read({"messages": chat("a"), "tools": tools}).tools == [TOOL]
    assert read({"messages": chat("a"), "functions": tools}, tools="functions").tools == [TOOL]
    assert read({"messages": chat("a"), "tools": tools}, tools=None).tools is None


def test_tools_as_json_text_keep_nulls() -> None:
    strict = {**TOOL, "function": {**ADD, "parameters": {"type": "object", "required": None}}}
    assert read({"messages": chat("a"), "tools": json.dumps([strict])}).tools == [strict]


@pytest.mark.parametrize("nothing", [None, [], "", "[]"])
def test_tools_absent(nothing: object) -> None:
    assert read({"messages": chat("a"), "tools": nothing}).tools is None


def test_system_column_opens_conversation() -> None:
    opened = chat("a", "b", system="Be brief.")
    for row, fmt in (
        ({"messages": chat("a", "b")}, "messages"),
        ({"messages": opened}, "messages"),
        ({"instruction": "a", "output": "b"}, "instruction"),
        ({"question": "a", "answer": "b"}, "question_answer"),
    ):
        assert read({**row, "system": "Be brief."}, fmt) == Conversation(opened)
    assert read({"messages": chat("a", "b"), "system": " "}) == Conversation(chat("a", "b"))
    reported = problem({"messages": opened, "system": "Be long."})
    assert "a system message and a different text in column 'system'; set dataset.columns.system=null" in reported
    assert read({"messages": opened, "system": "Be long."}, system=None) == Conversation(opened)
    assert "column 'system' must be text, found a list" in problem({"messages": opened, "system": []})


@pytest.mark.parametrize(
    ("mark", "trained", "weights"),
    [
        ({}, {}, {}),
        ({"weight": 1.0}, {}, {}),
        ({"weight": 0}, {2: False}, {}),
        ({"train": False}, {2: False}, {}),
        ({"loss": False}, {2: False}, {}),
        ({"loss": True}, {2: True}, {}),
        ({"train": True, "weight": 1}, {2: True}, {}),
        ({"weight": 0.3}, {}, {2: 0.3}),
        ({"weight": 1e-6, "train": True}, {2: True}, {2: 1e-6}),
    ],
)
def test_train_flags_and_weights_follow_their_message(
    mark: dict[str, Any], trained: dict[int, bool], weights: dict[int, float]
) -> None:
    expected = Conversation(chat("a", "b", system="s"), trained=trained, weights=weights)
    assert read({"messages": [*chat("a"), {**chat("", "b")[1], **mark}], "system": "s"}) == expected
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", **mark}]
    assert read({"conversations": turns, "system": "s"}, "sharegpt") == expected


def test_sharegpt_read() -> None:
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "1 + 2?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "Three."},
    ]
    row = {"conversations": turns, "tools": json.dumps([ADD])}
    made = read(row, "sharegpt")
    calls = [{"type": "function", "function": CALL}]
    assert made.messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "Three."},
    ]
    assert made.tools == [TOOL]
    two = [{"from": "function_call", "value": json.dumps([CALL, CALL])}]
    assert read({"turns": two}, "sharegpt", conversations="turns").messages[0]["tool_calls"] == calls * 2


@pytest.mark.parametrize(("more", "asked"), [({"input": "1, 2"}, "add\n\n1, 2"), ({"input": " "}, "add"), ({}, "add")])
def test_instruction_read(more: dict[str, Any], asked: str) -> None:
    assert read({"instruction": "add", "output": "3", **more}, "instruction") == Conversation(chat(asked, "3"))


def test_instruction_columns_renamed() -> None:
    row = {"q": "add", "context": "1, 2", "a": "3"}
    names = {"instruction": "q", "input": "context", "output": "a"}
    assert read(row, "instruction", **names) == Conversation(chat("add\n\n1, 2", "3"))
    wrong = problem(row, "instruction", **{**names, "input": "contxt"})
    assert "set dataset.columns.input=context" in wrong  # a name that was given must be there
    assert read(row, "instruction", **{**names, "input": None}) == Conversation(chat("add", "3"))


def test_instruction_history_read() -> None:
    row = {"instruction": "c", "input": "x", "output": "d", "history": [["a", "b"]], "system": "s"}
    assert read(row, "instruction") == Conversation(chat("a", "b", "c\n\nx", "d", system="s"))
    assert read({**row, "history": []}, "instruction").messages == chat("c\n\nx", "d", system="s")
    assert read(row, "instruction", history=None).messages == chat("c\n\nx", "d", system="s")


ASKED = [{"role": "user", "content": "2 + 2?"}]
SAID = [{"role": "assistant", "content": "4"}]


def test_chat_completion_read() -> None:
    row = {"prompt": ASKED, "completion": SAID, "tools": [ADD]}
    assert read(row, "chat_completion") == Conversation([*ASKED, *SAID], [TOOL], completion_start=1)
    opened = Conversation([*chat("2 + 2?", "4", system="Add.")], completion_start=2)
    assert read({"prompt": ASKED, "completion": SAID, "system": "Add."}, "chat_completion") == opened
    named = read({"p": ASKED, "c": SAID}, "chat_completion", prompt="p", completion="c")
    assert named == Conversation([*ASKED, *SAID], completion_start=1)


def test_plain_columns_read() -> None:
    assert read({"question": "a", "answer": "b"}, "question_answer") == Conversation(chat("a", "b"))
    row = {"prompt": "2 + 2 =", "completion": " 4"}
    assert read(row, "prompt_completion") == Document("2 + 2 = 4", completion_start=7)
    assert read({"body": "ab"}, "text", text="body") == Document("ab", completion_start=0)


def test_column_path_leads_inside() -> None:
    row = {"a": [{"b": "first"}, {"b": "second"}], "c": {"d": "deep"}, "c.d": "flat"}
    assert read(row, "text", text="a.1.b") == Document("second")
    assert read(row, "text", text="c.d") == Document("flat")  # a column of just this name comes first
    assert read({"c": row["c"]}, "text", text="c.d") == Document("deep")
    for path in ("a.2.b", "a.x.b", "a.1.c", "a.1.b.0", "a.-1.b"):
        assert f"needs a column {path!r}; columns found: a, c, c.d" in problem(row, "text", text=path)


def user(content: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def answer(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": "", **more}]}


NO_PART = "message 0: unsupported content part {}; supported are"
NO_WEIGHT = "message 0: weight must be 0 (not trained) or a number from 1e-06 to 1,000,000 (default 1), found"
MESSAGES = [
    (user([{"type": "image_url", "image_url": {}}]), NO_PART.format("of type 'image_url'")),
    (user([{"type": "text"}]), NO_PART.format("of type 'text'")),
    (user(["a"]), NO_PART.format("of type None")),
    (user(7), "message 0: content must be text, found a number"),
    (user({"a": 1}), "message 0: content must be text, found an object"),
    (answer(content=None), "message 0: content must be text, found null"),
    ({"messages": [{"role": "user"}]}, "message 0: content must be text, found null"),
    (answer(tool_calls="add"), "message 0: tool_calls must be a list, found text"),
    (answer(tool_calls=5, function_call={"name": "add"}), "tool_calls must be a list, found a number"),
    (answer(tool_calls=[3]), "message 0: tool call 0 must be an object with function.name"),
    (answer(tool_calls=[{"function": {}}]), "message 0: tool call 0 must be an object with function.name"),
    (
        answer(tool_calls=[CALL, {**CALL, "arguments": "{a: 1}"}]),
        "message 0: tool call 1: arguments is not valid JSON: Expecting property name",
    ),
    (answer(tool_calls=[{**CALL, "arguments": "[1]"}]), "arguments must be an object, found a list"),
    (answer(tool_calls=[{**CALL, "arguments": '"{}"'}]), "must be an object, found text: it is JSON-encoded twice"),
    (answer(content=[{"type": "tool_call", "value": "{"}]), "message 0: a tool_call is not valid JSON"),
    (answer(content=[{"type": "tool_call", "value": "{}"}], tool_calls=5), "tool_calls must be a list, found a number"),
    (user([{"type": "text", "value": 3}]), NO_PART.format("of type 'text'")),
    (answer(role="user", tool_calls=[CALL]), "message 0 has tool calls, but its role is user, not assistant"),
    (answer(train="no"), "message 0: train must be true or false, found text"),
    (answer(train=0), "message 0: train must be true or false, found a number"),
    *((answer(weight=bad), f"{NO_WEIGHT} {bad}") for bad in (-1, 1e-7, 10**7, math.inf, math.nan)),
    (answer(weight="1"), "found text"),
    (answer(weight=True), "found true or false"),
    (
        answer(role="asistant"),
        "unknown role 'asistant'; allowed: system, user, assistant, tool; did you mean 'assistant'?",
    ),
    (answer(role="Human"), "message 0: unknown role 'Human'; allowed: system"),
    (answer(role=3), "message 0: unknown role 3"),
    (answer(role=["user"]), "message 0: unknown role ['user']"),
    ({"messages": [{"content": ""}]}, "message 0 has no role; allowed: system, user, assistant, tool"),
    ({"messages": [{"from": "gpt", "value": ""}]}, "set dataset.format=sharegpt"),
    ({"messages": [*chat("hi"), "hi"]}, "message 1 must be an object with role and content, found text"),
    ({"messages": "[]"}, "column 'messages' must be a list of messages, found an empty list"),
    ({"messages": "[{'role': 'user'}]"}, "column 'messages' must be a list of messages, found text"),
    ({"messages": []}, "column 'messages' must be a list of messages, found an empty list"),
    ({"messages": None}, "column 'messages' must be a list of messages, found null"),
    ({"messages": {}}, "column 'messages' must be a list of messages, found an object"),
    ({**user("a"), "tools": "add"}, "column 'tools' is not valid JSON: Expecting value at character 1"),
    ({**user("a"), "tools": {}}, "column 'tools' must be a list of tools, found an object"),
    ({**user("a"), "tools": [TOOL, "add"]}, "column 'tools': tool 1 must be an object with name"),
    ({**user("a"), "tools": [{"type": "function"}]}, "column 'tools': tool 0 must be an object with name"),
    (
        {"dialogue": [], "id": 1},
        "dataset.format=messages needs a column 'messages'; columns found: dialogue, id;"
        " set dataset.columns.messages=NAME",
    ),
    ({"message": []}, "set dataset.columns.messages=message"),
    (
        {"prompt": "", "completion": ""},
        "set dataset.columns.messages=NAME, or dataset.format=prompt_completion, which fits these columns",
    ),
]
TURNS = [
    ("hi", "message 0 must be an object with from and value, found text"),
    ({"value": "a"}, "message 0 has no from; allowed: human, user, gpt, assistant"),
    ({"role": "user", "content": "a"}, "set dataset.format=messages"),
    ({"from": "Human", "value": "a"}, "message 0: unknown from 'Human'; allowed: human, user"),
    ({"from": ["human"], "value": "a"}, "message 0: unknown from ['human']; allowed"),
    ({"from": "human"}, "message 0: content must be text, found null"),
    ({"from": "function_call", "value": "add(1)"}, "message 0: the function_call is not valid JSON"),
    ({"from": "function_call", "value": "3"}, "message 0: tool call 0 must be an object"),
]
HISTORIES: list[Any] = ["a", ["a"], [["a"]], [["a", None]], [["a", "b", "c"]], {}]
OTHERS = [
    ("sharegpt", {"conversations": []}, "column 'conversations' must be a list of messages, found an empty list"),
    *(("sharegpt", {"conversations": [turn]}, said) for turn, said in TURNS),
    *(("instruction", {"instruction": "c", "output": "d", "history": h}, "column 'history'") for h in HISTORIES),
    ("instruction", {"instruction": "", "answer": ""}, "needs a column 'output'"),
    (
        "chat_completion",
        {"prompt": "2 + 2?", "completion": SAID},
        "column 'prompt' must be a list of messages, found text",
    ),
    ("chat_completion", {"prompt": ASKED, "completion": 4}, "column 'completion' must be a list of messages"),
    ("chat_completion", {"prompt": ASKED, "completion": []}, "list of messages, found an empty list"),
    ("chat_completion", {"prompt": ASKED, "completion": [SAID]}, "message 1 must be an object with role and"),
    ("prompt_completion", {"prompt": "2 + 2?", "completion": SAID}, "column 'completion' must be text, found a list"),
    ("prompt_completion", {"prompt": ASKED, "completion": SAID}, "column 'prompt' must be text, found a list"),
    ("question_answer", {"question": "a", "answer": True}, "column 'answer' must be text"),
    ("text", {"text": " \n"}, "column 'text' is empty"),
    ("text", {"text": None}, "column 'text' must be text, found null"),
    ("text", {}, "columns found: none"),
]


@pytest.mark.parametrize(("fmt", "row", "said"), [*(("messages", row, said) for row, said in MESSAGES), *OTHERS])
def test_format_unusable_row_says_why(fmt: str, row: dict[str, Any], said: str) -> None:
    assert said in problem(row, fmt)
