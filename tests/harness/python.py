"""Processes of Python, run to their end."""

import subprocess
import sys
from typing import Any


def python(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """`python arguments`, without input unless it is among the options, which are those of subprocess.run."""
    streams: dict[str, Any] = {} if "input" in options else {"stdin": subprocess.DEVNULL}
    given = {"capture_output": True, "text": True, "timeout": 300, **streams, **options}
    return subprocess.run([sys.executable, *arguments], **given)


def printed_by(*arguments: str, **options: Any) -> str:
    """What it prints; it must succeed."""
    ended = python(*arguments, **options)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
