"""Samples longer than `dataset.max_length`: every policy counts what it does; nothing is cut silently."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from app.config.row_formats import ROW_FORMATS
from app.data.data_report import RowCounts
from app.data.labels import parts_of
from app.data.tokenizer import Tokens


def policy_for(on_overflow: str, fmt: str) -> str:
    """Resolve `auto`: split plain text, truncate labelled text, drop chats."""
    if on_overflow == "auto":
        return ROW_FORMATS[fmt].overflow
    assert on_overflow != "split" or fmt == "text", (on_overflow, fmt)
    return on_overflow


def fit(sample: Tokens, max_length: int, policy: str, counts: RowCounts) -> list[Tokens]:
    """Apply the policy to one sample, and count what is lost."""
    length = len(sample.ids) + sample.more
    counts.longest = max(counts.longest, length)
    if length <= max_length:
        return [sample]
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


def fit_pair(sides: Sequence[Tokens], max_length: int, policy: str, counts: RowCounts) -> list[Tokens]:
    """Apply the policy to two answers that are never parted, by the longer one; give them as one row."""
    lengths = [len(side.ids) + side.more for side in sides]
    cut = [
        [side] if n <= max_length else POLICIES[policy](side, max_length)
        for side, n in zip(sides, lengths, strict=True)
    ]
    kept = [part for parts in cut for part in parts]
    chosen, rejected = kept if len(kept) == len(sides) else sides
    if np.array_equal(chosen.ids, rejected.ids):  # some only without their ends
        counts.equal_answers += 1
        return []
    if not fit(sides[lengths.index(max(lengths))], max_length, policy, counts) or len(kept) < len(sides):
        return []
    ids, masks = ([getattr(part, name) for part in kept] for name in ("ids", "loss_mask"))
    return [Tokens(np.concatenate(ids), np.concatenate(masks), second_start=len(ids[0]))]


def _truncate(sample: Tokens, max_length: int) -> list[Tokens]:
    """Keep the beginning; nothing, if all that is trained comes after the cut. An example keeps its special tokens."""
    if sample.text_ids is not None:
        return _truncate_example(sample, sample.text_ids, max_length)
    weights = None if sample.weights is None else sample.weights[:max_length]
    kept = Tokens(sample.ids[:max_length], sample.loss_mask[:max_length], weights=weights, label=sample.label)
    return [kept] if kept.loss_mask.any() else []


def _split(sample: Tokens, max_length: int) -> list[Tokens]:
    """Cut into pieces that overlap by one token, which only the first of the two trains: each is trained once."""
    assert sample.weights is None, "only text is split, and its tokens all count alike"
    parts = []
    for at in range(0, len(sample.ids) - 1, max_length - 1):
        mask = sample.loss_mask[at : at + max_length].copy()
        mask[0] = sample.loss_mask[0] and at == 0
        parts.append(Tokens(sample.ids[at : at + max_length], mask))
    return parts


def _truncate_example(sample: Tokens, text_ids: np.ndarray, max_length: int) -> list[Tokens]:
    """Cut the ends of its texts, that of the longer one first, as tokenizers do it; of words with tags, those too."""
    lengths = [int((text_ids == side).sum()) for side in (0, 1)]
    available = max_length - int((text_ids < 0).sum())
    if available < 1:
        return []
    stays = text_ids < 0
    for side, number in enumerate(_kept_lengths(lengths, available)):
        stays[np.flatnonzero(text_ids == side)[:number]] = True
    second, mask = sample.second_start, sample.loss_mask[stays]
    if sample.loss_mask.any() and not mask.any():
        return []
    first_tags = json.dumps(parts_of(str(sample.label))[: int(mask.sum())], ensure_ascii=False)
    kept = replace(
        sample,
        ids=sample.ids[stays],
        loss_mask=mask,
        label=first_tags if mask.any() else sample.label,
        text_ids=text_ids[stays],
        second_start=int(stays[:second].sum()) if second >= 0 else second,
    )
    return [kept]


def _kept_lengths(lengths: list[int], available: int) -> list[int]:
    short = min(lengths)
    long = max(short, available - short)
    if short + long > available:
        short, long = available // 2, available - available // 2
    return [short, long] if lengths[0] <= lengths[1] else [long, short]


POLICIES: dict[str, Callable[[Tokens, int], list[Tokens]]] = {
    "truncate": _truncate,
    "drop": lambda _sample, _max_length: [],
    "split": _split,
}
