"""A base packed file by file is the one that transformers packs, and needs the memory of one file."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import REPO


def measured(folder: Path, *more: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of our reader and that of transformers; above what the imports take, mapped pages among it."""
    program = [sys.executable, "-m", "scripts.bench.load", *more, str(folder)]
    ended = subprocess.run(program, cwd=REPO, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    ours, theirs = (json.loads(line) for line in ended.stdout.splitlines())
    assert (ours["reader"], theirs["reader"]) == ("ours", "transformers")
    assert ours["bytes_equal"] == theirs["bytes_equal"]
    return ours, theirs


def test_one_file_is_in_memory_at_a_time(tmp_path: Path) -> None:
    sizes = ("4", "1024", "2752", "4096")  # layers, width, inner width, vocabulary: about 105 MB in bf16
    ours, theirs = measured(tmp_path, "--sizes", *sizes, "--shards", "6")
    others = ours["all_files"] - ours["largest_file"]
    assert theirs["peak_above_start"] - ours["peak_above_start"] > 0.6 * others
