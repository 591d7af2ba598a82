"""Code in a process of its own, for what one process cannot show: locks, kills, limits, terminals."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def start(code: str, *arguments: str, env: Mapping[str, str] | None = None, **options: Any) -> "subprocess.Popen[str]":
    """A Python process that runs `code`; its text comes through pipes unless `options` say otherwise."""
    # An empty value is as good as none: streams are buffered as they are for users.
    fixed = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "PYTHONUNBUFFERED": ""}
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env={**os.environ, **fixed, **(env or {})}, **given
    )


def run(code: str, *arguments: str, **options: Any) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    process = start(code, *arguments, **options)
    out, err = process.communicate(timeout=60)
    return process.returncode, out or "", err or ""
