"""Signals ask a run to save and stop."""

import os
import signal

import pytest

from app.signals import HEARD, listening


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_a_signal_asks_and_once_it_has_nothing_but_ctrl_c_kills_who_ends(number: int, code: int) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    with listening():
        pass
    assert {each: signal.getsignal(each) for each in before} == before
    with listening() as request:
        assert request.exit_code is None
        os.kill(os.getpid(), number)
        assert request.exit_code == code
    for each in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), each)
    assert signal.getsignal(signal.SIGINT) is before[signal.SIGINT]


def test_a_second_ctrl_c_does_not_wait(capfd: pytest.CaptureFixture[str]) -> None:
    with listening(speaks=True) as request:
        os.kill(os.getpid(), signal.SIGINT)
        assert request.exit_code == 130
        assert capfd.readouterr().err == HEARD
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
