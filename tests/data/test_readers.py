"""Every kind of file gives the same rows, each with the place that a person would look at."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from app.data import readers
from app.data.readers import read_file
from app.data.rows import Broken, DataFile
from app.errors import DataError

ROWS = [{"q": "one\ntwo", "a": "ü"}, {"q": "", "a": "x, y"}]


def read(path: Path) -> list[tuple[str, Any]]:
    return list(read_file(DataFile(path, path.name)))


def saved(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    raw = content.encode() if isinstance(content, str) else content
    if path.suffix == ".zst":
        raw = pyarrow.compress(raw, codec="zstd", asbytes=True)
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def as_jsonl() -> str:
    return json.dumps(ROWS[0]) + "\n\n  \n" + json.dumps(ROWS[1], ensure_ascii=False)


@pytest.mark.parametrize("name", ["r.jsonl", "r.ndjson", "r.jsonl.gz", "r.jsonl.zst", "R.JSONL", "r.json", "r.json.gz"])
def test_read_jsonl(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, name, as_jsonl())
    assert read(path) == [(f"{name}:1", ROWS[0]), (f"{name}:4", ROWS[1])]


@pytest.mark.parametrize("name", ["r.json", "r.json.gz"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_read_json_rows_numbered(tmp_path: Path, name: str, wrapped: bool) -> None:
    content = {"version": 2, "meta": {"list": [1]}, "data": ROWS} if wrapped else ROWS
    found = read(saved(tmp_path, name, "\ufeff" + json.dumps(content, indent=1)))
    assert found == [(f"{name}[0]", ROWS[0]), (f"{name}[1]", ROWS[1])]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "a"}], "tools": [], "id": 1},
        {"conversations": [{"from": "human", "value": "a"}]},
        {"instruction": "a", "output": "b"},
    ],
)
def test_read_json_one_row(tmp_path: Path, row: dict[str, Any]) -> None:
    assert read(saved(tmp_path, "r.json", json.dumps(row, indent=1))) == [("r.json[0]", row)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"q": 1},\n {"q": }]', r"r\.json:2: column 8: not valid JSON: Expecting value"),
        ('[{"q": 1}\n{"q": 2}]', r"r\.json:2: column 1: not valid JSON: Expecting ',' delimiter"),
        ('"text"', "expected an array of rows, or an object with one"),
        ("<html>", r"r\.json:1: column 1: not valid JSON: expected an array of rows"),
        ('{"a": [1], "b": []}', "expected one list of rows, found 2: a, b"),
    ],
)
def test_read_json_invalid_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(saved(tmp_path, "r.json", content))


@pytest.mark.parametrize(
    ("name", "content", "limit", "message"),
    [
        (
            "r.json",
            json.dumps(ROWS),
            "_MAX_JSON_BYTES",
            r"^r\.json: .* at most .* MB; to convert an array to JSON Lines",
        ),
        (
            "r.json.gz",
            json.dumps(ROWS),
            "_MAX_JSON_BYTES",
            r"^r\.json\.gz: .* to convert an array to JSON Lines, type: gzip -dc ",
        ),
        ("r.txt", "word " * 5, "_MAX_TEXT_BYTES", r"^r\.txt: a text file is one document of at most 1 GB"),
        ("r.jsonl", '{"q": 1234}', "_MAX_ROW_BYTES", r"^r\.jsonl: a line is longer than 0 MB; each line must be"),
        ("r.csv", "q\n12345678", "MAX_FIELD_BYTES", r"^r\.csv:2: cannot be read as CSV: field larger than"),
    ],
)
def test_read_file_too_large_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, limit: str, message: str
) -> None:
    path = saved(tmp_path, name, content)
    monkeypatch.setattr(readers, limit, len(content.encode()))
    assert read(path)
    monkeypatch.setattr(readers, limit, 7 if limit in ("_MAX_ROW_BYTES", "MAX_FIELD_BYTES") else len(content) - 1)
    with pytest.raises(DataError, match=message):
        read(path)


def test_read_file_of_too_many_parts_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_MAX_JSON_PARTS", 3)
    assert read(saved(tmp_path, "r.json", '[{"q": []}]'))
    with pytest.raises(DataError, match=r"^r\.json: has more than 3 lists and objects"):
        read(saved(tmp_path, "r.json", '[{"q": [[]]}]'))
    with pytest.raises(DataError, match=r"^r\.csv\.gz: a line is longer than 1 MB"):
        read(saved(tmp_path, "r.csv.gz", "a," * 600_000))


@pytest.mark.parametrize(("name", "delimiter"), [("r.csv", ","), ("r.csv", ";"), ("r.tsv", "\t"), ("r.csv.gz", ",")])
def test_read_csv(tmp_path: Path, name: str, delimiter: str) -> None:
    plain = tmp_path / "plain"
    with plain.open("w", newline="", encoding="utf-8-sig") as stream:
        writer = csv.DictWriter(stream, ["q", "a"], delimiter=delimiter, lineterminator="\n")
        writer.writeheader()
        writer.writerows(ROWS)
    found = read(saved(tmp_path, name, plain.read_bytes()))
    second = {**ROWS[1], "q": None}  # an empty cell
    assert found == [(f"{name}:2", ROWS[0]), (f"{name}:4", second)]  # the first row takes two lines


def noted(path: Path) -> tuple[list[Any], list[str]]:
    file = DataFile(path, path.name)
    return [row for _, row in read_file(file)], file.notes


def test_read_tsv_with_bare_quotes_reads_them_as_text(tmp_path: Path) -> None:
    lines = ["quality\ttext", '1\t" Hello , he said', '0\the said " no "', '1\t"', '0\tlate" it ends', '1\t"all of it"']
    for last in ([], ['0\t"a" b']):  # with and without a record that strict quoting cannot read
        found, notes = noted(saved(tmp_path, "r.tsv", "\n".join([*lines, *last])))
        assert found == [dict(zip(("quality", "text"), line.split("\t"), strict=True)) for line in [*lines[1:], *last]]
        assert len(notes) == 1
        assert "quotes are read as ordinary characters" in notes[0]


def test_read_tsv_quoted_fields_stay_quoted(tmp_path: Path) -> None:
    found, notes = noted(saved(tmp_path, "r.tsv", 'q\ta\n"one\ntwo"\t"a ""b"""\n'))
    assert (found, notes) == ([{"q": "one\ntwo", "a": 'a "b"'}], [])
    found, notes = noted(saved(tmp_path, "one.tsv", 'q\n"one\ntwo"\n'))
    assert (found, notes) == ([{"q": "one\ntwo"}], [])


def test_read_csv_with_bare_quotes_inside_quoted_fields_noted(tmp_path: Path) -> None:
    path = saved(tmp_path, "r.csv", 'q,a\none,"x, ""y"""\n"two","a "b" c"\n"th,ree","d"\n')
    found, notes = noted(path)
    assert found == [{"q": "one", "a": 'x, "y"'}, {"q": "two", "a": 'a b" c"'}, {"q": "th,ree", "a": "d"}]
    assert notes == [
        'r.csv:3: a quote inside a quoted field is not written as ""; check that its rows are read correctly'
    ]


@pytest.mark.parametrize(("name", "delimiter"), [("r.csv", "\t"), ("r.csv", "|"), ("r.tsv", ","), ("r.csv", ";")])
def test_read_csv_delimiter_of_the_first_line(tmp_path: Path, name: str, delimiter: str) -> None:
    content = f"question{delimiter}answer\nWhat: a?{delimiter}b\n"
    assert read(saved(tmp_path, name, content)) == [(f"{name}:2", {"question": "What: a?", "answer": "b"})]


def test_read_csv_too_many_fields_broken(tmp_path: Path) -> None:
    [(_, row)] = read(saved(tmp_path, "r.csv", "q\none, two\n"))
    reason = "found 2 fields, but the first line names 1 column; put a field that contains ',' in double quotes"
    assert row == Broken(reason)


def write_table(path: Path, kind: str) -> bytes:
    table = pyarrow.Table.from_pylist(ROWS * 600)
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=500)
        return path.read_bytes()
    new = pyarrow.ipc.new_stream if kind == "arrow" else pyarrow.ipc.new_file  # as `datasets`, and as Feather
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=500)
    return path.read_bytes()


@pytest.mark.parametrize("name", ["r.parquet", "r.arrow", "r.feather"])
def test_read_table(tmp_path: Path, name: str) -> None:
    raw = write_table(tmp_path / "plain", name.split(".")[1])
    found = read(saved(tmp_path, name, raw))
    assert [row for _, row in found] == ROWS * 600
    assert [place for place, _ in found[:2]] == [f"{name} row 0", f"{name} row 1"]
    assert found[-1][0] == f"{name} row 1199"


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_read_table_names_of_tags_in_its_metadata(tmp_path: Path, kind: str) -> None:
    names = {"names": ["O", "B-PER"], "_type": "ClassLabel"}
    listed: dict[str, Any] = {"ner_tags": {"feature": names, "_type": "List"}, "label": names}
    rows = [{"ner_tags": [0, 1, -1], "label": 1}, {"ner_tags": None, "label": 0}]
    path = tmp_path / f"r.{kind}"
    for features, tags in ((listed, ["O", "B-PER", -1]), ({**listed, "label": {"_type": "Unknown"}}, [0, 1, -1])):
        schema = pyarrow.schema(
            {"ner_tags": pyarrow.list_(pyarrow.int64()), "label": pyarrow.int64()},
            {"huggingface": json.dumps({"info": {"features": features}})},
        )
        table = pyarrow.Table.from_pylist(rows, schema)
        if kind == "parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_stream(str(path), schema) as writer:
                writer.write_table(table)
        assert [row for _, row in read(path)] == [{"ner_tags": tags, "label": 1}, rows[1]]


@pytest.mark.parametrize("name", ["r.arrow", "r.feather"])
def test_read_arrow_torn_refused(tmp_path: Path, name: str) -> None:
    raw = write_table(tmp_path / "plain", name.split(".")[1])
    for content in (raw[: len(raw) // 2], b"no table", b""):
        with pytest.raises(DataError, match=f"{name}: cannot be read as a table, from row "):
            read(saved(tmp_path, name, content))


@pytest.mark.parametrize("name", ["r.txt", "r.md", "r.txt.gz"])
def test_read_text_is_one_document(tmp_path: Path, name: str) -> None:
    assert read(saved(tmp_path, name, "one\n\ntwo ü\n")) == [(name, {"text": "one\n\ntwo ü\n"})]


@pytest.mark.parametrize("name", ["r.jsonl.gz", "r.txt.gz", "r.csv.gz", "r.jsonl.zst"])
def test_read_packed_torn_refused(tmp_path: Path, name: str) -> None:
    whole = saved(tmp_path, name, as_jsonl()).read_bytes()
    for content in (whole[:-9], b"neither of them"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}: not a complete {Path(name).suffix} file"):
            read(tmp_path / name)
