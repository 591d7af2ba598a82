"""HTML page that compares runs: results, curves, settings and provenance that differ, answers."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from app.config.metrics import LOGGED, METRICS, TOLD
from app.config.settings_file import flat
from app.config.validate import format_value
from app.pages.answers import last_answers
from app.pages.curves import curves_of_several
from app.pages.read_run import SavedRun, read_run, section_of
from app.pages.render import render
from app.pages.run_page import method, status_badge
from app.tracking.compare_runs import compare_content, compare_lines, compare_programs
from app.tracking.formatting import (
    NO_VALUE,
    finite_number,
    format_bytes,
    format_count,
    format_duration,
    format_integer,
    format_number,
    format_or,
)

_UNCOMPARED_KEYS = ("output_dir", "resume")
_OF_HELD_OUT_ROWS = (*LOGGED, "objective")
_RESULTS = (
    ("held-out loss", "eval_loss", METRICS["eval_loss"].text, min),
    *((metric.label, metric.name, metric.text, min if metric.better == "lower" else max) for metric in TOLD),
    ("last training loss", "train_loss_last", format_number, min),
    ("best objective", "objective", format_number, None),
    ("steps", "steps", format_integer, None),
    ("tokens a second", "tokens_per_second", format_count, max),
    ("samples a second", "samples_per_second", format_count, max),
    ("peak memory", "peak_memory_bytes", format_bytes, min),
)


def comparison_page(folders: Sequence[Path]) -> str:
    """Compare the runs of several folders."""
    runs = [read_run(folder) for folder in folders]
    names = distinct_names(folders)
    named = list(zip(names, runs, strict=True))
    return render(
        "comparison",
        title=f"{len(runs)} runs: {', '.join(names)}",
        names=names,
        notes=[("warn", f"{name}: {remark}") for name, run in named for remark in run.remarks],
        methods=[method(run) for run in runs],
        badges=[status_badge(run.status) for run in runs],
        results=list(_results(runs)),
        times=[format_or(run.seconds(), format_duration, NO_VALUE) for run in runs],
        charts=curves_of_several(named),
        legend=[(name, at) for at, name in enumerate(names)],
        settings=_settings(runs),
        origins=[_origin(name, run, runs[0]) for name, run in named[1:]],
        answers=last_answers(named),
    )


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Paths of folders below their common parent."""
    paths = [folder.resolve() for folder in folders]
    common = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(common)) for path in paths]


def _results(runs: Sequence[SavedRun]) -> Iterator[tuple[str, list[tuple[str | None, bool]]]]:
    """Rows of results; each cell has its text, and whether it is the best. Equal rows are shown once.

    Scores of different held-out rows have no best one.
    """
    shown = []
    for name, key, formatter, better in _RESULTS:
        known = [finite_number(run.result.get(key)) for run in runs]
        there = [each for each in known if each is not None]
        if not there or known in shown:
            continue
        shown.append(known)
        rows = {section_of(run.manifest, "hashes").get("eval") for run in runs if run.result.get(key) is not None}
        unlike = len(rows) > 1 and key in _OF_HELD_OUT_ROWS
        best = better(there) if better and len(set(there)) > 1 and not unlike else None
        yield (
            f"{name} (different rows)" if unlike else name,
            [(format_or(each, formatter, NO_VALUE), each is not None and each == best) for each in known],
        )


def _settings(runs: Sequence[SavedRun]) -> list[tuple[str, ...]]:
    """Every key that differs between runs."""
    settings = [{key: format_value(value) for key, value in flat("", run.settings) if key} for run in runs]
    keys = dict.fromkeys(key for each in settings for key in each if key not in _UNCOMPARED_KEYS)
    return [
        (key, *(each.get(key, NO_VALUE) for each in settings))
        for key in keys
        if len({each.get(key) for each in settings}) > 1
    ]


def _origin(name: str, run: SavedRun, first: SavedRun) -> dict[str, Any]:
    """Differences between a run and the first."""
    then, now = first.manifest, run.manifest
    differences = [*compare_programs(then, now), *compare_content(then, now)]
    return {
        "name": name,
        "lines": compare_lines(first.lines, run.lines).summary(),
        "rows": [(each.name, each.then, each.now) for each in differences],
    }
