"""What a process leaves behind when it fails, and which of several failures was the first."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FOLDER = "APP_LAUNCH_FOLDER"  # where processes of our own launcher leave their failures
_LAST_LINES = 20
_SECONDARY = 5.0  # seconds in which others fail because a peer was killed


@dataclass(frozen=True, slots=True)
class Failure:
    """How one process ended; `text` is empty where it could not say anything itself."""

    rank: int
    code: int  # negative: the signal that killed it
    at: float
    text: str = ""

    @property
    def was_killed(self) -> bool:
        """By something else than the agent, which asks with SIGTERM."""
        return self.code < 0 and self.code != -signal.SIGTERM

    @property
    def exit_code(self) -> int:
        """As a shell tells it."""
        return self.code if self.code > 0 else 128 - self.code


def leave_failure(rank: int, code: int, text: str) -> None:
    """For the launcher, which tells the first one; without a launcher of ours it is told here, with its rank."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        sys.stderr.write(f"{text}\n(process {rank})\n")
        return
    found = {"at": time.time(), "code": code, "text": text}
    aside = Path(folder) / f".rank-{rank}"
    aside.write_text(json.dumps(found))
    aside.rename(Path(folder) / f"rank-{rank}.json")


def left_by(folder: Path, rank: int) -> Failure | None:
    """What `leave_failure` wrote for a rank."""
    file = folder / f"rank-{rank}.json"
    if not file.is_file():
        return None
    found = json.loads(file.read_text())
    return Failure(rank, found["code"], found["at"], found["text"])


def first_of(failures: Iterable[Failure]) -> Failure:
    """The cause. Peers of a killed process fail too, and can say so before anybody has noticed the death.

    What died of SIGTERM was ended by the agent, because of another; who has nothing to say followed another's flag.
    """
    by_time = sorted(failures, key=lambda each: (each.code == -signal.SIGTERM, not each.text, each.at))
    killed = [f for f in by_time if f.was_killed and f.at - by_time[0].at < _SECONDARY]
    return (killed or by_time)[0]


def account_of(failure: Failure, count: int, printed: str) -> str:
    """For people. `printed` is what the process wrote to its standard error."""
    who = f"process {failure.rank} of {count}"
    if failure.text:
        return f"{failure.text}\n({who})"
    last = "\n".join(printed.splitlines()[-_LAST_LINES:])
    if failure.code < 0:
        name = signal.Signals(-failure.code).name
        advice = ". Out of memory is the usual cause" if failure.code == -signal.SIGKILL else ""
        return f"{who} was killed by {name}{advice}.{f' Its last words:{chr(10)}{last}' if last else ''}"
    return f"{who} ended with code {failure.code}.{f' Its last words:{chr(10)}{last}' if last else ''}"
