"""How the trials compare: the ranking, the table of it, and the best one as a command line."""

import shlex
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from app.record.lines import quantity
from app.sweep.trial import FAILED, FINISHED, Outcome, key_of

_NOTHING = "-"


def ranked(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The lowest objective first; those that have none (failed, not a number) last, in their order."""
    return sorted(outcomes, key=lambda each: (each.objective is None, each.objective or 0.0, each.number))


def best(outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """For sweep.json; `line` is what to type after `python -m app.train`. None when no trial has an objective."""
    for first in ranked(outcomes)[:1]:
        if first.objective is not None and first.status == FINISHED:
            return {
                "number": first.number,
                "objective": first.objective,
                "folder": first.folder,
                "overrides": list(first.overrides),
                "line": shlex.join(first.overrides),
            }
    return None


def leaderboard(outcomes: Sequence[Outcome]) -> Table:
    """A row for each trial, a column for each setting in which they differ."""
    settings = [key_of(text) for each in outcomes[:1] for text in each.swept]
    table = Table(
        "rank", "trial", "objective", "steps", "tokens/s", *settings, "status", box=None, pad_edge=False
    )
    for column in table.columns[:5]:
        column.justify = "right"
    for rank, each in enumerate(ranked(outcomes), 1):
        has_rank = each.objective is not None
        table.add_row(
            str(rank) if has_rank else _NOTHING,
            str(each.number),
            f"{each.objective:.4f}" if each.objective is not None else _NOTHING,
            str(each.steps) if each.steps is not None else _NOTHING,
            quantity(each.tokens_per_second) if each.tokens_per_second is not None else _NOTHING,
            *(text.partition("=")[2] for text in each.swept),
            f"{each.status} ({each.exit_code})" if each.status == FAILED else each.status,
        )
    return table
