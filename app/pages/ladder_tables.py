"""Tables of a ladder: measured or estimated rungs, and the figures of its source."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from app.pages.page import Section, Table
from app.pages.run_page import PARTS
from app.tracking.formatting import NO_VALUE, PHASES, format_bytes, format_count

Rungs = Sequence[Mapping[str, Any]]  # of `ladder` in sweep.json or check.json
RungColumns = Mapping[str, tuple[str, Callable[[Any], str]]]  # key of a rung: column header and format


def _megabytes(size: float) -> str:
    return format_bytes(size) if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


_NAME: RungColumns = {"name": ("rung", str)}
_RUNG: RungColumns = {**_NAME, "batch": ("batch", str)}
_MEASURED: Mapping[str, RungColumns] = {
    "Speed": {
        **_RUNG,
        "steps": ("steps", format_count),
        "padding": ("padding", "{:.1%}".format),
        "samples_per_second": ("samples/s", "{:,.2f}".format),
        "tokens_per_second": ("tokens/s", format_count),
        "spread": ("spread", "{:.0%}".format),
        "ratio": ("x first", str),
        "efficiency": ("per process", "{:.0%}".format),
        "source_ratio": ("source", "{:.2f}".format),
        "seconds": ("seconds", "{:,.1f}".format),
        "compile_seconds": ("compile", "{:,.1f}".format),
        "total_seconds": ("total", "{:,.1f}".format),
        "status": ("status", str),
    },
    "Time per step (ms)": {
        **_NAME,
        **{key: (label, _milliseconds) for key, label in PHASES.items()},
        "gpu_utilization": ("GPU busy", "{:.0%}".format),
    },
    "Memory": {
        **_NAME,
        "memory_predicted_bytes": ("estimated", _megabytes),
        "memory_measured_bytes": ("measured", _megabytes),
        "device_used_bytes": ("device", _megabytes),
        "memory_ratio": ("x first", "{:.2f}".format),
        "source_memory_ratio": ("source", "{:.2f}".format),
    },
    "Results": {
        **_NAME,
        "train_loss_last": ("loss", "{:.6f}".format),
        "eval_loss": ("eval loss", "{:.6f}".format),
        "accuracy": ("accuracy", "{:.2%}".format),
        "exact_match": ("exact match", "{:.2%}".format),
        "learns": ("learns", str),
        "as_first": ("as the first", str),
    },
}


def measured_tables(ladder: Mapping[str, Any]) -> list[Section]:
    """Return the tables for `ladder` in sweep.json; only the first has rungs without results, and the notes."""
    rungs = [{**rung, "ratio": _ratio(rung), "total_seconds": _total(rung)} for rung in ladder["rungs"]]
    (first, columns), *others = _MEASURED.items()
    tables = [_table(first, columns, rungs, [*_errors(rungs), *_remarks(rungs)])]
    for title, columns in others:
        measured = [rung for rung in rungs if any(rung.get(key) is not None for key in columns.keys() - _NAME.keys())]
        tables += [_table(title, columns, measured)] if measured else []
    return [*tables, *_claimed_tables(ladder["source"], ladder["rungs"])]


def planned_tables(facts: Mapping[str, Any]) -> list[Section]:
    """Return the tables for `ladder` in check.json: maximum of each part, peak, and figures of the source."""
    columns = {key: (PARTS.get(key, key), _megabytes) for key in (*PARTS, "tensors", "needs")}
    title = f"Estimated on {facts['label']}: maximum of each part, tensors at the peak"
    planned = _table(title, {**_RUNG, **columns}, facts["rungs"], list(_errors(facts["rungs"])))
    return [planned, *_claimed_tables(facts["source"], facts["rungs"])]


def _ratio(rung: Mapping[str, Any]) -> str | None:
    """Return the speed relative to the first rung, marked if the difference is smaller than the spread of repeats."""
    ratio = rung.get("ratio")
    return None if ratio is None else f"{'~' if rung.get('is_noise') else ''}{ratio:.2f}"


def _total(rung: Mapping[str, Any]) -> float | None:
    compiling, training = rung.get("compile_seconds"), rung.get("seconds")
    return compiling + training if compiling and training else None


def _claimed_tables(source: str, rungs: Rungs) -> list[Section]:
    """Return a table of the figures claimed by the source, on other hardware; empty if there are none."""
    claimed = [{"name": rung["name"], **rung["claimed"]} for rung in rungs]
    columns = {key: (key, lambda figure: f"{figure}") for rung in claimed for key in rung}
    title = f"Claimed by the source: {source}"
    return [_table(title, {**columns, **_NAME}, claimed)] if len(columns) > 1 else []


def _table(title: str, columns: RungColumns, rungs: Rungs, notes: Sequence[str] = ()) -> Section:
    """Return a table with a row per rung, without empty columns."""
    shown = {key: column for key, column in columns.items() if any(rung.get(key) is not None for rung in rungs)}
    rows = [
        [NO_VALUE if rung.get(key) is None else text(rung[key]) for key, (_, text) in shown.items()] for rung in rungs
    ]
    return Section(title, [Table([head for head, _ in shown.values()], rows, notes=notes)])


def _errors(rungs: Rungs) -> Iterator[str]:
    for rung in rungs:
        if rung.get("error"):
            yield f"{rung['name']}: {' '.join(rung['error'].split())}"


def _remarks(rungs: Rungs) -> Iterator[str]:
    """Yield why rungs have no speed ratio, and what else used the machine or limited the GPU."""
    for reason in dict.fromkeys(rung["no_ratio"] for rung in rungs if rung.get("no_ratio")):
        names = [rung["name"] for rung in rungs if rung.get("no_ratio") == reason]
        of_all = "s, because the first rung has none" if rungs[0]["name"] in names else ""
        yield f"no speed ratio{of_all} ({reason}): {', '.join(names)}"
    first: Mapping[str, float] = next((rung["clocks"] for rung in rungs if "clocks" in rung), {})
    for rung in rungs:
        yield from (f"{rung['name']}: {text}" for text in rung.get("disturbances", ()))
        if (clocks := rung.get("clocks", first)) != first:
            limits = ", ".join(f"{name} {first.get(name)} -> {clocks.get(name)}" for name in {**first, **clocks})
            yield f"{rung['name']}: GPU limits differ from the first rung: {limits}"
