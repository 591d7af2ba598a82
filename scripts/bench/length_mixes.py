"""Token rows of several length mixes, made of the sample data by the program's own data part."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.data.rows import ENTRY, Store, TokenRows

_TOTAL = 160_000  # tokens of a joined mix: dozens of bins, so that packing has a choice


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lengths of rows as chats have them: many short, a few at the limit."""

    median: int
    sigma: float
    clip: int


JOINED = {
    "chat": Lognormal(median=120, sigma=0.8, clip=512),
    "long chat": Lognormal(median=490, sigma=0.8, clip=2048),
}
MIXES = ("sample", *JOINED)


def mix(name: str, sample: TokenRows, seed: int) -> TokenRows:
    """The sample rows as they are, or joined, in random order, to rows of lengths drawn from the mix."""
    if name == "sample":
        return sample
    law, random = JOINED[name], np.random.default_rng(seed)
    tokens, trained = _endless(sample, random), []
    rows: list[NDArray[np.int32]] = []
    while sum(map(len, rows)) < _TOTAL:
        drawn = int(random.lognormal(np.log(law.median), law.sigma))
        ids, mask = tokens(min(max(drawn, 8), law.clip))
        rows.append(ids)
        trained.append(mask)
    return _as_rows(rows, trained)


def _endless(
    sample: TokenRows, random: np.random.Generator
) -> Callable[[int], tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    order = _orders(len(sample), random)
    held_ids, held_mask = np.empty(0, np.int32), np.empty(0, np.bool_)

    def take(size: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        nonlocal held_ids, held_mask
        while len(held_ids) < size:
            row = next(order)
            held_ids = np.concatenate([held_ids, sample.ids(row)])
            held_mask = np.concatenate([held_mask, sample.trained(row)])
        ids, mask = held_ids[:size], held_mask[:size].copy()
        mask[0] = False  # nothing comes before the first token
        held_ids, held_mask = held_ids[size:], held_mask[size:]
        return ids, mask

    return take


def _orders(size: int, random: np.random.Generator) -> Iterator[int]:
    while True:
        yield from random.permutation(size).tolist()


def _as_rows(rows: list[NDArray[np.int32]], trained: list[NDArray[np.bool_]]) -> TokenRows:
    index = np.zeros(len(rows), ENTRY)
    index["tokens"] = np.cumsum([len(ids) for ids in rows])
    index["labels"] = [int(mask.sum()) for mask in trained]
    return TokenRows(Store(np.concatenate(rows), np.concatenate(trained), np.empty(0, np.uint8), index))
