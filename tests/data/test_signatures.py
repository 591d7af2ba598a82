"""A file is read again whenever the file system says that it could be another."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.data import signatures
from app.data.signatures import KnownFiles

TICK = 0.05  # seconds; longer than that of the clock that files have


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every file had been written long ago."""
    monkeypatch.setattr(signatures, "_SETTLED", 0)


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose content is read."""
    read: list[str] = []
    original = hashlib.file_digest

    def digest(stream: Any, kind: str) -> Any:
        read.append(Path(stream.name).name)
        return original(stream, kind)

    monkeypatch.setattr(hashlib, "file_digest", digest)
    return read


def hashed(folder: Path, *names: str) -> str:
    return KnownFiles(str(folder / "cache")).hash_all([(folder / name, name) for name in names])


def plain(folder: Path, *names: str) -> str:
    """What it must be."""
    whole = hashlib.sha256()
    for name in names:
        whole.update(f"{name}\0{hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


@pytest.mark.usefixtures("settled")
def test_what_is_known_is_not_read_again(tmp_path: Path, digests: list[str]) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name)
    first = hashed(tmp_path, "a", "b")
    assert first == hashed(tmp_path, "a", "b") == plain(tmp_path, "a", "b")
    assert digests == ["a", "b"]
    (tmp_path / "c").write_text("c")
    (tmp_path / "a").unlink()
    assert hashed(tmp_path, "b", "c") == plain(tmp_path, "b", "c")
    assert digests == ["a", "b", "c"]
    [record] = (tmp_path / "cache" / "hashes").iterdir()
    assert sorted(json.loads(record.read_text())) == ["b", "c"]  # what is gone is forgotten


@pytest.mark.usefixtures("settled")
def test_files_of_the_same_name_in_other_folders(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a").write_text(folder)
    for _ in range(2):
        assert hashed(tmp_path, "x/a", "y/a") == plain(tmp_path, "x/a", "y/a")


def rewritten(path: Path) -> None:
    path.write_text("B")


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_text("B")
    other.rename(path)


def through_a_link(path: Path) -> None:
    target = path.with_name("target")
    target.write_text("B")
    path.unlink()
    path.symlink_to(target)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("change", [rewritten, replaced, through_a_link])
def test_other_content_of_the_same_size_and_time(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = tmp_path / "a"
    path.write_text("A")
    before, stat = hashed(tmp_path, "a"), path.stat()
    time.sleep(TICK)
    change(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert hashed(tmp_path, "a") == plain(tmp_path, "a") != before


def test_what_was_written_a_moment_ago_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digests: list[str]
) -> None:
    """It may change once more within a tick of the clock, and nothing would show it."""
    monkeypatch.setattr(signatures, "signature", lambda found: [found.st_size, 0, 0, 0])
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    path = tmp_path / "a"
    for text in "AB":
        path.write_text(text)
        assert hashed(tmp_path, "a") == plain(tmp_path, "a")
    assert digests == ["a", "a"]
    monkeypatch.undo()
    for text in "AB":
        path.write_text(text)
        assert hashed(tmp_path, "a") == plain(tmp_path, "a")


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(
    "record", ["", "{", "[]", "null", '{"a": 3}', '{"a": {"signature": [], "sha256": "x"}}']
)
def test_a_record_that_is_torn_or_another_is_not_believed(tmp_path: Path, record: str) -> None:
    (tmp_path / "a").write_text("A")
    hashed(tmp_path, "a")
    [place] = (tmp_path / "cache" / "hashes").iterdir()
    place.write_text(record)
    assert hashed(tmp_path, "a") == plain(tmp_path, "a")


def test_without_a_place_for_records_files_are_read_each_time(tmp_path: Path, digests: list[str]) -> None:
    (tmp_path / "cache").write_text("a file")
    (tmp_path / "a").write_text("A")
    assert hashed(tmp_path, "a") == hashed(tmp_path, "a") == plain(tmp_path, "a")
    assert digests == ["a", "a"]
