"""Formats of rows, as facts that the schema, rules, detection and reading share; `app/data/formats.py` reads them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Fields of `dataset.columns` that every row `needs`, those that it `may` have as well, and what is trained."""

    needs: tuple[str, ...]
    may: tuple[str, ...] = ()
    content: Literal["chat", "answer", "text", "labels"] = "chat"  # chats are rendered by a chat template
    train_on: tuple[str, ...] = ("auto", "assistant", "last", "all")  # what `dataset.train_on` can mean
    overflow: Literal["drop", "split", "truncate"] = "drop"  # what `auto` does with longer samples
    holds: str = "text"  # what its columns hold
    any_column: bool = False  # recognised whatever its column is called


_OF_CHATS = ("tools", "system", "chat_template_kwargs")
_MESSAGES, _TURNS = "lists of objects with role and content", "lists of objects with from and value"
_COMPLETION = ("auto", "completion", "assistant", "last", "all")
_LABEL = "text and its label"

ROW_FORMATS: Mapping[str, RowFormat] = {
    "messages": RowFormat(("messages",), _OF_CHATS, holds=_MESSAGES, any_column=True),
    "sharegpt": RowFormat(("conversations",), _OF_CHATS, holds=_TURNS, any_column=True),
    "instruction": RowFormat(("instruction", "output"), ("input", "history", "system")),
    "question_answer": RowFormat(("question", "answer"), ("system",)),
    "prompt_completion": RowFormat(("prompt", "completion"), content="answer", train_on=("auto", "completion", "all")),
    "chat_completion": RowFormat(("prompt", "completion"), _OF_CHATS, train_on=_COMPLETION, holds=_MESSAGES),
    "text": RowFormat(("text",), content="text", train_on=("auto", "all"), overflow="split"),
    "labelled_text": RowFormat(
        ("text", "label"), content="labels", train_on=("auto",), overflow="truncate", holds=_LABEL
    ),
    "text_pair": RowFormat(
        ("sentence1", "sentence2", "label"), content="labels", train_on=("auto",), overflow="truncate", holds=_LABEL
    ),
}
CHAT_FORMATS = tuple(name for name, each in ROW_FORMATS.items() if each.content == "chat")
LABELLED_FORMATS = tuple(name for name, each in ROW_FORMATS.items() if each.content == "labels")
WITHOUT_ANSWERS = tuple(name for name, each in ROW_FORMATS.items() if each.content in ("text", "labels"))
