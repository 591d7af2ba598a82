"""A trial as a process of its own: started, followed by what it prints, told to stop, never left behind."""

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
_STEP = "step "


class TrialProcess:
    """`python -m app.train overrides` that prints into a file: a pipe would break when the sweep is killed."""

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
                preexec_fn=_stop_when_the_sweep_dies(),  # noqa: PLW1509 (a sweep has no threads)
            )

    def ended(self, within: float) -> int | None:
        """Its exit code, negative for a signal; None when it still runs after that many seconds."""
        try:
            return self._process.wait(within)
        except TimeoutExpired:
            return None

    def ask(self, exit_code: int) -> None:
        """To save and end with that code: as a terminal does, or as a scheduler does."""
        if exit_code == CTRL_C:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGINT)
        else:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> int:
        """At once, with all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


class Printed:
    """The part of a file that is written from now on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin = self._seen = path.stat().st_size if path.exists() else 0
        self._latest = "starting"

    def text(self) -> str:
        """All of it."""
        return self._since(self._begin).decode("utf-8", "replace")

    def latest(self) -> str:
        """The line to show: the newest step, or what is said before the first one."""
        whole, newline, _ = self._since(self._seen).rpartition(b"\n")
        self._seen += len(whole) + len(newline)
        lines = whole.decode("utf-8", "replace").splitlines()
        steps = [line for line in lines if line.startswith(_STEP)]
        if steps or (lines and not self._latest.startswith(_STEP)):
            self._latest = (steps or lines)[-1]
        return self._latest

    def _since(self, place: int) -> bytes:
        if not self.path.exists():
            return b""
        with self.path.open("rb") as file:
            file.seek(place)
            return file.read()


def reason(exit_code: int, text: str) -> str:
    """Why a trial failed, in a few lines."""
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"killed by {name}" + (": out of memory?" if name == "SIGKILL" else "")
    lines = text.rstrip().splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if errors:
        return "\n".join(lines[errors[-1] :][:_MAX_REASON_LINES])
    return lines[-1] if lines else "it said nothing"


def _stop_when_the_sweep_dies() -> Callable[[], None]:
    """For the child, before it becomes the program: SIGTERM when this process ends in whatever way."""
    libc, sweep = ctypes.CDLL(None), os.getpid()

    def ask_the_kernel() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != sweep:  # it was gone before
            os._exit(1)

    return ask_the_kernel
