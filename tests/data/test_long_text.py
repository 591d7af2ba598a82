"""A text that is longer than what is held of it: the same tokens, counts and messages as if it were held whole."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.data import encoding, making, pieces, text_file
from app.data.encoding import Sample
from app.data.files import read_file
from app.data.formats.recognise import recognised
from app.data.overflow import POLICIES, LongText, fit
from app.data.prepare import Data, prepare
from app.data.report import Counts
from app.data.shapes import Broken
from app.errors import DataError
from tests.data.small import LINES, config, tokenizer

TEXT = "\n".join(f"{number}. {line}\n" * (number % 2 + 1) for number in range(12) for line in LINES)
PIECE = 100


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (encoding, making, pieces, text_file):
        monkeypatch.setattr(module, "PIECE", PIECE)
    monkeypatch.setattr(text_file, "_BLOCK", 7)


def prepared(path: Path, **changes: Any) -> Data:
    cache = path.parent / f"cache of {path.name}"
    return prepare(config(path, "text", **{"max_length": 30, **changes}), tokenizer(), str(cache))


def rows_of(data: Data) -> list[tuple[list[int], list[bool]]]:
    return [(data.train.ids(i).tolist(), data.train.trained(i).tolist()) for i in range(len(data.train))]


def counts_of(data: Data) -> Counts:
    data.report.train.source = data.report.train.first_problem = ""
    data.report.train.bad_places, data.report.train.bad_first = [], {}
    return data.report.train


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_length": 5000, "on_overflow": "error"},
        {"on_overflow": "truncate"},
        {"max_length": 400, "max_rows": 3},
        {"on_overflow": "split", "max_length": 2},
    ],
)
def test_a_file_of_text_is_what_the_same_text_in_a_line_is(tmp_path: Path, changes: dict[str, Any]) -> None:
    """A line is held whole. With a text that fits into a piece among them."""
    (tmp_path / "book").mkdir()
    texts = [TEXT, "Rain falls.", TEXT[:PIECE], TEXT[: PIECE + 1], "é" * 150 + TEXT]
    for number, text in enumerate(texts):
        (tmp_path / "book" / f"{number}.txt").write_text(text)
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    book, line = prepared(tmp_path / "book", **changes), prepared(lines, **changes)
    assert rows_of(book) == rows_of(line)
    assert counts_of(book) == counts_of(line)
    assert book.train.sides.tolist() == line.train.sides.tolist()
    places = [book.train.place(i) for i in range(len(book.train))]
    assert places == sorted(places)
    if "max_rows" not in changes and changes.get("on_overflow") != "truncate":
        assert {*places} == {f"{number}.txt" for number in range(5)}


@pytest.mark.usefixtures("small_pieces")
def test_over_long_texts_that_are_not_split(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    with pytest.raises(
        DataError, match=r"of 1 rows none can be trained on; 1 longer than dataset\.max_length=30"
    ):
        prepared(path, on_overflow="drop")
    length = prepared(path).report.train.longest
    with pytest.raises(
        DataError, match=rf"1 samples are longer than .*max_length=30, the longest {length:,} tokens"
    ):
        prepared(path, on_overflow="error")


@pytest.mark.usefixtures("small_pieces")
def test_what_is_no_text_is_one_bad_row_wherever_the_damage_is(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("Rain falls.")
    for name, damage in {"byte": b"\xff", "nul": b"\0", "torn": b"\xc3"}.items():
        (tmp_path / f"{name}.txt").write_bytes(TEXT.encode() + damage)
    (tmp_path / "white.txt").write_text(" \n" * PIECE)
    data = prepared(tmp_path, on_bad_row="skip")
    counts = data.report.train
    assert (counts.rows_read, counts.bad_rows, counts.rows_kept, counts.samples) == (5, 4, 1, 1)
    size, line = len(TEXT.encode()), TEXT.count("\n") + 1
    assert counts.bad_first == {
        f"not UTF-8 at byte {size + 1}, in line {line}; save the file as UTF-8": "byte.txt",
        f"byte {size + 1} is NUL, which no text has: the file is damaged, or not text": "nul.txt",
        "it holds nothing but white space": "white.txt",
    }
    [(_, row)] = read_file(tmp_path / "torn.txt", "torn.txt")
    assert isinstance(row, Broken)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_bytes_are_counted_from_the_beginning_of_the_file(tmp_path: Path, mark: bytes) -> None:
    """A reader that is some blocks further still says which byte it was, the byte order mark included."""
    path = tmp_path / "a.txt"
    for at in range(25):
        path.write_bytes(mark + ("é\n" * 12).encode()[:at] + b"\xff" + b"abc")
        [(_, row)] = read_file(path, "a.txt")
        assert isinstance(row, Broken)
        torn = at % 3 == 1  # the first byte of a letter stands before it: there the damage begins
        assert f"not UTF-8 at byte {len(mark) + at + 1 - torn}, in line {at // 3 + 1};" in row.reason
    path.write_bytes(mark + b"Rain")
    assert list(read_file(path, "a.txt")) == [("a.txt", {"text": "Rain"})]


@pytest.mark.usefixtures("small_pieces")
def test_a_long_text_under_a_format_or_a_name_that_it_has_not(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"columns": {"text": "body"}}, "needs a column 'body'; columns found: text"),
        ({"columns": {"text": "list.*.text"}}, "column 'list' must be a list"),
        ({"format": "question_answer"}, "needs a column 'question'; columns found: text"),
        (
            {"format": "prompt_completion", "columns": {"prompt": "text", "completion": "text"}},
            "a text of more than 100 characters is no row of dataset.format=prompt_completion",
        ),
    ]
    for changes, said in cases:
        settings = config(tmp_path, **{"fmt": changes.pop("format", "text"), **changes})
        with pytest.raises(DataError) as found:
            prepare(settings, tokenizer(), str(tmp_path / "cache"))
        [problem] = found.value.problems
        assert problem.startswith("a.txt: ")
        assert said in problem


@pytest.mark.usefixtures("small_pieces")
def test_a_long_text_is_one_row_to_recognise(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    found, [note] = recognised(config(tmp_path / "a.txt", "auto"))
    assert found.format == "text"
    assert note.endswith("because column text holds text in the only row")


@given(text=st.text("ab \n", max_size=300), cuts=st.lists(st.integers(0, 300)), size=st.integers(2, 40))
def test_pieces_are_the_same_however_the_text_comes(text: str, cuts: list[int], size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", size)
        edges = [0, *sorted(cuts), len(text)]
        blocks = [text[start:end] for start, end in pairwise(edges)]
        found = list(pieces.pieces(iter(blocks)))
        assert found == list(pieces.pieces(iter([text])))
    assert "".join(piece for piece, _ in found) == text
    assert [last for _, last in found] == [False] * (len(found) - 1) + [True]
    assert all(len(piece) <= size for piece, _ in found)


@given(
    length=st.integers(1, 120),
    cuts=st.lists(st.integers(0, 120), max_size=6),
    max_length=st.integers(2, 40),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_a_policy_does_to_pieces_what_it_does_to_the_whole(
    length: int, cuts: list[int], max_length: int, policy: str
) -> None:
    ids = np.arange(length, dtype=np.int32)
    trained = ids > 0
    edges = [0, *sorted(cuts), length]
    text, counts, expected = LongText(max_length, policy), Counts(), Counts()
    kept = [
        part
        for start, end in pairwise(edges)
        for part in text.add(Sample(ids[start:end], trained[start:end]))
    ]
    kept += text.end("a:1", counts)
    whole = fit(Sample(ids, trained), max_length, policy, "a:1", expected)
    assert [(part.ids.tolist(), part.trained.tolist()) for part in kept] == [
        (part.ids.tolist(), part.trained.tolist()) for part in whole
    ]
    assert counts == expected
