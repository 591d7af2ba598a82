"""Rows of the board's lists: progress, metrics, memory and times of runs, sweeps and trials, from their files."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from yaml import YAMLError

from app.config.conf_files import read_yaml
from app.config.kinds import METRICS
from app.files import is_own_file, read_object
from app.pages.page import PAGE_FAULTS
from app.pages.read_run import message_times_in, seconds_of, section_of
from app.tracking.formatting import (
    finite_number,
    format_bytes,
    format_count,
    format_duration,
    format_integer,
    format_number,
    format_or,
)
from app.tracking.output_dir import RunFolder, read_lines

_ENDED_TRIALS = ("finished", "failed", "refused", "dry_run")
_MAX_ETA_LINES = 60  # limits the time of wrong estimates after a change of speed


def run_row(folder: Path, stamp: str, *, is_running: bool) -> dict[str, Any]:
    """Return the columns of a run; `stamp` changes with its files."""
    facts = _facts(folder, stamp)
    last, total = facts.get("last", {}), finite_number(facts.get("total"))
    left = facts.get("left") if is_running else None
    return {
        "model": facts.get("model"),
        "progress": progress("step", finite_number(last.get("step")), total, left),
        "losses": [format_or(last.get(key), format_number) for key in ("loss", "eval_loss")],
        "speed": format_or(last.get("tokens_per_second"), format_count),
        "memory": format_or(last.get("peak_memory_bytes"), format_bytes),
        "started": facts.get("started"),
        "duration": _duration(facts, is_running=is_running),
    }


def progress(unit: str, done: float | None, total: float | None, left: float | None = None) -> dict[str, Any] | None:
    """Return the bar and its text; None without a number."""
    if done is None:
        return None
    text = f"{unit} {format_integer(done)}" + (f" of {format_integer(total)}" if total else "")
    return {"done": done, "total": total, "text": text, "left": left and f"{format_duration(left)} left"}


@lru_cache(maxsize=1000)
def _facts(folder: Path, _stamp: str) -> dict[str, Any]:
    """Return what the files of a run say; `_stamp` invalidates the cache. A damaged file has nothing to say."""
    files = RunFolder(folder)
    try:
        manifest = read_object(files.manifest) if is_own_file(files.manifest) else {}
        lines = list(read_lines(files.metrics)) if is_own_file(files.metrics) else []
        starts, total = manifest.get("starts", []), section_of(manifest, "counts").get("steps")
        begin = datetime.fromisoformat(starts[0]["time"]).astimezone() if starts else None
        return {
            "model": _model(files.run_yaml, files.run_yaml.stat().st_mtime_ns) if is_own_file(files.run_yaml) else None,
            "last": {key: value for line in lines for key, value in line.items()},
            "total": total,
            "left": _seconds_left(lines, finite_number(total)),
            "starts": starts,
            "started": begin and f"{begin:%Y-%m-%d %H:%M}",
            "times": message_times_in(files.log),
        }
    except (*PAGE_FAULTS, YAMLError):
        return {}


@lru_cache(maxsize=1000)
def _model(run_yaml: Path, _stamp: int) -> str:
    """Return the last part of the path or hub ID of the model."""
    path = str(section_of(read_yaml(run_yaml), "model").get("path") or "")
    return path.removeprefix("asset:").rstrip("/").rpartition("/")[2]


def _seconds_left(lines: Sequence[Mapping[str, Any]], total: float | None) -> float | None:
    """Return the remaining time without evaluations, by the speed of the newer half of the logged steps."""
    timed = [(line["step"], seconds) for line in lines if (seconds := finite_number(line.get("seconds")))]
    newer = timed[len(timed) // 2 :][-_MAX_ETA_LINES:]
    if total is None or len(newer) == len(timed):
        return None
    last, before = newer[-1][0], timed[-len(newer) - 1][0]
    return (total - last) * sum(seconds for _, seconds in newer) / (last - before) if before < last < total else None


def _duration(facts: Mapping[str, Any], *, is_running: bool) -> str | None:
    times = [*facts.get("times", []), *([datetime.now(UTC)] if is_running else [])]
    return format_or(seconds_of(facts.get("starts", []), times), format_duration)


# ---- sweeps


def sweep_status(trials: Sequence[Mapping[str, Any]]) -> str:
    """Return the status of a sweep that is not running."""
    statuses = {trial.get("status") for trial in trials}
    if not statuses <= {*_ENDED_TRIALS}:
        return "stopped"
    return "failed" if "failed" in statuses else "finished"


def sweep_row(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a sweep from sweep.json, empty if it is damaged."""
    try:
        return _sweep_columns(content)
    except PAGE_FAULTS:
        return dict.fromkeys(("progress", "best", "duration"))


def _sweep_columns(content: Mapping[str, Any]) -> dict[str, Any]:
    trials = content.get("trials", [])
    done = sum(trial.get("status") in _ENDED_TRIALS for trial in trials)
    seconds = sum(finite_number(trial.get("seconds")) or 0 for trial in trials)
    return {
        "progress": progress("trial", done, max(finite_number(content.get("count")) or 0, len(trials))),
        "best": _best(content.get("best"), trials),
        "duration": format_or(seconds or None, format_duration),
    }


def _best(best: Mapping[str, Any] | None, trials: Sequence[Mapping[str, Any]]) -> str | None:
    if not best:
        return None
    name = next((trial.get("objective_is") for trial in trials if trial["number"] == best["number"]), None)
    label = METRICS[name].label if name in METRICS else "training loss"
    return f"best {label} {format_or(best['objective'], format_number)}, trial {best['number']}"


def trial_row(trial: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a trial, with those of its run."""
    values = " ".join(f"{key}={value}" for key, value in trial.get("values", {}).items())
    objective = format_or(trial.get("objective"), format_number)
    return {**columns, "number": trial["number"], "values": values, "objective": objective}
