"""What torch's caching allocator takes from a GPU for a list of requests: more than lives at any time.

It cuts blocks of 512 bytes out of segments and joins free neighbours again, in two pools by size. Native segments have
2 MiB, 20 MiB, or the size of a large request; an expandable segment is one for each pool and grows by the same pages.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

_UNIT = 512  # every block is a multiple of it
_MIB = 1 << 20
_SMALL = _MIB  # the largest request of the pool of small ones
_SMALL_PAGE, _LARGE_PAGE = 2 * _MIB, 20 * _MIB
_OWN_SEGMENT = 10 * _MIB  # a native segment is made for a request from this size on, in steps of 2 MiB
_FAR = 1 << 50  # between segments, so that they are nobody's neighbours


@dataclass(frozen=True, slots=True)
class Footprint:
    """At their most, each for itself."""

    allocated_bytes: int  # that live, in whole units
    reserved_bytes: int  # that the process has taken from the device

    @property
    def lost_bytes(self) -> int:
        """Taken, and of no use at the peak."""
        return self.reserved_bytes - self.allocated_bytes


def footprint(events: Iterable[tuple[int, int]], kept_bytes: int = 0, *, grow: bool = True) -> Footprint:
    """Of requests (which, its bytes; below 0 when it is given back) after `kept_bytes` that were there before.

    What is given back and was never asked for is a part of those. `grow`: segments are expandable.
    """
    listed = list(events)
    allocator = Allocator(grow=grow)
    before = _freed_of_the_kept(listed)
    rest = kept_bytes - sum(map(_rounded, before.values()))
    if rest > 0:
        allocator.allocate(-1, rest)
    for which, size in before.items():
        allocator.allocate(which, size)
    for which, size in listed:
        if size > 0:
            allocator.allocate(which, size)
        elif size < 0:
            allocator.free(which)
    return allocator.footprint()


def _freed_of_the_kept(events: Iterable[tuple[int, int]]) -> dict[int, int]:
    alive: set[int] = set()
    found: dict[int, int] = {}
    for which, size in events:
        if size > 0:
            alive.add(which)
        elif which in alive:
            alive.remove(which)
        else:
            found[which] = -size
    return found


def _rounded(size: int, unit: int = _UNIT) -> int:
    return -(-size // unit) * unit


class _Block:
    """A stretch of one segment, in use or free, between its neighbours."""

    __slots__ = ("after", "before", "is_free", "size", "start")

    def __init__(self, start: int, size: int) -> None:
        self.start, self.size = start, size
        self.is_free = False
        self.before: _Block | None = None
        self.after: _Block | None = None


class _Pool:
    """Blocks of one kind, large or small, with the free ones in the order of their size."""

    def __init__(self, *, small: bool, grow: bool) -> None:
        self._small, self._grow = small, grow
        self._page = _SMALL_PAGE if small else _LARGE_PAGE
        self._free: list[tuple[int, int]] = []
        self._at: dict[int, _Block] = {}  # the free ones, by where they start
        self._last: _Block | None = None  # of the expandable segment
        self._next_segment = 0
        self.reserved = 0

    def take(self, size: int) -> _Block:
        """The smallest free block that holds it, without what it does not need; else more memory of the device."""
        block = self._best_fit(size) or (self._grown(size) if self._grow else self._segment(size))
        self._cut(block, size)
        return block

    def give_back(self, block: _Block) -> None:
        """One with its free neighbours."""
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._take_out(other)
                self._join(block, other)
        self._put(block)

    def _best_fit(self, size: int) -> _Block | None:
        place = bisect_left(self._free, (size, -1))
        if place == len(self._free):
            return None
        block = self._at[self._free[place][1]]
        # the last block can still grow, so it counts as the largest of all
        if self._grow and block is self._last and place + 1 < len(self._free):
            block = self._at[self._free[place + 1][1]]
        self._take_out(block)
        return block

    def _grown(self, size: int) -> _Block:
        """The expandable segment, longer by whole pages; a free end of it is used."""
        last = self._last
        if last is not None and last.is_free:
            self._take_out(last)
            block = last
        else:
            block = _Block(0 if last is None else last.start + last.size, 0)
            block.before = last
            if last is not None:
                last.after = block
        end = _rounded(block.start + size, self._page)
        self.reserved += end - (block.start + block.size)
        block.size = end - block.start
        self._last = block
        return block

    def _segment(self, size: int) -> _Block:
        whole = self._page if size < _OWN_SEGMENT else _rounded(size, _SMALL_PAGE)
        self.reserved += whole
        self._next_segment += _FAR
        return _Block(self._next_segment, whole)

    def _cut(self, block: _Block, size: int) -> None:
        rest = block.size - size
        if rest < _UNIT or (rest <= _SMALL and not self._small and not self._grow):
            return
        other = _Block(block.start + size, rest)
        other.before, other.after = block, block.after
        if block.after is not None:
            block.after.before = other
        block.after, block.size = other, size
        if self._last is block:
            self._last = other
        self._put(other)

    def _join(self, block: _Block, other: _Block) -> None:
        first, second = (other, block) if other.start < block.start else (block, other)
        block.start, block.size = first.start, first.size + second.size
        block.before, block.after = first.before, second.after
        if block.before is not None:
            block.before.after = block
        if block.after is not None:
            block.after.before = block
        if self._last is other:
            self._last = block

    def _put(self, block: _Block) -> None:
        block.is_free = True
        self._at[block.start] = block
        insort(self._free, (block.size, block.start))

    def _take_out(self, block: _Block) -> None:
        block.is_free = False
        del self._at[block.start]
        del self._free[bisect_left(self._free, (block.size, block.start))]


class Allocator:
    """Requests by their names; nothing is ever returned to the device."""

    def __init__(self, *, grow: bool = True) -> None:
        self._small, self._large = (_Pool(small=small, grow=grow) for small in (True, False))
        self._used: dict[int, tuple[_Pool, _Block, int]] = {}
        self._allocated = self._most = 0

    def allocate(self, which: int, size: int) -> None:
        """Asks for `size` bytes."""
        size = max(_UNIT, _rounded(size))
        pool = self._small if size <= _SMALL else self._large
        self._used[which] = pool, pool.take(size), size
        self._allocated += size
        self._most = max(self._most, self._allocated)

    def free(self, which: int) -> None:
        """Gives them back to the pool."""
        pool, block, size = self._used.pop(which)
        pool.give_back(block)
        self._allocated -= size

    def place(self, which: int) -> tuple[bool, int, int]:
        """In which pool it lies (the small one?), where, and how much it holds."""
        pool, block, _ = self._used[which]
        return pool is self._small, block.start, block.size

    def footprint(self) -> Footprint:
        """So far."""
        return Footprint(self._most, self._small.reserved + self._large.reserved)
