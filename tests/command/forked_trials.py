"""app.train in a fork of the zygote, with each trial of a sweep a fork in turn: real processes, without the imports."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from subprocess import TimeoutExpired
from typing import IO

from app import train
from app.sweeps import trials
from tests.harness.zygote import end_after, run_module


class Fork:
    """As much of Popen as a trial needs."""

    def __init__(
        self,
        command: list[str],
        *,
        stdin: int,
        stdout: IO[bytes],
        stderr: int,
        env: Mapping[str, str],
        start_new_session: bool,
        preexec_fn: Callable[[], None],
    ) -> None:
        assert command[:3] == [sys.executable, "-m", "app.train"]
        sys.stdout.flush()
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            assert start_new_session
            os.setsid()
            preexec_fn()
            for number in (1, 2):
                os.dup2(stdout.fileno(), number)
            os.environ.update(env)
            end_after(lambda: run_module("app.train", command[3:]))

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG if end else 0)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif end and time.monotonic() > end:
                raise TimeoutExpired("trial", timeout or 0)
            else:
                time.sleep(0.005)
        return self._code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def main() -> None:
    vars(trials)["Popen"] = Fork
    train.main()
