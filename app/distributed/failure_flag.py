"""A process that cannot go on tells all others by a flag in the store that they met through.

Nothing else reaches a process that waits in a collective of another: not an error of a peer (NCCL waits for ever), nor
a signal, whose handler runs only when the wait is over. A thread does run.
"""

import os
import sys
import threading
import time
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

LOOK_SECONDS = 0.5
PATIENCE_SECONDS = 30.0  # for the store to answer at the start
HURRY_SECONDS = 2.0  # and at a failure: it may have died with the process that held it
GRACE_SECONDS = 5.0  # in which a process that noticed by itself closes its records
READ_SECONDS = 1.0  # that others get to read the flag before the process that holds the store may end

# of this process, whoever ends it: what it then loses is no news
_ENDING = threading.Event()


class FailureFlag:
    """Of one start of a run. It has a connection of its own: the one of the process group may be in use by a wait."""

    def __init__(self, rank: int) -> None:
        run, start = (
            os.environ.get("TORCHELASTIC_RUN_ID", "run"),
            os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
        self._key = f"app/{run}/{start}/failed"
        self._rank = rank

    def watch(self) -> None:
        """From now on the process ends with the code of the first that raises the flag, seconds later at most."""
        threading.Thread(target=self._watch, name="failure flag", daemon=True).start()

    def raise_first(self, code: int) -> int | None:
        """By who cannot go on. None, unless another process was before it: then the code of that one."""
        _ENDING.set()
        mine = f"{code} {self._rank}"
        try:
            found = _store(HURRY_SECONDS).compare_set(self._key, "", mine).decode()
        except RuntimeError:  # who held the store is gone
            return None
        return None if found == mine else int(found.split()[0])

    def let_others_read(self) -> None:
        """After `raise_first`, before this process ends: it may be the one that holds the store."""
        time.sleep(READ_SECONDS)

    def let_down(self) -> None:
        """Before an orderly end."""
        _ENDING.set()

    def _watch(self) -> None:
        try:
            store = _store(PATIENCE_SECONDS)
            while not _ENDING.wait(LOOK_SECONDS):
                if store.check([self._key]):
                    self._end(int(store.get(self._key).split()[0]), GRACE_SECONDS)
        except RuntimeError:
            if not _ENDING.wait(LOOK_SECONDS):  # a peer that ended in order may be a moment ahead
                sys.stderr.write(f"process {self._rank}: the process that holds the store is gone\n")
                self._end(1, 0)

    def _end(self, code: int, grace: float) -> None:
        if _ENDING.wait(grace):
            return
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _store(seconds: float) -> TCPStore:
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=seconds),
    )
