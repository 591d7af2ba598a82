"""Signals that stop a run: finish the step, save, and end with a code that says what to do; before any step, end."""

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
NOTHING_TO_SAVE = "stopped: there was nothing new to save\n"
HEARD = "\nCtrl-C: this step is finished and saved; once more ends at once, without saving\n"
CODES = {
    signal.SIGTERM: START_ME_AGAIN,
    signal.SIGUSR1: START_ME_AGAIN,
    signal.SIGHUP: START_ME_AGAIN,
    signal.SIGINT: CTRL_C,
}


class Stopped(SystemExit):
    """Ends a program that has nothing to save; what it has opened is closed on the way."""

    def __init__(self, number: int) -> None:
        self.exit_code = CODES[signal.Signals(number)]
        super().__init__(self.exit_code)


@dataclass(slots=True)
class StopRequest:
    """`exit_code` is set by the first signal."""

    exit_code: int | None = None


def stop_signals() -> list[signal.Signals]:
    """Signals that ask a run to stop; SIGHUP does not under nohup, which ignores it."""
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in CODES if not (is_nohup and number == signal.SIGHUP)]


@contextmanager
def ending_on_signals(*, answers_signal: bool) -> Iterator[None]:
    """Signals raise `Stopped`, where nothing is `listening`; Ctrl-C stays Python's. Later ones are ignored."""
    asked: list[int] = []

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        asked.append(number)
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        if answers_signal:
            os.write(2, NOTHING_TO_SAVE.encode())
        raise Stopped(number)

    numbers = [number for number in stop_signals() if number != signal.SIGINT]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    except BaseException as fault:
        if asked and not isinstance(fault, Stopped):  # raised by a library that cleaned up what was interrupted
            raise Stopped(asked[0]) from fault
        raise


@contextmanager
def listening(*, answers_signal: bool = False) -> Iterator[StopRequest]:
    """Signals set the request; a second Ctrl-C stops at once.

    `answers_signal`: write a line at the first Ctrl-C, because a step may be long. Later signals are
    ignored: a launcher may forward the same one several times, and ends what fails by one.
    """
    request = StopRequest()

    def note(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and request.exit_code is not None:
            raise KeyboardInterrupt
        if number == signal.SIGINT and answers_signal:
            os.write(2, HEARD.encode())  # no stream: the signal may have come while one was being written
        request.exit_code = CODES[signal.Signals(number)]

    before = {number: signal.signal(number, note) for number in stop_signals()}
    try:
        yield request
    finally:
        failed = sys.exc_info()[0] is not None  # and that is what the program ends with
        for number, handler in before.items():
            is_ending = (failed or request.exit_code is not None) and number != signal.SIGINT
            signal.signal(number, signal.SIG_IGN if is_ending else handler)
