"""What a row means, and what is said about one that means nothing."""

from dataclasses import fields
from typing import Any

import pytest

from app.config.schema import CHOICES, Columns, DatasetConfig
from app.data.formats import FORMATS, ROLES, read_row
from app.data.shapes import Conversation, Document, RowProblem
from tests.data.small import chat, config


def columns(**names: str) -> Columns:
    return config("x", columns=names).columns


def problem(row: dict[str, Any], fmt: str = "messages", **names: str) -> str:
    with pytest.raises(RowProblem) as found:
        read_row(row, fmt, columns(**names))
    return str(found.value)


def test_the_table_has_what_the_schema_allows() -> None:
    [field] = [field for field in fields(DatasetConfig) if field.name == "format"]
    assert tuple(FORMATS) == field.metadata[CHOICES]
    known = {field.name for field in fields(Columns)}
    assert all(set(shape.needs) <= known for shape in FORMATS.values())


def test_messages() -> None:
    said = [{"role": role, "content": role} for role in ROLES]
    assert read_row({"messages": said, "id": 3}, "messages", columns()) == Conversation(said)
    assert read_row({"chat": said}, "messages", columns(messages="chat")) == Conversation(said)


def test_what_a_table_fills_up_with_null_is_absent() -> None:
    filled = {"role": "user", "content": "hi", "name": None, "tool_calls": None}
    row = {"messages": [filled], "tools": None}
    assert read_row(row, "messages", columns()) == Conversation([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("empty", [{"tool_calls": []}, {"function_call": {}}, {"weight": 1}, {"weight": 1.0}])
def test_what_says_nothing_is_no_reason_to_refuse(empty: dict[str, Any]) -> None:
    message = {"role": "user", "content": "hi", **empty}
    assert read_row({"messages": [message]}, "messages", columns()) == Conversation([message])


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            {"role": "asistant", "content": ""},
            "message 1 has the role 'asistant';"
            " allowed: system, user, assistant, tool; did you mean 'assistant'?",
        ),
        ({"role": "Human", "content": ""}, "message 1 has the role 'Human'; allowed: system"),
        ({"role": 3, "content": ""}, "message 1 has the role 3"),
        ({"content": ""}, "message 1 has no role; allowed: system, user, assistant, tool"),
        ({"from": "gpt", "value": ""}, "rename them to role and content"),
        ({"role": "user"}, "message 1: content must be text, found null"),
        ({"role": "user", "content": 7}, "message 1: content must be text, found a number"),
        (
            {"role": "user", "content": [{"type": "text"}]},
            "content in parts (images, audio) is not supported yet",
        ),
        (
            {"role": "assistant", "tool_calls": [{}]},
            "message 1 has 'tool_calls': calls of tools are not supported",
        ),
        ({"role": "user", "content": "", "weight": 0}, "message 1 has 'weight': weights of messages are not"),
        ("hi", "message 1 must be an object with role and content, found text"),
    ],
)
def test_a_message_that_cannot_be_used(message: object, said: str) -> None:
    assert said in problem({"messages": [*chat("hi"), message]})


@pytest.mark.parametrize(
    ("found", "said"),
    [("[]", "found text"), ([], "found an empty list"), (None, "found null"), ({}, "found an object")],
)
def test_messages_that_are_no_list(found: object, said: str) -> None:
    assert problem({"messages": found}) == f"column 'messages' must be a list of messages, {said}"


def test_tools_are_refused() -> None:
    assert "not supported yet" in problem({"messages": chat("a", "b"), "tools": [{"name": "f"}]})


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"instruction": "add", "input": "1, 2", "output": "3"}, "add\n\n1, 2"),
        ({"instruction": "add", "input": " ", "output": "3"}, "add"),
        ({"instruction": "add", "input": None, "output": "3"}, "add"),
        ({"instruction": "add", "output": "3"}, "add"),
    ],
)
def test_instruction(row: dict[str, Any], asked: str) -> None:
    assert read_row(row, "instruction", columns()) == Conversation(chat(asked, "3"))


def test_instruction_with_columns_of_other_names() -> None:
    row = {"q": "add", "context": "1, 2", "a": "3"}
    names = {"instruction": "q", "input": "context", "output": "a"}
    assert read_row(row, "instruction", columns(**names)) == Conversation(chat("add\n\n1, 2", "3"))
    wrong = problem(row, "instruction", **{**names, "input": "contxt"})
    assert "set dataset.columns.input=context" in wrong  # a name that was given must be there


def test_prompt_completion() -> None:
    row = {"prompt": "2 + 2 =", "completion": " 4"}
    assert read_row(row, "prompt_completion", columns()) == Document("2 + 2 = 4", answer=7)


def test_text() -> None:
    assert read_row({"body": "ab"}, "text", columns(text="body")) == Document("ab", answer=0)
    assert problem({"text": " \n"}, "text") == "column 'text' is empty"
    assert problem({"text": None}, "text") == "column 'text' must be text, found null"


@pytest.mark.parametrize(
    ("row", "fmt", "said"),
    [
        (
            {"conversations": [], "id": 1},
            "messages",
            "dataset.format=messages needs a column 'messages'; columns found: conversations, id;"
            " set dataset.columns.messages=NAME",
        ),
        ({"message": []}, "messages", "set dataset.columns.messages=message"),
        (
            {"prompt": "", "completion": ""},
            "messages",
            "set dataset.columns.messages=NAME, or dataset.format=prompt_completion, which these columns fit",
        ),
        ({"instruction": "", "answer": ""}, "instruction", "needs a column 'output'"),
        ({}, "text", "columns found: none"),
    ],
)
def test_wrong_columns(row: dict[str, Any], fmt: str, said: str) -> None:
    assert said in problem(row, fmt)
