"""Rows of a dataset: their types and data files."""

import gzip
import io
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.data.remote_files import RemoteFile
from app.errors import EnvironmentProblem

if TYPE_CHECKING:
    import numpy as np  # slow to import, and the check of a command line reads no row
    from numpy.typing import NDArray

Row = dict[str, Any]
Message = dict[str, Any]
Span = tuple[int, int]  # start and end character


@dataclass(frozen=True, slots=True)
class Broken:
    """Placeholder for a row that could not be read."""

    reason: str


Located = tuple[str, Row | Broken]  # source location ("train.jsonl:17") and row


def escaped(text: str) -> str:
    """Escape control characters and lone surrogates, because messages and terminals show text of rows."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def kind_of(value: object) -> str:
    """Return the type name of a value, the same for JSON, CSV and Parquet."""
    if value != value:  # noqa: PLR0124  an empty cell of a numeric column
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


class RowProblem(Exception):  # noqa: N818 (caught where the location is known; not shown to the user directly)
    """Row that cannot be trained on; the message has the reason, the caller adds the location."""

    def __init__(self, reason: str) -> None:
        super().__init__(escaped(reason))


@dataclass(frozen=True, slots=True)
class Conversation:
    """Checked messages for the chat template."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None  # as templates expect them
    trained: Mapping[int, bool] = field(default_factory=dict)  # train flags by message
    weights: Mapping[int, float] = field(default_factory=dict)  # loss weights other than 1 by message
    completion_start: int = 0  # first message of the completion, if the row has one
    options: Mapping[str, Any] = field(default_factory=dict)  # chat template options of the row


@dataclass(frozen=True, slots=True)
class Document:
    """Text without a chat template; characters from `completion_start` are trained."""

    text: str
    completion_start: int = 0


@dataclass(frozen=True, slots=True)
class Example:
    """One or two texts with a class label, or a text with word tags; the tokenizer adds its special tokens."""

    text: str
    label: str  # for words: a JSON list of their tags
    second: str | None = None
    words: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """Chosen and rejected answer to the same prompt."""

    chosen: Conversation | Document
    rejected: Conversation | Document


@dataclass(frozen=True, slots=True)
class LabeledAnswer:
    """Answer to a prompt with its label, good or bad."""

    answer: Conversation | Document
    is_good: bool


@dataclass(frozen=True, slots=True, eq=False)
class TokenIds:
    """Token IDs that another program made, and the tokens in the loss. Neither template nor tokenizer changes them."""

    ids: "NDArray[np.integer[Any]]"
    loss_mask: "NDArray[np.bool_]"
    has_labels: bool  # otherwise all tokens are trained


Content = Conversation | Document | Example | AnswerPair | LabeledAnswer | TokenIds


def sides_of(content: Content) -> tuple[Conversation | Document | Example | TokenIds, ...]:
    """Return both answers of a pair, chosen first; otherwise the single content or answer."""
    if isinstance(content, AnswerPair):
        return content.chosen, content.rejected
    return (content.answer if isinstance(content, LabeledAnswer) else content,)


@dataclass(frozen=True, slots=True)
class RenderedText:
    """One sample before tokenization, with its loss mask as character spans."""

    text: str
    spans: tuple[Span, ...]
    raw: bool  # without the start and end tokens of a document
    weights: tuple[float, ...] = ()  # of each span; empty: all 1
    label: str | None = None  # of an example, which has no loss mask, or true/false of an answer
    second: str | None = None
    words: tuple[Span, ...] = ()  # of an example with word tags, at the first token of each word
    ready: TokenIds | None = None  # of a row of token IDs, which has no text

    @property
    def is_example(self) -> bool:
        """Whether the label is trained instead of tokens."""
        return self.label is not None and not self.spans


# ---- data file


_TAGGED_WORDS = (
    r"""awk 'function out() { if (n) print "{\"tokens\": [" t "], \"tags\": [" g "]}"; n = 0; t = g = "" }"""
    r""" function q(s) { gsub(/[\\"]/, "\\\\&", s); return "\"" s "\"" } { sub(/\r$/, "") } !NF { out(); next }"""
    r""" %s { t = t (n ? ", " : "") q(%s); g = g (n++ ? ", " : "") q(%s) } END { out() }'"""
)


def awk_of_tagged_words(condition: str, word: str, tag: str, options: str = "") -> str:
    """Return the awk program that converts lines with a word and its tag to rows for task=tokens.

    It reads the fields `word` and `tag` of lines that match the condition. A blank line ends a sentence.
    """
    return _TAGGED_WORDS.replace("awk", f"awk{options}") % (condition, word, tag)


TAGGED_FILES = {
    ".conll": awk_of_tagged_words('$1 != "-DOCSTART-" && !/^# id /', "$1", "$NF"),
    ".conllu": awk_of_tagged_words("$1 ~ /^[0-9]+$/", "$2", "$4", " -F'\\t'"),  # FORM and UPOS
}
TABLE_FILES = (".parquet", ".arrow", ".feather")  # compressed internally, so .gz is not supported
PACKED_FILES = {".gz": "gzip -dc", ".zst": "zstd -dc"}  # with the decompression command


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of rows."""

    path: Path
    name: str  # in locations
    notes: list[str] = field(default_factory=list, compare=False)  # on how the file was read
    remote: RemoteFile | None = None  # at an address, where `path` is only the name that commands show

    @property
    def packing(self) -> str:
        """Suffix of a compressed file; empty for others."""
        suffix = self.path.suffix.lower()
        return suffix if suffix in PACKED_FILES else ""

    @contextmanager
    def opened(self) -> Iterator[io.BufferedReader]:
        """Open the decompressed bytes for reading."""
        with open_file(self.path) if self.remote is None else self.remote.opened() as packed:
            if self.packing == ".gz":
                yield io.BufferedReader(gzip.GzipFile(fileobj=packed))
            elif self.packing == ".zst":
                import pyarrow  # slow to import

                yield io.BufferedReader(pyarrow.CompressedInputStream(packed, "zstd"))
            else:
                yield packed

    def converted(self, program: str, suffix: str = "") -> str:
        """Return the shell command that converts the file with `program`, a filter such as jq."""
        source = self._unpacked() if self.packing else ""
        command = f"{source} | {program}" if source else f"{program} {shlex.quote(str(self.path))}"
        return escaped(f"{command} > {shlex.quote(self.target(suffix))}")

    def jq(self, selection: str) -> str:
        """Return the shell command that writes the values that jq selects as JSON Lines."""
        return self.converted(f"jq -c {shlex.quote(selection)}", ".jsonl")

    def jq_of_rows(self, program: str, *, of_all: bool = False) -> str:
        """Return the shell command that converts rows with a jq program for one row or for the array of all rows."""
        is_array = extension(self.path) == ".json"
        if of_all and not is_array:
            return self.converted(f"jq -cs {shlex.quote(program)}", ".jsonl")
        return self.jq(program if of_all or not is_array else f".[] | {program}")

    def with_first_line(self, line: str) -> str:
        """Return the shell command that writes the file with a first line, in which tabs are written as \\t."""
        return escaped(f"(printf '{line}\\n'; {self._unpacked()}) > {shlex.quote(self.target(''))}")

    def as_utf8(self) -> str:
        """Return advice for files that are not UTF-8."""
        command = self.converted("iconv -f WINDOWS-1252 -t UTF-8")
        return f"if the file is Latin-1 or Windows-1252, type: {command}"

    def _unpacked(self) -> str:
        return f"{PACKED_FILES.get(self.packing, 'cat')} {shlex.quote(str(self.path))}"

    def target(self, suffix: str = ".jsonl") -> str:
        """Return the output file name of a command; an empty `suffix` keeps the suffix of the file."""
        plain = self.path.with_suffix("") if self.packing else self.path
        return f"{plain.stem}-fixed{suffix or plain.suffix}"


def extension(path: Path) -> str:
    """Return the lower-case suffix that selects the reader; of a compressed text file, without `.gz` or `.zst`."""
    suffix = path.suffix.lower()
    inner = path.with_suffix("").suffix.lower()
    return inner if suffix in PACKED_FILES and inner not in TABLE_FILES else suffix


def open_file(path: Path) -> io.BufferedReader:
    """Open the file in binary mode; missing permissions are an EnvironmentProblem."""
    try:
        return path.open("rb")
    except PermissionError as error:
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror}; make it readable") from error
