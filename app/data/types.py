"""The forms of a row before it is tokenised: as a file holds it, by its meaning, and rendered as text."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
Message = dict[str, Any]
Span = tuple[int, int]  # first character, and the one after the last


@dataclass(frozen=True, slots=True)
class Broken:
    """Stands where a row should be: this place of the file could not be read as one."""

    reason: str


Located = tuple[str, Row | Broken]  # the source location ("train.jsonl:17") and what is there


def escaped(text: str) -> str:
    """Escape control characters and lone surrogates: text of a row goes into messages and onto terminals."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def kind_of(value: object) -> str:
    """Name a value's type in words that hold for JSON, CSV and Parquet alike."""
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


class RowProblem(Exception):  # noqa: N818 (caught where the location is known; never reaches the user as it is)
    """One row that cannot be trained on; the message says why, the catcher says where."""

    def __init__(self, reason: str) -> None:
        super().__init__(escaped(reason))


@dataclass(frozen=True, slots=True)
class Conversation:
    """Checked messages for the chat template."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None  # in the form that templates expect
    trained: Mapping[int, bool] = field(default_factory=dict)  # messages that say whether they are trained
    weights: Mapping[int, float] = field(default_factory=dict)  # messages whose loss weight is not 1
    completion_start: int = 0  # the first message of the completion, where the row has one
    options: Mapping[str, Any] = field(default_factory=dict)  # what the row wants of the chat template


@dataclass(frozen=True, slots=True)
class Document:
    """Text that is tokenised without a template; characters from `completion_start` on are trained."""

    text: str
    completion_start: int = 0


@dataclass(frozen=True, slots=True)
class Example:
    """One or two texts with a class label, or a text with a tag for each of its words; the tokenizer adds its own
    special tokens.
    """

    text: str
    label: str  # of words: a list of their tags, as JSON
    second: str | None = None
    words: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """A wanted and an unwanted answer to the same prompt."""

    chosen: Conversation | Document
    rejected: Conversation | Document


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer to a prompt, and whether it is wanted."""

    answer: Conversation | Document
    wanted: bool


Content = Conversation | Document | Example | AnswerPair | Judged


def sides_of(content: Content) -> tuple[Conversation | Document | Example, ...]:
    """Both answers of a comparison, the wanted one first; else the content, or the answer, alone."""
    if isinstance(content, AnswerPair):
        return content.chosen, content.rejected
    return (content.answer if isinstance(content, Judged) else content,)


@dataclass(frozen=True, slots=True)
class RenderedText:
    """One sample before tokenisation, with its loss mask as character spans."""

    text: str
    spans: tuple[Span, ...]
    raw: bool  # still needs the tokens that open and close a document
    weights: tuple[float, ...] = ()  # of each span; empty: each counts 1
    label: str | None = None  # of an example, which has no loss mask, or of an answer, true or false
    second: str | None = None
    words: tuple[Span, ...] = ()  # of an example with a tag for each of them, at its first token

    @property
    def is_example(self) -> bool:
        """Whether its label is learnt, in place of tokens."""
        return self.label is not None and not self.spans
