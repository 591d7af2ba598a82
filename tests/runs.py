"""Start the program quickly, wait for it, kill it, and read what it wrote."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPO = Path(__file__).parent.parent


@dataclass
class Ended:
    """A run that is over."""

    code: int
    stdout: str
    stderr: str


@dataclass
class Running:
    """A run in a process of its own."""

    zygote: "Zygote"
    pid: int
    out: Path
    err: Path

    def wait(self) -> Ended:
        code = self.zygote.ask({"do": "wait", "pid": self.pid})["code"]
        return Ended(code, self.out.read_text(), self.err.read_text())

    def kill(self) -> Ended:
        """As the machine would: no chance to clean up."""
        return self.stop(signal.SIGKILL)

    def stop(self, number: int) -> Ended:
        os.kill(self.pid, number)
        return self.wait()

    def until(self, reached: Callable[[], bool], seconds: float = 120) -> None:
        """Wait for something the run does; a run that ended first fails the test."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, f"not reached: {self.out.read_text()}{self.err.read_text()}"
            time.sleep(0.002)


@dataclass
class Zygote:
    """The process that forks the runs."""

    environment: dict[str, str]
    process: subprocess.Popen[str] = field(init=False)
    started: int = 0

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.zygote"],
            env=self.environment,
            cwd=REPO,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._read()

    def start(self, folder: Path, *arguments: str, module: str = "app.train", **env: str) -> Running:
        """`python -m module arguments` in `folder`."""
        self.started += 1
        out, err = (folder / f"{name}-{self.started}.txt" for name in ("stdout", "stderr"))
        answer = self.ask(
            {
                "do": "start",
                "module": module,
                "arguments": arguments,
                "cwd": str(folder),
                "env": {"XDG_CACHE_HOME": str(folder / "cache"), **env},
                "stdout": str(out),
                "stderr": str(err),
            }
        )
        return Running(self, answer["pid"], out, err)

    def run(self, folder: Path, *arguments: str, module: str = "app.train", **env: str) -> Ended:
        return self.start(folder, *arguments, module=module, **env).wait()

    def start_together(
        self, folder: Path, count: int, *arguments: str, module: str = "app.train", **env: str
    ) -> list[Running]:
        """`count` processes of one run, as torchrun would start them."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **env}
        return [
            self.start(folder, *arguments, module=module, RANK=str(rank), LOCAL_RANK=str(rank), **shared)
            for rank in range(count)
        ]

    def run_together(
        self, folder: Path, count: int, *arguments: str, module: str = "app.train", **env: str
    ) -> list[Ended]:
        return [run.wait() for run in self.start_together(folder, count, *arguments, module=module, **env)]

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


def metrics(run: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl; what a kill tore off is left out."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def numbers(run: Path) -> list[dict[str, Any]]:
    """What must not depend on when the run was killed: everything but clocks and memory."""
    clocks = {"tokens_per_second", "peak_memory_bytes"}
    return [{key: value for key, value in line.items() if key not in clocks} for line in metrics(run)]


def result(run: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((run / "result.json").read_text())
    return values
