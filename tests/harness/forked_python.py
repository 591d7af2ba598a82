"""A Python that is there at once, for scripts that start one: each start is a fork of the zygote.

The script starts this file (`program` makes the command for it), which hands its arguments, environment, folder and
output to a server, itself a run of the zygote's. From then on the two are one: signals are passed on, the end of
either is the end of both, and the exit code is the fork's. Only the standard library is imported before the fork.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

_NETWORK = Path("/proc/self/ns/net")
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def program(folder: Path, server: Path) -> Path:
    """A command that takes `-m module arguments` or `script arguments`, as python does."""
    path = folder / "python"
    path.write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" -IS "{__file__}" "{server}" "$@"\n')
    path.chmod(0o755)
    return path


def main() -> None:
    """The server: `zygote.start(folder, socket, module="tests.harness.forked_python")`, until it is killed."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(sys.argv[1])
    listening.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who look after the forks
    while True:
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            _look_after(connection)
        connection.close()


def _look_after(connection: socket.socket) -> None:
    """Fork the one that runs, tell its number, and in the end its status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, handles, _, _ = socket.recv_fds(connection, 8, 4)
    with connection.makefile("rb") as file:
        asked = json.loads(file.read(int(size)))
    from tests.harness.zygote import end_after

    pid = os.fork()
    if pid == 0:
        connection.close()
        end_after(lambda: _run(asked, handles))
    for handle in handles:
        os.close(handle)
    connection.sendall(b"%8d" % pid)
    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([ended, connection.fileno()], [], [])
    if ended not in ready:  # whoever asked for it has been killed
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if ended in ready:
        connection.sendall(b"%8d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _run(asked: dict[str, Any], handles: list[int]) -> None:
    from tests.harness.zygote import run_module, run_script

    *handles, network = handles
    _enter(network)
    for number, handle in enumerate(handles):
        os.dup2(handle, number)
        os.close(handle)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    given = asked["arguments"]
    if "-m" in given:
        at = given.index("-m") + 1
        run_module(given[at], given[at + 1 :], asked["ignored"])
    else:
        at = next(n for n, word in enumerate(given) if not word.startswith("-"))
        run_script(given[at], given[at + 1 :], asked["ignored"])


def _enter(network: int) -> None:
    """The network namespace of whoever asked, if that is another one."""
    if os.fstat(network).st_ino != _NETWORK.stat().st_ino and ctypes.CDLL(None, use_errno=True).setns(network, 0):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(network)


def stand_in(server: str, arguments: list[str]) -> None:
    """In place of the fork, for whoever started it."""
    asked = {
        "arguments": arguments,
        "env": dict(os.environ),
        "cwd": str(Path.cwd()),
        "ignored": [number for number in _PASSED_ON if signal.getsignal(number) == signal.SIG_IGN],
    }
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(server)
    text = json.dumps(asked).encode()
    socket.send_fds(connection, [b"%8d" % len(text)], [0, 1, 2, os.open(_NETWORK, os.O_RDONLY)])
    connection.sendall(text)
    pid = int(connection.recv(8))
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _frame: os.kill(pid, number))
    told = connection.recv(8)
    code = int(told) if told else -signal.SIGKILL
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    stand_in(sys.argv[1], sys.argv[2:])
