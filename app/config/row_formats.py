"""Formats of rows, as facts that the schema, rules, detection and reading share; `app/data/formats.py` reads them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from app.config.preferences import recipes_of


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Fields of `dataset.columns` that every row `needs`, those that it `may` have as well, and what is trained."""

    needs: tuple[str, ...]
    may: tuple[str, ...] = ()
    content: Literal["chat", "answer", "text", "labels", "tags"] = "chat"  # chats are rendered by a chat template
    train_on: tuple[str, ...] = ("auto", "assistant", "last", "all")  # what `dataset.train_on` can mean
    overflow: Literal["drop", "split", "truncate"] = "drop"  # what `auto` does with longer samples
    message: tuple[str, ...] = ()  # keys of the messages that its columns list: the role, and what one may hold
    pairs: bool = False  # of a wanted and an unwanted answer
    learnt_by: tuple[str, ...] = ()  # recipes, where only those with a loss over answers learn from it
    any_column: bool = False  # recognised whatever its column is called

    @property
    def holds(self) -> str:
        """What its columns hold, in words."""
        if self.message:
            return f"lists of objects with {self.message[0]} and {self.message[1]}"
        return {"labels": "text and its label", "tags": "lists of words and of their tags"}.get(self.content, "text")


_OF_ANSWERS = ("tools", "system", "chat_template_kwargs")
_OF_CHATS = (*_OF_ANSWERS, "reasoning")
_MESSAGE = ("role", "content", "tool_calls", "function_call")
_PAIR = ("auto", "completion")
_COMPLETION = ("auto", "completion", "assistant", "last", "all")
_BY_PAIRS, _BY_LABELS = recipes_of("preference"), recipes_of("preference_label")

ROW_FORMATS: Mapping[str, RowFormat] = {
    "messages": RowFormat(("messages",), _OF_CHATS, message=_MESSAGE, any_column=True),
    "sharegpt": RowFormat(("conversations",), _OF_CHATS, message=("from", "value"), any_column=True),
    "instruction": RowFormat(("instruction", "output"), ("input", "history", *_OF_CHATS)),
    "question_answer": RowFormat(("question", "answer"), _OF_CHATS),
    "prompt_completion": RowFormat(("prompt", "completion"), content="answer", train_on=("auto", "completion", "all")),
    "chat_completion": RowFormat(("prompt", "completion"), _OF_CHATS, train_on=_COMPLETION, message=_MESSAGE),
    "text": RowFormat(("text",), content="text", train_on=("auto", "all"), overflow="split"),
    "labelled_text": RowFormat(("text", "label"), content="labels", train_on=("auto",), overflow="truncate"),
    "text_pair": RowFormat(
        ("sentence1", "sentence2", "label"), content="labels", train_on=("auto",), overflow="truncate"
    ),
    "tagged_words": RowFormat(("tokens", "tags"), content="tags", train_on=("auto",), overflow="truncate"),
    "preference": RowFormat(
        ("chosen", "rejected"),
        ("prompt", *_OF_ANSWERS),
        train_on=_PAIR,
        message=_MESSAGE,
        pairs=True,
        learnt_by=_BY_PAIRS,
    ),
    "preference_text": RowFormat(
        ("chosen", "rejected"), ("prompt",), content="answer", train_on=_PAIR, pairs=True, learnt_by=_BY_PAIRS
    ),
    "preference_label": RowFormat(
        ("completion", "label"), ("prompt", *_OF_ANSWERS), train_on=_PAIR, message=_MESSAGE, learnt_by=_BY_LABELS
    ),
    "preference_label_text": RowFormat(
        ("completion", "label"), ("prompt",), content="answer", train_on=_PAIR, learnt_by=_BY_LABELS
    ),
}
CHAT_FORMATS = tuple(name for name, each in ROW_FORMATS.items() if each.content == "chat")
PREFERENCE_FORMATS = tuple(name for name, each in ROW_FORMATS.items() if each.learnt_by)
# of texts: the format that writes the same answers through a chat template
CHAT_OF = {"preference_text": "preference", "preference_label_text": "preference_label"}
LABELLED_FORMATS = tuple(name for name, each in ROW_FORMATS.items() if each.content == "labels")
TAGGED_FORMATS = tuple(name for name, each in ROW_FORMATS.items() if each.content == "tags")
WITHOUT_ANSWERS = tuple(name for name, each in ROW_FORMATS.items() if each.content in ("text", "labels", "tags"))


def fields_of(fmt: str) -> tuple[str, ...]:
    """Return the fields of `dataset.columns` that a format reads."""
    return (*ROW_FORMATS[fmt].needs, *ROW_FORMATS[fmt].may)
