"""Tables of a ladder, of its rungs and of its source's figures: the same on screen, in ladder.md and on its page."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.tracking.formatting import (
    NO_VALUE,
    align_columns,
    finite_number,
    format_bytes,
    format_count,
    format_duration,
    format_number,
    format_or,
)


def _megabytes(size: float) -> str:
    """With a digit more where rungs of small shapes would look equal."""
    return format_bytes(size) if size >= 1e8 else f"{size / 1e6:.1f} MB"


RATE = "samples/s"  # the figure of a source that is also shown as a ratio to its first
_RATIO = "x first"
# key of a rung in sweep.json: its head and format; others are text
_COLUMNS: dict[str, tuple[str, Callable[[float], str] | None]] = {
    "name": ("rung", None),
    "batch": ("batch", None),
    "steps": ("steps", format_count),
    "seconds": ("seconds", format_duration),
    "samples_per_second": (RATE, format_number),
    "ratio": (_RATIO, "{:.2f}".format),
    "tokens_per_second": ("tokens/s", format_count),
    "memory_predicted_bytes": ("planned", _megabytes),
    "memory_measured_bytes": ("measured", _megabytes),
    "device_used_bytes": ("device", format_bytes),
    "loss": ("loss", "{:.6f}".format),
    "accuracy": ("accuracy", "{:.2%}".format),
    "as_first": ("as the first", None),
    "status": ("status", None),
}


@dataclass(frozen=True, slots=True)
class LadderTable:
    """A table with its title; `notes` stand below it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def ladder_tables(ladder: Mapping[str, Any]) -> list[LadderTable]:
    """The tables for `ladder` of sweep.json; a column that no rung has a value for is left out."""
    rungs = ladder["rungs"]
    columns = {key: each for key, each in _COLUMNS.items() if any(rung.get(key) is not None for rung in rungs)}
    rows = [[_cell(rung.get(key), shown) for key, (_, shown) in columns.items()] for rung in rungs]
    return [
        LadderTable("Measured here", [head for head, _ in columns.values()], rows, list(_notes(rungs))),
        *claimed_tables(ladder["source"], rungs),
    ]


def claimed_tables(source: str, rungs: Sequence[Mapping[str, Any]]) -> Iterator[LadderTable]:
    """The figures that the source claims, of other hardware; nothing where it has none."""
    figures = list(dict.fromkeys(key for rung in rungs for key in rung["claimed"]))
    if not figures:
        return
    head = [column for key in figures for column in ((RATE, _RATIO) if key == RATE else (key,))]
    first = finite_number(rungs[0]["claimed"].get(RATE))

    def cells(rung: Mapping[str, Any]) -> Iterator[str]:
        yield rung["name"]
        for key in figures:
            figure = rung["claimed"].get(key)
            yield NO_VALUE if figure is None else f"{figure:,}" if isinstance(figure, int | float) else str(figure)
            if key == RATE:
                rate = finite_number(figure)
                yield f"{rate / first:.2f}" if rate and first else NO_VALUE

    yield LadderTable(f"Claimed by the source: {source}", ["rung", *head], [list(cells(rung)) for rung in rungs])


def as_text(tables: Sequence[LadderTable]) -> str:
    """The tables for a terminal."""
    return "\n\n".join(
        "\n".join([each.title, align_columns([each.head, *each.rows], gap=2), *each.notes]) for each in tables
    )


def as_markdown(name: str, tables: Sequence[LadderTable]) -> str:
    """The tables as the content of ladder.md."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

    parts = [f"# {name}"]
    for each in tables:
        parts += [each.title, "\n".join([line(each.head), line(["---"] * len(each.head)), *map(line, each.rows)])]
        parts += ["\n".join(f"- {note}" for note in each.notes)] if each.notes else []
    return "\n\n".join(parts) + "\n"


def _cell(value: Any, shown: Callable[[float], str] | None) -> str:
    if shown is None:
        return NO_VALUE if value is None else str(value)
    return format_or(value, shown, NO_VALUE) or NO_VALUE


def _notes(rungs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for rung in rungs:
        if rung["splits"]:
            yield f"{rung['name']}: split after out-of-memory, so it has no ratio"
        if rung["error"]:
            yield f"{rung['name']}: {' '.join(rung['error'].split())}"
