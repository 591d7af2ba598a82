"""How a process that is one of several fails: the others end with it, and one message names the cause.

Nothing but a flag in the store, which each process watches from a thread, reaches one that waits in a collective: not
an error of a peer (NCCL waits for ever), nor a signal, whose handler runs only when the wait is over.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from app.distributed.environment import world
from app.errors import AppError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

FOLDER = "APP_LAUNCH_FOLDER"  # environment variable: where processes of our own launcher write their failures
POLL_SECONDS = 0.5
CONNECT_SECONDS = 30.0  # for the store to answer at the start
FAILING_CONNECT_SECONDS = 2.0  # and at a failure: it may have died with the process that held it
GRACE_SECONDS = 5.0  # in which a process that noticed by itself closes its records
READ_SECONDS = 1.0  # for others to read the flag before the process that holds the store may end
_LAST_LINES = 20
_SECONDARY_SECONDS = 5.0  # in which others fail because a peer was killed

# Set in a process that is about to end: what it then loses is no failure of its own.
_ENDING = threading.Event()


# ---- the end of this process


@contextmanager
def reporting_crashes() -> Iterator[None]:
    """Report an unexpected exception once, with its rank, and end without waiting for the other processes."""
    if not world().is_joined:
        yield
        return
    try:
        yield
    except (AppError, SystemExit, KeyboardInterrupt):
        raise
    except BaseException:  # noqa: BLE001  reported with its traceback, whatever it is
        _fail(1, traceback.format_exc().rstrip(), same_for_all=False)


def fail_as_one_of_several(problem: AppError) -> None:
    """End this process with the user's problem, if it is one of several; else return."""
    try:
        here = world()
    except AppError:  # that was the problem
        return
    if here.is_joined:
        _fail(problem.exit_code, problem.report(), same_for_all=not _has_met())


def _has_met() -> bool:
    """Before the processes meet they all do the same, and fail in the same way."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_initialized()


def _fail(code: int, text: str, *, same_for_all: bool) -> NoReturn:
    """End at once: an orderly end would wait for peers that may never come."""
    rank = world().rank
    flag = FailureFlag(rank) if _has_met() else None
    code_of_other = None if flag is None else flag.raise_first(code)
    if code_of_other is not None:  # this process fails because another one has
        os._exit(code_of_other)
    if rank == 0 or FOLDER in os.environ or not same_for_all:
        report_failure(rank, code, text)
    sys.stdout.flush()
    sys.stderr.flush()
    if flag is not None:
        flag.let_others_read()
    os._exit(code)


class FailureFlag:
    """The flag of one start of a run, by a connection of its own: the process group's may be in use by a wait."""

    def __init__(self, rank: int) -> None:
        run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._key = f"app/{run}/{start}/failed"
        self._rank = rank

    def watch(self) -> None:
        """From now on, end this process with the code of the first that raises the flag, within seconds."""
        threading.Thread(target=self._watch, name="failure flag", daemon=True).start()

    def raise_first(self, code: int) -> int | None:
        """Raise the flag; where another process was first, return its code."""
        _ENDING.set()
        mine = f"{code} {self._rank}"
        try:
            found = _store(FAILING_CONNECT_SECONDS).compare_set(self._key, "", mine).decode()
        except RuntimeError:  # the process that held the store is gone
            return None
        return None if found == mine else int(found.split()[0])

    def let_others_read(self) -> None:
        """Wait after `raise_first`, before this process ends: it may be the one that holds the store."""
        time.sleep(READ_SECONDS)

    def let_down(self) -> None:
        """Stop watching, before an orderly end."""
        _ENDING.set()

    def _watch(self) -> None:
        try:
            store = _store(CONNECT_SECONDS)
            while not _ENDING.wait(POLL_SECONDS):
                if store.check([self._key]):
                    self._end(int(store.get(self._key).split()[0]), GRACE_SECONDS)
        except RuntimeError:
            if not _ENDING.wait(POLL_SECONDS):  # a peer that ended in order may be a moment ahead
                sys.stderr.write(f"process {self._rank}: the process that holds the store is gone\n")
                self._end(1, 0)

    def _end(self, code: int, grace: float) -> None:
        if _ENDING.wait(grace):
            return
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _store(timeout_seconds: float) -> "TCPStore":
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=timeout_seconds),
    )


# ---- what a launcher reads


@dataclass(frozen=True, slots=True)
class Failure:
    """How one process ended; `text` is empty where it wrote none."""

    rank: int
    code: int  # negative: the signal that killed it
    at: float
    text: str = ""

    @property
    def was_killed(self) -> bool:
        """By a signal that the elastic agent does not send."""
        return self.code < 0 and self.code != -signal.SIGTERM

    @property
    def exit_code(self) -> int:
        """As shells count: 128 and the signal."""
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
    """What `report_failure` wrote for a rank."""
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
    killed = [f for f in by_time if f.was_killed and f.at - by_time[0].at < _SECONDARY_SECONDS]
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
