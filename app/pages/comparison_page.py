"""Pages that compare runs: several runs, and trials of a sweep."""

import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from app.config.kinds import LOGGED, METRICS, SUMMARY_METRICS, cost_of
from app.config.overrides import flat
from app.config.validate import format_value
from app.pages.charts import DotChart, Quantity
from app.pages.ladder_tables import measured_tables
from app.pages.page import Block, Charts, Code, Inline, Page, Paragraph, Section, Span, Table
from app.pages.read_run import SavedRun, is_run, read_run, section_of
from app.pages.run_page import curves_of_several, last_answers, method, status_badge
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
from app.tracking.output_dir import smoothed_loss

_UNCOMPARED_KEYS = ("output_dir", "resume")
_DATA_OF = {**dict.fromkeys((*LOGGED, "objective"), "eval"), "train_loss_last": "train"}  # the rows behind a result
_DATA = {"eval": "eval sets", "train": "training sets"}
_RESULTS = (
    ("eval loss", "eval_loss", METRICS["eval_loss"].text, min),
    *((metric.label, metric.name, metric.text, min if metric.better == "lower" else max) for metric in SUMMARY_METRICS),
    ("final training loss", "train_loss_last", format_number, min),
    ("best objective", "objective", format_number, None),
    ("tokens/s", "tokens_per_second", format_count, max),
    ("samples/s", "samples_per_second", format_count, max),
    ("peak memory", "peak_memory_bytes", format_bytes, min),
)
_MIN_CHANGE = 0.01  # of a meaningful difference, as a fraction
_MIN_CHANGES = dict.fromkeys(("tokens_per_second", "samples_per_second", "peak_memory_bytes"), 0.05)
_MAX_LENGTH_DIFFERENCE = 0.05  # of comparable runs
_RULE = (
    "✓ marks the best value if the difference is meaningful: separate 95% intervals for scores, more than 1% for "
    "losses and scores without an interval, more than 5% for speed and memory. Several ✓ in a row: equally good."
)
_LENGTH_RULE = (
    "Not comparable: the number of tokens differs from the other runs by more than 5%. No value of the run is marked."
)
_MAX_CURVES = 6  # for the best trials
_MIN_CHART_VALUES = 3  # of a swept key
# the status of a sweep is the first one that any trial has
_STATUSES = ("running", "stopped", "pending", "finished", "dry_run", "failed", "refused")
_UNFINISHED = ("pending", "running", "stopped")
_REPORT = "report.html"
Trial = Mapping[str, Any]


def comparison_page(folders: Sequence[Path]) -> Page:
    """Return the page that compares the runs in several folders."""
    runs = [read_run(folder) for folder in folders]
    names = distinct_names(folders)
    named = list(zip(names, runs, strict=True))
    comparable = _comparable(runs)
    results: list[Sequence[Inline]] = [
        ["method", *(Span(method(run), "small") for run in runs)],
        ["status", *(_badge(run.status) for run in runs)],
        ["length", *map(_length_text, runs, comparable)],
        *_results(runs, comparable),
        ["time", *(format_or(run.seconds(), format_duration, NO_VALUE) for run in runs)],
    ]
    settings, answers = _settings(runs), last_answers(named)
    equal = Paragraph("None: all settings are equal.")
    return Page(
        title=f"{len(runs)} runs: {', '.join(names)}",
        heading=f"Comparison of {len(runs)} runs",
        notes=[("warn", f"{name}: {remark}") for name, run in named for remark in run.remarks],
        sections=[
            Section("Results", [Table(["", *names], results, notes=[_RULE, *[_LENGTH_RULE] * (not all(comparable))])]),
            Section("Training curves", _curves(named)),
            Section("Settings that differ", [Table(["", *names], settings) if settings else equal]),
            Section(
                "Differences in metrics, program and data",
                [block for other in named[1:] for block in _origin(*other, *named[0])],
            ),
            Section("Final answers to eval prompts", [answers] if answers else []),
        ],
    )


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return the paths of folders relative to their common parent."""
    paths = [folder.resolve() for folder in folders]
    common = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(common)) for path in paths]


def _badge(status: str) -> Span:
    text, tone = status_badge(status)
    return Span(text, f"badge {tone}")


def _curves(runs: Sequence[tuple[str, SavedRun]]) -> list[Charts]:
    """Return the charts of the runs with a legend; empty if nothing was logged."""
    charts = curves_of_several(runs)
    return [Charts(charts, [(name, at) for at, (name, _) in enumerate(runs)])] if charts else []


def _length(run: SavedRun) -> tuple[int | None, float | None]:
    """Return the number of steps and tokens of a run, if known."""
    last: Mapping[str, Any] = next((line for line in reversed(run.lines) if "tokens" in line), {})
    return run.result.get("steps", last.get("step")), finite_number(last.get("tokens"))


def _length_text(run: SavedRun, is_comparable: bool) -> Inline:
    steps, tokens = _length(run)
    if steps is None:
        return NO_VALUE
    text = f"{steps:,} steps" + ("" if tokens is None else f", {format_count(tokens)} tokens")
    return text if is_comparable else Span(f"{text}: not comparable", "badge warn")


def _comparable(runs: Sequence[SavedRun]) -> list[bool]:
    """Return which runs are as long as most others, or as the longest one; by steps if not all tokens are known."""
    steps, tokens = zip(*map(_length, runs), strict=True)
    lengths = steps if None in tokens else tokens
    numbers = [length for length in lengths if length is not None]
    usual = max(numbers, key=lambda length: (sum(_is_as_long(length, other) for other in numbers), length), default=0)
    return [length is None or _is_as_long(length, usual) for length in lengths]


def _is_as_long(length: float, other: float) -> bool:
    return abs(length - other) <= _MAX_LENGTH_DIFFERENCE * max(length, other)


def _results(runs: Sequence[SavedRun], comparable: Sequence[bool]) -> Iterator[Sequence[Inline]]:
    """Yield rows of results with the best values of comparable runs marked; equal rows are shown once.

    Results on different data have no best value.
    """
    shown = []
    for name, key, formatter, better in _RESULTS:
        values = [finite_number(run.result.get(key)) for run in runs]
        if values in shown:
            continue
        shown.append(values)
        if key == "train_loss_last":
            values = [smoothed_loss(run.lines) for run in runs]
        if all(value is None for value in values):
            continue
        data = _DATA_OF.get(key, "")
        rows = {
            section_of(run.manifest, "hashes").get(data)
            for run, value in zip(runs, values, strict=True)
            if value is not None
        }
        best = _best_places(key, values, runs, better, comparable) if better and len(rows) == 1 else set[int]()
        cells = [
            Span(format_or(value, formatter) or NO_VALUE, "best" if at in best else "")
            for at, value in enumerate(values)
        ]
        yield [f"{name} (different {_DATA[data]})" if len(rows) > 1 else name, *cells]


def _best_places(
    key: str,
    values: Sequence[float | None],
    runs: Sequence[SavedRun],
    better: Callable[..., int],
    comparable: Sequence[bool],
) -> set[int]:
    """Return the places of the best value and of those hardly different from it; empty if that is all."""
    numbers = {at: value for at, value in enumerate(values) if value is not None and comparable[at]}
    if not numbers:
        return set()
    best = better(numbers, key=numbers.__getitem__)
    of_best = runs[best], numbers[best]
    close = {
        at for at, value in numbers.items() if abs(value - numbers[best]) <= _noise(key, (runs[at], value), of_best)
    }
    return close if len(close) < len(numbers) else set()


def _noise(key: str, *values: tuple[SavedRun, float]) -> float:
    """Return the largest difference that is not meaningful: the sum of the 95% margins, or a fraction of the values."""
    by_run = [section_of(run.result, "final_metrics") for run, _ in values]
    margins = [metrics[f"{key}_margin"] for metrics in by_run if f"{key}_margin" in metrics]
    if key != "eval_loss" and len(margins) == len(values):
        return float(sum(margins))
    return _MIN_CHANGES.get(key, _MIN_CHANGE) * max(abs(value) for _, value in values)


def _settings(runs: Sequence[SavedRun]) -> list[tuple[str, ...]]:
    """Return the settings that differ between runs."""
    settings = [{key: format_value(value) for key, value in flat("", run.settings) if key} for run in runs]
    keys = dict.fromkeys(key for run_settings in settings for key in run_settings if key not in _UNCOMPARED_KEYS)
    return [
        (key, *(run_settings.get(key, NO_VALUE) for run_settings in settings))
        for key in keys
        if len({run_settings.get(key) for run_settings in settings}) > 1
    ]


def _origin(name: str, run: SavedRun, first_name: str, first: SavedRun) -> Iterator[Block]:
    """Yield the differences between a run and the first one."""
    then, now = first.manifest, run.manifest
    differences = (*compare_programs(then, now), *compare_content(then, now))
    rows = [(difference.name, difference.then, difference.now) for difference in differences]
    yield Paragraph(f"{name} compared with {first_name}", "heading")
    yield Paragraph(compare_lines(first.lines, run.lines).summary(), "lines")
    equal = Paragraph("Same versions, commit, hardware, data, tokenizer and base model.")
    yield Table(["", first_name, name], rows) if rows else equal


def sweep_page(folder: Path, content: Mapping[str, Any], target: Path) -> Page:
    """Return the page for sweep.json in a folder, with links to trial pages relative to `target`."""
    trials, name, ladder = content["trials"], folder.resolve().name, content.get("ladder")
    ranked = trials if ladder else sorted(trials, key=_rank)  # rungs stay in their order
    keys = [] if ladder else list(dict.fromkeys(key for trial in trials for key in trial["values"]))
    statuses = {trial["status"] for trial in trials}
    places = ((Path(trial["folder"]).name if ladder else _name(trial), _folder(folder, trial)) for trial in ranked)
    runs = [(name, read_run(place)) for name, place in places if is_run(place) and not place.is_symlink()]
    runs = runs[:_MAX_CURVES]
    objective = _objective([run for _, run in runs])
    charts = [chart for key in keys if (chart := _chart(key, trials, objective))]
    leaderboard = [] if ladder else [_leaderboard(ranked, keys, objective, folder, target)]
    again = Code(shlex.join(content["command"]), intro="Run the same command to continue:")
    failed = [
        block
        for trial in trials
        if trial["status"] == "failed"
        for block in (Paragraph(_name(trial), "heading"), Code(trial["error"], ""))
    ]
    return Page(
        title=f"sweep {name}",
        heading=name,
        badges=[status_badge(next((status for status in _STATUSES if status in statuses), "pending"))],
        about=[Paragraph(str(folder), "soft small")],
        notes=list(_notes(trials)),
        tiles=list(_tiles(ranked, objective))[1 if ladder else 0 :],  # a ladder has no best rung
        sections=[
            Section("Best trial", _best(content, folder, objective)),
            *(measured_tables(ladder) if ladder else ()),
            Section("Leaderboard", leaderboard),
            Section("Effect of each setting", [Charts(charts)] if charts else []),
            Section(f"Training curves of the {'first rungs' if ladder else 'best trials'}", _curves(runs)),
            Section("Failed", failed),
            Section("Rerun", [again]),
        ],
    )


def _rank(trial: Trial) -> tuple[bool, float, int]:
    objective = trial["objective"]
    cost = 0.0 if objective is None else cost_of(objective, trial.get("objective_is"))
    return objective is None, cost, trial["number"]


def _name(trial: Trial) -> str:
    values = " ".join(f"{key}={value}" for key, value in trial["values"].items())
    return f"{trial['number']}: {values}" if values else Path(trial["folder"]).name


def _folder(folder: Path, trial: Trial) -> Path:
    """Return the folder of a trial inside the sweep folder, which may have been moved."""
    return folder / Path(trial["folder"]).name


def _notes(trials: Sequence[Trial]) -> Iterator[tuple[str, str]]:
    counts = Counter(trial["status"] for trial in trials)
    if counts["failed"]:
        yield "bad", f"{counts['failed']} of {len(trials)} trials failed; errors below."
    left = sum(counts[status] for status in _UNFINISHED)
    if left:
        yield "busy", f"{left} of {len(trials)} trials are unfinished; the ranking may change."


def _objective(runs: Sequence[SavedRun]) -> str:
    """Return the name of the objective that ranks the trials."""
    results = [run.result for run in runs if run.result.get("objective") is not None]
    if not results:
        return "objective"
    name = results[0].get("objective_is", "eval_loss")
    if name is None or results[0].get("eval_loss") is None:
        return "training loss"
    return "eval loss" if name == "eval_loss" else METRICS[name].label


def _tiles(ranked: Sequence[Trial], objective: str) -> Iterator[tuple[str, str | None]]:
    objectives = [trial["objective"] for trial in ranked if trial["objective"] is not None]
    done = sum(trial["status"] == "finished" for trial in ranked)
    yield f"best {objective} ({_better(ranked)} is better)", format_number(objectives[0]) if objectives else None
    yield f"finished of {len(ranked)} trials", str(done)
    yield "total time", format_duration(sum(trial["seconds"] for trial in ranked))


def _better(trials: Sequence[Trial]) -> str:
    name = next((trial.get("objective_is") for trial in trials if trial["objective"] is not None), None)
    return "lower" if name is None else METRICS[name].better


def _best(content: Mapping[str, Any], folder: Path, objective: str) -> list[Code]:
    best = content["best"]
    if best is None:
        return []
    where = f"{objective} {format_number(best['objective'])}, in {_folder(folder, best)}"
    return [Code(f"finetune train {best['line']}", intro=f"Trial {best['number']} with {where}:")]


def _chart(key: str, trials: Sequence[Trial], objective: str) -> DotChart | None:
    """Return a chart of the objective by a swept key; None for text or few values, which the leaderboard shows."""
    scored = [trial for trial in trials if trial["objective"] is not None and key in trial["values"]]
    points = [(trial["values"][key], trial) for trial in scored]
    are_numbers = all(type(value) in (int, float) for value, _ in points)
    if not are_numbers or len({value for value, _ in points}) < _MIN_CHART_VALUES:
        return None
    dots = [
        (
            value,
            trial["objective"],
            f"trial {trial['number']}: {value}\n{objective} {format_number(trial['objective'])}",
        )
        for value, trial in points
    ]
    better, metric = _better(scored), METRICS.get(scored[0].get("objective_is") or "eval_loss")
    quantity = Quantity(f"{objective.capitalize()} by {key}", f"{better} is better", may_log=True)
    if metric is not None and metric.is_share:
        quantity = replace(quantity, formatter="{:.0%}".format, is_share=True)
    return DotChart(quantity, key, dots, min if better == "lower" else max)


def _leaderboard(ranked: Sequence[Trial], keys: Sequence[str], objective: str, folder: Path, target: Path) -> Table:
    numbers = ("steps", "tokens/s", "samples/s", "time")
    rows = [_row(rank, trial, keys, folder, target) for rank, trial in enumerate(ranked, 1)]
    at = 3 + len(keys)
    return Table(["rank", "trial", objective, *keys, *numbers, "status"], rows, (2, *range(at, at + len(numbers))))


def _row(rank: int, trial: Trial, keys: Sequence[str], folder: Path, target: Path) -> list[Inline]:
    page = _folder(folder, trial) / _REPORT
    has_page = target.parent.resolve() == folder.resolve() and page.is_file()
    return [
        NO_VALUE if trial["objective"] is None else str(rank),
        Span(str(trial["number"]), link=f"./{quote(page.parent.name)}/{_REPORT}" if has_page else None),
        format_or(trial["objective"], format_number, NO_VALUE),
        *(Span(str(trial["values"].get(key, "")), "code") for key in keys),
        format_integer(trial["steps"]) or NO_VALUE,
        format_or(trial["tokens_per_second"], format_count, NO_VALUE),
        format_or(trial.get("samples_per_second"), format_count, NO_VALUE),
        format_or(trial["seconds"] or None, format_duration, NO_VALUE),
        _badge(trial["status"]),
    ]
