"""What a row is on its way: what a file holds, what it means, and the text whose tokens are trained."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Row = dict[str, Any]
Message = dict[str, Any]
Span = tuple[int, int]  # first character, and the one after the last


@dataclass(frozen=True, slots=True)
class Broken:
    """Stands where a row should be: this place of the file could not be read as one."""

    reason: str


Located = tuple[str, Row | Broken]  # the place ("train.jsonl:17") and what is there


def printable(text: str) -> str:
    """Without what a terminal obeys or a file cannot hold: it may come from a row, and goes into messages."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def kind_of(value: object) -> str:
    """A value's type in words that hold for JSON, CSV and Parquet alike."""
    if value != value:  # noqa: PLR0124  what tables have in an empty cell of a column of numbers
        return "NaN"
    return _KINDS.get(type(value), f"a {type(value).__name__}")


_KINDS: dict[type, str] = {
    str: "text",
    list: "a list",
    dict: "an object",
    bool: "true or false",
    type(None): "null",
    int: "a number",
    float: "a number",
    bytes: "bytes",
}


class RowProblem(Exception):  # noqa: N818 (caught where the place is known; never reaches the user as it is)
    """One row that cannot be trained on; the message says why, the catcher says where."""

    def __init__(self, reason: str) -> None:
        super().__init__(printable(reason))


class Source(Protocol):
    """Rows in a fixed order, and a hash that changes whenever they could."""

    @property
    def name(self) -> str:
        """What the user called it."""

    @property
    def key(self) -> str:
        """Where: `dataset.path` or `dataset.eval_path`."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """Files of the folder that are not read."""

    def rows(self) -> Iterator[Located]:
        """Every row with its place, from the beginning."""

    def fingerprint(self) -> str:
        """A hash of the content, and of the names that places are made of."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for the chat template, checked; the completion begins with message `answer`, where there is one."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None  # that it may call, as the template wants them
    marks: Mapping[int, bool] = field(default_factory=dict)  # messages that say whether they are trained
    weights: Mapping[int, float] = field(default_factory=dict)  # those that count more or less than others
    answer: int = 0


@dataclass(frozen=True, slots=True)
class Document:
    """Text that is tokenised as it stands; what is learned begins at character `answer`."""

    text: str
    answer: int = 0


@dataclass(frozen=True, slots=True)
class Example:
    """A text, or two, of a class; tokenised as the tokenizer frames them by itself."""

    text: str
    label: str
    second: str | None = None


@dataclass(frozen=True, slots=True)
class RenderedText:
    """One sample before tokenisation. A raw one still needs the tokens that open and close a document."""

    text: str
    spans: tuple[Span, ...]
    raw: bool
    weights: tuple[float, ...] = ()  # of each span; none: each counts 1
    label: str | None = None  # of an example, of which nothing is trained token by token
    second: str | None = None
