"""Signals ask a run to save and stop."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from app.signals import CODES, HEARD, NOTHING_TO_SAVE, ending_on_signals, listening


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)]
)
def test_a_signal_asks_and_once_it_has_nothing_but_ctrl_c_kills_who_ends(number: int, code: int) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    before = {each: signal.getsignal(each) for each in CODES}
    with listening():
        pass
    assert {each: signal.getsignal(each) for each in before} == before
    with listening() as request:
        assert request.exit_code is None
        os.kill(os.getpid(), number)
        assert request.exit_code == code
    for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        os.kill(os.getpid(), each)
    assert signal.getsignal(signal.SIGINT) is before[signal.SIGINT]


@contextmanager
def library() -> Iterator[None]:
    try:
        yield
    finally:
        raise KeyError("cleaning up what was interrupted")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_ends_who_has_nothing_to_save_and_once_it_has_no_other_does(
    number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with ending_on_signals(answers_signal=True), listening() as request:
        os.kill(os.getpid(), number)
    assert request.exit_code == 75
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with pytest.raises(SystemExit) as ended, ending_on_signals(answers_signal=True), library():
        os.kill(os.getpid(), number)
    assert (ended.value.code, capfd.readouterr().err) == (75, NOTHING_TO_SAVE)
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_second_ctrl_c_does_not_wait(capfd: pytest.CaptureFixture[str]) -> None:
    with listening(answers_signal=True) as request:
        os.kill(os.getpid(), signal.SIGINT)
        assert request.exit_code == 130
        assert capfd.readouterr().err == HEARD
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_listening_under_nohup_leaves_sighup_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with listening() as request:
        os.kill(os.getpid(), signal.SIGHUP)
        assert request.exit_code is None
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
