"""Preparing rows holds a bounded part of them, in the process that reads and in those that tokenise."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.data.small import chat

WORD = "rain" * 250  # long words: few tokens, many bytes
LINE = " ".join([WORD] * 8)


def memory_of(small: Path, large: Path, fmt: str) -> tuple[int, int, int]:
    """MB by which the reading process and a worker grew from a small file to a large one, and their sum at the end."""
    script = Path(__file__).parent / "prepare_and_tell.py"
    done = subprocess.run(
        [sys.executable, str(script), str(small), str(large), fmt, str(small.parent / "cache")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"RAYON_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, worker_before, after, worker = json.loads(done.stdout)["memory"]
    assert worker_before > 0, "there were workers"
    return after - before, worker - worker_before, after + 2 * worker


def rows(size: int) -> Iterator[str]:
    """Chats with a column that nobody reads, until they are `size` bytes."""
    written = number = 0
    while written < size:
        row = json.dumps({"messages": chat(f"Question {number}?", f"{WORD} {number}"), "unread": LINE * 4})
        written, number = written + len(row), number + 1
        yield row


def as_array(path: Path, size: int) -> Path:
    with path.open("w") as file:
        file.write('{"version": 1, "rows": [')
        for number, row in enumerate(rows(size)):
            file.write((",\n" if number else "") + row)
        file.write("]}")
    return path


def as_lines(path: Path, size: int) -> Path:
    with path.open("w") as file:
        file.writelines(f"{row}\n" for row in rows(size))
    return path


def as_text(path: Path, size: int) -> Path:
    with path.open("w") as file:
        file.writelines(f"{LINE}\n" for _ in range(size // len(LINE)))
    return path


def packed(path: Path, size: int) -> Path:
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.writelines(f"{LINE}\n" for _ in range(size // len(LINE)))
    return path


KINDS: dict[str, tuple[Callable[[Path, int], Path], str]] = {
    "json": (as_array, "messages"),
    "jsonl": (as_lines, "messages"),
    "txt": (as_text, "text"),
    "txt.gz": (packed, "text"),
}
SMALL, LARGE = 30 << 20, 130 << 20
GROWTH = 60  # MB, of the 100 by which the files differ
SUM = 800  # of three processes, each with some 230 MB of libraries


@pytest.mark.parametrize("kind", ["json", "jsonl", "txt", pytest.param("txt.gz")])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, kind: str) -> None:
    """Files differ by more than may be held: held whole in any process, the larger one would be seen."""
    written, fmt = KINDS[kind]
    reader, worker, together = memory_of(
        written(tmp_path / f"small.{kind}", SMALL), written(tmp_path / f"large.{kind}", LARGE), fmt
    )
    assert max(reader, worker) < GROWTH, (reader, worker)
    assert together < SUM
