import io
import re
import subprocess
from pathlib import Path

import pytest

from app.tracking.console import open_console
from tests.harness.child import run, start
from tests.harness.terminal import on_a_terminal, screen

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
COLOR = re.compile(r"\x1b\[[0-9;]*3[0-9][0-9;]*m")


def test_console_pipe_one_line_per_step() -> None:
    returncode, out, err = run(RUN)
    assert (returncode, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "hello [bold]brackets[/bold] \ufffd[2J"
    assert lines[1] == "step 1/1000 | loss 1.5000 | lr 2.00e-04 | 12.3k tokens/s"
    assert lines[2] == "step 112/1000 | loss 1.5000 | lr 2.00e-04 | 12.3k tokens/s | 1:02:05 left"
    assert lines[-2:] == ["answer    this\ufffd[31m", "after"]


def test_console_terminal_bar_and_cursor() -> None:
    returncode, text = on_a_terminal(RUN, 80)
    assert returncode == 0
    assert "1000/1000" in text
    assert "━" in text
    assert COLOR.search(text)
    assert "\x1b[2J" not in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert text.index("in between") < text.rindex("1000/1000")
    assert "loss 1.3864" in text, "the mean: ten steps of 1.5 and one of 0.25"
    left = ["hello [bold]brackets[/bold] \ufffd[2J", "in between", "answer    this\ufffd[31m", "after", ""]
    assert screen(text) == left, "nothing of the bar remains"


BAR = """
from app.tracking.console import open_console
console = open_console()
console.begin(1000, 0, on_gpu=True)
numbers = {"loss": 1.5, "lr": 2e-4, "tokens_per_second": 12345.0, "peak_memory_bytes": 12_340_000_000}
console.step({"step": 1000, **numbers}, 3725.0)
"""


@pytest.mark.parametrize(
    ("columns", "numbers"),
    [
        (40, "loss 1.5000"),
        (80, "loss 1.5000 | 12.3k tokens/s | 1:02:05 left"),
        (84, "loss 1.5000 | 12.3k tokens/s | 0:00:00 elapsed | 1:02:05 left"),
        (100, "loss 1.5000 | lr 2.00e-04 | 12.3k tokens/s | 0:00:00 elapsed | 1:02:05 left"),
        (200, "loss 1.5000 | lr 2.00e-04 | GPU 12.3 GB | 12.3k tokens/s | 0:00:00 elapsed | 1:02:05 left"),
    ],
)
def test_console_bar_fills_the_terminal(columns: int, numbers: str) -> None:
    returncode, seen = on_a_terminal(BAR, columns)
    assert returncode == 0
    bar = columns - len(f"1000/1000  {numbers}")
    assert bar >= 10
    assert f"1000/1000 {'━' * bar} {numbers}" in screen(seen)


@pytest.mark.parametrize(
    ("variable", "value", "shown", "unwanted"),
    [("NO_COLOR", "1", "1000/1000", COLOR), ("TERM", "dumb", "step 1/1000 | loss 1.5000", re.compile(r"\x1b"))],
)
def test_console_terminal_without_color(variable: str, value: str, shown: str, unwanted: re.Pattern[str]) -> None:
    returncode, seen = on_a_terminal(RUN, 100, **{variable: value})
    assert (returncode, unwanted.search(seen)) == (0, None)
    assert shown in seen


STATUS = """
from app.tracking.console import open_console
console = open_console()
console.status("Reading rows ...")
console.say("note")
console.status("Planning memory ...")
console.close()
print("error", flush=True)
"""


def test_console_status_only_on_a_terminal() -> None:
    assert run(STATUS) == (0, "note\nerror\n", "")
    returncode, seen = on_a_terminal(STATUS, 80)
    assert (returncode, screen(seen)) == (0, ["note", "error", ""])
    assert seen.index("Reading rows ...") < seen.index("note") < seen.index("Planning memory ...")


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
