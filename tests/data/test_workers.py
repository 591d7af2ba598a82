"""A set that several processes prepared is the one that a single process prepares: the same bytes, the same counts."""

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _pytest.monkeypatch import MonkeyPatch

from app.data import crew, stream
from app.data.prepare import Data, prepare
from tests.data.small import chat, config, tokenizer, write_jsonl

ROWS = 2_000
dealt: Callable[..., Iterator[Any]] = vars(crew)["_dealt"]
started: Callable[..., list[Any]] = vars(crew)["_started"]


def some_rows() -> list[Any]:
    """Good ones, bad ones of several kinds, and some that are too long."""
    draw, found = random.Random(0), list[Any]()
    for number in range(ROWS):
        words = " ".join(draw.choices(["abc", "where", "is", "the", "lamp"], k=draw.choice([3, 5, 9, 50])))
        found.append({"messages": chat(f"{number} {words}?", f"<think>hm</think>{words}", "and?", words)})
    for at in range(0, ROWS, 97):
        found[at] = draw.choice(
            [
                {"messages": []},
                {"other": 1},
                {"messages": chat("only asked")},
                {"messages": chat("a", "\ud800")},
            ]
        )
    return found


def prepared(folder: Path, path: Path, workers: int | None) -> Data:
    settings = config(path, on_bad_row="skip", on_overflow="truncate", workers=workers)
    return prepare(settings, tokenizer("thinking"), str(folder / f"by-{workers}"))


def unsigned(file: Path) -> bytes:
    """Its bytes, but for where and when it was written."""
    if file.name != "meta.json":
        return file.read_bytes()
    meta = json.loads(file.read_text())
    assert meta.pop("signatures").keys() <= meta["checksums"].keys()
    return json.dumps(meta).encode()


def files_of(folder: Path, workers: int | None) -> dict[str, bytes]:
    [entry] = [each for each in (folder / f"by-{workers}" / "tokens").iterdir() if each.is_dir()]
    return {file.name: unsigned(file) for file in sorted(entry.iterdir())}


def test_the_bytes_do_not_depend_on_the_number_of_processes(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_ROWS", 64)
    helped: list[int] = []

    def counted(workers: list[Any], items: Iterator[Any]) -> Iterator[Any]:
        helped.append(len(workers))
        return dealt(workers, items)

    def patiently(*given: Any) -> list[Any]:
        """However slow the machine is."""
        workers, ended = started(*given), time.monotonic() + 120
        while not all(worker.is_ready() for worker in workers) and time.monotonic() < ended:
            time.sleep(0.01)
        return workers

    monkeypatch.setattr(crew, "_dealt", counted)
    monkeypatch.setattr(crew, "_started", patiently)
    path = write_jsonl(tmp_path / "rows.jsonl", some_rows())
    one, three = (prepared(tmp_path, path, workers) for workers in (1, 3))
    assert asdict(one.report.train) == asdict(three.report.train)
    assert helped == [3]
    assert one.report.train.bad_rows > 20
    assert one.report.train.truncated > 100
    assert one.report.train.unstable > 700
    assert files_of(tmp_path, 1) == files_of(tmp_path, 3)
