"""Samples longer than `dataset.max_length`: every policy counts what it does; nothing is cut silently."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from app.config.dataset import LABELLED_FORMATS
from app.data.encoding import Mask, Parts, Sample
from app.data.report import Counts
from app.errors import DataError

_MOST = 0.05  # of the samples may be dropped before `auto` calls it an error


def policy_for(on_overflow: str, fmt: str) -> str:
    """What `auto` stands for: text goes on in the next piece, what a text is about shows early, and a chat without
    its end is worth nothing.
    """
    if on_overflow == "auto":
        return "split" if fmt == "text" else "truncate" if fmt in LABELLED_FORMATS else "drop"
    assert on_overflow != "split" or fmt == "text", (on_overflow, fmt)
    return on_overflow


def fit(sample: Sample, max_length: int, policy: str, place: str, counts: Counts) -> list[Sample]:
    """What is kept of a sample; `counts` is told what is not."""
    text = LongText(max_length, policy)
    kept = text.add(sample)
    return kept + text.end(place, counts)


class LongText:
    """A sample that comes in pieces; no more of it is held than a row may have, and the piece that came last."""

    def __init__(self, max_length: int, policy: str) -> None:
        self._max_length = max_length
        self._policy = policy
        self._length = 0
        self._gone = 0  # samples that were made of the beginning
        self._rest: Sample | None = None

    def add(self, piece: Sample) -> list[Sample]:
        """What is whole with it."""
        self._length += len(piece.ids)
        self._rest = piece if self._rest is None else _joined(self._rest, piece)
        if self._policy == "split":
            return list(self._split())
        is_whole = self._rest.owner is not None  # an example is cut in the middle, where its texts end
        if len(self._rest.ids) > self._max_length + 1 and not is_whole:  # one more shows that it is too long
            self._rest = _first(self._rest, self._max_length + 1)
        return []

    def _split(self) -> Iterator[Sample]:
        """Pieces share one token, the first of the next, which is only read: each is trained exactly once."""
        assert self._rest is not None
        assert self._rest.weights is None, "only text is split, and its tokens all count alike"
        ids, trained, size = self._rest.ids, self._rest.trained, self._max_length
        at = 0
        while len(ids) - at > size:
            self._gone += 1
            yield Sample(
                ids[at : at + size], _only_read_first(trained[at : at + size], first=self._gone == 1)
            )
            at += size - 1
        if at:
            self._rest = Sample(ids[at:], _only_read_first(trained[at:], first=False))

    def end(self, place: str, counts: Counts) -> list[Sample]:
        """The rest. `counts` is told what became of the whole."""
        length, max_length = self._length, self._max_length
        counts.longest = max(counts.longest, length)
        if self._rest is None or length <= max_length:
            return [] if self._rest is None else [self._rest]
        if self._policy == "error":
            raise DataError(
                f"{place}: {length:,} tokens, more than dataset.max_length={max_length}; raise it, or set"
                " dataset.on_overflow=truncate or drop"
            )
        counts.too_long(length)
        kept = POLICIES[self._policy](self._rest, max_length)
        if self._policy == "split":
            counts.split += 1
            counts.pieces += self._gone + len(kept)
        elif kept:
            counts.truncated += 1
            counts.tokens_lost += length - max_length
        else:
            counts.dropped += 1
            counts.tokens_lost += length
        return kept


def too_many_dropped(counts: Counts, on_overflow: str, max_length: int, fmt: str) -> str | None:
    """What is wrong if `auto` dropped so much that it is more likely a mistake."""
    made = counts.samples + counts.held_out + counts.left_over + counts.dropped
    if on_overflow != "auto" or fmt == "text" or counts.dropped <= _MOST * made:
        return None
    return (
        f"dataset.max_length={max_length}: {counts.dropped:,} of {made:,} samples of {counts.source}"
        f" ({counts.dropped / made:.1%}) are longer, the longest {counts.longest:,} tokens; raise it, or"
        " choose their fate: dataset.on_overflow=truncate or drop"
    )


def _drop(_sample: Sample, _max_length: int) -> list[Sample]:
    return []


def _truncate(sample: Sample, max_length: int) -> list[Sample]:
    """Nothing, if all that is trained comes after the cut. An example keeps what frames its texts."""
    if sample.owner is not None:
        return _shortened(sample, sample.owner, max_length)
    kept = _first(sample, max_length)
    return [kept] if kept.trained.any() else []


def _keep(sample: Sample, _max_length: int) -> list[Sample]:
    return [sample]


def _shortened(sample: Sample, owner: Parts, max_length: int) -> list[Sample]:
    """The ends of its texts cut off, that of the longer one first, as tokenizers do it."""
    sizes = [int((owner == side).sum()) for side in (0, 1)]
    room = max_length - int((owner < 0).sum())
    if room < 1:
        return []
    kept = _shares(sizes, room)
    stays = owner < 0
    for side, number in enumerate(kept):
        stays[np.flatnonzero(owner == side)[:number]] = True
    second = sample.second
    return [
        replace(
            sample,
            ids=sample.ids[stays],
            trained=sample.trained[stays],
            owner=owner[stays],
            second=int(stays[:second].sum()) if second >= 0 else second,
        )
    ]


def _shares(sizes: list[int], room: int) -> list[int]:
    """What each of two texts keeps."""
    short = min(sizes)
    long = max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    return [short, long] if sizes[0] <= sizes[1] else [long, short]


POLICIES: dict[str, Callable[[Sample, int], list[Sample]]] = {
    "truncate": _truncate,
    "drop": _drop,
    "split": _keep,  # what is left of it: it was split before
}


def _first(sample: Sample, length: int) -> Sample:
    weights = None if sample.weights is None else sample.weights[:length]
    return Sample(sample.ids[:length], sample.trained[:length], weights=weights)


def _joined(one: Sample, two: Sample) -> Sample:
    return Sample(np.concatenate([one.ids, two.ids]), np.concatenate([one.trained, two.trained]))


def _only_read_first(trained: Mask, *, first: bool) -> Mask:
    """Of all but the first part: what its first token is, the part before it has learned."""
    if first:
        return trained
    kept = trained.copy()
    kept[0] = False
    return kept
