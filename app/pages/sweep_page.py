"""HTML page of a sweep: the best trial as a command, the ranking, and the objective by each swept key."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from app.config.metrics import METRICS, cost_of
from app.pages.charts import Chart, Quantity, dot_chart
from app.pages.curves import curves_of_several
from app.pages.ladder_table import measured_tables
from app.pages.read_run import SavedRun, is_run, read_run
from app.pages.render import render
from app.pages.run_page import status_badge
from app.tracking.formatting import NO_VALUE, format_count, format_duration, format_integer, format_number, format_or

_MAX_CURVES = 6  # of the best trials
# a sweep has the first status that any trial has
_STATUSES = ("running", "stopped", "pending", "finished", "dry_run", "failed", "refused")
_UNFINISHED = ("pending", "running", "stopped")
_REPORT = "report.html"
Trial = Mapping[str, Any]


def sweep_page(folder: Path, content: Mapping[str, Any], target: Path) -> str:
    """The page for sweep.json in a folder. Links to the pages of trials are relative to `target`."""
    trials, name, ladder = content["trials"], folder.resolve().name, content.get("ladder")
    ranked = sorted(trials, key=_rank)
    ranked = trials if ladder else ranked  # rungs are compared in their order
    keys = [] if ladder else list(dict.fromkeys(key for trial in trials for key in trial["values"]))
    statuses = {trial["status"] for trial in trials}
    places = ((_name(trial), _folder(folder, trial)) for trial in ranked)
    curves = [(name, read_run(place)) for name, place in places if is_run(place) and not place.is_symlink()]
    curves = curves[:_MAX_CURVES]
    objective = _objective([run for _, run in curves])
    return render(
        "sweep",
        title=f"sweep {name}",
        name=name,
        folder=folder,
        badge=status_badge(next((each for each in _STATUSES if each in statuses), "pending")),
        notes=list(_notes(trials)),
        tiles=list(_tiles(ranked, objective))[1 if ladder else 0 :],  # no rung is the best
        objective=objective,
        best=_best(content, folder),
        panels=[chart for key in keys if (chart := _panel(key, trials, objective))],
        keys=keys,
        ladder=measured_tables(ladder) if ladder else [],
        ranking=[] if ladder else [_row(rank, trial, keys, folder, target) for rank, trial in enumerate(ranked, 1)],
        charts=curves_of_several(curves),
        legend=[(name, at) for at, (name, _) in enumerate(curves)],
        failed=[(_name(trial), trial["error"]) for trial in trials if trial["status"] == "failed"],
        again=shlex.join(content["command"]),
    )


def _rank(trial: Trial) -> tuple[bool, float, int]:
    objective = trial["objective"]
    cost = 0.0 if objective is None else cost_of(objective, trial.get("objective_is"))
    return objective is None, cost, trial["number"]


def _name(trial: Trial) -> str:
    values = " ".join(f"{key}={value}" for key, value in trial["values"].items())
    return f"{trial['number']}: {values}" if values else Path(trial["folder"]).name


def _folder(folder: Path, trial: Trial) -> Path:
    """The folder of a trial, inside that of the sweep, which may have been moved."""
    return folder / Path(trial["folder"]).name


def _notes(trials: Sequence[Trial]) -> Iterator[tuple[str, str]]:
    counts = Counter(trial["status"] for trial in trials)
    if counts["failed"]:
        yield "bad", f"{counts['failed']} of {len(trials)} trials failed; their errors stand below."
    left = sum(counts[each] for each in _UNFINISHED)
    if left:
        yield "busy", f"{left} of {len(trials)} trials are not done: the ranking may change."


def _objective(runs: Sequence[SavedRun]) -> str:
    """What the trials are ranked by."""
    known = [run.result for run in runs if run.result.get("objective") is not None]
    if not known:
        return "objective"
    name = known[0].get("objective_is", "eval_loss")
    if name is None or known[0].get("eval_loss") is None:
        return "training loss"
    return "held-out loss" if name == "eval_loss" else METRICS[name].label


def _tiles(ranked: Sequence[Trial], objective: str) -> Iterator[tuple[str, str | None]]:
    known = [trial["objective"] for trial in ranked if trial["objective"] is not None]
    done = sum(trial["status"] == "finished" for trial in ranked)
    yield f"best {objective} ({_better(ranked)} is better)", format_number(known[0]) if known else None
    yield f"finished of {len(ranked)} trials", str(done)
    yield "time of all trials", format_duration(sum(trial["seconds"] for trial in ranked))


def _better(trials: Sequence[Trial]) -> str:
    name = next((each.get("objective_is") for each in trials if each["objective"] is not None), None)
    return "lower" if name is None else METRICS[name].better


def _best(content: Mapping[str, Any], folder: Path) -> dict[str, Any] | None:
    best = content["best"]
    if best is None:
        return None
    return {
        "number": best["number"],
        "objective": format_number(best["objective"]),
        "folder": _folder(folder, best),
        "command": f"python -m app.train {best['line']}",
    }


def _panel(key: str, trials: Sequence[Trial], objective: str) -> Chart | None:
    """The objective by the numbers of a swept key; None for texts, which the ranking shows."""
    known = [trial for trial in trials if trial["objective"] is not None and key in trial["values"]]
    found = [(trial["values"][key], trial) for trial in known]
    if not all(type(value) in (int, float) for value, _ in found) or len({value for value, _ in found}) < 2:
        return None
    dots = [
        (
            value,
            trial["objective"],
            f"trial {trial['number']}: {value}\n{objective} {format_number(trial['objective'])}",
        )
        for value, trial in found
    ]
    better = _better(known)
    quantity = Quantity(f"{objective.capitalize()} by {key}", f"{better} is better", may_log=True)
    return dot_chart(quantity, key, dots, min if better == "lower" else max)


def _row(rank: int, trial: Trial, keys: Sequence[str], folder: Path, target: Path) -> dict[str, Any]:
    page = _folder(folder, trial) / _REPORT
    has_page = target.parent.resolve() == folder.resolve() and page.is_file()
    return {
        "rank": NO_VALUE if trial["objective"] is None else str(rank),
        "trial": str(trial["number"]),
        "link": f"./{quote(page.parent.name)}/{_REPORT}" if has_page else None,
        "objective": format_or(trial["objective"], format_number, NO_VALUE),
        "values": [trial["values"].get(key, "") for key in keys],
        "numbers": [
            format_integer(trial["steps"]) or NO_VALUE,
            format_or(trial["tokens_per_second"], format_count, NO_VALUE),
            format_or(trial.get("samples_per_second"), format_count, NO_VALUE),
            format_or(trial["seconds"] or None, format_duration, NO_VALUE),
        ],
        "badge": status_badge(trial["status"]),
    }
