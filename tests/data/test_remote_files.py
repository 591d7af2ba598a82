"""Files at an address, in the in-memory file system of fsspec: the rows and places of local ones."""

import gzip
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.data.prepare import prepare
from app.data.sources import check, eval_source, train_source
from app.errors import DataError
from tests.data.small import config, greetings, tokenizer, write_chats


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """A memory store with the files of a folder, which has three kinds of them."""
    write_chats(tmp_path / "a.jsonl", *greetings(4))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    (tmp_path / "c.csv").write_text('question,answer\n"a\nb",c\nd,e\n')
    pq.write_table(pa.table({"text": ["one two", "three"] * 300}), tmp_path / "d.parquet")
    files = fsspec.filesystem("memory")
    for file in tmp_path.iterdir():
        files.pipe_file(f"/bucket/rows/{file.name}", file.read_bytes())
    yield files
    files.rm("/bucket", recursive=True)


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz", "c.csv", "d.parquet"])
def test_remote_file_has_the_rows_and_places_of_a_local_one(store: Any, tmp_path: Path, name: str) -> None:
    remote = train_source(config(f"memory://bucket/rows/{name}"))
    assert [*remote.rows()] == [*train_source(config(tmp_path / name)).rows()]


def test_remote_pattern_reads_files_in_name_order(store: Any) -> None:
    source = train_source(config("memory://bucket/*/*.jsonl*"))
    places = [place for place, _ in source.rows()]
    assert places == [f"rows/{name}:{n}" for name in ("a.jsonl", "b.jsonl.gz") for n in range(1, 5)]


def test_remote_changed_file_has_another_key(store: Any, tmp_path: Path) -> None:
    def fingerprint() -> str:
        return train_source(config("memory://bucket/rows/a.jsonl")).fingerprint()

    before = fingerprint()
    assert fingerprint() == before
    settings = config("memory://bucket/rows/a.jsonl", eval_path="memory://bucket/rows/b.jsonl.gz")
    assert eval_source(settings) is not None
    data = prepare(settings, tokenizer(), str(tmp_path / "cache"))
    assert (len(data.train), data.report.shared) == (4, 4)
    store.pipe_file("/bucket/rows/a.jsonl", store.cat_file("/bucket/rows/a.jsonl").replace(b"Hello", b"Hallo"))
    assert fingerprint() != before


def test_remote_bad_row_names_file_and_line(store: Any, tmp_path: Path) -> None:
    store.pipe_file("/bucket/rows/e.jsonl", b'\n{"messages": \n')
    with pytest.raises(DataError, match=r"e\.jsonl:2: column 13: Expecting value"):
        prepare(config("memory://bucket/rows/e.jsonl"), tokenizer(), str(tmp_path))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("memory://bucket/rows/x.jsonl", "dataset.path=memory://bucket/rows/x.jsonl: no such file"),
        ("memory://bucket/rows/*.json", "no file matches the pattern"),
        ("memory://bucket/rows", "is a folder. Choose its files by a pattern, e.g. /bucket/rows/*.jsonl"),
        ("ftp://bucket/a.jsonl", "ftp:// is not supported. Use s3://, gs:// or hf://"),
    ],
)
def test_remote_wrong_address_refused(store: Any, path: str, message: str) -> None:
    [problem] = check(config(path))
    assert message in problem


def test_remote_credentials_in_address_refused_without_repeating_them() -> None:
    [problem] = check(config("s3://me:hunter2@bucket/a.jsonl"))
    assert "is not accepted, because run.yaml would store it. Set AWS_PROFILE" in problem
    assert "hunter2" not in problem


@pytest.mark.parametrize(("protocol", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_remote_missing_package_is_one_error_with_the_command(protocol: str, package: str) -> None:
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    [problem] = check(config(f"{protocol}://bucket/a.jsonl"))
    assert problem.endswith(
        f"{protocol}:// needs the package {package}. Install it: pip install {package}=={version('fsspec')}"
    )


def test_remote_file_removed_before_it_is_read_is_an_error(store: Any) -> None:
    source = train_source(config("memory://bucket/rows/a.jsonl"))
    store.rm("/bucket/rows/a.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl: no such file"):
        list(source.rows())
