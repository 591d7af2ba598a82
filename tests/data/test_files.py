"""Every kind of file gives the same rows, each with the place that a person would look at."""

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.data import json_array
from app.data.files import read_file
from app.data.json_array import read_json
from app.data.shapes import Broken
from app.errors import DataError

ROWS = [{"q": "one\ntwo", "a": "ü"}, {"q": "", "a": "x, y"}]


def read(path: Path) -> list[tuple[str, Any]]:
    return list(read_file(path, path.name))


def saved(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return path


def as_jsonl() -> str:
    return json.dumps(ROWS[0]) + "\n\n  \n" + json.dumps(ROWS[1], ensure_ascii=False)


@pytest.mark.parametrize("name", ["r.jsonl", "r.ndjson", "r.jsonl.gz", "R.JSONL", "r.json"])
def test_jsonl(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, name, as_jsonl())
    assert read(path) == [(f"{name}:1", ROWS[0]), (f"{name}:4", ROWS[1])]


def test_jsonl_with_byte_order_mark(tmp_path: Path) -> None:
    assert read(saved(tmp_path, "r.jsonl", b'\xef\xbb\xbf{"q": 1}\r\n')) == [("r.jsonl:1", {"q": 1})]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"q": 1', "column 8: Expecting ',' delimiter; each line must be one JSON object"),
        ("{'q': 1}", "column 2: Expecting property name"),
        ('["q"]', "each line must be one JSON object, this one is a list"),
        ("null", "this one is null"),
        (b'{"q": "\xff"}', "not UTF-8 at byte 8 of the line"),
    ],
)
def test_a_malformed_line_is_a_row_of_its_own(tmp_path: Path, line: str | bytes, reason: str) -> None:
    raw = line.encode() if isinstance(line, str) else line
    rows = read(saved(tmp_path, "r.jsonl", b'{"q": 1}\n' + raw + b'\n{"q": 3}\n'))
    assert [place for place, _ in rows] == ["r.jsonl:1", "r.jsonl:2", "r.jsonl:3"]
    assert isinstance(rows[1][1], Broken)
    assert reason in rows[1][1].reason


@pytest.mark.parametrize("name", ["r.json", "r.json.gz"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_json_array_keeps_the_lines(tmp_path: Path, name: str, wrapped: bool) -> None:
    content = {"version": 2, "meta": {"list": [1]}, "data": ROWS} if wrapped else ROWS
    path = saved(tmp_path, name, json.dumps(content, indent=1))
    lines = (path.read_text() if name == "r.json" else gzip.decompress(path.read_bytes()).decode()).split(
        "\n"
    )
    found = read(path)
    assert [row for _, row in found] == ROWS
    for place, row in found:  # the line where the row opens; its first key follows
        at = int(place.rpartition(":")[2])
        assert lines[at - 1].strip() == "{"
        assert json.dumps(row["q"]) in lines[at]


@given(
    rows=st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=9) | st.lists(st.integers()))),
    wrapped=st.booleans(),
)
def test_json_array_is_what_json_reads(rows: list[Any], wrapped: bool) -> None:
    text = json.dumps({"other": 1, "rows": rows} if wrapped else rows, indent=1)
    found = read_json(io.BytesIO(text.encode()), "r.json")
    assert found is not None
    assert [row for _, row in found] == rows


def outcome(text: str) -> list[tuple[str, object]] | str | None:
    """The rows with their places, or what is said."""
    try:
        found = read_json(io.BytesIO(text.encode()), "r.json")
        return None if found is None else list(found)
    except DataError as error:
        return str(error)


@given(
    rows=st.lists(
        st.dictionaries(st.text(max_size=4), st.text() | st.lists(st.integers() | st.booleans())), max_size=6
    ),
    wrapped=st.booleans(),
    indent=st.none() | st.integers(0, 2),
    at=st.integers(0, 400),
    typo=st.sampled_from(["", "}", '"', ",", "\\", "\n", "7", "x"]),
)
def test_json_is_the_same_however_little_is_read_at_once(
    rows: list[Any], wrapped: bool, indent: int | None, at: int, typo: str
) -> None:
    """Also what is said of JSON that is none, with its line and column."""
    content = {"other": 1.5, "rows": rows, "end": None} if wrapped else rows
    text = json.dumps(content, indent=indent, ensure_ascii=False)
    text = text[:at] + typo + text[at + 1 :] if typo else text
    whole = outcome(text)
    for block in (1, 3, 50):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_array, "_BLOCK", block)
            assert outcome(text) == whole


def test_json_lines_under_the_wrong_name(tmp_path: Path) -> None:
    rows = read(saved(tmp_path, "r.json.gz", as_jsonl()))
    assert rows == [("r.json.gz:1", ROWS[0]), ("r.json.gz:4", ROWS[1])]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"q": 1},\n {"q": }]', r"r\.json:2: column 8: not valid JSON: Expecting value"),
        ('[{"q": 1}\n{"q": 2}]', r"r\.json:2: column 1: .*expected ',' or '\]' after a row"),
        ('[{"q": 1}', r"r\.json:1: column 10: .*expected ',' or '\]'"),
        ('[{"q": 1}] x', r"r\.json:1: column 12: .*expected nothing after the array"),
        ('"text"', "expected an array of rows, or an object that holds one"),
        ("", "expected an array of rows"),
        ('{"a": [], "b": []}', "an object with exactly one; arrays found: a, b"),
        ('{"a": 1}', "arrays found: none"),
        (b'[{"q": 1},\n"\xff"]', r"r\.json:2: not UTF-8"),
    ],
)
def test_a_json_file_that_is_none(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(saved(tmp_path, "r.json", content))


def test_json_elements_that_are_no_rows(tmp_path: Path) -> None:
    rows = read(saved(tmp_path, "r.json", '[{"q": 1}, 7]'))
    assert rows[0] == ("r.json:1", {"q": 1})
    assert isinstance(rows[1][1], Broken)


@pytest.mark.parametrize(("name", "delimiter"), [("r.csv", ","), ("r.tsv", "\t"), ("r.csv.gz", ",")])
def test_csv(tmp_path: Path, name: str, delimiter: str) -> None:
    plain = tmp_path / "plain"
    with plain.open("w", newline="", encoding="utf-8-sig") as stream:
        writer = csv.DictWriter(stream, ["q", "a"], delimiter=delimiter, lineterminator="\n")
        writer.writeheader()
        writer.writerows(ROWS)
    found = read(saved(tmp_path, name, plain.read_bytes()))
    assert found == [(f"{name}:2", ROWS[0]), (f"{name}:4", ROWS[1])]  # the first row takes two lines


def test_csv_fields_may_be_long(tmp_path: Path) -> None:
    assert read(saved(tmp_path, "r.csv", "q\n" + "x" * 200_000))[0][1] == {"q": "x" * 200_000}


def test_a_csv_row_with_a_field_too_many(tmp_path: Path) -> None:
    rows = read(saved(tmp_path, "r.csv", "q,a\n1,2\n1,2,3\n\n4,5\n"))
    assert [place for place, _ in rows] == ["r.csv:2", "r.csv:3", "r.csv:5"]
    assert rows[1][1] == Broken("has 3 fields where the first line names 2 columns")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('q,a\n1,"2\n', r"r\.csv:2: cannot be read as CSV: a quote .* is never closed"),
        (b"q,a\n1,\xff\n", r"none of its 1 rows can be read; r\.csv:2: not UTF-8"),
        ("q,q\n1,2\n", r"r\.csv:1: the first line must name the columns, each once"),
    ],
)
def test_a_csv_file_that_is_none(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(saved(tmp_path, "r.csv", content))


@pytest.mark.parametrize("name", ["r.parquet", "r.parquet.gz"])
def test_parquet(tmp_path: Path, name: str) -> None:
    plain = tmp_path / "plain"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS * 600), plain, row_group_size=500)
    found = read(saved(tmp_path, name, plain.read_bytes()))
    assert [row for _, row in found] == ROWS * 600
    assert [place for place, _ in found[:2]] == [f"{name} row 0", f"{name} row 1"]
    assert found[-1][0] == f"{name} row 1199"


@pytest.mark.parametrize("name", ["r.txt", "r.md", "r.txt.gz"])
def test_a_text_file_is_one_document(tmp_path: Path, name: str) -> None:
    assert read(saved(tmp_path, name, "one\n\ntwo ü\n")) == [(name, {"text": "one\n\ntwo ü\n"})]


def test_text_that_is_none(tmp_path: Path) -> None:
    [(place, row)] = read(saved(tmp_path, "r.txt", b"ab\xff"))
    assert (place, row) == ("r.txt", Broken("not UTF-8 at byte 3, in line 1; save the file as UTF-8"))


@pytest.mark.parametrize("name", ["r.jsonl.gz", "r.parquet.gz", "r.txt.gz", "r.csv.gz"])
def test_a_torn_or_false_gzip_file(tmp_path: Path, name: str) -> None:
    whole = saved(tmp_path, name, as_jsonl()).read_bytes()
    for content in (whole[:-9], b"no gzip"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}: not a whole gzip file"):
            read(tmp_path / name)


def test_parquet_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"r\.parquet: cannot be read as Parquet"):
        read(saved(tmp_path, "r.parquet", "nothing of the kind"))
