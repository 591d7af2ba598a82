"""The launcher passes on what asks its processes to stop, and refuses settings that one process does not have."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from app import train
from app.config.load import compose_run
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


def test_launcher_finds_the_noted_depth_of_a_folder_at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(train, "train_in_processes", lambda _count, _run, _command, file: launch.read_depth(file))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "depth.json").write_text("3")
    assert train.train(compose_run(["output_dir=~/run", "launch.num_processes=2"])) == 3


@pytest.mark.parametrize(("offload", "processes", "joined", "refused"), [
    (True, 1, False, True), (True, 2, False, False), (True, "auto", False, False), (True, 1, True, False),
    (False, 1, False, False),
])  # fmt: skip
def test_offload_without_other_processes_refused(
    offload: bool, processes: int | str, joined: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = compose_run([f"parallel.offload={offload}", f"launch.num_processes={processes}"])
    if joined:
        for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": 0, "MASTER_PORT": 0}.items():
            monkeypatch.setenv(name, str(value))
    assert [problem.partition(":")[0] for problem in launch.check(run)] == ["parallel.offload=true"] * refused
