"""Rows of the board's lists: progress, metrics, memory and times of runs, sweeps and trials, from their files."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from app.config.kinds import METRICS
from app.pages.page import PAGE_FAULTS
from app.pages.read_run import is_run, read_run, section_of
from app.tracking.formatting import (
    finite_number,
    format_bytes,
    format_count,
    format_duration,
    format_integer,
    format_number,
    format_or,
)
from app.tracking.output_dir import smoothed_loss

_ENDED_TRIALS = ("finished", "failed", "refused", "dry_run")
_MAX_ETA_LINES = 60  # limits the time of wrong estimates after a change of speed


def run_row(folder: Path, stamp: str, *, is_running: bool) -> dict[str, Any]:
    """Return the columns of a run; `stamp` changes with its files."""
    facts = _facts(folder, stamp) if is_run(folder) else {}
    last, left = facts.get("last", {}), facts.get("left") if is_running else None
    return {
        "model": facts.get("model"),
        "progress": _step_progress(last["step"], facts["total"], left) if last else None,
        "losses": [format_or(last.get(key), format_number) for key in ("loss", "eval_loss")],
        "speed": format_or(last.get("tokens_per_second"), format_count),
        "memory": format_or(last.get("peak_memory_bytes"), format_bytes),
        "started": facts.get("started"),
        "duration": facts.get("duration"),
    }


def _step_progress(step: float, total: float | None, left: float | None) -> dict[str, Any]:
    text = f"step {format_integer(step)}" + (f" of {format_integer(total)}" if total else "")
    return {"done": step, "total": total, "text": text, "left": left and f"{format_duration(left)} left"}


@lru_cache(maxsize=1000)
def _facts(folder: Path, _stamp: str) -> dict[str, Any]:
    """Return the facts in the files of a run; `_stamp` invalidates the cache. Damaged files have none."""
    try:
        run = read_run(folder)
        total = finite_number(section_of(run.manifest, "counts").get("steps"))
        path = str(section_of(run.settings, "model").get("path") or "")
        start = datetime.fromisoformat(run.starts[0]["time"]).astimezone() if run.starts else None
        return {
            "model": path.removeprefix("asset:").rstrip("/").rpartition("/")[2],
            "last": last_values(run.lines),
            "total": total,
            "left": seconds_left(run.lines, total),
            "started": start and f"{start:%b %d %H:%M}",
            "duration": format_or(run.seconds(), format_duration),
        }
    except PAGE_FAULTS:
        return {}


def would_fail_again(result: Mapping[str, Any]) -> bool:
    """Return whether a resumed run would repeat the steps that failed: those with NaN or Inf gradients."""
    return result.get("status") == "failed" and "NaN/Inf" in str(result.get("error"))


def last_values(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last value of each metric, with a smoothed training loss unless the last one is NaN or infinite."""
    last = {key: value for line in lines for key, value in line.items()}
    return last if finite_number(last.get("loss")) is None else {**last, "loss": smoothed_loss(lines)}


def seconds_left(lines: Sequence[Mapping[str, Any]], total: float | None) -> float | None:
    """Return the remaining time without evaluations, by the speed of the newer half of the logged steps."""
    timed = [(line["step"], seconds) for line in lines if (seconds := finite_number(line.get("seconds")))]
    newer = timed[len(timed) // 2 :][-_MAX_ETA_LINES:]
    if total is None or len(newer) == len(timed):
        return None
    last, before = newer[-1][0], timed[-len(newer) - 1][0]
    return (total - last) * sum(seconds for _, seconds in newer) / (last - before) if before < last < total else None


# ---- sweeps


def sweep_row(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a sweep that is not running, from sweep.json."""
    try:
        return _sweep_columns(content)
    except PAGE_FAULTS:
        return {"status": "damaged", **dict.fromkeys(("progress", "best", "duration"))}


def _sweep_columns(content: Mapping[str, Any]) -> dict[str, Any]:
    trials = content.get("trials", [])
    statuses = [trial["status"] for trial in trials]
    done = sum(status in _ENDED_TRIALS for status in statuses)
    count = max(content.get("count", 0), len(trials))  # a search adds trials until it has this number
    seconds = sum(finite_number(trial.get("seconds")) or 0 for trial in trials)
    return {
        "status": "stopped" if done < len(trials) else "failed" if "failed" in statuses else "finished",
        "progress": {"done": done, "total": count, "text": f"{done} of {count:,} trials", "left": None},
        "best": _best(content.get("best"), trials),
        "duration": format_or(seconds or None, format_duration),
    }


def _best(best: Mapping[str, Any] | None, trials: Sequence[Mapping[str, Any]]) -> str | None:
    if not best:
        return None
    name = next((trial.get("objective_is") for trial in trials if trial["number"] == best["number"]), None)
    label = "eval loss" if name == "eval_loss" else METRICS[name].label if name in METRICS else "training loss"
    return f"best {label} {format_or(best['objective'], format_number)}, trial {best['number']}"


def trial_row(trial: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a trial, with those of its run."""
    values = " ".join(f"{key}={value}" for key, value in trial.get("values", {}).items())
    objective = format_or(trial.get("objective"), format_number)
    shown = {**columns, "number": trial["number"], "values": values, "objective": objective}
    return {**shown, "duration": format_or(trial.get("seconds") or None, format_duration, columns["duration"])}
