"""Several machines played by this one: a node.sh each, and a Slurm that starts them."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.conftest import REPO

SCRIPTS = REPO / "scripts/cluster"

SRUN = f"""#!{sys.executable} -IS
import os, pathlib, signal, subprocess, sys
command = sys.argv[next(n for n, word in enumerate(sys.argv) if n and not word.startswith("--")) :]
tasks = [
    subprocess.Popen(command, env=os.environ | {{"SLURM_NODEID": str(n), "SLURMD_NODENAME": "127.0.0.1"}})
    for n in range(int(os.environ["SLURM_NNODES"]))
]
marks = [f"\\0APP_NODE_PID={{task.pid}}\\0".encode() for task in tasks]

def is_below(entry):
    try:
        return any(mark in b"\\0" + (entry / "environ").read_bytes() for mark in marks)
    except OSError:
        return False

def hand_on(number, frame):
    reached = [task.pid for task in tasks]
    if os.environ["REACHES"] == "every process":
        reached += [int(entry.name) for entry in pathlib.Path("/proc").glob("[0-9]*") if is_below(entry)]
    for pid in reached:
        os.kill(pid, number)

signal.signal(signal.SIGUSR1, hand_on)
sys.exit(max(task.wait() for task in tasks))
"""

SCONTROL = """#!/usr/bin/env bash
case "$1" in
  show) printf '127.0.0.1\\n127.0.0.1\\n' ;;
  requeue) echo "$2" >>"$REQUEUED" ;;
esac
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def of_two_machines(folder: Path, python: Path) -> dict[str, str]:
    """The variables of node.sh on both of two machines."""
    return {
        "TMPDIR": str(folder),
        "APP_PYTHON": str(python),
        "NODES": "2",
        "RENDEZVOUS": f"127.0.0.1:{free_port()}",
        "RUN_ID": "test",
        "ADDRESS": "127.0.0.1",
    }


def free_job() -> str:
    """The number of a job whose port, which follows from it, nobody uses."""
    for number in range(os.getpid() % 10_000, 20_000):
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("", 20_000 + number))
            return str(number)
    raise AssertionError("no port is free")


def processes_of(node: int) -> list[int]:
    """Those of one node.sh, by what they inherit from it."""
    mark = f"\0APP_NODE_PID={node}\0".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in b"\0" + (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Started:
    """A script at work, with what it prints in a file."""

    def __init__(
        self,
        script: Path | str,
        arguments: Sequence[str],
        folder: Path,
        env: Mapping[str, str],
        cwd: Path | None = None,
    ) -> None:
        self._printed = folder / f"printed-{time.monotonic_ns()}.txt"
        with self._printed.open("w") as file:
            self.process = subprocess.Popen(
                [script, *arguments], env=env, cwd=cwd or folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    @property
    def printed(self) -> str:
        return self._printed.read_text()

    def until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not reached():
            assert self.process.poll() is None, self.printed
            assert time.monotonic() < deadline, self.printed
            time.sleep(0.01)

    def ended(self) -> int:
        deadline = time.monotonic() + 90
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.printed
            time.sleep(0.01)
        return self.process.returncode


class Machine(Started):
    """A node.sh, and the processes below it."""

    def die(self) -> None:
        """All at once, as with its power."""
        for pid in (self.process.pid, *processes_of(self.process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def kill_torchrun(self) -> None:
        (torchrun,) = children_of(self.process.pid)
        os.kill(torchrun, signal.SIGKILL)


class Job(Started):
    """slurm.sh, as a copy elsewhere, in a job of two machines that are both this one."""

    def __init__(self, folder: Path, env: Mapping[str, str], *arguments: str, **more: str) -> None:
        programs = folder / "slurm"
        programs.mkdir(exist_ok=True)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        script = Path(shutil.copy(SCRIPTS / "slurm.sh", programs / "slurm_script"))
        told = {"NODES", "ADDRESS", "RENDEZVOUS", "RUN_ID"}  # by Slurm or by slurm.sh
        by_slurm = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "REQUEUED": str(folder / "requeued"),
            "REACHES": "tasks",
            "SLURM_SUBMIT_DIR": str(REPO),
            "SLURM_JOB_ID": free_job(),
            "SLURM_JOB_NODELIST": "gpu[1-2]",
            "SLURM_NNODES": "2",
        }
        kept = {key: value for key, value in env.items() if key not in told}
        super().__init__(script, arguments, folder, kept | by_slurm | more)

    def nodes(self) -> list[int]:
        """Its two node.sh."""
        return [node for srun in children_of(self.process.pid) for node in children_of(srun)]

    def die(self) -> None:
        """Whatever is left of it."""
        if self.process.poll() is not None:
            return
        nodes = self.nodes()
        for pid in (self.process.pid, *nodes, *(pid for node in nodes for pid in processes_of(node))):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
