"""Live view of a run for its page: progress, newest metrics, charts, last answers, log."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from app.files import is_own_file
from app.pages.charts import LineChart
from app.pages.page import AnswerTable
from app.pages.read_run import read_run, section_of
from app.pages.run_page import answers_before_and_after, curves, method
from app.tracking.formatting import finite_number, format_bytes, format_count, format_duration, format_number, format_or
from app.tracking.output_dir import RunFolder

_RECENT_LINES = 50  # of metrics.jsonl, for the remaining time
_LOG_BYTES = 8000


@dataclass(frozen=True, slots=True)
class Live:
    """Content of the page of a run; empty before the run has written a file. `share` of the steps is in 0..1."""

    about: str = ""
    position: str = ""
    share: float = 0.0
    left: str = ""
    error: str = ""
    notes: Sequence[str] = ()
    tiles: Sequence[tuple[str, str]] = ()
    charts: Sequence[LineChart] = ()
    answers: AnswerTable | None = None
    settings: str = ""
    resume_helps: bool = True


@lru_cache(maxsize=8)
def live_view(folder: Path, _stamp: str) -> Live:
    """Return the view of the run in a folder; `_stamp` invalidates the cache."""
    run = read_run(folder)
    last = {key: value for line in run.lines for key, value in line.items()}
    step, total = int(last.get("step", 0)), finite_number(section_of(run.manifest, "counts").get("steps"))
    left = None if total is None else seconds_left(run.lines, total)
    error = str(run.result.get("error") or "").removeprefix("error: ") if run.status == "failed" else ""
    return Live(
        about=method(run),
        position=f"step {step:,} of {total:,.0f}" if total else f"step {step:,}",
        share=min(step / total, 1.0) if total else 0.0,
        left="" if left is None else f"about {format_duration(left)} left",
        error=error,
        notes=run.remarks,
        tiles=_tiles(last, run.memory_owner),
        charts=curves(run),
        answers=answers_before_and_after(run.samples),
        settings=run.settings_text,
        resume_helps="NaN/Inf" not in error,  # a resumed run would repeat the same steps
    )


def seconds_left(lines: Sequence[Mapping[str, Any]], total: float) -> float | None:
    """Return the remaining training time at the speed of the last lines, without evaluations and saves; None if too
    few steps have a time.
    """
    timed = [line for line in lines if finite_number(line.get("seconds")) is not None][-_RECENT_LINES:]
    steps = timed[-1]["step"] - timed[0]["step"] if timed else 0
    if steps <= 0 or timed[-1]["step"] >= total:
        return None
    return float((total - timed[-1]["step"]) * sum(line["seconds"] for line in timed[1:]) / steps)


def _tiles(last: Mapping[str, Any], memory_owner: str) -> list[tuple[str, str]]:
    formatters: dict[str, tuple[str, Callable[[float], str]]] = {
        "loss": ("loss", format_number),
        "eval_loss": ("eval loss", format_number),
        "lr": ("learning rate", "{:.2e}".format),
        "grad_norm": ("gradient norm", "{:.3g}".format),
        "tokens_per_second": ("tokens/s", format_count),
        "peak_memory_bytes": (f"peak {memory_owner} memory", format_bytes),
    }
    return [
        (name, format_or(last[key], formatter, "NaN") or "")
        for key, (name, formatter) in formatters.items()
        if key in last
    ]


def log_of(folder: Path) -> str:
    """Return the end of the log of a run that another program started."""
    file = RunFolder(folder).log
    return file.read_bytes()[-_LOG_BYTES:].decode(errors="replace") if is_own_file(file) else ""
