"""The same work by several processes, each result in the place of what it was made of.

A worker is an interpreter of its own that reads pickles and writes pickles. It ends with its pipe: none outlives a
parent that was killed.
"""

import logging
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain, islice
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any, Generic, TypeVar

from app.errors import EnvironmentProblem

_ALONE = 4  # items that are done before it is worth a second to start others
_AHEAD = 2  # items that a worker has
_MOST = 16  # the parent, which reads and writes, keeps no more of them busy

Item = TypeVar("Item")
Result = TypeVar("Result")
Fault = tuple[BaseException | None, str]
log = logging.getLogger(__name__)


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], count: int | None
) -> Generator[Result, None, None]:
    """`work` of each item, by this process until `count` others are ready; where there are few items it stays alone."""
    count = min(len(os.sched_getaffinity(0)), _MOST) if count is None else count
    left = iter(items)
    yield from map(work, islice(left, _ALONE) if count > 1 else left)
    with ExitStack() as ending:
        crew: list[_Worker[Item, Result]] | None = None
        for item in left:
            crew = _started(work, count, ending) if crew is None else crew
            if _is_ready(crew):
                yield from _dealt(crew, chain([item], left))
            else:
                yield work(item)


def _started(work: Callable[[Item], Result], count: int, ending: ExitStack) -> "list[_Worker[Item, Result]]":
    """None where the work cannot travel."""
    try:
        content = pickle.dumps(work, pickle.HIGHEST_PROTOCOL)
    except Exception as fault:  # noqa: BLE001  objects may raise anything here: one process can do the work
        log.info("rows are prepared by one process: what prepares them cannot be copied (%s)", fault)
        return []
    return [ending.enter_context(_Worker[Item, Result](content)) for _ in range(count)]


def _is_ready(crew: "list[_Worker[Item, Result]]") -> bool:
    """Whether all have loaded what they need; never waits. If one cannot, all are sent away, and it is said once."""
    try:
        return bool(crew) and all(worker.is_ready() for worker in crew)
    except Exception as fault:  # noqa: BLE001  of whatever kind: one process can do the work
        log.info("rows are prepared by one process: another one could not be started (%s)", fault)
    for worker in crew:
        worker.end()
    crew.clear()
    return False


def _dealt(crew: "list[_Worker[Item, Result]]", items: Iterator[Item]) -> Iterator[Result]:
    """In turn, so that results come in order; a worker has its next item before it is done with the one before."""
    busy: deque[_Worker[Item, Result]] = deque()
    for worker, item in zip(crew * _AHEAD, items, strict=False):
        worker.give(item)
        busy.append(worker)
    while busy:
        worker = busy.popleft()
        result = worker.take()
        for item in islice(items, 1):
            worker.give(item)
            busy.append(worker)
        yield result


class _Worker(Generic[Item, Result]):
    def __init__(self, content: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from app.data.crew import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent to hear
            env=os.environ
            | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self._process.stdin
        assert self._process.stdout
        self._to, self._from = self._process.stdin, self._process.stdout
        self._arrived, self._listening = _listen(self._from)
        self._ready = False
        self._send(content)

    def is_ready(self) -> bool:
        """Whether it has loaded what it needs. Never waits; what it failed of is raised here."""
        if not self._ready and not self._arrived.empty():
            self.take()
            self._ready = True
        return self._ready

    def give(self, item: Item) -> None:
        """Another item, to be done after those it has."""
        self._send(pickle.dumps(item, pickle.HIGHEST_PROTOCOL))

    def _send(self, content: bytes) -> None:
        with suppress(BrokenPipeError):  # `take` says what happened
            self._to.write(content)
            self._to.flush()

    def take(self) -> Result:
        """What it made of its oldest item; what it failed of is raised here."""
        told = self._arrived.get()
        if isinstance(told, _End):
            if told.fault is not None:
                raise told.fault
            code = self._process.wait()
            ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise EnvironmentProblem(
                f"a process that prepares rows {ended}. Out of memory is the usual cause;"
                " dataset.workers=1 prepares them with less."
            )
        result, (fault, words) = told
        if fault is not None:
            raise fault
        if words:
            raise RuntimeError(f"a process that prepares rows failed:\n{words}")
        made: Result = result
        return made

    def __enter__(self) -> "_Worker[Item, Result]":
        return self

    def __exit__(self, *_fault: object) -> None:
        self.end()

    def end(self) -> None:
        """Whatever it is doing; a second time changes nothing."""
        self._process.kill()
        self._process.wait()
        self._listening.join()
        for pipe in (self._to, self._from):
            with suppress(BrokenPipeError):
                pipe.close()


@dataclass(frozen=True, slots=True)
class _End:
    """Nothing more comes; `fault` where what came could not be unpacked."""

    fault: Exception | None = None


def _listen(pipe: IO[bytes]) -> "tuple[SimpleQueue[Any], Thread]":
    """What comes through a pipe, taken out of it at once: who writes never waits for who works. Last, its `_End`."""
    arrived: SimpleQueue[Any] = SimpleQueue()

    def listen() -> None:
        try:
            while True:
                arrived.put(pickle.load(pipe))
        except (EOFError, OSError, pickle.UnpicklingError):  # the other side has ended, perhaps in the middle
            arrived.put(_End())
        except Exception as fault:  # noqa: BLE001  whoever waits for it would wait for ever
            arrived.put(_End(fault))

    thread = Thread(target=listen, daemon=True)
    thread.start()
    return arrived, thread


def serve() -> None:
    """A worker, until its parent has no more for it."""
    items, results = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a print somewhere would be read as a result
    with suppress(BrokenPipeError):
        work, fault = _outcome(pickle.load, items)
        _answer(results, None, fault)
        if work is None:
            return
        arrived, _ = _listen(items)
        while not isinstance(item := arrived.get(), _End):
            _answer(results, *_outcome(work, item))
        if item.fault is not None:
            _answer(results, None, _portable(item.fault))


def _outcome(work: Callable[[Any], Any], item: Any) -> tuple[Any, Fault]:
    try:
        return work(item), (None, "")
    except Exception as fault:  # noqa: BLE001  of whatever kind, the parent raises it in the place of the result
        return None, _portable(fault)


def _portable(fault: Exception) -> Fault:
    """The exception, or its words where it cannot travel."""
    import traceback

    try:
        pickle.loads(pickle.dumps(fault))
    except Exception:  # noqa: BLE001  exceptions of libraries may raise anything when they are pickled
        return None, "".join(traceback.format_exception(fault))
    return fault, ""


def _answer(results: Any, made: Any, fault: Fault) -> None:
    pickle.dump((made, fault), results, pickle.HIGHEST_PROTOCOL)
    results.flush()
