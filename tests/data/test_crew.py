"""Work by several processes gives what one would give, in its order, and ends with the process that wants it."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.data.crew import in_order
from app.errors import DataError, EnvironmentProblem
from tests.conftest import REPO


class Square:
    """Says who made it; does what an item tells it to."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def __call__(self, item: "int | str | Homesick") -> tuple[int, int]:
        if item == "refuse":
            raise DataError(["file.jsonl:3 is wrong", "so is line 4"])
        if item == "break":
            raise UnportableError(lambda: None)
        if item == "die" and os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGKILL)
        assert isinstance(item, int)
        print("a word that nobody asked for")
        return item * item, os.getpid()


class UnportableError(Exception):
    """Cannot be pickled."""


class Stubborn:
    """Cannot be copied."""

    def __init__(self) -> None:
        self.lock = lambda: None

    def __call__(self, item: int) -> int:
        return item + 1


class Homesick:
    """Can be copied, but not unpacked elsewhere."""

    def __reduce__(self) -> tuple[object, ...]:
        return _here_only, (os.getpid(),)

    def __call__(self, item: int) -> int:
        return item + 1


def _here_only(pid: int) -> Homesick:
    if os.getpid() != pid:
        raise ModuleNotFoundError("no such module there")
    return Homesick()


def once_others_help(last: "int | str | Homesick") -> list[tuple[int, int]]:
    """Two workers on one small square after the other, until they are there; then the last item."""
    makers: set[int] = set()

    def items() -> "Iterator[int | str | Homesick]":
        ended = time.monotonic() + 60
        while makers <= {os.getpid()} and time.monotonic() < ended:
            time.sleep(0.001)
            yield 1
        yield last

    found = []
    for made in in_order(Square(), items(), 2):
        makers.add(made[1])
        assert makers <= {os.getpid()} or workers()
        found.append(made)
    return found


def workers() -> list[str]:
    """The processes that this one has started and not ended."""
    ours = f"PPid:\t{os.getpid()}\n".encode()
    return [
        each.name
        for each in Path("/proc").glob("[0-9]*")
        if ours in content_of(each / "status") and b"serve()" in content_of(each / "cmdline")
    ]


def content_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # it has just ended
        return b""


def test_results_come_in_order_from_several_processes() -> None:
    found: list[tuple[int, int]] = []

    def items() -> Iterator[int]:
        """Until three others have made the last hundred of them."""
        ended = time.monotonic() + 120
        for number in itertools.count():
            makers = {pid for _, pid in found[-100:]}
            if (len(makers) == 3 and os.getpid() not in makers) or time.monotonic() > ended:
                return
            time.sleep(0.002)
            yield number

    for made in in_order(Square(), items(), 3):
        found.append(made)
    assert [square for square, _ in found] == [n * n for n in range(len(found))]
    makers = [pid for _, pid in found]
    assert set(makers[:4]) == {os.getpid()}
    assert len(set(makers)) == 4
    assert os.getpid() not in makers[-30:]
    assert workers() == []


def iter_slowly(count: int) -> Iterator[int]:
    for number in range(count):
        time.sleep(0.01)
        yield number


@pytest.mark.parametrize("count", [1, 3])
def test_few_items_and_one_process_start_no_other(count: int) -> None:
    found = list(in_order(Square(), range(4 if count > 1 else 40), count))
    assert {pid for _, pid in found} == {os.getpid()}


def test_nothing_is_nothing() -> None:
    assert list(in_order(Square(), [], 4)) == []


def test_a_problem_is_raised_as_it_is_and_a_fault_of_ours_has_its_traceback() -> None:
    with pytest.raises(DataError) as problem:
        once_others_help("refuse")
    assert problem.value.problems == ("file.jsonl:3 is wrong", "so is line 4")
    with pytest.raises(Exception, match="UnportableError"):
        once_others_help("break")
    assert workers() == []


def test_a_killed_worker_is_told_with_what_to_do() -> None:
    with pytest.raises(EnvironmentProblem, match=r"signal 9.*dataset\.workers=1"):
        once_others_help("die")
    assert workers() == []


@pytest.mark.parametrize("work", [Stubborn(), Homesick()])
def test_work_that_cannot_travel_is_done_here(work: Stubborn | Homesick) -> None:
    assert list(in_order(work, iter_slowly(150), 2)) == list(range(1, 151))


def test_an_item_that_cannot_be_unpacked_there_is_told_and_nobody_waits() -> None:
    with pytest.raises(ModuleNotFoundError, match="no such module there"):
        once_others_help(Homesick())
    assert workers() == []


def test_a_process_that_does_not_start_is_told_once_and_the_work_is_done_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With more to be sent than a pipe holds: the sender hears that nobody reads."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    caplog.set_level("INFO")
    work = Square()
    vars(work)["ballast"] = "x" * (1 << 20)
    found = list(in_order(work, iter_slowly(100), 3))
    assert found == [(n * n, os.getpid()) for n in range(100)]
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        "rows are prepared by one process: another one could not be started"
    ]


def test_workers_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    program = (
        "import itertools, time\n"
        "from app.data.crew import in_order\n"
        "from tests.data.test_crew import Square\n"
        "for n, (square, pid) in enumerate(in_order(Square(), itertools.count(), 2)):\n"
        "    time.sleep(0.002)\n"
        "    print(pid, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as parent:
        assert parent.stdout
        seen: set[int] = set()
        for line in parent.stdout:
            if line.strip().isdigit():
                seen.add(int(line))
            if len(seen) == 3:
                break
        left = seen - {parent.pid}
        parent.kill()
    ended = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in left) and time.monotonic() < ended:
        time.sleep(0.05)
    assert [pid for pid in left if Path(f"/proc/{pid}").exists()] == []
