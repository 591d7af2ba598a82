"""Conversations as trees or pairs, which no format reads, and the commands that make rows of messages of them."""

from collections.abc import Sequence
from typing import Any

from app.config.dataset_schema import DatasetConfig
from app.data.columns import command, json_file
from app.data.types import Row

_OF_TREE = (
    'def talks($before): ($before + [{role: (if .role == "assistant" then "assistant" else "user" end),'
    ' content: .text}]) as $all | (select(.role == "assistant") | {messages: $all}),'
    " (.replies[]? | talks($all)); .prompt | talks([])"
)


def nested_chats(config: DatasetConfig, rows: Sequence[Row], least: float) -> str:
    """Return the commands that make rows of messages of trees (OASST) or pairs (Firefly); empty for other rows."""
    file = json_file(config)
    check = command("messages", {}, DatasetConfig(path=file.target(), split="train"))
    if sum(_is_tree(row.get("prompt")) for row in rows) >= least * len(rows):
        made = f"{file.jq_of_rows(_OF_TREE)} && {check} dataset.train_on=last"
        return f"Each row is a tree of messages. To make a conversation of each answer: {made}"
    for name in dict.fromkeys(str(name) for row in rows for name in row):
        if sum(_is_pairs(row.get(name)) for row in rows) >= least * len(rows):
            turns = '{role: "user", content: .human}, {role: "assistant", content: .assistant}'
            made = f"{file.jq_of_rows(f'{{messages: [.[{_quoted(name)}][] | {turns}]}}')} && {check}"
            return f"Column {name} has pairs of human and assistant. To make messages of them, type: {made}"
    return ""


def _is_tree(found: Any) -> bool:
    return isinstance(found, dict) and isinstance(found.get("text"), str) and isinstance(found.get("replies"), list)


def _is_pairs(found: Any) -> bool:
    pairs = found if isinstance(found, list) else []
    keys = ("human", "assistant")
    return bool(pairs) and all(
        isinstance(each, dict) and all(isinstance(each.get(k), str) for k in keys) for each in pairs
    )


def _quoted(name: str) -> str:
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
