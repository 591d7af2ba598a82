"""Samples longer than `dataset.max_length`: every policy counts what it does; nothing is cut silently."""

from collections.abc import Callable

from app.data.encoding import Sample
from app.data.report import Counts
from app.errors import DataError

_MOST = 0.05  # of the samples may be dropped before `auto` calls it an error


def policy_for(on_overflow: str, fmt: str) -> str:
    """What `auto` stands for: text goes on in the next piece, a chat without its end is worth nothing."""
    if on_overflow == "auto":
        return "split" if fmt == "text" else "drop"
    assert on_overflow != "split" or fmt == "text", (on_overflow, fmt)
    return on_overflow


def fit(sample: Sample, max_length: int, policy: str, place: str, counts: Counts) -> list[Sample]:
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
    if not kept:
        counts.dropped += 1
        counts.tokens_lost += length
    elif policy == "split":
        counts.split += 1
        counts.pieces += len(kept)
    else:
        counts.truncated += 1
        counts.tokens_lost += length - max_length
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
    """Nothing, if all that is trained comes after the cut."""
    weights = None if sample.weights is None else sample.weights[:max_length]
    kept = Sample(sample.ids[:max_length], sample.trained[:max_length], weights=weights)
    return [kept] if kept.trained.any() else []


def _split(sample: Sample, max_length: int) -> list[Sample]:
    """Pieces share one token, the first of the next, which is only read: each is trained exactly once."""
    assert sample.weights is None, "only text is split, and its tokens all count alike"
    starts = range(0, len(sample.ids) - 1, max_length - 1)
    pieces = [slice(start, start + max_length) for start in starts]
    kept = [Sample(sample.ids[piece], sample.trained[piece].copy()) for piece in pieces]
    for piece in kept:
        piece.trained[0] = False
    return kept


POLICIES: dict[str, Callable[[Sample, int], list[Sample]]] = {
    "truncate": _truncate,
    "drop": _drop,
    "split": _split,
}
