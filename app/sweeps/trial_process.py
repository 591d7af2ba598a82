"""Process of a trial: start, output, stop and kill."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired

from app.files import report_write_errors
from app.signals import CTRL_C

_PR_SET_PDEATHSIG = 1
_MAX_REASON_LINES = 12
_STEP_PREFIX = "step "


class TrialProcess:
    """`python -m app.train` that prints to a file, because a pipe would break when the sweep is killed."""

    def __init__(self, overrides: Sequence[str], environment: Mapping[str, str], printed: Path) -> None:
        with report_write_errors(printed):
            file = printed.open("ab")
        with file:
            self._process = Popen(
                [sys.executable, "-m", "app.train", *overrides],
                stdin=DEVNULL,
                stdout=file,
                stderr=STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which passes it on once
                preexec_fn=_terminate_with_parent(),  # noqa: PLW1509 (a sweep has no threads)
            )

    def wait(self, seconds: float) -> int | None:
        """Exit code, negative for a signal; None if it still runs after `seconds`."""
        try:
            return self._process.wait(seconds)
        except TimeoutExpired:
            return None

    def ask(self, exit_code: int) -> None:
        """Ask it to save and exit with that code, by SIGINT as a terminal does or SIGTERM as a scheduler does."""
        if exit_code == CTRL_C:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGINT)
        else:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> int:
        """Kill it with all its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


class TrialLog:
    """Output file of a trial, from its current end on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin = self._seen = path.stat().st_size if path.exists() else 0
        self._latest = "starting"

    def text(self) -> str:
        return self._since(self._begin).decode("utf-8", "replace")

    def latest(self) -> str:
        """The newest line of a step, or the newest line before the first step."""
        whole, newline, _ = self._since(self._seen).rpartition(b"\n")
        self._seen += len(whole) + len(newline)
        lines = whole.decode("utf-8", "replace").splitlines()
        steps = [line for line in lines if line.startswith(_STEP_PREFIX)]
        if steps or (lines and not self._latest.startswith(_STEP_PREFIX)):
            self._latest = (steps or lines)[-1]
        return self._latest

    def _since(self, place: int) -> bytes:
        if not self.path.exists():
            return b""
        with self.path.open("rb") as file:
            file.seek(place)
            return file.read()


def reason(exit_code: int, text: str) -> str:
    """Why a trial failed, in at most a few lines."""
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"killed by {name}" + (": out of memory?" if name == "SIGKILL" else "")
    lines = text.rstrip().splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if errors:
        return "\n".join(lines[errors[-1] :][:_MAX_REASON_LINES])
    return lines[-1] if lines else "it said nothing"


def _terminate_with_parent() -> Callable[[], None]:
    """Function for the forked child that requests SIGTERM when this process ends, in whatever way."""
    libc, sweep = ctypes.CDLL(None), os.getpid()

    def ask_the_kernel() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != sweep:  # it ended before the request
            os._exit(1)

    return ask_the_kernel
