"""Token rows that were written come back as they were; a file is there whole or is made again."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.data import row_pipeline, token_dataset
from app.data.prepare import prepare
from app.data.token_dataset import RowWriter, TokenRows, cached_rows, open_rows
from app.data.tokenizer import Tokens
from app.errors import EnvironmentProblem
from tests.data.small import LINES, chat, config, tokenizer, write_chats

ROWS = [("a.jsonl:1", [5, 6, 7], [0, 1, 1]), ("b ü.jsonl:2", [9], [0]), ("a.jsonl:3", [5, 6, 7], [0, 0, 1])]


def sample(ids: Sequence[int], trained: Sequence[int], **more: Any) -> Tokens:
    return Tokens(np.array(ids, np.int32), np.array(trained, np.bool_), **more)


def write_all(writer: RowWriter, rows: Sequence[tuple[str, list[int], list[int]]] = ROWS) -> dict[str, Any]:
    for place, ids, trained in rows:
        writer.add(place, sample(ids, trained), split_hash=len(ids))
    return {"n": len(rows)}


def written(folder: Path, rows: Sequence[tuple[str, list[int], list[int]]]) -> TokenRows:
    found, facts = cached_rows(str(folder), "key", lambda writer: write_all(writer, rows))
    assert facts == {"n": len(rows)}
    return found


def never(writer: RowWriter) -> dict[str, Any]:
    raise AssertionError("the rows should have been found")


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in (folder / "tokens").iterdir())


@pytest.mark.parametrize("size", [1, 2, 4096])
def test_cached_rows_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(token_dataset, "BATCH_ROWS", size)
    rows = written(tmp_path, ROWS)
    assert rows.lengths.tolist() == [3, 1, 3]
    assert rows.lengths.dtype == np.int32
    for i, (place, ids, trained) in enumerate(ROWS):
        assert (rows.source_location(i), rows.ids(i).tolist(), rows.second_start(i)) == (place, ids, -1)
        assert rows.loss_mask(i).tolist() == [bool(t) for t in trained]
        assert [each.dtype.name for each in (rows.ids(i), rows.loss_mask(i))] == ["int32", "bool"]
        assert rows.weights(i) is None
        for values in (rows.ids(i), rows.loss_mask(i), rows.lengths):
            with pytest.raises(ValueError, match="read-only"):
                values[0] = 1
    assert (rows.num_trained, rows.label_weight, rows.largest_id, rows.class_counts()) == (3, 3.0, 9, {})
    assert rows.is_duplicate.tolist() == [False, False, False]
    assert rows.select([0, 1, 0]).is_duplicate.tolist() == [False, False, True]


def test_cached_labels_come_back(tmp_path: Path) -> None:
    def write(writer: RowWriter) -> dict[str, Any]:
        for at, label in enumerate(["10", "9", "10"]):
            writer.add(f"a:{at}", sample([1, 2, 3], [0, 0, 0], label=label, second_start=at), split_hash=at)
        return {}

    rows, _ = cached_rows(str(tmp_path), "key", write)
    assert rows.class_counts() == {"9": 1, "10": 2}
    assert [rows.class_of(i) for i in range(3)] == ["10", "9", "10"]
    assert [rows.second_start(i) for i in range(3)] == [0, 1, 2]
    assert rows.where_label(lambda label: label in ("10", "none")).tolist() == [True, False, True]
    assert rows.label_counts.tolist() == [1, 1, 1]
    mixed = TokenRows.concat([written(tmp_path / "plain", ROWS), rows]).select([0, 4])
    assert mixed.class_counts() == {"9": 1}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    return written(tmp_path_factory.mktemp("rows"), ROWS)


@given(chosen=st.lists(st.integers(0, 2)))
def test_token_rows_select(three: TokenRows, chosen: list[int]) -> None:
    view = three.select([2, 1, 0]).select(chosen)
    assert [view.source_location(i) for i in range(len(view))] == [ROWS[2 - i][0] for i in chosen]
    assert [view.ids(i).tolist() for i in range(len(view))] == [ROWS[2 - i][1] for i in chosen]
    assert view.lengths.tolist() == [len(ROWS[2 - i][1]) for i in chosen]
    assert view.num_trained == sum(sum(ROWS[2 - i][2]) for i in chosen)


def test_token_rows_fingerprint_of_content(tmp_path: Path) -> None:
    rows = written(tmp_path / "a", ROWS)
    moved = [(f"elsewhere {place}", ids, trained) for place, ids, trained in ROWS]
    assert written(tmp_path / "b", moved).fingerprint == rows.fingerprint
    assert rows.select([0, 1, 2]).fingerprint == rows.fingerprint
    other_mask = [(ROWS[0][0], ROWS[0][1], [0, 1, 0]), *ROWS[1:]]
    others = [rows.select([0, 1]), rows.select([1, 0, 2]), written(tmp_path / "c", other_mask)]
    assert len({rows.fingerprint, *(other.fingerprint for other in others)}) == 4


def test_token_rows_empty(tmp_path: Path) -> None:
    rows = written(tmp_path, [])
    assert (len(rows), rows.lengths.tolist(), rows.num_trained, rows.largest_id) == (0, [], 0, 0)
    assert (rows.class_counts(), rows.is_duplicate.tolist(), rows.split_hashes.tolist()) == ({}, [], [])


def test_cached_rows_need_no_tokenizer_nor_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So rows are found in a folder that may only be read, and those of a copy of the file too."""
    path = write_chats(tmp_path / "a.jsonl", chat("Hi", "Hello"), chat("Thank you", "You are welcome!"))
    first = prepare(config(path), tokenizer(), str(tmp_path / "cache"))
    for name in ("read_row", "Encoder"):  # whatever asked for a row would fail
        monkeypatch.setattr(row_pipeline, name, None)
    shutil.rmtree(tmp_path / "cache" / "locks")
    (tmp_path / "copy").mkdir()
    copy = Path(shutil.copy2(path, tmp_path / "copy"))
    again = prepare(config(copy), tokenizer(), str(tmp_path / "cache"))
    assert again.train.fingerprint == first.train.fingerprint
    assert again.report.lines() == first.report.lines()
    assert again.report.train.source == str(copy)
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["tokens"]


@pytest.mark.parametrize(
    "damage", ["gone", "empty", "cut in half", "without its end", "end of zeros", "longer", "other columns"]
)
def test_cached_rows_damaged_made_again(tmp_path: Path, damage: str) -> None:
    good = written(tmp_path, ROWS).fingerprint
    path = tmp_path / "tokens" / "key.arrow"
    content = path.read_bytes()
    path.unlink()  # else what is mapped would change
    if damage != "gone":
        path.write_bytes(
            {
                "empty": b"",
                "cut in half": content[: len(content) // 2],
                "without its end": content[:-9],
                "end of zeros": content[:-64] + bytes(64),
                "longer": content + b"0",
                "other columns": content.replace(b"split_hash", b"other_hash"),
            }[damage]
        )
    assert open_rows(path) is None
    assert written(tmp_path, ROWS).fingerprint == good
    assert cached_rows(str(tmp_path), "key", never)[0].fingerprint == good
    assert names(tmp_path) == ["key.arrow"]


@pytest.mark.parametrize("locks", [True, False])
def test_cached_rows_concurrent_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    """One makes the rows; all of them do where a file system knows no locks."""
    made: list[int] = []
    found: list[str] = []
    together = threading.Barrier(1 if locks else 4, timeout=20)

    def unknown(*_of: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if not locks:
        monkeypatch.setattr(fcntl, "flock", unknown)

    def write(writer: RowWriter) -> dict[str, Any]:
        made.append(threading.get_ident())
        together.wait()
        time.sleep(0.1)
        return write_all(writer)

    threads = [
        threading.Thread(target=lambda: found.append(cached_rows(str(tmp_path), "key", write)[0].fingerprint))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == (1 if locks else 4)
    assert (len(found), len(set(found))) == (4, 1)
    assert names(tmp_path) == ["key.arrow"]


def test_cached_rows_failed_writer_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        cached_rows(str(tmp_path), "key", never)
    assert names(tmp_path) == []


def test_cached_rows_remove_abandoned_parts(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    for name in ("key.0.part", "other.1.part", "old.2.part"):
        (tmp_path / "tokens" / name).write_bytes(b"x")
    day_ago = time.time() - 25 * 3600
    os.utime(tmp_path / "tokens" / "old.2.part", (day_ago, day_ago))
    written(tmp_path, ROWS)
    assert names(tmp_path) == ["key.arrow", "other.1.part"]


def test_cached_rows_full_disk_reported(tmp_path: Path) -> None:
    """The file size limit is the one full disk that any user can have."""
    (tmp_path / "a.txt").write_text("\n".join(LINES * 200))
    code = (
        "import resource, sys\n"
        "from app.data.prepare import prepare\n"
        "from app.errors import EnvironmentProblem\n"
        "from tests.data.small import config, tokenizer\n"
        f"made, section = tokenizer(None), config({str(tmp_path / 'a.txt')!r}, 'text')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n"
        f"    prepare(section, made, {str(tmp_path / 'cache')!r})\n"
        "except EnvironmentProblem as problem:\n"
        "    sys.exit(str(problem))\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.stderr.strip() == (
        f"cache_dir={tmp_path}/cache: cannot write the token cache: File too large; free disk space there, or set"
        " cache_dir to another folder"
    )
    assert names(tmp_path / "cache") == []


def test_cached_rows_unusable_folder_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match=r"^cache_dir=.*file: cannot write the token cache"):
        cached_rows(str(tmp_path / "file"), "key", write_all)
