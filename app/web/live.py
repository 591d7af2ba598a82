"""Live view of a run for its page: newest metrics, charts, last answers, log."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from app.files import is_own_file
from app.pages.charts import LineChart
from app.pages.page import AnswerTable
from app.pages.read_run import read_run
from app.pages.run_page import answers_before_and_after, curves, method
from app.tracking.formatting import format_bytes, format_count, format_number, format_or
from app.tracking.output_dir import RunFolder
from app.web.rows import last_values, would_fail_again

_LOG_BYTES = 8000


@dataclass(frozen=True, slots=True)
class Live:
    """Content of the page of a run; empty before the run has written a file."""

    about: str = ""
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
    error = str(run.result.get("error") or "").removeprefix("error: ") if run.status == "failed" else ""
    return Live(
        about=method(run),
        error=error,
        notes=run.remarks,
        tiles=_tiles(last_values(run.lines), run.memory_owner),
        charts=curves(run),
        answers=answers_before_and_after(run.samples),
        settings=run.settings_text,
        resume_helps=not would_fail_again(run.result),
    )


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
