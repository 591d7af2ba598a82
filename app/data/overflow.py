"""Samples longer than `dataset.max_length`: every policy counts what it does; nothing is cut silently."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from app.config.dataset import LABELLED_FORMATS
from app.data.data_report import Counts
from app.data.tokenizer import Parts, Tokens
from app.errors import DataError


def policy_for(on_overflow: str, fmt: str) -> str:
    """What `auto` stands for: text goes on in the next piece, what a text is about shows early, and a chat without
    its end is worth nothing.
    """
    if on_overflow == "auto":
        return "split" if fmt == "text" else "truncate" if fmt in LABELLED_FORMATS else "drop"
    assert on_overflow != "split" or fmt == "text", (on_overflow, fmt)
    return on_overflow


def fit(sample: Tokens, max_length: int, policy: str, place: str, counts: Counts) -> list[Tokens]:
    """What is kept of a sample; `counts` is told what is not."""
    length = len(sample.ids)
    counts.longest = max(counts.longest, length)
    if length <= max_length:
        return [sample]
    if policy == "error":
        raise DataError(
            f"{place}: {length:,} tokens, more than dataset.max_length={max_length}; raise it, or set"
            " dataset.on_overflow=truncate or drop"
        )
    counts.too_long(length)
    kept = POLICIES[policy](sample, max_length)
    if policy == "split":
        counts.split += 1
        counts.pieces += len(kept)
    elif kept:
        counts.truncated += 1
        counts.tokens_lost += length - max_length
    else:
        counts.dropped += 1
        counts.tokens_lost += length
    return kept


def _drop(_sample: Tokens, _max_length: int) -> list[Tokens]:
    return []


def _truncate(sample: Tokens, max_length: int) -> list[Tokens]:
    """Nothing, if all that is trained comes after the cut. An example keeps what frames its texts."""
    if sample.owner is not None:
        return _shortened(sample, sample.owner, max_length)
    weights = None if sample.weights is None else sample.weights[:max_length]
    kept = Tokens(sample.ids[:max_length], sample.trained[:max_length], weights=weights)
    return [kept] if kept.trained.any() else []


def _split(sample: Tokens, max_length: int) -> list[Tokens]:
    """Parts share one token, the first of the next, which is only read: each is trained exactly once."""
    assert sample.weights is None, "only text is split, and its tokens all count alike"
    parts = []
    for at in range(0, len(sample.ids) - 1, max_length - 1):
        trained = sample.trained[at : at + max_length].copy()
        trained[0] = sample.trained[0] and at == 0
        parts.append(Tokens(sample.ids[at : at + max_length], trained))
    return parts


def _shortened(sample: Tokens, owner: Parts, max_length: int) -> list[Tokens]:
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


POLICIES: dict[str, Callable[[Tokens, int], list[Tokens]]] = {
    "truncate": _truncate,
    "drop": _drop,
    "split": _split,
}
