"""Work shared with a copy of this process: plans are made by Python on one core, and a machine has more."""

import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, BinaryIO, Generic, TypeVar

# torch is not imported here: a copy may be made before it is there

_MOST = 4  # processes: each has some 300 MB of its own in the end, and there are ten settings at most

Item = TypeVar("Item")
Found = TypeVar("Found")


def shared_out(work: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
    """`work` of each item, in their order; what a copy fails at is done here.

    Copies begin with the first ones, and whoever is free takes the next one: what is learned by the last ones is
    learned here.
    """
    copies_wanted = _copies(len(items))
    waiting, writing = os.pipe()
    os.write(writing, bytes(range(copies_wanted, len(items))))
    os.close(writing)
    with os.fdopen(waiting, "rb", buffering=0) as left:
        copies = [Begun(partial(_done, work, items, left, first)) for first in range(copies_wanted)]
        try:
            found = _done(work, items, left)
            for copy in copies:
                found |= copy.found() or {}
        finally:
            for copy in copies:
                copy.drop()
    return [found[at] if at in found else work(item) for at, item in enumerate(items)]


def _copies(items: int) -> int:
    """One for each other core that has something to do."""
    return max(0, min(items, len(os.sched_getaffinity(0)), _MOST) - 1) if _can_fork() else 0


class Begun(Generic[Found]):
    """Work that a copy of this process does beside it."""

    def __init__(self, work: Callable[[], Found]) -> None:
        self._copy = 0
        if not _can_fork():
            return
        self._answers, answering = os.pipe()
        try:
            self._copy = _fork()
        except OSError:  # no room for another process
            os.close(self._answers)
        else:
            if self._copy == 0:
                _say(work, answering)
        os.close(answering)

    def found(self) -> Found | None:
        """Waits for it, once; None where it failed, was dropped, or no copy could be made."""
        if not self._copy:
            return None
        with os.fdopen(self._answers, "rb") as told:
            found: Found | None = _told(told)
        self._end()
        return found

    def drop(self) -> None:
        """Nobody wants it any more."""
        if self._copy:
            os.kill(self._copy, signal.SIGKILL)
            os.close(self._answers)
            self._end()

    def _end(self) -> None:
        os.waitpid(self._copy, 0)
        self._copy = 0


def _can_fork() -> bool:
    """Not beside a GPU once torch is there: autograd has threads for it, which no copy has."""
    torch = sys.modules.get("torch")
    return len(os.sched_getaffinity(0)) > 1 and (torch is None or not torch.cuda.is_available())


def _fork() -> int:
    with warnings.catch_warnings():  # of threads that wait: the copy computes with one
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _say(work: Callable[[], Any], answering: int) -> None:
    """The copy, to its end; it says nothing else, and leaves nothing to what runs when a process ends."""
    try:
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        with os.fdopen(answering, "wb") as told:
            pickle.dump(work(), told)
    finally:
        os._exit(0)


def _done(
    work: Callable[[Item], Found], items: Sequence[Item], left: BinaryIO, first: int | None = None
) -> dict[int, Found]:
    found = {} if first is None else {first: work(items[first])}
    while at := left.read(1):
        found[at[0]] = work(items[at[0]])
    return found


def _told(told: BinaryIO) -> Any:
    """None by a copy that came to no end."""
    try:
        return pickle.load(told)
    except (EOFError, pickle.UnpicklingError):
        return None
