"""A lock that ends with its process, however that ends."""

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

# File systems that know no locks: there nobody is kept out, which is better than keeping everybody out.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}

_held: set[int] = set()


class LockedError(Exception):
    """Another process has the lock; the text says which, as far as it is known."""


def take(path: Path) -> int:
    """The lock as a number for `release`; else `LockedError`, or OSError where the file cannot be written."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(descriptor)
            if _is_still(path, descriptor):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                _held.add(descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last owner removed the file in between


def holder(path: Path) -> str | None:
    """Who has the lock now; nothing is written."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        _lock(descriptor)
    except LockedError as locked:
        return str(locked)
    finally:
        os.close(descriptor)
    return None


def release(path: Path, descriptor: int) -> None:
    """And remove the file. Nothing in a forked child, which never has the lock."""
    if descriptor in _held:
        _held.remove(descriptor)
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as fault:
        if fault.errno in _NO_LOCKS:
            return
        if not isinstance(fault, BlockingIOError):
            raise
        raise LockedError(
            os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        ) from None


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _let_go_in_child() -> None:
    # A lock belongs to all copies of the descriptor: a worker that outlives a killed run would keep it.
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
