"""What `dataset.path` may name, and what is said when it names nothing."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from app.data.prepare import prepare
from app.data.sources import FileRows, HubRows, check, eval_source, train_source
from app.errors import DataError
from tests.data.small import config, locations, tokenizer, write_jsonl


def places(path: Path | str, fmt: str = "messages") -> list[str]:
    return [place for place, _ in train_source(config(path, fmt)).rows()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".cache").mkdir()
    write_jsonl(tmp_path / "train.jsonl", [{}, {}])
    (tmp_path / "sub" / "more.jsonl.gz").write_bytes(b"the same, packed")
    write_jsonl(tmp_path / "sub" / "more.jsonl", [{}])
    write_jsonl(tmp_path / ".cache" / "hidden.jsonl", [{}])
    (tmp_path / "README.md").write_text("read me")
    (tmp_path / "notes.pdf").write_text("x")
    return tmp_path


def test_source_file(folder: Path) -> None:
    assert places(folder / "train.jsonl") == ["train.jsonl:1", "train.jsonl:2"]


def test_source_folder_in_order_of_names(folder: Path) -> None:
    source = train_source(config(folder))
    assert [place for place, _ in source.rows()] == ["sub/more.jsonl:1", "train.jsonl:1", "train.jsonl:2"]
    assert source.left_out == ("notes.pdf", "sub/more.jsonl.gz")


def test_source_folder_of_text(folder: Path) -> None:
    (folder / "train.jsonl").unlink()
    (folder / "sub" / "more.jsonl.gz").unlink()
    (folder / "sub" / "more.jsonl").unlink()
    (folder / "a.txt").write_text("a")
    assert places(folder, "text") == ["README.md", "a.txt"]


def test_source_folder_text_beside_tables_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"contains text files and tables; choose with a pattern"):
        train_source(config(folder, "text"))


def test_source_pattern(folder: Path) -> None:
    assert places(f"{folder}/**/*.jsonl")[:2] == ["sub/more.jsonl:1", "train.jsonl:1"]
    assert places(f"{folder}/tra*.jsonl") == ["train.jsonl:1", "train.jsonl:2"]
    with pytest.raises(DataError, match="no file matches the pattern"):
        train_source(config(f"{folder}/*.csv"))
    with pytest.raises(DataError, match=r"notes\.pdf: unsupported file type"):
        train_source(config(f"{folder}/*.pdf"))


def test_source_file_with_magic_name(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a[1].jsonl", [{}])
    assert places(tmp_path / "a[1].jsonl") == ["a[1].jsonl:1"]


def test_source_asset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("app.assets.ROOT", tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", [{}])
    assert places("asset:rows.jsonl") == ["rows.jsonl:1"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("trian.jsonl", "no such file or folder in {here}; did you mean train.jsonl?"),
        ("sub/mor.jsonl", "did you mean sub/more.jsonl or sub/more.jsonl.gz?"),
        ("{here}/trian.jsonl", "no such file or folder; did you mean {here}/train.jsonl?"),
        ("imdb", "a hub dataset is ORG/NAME"),
        ("sub/alpaca", "a hub dataset is ORG/NAME, and no local folder ORG may exist"),
        ("notes.pdf", "dataset.path=notes.pdf: unsupported file type; supported: .jsonl .ndjson .json .csv"),
        ("empty", "no supported file in the folder"),
    ],
)
def test_source_missing_path_reported(folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, said: str) -> None:
    monkeypatch.chdir(folder)
    (folder / "empty").mkdir()
    path, said = path.format(here=folder), said.format(here=folder)
    [problem] = check(config(path))
    assert problem.startswith(f"dataset.path={path}")
    assert said in problem
    with pytest.raises(DataError) as error:
        train_source(config(path))
    assert str(error.value) == problem


def test_check_both_paths(folder: Path) -> None:
    assert check(config(folder / "train.jsonl")) == []
    assert check(config("org/name")) == []
    problems = check(config(folder / "no.jsonl", eval_path=str(folder / "trai.jsonl")))
    assert ["dataset.path=" in problems[0], "dataset.eval_path=" in problems[1]] == [True, True]
    [problem] = check(config(folder / "train.jsonl", eval_split="test"))
    assert "dataset.eval_split=test: dataset.path=" in problem
    assert "has no splits; set dataset.eval_path" in problem


def test_eval_source_follows_config(folder: Path) -> None:
    assert eval_source(config(folder)) is None
    held = eval_source(config(folder, eval_path=str(folder / "sub")))
    assert held is not None
    assert [place for place, _ in held.rows()] == ["more.jsonl:1"]
    own = eval_source(config("org/a", revision="v1", eval_split="test"))
    assert own == HubRows("org/a", "dataset.path", "test", None, "v1")
    other = eval_source(config("org/a", revision="v1", eval_path="org/b"))
    assert other == HubRows("org/b", "dataset.eval_path", "train", None, None)


def test_source_fingerprint_follows_content_and_names(folder: Path) -> None:
    def fingerprint() -> str:
        return train_source(config(folder)).fingerprint()

    before = fingerprint()
    assert fingerprint() == before
    (folder / "train.jsonl").rename(folder / "renamed.jsonl")
    renamed = fingerprint()
    write_jsonl(folder / "renamed.jsonl", [{}, {"a": 1}])
    assert len({before, renamed, fingerprint()}) == 3


def written(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"text": name}) + "\n")
    return folder


SHARDS = ("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test-00000-of-00001.jsonl")
CARD = """---
configs:
- config_name: en
  data_files: [{split: train, path: "a/*.jsonl"}, {split: test, path: b.jsonl}]
- config_name: fr
  data_dir: fr
---
"""


@pytest.mark.parametrize(
    ("names", "train", "others"),
    [
        (SHARDS, SHARDS[:2], ("test",)),
        (("train.jsonl", "dev.csv", "test.jsonl"), ("train.jsonl",), ("validation", "test")),
        (("x/train/a.jsonl", "x/test/a.jsonl"), ("x/train/a.jsonl",), ("test",)),
        (("part1.jsonl", "part2.jsonl", "my_test.jsonl"), ("part1.jsonl", "part2.jsonl"), ("test",)),
        (("train.jsonl", "more.jsonl"), ("more.jsonl", "train.jsonl"), ()),
        (("latest.jsonl", "trains.jsonl"), ("latest.jsonl", "trains.jsonl"), ()),
        (("train.txt", "valid.txt"), ("train.txt",), ("validation",)),
    ],
)
def test_folder_with_splits_other_splits_not_read(
    tmp_path: Path, names: Sequence[str], train: Sequence[str], others: tuple[str, ...]
) -> None:
    folder = written(tmp_path / "a[1]", *names)
    source = train_source(config(folder))
    assert isinstance(source, FileRows)
    assert tuple(name for _, name in source.files) == tuple(train)
    assert (source.other_splits, source.left_out) == (others, ())
    for split in others:
        held = eval_source(config(folder, eval_split=split))
        assert isinstance(held, FileRows)
        assert {name for _, name in held.files} <= {*names} - {*train}
    held = eval_source(config(folder, eval_path=str(folder)))
    assert isinstance(held, FileRows)
    assert len(held.files) == len(names), "what is named for evaluation is read as a whole"


def test_folder_with_configs_in_read_me_follows_them(tmp_path: Path) -> None:
    written(tmp_path, "a/1.jsonl", "b.jsonl", "fr/train.jsonl", "fr/test.jsonl", "c.jsonl")
    (tmp_path / "README.md").write_text(CARD)
    english = train_source(config(tmp_path, hub_config="en"))
    assert [place for place, _ in english.rows()] == ["a/1.jsonl:1"]
    assert (english.other_splits, english.left_out) == (("test",), ("c.jsonl", "fr/test.jsonl", "fr/train.jsonl"))
    french = train_source(config(tmp_path, hub_config="fr", split="test"))
    assert [place for place, _ in french.rows()] == ["fr/test.jsonl:1"]
    for given, said in ((None, "none is the default"), ("de", "dataset.hub_config=de is not one of them")):
        way = "Choose one, e.g. dataset.hub_config=en"
        with pytest.raises(DataError, match=re.escape(f"available configurations: en, fr, but {said}. {way}")):
            train_source(config(tmp_path, hub_config=given))
    (tmp_path / "README.md").write_text("---\nconfigs: [\n---\n")
    with pytest.raises(DataError, match=r"cannot get the splits from README\.md or the file names: while parsing"):
        train_source(config(tmp_path))


def test_folder_without_wanted_split_refused(tmp_path: Path) -> None:
    written(tmp_path, "test.jsonl", "val.jsonl")
    for given in ({}, {"split": "dev"}, {"split": "test", "eval_split": "train"}):
        [problem] = check(config(tmp_path, **given))
        assert f"dataset.path={tmp_path}: no split " in problem
        assert "splits: validation, test. Set dataset.split for" in problem


def test_unread_splits_reported_with_key_to_evaluate_on_them(tmp_path: Path) -> None:
    folder = written(tmp_path / "rows", "train.jsonl", "test.jsonl", "val.jsonl")
    named = f"dataset.path={folder}: splits not read: "
    how = "(dataset.eval_split=validation dataset.eval_fraction=0 evaluates on validation)"
    data = prepare(config(folder, "text"), tokenizer(), str(tmp_path / "cache"))
    assert f"{named}validation, test {how}" in data.report.notes
    assert locations(data.train) == ["train.jsonl:1"]
    data = prepare(config(folder, "text", eval_split="validation"), tokenizer(), str(tmp_path / "cache"))
    assert locations(data.eval) == ["val.jsonl:1"]
    assert any(note.startswith(f"{named}test (") for note in data.report.notes)


def test_source_device_and_pipe_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe")):
        [problem] = check(config(path))
        assert problem.startswith(f"dataset.path={path}: is a device or a pipe, which cannot be read twice")
        assert problem.endswith(f"cat {path} > rows.jsonl")


def test_source_odd_file_among_others_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "rows", "good.jsonl")
    (folder / "b.jsonl").write_bytes("{}".encode("utf-16"))
    with pytest.raises(DataError) as error:
        prepare(config(folder, "text", on_bad_row="skip"), tokenizer(), str(tmp_path / "cache"))
    assert str(error.value).startswith("b.jsonl: is UTF-16")
    assert str(error.value).endswith(f"or leave it out of dataset.path={folder}")


def test_source_odd_file_name_printable(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.jsonl")).write_bytes(b"{}\n")
    assert places(tmp_path) == [r"caf\udce9.jsonl:1"]


def test_sources_import_nothing_heavy(tmp_path: Path) -> None:
    heavy = "{'torch', 'transformers', 'datasets', 'pyarrow', 'tokenizers', 'huggingface_hub'}"
    code = f"import sys, app.data.sources; found = {heavy} & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
