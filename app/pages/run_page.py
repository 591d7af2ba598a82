"""HTML page of a run: status, curves, scores, answers, data, memory, checks and provenance."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from app.config.adapters import ADAPTER_KINDS, name_of
from app.config.metrics import METRICS
from app.config.quantizations import QUANTIZATION_KINDS
from app.pages.answers import answers_before_and_after
from app.pages.charts import Bar, length_bars
from app.pages.check_summary import PARTS
from app.pages.curves import curves
from app.pages.read_run import RUNNING, UNFINISHED, SavedRun, read_run, section_of, training_samples
from app.pages.render import render
from app.tracking.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_integer,
    format_number,
    format_or,
)

Rows = list[tuple[str, str | None]]
_STATUSES = {
    "finished": ("finished", "good"),
    "failed": ("failed", "bad"),
    "dry_run": ("dry run", "busy"),
    RUNNING: ("still running", "busy"),
}
_COUNTS = {
    "rows_read": "rows read",
    "samples": "samples",
    "tokens": "tokens",
    "trained_tokens": "trained tokens",
    "longest": "longest sample, in tokens",
    "bad_rows": "bad rows skipped",
    "rows_lost": "rows of which nothing is left",
    "dropped": "dropped as too long",
    "truncated": "cut off",
    "split": "split",
    "tokens_lost": "tokens lost",
    "unstable": "conversations that the template rewrites",
    "left_over": "left over by a limit of rows",
    "held_out": "held out of these",
}
_SHORT = "{:.3g}".format
_TILES = ("exact_match", "accuracy", "mae", "pearson", "eval_loss")
_HASHES = {"train": "rows to train on", "eval": "rows held out", "tokenizer": "tokenizer", "base": "base"}
_CHOICES = {"recompute": "recompute of layers", "tokens": "tokens of a micro-batch", "padded_because": "padded because"}
_PROCESS_MEMORY = (
    "These are the tensors of the training. The process takes more, as its peak above shows: Python, torch and other "
    "libraries."
)
_ASSETS = {"asset:tiny": "the small model", "asset:sample/train.jsonl": "the sample rows"}
_MODULE = "app.train"
_MAX_LABELS = 50
_MIN_DIFFERENCE = 0.005  # of measured and planned memory, as a fraction


def run_page(folder: Path) -> str:
    """The page of the run in a folder."""
    run = read_run(folder)
    badge = status_badge(run.status)
    return render(
        "run",
        title=f"{run.name}: {badge[0]}",
        run=run,
        badge=badge,
        method=method(run),
        begun=_begun(run),
        notes=list(_notes(run)),
        tiles=list(_tiles(run)),
        charts=curves(run),
        answers=answers_before_and_after(run.samples),
        scores=[table for scores in run.scores if (table := _scores(scores))],
        data=_data(run),
        marked=run.preview.get("marked"),
        samples=training_samples(run.preview),
        memory=_memory(run),
        # name, difference, tolerance, and whether it passed
        checks=[
            (each["what"], format_number(each["difference"]), format_number(each["allowed"]), passed)
            for each in run.manifest.get("proofs", ())
            for passed in (each["difference"] <= each["allowed"],)
        ],
        again=_commands(run),
        environment=_environment(run),
        starts=[
            (each["time"], each["host"], (section_of(each, "git").get("commit") or "")[:12]) for each in run.starts
        ],
        packages=list(section_of(run.manifest, "packages").items()),
    )


def status_badge(status: str) -> tuple[str, str]:
    """Text and colour class of a status."""
    return _STATUSES.get(status, (status, "warn"))


def method(run: SavedRun) -> str:
    """One line: method, model, dataset, optimizer, device."""
    chosen, path = section_of(run.manifest, "choices"), _setting(run, "dataset", "path")
    parts = (
        _tuning(run),
        path and _named(path),
        f"{_setting(run, 'optimizer', 'kind')}, {_setting(run, 'schedule', 'kind')}".strip(", "),
        ", ".join(str(chosen[key]) for key in ("precision", "attention", "device") if chosen.get(key)),
    )
    return " · ".join(part for part in parts if part)


def _named(path: Any) -> str:
    """A model or a dataset; what ships with the program is named by what it is."""
    return _ASSETS.get(path, str(path))


def _tuning(run: SavedRun) -> str:
    adapter, model = section_of(run.settings, "adapter"), section_of(run.settings, "model")
    if not model:
        return ""
    kind = ADAPTER_KINDS.get(str(adapter.get("kind", "none")), ADAPTER_KINDS["lora"])
    base = _setting(run, "quantization", "kind")
    known = QUANTIZATION_KINDS.get(base or "none")
    how = f"{name_of(adapter)} on an {base} base" if known is None else known.tuning.format(name_of(adapter))
    how += f", rank {adapter.get('r')}" if kind.has_rank else ""
    drawn = " with random weights" if model.get("weights") == "random" else ""
    return f"{how} · {_named(model.get('path'))}{drawn}"


def _setting(run: SavedRun, *path: str) -> str:
    value = section_of(run.settings, *path[:-1]).get(path[-1])
    return "" if value is None else str(value)


def _begun(run: SavedRun) -> str:
    if not run.starts:
        return str(run.folder)
    first, last = run.starts[0], run.starts[-1]
    begun = first["time"].replace("T", " ").replace("+00:00", " UTC")
    more = f", started {len(run.starts)} times" if len(run.starts) > 1 else ""
    return f"begun {begun} on {last['host']}{more} · {run.folder}"


def _notes(run: SavedRun) -> Iterator[tuple[str, str]]:
    if run.status == "failed":
        yield "bad", f"It failed. {run.result.get('error') or ''}"
    if run.status == RUNNING:
        yield "busy", "The run is still at work: the page shows it as it was when the page was made."
    if run.status == UNFINISHED:
        yield "warn", "The run has no result: it was killed, or its machine was."
    if run.status in ("stopped", UNFINISHED):
        words = _typed(run) or ["python", "-m", _MODULE, f"output_dir={run.folder}"]
        command = [word for word in words if not word.startswith("resume=")]
        yield "warn", f"This continues it from its last checkpoint: {shlex.join([*command, 'resume=auto'])}"
    for remark in run.remarks:
        yield "warn", remark


def _tiles(run: SavedRun) -> Iterator[tuple[str, str | None]]:
    result, last = run.result, run.lines[-1] if run.lines else {}
    best, macro_f1, start = result.get("objective"), METRICS["macro_f1"], section_of(result, "start_metrics")
    by_loss = result.get("objective_is", "eval_loss") == "eval_loss"
    more = {
        "eval_loss": ""
        if not by_loss or best == result.get("eval_loss")
        else f", best {format_or(best, format_number)}",
        "accuracy": f"; {macro_f1.label} {format_or(result.get(macro_f1.name), macro_f1.text)}",
    }
    for key in _TILES:
        metric = METRICS[key]
        was = format_or(start.get(key), metric.text if metric.is_share else _SHORT)
        name = f"{'' if metric.is_share else 'held-out '}{metric.label}{f', was {was}' if was else ''}"
        yield f"{name}{more.get(key, '')}", format_or(result.get(key), metric.text)
    losses = [y for _, y in run.points("loss") if y is not None]
    if losses:
        yield f"last training loss, was {_SHORT(losses[0])}", METRICS["eval_loss"].text(losses[-1])
    steps, planned = result.get("steps", last.get("step")), section_of(run.manifest, "counts").get("steps")
    of = f" of {planned:,}" if planned and planned != steps else ""
    yield f"for {format_integer(steps)}{of} steps", format_or(run.seconds() if steps else None, format_duration)
    samples = format_or(result.get("samples_per_second"), format_count)
    speed = f"tokens a second{f', {samples} samples' if samples else ''}"
    yield speed, format_or(result.get("tokens_per_second"), format_count)
    yield f"peak memory of the {run.memory_owner}", format_or(result.get("peak_memory_bytes"), format_bytes)


def _scores(scores: Mapping[str, Any]) -> dict[str, Any] | None:
    """Scores of a file of app.evaluate, of one model or of base and tuned model."""
    sides = [side for side in ("base_", "tuned_") if f"{side}eval_loss" in scores] or [""]
    rows = [
        (metric.label, *(format_or(scores.get(f"{side}{key}"), metric.text) for side in sides))
        for key, metric in METRICS.items()
        if key in scores
    ]
    heads = [side.rstrip("_") or scores.get("weights", "value") for side in sides]
    of = f"{format_integer(scores.get('rows'))} rows of {scores.get('dataset')}"
    return {"head": ["", *heads], "rows": rows, "of": of} if rows else None


def _data(run: SavedRun) -> dict[str, Any]:
    counted = section_of(run.manifest, "counts", "data")
    sides = [section_of(counted, "train"), section_of(counted, "eval")]
    classes = [section_of(side, "classes") for side in sides]
    labels = list(dict.fromkeys(name for side in classes for name in side))
    names = ("train", "held out")
    return {
        "sources": [(name, side["source"]) for name, side in zip(names, sides, strict=True) if side],
        "counts": [
            ("labels" if labels and key == "trained_tokens" else label, *(_count(key, side) for side in sides))
            for key, label in _COUNTS.items()
            if any(side.get(key) for side in sides)
        ],
        "labels": [(name, *(format_integer(side.get(name, 0)) for side in classes)) for name in labels[:_MAX_LABELS]],
        "more_labels": max(0, len(labels) - _MAX_LABELS),
        "remarks": [*_packing(run), *counted.get("notes", ())],
        "lengths": length_bars(run.preview["lengths"]) if run.preview else [],
    }


def _count(key: str, split: Mapping[str, Any]) -> str:
    """A count of one side; rows that were held out of the others were not read for themselves."""
    if key not in split or not (split[key] or split.get("rows_read")):
        return ""
    is_share = key == "trained_tokens" and split["tokens"] and not split.get("classes")
    share = f" ({split[key] / split['tokens']:.0%})" if is_share else ""
    return f"{split[key]:,}{share}"


def _packing(run: SavedRun) -> Iterator[str]:
    counts = section_of(run.manifest, "counts")
    if "units" not in counts:
        return
    full = "" if counts.get("fill") is None else f", {counts['fill']:.1%} full"
    each = counts["units_per_step"]
    unit = counts["unit_name"] if each > 1 else counts["unit_name"].removesuffix("s")
    yield f"{-(-counts['units'] // each):,} steps an epoch, each of {each:,} {unit}{full}."


def _memory(run: SavedRun) -> dict[str, Any] | None:
    """The planned memory of the tensors by part, and how the measured one differs."""
    plan, counts = section_of(run.manifest, "memory_plan"), section_of(run.manifest, "counts")
    if not plan:
        return None
    trained = f"{counts['trained_weights']:,} ({counts['trained_weights'] / counts['weights']:.1%})"
    parts = {name: size for name, size in plan["anatomy"].items() if format_bytes(size) != format_bytes(0)}
    return {
        "facts": [
            ("planned before the run", format_bytes(plan["bytes"])),
            ("at its highest in", plan["where"].replace("backward", "backward pass")),
            ("measured", format_or(run.result.get("memory_measured_bytes"), lambda size: _off(size, plan["bytes"]))),
            ("weights", format_integer(counts["weights"])),
            ("trained weights", trained),
        ],
        "parts": [Bar(PARTS.get(name, name), size / plan["bytes"], format_bytes(size)) for name, size in parts.items()],
        "remark": _PROCESS_MEMORY if run.memory_owner == "process" else "",
    }


def _off(measured: float, planned: float) -> str:
    difference = measured / planned - 1
    if abs(difference) < _MIN_DIFFERENCE:
        return "as planned"
    return f"{format_bytes(measured)}, {abs(difference):.1%} {'more' if difference > 0 else 'less'} than planned"


def _typed(run: SavedRun) -> list[str]:
    """The command as it was typed, without the path of the interpreter; empty if it is not known."""
    line = run.starts[0]["command_line"] if run.starts else []
    typed = ["python", "-m", *line[line.index(_MODULE) :]] if _MODULE in line else []
    several = section_of(run.manifest, "choices").get("processes", 1) > 1
    return [] if several and len(typed) == 3 else typed  # our launcher hands the settings over in a file


def _commands(run: SavedRun) -> Iterator[tuple[str, str]]:
    """Commands that reproduce the run, and the one that was typed."""
    again = shlex.join(["python", "-m", "app.reproduce", f"run={run.folder}"])
    yield "The same run from its own files, compared line by line:", again
    if typed := _typed(run):
        yield f"As it was typed in {run.starts[0]['folder']}:", shlex.join(typed)


def _environment(run: SavedRun) -> Iterator[tuple[str, str | None]]:
    manifest = run.manifest
    hardware, choices = section_of(manifest, "hardware"), section_of(manifest, "choices")
    program = section_of(manifest, "program")
    git = section_of(program, "git")
    changes = " with changes that are in no commit" if git.get("dirty") else ""
    commit = f"commit {git['commit']}{changes}" if git else "installed"
    yield "program", f"app {program['version']}, {commit}" if program else None
    yield "device", hardware.get("gpu") or hardware.get("device")
    yield "CPU", f"{hardware.get('cpu') or ''}, {manifest['cpus']} cores".strip(", ") if program else None
    words = {key: {True: "yes", False: "no"}[each] if isinstance(each, bool) else each for key, each in choices.items()}
    yield "decided at the start", ", ".join(f"{_CHOICES.get(key, key)} {each}" for key, each in words.items())
    for key in ("python", "platform", "seed"):
        yield key, None if manifest.get(key) is None else str(manifest[key])
    for key, value in section_of(manifest, "hashes").items():
        yield f"hash of {_HASHES.get(key, key)}", value
