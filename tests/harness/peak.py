"""The most memory that a process takes while something is done."""

import threading
from collections.abc import Callable


class Peak:
    """Largest number of bytes above those of the start, looked at all the time."""

    def __init__(self, resident: Callable[[], int]) -> None:
        self._resident, self.above = resident, 0

    def __enter__(self) -> "Peak":
        self._before = self._resident()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.002):
            self.above = max(self.above, self._resident() - self._before)
