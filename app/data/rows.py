"""Token rows on disk, mapped into memory: what the loader takes from, row by row."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Of each row: where its tokens and its place end, how many tokens are trained, hashes of its ids and of its
# mask (of the weights, where some are neither 0 nor 1), and the hash that decides between training and evaluation;
# then, -1 where it has none, the number of its class in the store and the first token of the second side of a pair.
ENTRY = np.dtype(
    [
        *(("tokens", "<i8"), ("place", "<i8"), ("labels", "<i8"), ("ids", "<u8"), ("mask", "<u8")),
        *(("side", "<u8"), ("class", "<i4"), ("second", "<i4")),
    ]
)

# A stretch of trained tokens of one row that count neither 0 nor 1 in the loss.
WEIGHED = np.dtype([("row", "<i8"), ("start", "<i4"), ("stop", "<i4"), ("weight", "<f4")])
_SORTED = 1 << 22  # rows


_WHOLE = re.compile(r"[-+]?[0-9]{1,18}")


@dataclass(frozen=True)
class Store:
    """All rows of a cache entry, as the files hold them."""

    tokens: NDArray[np.int32]
    trained: NDArray[np.bool_]
    places: NDArray[np.uint8]
    index: NDArray[np.void]  # of ENTRY
    again: NDArray[np.bool_]  # of each row, whether an earlier one is equal to it
    largest_id: int
    weighed: NDArray[np.void] = field(default_factory=lambda: np.empty(0, WEIGHED))  # by row and place
    classes: tuple[str, ...] = ()  # names, by the numbers in the index

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Where each row's tokens begin, and where the last one's end."""
        return np.concatenate([np.zeros(1, np.int64), self.index["tokens"]])

    @cached_property
    def weighed_rows(self) -> NDArray[np.int64]:
        """Of each stretch, its row."""
        return np.ascontiguousarray(self.weighed["row"])

    @cached_property
    def surplus(self) -> NDArray[np.float64]:
        """By how much the trained tokens of each row count more than their number."""
        more = (self.weighed["stop"] - self.weighed["start"]) * (
            self.weighed["weight"].astype(np.float64) - 1
        )
        return np.asarray(np.bincount(self.weighed_rows, more, minlength=len(self.index)), np.float64)


def in_order(names: Iterable[str]) -> list[str]:
    """Classes in the order that a model has them: whole numbers by size, words by their characters."""
    known = list(names)
    if all(_WHOLE.fullmatch(name) for name in known):
        return sorted(known, key=lambda name: (int(name), name))
    return sorted(known)


class TokenRows:
    """Immutable; a selection shares the files of the whole, and a mix the files of its sources."""

    def __init__(self, *stores: Store, chosen: NDArray[np.int64] | None = None) -> None:
        self._stores = stores
        sizes = [0, *(len(store.index) for store in stores)]
        self._firsts: NDArray[np.int64] = np.cumsum(sizes)  # of each store, counted through all of them
        self._chosen = np.arange(self._firsts[-1]) if chosen is None else chosen

    @classmethod
    def joined(cls, parts: Sequence["TokenRows"]) -> "TokenRows":
        """The rows of all parts, one part after the other."""
        stores = [store for part in parts for store in part._stores]
        before = np.cumsum([0, *(part._firsts[-1] for part in parts)])
        chosen = [part._chosen + start for part, start in zip(parts, before, strict=False)]
        return cls(*stores, chosen=np.concatenate(chosen))

    def __len__(self) -> int:
        return len(self._chosen)

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each row."""
        every = np.concatenate([np.diff(store.starts) for store in self._stores])
        lengths = every[self._chosen].astype(np.int32)
        lengths.flags.writeable = False
        return lengths

    def ids(self, i: int) -> NDArray[np.int32]:
        """The tokens of row i, as a read-only view of the file."""
        store, row = self._at(i)
        return store.tokens[store.starts[row] : store.starts[row + 1]]

    def trained(self, i: int) -> NDArray[np.bool_]:
        """Which tokens of row i the model must predict; never the first."""
        store, row = self._at(i)
        return store.trained[store.starts[row] : store.starts[row + 1]]

    def weights(self, i: int) -> NDArray[np.float32] | None:
        """How much each token of row i counts in the loss, 0 where it is not trained; None: trained ones count 1."""
        store, row = self._at(i)
        if not len(store.weighed):
            return None
        first, end = np.searchsorted(store.weighed_rows, [row, row + 1])
        if first == end:
            return None
        weights = self.trained(i).astype(np.float32)
        for stretch in store.weighed[first:end]:
            weights[stretch["start"] : stretch["stop"]] = stretch["weight"]
        return weights

    def class_of(self, i: int) -> str:
        """The name of the class of row i, which is an example."""
        store, row = self._at(i)
        name: str = store.classes[store.index["class"][row]]
        return name

    def second(self, i: int) -> int:
        """Where the second side of row i begins; -1 where models are told of no sides."""
        store, row = self._at(i)
        return int(store.index["second"][row])

    def class_counts(self) -> dict[str, int]:
        """Rows of each class that has any, in the order of `in_order`; nothing where rows are no examples."""
        names, codes = self._classes
        if not names:
            return {}
        counted: list[int] = np.bincount(codes, minlength=len(names)).tolist()
        return {name: number for name, number in zip(names, counted, strict=True) if number}

    def of_classes(self, known: Sequence[str]) -> NDArray[np.bool_]:
        """Which rows are of one of these classes."""
        names, codes = self._classes
        return np.isin(codes, [at for at, name in enumerate(names) if name in set(known)])

    @cached_property
    def _classes(self) -> tuple[list[str], NDArray[np.int64]]:
        """All names, whatever store has them, and for each row the number of its own."""
        names = in_order({name for store in self._stores for name in store.classes})
        every = [
            np.array([names.index(name) for name in store.classes], np.int64)[store.index["class"]]
            if store.classes
            else np.full(len(store.index), -1, np.int64)
            for store in self._stores
        ]
        return names, np.concatenate(every)[self._chosen]

    def place(self, i: int) -> str:
        """Where row i came from: "train.jsonl:17", or "org/name[train] row 17"."""
        store, row = self._at(i)
        ends = store.index["place"]
        start = ends[row - 1] if row else 0
        return store.places[start : ends[row]].tobytes().decode()

    @property
    def label_counts(self) -> NDArray[np.int64]:
        """Trained tokens of each row."""
        return self._of_index("labels")

    @cached_property
    def num_trained(self) -> int:
        """Trained tokens of all rows."""
        return int(self.label_counts.sum())

    @cached_property
    def label_weight(self) -> float:
        """What all trained tokens count together: their number, where no weight says otherwise."""
        if not self._has_weights:
            return float(self.num_trained)
        surplus = np.concatenate([store.surplus for store in self._stores])
        return self.num_trained + float(surplus[self._chosen].sum())

    @property
    def num_weighted(self) -> int:
        """Rows with tokens that count neither 0 nor 1."""
        if not self._has_weights:
            return 0
        every = [np.bincount(store.weighed_rows, minlength=len(store.index)) > 0 for store in self._stores]
        return int(np.concatenate(every)[self._chosen].sum())

    @property
    def _has_weights(self) -> bool:
        return any(len(store.weighed) for store in self._stores)

    @cached_property
    def largest_id(self) -> int:
        """Of all tokens in the files, those of rows that were not chosen too."""
        return max(store.largest_id for store in self._stores)

    @property
    def digests(self) -> NDArray[np.uint64]:
        """A hash of each row's token ids."""
        return self._of_index("ids")

    @property
    def contents(self) -> NDArray[np.uint64]:
        """A hash of each row's token ids, and of which are trained with which weight."""
        return _content(self.digests, self._of_index("mask"))

    @property
    def again(self) -> NDArray[np.bool_]:
        """Which rows are equal to an earlier one."""
        if len(self._stores) == 1 and np.array_equal(self._chosen, np.arange(len(self))):
            return self._stores[0].again[: len(self)]
        return equal_to_earlier(self.contents)

    @property
    def sides(self) -> NDArray[np.uint64]:
        """A hash that rows share which must not be parted between training and evaluation."""
        return self._of_index("side")

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all token ids, masks and weights, in their order."""
        content = hashlib.sha256(self._of_index("ids").tobytes())
        content.update(self._of_index("mask").tobytes())
        return content.hexdigest()

    def select(self, indices: Sequence[int] | NDArray[np.int64]) -> "TokenRows":
        """The rows at `indices`, in that order."""
        return TokenRows(*self._stores, chosen=self._chosen[np.asarray(indices, np.int64)])

    def _at(self, i: int) -> tuple[Store, int]:
        """Where row i is: its store, and its number there."""
        row = int(self._chosen[i])
        store = int(np.searchsorted(self._firsts, row, "right")) - 1 if len(self._stores) > 1 else 0
        return self._stores[store], row - int(self._firsts[store])

    def _of_index(self, field: str) -> NDArray[Any]:
        every = [np.ascontiguousarray(store.index[field]) for store in self._stores]
        return (every[0] if len(every) == 1 else np.concatenate(every))[self._chosen]


def contents_of(index: NDArray[np.void]) -> NDArray[np.uint64]:
    """A hash of each row's token ids and mask."""
    return _content(index["ids"], index["mask"])


def _content(ids: NDArray[np.uint64], mask: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return np.asarray(ids + mask * np.uint64(0xC2B2AE3D27D4EB4F), np.uint64)


def equal_to_earlier(contents: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which of them were there before. Some millions at a time are sorted, equal ones together."""
    again = np.ones(len(contents), np.bool_)
    parts = np.uint64(1 + len(contents) // _SORTED)
    part_of = contents % parts
    for part in range(int(parts)):
        at = np.flatnonzero(part_of == part)
        again[at[np.unique(contents[at], return_index=True)[1]]] = False
    return again
