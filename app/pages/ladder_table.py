"""Tables of a ladder: its rungs, measured or planned, and the figures of its source."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from app.pages.check_summary import PARTS
from app.tracking.formatting import NO_VALUE, align_columns, format_bytes, format_count

Rungs = Sequence[Mapping[str, Any]]  # of sweep.json
Columns = Mapping[str, tuple[str, Callable[[Any], str]]]  # key of a rung: head and format


class LadderTable(NamedTuple):
    """A table with its title; `notes` stand below it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]


def _megabytes(size: float) -> str:
    return format_bytes(size) if size >= 1e9 else f"{size / 1e6:.1f} MB"


_RUNG: Columns = {"name": ("rung", str), "batch": ("batch", str)}
_MEASURED: Columns = {
    **_RUNG,
    "steps": ("steps", format_count),
    "padding": ("padding", "{:.1%}".format),
    "seconds": ("seconds", "{:,.1f}".format),
    "samples_per_second": ("samples/s", "{:,.2f}".format),
    "ratio": ("x first", "{:.2f}".format),
    "tokens_per_second": ("tokens/s", format_count),
    "memory_predicted_bytes": ("planned", _megabytes),
    "memory_measured_bytes": ("measured", _megabytes),
    "device_used_bytes": ("device", _megabytes),
    "train_loss_last": ("loss", "{:.6f}".format),
    "accuracy": ("accuracy", "{:.2%}".format),
    "as_first": ("as the first", str),
    "status": ("status", str),
}


def measured_tables(ladder: Mapping[str, Any]) -> list[LadderTable]:
    """The tables for `ladder` of sweep.json."""
    return [_table("Measured here", _MEASURED, ladder["rungs"]), *_claimed_tables(ladder["source"], ladder["rungs"])]


def planned_tables(facts: Mapping[str, Any]) -> list[LadderTable]:
    """The tables for `ladder` of check.json: parts, each where it is largest, the peak, and the source's figures."""
    columns = {key: (PARTS.get(key, key), _megabytes) for key in (*PARTS, "tensors", "needs")}
    planned = _table(
        f"Planned on {facts['label']}: each part at its largest, tensors at the peak",
        {**_RUNG, **columns},
        facts["rungs"],
    )
    return [planned, *_claimed_tables(facts["source"], facts["rungs"])]


def _claimed_tables(source: str, rungs: Rungs) -> list[LadderTable]:
    """The figures that the source claims, of other hardware; nothing where it has none."""
    claimed = [{"name": rung["name"], **rung["claimed"]} for rung in rungs]
    columns = {key: (key, lambda figure: f"{figure}") for rung in claimed for key in rung}
    title = f"Claimed by the source: {source}"
    return [_table(title, {**columns, "name": _RUNG["name"]}, claimed)] if len(columns) > 1 else []


def as_text(tables: Sequence[LadderTable]) -> str:
    """The tables for a terminal."""
    texts = [[each.title, align_columns([each.head, *each.rows], gap=2), *each.notes] for each in tables]
    return "\n\n".join("\n".join(lines) for lines in texts)


def as_markdown(name: str, tables: Sequence[LadderTable]) -> str:
    """The tables as the content of ladder.md."""
    parts = [f"# {name}"]
    for each in tables:
        lines = [each.head, ["---"] * len(each.head), *each.rows]
        parts += [each.title, "\n".join(f"| {' | '.join(cells)} |" for cells in lines)]
        parts += [f"- {note}" for note in each.notes]
    return "\n\n".join(parts) + "\n"


def _table(title: str, columns: Columns, rungs: Rungs) -> LadderTable:
    """A row for each rung; a column that no rung has a value for is left out."""
    shown = {key: each for key, each in columns.items() if any(rung.get(key) is not None for rung in rungs)}
    rows = [
        [NO_VALUE if rung.get(key) is None else text(rung[key]) for key, (_, text) in shown.items()] for rung in rungs
    ]
    notes = [f"{rung['name']}: {' '.join(rung['error'].split())}" for rung in rungs if rung.get("error")]
    notes += [f"{rung['name']}: split after out-of-memory, so it has no ratio" for rung in rungs if rung.get("splits")]
    first: Mapping[str, float] = next((rung["clocks"] for rung in rungs if "clocks" in rung), {})
    for rung in rungs:
        if (own := rung.get("clocks", first)) != first:
            limits = ", ".join(f"{name} {first.get(name)} -> {own.get(name)}" for name in {**first, **own})
            notes.append(f"{rung['name']}: the limits of the GPU are not those of the first rung: {limits}")
    return LadderTable(title, [head for head, _ in shown.values()], rows, notes)
