"""Benchmarks as a user starts them, with a Python for their many processes that is there at once."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPO

TINY = ("--device", "cpu", "--threads", "1", "--mix", "short", "--length", "48", "--tokens-per-step", "96")


@dataclass
class Bench:
    """`env` has the quick Python."""

    folder: Path
    env: dict[str, str]

    @property
    def out(self) -> Path:
        return self.folder / "found.jsonl"

    def train(self, *options: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """scripts/bench/train.py with a small workload, which `options` may change; `code` is how it must end."""
        script = str(REPO / "scripts" / "bench" / "train.py")
        ended = self.run([sys.executable, script, *TINY, "--out", str(self.out), *options])
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended

    def run(self, command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )

    @property
    def lines(self) -> list[dict[str, Any]]:
        return lines_of(self.out)


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def bench(quick_python: Path, app_env: dict[str, str], tmp_path: Path) -> Bench:
    env = {key: value for key, value in app_env.items() if key != "PYTHONPATH"}  # a script finds its own root
    return Bench(tmp_path, env | {"APP_PYTHON": str(quick_python), "PATH": os.environ["PATH"]})
