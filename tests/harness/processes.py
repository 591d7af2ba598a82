"""Processes of one process group that stay: all together run one function after the other.

Starting several processes and their group costs more than most cases take, so one start serves the cases of all files.
"""

import faulthandler
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any, NoReturn

from tests.harness.runs import Zygote

PATIENCE_SECONDS = 60  # processes that do not make the same collectives wait for ever


class Processes:
    """`count` processes; a function that fails in one of them fails the test, and ends all."""

    def __init__(self, zygote: Zygote, folder: Path, count: int) -> None:
        self._sockets = tempfile.TemporaryDirectory()
        address = f"{self._sockets.name}/parent"
        with Listener(address, "AF_UNIX", backlog=count) as listener:
            module = "tests.harness.processes"
            self._running = zygote.start_together(folder, count, address, module=module)
            accepted = [listener.accept() for _ in range(count)]
        self._connections: dict[int, Connection] = {each.recv(): each for each in accepted}
        self.is_usable = True

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(runtime, *arguments)` in each process; the results by rank."""
        try:
            for connection in self._connections.values():
                connection.send_bytes(pickle.dumps((function, arguments)))
            return self._results()
        except (EOFError, OSError) as closed:
            self._fail(f"a process ended: {closed!r}")

    def _results(self) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < len(self._connections):
            waiting = {each: rank for rank, each in self._connections.items() if rank not in results}
            answered: list[Any] = wait(list(waiting), PATIENCE_SECONDS)
            if not answered:
                self._fail(f"no answer from {sorted(waiting.values())}")
            for connection in answered:
                finished, result = pickle.loads(connection.recv_bytes())
                if not finished:
                    self._fail(f"process {waiting[connection]}: {result}")
                results[waiting[connection]] = result
        return [results[rank] for rank in sorted(results)]

    def close(self) -> None:
        if self.is_usable:
            for connection in self._connections.values():
                connection.send_bytes(pickle.dumps(None))
            for running in self._running:
                running.wait()
            self._sockets.cleanup()

    def _fail(self, reason: str) -> NoReturn:
        self.is_usable = False
        ended = [running.kill() for running in self._running]
        self._sockets.cleanup()
        raise AssertionError("\n".join([reason, *(f"{each.code}: {each.stderr}" for each in ended)]))


class ProcessesByCount:
    """`processes(3)`: those of a session, started when they are first asked for, and again after a failure."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self._zygote, self._folder = zygote, folder
        self._started: dict[int, Processes] = {}

    def __call__(self, count: int) -> Processes:
        found = self._started.get(count)
        if found is None or not found.is_usable:
            found = self._started[count] = Processes(self._zygote, self._folder, count)
        return found

    def close(self) -> None:
        for each in self._started.values():
            each.close()


def main() -> None:
    """One of the processes."""
    from app.config.schema import LaunchConfig
    from app.distributed.launch import world
    from app.distributed.process_group import start

    faulthandler.enable()
    with Client(sys.argv[1]) as parent:
        parent.send(world().rank)
        runtime = start(LaunchConfig(num_processes=1, threads=1), "fp32", 0)
        while (work := pickle.loads(parent.recv_bytes())) is not None:
            function, arguments = work
            try:
                answer = (True, function(runtime, *arguments))
            except BaseException:  # noqa: BLE001  the test reports it
                answer = (False, traceback.format_exc())
            parent.send_bytes(pickle.dumps(answer))
        runtime.leave()
