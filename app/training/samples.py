"""Rows shown to people: training rows with their loss mask, and held-out rows answered by the model so far."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from app.config.problems import PROBLEMS, text_of
from app.data.data_report import SourceShare
from app.data.length_statistics import histogram
from app.data.objectives import Classification, Objective, WordTags
from app.data.token_dataset import TokenRows
from app.distributed.environment import world
from app.finished.generate import end_ids, generate
from app.model.training_model import TrainingModel, evaluating
from app.oom_retry import try_or_none
from app.tracking.formatting import Sample
from app.tracking.recorder import Recorder
from app.training.plan import Plan

PREVIEW_ROWS = 4
MAX_STRETCHES = 200  # of a preview row
MAX_CHARACTER_TOKENS = 4  # bytes of a character in UTF-8
MAX_STRETCH_TOKENS = 160  # half from its beginning and half from its end


def preview(
    rows: TokenRows, objective: Objective, tokenizer: Any, shares: Iterable[SourceShare] = (), *, first: bool = False
) -> dict[str, Any]:
    """Training rows spread over the data, or its `first` ones, with what the model must predict of them.

    Of a mix, whose sources have these `shares` of the rows, at least one row of each source.
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
    """Yield the rows of each source, once where its weight repeats them."""
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
        weight = float(f"{marks[start]:.6g}")  # as it was written, before rounding to float32
        other = {} if weight in (0.0, 1.0) else {"weight": weight}
        pieces.append({"text": text, "trained": bool(weight), **other})
    if len(edges) - 1 > MAX_STRETCHES:
        pieces.append({"text": f" … ({len(ids) - edges[MAX_STRETCHES]:,} more tokens)", "trained": False})
    if answer:  # no part of the text
        pieces += [{"text": "\n", "trained": False}, {"text": answer, "trained": True}]
    return {
        "place": rows.source_location(i),
        "tokens": len(ids),
        "trained_tokens": int(np.count_nonzero(marks)) or int(bool(answer)),
        "pieces": pieces,
    }


def _texts(ids: list[int], start: int, end: int, tokenizer: Any) -> Iterator[str]:
    """Decode a stretch of tokens; the middle of a long one is replaced by its length."""
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
    """The place at `at` or just before it that divides no character; a token may be one byte of several."""
    for place in range(at, at - MAX_CHARACTER_TOKENS, -1):
        text: str = tokenizer.decode(ids[place - MAX_CHARACTER_TOKENS : place])
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            return place
    return at


def _text(ids: list[int], start: int, end: int, tokenizer: Any) -> str:
    """Decode with the token before, then remove its text: some tokenizers drop a leading space."""
    alone: str = tokenizer.decode(ids[start:end])
    if start == 0:
        return alone
    before: str = tokenizer.decode(ids[start - 1 : start])
    both: str = tokenizer.decode(ids[start - 1 : end])
    return both.removeprefix(before) if both.startswith(before) else alone


@dataclass(frozen=True, slots=True)
class HeldOutRows:
    """Held-out rows, and what the model needs to answer them."""

    rows: TokenRows
    indices: list[int]
    objective: Objective
    tokenizer: Any
    max_new_tokens: int

    def text(self, ids: Any) -> str:
        """Decode without special tokens."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


def sampler(plan: Plan, model: TrainingModel, recorder: Recorder) -> Callable[[int], None]:
    """Return a function that records the answers at a step. Generation is greedy: it draws no random number."""
    run, rows, takes_all = plan.run, plan.rows.data.eval, model.sharding is not None
    if rows is None or run.eval.samples == 0 or not (takes_all or world().is_first):
        return lambda _step: None
    chosen = np.linspace(0, len(rows) - 1, min(run.eval.samples, len(rows))).astype(int).tolist()
    held_out = HeldOutRows(rows, chosen, plan.rows.objective, plan.rows.tokenizer, run.eval.sample_tokens)

    def answers() -> list[Sample]:
        with evaluating(model), model.autocast(model.language_model.device):
            return ANSWERS[run.task.kind](held_out, model)

    def show(step: int) -> None:
        if model.sharding is not None:
            recorder.samples(step, model.within(answers))
            model.sharding.at_rest()
            return
        found = try_or_none(answers)
        if found is None:
            recorder.message(f"step {step}: out of memory, so no held-out prompt was answered; set eval.samples=0")
        else:
            recorder.samples(step, found)

    return show


def _answered(held_out: HeldOutRows, model: TrainingModel) -> list[Sample]:
    """Generate from the prompt of each row."""
    pairs = [_split(held_out.rows, i) for i in held_out.indices]
    lm = model.language_model
    ends = end_ids(lm, held_out.tokenizer)
    together = model.sharding is not None  # each pass gathers the whole model
    answers = generate(lm, [prompt for prompt, _ in pairs], ends, held_out.max_new_tokens, together=together)
    return [
        Sample(prompt=held_out.text(prompt), expected=held_out.text(expected), answer=held_out.text(answer))
        for (prompt, expected), answer in zip(pairs, answers, strict=True)
    ]


def _answered_as_wanted(held_out: HeldOutRows, model: TrainingModel) -> list[Sample]:
    """Generate from prompts whose answer in the rows is wanted."""
    wanted = np.flatnonzero(held_out.rows.where_label(lambda label: label == "true"))
    count = min(len(held_out.indices), len(wanted))
    chosen = wanted[np.linspace(0, len(wanted) - 1, count).astype(int)].tolist() if count else []
    return _answered(replace(held_out, indices=chosen), model) if chosen else []


def _split(rows: TokenRows, i: int) -> tuple[list[int], list[int]]:
    """Split a row into the tokens before the first trained one, and that first trained stretch."""
    ids, trained = rows.ids(i), rows.loss_mask(i)
    start = int(np.argmax(trained))
    untrained_after = np.flatnonzero(~trained[start:])
    end = start + int(untrained_after[0]) if len(untrained_after) else len(ids)
    return ids[:start].tolist(), ids[start:end].tolist()


def _classified(held_out: HeldOutRows, model: TrainingModel) -> list[Sample]:
    """Predict the class of each row, with its probability, or its classes, or numbers."""
    problem = PROBLEMS[model.problem_kind]
    assert isinstance(held_out.objective, Classification)
    samples = []
    for i in held_out.indices:
        (row,) = held_out.objective.label(held_out.rows, i, epoch=0)
        ids = torch.from_numpy(row.ids.astype(np.int64))
        segments = None if row.second_start < 0 else (torch.arange(len(ids)) >= row.second_start).long()
        found = dict(zip(held_out.objective.names, model.values(ids, segments).tolist(), strict=True))
        answer = problem.answer(found)
        samples.append(
            Sample(
                prompt=held_out.text(row.ids),
                expected=held_out.objective.shown(held_out.rows, i)[1],
                answer=text_of(answer),
                likelihood=found.get(answer) if isinstance(answer, str) else None,
            )
        )
    return samples


def _tagged(held_out: HeldOutRows, model: TrainingModel) -> list[Sample]:
    """Predict the tag of each word of each row."""
    assert isinstance(held_out.objective, WordTags)
    names, samples = held_out.objective.names, []
    for i in held_out.indices:
        (row,) = held_out.objective.label(held_out.rows, i, epoch=0)
        found = model.predicted(torch.from_numpy(row.ids.astype(np.int64)))[row.at]
        expected, answer = (" ".join(names[at] for at in each.tolist()) for each in (row.targets, found))
        samples.append(Sample(prompt=held_out.text(row.ids), expected=expected, answer=answer))
    return samples


def _filled(held_out: HeldOutRows, model: TrainingModel) -> list[Sample]:
    """Predict the first masked tokens of each row."""
    samples = []
    for i in held_out.indices:
        (row,) = held_out.objective.label(held_out.rows, i, epoch=0)
        few = slice(held_out.max_new_tokens)
        found = model.predicted(torch.from_numpy(row.ids.astype(np.int64)))[row.at[few]]
        samples.append(
            Sample(
                prompt=held_out.tokenizer.decode(row.ids),
                expected=" ".join(held_out.text([t]) for t in row.targets[few]),
                answer=" ".join(held_out.text([t]) for t in found.tolist()),
            )
        )
    return samples


ANSWERS: dict[str, Callable[[HeldOutRows, TrainingModel], list[Sample]]] = {
    "causal": _answered,
    "masked": _filled,
    "classification": _classified,
    "tokens": _tagged,
    "preference": _answered,
    "preference_label": _answered_as_wanted,
}
