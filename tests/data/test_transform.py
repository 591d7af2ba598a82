"""`dataset.transform`: what the function returns is read, counted or reported, and its source is part of the key."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.data import sources, transform
from app.data.detect_format import detect_formats
from app.data.prepare import Data, prepare
from app.data.transform import origin_of
from app.errors import ConfigError, DataError
from tests.data.small import config, tokenizer, trained_texts, write_jsonl

SOURCE = """
def clean(row):
    if row["n"] == 9:
        raise KeyError("nine")
    if row["n"] % 2:
        return None
    return {"question": row.pop("asked").strip(), "answer": f"It is {row['n']}."}


def first(row):
    return [row]
"""
ROWS = [{"asked": f" What is {n}? ", "n": n} for n in range(8)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the module `mine` as the current one."""
    (tmp_path / "mine.py").write_text(SOURCE)
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield tmp_path
    forget()


def forget() -> None:
    """As in a new process."""
    sys.modules.pop("mine", None)
    transform._load.cache_clear()


def read(name: str = "mine:clean", fmt: str = "question_answer", **changes: Any) -> Data:
    return prepare(config("a.jsonl", fmt, transform=name, **changes), tokenizer(), "cache")


def test_transform_before_columns_get_roles(folder: Path) -> None:
    section, [note] = detect_formats(config("a.jsonl", "auto", transform="mine:clean"))
    assert "detected dataset.format=question_answer: found text in question, answer in 4 of 4 rows" in note
    data = prepare(section, tokenizer(), "cache")
    texts = [trained_texts(tokenizer(), data.train.ids(i), data.train.loss_mask(i)) for i in range(len(data.train))]
    assert texts == [[f"It is {n}.<|im_end|>"] for n in (0, 2, 4, 6)]
    assert [data.train.source_location(i) for i in range(4)] == [f"a.jsonl:{n}" for n in (1, 3, 5, 7)]


def test_transform_dropped_rows_counted(folder: Path) -> None:
    data = read(max_rows=3)
    assert (data.report.train.rows_read, data.report.train.filtered) == (3, 2)
    assert "train: 2 rows dropped by dataset.transform" in data.report.lines()
    counts = read(sample=2).report.train
    assert (counts.rows_read, counts.not_sampled, counts.filtered) == (2, 2, 4)
    write_jsonl(folder / "a.jsonl", ROWS[1:2])
    with pytest.raises(DataError, match=r"a\.jsonl: has no rows after dataset\.transform=mine:clean"):
        read()
    with pytest.raises(DataError, match=r"a\.jsonl: has no rows after dataset\.transform=mine:clean"):
        detect_formats(config("a.jsonl", "auto", transform="mine:clean"))


def test_transform_fault_names_file_and_line(folder: Path) -> None:
    write_jsonl(folder / "a.jsonl", [*ROWS[:2], {"asked": "?", "n": 9}])
    with pytest.raises(DataError, match=r"^a\.jsonl:3: dataset\.transform=mine:clean raised KeyError: 'nine'"):
        read()
    assert read(on_bad_row="skip").report.train.bad_rows == 1
    with pytest.raises(DataError, match=r"^a\.jsonl:1 and 2 more rows: dataset\.transform=mine:first returned a list"):
        read("mine:first")


def test_transform_source_is_part_of_the_key(folder: Path) -> None:
    settings = config("a.jsonl", "question_answer", transform="mine:clean")
    before = origin_of(settings)
    read()
    (folder / "mine.py").write_text(SOURCE.replace("It is", "This is"))
    forget()
    changed = read()
    assert len(list((folder / "cache" / "tokens").glob("*.arrow"))) == 2
    assert trained_texts(tokenizer(), changed.train.ids(0), changed.train.loss_mask(0)) == ["This is 0.<|im_end|>"]
    after = origin_of(settings)
    assert before is not None
    assert after is not None
    assert (before["source"] != after["source"], before["name"], before["package"]) == (True, after["name"], None)


def test_transform_of_a_package_has_its_version() -> None:
    origin = origin_of(config("x", transform="yaml:safe_load"))
    assert origin is not None
    assert str(origin["package"]).startswith("PyYAML ")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine:cleanup", "mine.py has no function cleanup. Did you mean clean?"),
        ("nowhere:clean", "no module nowhere in {folder} or among the installed packages. Create nowhere.py there"),
        ("needy:clean", "needy needs the module nowhere, which is not installed"),
        ("broken:clean", "importing broken raised SyntaxError: "),
    ],
)
def test_transform_missing_module_or_function_refused_before_the_start(folder: Path, name: str, message: str) -> None:
    (folder / "needy.py").write_text("import nowhere\n")
    (folder / "broken.py").write_text("def clean(\n")
    [problem] = sources.check(config("a.jsonl", transform=name))
    assert problem.startswith(f"dataset.transform={name}: ")
    assert message.format(folder=folder) in problem
    with pytest.raises(ConfigError):
        read(name)
