"""Why counted rows are not trained on: what a run stops at, also where a survey has gone past it."""

from collections.abc import Iterator
from dataclasses import replace

from app.config.schema import DatasetConfig
from app.data.overflow import too_many_dropped
from app.data.report import Counts
from app.data.shapes import Source

_SHOWN = 5  # bad rows in one error


def stops(config: DatasetConfig, source: Source, counts: Counts) -> Iterator[str]:
    """Every problem of one source, in words; none if a run goes on with it."""
    named = f"{source.key}={source.name}"
    if config.on_bad_row == "error":
        yield from bad_row_problems(counts)
    if config.on_overflow == "error" and counts.over_long:
        yield (
            f"{named}: {counts.over_long:,} samples are longer than dataset.max_length={config.max_length}, the longest"
            f" {counts.longest:,} tokens; raise it, or set dataset.on_overflow=truncate or drop"
        )
    if config.on_unstable_template == "error" and counts.unstable:
        yield (
            f"{named}: the chat template rewrites earlier turns of {counts.unstable:,} conversations; set"
            " dataset.on_unstable_template=expand (a sample for each turn) or last (one for the last)"
        )
    too_many = too_many_dropped(counts, config.on_overflow, config.max_length, config.format)
    yield from [too_many] if too_many else _nothing_left(named, config, counts)


def unstopped(config: DatasetConfig) -> DatasetConfig:
    """The same rows by settings that no row stops: what would, is left out and counted."""
    policy = "drop" if config.on_overflow == "error" else config.on_overflow
    unstable = "expand" if config.on_unstable_template == "error" else config.on_unstable_template
    return replace(config, on_bad_row="skip", on_overflow=policy, on_unstable_template=unstable)


def _nothing_left(named: str, config: DatasetConfig, counts: Counts) -> Iterator[str]:
    if not counts.rows_read:
        yield f"{named}: has no rows"
    elif not counts.rows_kept and not (counts.bad_rows and config.on_bad_row == "error"):
        bad = f"; {counts.bad_rows:,} bad, the first {counts.first_problem}" if counts.bad_rows else ""
        long = f"; {counts.dropped:,} longer than dataset.max_length={config.max_length}"
        yield (
            f"{named}: of {counts.rows_read:,} rows none can be trained on{bad}{long if counts.dropped else ''}"
        )


def bad_row_problems(counts: Counts) -> list[str]:
    """Each reason once, since all rows may have the same one; none if no row is bad."""
    problems = [
        f"{counts.bad_first[reason]}{_more(rows - 1)}: {reason}"
        for reason, rows in list(counts.bad_by_reason.items())[:_SHOWN]
    ]
    if problems:
        problems[-1] += " (dataset.on_bad_row=skip leaves bad rows out)"
    return problems


def _more(rows: int) -> str:
    return f" and {rows:,} more row{'s' * (rows > 1)}" if rows else ""
