"""Two real runs that need the same rows at once: one prepares them, the other says that it waits."""

import os
import signal
from pathlib import Path

from tests.data.small import chat, write_chats
from tests.harness.runs import SMALL, Running, Zygote


def parts(folder: Path) -> set[str]:
    return {part.name for part in (folder / "cache").glob("*/tokens/*.part")}


def entries(folder: Path) -> dict[str, int]:
    return {entry.name: entry.stat().st_ino for entry in (folder / "cache").glob("*/tokens/*")}


def said(run: Running) -> str:
    return run.out.read_text() if run.out.exists() else ""


def preparing(zygote: Zygote, folder: Path) -> Running:
    """A run that was stopped while it prepares its rows."""
    write_chats(folder / "a.jsonl", *(chat(f"Question {n}", f"Answer {n}") for n in range(4000)))
    first = start(zygote, folder, "first")
    first.until(lambda: bool(parts(folder)))
    os.kill(first.pid, signal.SIGSTOP)
    assert len(parts(folder)) == 1
    return first


def start(zygote: Zygote, folder: Path, name: str) -> Running:
    given = ("dataset=messages", "dataset.path=a.jsonl", "dataset.eval_fraction=0", "dataset.max_rows=null")
    return zygote.start(folder, *SMALL, *given, "dry_run=true", f"output_dir={name}")


def test_second_process_takes_over_after_a_kill(zygote: Zygote, tmp_path: Path) -> None:
    first = preparing(zygote, tmp_path)
    second = start(zygote, tmp_path, "second")
    second.until(lambda: "waiting for it" in said(second))
    first.kill()
    ended = second.wait()
    assert ended.code == 0, ended.stderr
    assert "4,000 rows, " in ended.stdout
    assert not parts(tmp_path)
    assert len(entries(tmp_path)) == 1
