"""Work shared with a copy of this process: the same answers in the same order, whatever becomes of the copy."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.config.load import compose_run
from app.plan import forked
from app.plan.forked import Begun, shared_out
from app.plan.look import Look
from app.plan.machine import Machine
from app.plan.turning import Turning


def children() -> str:
    """Those of other tests' making among them."""
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()


@pytest.fixture(autouse=True)
def _two_cores_and_no_copy_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(forked, "_can_fork", lambda: True)
    before = children()
    yield
    assert children() == before


def slowly(item: int) -> tuple[int, int]:
    time.sleep(0.02)
    return item * item, os.getpid()


def test_answers_are_in_order_and_of_both() -> None:
    found = shared_out(slowly, range(20))
    assert [square for square, _ in found] == [item * item for item in range(20)]
    assert len({who for _, who in found}) == 2
    assert os.getpid() in {who for _, who in found}


def test_a_copy_begins_with_the_first() -> None:
    def both_busy(item: int) -> int:
        time.sleep(0.1)
        return os.getpid() if item < 2 else 0

    first, second, *_ = shared_out(both_busy, range(3))
    assert first != os.getpid() == second


@pytest.mark.parametrize("items", [0, 1])
def test_so_few_are_done_here(items: int) -> None:
    assert {who for _, who in shared_out(slowly, range(items))} <= {os.getpid()}


def _raise() -> None:
    raise ValueError("in the copy")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("fails", [_raise, _kill])
def test_what_a_copy_fails_at_is_done_here(fails: Callable[[], None]) -> None:
    me = os.getpid()

    def work(item: int) -> int:
        time.sleep(0.02)
        if os.getpid() != me:
            fails()
        return item + 1

    assert shared_out(work, range(9)) == list(range(1, 10))


def test_what_fails_here_fails() -> None:
    me = os.getpid()

    def work(item: int) -> int:
        time.sleep(0.02)
        if os.getpid() == me:
            raise ValueError("here")
        return item

    with pytest.raises(ValueError, match="here"):
        shared_out(work, range(9))


def test_what_was_begun_is_found() -> None:
    begun = Begun(os.getpid)
    assert begun.found() not in (None, os.getpid())
    assert begun.found() is None, "once"
    begun.drop()


def test_what_was_begun_is_dropped_at_once() -> None:
    before = time.perf_counter()
    Begun(lambda: time.sleep(60)).drop()
    assert time.perf_counter() - before < 10


@pytest.mark.parametrize("fails", [_raise, _kill])
def test_what_was_begun_and_failed_is_not_found(fails: Callable[[], None]) -> None:
    assert Begun(fails).found() is None


def test_nothing_is_begun_where_no_copy_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "_can_fork", lambda: False)
    begun = Begun(os.getpid)
    assert begun.found() is None
    begun.drop()


def test_where_there_is_no_room_for_a_process_all_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    open_before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, "fork", refused)
    assert Begun(os.getpid).found() is None
    assert {who for _, who in shared_out(slowly, range(3))} == {os.getpid()}
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


def test_knobs_are_those_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["recipe=full", "model.weights=random", "training.recompute=false"]
    machine = Machine("some", "some", "gpu", 10_000_000, 0, context_is_measured=True)
    run = compose_run(words)
    together, alone = Look(words, machine), Look(words, machine)
    forks = Turning(together).knobs(together.at(run))
    monkeypatch.setattr(forked, "_can_fork", lambda: False)
    assert forks == Turning(alone).knobs(alone.at(run))
    assert len(forks) > 3
