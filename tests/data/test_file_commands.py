"""Files in a form that no reader takes: the command of each message is run, and its file read."""

import gzip
import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from app.config.dataset import formats_for
from app.data.detect_format import detect_formats
from app.data.readers import read_file, require_prose
from app.data.rows import Broken, DataFile
from app.data.sources import check
from app.errors import DataError
from tests.data.small import config


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
    assert message.startswith(f"{name}: the first line must name the columns, but looks like a row: ")
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
    assert "not UTF-8 (byte 0xfc); if the file is Latin-1 or Windows-1252, type: " in message
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


TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
TURNS = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
ROW = {"q": "one", "a": ["x", 1]}


def as_lines(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


@pytest.mark.parametrize(
    ("name", "content", "said", "rows"),
    [
        ("a.jsonl", as_lines(TALK, TALK), "found a list", [{"messages": TALK}] * 2),
        ("a.jsonl.gz", as_lines(TURNS), "found a list", [{"conversations": TURNS}]),
        ("a.jsonl", as_lines([ROW, ROW], [ROW]), "found a list", [ROW] * 3),
        ("a b.jsonl", as_lines("hello", "you"), "found text", [{"text": "hello"}, {"text": "you"}]),
        ("a.jsonl", "\n" + json.dumps(ROW, indent=1) * 2, "but the JSON spans several lines", [ROW] * 2),
        ("a.jsonl", json.dumps([ROW, ROW], indent=1), "but the JSON spans several lines", [ROW] * 2),
        ("a.json", json.dumps(ROW, indent=1) + "\n" + json.dumps(ROW, indent=1), "spans several lines", [ROW] * 2),
        ("a.jsonl", f"{json.dumps(ROW)}, \r\n{json.dumps(ROW)}\n", "without a comma after it", [ROW] * 2),
        ("a.json", f"{json.dumps(ROW)},\n{json.dumps(ROW)},\n", "without a comma after it", [ROW] * 2),
        ("a.json", json.dumps([TALK]), "each row must be a JSON object, found a list", [{"messages": TALK}]),
        ("a.json", json.dumps({"my data": ["one"], "n": 1}), "found text", [{"text": "one"}]),
        ("a.json", json.dumps({"x": ROW, "y": ROW}), "found an object of 2 objects", [ROW] * 2),
        ("a.json", json.dumps({"train it": [ROW], "test": [{}]}), "found 2: train it, test", [ROW]),
        (
            "a.json",
            json.dumps({"the q": ["one", "two"], "n": 3, "a": [[1], None]}),
            "found 2: the q, a. If they are columns",
            [{"the q": "one", "a": [1]}, {"the q": "two", "a": None}],
        ),
    ],
)
def test_json_of_another_form_command_makes_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, said: str, rows: list[Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused(Path(name), content)
    assert said in message
    assert rows_of(run_command(tmp_path, message)) == rows


CONLL = """-DOCSTART- -X- O O

# id 7 domain=en
EU NNP B-NP B-ORG
"\\ DT O O
# NN O O

Peter NNP B-NP B-PER"""
CONLLU = """# text = au "A b"
1-2\tau\t_\t_\t_\t_\t0\t_\t_\t_
1\tà\tà\tADP\t_\t_\t0\t_\t_\t_
2\t"A b\tle\tDET\t_\t_\t1\t_\t_\t_
2.1\tx\tx\tVERB\t_\t_\t1\t_\t_\t_

1\tEnd\tend\tNOUN\t_\t_\t0\t_\t_\t_
"""


@pytest.mark.parametrize("lines_end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        (
            "the dev.conll",
            CONLL,
            [{"tokens": ["EU", '"\\', "#"], "tags": ["B-ORG", "O", "O"]}, {"tokens": ["Peter"], "tags": ["B-PER"]}],
        ),
        (
            "dev.conllu.gz",
            CONLLU,
            [{"tokens": ["à", '"A b'], "tags": ["ADP", "DET"]}, {"tokens": ["End"], "tags": ["NOUN"]}],
        ),
    ],
)
def test_conll_command_makes_rows_of_words_and_tags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, rows: list[Any], lines_end: str
) -> None:
    monkeypatch.chdir(tmp_path)
    raw = content.replace("\n", lines_end).encode()
    Path(name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    [message] = check(config(name, "tagged_words"))
    assert message.startswith(f"dataset.path={name}: unsupported file type; to convert its words and tags")
    found = run_command(tmp_path, message)
    assert rows_of(found) == rows
    assert detect_formats(config(found, "auto"), formats_for("tokens"))[0].format == "tagged_words"


GERMEVAL = """#\tnews\t[2012-11-19]
1\tÖl\tB-ORG\tB-LOC
2\that\tO\tO

#\tnews\t[2012-11-20]
1\tda\tO\tO
"""


@pytest.mark.parametrize("name", ["a b.txt", "a.txt.gz"])
def test_text_of_numbered_words_command_makes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(gzip.compress(GERMEVAL.encode()) if name.endswith(".gz") else GERMEVAL.encode())
    with pytest.raises(DataError, match="its lines are words with their tags") as error:
        require_prose(DataFile(Path(name), name), GERMEVAL)
    command, _, checked = str(error.value).split("type: ")[1].partition("\n")[0].rpartition(" && ")
    found = run_command(tmp_path, command)
    assert rows_of(found) == [{"tokens": ["Öl", "hat"], "tags": ["B-ORG", "O"]}, {"tokens": ["da"], "tags": ["O"]}]
    assert f"task=tokens dataset=tagged_words dataset.path={found.name}" in checked.replace("'", "")


def test_json_lists_of_other_lengths_named(tmp_path: Path) -> None:
    message = refused(tmp_path / "a.json", json.dumps({"a": ["x"], "b": [], "c": []}))
    assert message == "a.json: expected one list of rows, found 3: a, b, c, of different lengths"
    assert refused(tmp_path / "b.json", '{"a": 1}') == "b.json: expected one list of rows, found 0"


def test_json_of_tokens_is_one_row(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"input_ids": [1, 2], "labels": [1, 2]}')
    assert rows_of(tmp_path / "a.json") == [{"input_ids": [1, 2], "labels": [1, 2]}]
