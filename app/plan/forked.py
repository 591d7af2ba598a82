"""Work shared with a copy of this process: plans are made by Python on one core, and a machine has more."""

import os
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import BinaryIO, TypeVar

import torch

Item = TypeVar("Item")
Found = TypeVar("Found")


def shared_out(work: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
    """`work` of each item, in their order. Whoever is free takes the next one; what a copy fails at is done here."""
    if len(items) < 2 or not _can_fork():
        return [work(item) for item in items]
    waiting, writing = os.pipe()
    os.write(writing, bytes(range(len(items))))
    os.close(writing)
    answers, answering = os.pipe()
    copy = _fork()
    if copy == 0:
        _answer(work, items, waiting, answering)
    os.close(answering)
    try:
        with os.fdopen(answers, "rb") as told, os.fdopen(waiting, "rb", buffering=0) as left:
            found = _done(work, items, left)
            found |= _told(told)
    finally:
        os.waitpid(copy, 0)
    return [found[at] if at in found else work(item) for at, item in enumerate(items)]


def _can_fork() -> bool:
    """Not beside a GPU: autograd has threads for it, which no copy has."""
    return len(os.sched_getaffinity(0)) > 1 and not torch.cuda.is_available()


def _fork() -> int:
    with warnings.catch_warnings():  # of threads that wait: the copy computes with one
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _answer(work: Callable[[Item], Found], items: Sequence[Item], waiting: int, answering: int) -> None:
    """The copy, to its end; it says nothing, and leaves nothing to what runs when a process ends."""
    try:
        torch.set_num_threads(1)
        with os.fdopen(waiting, "rb", buffering=0) as left, os.fdopen(answering, "wb") as told:
            pickle.dump(_done(work, items, left), told)
    finally:
        os._exit(0)


def _done(work: Callable[[Item], Found], items: Sequence[Item], left: BinaryIO) -> dict[int, Found]:
    found = {}
    while at := left.read(1):
        found[at[0]] = work(items[at[0]])
    return found


def _told(told: BinaryIO) -> dict[int, Found]:
    try:
        found: dict[int, Found] = pickle.load(told)
    except (EOFError, pickle.UnpicklingError):
        return {}
    return found
