"""Documents of all steps, drawn from a seed: all contenders get the same documents in the same steps."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scripts.bench.contest import Contest

_SHORTEST = 8
_LOOKAHEAD = 256  # number of later rows that may fill a bin
FIRST_ID = 3  # lower IDs are padding and end tokens


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Row lengths as in chats: many short ones, a few at the limit."""

    median: int
    sigma: float
    prompt: float = 0.6  # fraction of a document, not in the loss


MIXES = {
    "short": Lognormal(17, 0.3),
    "chat": Lognormal(120, 0.8),
    "long": Lognormal(490, 0.8),
    "whole": Lognormal(2**20, 0.0, prompt=0.0),  # maximum length, all tokens in the loss: for modeled figures
}


@dataclass(frozen=True, slots=True)
class Document:
    """Token IDs of a row, and which tokens are in the loss; never the first."""

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.ids)


Bin = list[Document]  # one micro-batch
Step = list[Bin]


def workload(contest: Contest, vocabulary: int) -> list[Step]:
    """Return the warmup and measured steps, and a profiled step if enabled."""
    random = np.random.default_rng(contest.seed)
    bins = _bins(_lengths(contest, random), contest.bin_tokens)
    ids = _ids(vocabulary, random)
    prompt, total = MIXES[contest.mix].prompt, contest.warm_up + contest.steps + contest.profile
    return [
        [[_document(n, prompt, ids, random) for n in next(bins)] for _ in range(contest.accumulation)]
        for _ in range(total)
    ]


def _lengths(contest: Contest, random: np.random.Generator) -> Iterator[int]:
    law, longest = MIXES[contest.mix], min(contest.length, contest.bin_tokens)
    while True:
        drawn = random.lognormal(np.log(law.median), law.sigma, 4096)
        yield from np.clip(drawn.astype(int), _SHORTEST, longest).tolist()


def _bins(lengths: Iterator[int], tokens: int) -> Iterator[list[int]]:
    """Yield bins: rows in random order until one does not fit, then the best-fitting of the next ones.

    Bins are nearly full, as with packing, and randomly mixed, as with padding.
    """
    waiting: list[int] = []
    while True:
        room, chosen = tokens, []
        while True:
            length = waiting.pop(0) if waiting else next(lengths)
            if length > room:
                waiting.insert(0, length)
                break
            chosen.append(length)
            room -= length
        waiting += [next(lengths) for _ in range(_LOOKAHEAD - len(waiting))]
        while fitting := [length for length in waiting if length <= room]:
            best = max(fitting)
            waiting.remove(best)
            chosen.append(best)
            room -= best
        yield chosen


def _ids(vocabulary: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Return cumulative token probabilities: distributed as words, to be learnable, in random order."""
    weights = random.permutation(1.0 / (np.arange(vocabulary - FIRST_ID) + 2.7))
    summed: NDArray[np.float64] = np.cumsum(weights / weights.sum())
    return summed


def _document(length: int, prompt: float, ids: NDArray[np.float64], random: np.random.Generator) -> Document:
    drawn = np.searchsorted(ids, random.random(length)).clip(max=len(ids) - 1) + FIRST_ID
    trained = np.arange(length) >= max(1, round(prompt * length))
    return Document(drawn.astype(np.int32), trained)


def digest(steps: list[Step]) -> str:
    """Return a short hash of all token IDs and labels."""
    content = hashlib.sha256()
    for document in documents(steps):
        content.update(document.ids.tobytes() + document.trained.tobytes())
    return content.hexdigest()[:16]


def documents(steps: list[Step]) -> Iterator[Document]:
    """Yield the documents of all steps, in order."""
    for step in steps:
        for packed in step:
            yield from packed


@dataclass(frozen=True, slots=True)
class Sizes:
    """Counts over several steps."""

    tokens: int
    trained: int
    documents: int


def sizes_of(steps: list[Step]) -> Sizes:
    """Return the counts, without padding."""
    rows = list(documents(steps))
    return Sizes(
        tokens=sum(len(row) for row in rows), trained=sum(int(row.trained.sum()) for row in rows), documents=len(rows)
    )
