"""Rows of a dataset: their types, and the data files that they come from."""

import gzip
import io
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.errors import EnvironmentProblem

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
    """Text that is tokenized without a template; characters from `completion_start` on are trained."""

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
    """One sample before tokenization, with its loss mask as character spans."""

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


# ---- data file


_TAGGED_WORDS = (
    r"""awk 'function out() { if (n) print "{\"tokens\": [" t "], \"tags\": [" g "]}"; n = 0; t = g = "" }"""
    r""" function q(s) { gsub(/[\\"]/, "\\\\&", s); return "\"" s "\"" } { sub(/\r$/, "") } !NF { out(); next }"""
    r""" %s { t = t (n ? ", " : "") q(%s); g = g (n++ ? ", " : "") q(%s) } END { out() }'"""
)


def awk_of_tagged_words(condition: str, word: str, tag: str, options: str = "") -> str:
    """Return the awk program that makes rows for task=tokens of lines with a word and its tag.

    The fields `word` and `tag` are read of lines that meet the condition. A blank line ends a sentence.
    """
    return _TAGGED_WORDS.replace("awk", f"awk{options}") % (condition, word, tag)


TAGGED_FILES = {
    ".conll": awk_of_tagged_words('$1 != "-DOCSTART-" && !/^# id /', "$1", "$NF"),
    ".conllu": awk_of_tagged_words("$1 ~ /^[0-9]+$/", "$2", "$4", " -F'\\t'"),  # FORM and UPOS
}
TABLE_FILES = (".parquet", ".arrow", ".feather")  # compressed inside, so that no .gz of them is read
PACKED_FILES = {".gz": "gzip -dc", ".zst": "zstd -dc"}  # with the command that unpacks them


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of rows."""

    path: Path
    name: str  # in locations
    notes: list[str] = field(default_factory=list, compare=False)  # on how it was read

    @property
    def packing(self) -> str:
        """The suffix of a packed file; empty for others."""
        suffix = self.path.suffix.lower()
        return suffix if suffix in PACKED_FILES else ""

    @contextmanager
    def opened(self) -> Iterator[io.BufferedReader]:
        """Open for reading bytes, unpacked."""
        with open_file(self.path) as packed:
            if self.packing == ".gz":
                yield io.BufferedReader(gzip.GzipFile(fileobj=packed))
            elif self.packing == ".zst":
                import pyarrow  # slow to import

                yield io.BufferedReader(pyarrow.CompressedInputStream(packed, "zstd"))
            else:
                yield packed

    def converted(self, program: str, suffix: str = "") -> str:
        """Return the shell command that writes what `program`, a filter such as jq, makes of the file."""
        source = self._unpacked() if self.packing else ""
        words = f"{source} | {program}" if source else f"{program} {shlex.quote(str(self.path))}"
        return escaped(f"{words} > {shlex.quote(self.target(suffix))}")

    def jq(self, selection: str) -> str:
        """Return the shell command that writes the values that jq selects as JSON Lines."""
        return self.converted(f"jq -c {shlex.quote(selection)}", ".jsonl")

    def jq_of_rows(self, program: str, *, of_all: bool = False) -> str:
        """Return the shell command that makes other rows, by a jq program for one row or for the array of all."""
        is_array = extension(self.path) == ".json"
        if of_all and not is_array:
            return self.converted(f"jq -cs {shlex.quote(program)}", ".jsonl")
        return self.jq(program if of_all or not is_array else f".[] | {program}")

    def with_first_line(self, line: str) -> str:
        """Return the shell command that writes the file with a line in front, in which tabs are written as \\t."""
        return escaped(f"(printf '{line}\\n'; {self._unpacked()}) > {shlex.quote(self.target(''))}")

    def as_utf8(self) -> str:
        """Advice for bytes that are not UTF-8."""
        command = self.converted("iconv -f WINDOWS-1252 -t UTF-8")
        return f"if the file is Latin-1 or Windows-1252, type: {command}"

    def _unpacked(self) -> str:
        return f"{PACKED_FILES.get(self.packing, 'cat')} {shlex.quote(str(self.path))}"

    def target(self, suffix: str = ".jsonl") -> str:
        """Return the name of the file that a command writes; with the suffix of this one where `suffix` is empty."""
        plain = self.path.with_suffix("") if self.packing else self.path
        return f"{plain.stem}-fixed{suffix or plain.suffix}"


def extension(path: Path) -> str:
    """The suffix that decides the reader, in lower case; for a packed file of text, the one before `.gz` or `.zst`."""
    suffix = path.suffix.lower()
    inner = path.with_suffix("").suffix.lower()
    return inner if suffix in PACKED_FILES and inner not in TABLE_FILES else suffix


def open_file(path: Path) -> io.BufferedReader:
    """Open for reading bytes; a file that may not be read is the user's error."""
    try:
        return path.open("rb")
    except PermissionError as error:
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror}; make it readable") from error
