"""The board in a process of its own, and a client that has its cookie."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx


@dataclass
class Served:
    """`entry` is the printed address; `client` has been there, and sends the Origin of the board's own pages."""

    process: "subprocess.Popen[str]"
    entry: str
    client: httpx.Client
    said: Path


@contextmanager
def served(folder: Path, environment: Mapping[str, str], said: Path, *options: str) -> Iterator[Served]:
    """Serve a folder; at its end the board is asked to end by SIGTERM. `said` is its standard error."""
    with said.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *options, "-m", "app.board", str(folder)],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdout is not None
    try:
        entry = process.stdout.readline().split()[-1]
        base = entry.partition("/?")[0]
        with httpx.Client(base_url=base, headers={"Origin": base}, follow_redirects=True, timeout=60) as client:
            client.get(entry)
            yield Served(process, entry, client, said)
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=30)
        process.stdout.close()
    assert code == 0, said.read_text()
