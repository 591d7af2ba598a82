import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path

import pytest

from app.tracking.console import open_console
from tests.harness.child import run, start

RUN = """
import sys
from app.tracking.console import open_console
console = open_console()
console.say("hello [bold]brackets[/bold] \\x1b[2J")
console.begin(1000, 0)
for step in range(1, 1001, 111):
    console.step({"step": step, "loss": 1.5, "lr": 2e-4, "tokens_per_second": 12345.0}, None if step == 1 else 3725.0)
console.say("in between")
console.step({"step": 1000, "loss": 0.25, "lr": 2e-5, "tokens_per_second": 12345.0})
console.say("answer    this\\x1b[31m")
console.close()
print("after", flush=True)
"""
MARKING = RUN.replace('print("after", flush=True)', "__import__('pathlib').Path(sys.argv[1]).touch()")
COLOR = re.compile(rb"\x1b\[[0-9;]*3[0-9][0-9;]*m")


def on_a_terminal(columns: int, **environment: str) -> tuple[int, bytes]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    cleared = {"TERM": "xterm-256color", "COLUMNS": str(columns), "NO_COLOR": "", **environment}
    process = start(RUN, stdin=theirs, stdout=theirs, stderr=theirs, env=cleared)
    os.close(theirs)
    seen = b""
    while chunk := _read(ours):
        seen += chunk
    os.close(ours)
    return process.wait(60), seen


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # how Linux says that the other end is closed
        return b""


def test_console_pipe_one_line_per_step() -> None:
    returncode, out, err = run(RUN)
    assert (returncode, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "hello [bold]brackets[/bold] \ufffd[2J"
    assert lines[1] == "step 1/1000 | loss 1.5000 | lr 2.00e-04 | 12.3k tokens/s"
    assert lines[2] == "step 112/1000 | loss 1.5000 | lr 2.00e-04 | 12.3k tokens/s | 1:02:05 left"
    assert lines[-2:] == ["answer    this\ufffd[31m", "after"]


def test_console_terminal_bar_and_cursor() -> None:
    returncode, seen = on_a_terminal(80)
    text = seen.decode()
    assert returncode == 0
    assert "1000/1000" in text
    assert "loss 1.5000 | 12.3k tokens/s | 1:02:05 left" in text
    assert "loss 0.2500 | 12.3k tokens/s" in text
    assert "hello [bold]brackets[/bold]" in text
    assert "━" in text
    assert "answer    this\ufffd[31m" in text
    assert COLOR.search(seen)
    assert "\x1b[2J" not in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert text.index("in between") < text.rindex("1000/1000")
    assert text.rstrip().endswith("after")


@pytest.mark.parametrize(
    ("variable", "value", "shown", "unwanted"),
    [("NO_COLOR", "1", b"1000/1000", COLOR), ("TERM", "dumb", b"step 1/1000 | loss 1.5000", re.compile(rb"\x1b"))],
)
def test_console_terminal_without_color(variable: str, value: str, shown: bytes, unwanted: re.Pattern[bytes]) -> None:
    returncode, seen = on_a_terminal(100, **{variable: value})
    assert (returncode, unwanted.search(seen)) == (0, None)
    assert shown in seen


def test_console_closed_pipe_survives(tmp_path: Path) -> None:
    code = MARKING.replace("console = open_console()", "console = open_console(); sys.stdin.readline()")
    process = start(code, str(tmp_path / "mark"), stdin=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate("go\n", timeout=60)
    assert (process.returncode, err) == (0, "")
    assert (tmp_path / "mark").exists()


def test_console_full_disk_survives(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        returncode, _, err = run(MARKING, str(tmp_path / "mark"), stdout=full)
    assert (returncode, err) == (0, "")
    assert (tmp_path / "mark").exists()


def test_console_ascii_encoding_survives() -> None:
    code = "from app.tracking.console import open_console; open_console().say('é日本 fine \\ud800')"
    returncode, out, err = run(code, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert (returncode, out, err) == (0, "??? fine ?\n", "")


def test_console_closed_stream_survives() -> None:
    stream = io.StringIO()
    stream.close()
    console = open_console(stream)
    console.say("nobody hears this")
    console.close()


def test_recorder_imports_nothing_heavy() -> None:
    code = "import sys, app.tracking.recorder as _; sys.exit(bool({'torch', 'rich', 'wandb'} & sys.modules.keys()))"
    assert run(code)[0] == 0
