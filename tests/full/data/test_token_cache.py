"""A preparation that is killed, or runs out of disk, leaves nothing that is believed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.small import LINES, chat, write_chats
from tests.full.data.killed_preparation import MOMENTS
from tests.harness.python import printed_by

ROOT = Path(__file__).parents[3]


def test_killed_preparation_leaves_nothing(tmp_path: Path) -> None:
    rows = write_chats(tmp_path / "a.jsonl", *(chat("Hi", f"Hello {n}") for n in range(1500)))
    env = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    killed = ("-m", "tests.full.data.killed_preparation", str(rows), str(tmp_path / "cache"))
    found = [json.loads(line) for line in printed_by(*killed, cwd=ROOT, env=env).splitlines()]
    assert [moment for moment, *_ in found] == list(MOMENTS)
    for moment, status, left, same, after in found:
        assert status == "ended with -9", moment
        assert [name.endswith(".part") for name in left] == [moment != "in place"], (moment, left)
        assert same, moment
        assert len(after) == 1, (moment, after)
        assert after[0].endswith(".arrow"), moment


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A file system of one megabyte, where this machine lets a process have one of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    tried = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True
    )
    if tried.returncode:
        pytest.skip(f"no file system of one's own here: {tried.stderr.decode().strip()}")
    return folder


def test_cached_rows_full_file_system_reported(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(LINES * 5000))
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from app.data.prepare import prepare\n"
        "from app.errors import EnvironmentProblem\n"
        "from tests.data.small import config, tokenizer\n"
        "try:\n"
        f"    prepare(config({str(tmp_path / 'a.txt')!r}, 'text'), tokenizer(None), {str(small_disk)!r})\n"
        "except EnvironmentProblem as problem:\n"
        f"    print(list(Path({str(small_disk)!r}, 'tokens').iterdir()))\n"
        "    sys.exit(str(problem))\n"
    )
    mount = f"mount -t tmpfs -o size=1m none {small_disk} && exec "
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'{mount} "$0" -c "$1"', sys.executable, code],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    said = f"cache_dir={small_disk}: cannot write the token cache: No space left on device; free disk space there"
    assert done.stderr.strip().startswith(said), done.stderr
    assert done.stdout.strip() == "[]", "what was begun does not keep the disk full"
