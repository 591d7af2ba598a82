"""Displayed rows: training rows with their loss mask, and eval prompts with answers of the current model."""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from app.data.data_report import SourceShare
from app.data.length_statistics import histogram
from app.data.objectives import Objective
from app.data.token_dataset import TokenRows
from app.distributed.launch import world
from app.model.training_model import TrainingModel, evaluating
from app.oom_retry import try_or_none
from app.tasks.interface import HeldOutRows
from app.tasks.table import IMPLEMENTATIONS
from app.tracking.formatting import Sample
from app.tracking.recorder import Recorder
from app.training.plan import Plan

PREVIEW_ROWS = 4
MAX_STRETCHES = 200  # per preview row
MAX_CHARACTER_TOKENS = 4  # bytes per UTF-8 character
MAX_STRETCH_TOKENS = 160  # half from its start and half from its end


def preview(
    rows: TokenRows, objective: Objective, tokenizer: Any, shares: Iterable[SourceShare] = (), *, first: bool = False
) -> dict[str, Any]:
    """Return training rows spread over the data, or the `first` ones, with their trained tokens.

    For a mix with these `shares`, include at least one row per source.
    """
    sources = [*_distinct_rows(shares)] or [range(len(rows))]
    chosen = list[int]()
    for place, source in enumerate(sources):
        count = min(len(source), max(1, len(range(place, PREVIEW_ROWS, len(sources)))))
        places = range(count) if first else np.linspace(0, len(source) - 1, count).astype(int).tolist()
        chosen += [source[i] for i in places]
    return {
        "marked": objective.marked,
        "rows": [_row(rows, i, objective, tokenizer) for i in chosen],
        "lengths": histogram(rows.lengths),
    }


def _distinct_rows(shares: Iterable[SourceShare]) -> Iterator[range]:
    """Yield the distinct rows of each source, without repetitions by weight."""
    begin = 0
    for share in shares:
        times = max(1, int(share.weight))  # repeated rows are next to each other
        distinct = range(begin, begin + share.drawn, times)[: share.samples]
        begin += share.drawn
        if distinct:
            yield distinct


def _row(rows: TokenRows, i: int, objective: Objective, tokenizer: Any) -> dict[str, Any]:
    ids, (marks, answer) = rows.ids(i).tolist(), objective.shown(rows, i)
    edges = [0, *(np.flatnonzero(np.diff(marks)) + 1).tolist(), len(ids)]
    pieces: list[dict[str, Any]] = []
    for start, end in list(pairwise(edges))[:MAX_STRETCHES]:
        text = "".join(_texts(ids, start, end, tokenizer))
        weight = float(f"{marks[start]:.6g}")  # as typed, before rounding to float32
        other = {} if weight in (0.0, 1.0) else {"weight": weight}
        pieces.append({"text": text, "trained": bool(weight), **other})
    if len(edges) - 1 > MAX_STRETCHES:
        pieces.append({"text": f" … ({len(ids) - edges[MAX_STRETCHES]:,} more tokens)", "trained": False})
    if answer:  # not part of the text
        pieces += [{"text": "\n", "trained": False}, {"text": answer, "trained": True}]
    return {
        "place": rows.source_location(i),
        "tokens": len(ids),
        "trained_tokens": int(np.count_nonzero(marks)) or int(bool(answer)),
        "pieces": pieces,
    }


def _texts(ids: list[int], start: int, end: int, tokenizer: Any) -> Iterator[str]:
    """Decode a span of tokens; replace the middle of a long span by its length."""
    if end - start <= MAX_STRETCH_TOKENS:
        yield _text(ids, start, end, tokenizer)
        return
    head = _between_characters(ids, start + MAX_STRETCH_TOKENS // 2, tokenizer)
    tail = _between_characters(ids, end - MAX_STRETCH_TOKENS // 2, tokenizer)
    yield _text(ids, start, head, tokenizer)
    if tail > head:
        yield f" … ({tail - head:,} tokens) … "
    yield _text(ids, max(head, tail), end, tokenizer)


def _between_characters(ids: list[int], at: int, tokenizer: Any) -> int:
    """Return the last position up to `at` that does not split a character; a token may be one of several bytes."""
    for place in range(at, at - MAX_CHARACTER_TOKENS, -1):
        text: str = tokenizer.decode(ids[place - MAX_CHARACTER_TOKENS : place])
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            return place
    return at


def _text(ids: list[int], start: int, end: int, tokenizer: Any) -> str:
    """Decode with the previous token and remove its text, because some tokenizers drop a leading space."""
    alone: str = tokenizer.decode(ids[start:end])
    if start == 0:
        return alone
    before: str = tokenizer.decode(ids[start - 1 : start])
    both: str = tokenizer.decode(ids[start - 1 : end])
    return both.removeprefix(before) if both.startswith(before) else alone


def sampler(plan: Plan, model: TrainingModel, recorder: Recorder) -> Callable[[int], None]:
    """Return a function that records the answers at a step. Generation is greedy, without random numbers."""
    run, rows, takes_all = plan.run, plan.rows.data.eval, model.sharding is not None
    if rows is None or run.eval.samples == 0 or not (takes_all or world().is_first):
        return lambda _step: None
    chosen = np.linspace(0, len(rows) - 1, min(run.eval.samples, len(rows))).astype(int).tolist()
    held_out = HeldOutRows(rows, chosen, plan.rows.objective, plan.rows.tokenizer, run.eval.sample_tokens)

    def answers() -> list[Sample]:
        with evaluating(model), model.autocast(model.language_model.device):
            return IMPLEMENTATIONS[run.task.kind].answers(held_out, model)

    def show(step: int) -> None:
        if model.sharding is not None:
            recorder.samples(step, model.within(answers))
            model.sharding.at_rest()
            return
        samples = try_or_none(answers)
        if samples is None:
            recorder.message(f"step {step}: out of memory, eval samples skipped; set eval.samples=0")
        else:
            recorder.samples(step, samples)

    return show
