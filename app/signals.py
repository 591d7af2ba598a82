"""Signals that stop a run: finish the step, save, and exit with a code; exit at once before the first step."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

START_ME_AGAIN = 75
CTRL_C = 130
NOTHING_TO_SAVE = "Stopped before the first step; nothing to save.\n"
HEARD = "\nCtrl-C: finishing this step and saving. Press again to quit without saving.\n"
CODES = {
    signal.SIGTERM: START_ME_AGAIN,
    signal.SIGUSR1: START_ME_AGAIN,
    signal.SIGHUP: START_ME_AGAIN,
    signal.SIGINT: CTRL_C,
}


class Stopped(SystemExit):
    """Exit of a program that has nothing to save; open resources are closed on the way."""

    def __init__(self, number: int) -> None:
        self.exit_code = CODES[signal.Signals(number)]
        super().__init__(self.exit_code)


@dataclass(slots=True)
class StopRequest:
    """A stop request; `exit_code` is set by the first signal."""

    exit_code: int | None = None


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run; without SIGHUP under nohup, which ignores it."""
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in CODES if not (is_nohup and number == signal.SIGHUP)]


@contextmanager
def ending_on_signals(*, answers_signal: bool) -> Iterator[None]:
    """Raise `Stopped` on signals outside of `listening`, except Ctrl-C. Later signals are ignored."""
    received: list[int] = []

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        received.append(number)
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        if answers_signal:
            os.write(2, NOTHING_TO_SAVE.encode())
        raise Stopped(number)

    numbers = [number for number in stop_signals() if number != signal.SIGINT]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    except BaseException as fault:
        if received and not isinstance(fault, Stopped):  # raised by a library that cleaned up after the interruption
            raise Stopped(received[0]) from fault
        raise


@contextmanager
def listening(*, answers_signal: bool = False) -> Iterator[StopRequest]:
    """Yield a request that signals set; a second Ctrl-C stops at once.

    `answers_signal`: write a line at the first Ctrl-C, because a step may be long. Later signals are
    ignored: a launcher may forward the same one several times.
    """
    request = StopRequest()

    def note(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and request.exit_code is not None:
            raise KeyboardInterrupt
        if number == signal.SIGINT and answers_signal:
            os.write(2, HEARD.encode())  # not to a stream, which the signal may have interrupted
        request.exit_code = CODES[signal.Signals(number)]

    before = {number: signal.signal(number, note) for number in stop_signals()}
    try:
        yield request
    finally:
        failed = sys.exc_info()[0] is not None  # the exception ends the program
        for number, handler in before.items():
            is_ending = (failed or request.exit_code is not None) and number != signal.SIGINT
            signal.signal(number, signal.SIG_IGN if is_ending else handler)
