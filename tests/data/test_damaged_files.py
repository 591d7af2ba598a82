"""Damaged and unusual files: the rows that are read of each, or the one message that refuses it."""

import gzip
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from app.data.detect_format import detect_formats
from app.data.prepare import Data, prepare
from app.errors import DataError
from tests.data.small import chat, config, tokenizer

Row = dict[str, Any]
ASKED, ANSWER, OTHER = chat("q"), chat("q", "a")[1:], chat("q", "b")[1:]
TURNS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
TALK: Row = {"messages": chat("q", "a")}
GOOD = json.dumps(TALK).encode() + b"\n"
PAIR = b"prompt,completion\n"
CALL = {"function": {"name": "f", "arguments": "{}"}}
TOOL_CALL = "the chat template does not render the tool call in message 1; set one with tool support"
QA, QA_COLUMNS = "question_answer", "question_answer dataset.columns."
EXCHANGE = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na"


@dataclass(frozen=True)
class Case:
    """What a file holds, and what becomes of it."""

    name: str
    content: bytes
    expected: int | str  # rows kept, or words of the message
    skip: tuple[int, int] | None = None  # rows kept and bad under dataset.on_bad_row=skip; None: as under `error`
    fmt: str = "auto"  # if typed, `auto` gives the same
    kind: str = "chatml"


def answered(answer: bytes) -> bytes:
    return GOOD + GOOD.replace(b'"a"', b'"%s"' % answer)


def followed_by(row: bytes) -> bytes:
    return GOOD + row + b"\n"


def with_column(column: bytes) -> bytes:
    return GOOD[:-2] + b", " + column + b"}\n"


def said(*messages: Any) -> bytes:
    return GOOD + json.dumps({"messages": messages}).encode() + b"\n"


def table(**columns: Any) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return bytes(sink.getvalue().to_pybytes())


def arrow(rows: list[Row]) -> bytes:
    sink, made = pyarrow.BufferOutputStream(), pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_file(sink, made.schema) as writer:
        writer.write_table(made)
    return bytes(sink.getvalue().to_pybytes())


UTF16, HALF = "is UTF-16, expected UTF-8; type: ", "contains a lone surrogate (half a character): '\\ud800'"
NUL_BYTES, NUL, DEEP = ":2: contains NUL bytes (damaged", "contains a NUL character", "nested too deeply"
TWICE = "in one object"
CHARACTERS = [
    Case("latin-1.jsonl", answered(b"caf\xe9"), ":2: not UTF-8 at byte 86 of the line (0xe9)", (1, 1)),
    Case("latin-1.csv", PAIR + b"a,b\n" * 2500 + b"\xe9,c\nd,e\n", ":2502: not UTF-8 (byte 0xe9)", (2501, 1)),
    Case("latin-1-head.csv", b"prompt,\xe9\na,b\n", ":1: the first line must name the columns, each once; not"),
    Case("latin-1.json", b"[\n" + answered(b"\xe9") + b"]", ":3: not UTF-8; if the file is Latin-1 or"),
    Case("latin-1.txt", b"Rain\ncaf\xe9", ": not UTF-8 at byte 9, in line 2"),
    Case("latin-1.parquet", table(text=pyarrow.array([b"\xe9"]).view(pyarrow.string())), "cannot be read as a table"),
    *(Case(f"utf-16.{kind}", GOOD.decode().encode("utf-16"), UTF16) for kind in ("jsonl", "json", "csv", "txt")),
    Case("utf-16.csv.gz", gzip.compress((PAIR.decode() + "a,b\n").encode("utf-16")), UTF16),
    Case("utf-16-unmarked.jsonl", GOOD.decode().encode("utf-16-le"), "contains NUL bytes"),
    *(
        Case(f"mark.{kind}", b"\xef\xbb\xbf" + content, 1)
        for kind, content in (("jsonl", GOOD), ("csv", PAIR + b"a,b\n"), ("json", b"[" + GOOD + b"]"), ("txt", b"Rain"))
    ),
    Case("mark-and-blank-lines.jsonl", b"\xef\xbb\xbf\n  \r  \r" + GOOD, 1),
    Case("two-marks.jsonl", (b"\xef\xbb\xbf" + GOOD) * 2, ":2: column 1: Unexpected UTF-8 BOM", (1, 1)),
    Case("crlf.jsonl", GOOD.replace(b"\n", b"\r\n") * 2, 2),
    Case("cr.jsonl", GOOD.replace(b"\n", b"\r") * 2 + b"{", ":3: column 2", (2, 1)),
    Case("cr.csv", PAIR.replace(b"\n", b"\r") + b"a,b\rc,d\r", 2),
    Case("lines.jsonl", answered("\u2028\u0085".encode()), 2),
    Case("nul.jsonl", answered(b"a\0b"), NUL_BYTES, (1, 1)),
    Case("nul-lines.jsonl", GOOD + b"\0" * 40 + b"\n" + GOOD, NUL_BYTES, (2, 1)),
    Case("nul-escape.jsonl", answered(rb"a\u0000b"), f":2: {NUL}", (1, 1)),
    Case("nul.csv", PAIR + b"a,b\na\0,b\n", f":3: {NUL}", (1, 1)),
    Case("nul.txt", b"Rain\0falls", NUL),
    Case("nul.parquet", table(text=["a", "b\0"]), f" row 1: {NUL}", (1, 1)),
    Case("half.jsonl", answered(rb"\ud800"), f":2: {HALF}", (1, 1)),
    Case("whole.jsonl", answered(rb"\ud83d\ude00"), 2),
    Case("half-raw.csv", PAIR + b"a,b\n\xed\xa0\x80,b\n", ":3: not UTF-8 (byte 0xed)", (1, 1)),
    Case("half.json", b"[" + GOOD + b"," + answered(rb"\ud800")[len(GOOD) :] + b"]", f"[1]: {HALF}", (1, 1)),
    Case("half-key.jsonl", rb'{"\ud800": 1}' + b"\n", r"columns found: \ud800; set", fmt="messages"),
    Case("half-role.jsonl", said({"role": "\ud800", "content": ""}), r"message 0: unknown role '\ud800'", (1, 1)),
    Case("escape-key.jsonl", rb'{"\u001b[31m": 1}' + b"\n", r"columns found: \x1b[31m; set", fmt="messages"),
]
NUMBERS = [
    Case("long.csv", PAIR + b"a," + b"x y " * 33_000 + b"\n", 1),
    Case("digits.jsonl", followed_by(b'{"n": %s}' % (b"9" * 5000)), ":2: a number has more than 4,300", (1, 1)),
    Case("digits.json", b'[{"n": %s}]' % (b"9" * 5000), ": not valid JSON: a number has more"),
    Case("deep.jsonl", followed_by(b"[" * 200_000), f":2: lists or objects are {DEEP}", (1, 1)),
    Case("deep.json", b"[" * 200_000, f": not valid JSON: lists or objects are {DEEP}"),
    *(
        Case(
            f"deep-{depth}.jsonl",
            with_column(b'"tools": [{"name": "f", "x": %s}]' % (b"[" * depth + b"]" * depth)),
            kept,
        )
        # Python 3.12 counts calls of json apart, so that no limit is reached at 700
        for depth, kept in ((90, 1), (700, DEEP if sys.version_info < (3, 12) else 1), (3000, DEEP))
    ),
    Case("same-key.jsonl", GOOD + with_column(GOOD[1:-2]), f":2: duplicate key 'messages' {TWICE}", (1, 1)),
    Case("same-key.json", b'[{"text": "a", "text": "b"}]', f"not valid JSON: duplicate key 'text' {TWICE}"),
    Case("nan.jsonl", GOOD + with_column(b'"score": NaN'), 2),
    Case("nan-answer.jsonl", b'{"prompt": "a", "completion": NaN}\n', "NaN", fmt="prompt_completion"),
    Case("nan-weight.jsonl", said(*ASKED, {**ANSWER[0], "weight": float("nan")}), "found nan", (1, 1)),
    Case("huge-weight.jsonl", said(*ASKED, {**ANSWER[0], "weight": 10**400}), "found 10000000000000000000", (1, 1)),
    Case("nan-cells.csv", PAIR + b"a,nan\n", 1),  # a table of text has no NaN
    Case("empty-cells.csv", PAIR + b"a,b\n" * 28 + b"b,\n,c\n", ":30: column 'completion' must be text", (28, 2)),
    Case("null.parquet", table(prompt=["a"] * 9 + [None], completion=["b"] * 10), " row 9: column 'prompt'", (9, 1)),
    Case("bytes.parquet", table(text=[b"a"]), "bytes"),
    Case("number.jsonl", said({"role": "user", "content": 5}, *ANSWER), "found a number", (1, 1)),
]
FILES = [
    *(Case(f"empty.{kind}", b"", "has no rows") for kind in ("jsonl", "csv", "tsv", "ndjson", "jsonl.gz")),
    Case("blank.jsonl", b"\n \n\n", "has no rows"),
    Case("empty.json", b"", ":1: column 1: not valid JSON: expected an array of rows"),
    Case("empty-array.json", b"[]", "has no rows"),
    Case("empty.txt", b"", "column 'text' is empty"),
    Case("empty.parquet", b"", "cannot be read as a table, from row 0 on"),
    Case("head-only.csv", PAIR, "has no rows"),
    Case("no-rows.parquet", table(prompt=pyarrow.array([], pyarrow.string())), "has no rows"),
    Case("blank-lines-first.csv", b"\n\n" + PAIR + b"a,b\n", 1),
    Case("semicolon.csv", b"instruction;output\na,a;b\n", 1),
    Case("formula.csv", PAIR + b"=cmd|x,b\n", 1),
    Case("one-row.json", json.dumps(TALK, indent=1).encode(), 1),
    Case("lines-in.json", GOOD * 2, 2),
    Case("table.arrow", arrow([TALK] * 3), 3),
    Case("table.feather", arrow([TALK] * 3), 3),
    Case("packed.jsonl.zst", pyarrow.compress(GOOD, "zstd", asbytes=True), 1),
    Case("array-in.jsonl", b"[" + GOOD[:-1] + b"]", "found a list; type: jq -c '.[]' "),
    Case("after.jsonl", GOOD + GOOD[:-1] + b" xx\n", ":2: column 89: Extra data", (1, 1)),
    Case("after.json", b"[" + GOOD + b"] xx", ":2: column 3: not valid JSON: Extra data"),
    Case("cut.jsonl", GOOD + GOOD[:40], ":2: column ", (1, 1)),
    Case("cut.json", b"[" + GOOD + b"," + GOOD[:40], ":2: column "),
    Case("cut.jsonl.gz", gzip.compress(GOOD * 1000)[:-20], ": not a complete .gz file"),
    Case("not.jsonl.gz", GOOD, ": not a complete .gz file: Not a gzipped file"),
    Case("cut.parquet", table(prompt=["a"], completion=["b"])[:-9], ": cannot be read as a table"),
    *(
        Case(f"pointer.{kind}", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n", "git lfs pull")
        for kind in ("jsonl", "json", "parquet", "csv")
    ),
    Case("objects.json", b'{"a": {"prompt": "q"}, "b": {"prompt": "q"}}', "found an object of 2 objects; type: jq"),
    Case("fake.parquet", b"PAR1" + b"\0" * 100 + b"PAR1", ": cannot be read as a table"),
    Case("ragged.csv", PAIR + b"a,b\na\na,b,c\nd,e\n", ":3: found 1 field, but the first line names 2 columns", (2, 2)),
    Case(
        "open-quote.csv", PAIR + b'a,b\nc,"d\ne,f\n', ":3: cannot be read as CSV: unexpected end of data; quote a field"
    ),
    Case("inner-quote.csv", PAIR + b'a,"b"c\n', 1),
    Case("inner-and-open-quote.csv", PAIR + b'a,"b"c\nd,"e\n', ":2: cannot be read as CSV: ',' expected after"),
    Case("same-names.csv", b"prompt,prompt\na,b\n", ":1: the first line must name the columns, each once; found"),
    Case("no-json.jsonl", b"hello\n" * 5, "none of the first rows can be read; no-json.jsonl:1: column 1"),
    Case("element.json", b"[" + GOOD + b", 7]", "[1]: each row must be a JSON object, found a number", (1, 1)),
]
REFUSES = ":2: the chat template rejects the conversation"
TEMPLATES = [
    Case("two-users.jsonl", said(*ASKED, *ASKED, *ANSWER), 2),
    Case("two-users.jsonl", said(*ASKED, *ASKED, *ANSWER), f"{REFUSES}: roles must alternate", (1, 1), kind="gemma"),
    Case("answer-first.jsonl", said(*ANSWER, *ASKED, *ANSWER), 2),
    Case(
        "no-answer.jsonl",
        said(*ASKED),
        ":2: no assistant message, so there is nothing to train on (dataset.train_on=auto)",
        (1, 1),
    ),
    Case("no-messages.jsonl", said() + GOOD * 9, ":2: column 'messages' must be a list of messages, found an", (10, 1)),
]
CASES = [*CHARACTERS, *NUMBERS, *FILES, *TEMPLATES]


def read(path: Path, fmt: str = "auto", kind: str = "chatml", **changes: Any) -> Data:
    found, notes = detect_formats(config(path, fmt, **{"max_length": 1 << 21, **changes}))
    return prepare(found, tokenizer(kind), str(path.parent / "cache"), notes)


def refusal(path: Path, fmt: str = "auto", kind: str = "chatml", **changes: Any) -> str:
    with pytest.raises(DataError) as error:
        read(path, fmt, kind, **changes)
    message = error.value.report()
    assert path.name in message
    assert "dataset." in message, "the key to type"
    assert all(line.isprintable() for line in message.splitlines())
    return message


@pytest.mark.parametrize("case", CASES, ids=[f"{case.name}-{case.kind}" for case in CASES])
def test_file_read_skipped_or_refused(tmp_path: Path, case: Case) -> None:
    path = tmp_path / case.name
    path.write_bytes(case.content)
    for fmt in dict.fromkeys([case.fmt, "auto" if case.name.find("key") < 0 else case.fmt]):
        if isinstance(case.expected, int):
            assert len(read(path, fmt, case.kind).train) == case.expected
        else:
            assert case.expected in refusal(path, fmt, case.kind)
            check_skip(path, fmt, case)


def check_skip(path: Path, fmt: str, case: Case) -> None:
    if case.skip is None:
        refusal(path, fmt, case.kind, on_bad_row="skip")
        return
    report = read(path, fmt, case.kind, on_bad_row="skip").report
    kept, bad = case.skip
    assert (report.train.rows_kept, report.train.bad_rows, len(report.train.bad_places)) == (kept, bad, bad)
    [line] = [line for line in report.lines() if "skipped" in line]
    assert line.startswith(f"train: {bad} bad row")
    assert str(case.expected).removeprefix(":") in line
