"""Failure of a process that is one of several: the others end with it, and one message names the cause.

Nothing but a flag in the store, which each process watches from a thread, reaches one that waits in a collective: not
an error of a peer (NCCL waits for ever), nor a signal, whose handler runs only when the wait is over.
"""

import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from app.distributed.environment import world
from app.errors import AppError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

FOLDER = "APP_LAUNCH_FOLDER"  # environment variable: where processes of our own launcher write their failures
POLL_SECONDS = 0.5
MEETING_SECONDS = 3600.0  # for the store to answer at the start: process 0 may come late
AGENT_SECONDS = 5.0  # the same where the elastic agent holds it, which is there before the processes
FAILING_CONNECT_SECONDS = 2.0  # and at a failure: it may have died with the process that held it
UNMET_CONNECT_SECONDS = 5.0  # and at a failure before the processes have met: process 0 may fail a moment later
GRACE_SECONDS = 2.5  # in which a process that noticed by itself closes its records
READ_SECONDS = 1.0  # for others to read the flag before the process that holds the store may end
_LAST_LINES = 20
_SECONDARY_SECONDS = 5.0  # in which others fail because a peer was killed

# Set in a process that is about to end: what it then loses is no failure of its own.
_ENDING = threading.Event()
_WATCHING = threading.Event()
_CONNECTED = threading.Event()  # the thread that watches, to the store
_SEEN: list["_Raised"] = []  # the failure of another process that this one is about to end with


# ---- the end of this process


@contextmanager
def reporting_crashes() -> Iterator[None]:
    """Report an unexpected exception once, with its rank, and end without waiting for the other processes."""
    if not world().is_joined:
        yield
        return
    if _has_agent_store():
        FailureFlag(world().rank).watch()  # its launcher may be killed long before the processes meet
    try:
        yield
    except (AppError, SystemExit, KeyboardInterrupt):
        raise
    except BaseException:  # noqa: BLE001  reported with its traceback, whatever it is
        _fail(1, traceback.format_exc().rstrip())


def fail_as_one_of_several(problem: AppError) -> None:
    """End this process with the user's problem, if it is one of several; else return."""
    end_as_one_of_several(problem.exit_code, problem.report())


def end_as_one_of_several(code: int, text: str = "") -> None:
    """End this process, and soon the others, with a code and, if it is a failure, its message."""
    try:
        here = world()
    except AppError:  # that was the problem
        return
    if here.is_joined:
        _fail(code, text)


def quiet_connections() -> None:
    """Keep torch, before it is loaded, from printing a C++ stack trace where a store is not up yet, or gone."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _fail(code: int, text: str) -> NoReturn:
    """End at once: an orderly end would wait for peers that may never come."""
    torch = sys.modules.get("torch")
    # before the processes have met, each fails of a cause of its own
    rank, has_met = world().rank, torch is not None and torch.distributed.is_initialized()
    if _SEEN:
        os._exit(_SEEN[0].code)
    flag = FailureFlag(rank)
    first = flag.raise_first(code, text, has_met=has_met)
    if text and (first is None or not (has_met or first.text_hash == _hash(text))):
        report_failure(rank, code, text)
    sys.stdout.flush()
    sys.stderr.flush()
    if first is None:
        flag.let_others_read()
    os._exit(first.code if first is not None and has_met else code)


@dataclass(frozen=True, slots=True)
class _Raised:
    """The failure that a raised flag tells."""

    code: int
    rank: int
    text_hash: str

    @classmethod
    def parse(cls, value: bytes) -> "_Raised":
        code, rank, text_hash = value.decode().split()
        return cls(int(code), int(rank), text_hash)

    def __str__(self) -> str:
        return f"{self.code} {self.rank} {self.text_hash}"


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


class FailureFlag:
    """The flag of one start of a run, by a connection of its own: the process group's may be in use by a wait."""

    def __init__(self, rank: int) -> None:
        run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._key = f"app/{run}/{start}/failed"
        self._rank = rank
        self._hosted: TCPStore | None = None

    def watch(self) -> None:
        """Start the one thread that ends this process within seconds after another raises the flag, with its code, or
        after its launcher or the holder of the store has died.
        """
        if _WATCHING.is_set():
            return
        _WATCHING.set()
        launcher = os.getppid() if _has_agent_store() else None
        import torch.distributed  # noqa: F401  here: two threads must not load it at once

        threading.Thread(target=self._watch, args=(launcher,), name="failure flag", daemon=True).start()

    def raise_first(self, code: int, text: str, *, has_met: bool) -> _Raised | None:
        """Raise the flag; where another process was first, return what that one raised."""
        _ENDING.set()
        mine = _Raised(code, self._rank, _hash(text))
        try:
            store = self._store_at_failure(has_met=has_met)
            found = _Raised.parse(store.compare_set(self._key, "", str(mine)))
            store.add(f"{self._key}/read", 1)
        except RuntimeError:  # the process that held the store is gone, or never came
            return None
        return None if found == mine else found

    def let_others_read(self) -> None:
        """Wait after `raise_first`, before this process ends: it may be the one that holds the store."""
        if self._hosted is None:
            time.sleep(READ_SECONDS)
            return
        end = time.monotonic() + UNMET_CONNECT_SECONDS
        while self._hosted.add(f"{self._key}/read", 0) < world().size and time.monotonic() < end:
            time.sleep(POLL_SECONDS / 5)

    def _store_at_failure(self, *, has_met: bool) -> "TCPStore":
        """Connect to the store. Without a launcher process 0 holds it, since the meeting or, before that, from here."""
        if has_met or _has_agent_store():
            return _store(FAILING_CONNECT_SECONDS)
        if self._rank > 0:
            return _store(UNMET_CONNECT_SECONDS)
        self._hosted = _store(UNMET_CONNECT_SECONDS, hosts=True)
        return self._hosted

    def _watch(self, launcher: int | None) -> None:
        was_reached = launcher is not None
        try:
            store = _store(MEETING_SECONDS if launcher is None else AGENT_SECONDS)
            was_reached = True
            _CONNECTED.set()
            while launcher in (None, os.getppid()):
                if _ENDING.wait(POLL_SECONDS):
                    return
                if store.check([self._key]):
                    _SEEN.append(_Raised.parse(store.get(self._key)))
                    store.add(f"{self._key}/read", 1)
                    self._end(_SEEN[0].code, GRACE_SECONDS)
        except RuntimeError:
            if not was_reached:  # the process itself reports that it does not reach the others
                return
        if not _ENDING.wait(POLL_SECONDS):  # a peer that ended in order may be a moment ahead
            sys.stderr.write(f"process {self._rank}: its launcher, or the process that holds the store, is gone\n")
            if FOLDER in os.environ:
                shutil.rmtree(os.environ[FOLDER], ignore_errors=True)
            self._end(1, 0)

    def _end(self, code: int, grace: float) -> None:
        if _ENDING.wait(grace):
            return
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_until_connected() -> None:
    """Return when the thread of `watch` reads the environment no more, once the processes have met."""
    _CONNECTED.wait(AGENT_SECONDS)


def stop_watching() -> None:
    """End the thread of `watch`, before an orderly end."""
    _ENDING.set()


def _has_agent_store() -> bool:
    """Whether the elastic agent that started this process holds the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(timeout_seconds: float, *, hosts: bool = False) -> "TCPStore":
    from torch._C._distributed_c10d import TCPStore

    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not hosts:
        _wait_until_answered(address, timeout_seconds)
    return TCPStore(*address, is_master=hosts, wait_for_workers=False, timeout=timedelta(seconds=timeout_seconds))


def _wait_until_answered(address: tuple[str, int], seconds: float) -> None:
    """RuntimeError, as of torch, where nothing answers; torch would print a C++ stack trace as well."""
    end = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(address, timeout=seconds).close()
        except OSError as fault:
            if time.monotonic() > end:
                raise RuntimeError(f"nothing answers at {address}") from fault
        time.sleep(POLL_SECONDS / 5)


# ---- what a launcher reads


@dataclass(frozen=True, slots=True)
class Failure:
    """End of one process; `text` is empty where it wrote none."""

    rank: int
    code: int  # negative: the signal that killed it
    at: float
    text: str = ""

    @property
    def exit_code(self) -> int:
        """128 + signal number for a killed process, as in shells."""
        return self.code if self.code > 0 else 128 - self.code


def report_failure(rank: int, code: int, text: str) -> None:
    """Write the failure for our launcher, which prints the first one; under another launcher print it here."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        sys.stderr.write(f"{text}\n(process {rank})\n")
        return
    facts = {"at": time.time(), "code": code, "text": text}
    aside = Path(folder) / f".rank-{rank}"
    aside.write_text(json.dumps(facts))
    aside.rename(Path(folder) / f"rank-{rank}.json")


def read_failure(folder: Path, rank: int) -> Failure | None:
    """Read what `report_failure` wrote for a rank."""
    file = folder / f"rank-{rank}.json"
    if not file.is_file():
        return None
    facts = json.loads(file.read_text())
    return Failure(rank, facts["code"], facts["at"], facts["text"])


def root_cause(failures: Iterable[Failure]) -> Failure:
    """The first failure, unless peers of a killed process have failed before its death was noticed.

    The agent ends the others by SIGTERM; one without text followed the flag of another.
    """
    by_time = sorted(failures, key=lambda each: (each.code == -signal.SIGTERM, not each.text, each.at))
    dead = [each for each in by_time if each.code < 0 and each.code != -signal.SIGTERM]
    killed = [each for each in dead if each.at - by_time[0].at < _SECONDARY_SECONDS]
    return (killed or by_time)[0]


def failure_message(failure: Failure, count: int, printed: str) -> str:
    """`printed`: what the process wrote to its standard error."""
    who = f"process {failure.rank} of {count}"
    if failure.text:
        return f"{failure.text}\n({who})"
    last = "\n".join(printed.splitlines()[-_LAST_LINES:])
    if failure.code < 0:
        name = signal.Signals(-failure.code).name
        advice = ". Out of memory is the usual cause" if failure.code == -signal.SIGKILL else ""
        return f"{who} was killed by {name}{advice}.{f' Its last words:{chr(10)}{last}' if last else ''}"
    return f"{who} ended with code {failure.code}.{f' Its last words:{chr(10)}{last}' if last else ''}"
