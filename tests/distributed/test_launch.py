"""The launcher passes on what asks its processes to stop."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from app.distributed import launch
from app.signals import CODES


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_launcher_signal_forwarded_to_processes(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with subprocess.Popen(["sleep", "60"]) as child:
        monkeypatch.setattr(launch, "child_pids", lambda: [child.pid])
        with launch.forwarding_signals() as received:
            os.kill(os.getpid(), number)
        assert (child.wait(10), received) == (-number, [number])


def test_launcher_agent_leaves_stop_signals_alone(tmp_path: Path) -> None:
    handled = launch.elastic_config(2, str(tmp_path)).signals_to_handle.split(",")
    assert not {number.name for number in CODES} & set(handled)
