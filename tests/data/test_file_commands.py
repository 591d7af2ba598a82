"""Files in a form that no reader takes: the command of each message is run, and its file read."""

import gzip
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from app.data.data_file import DataFile
from app.data.readers import read_file
from app.data.types import Broken
from app.errors import DataError


def rows_of(path: Path) -> list[Any]:
    return [row for _, row in read_file(DataFile(path, path.name))]


def refused(path: Path, content: str | bytes) -> str:
    """Write a file; return why it, or its first bad row, cannot be read."""
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    try:
        return next(row.reason for row in rows_of(path) if isinstance(row, Broken))
    except DataError as error:
        return str(error)


def run_command(folder: Path, message: str) -> Path:
    """Run the command that ends a message in a folder; return the file that it writes."""
    command = message.rpartition("type: ")[2]
    if "jq " in command and not shutil.which("jq"):
        pytest.skip("jq is not installed")
    subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=folder, check=True)
    return folder / shlex.split(command)[-1]


@pytest.mark.parametrize(
    ("name", "first", "row"),
    [
        ("a.tsv", "so funny , and finally moving\t1", {"text": "bad from the start\\n", "label": "0"}),
        ("a b.csv", "1,so funny and finally moving", {"label": "0", "text": "bad from the start\\n"}),
        ("a.tsv.gz", "so funny , and finally moving\t1", {"text": "bad from the start\\n", "label": "0"}),
        (
            "quiz.csv",
            "Which one is the largest?,a planet,a star,B",
            {"text": "bad from the start\\n", "column2": "x", "column3": "y", "label": "0"},
        ),
    ],
)
def test_csv_first_line_is_a_row_command_adds_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, first: str, row: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    delimiter = "\t" if "tsv" in name else ","
    again = {**row, "label": first.split(delimiter)[list(row).index("label")]}
    content = "\n".join([first, delimiter.join(row.values()), delimiter.join(again.values()), ""])
    message = refused(Path(name), content)
    assert message.startswith(f"{name}: the first line must name the columns, and looks like a row: ")
    found = rows_of(run_command(tmp_path, message))
    assert list(found[0].values()) == first.split(delimiter)
    assert found[1:] == [row, again]


def test_csv_names_of_several_words_are_names(tmp_path: Path) -> None:
    path = tmp_path / "survey.csv"
    head = "When,What did you like about it?,,Notes\n"
    path.write_text(f"{head}today,all of it was good,,x\n{head}monday,nothing at all of it,,\n")
    assert len(rows_of(path)) == 3


@pytest.mark.parametrize(("name", "encoding"), [("a.csv", "cp1252"), ("a.tsv", "cp1252"), ("a.csv.gz", "latin-1")])
def test_file_not_utf8_command_converts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, encoding: str
) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused(Path(name), "q\nMünchen\n".encode(encoding))
    assert "not UTF-8 (the byte 0xfc); if the file is Latin-1 or Windows-1252, type: " in message
    assert rows_of(run_command(tmp_path, message)) == [{"q": "München"}]


def test_json_not_utf8_command_converts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in (("a.jsonl", '{"q": "é"}'), ("b.json", '[{"q": "é"}]')):
        assert rows_of(run_command(tmp_path, refused(Path(name), content.encode("latin-1")))) == [{"q": "é"}]
    text = run_command(tmp_path, refused(Path("c.txt"), "é".encode("latin-1")))
    assert rows_of(text) == [{"text": "é"}]


def test_utf16_command_converts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("it's.csv", "b.csv.gz"):
        assert rows_of(run_command(tmp_path, refused(Path(name), "q\né\n".encode("utf-16")))) == [{"q": "é"}]
