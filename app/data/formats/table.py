"""What a row means: a conversation, a document or an example of a class. `FORMATS` has an entry for each shape."""

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from app.config.schema import Columns
from app.data.formats import chats, documents, labelled, questions
from app.data.formats.columns import has, value
from app.data.shapes import Conversation, Document, Example, Row, RowProblem


@dataclass(frozen=True, slots=True)
class Format:
    """Fields of `dataset.columns`: those that every row `needs`, and those that it `may` have as well."""

    needs: tuple[str, ...]
    may: tuple[str, ...]
    read: Callable[[Row, Columns], Conversation | Document | Example]


_SPEAKING = ("user", "assistant")
FORMATS: dict[str, Format] = {
    "messages": Format(("messages",), ("tools", "system"), chats.messages),
    "sharegpt": Format(("conversations",), ("tools", "system"), chats.sharegpt),
    "instruction": Format(("instruction", "output"), ("input", "history", "system"), questions.instruction),
    "question_answer": Format(("question", "answer"), ("system",), questions.question_answer),
    "prompt_completion": Format(("prompt", "completion"), (), documents.prompt_completion),
    "chat_completion": Format(("prompt", "completion"), ("tools", "system"), chats.chat_completion),
    "text": Format(("text",), (), documents.document),
    "labelled_text": Format(("text", "label"), (), labelled.labelled_text),
    "text_pair": Format(("sentence1", "sentence2", "label"), (), labelled.text_pair),
}


def read_row(row: Row, fmt: str, columns: Columns) -> Conversation | Document | Example:
    """The meaning of one row; RowProblem says what is wrong with it."""
    for field in _expected(fmt, columns):
        if not has(row, getattr(columns, field)):
            raise RowProblem(_wrong_columns(row, field, fmt, columns))
    return FORMATS[fmt].read(row, columns)


def empty_parts(
    row: Row, content: Conversation | Document | Example, fmt: str, columns: Columns
) -> Iterator[str]:
    """Where there should be words and are none: columns that every row needs, or messages of one side."""
    needed = {name: value(row, name) for name in (getattr(columns, field) for field in FORMATS[fmt].needs)}
    yield from (
        f"column {name}" for name, found in needed.items() if isinstance(found, str) and not found.strip()
    )
    if not isinstance(content, Conversation) or any(isinstance(found, str) for found in needed.values()):
        return
    for message in content.messages:
        if message["role"] in _SPEAKING and not message["content"].strip() and "tool_calls" not in message:
            yield f"messages of {message['role']}"


def fields_of(fmt: str) -> tuple[str, ...]:
    """The fields of `dataset.columns` that decide what rows of a format mean."""
    return (*FORMATS[fmt].needs, *FORMATS[fmt].may)


def _expected(fmt: str, columns: Columns) -> list[str]:
    """What must be there: what is needed, and what was asked for by a name of its own."""
    given = [field for field in FORMATS[fmt].may if getattr(columns, field) not in (None, field)]
    return [*FORMATS[fmt].needs, *given]


def _wrong_columns(row: Row, field: str, fmt: str, columns: Columns) -> str:
    name = getattr(columns, field)
    found = ", ".join(map(str, row)) or "none"
    fitting = [
        other
        for other, shape in FORMATS.items()
        if all(has(row, getattr(columns, needed)) for needed in shape.needs)
    ]
    advice = f"set dataset.columns.{field}=NAME"
    near = difflib.get_close_matches(name, list(map(str, row)), n=1)
    if near:
        advice = f"set dataset.columns.{field}={near[0]}"
    elif fitting:
        advice += f", or dataset.format={fitting[0]}, which these columns fit"
    return f"dataset.format={fmt} needs a column {name!r}; columns found: {found}; {advice}"
