"""Page of a run: answers, curves, scores, data, memory, checks, provenance; curves and answers of several runs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from app.config.adapters import ADAPTER_KINDS, name_of
from app.config.kinds import METRICS, QUANTIZATION_KINDS
from app.pages.charts import LineChart, Point, Quantity, Series, length_bars, size_bars
from app.pages.page import (
    Answer,
    AnswerTable,
    Badge,
    Bars,
    Block,
    Charts,
    Code,
    Facts,
    Fold,
    Page,
    Paragraph,
    Section,
    Span,
    Table,
    TrainingSamples,
)
from app.pages.read_run import RUNNING, UNFINISHED, SavedRun, read_run, section_of
from app.program import command_text, resume_command
from app.tracking.formatting import (
    PHASES,
    Sample,
    data_wait,
    format_bytes,
    format_count,
    format_duration,
    format_integer,
    format_number,
    format_or,
    format_others,
)
from app.tracking.output_dir import smoothed_loss

# labels of the parts of the estimated memory
PARTS = {
    "frozen_weights": "frozen weights",
    "quantization_constants": "quantization constants",
    "trained_weights": "trained weights",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "gathered_weights": "gathered weights",
    "saved_activations": "saved activations",
    "temporary": "temporary",
    "loss_head": "loss head",
    "workspaces": "cuBLAS workspaces",
    "lost_bytes": "allocator",
    "context_bytes": "context",
    "margin_bytes": "margin",
    "shared_bytes": "paged and offloaded",
    "all_else": "all else",
    "cache": "key-value cache",
}
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
    "longest": "longest sample (tokens)",
    "bad_rows": "bad rows skipped",
    "rows_lost": "rows with no sample left",
    "dropped": "dropped as too long",
    "truncated": "truncated",
    "split": "split",
    "tokens_lost": "tokens lost",
    "unstable": "conversations rewritten by the template",
    "left_over": "beyond the row limit",
    "not_sampled": "rows not in the sample",
    "filtered": "rows dropped by dataset.transform",
    "held_out": "of these held out for eval",
}
_SHORT = "{:.3g}".format
_TILES = ("exact_match", "accuracy", "mae", "pearson", "eval_loss")
_HASHES = {"train": "training data", "eval": "eval data", "base": "base model", "transform": "dataset.transform"}
_CHOICES = {
    "recompute": "gradient checkpointing",
    "tile": "tokens per MLP tile",
    "tokens": "micro-batch tokens",
    "padded_because": "padded because",
}
_PROCESS_MEMORY = (
    "Tensors of the training only. The peak of the process, above, includes Python, torch and other libraries."
)
_STAGES = {"context": "CUDA context created", "weights": "weights loaded", "first_step": "after the first step"}
_ESTIMATED = "Estimated: the driver does not report the memory of this process."
_ASSETS = {"asset:tiny": "bundled tiny model", "asset:sample/train.jsonl": "bundled sample data"}
_MODULE = "app.train"
_MAX_LABELS = 50
_MIN_DIFFERENCE = 0.005  # between measured and estimated memory, as a fraction

_MEAN_REACH = 20  # means cover a tenth of the line: a twentieth before and after each point
_MEAN_POINTS = 150
_LOSS = Quantity("Loss", "", may_log=True, tall=True)
_SCORES = {
    metric.name: Quantity(
        metric.label[0].upper() + metric.label[1:],
        metric.meaning,
        formatter="{:.0%}".format if metric.is_share else "{:.3g}".format,
        is_share=metric.is_share,
        tall=True,
    )
    for metric in METRICS.values()
    if metric.logged and metric.name != "eval_loss"
}
_OTHERS = {
    "lr": Quantity("Learning rate", "", from_zero=True),
    "grad_norm": Quantity("Gradient norm", "before clipping", may_log=True, from_zero=True),
    "tokens_per_second": Quantity("Throughput", "tokens/s", formatter=format_count, from_zero=True),
    "peak_memory_bytes": Quantity("Peak GPU memory", "", formatter=format_bytes, from_zero=True),
    "gpu_utilization": Quantity("GPU utilization", "", formatter="{:.0%}".format, is_share=True),
}
_MAX_PROMPTS = 24
_Prompt = tuple[str, str]  # prompt and expected answer


def run_page(folder: Path) -> Page:
    """Return the page of the run in a folder."""
    run = read_run(folder)
    badge, charts, answers = status_badge(run.status), curves(run), answers_before_and_after(run.samples)
    return Page(
        title=f"{run.name}: {badge[0]}",
        heading=run.name,
        badges=[badge],
        about=[Paragraph(method(run)), Paragraph(_started(run), "soft small")],
        notes=list(_notes(run)),
        tiles=list(_tiles(run)),
        sections=[
            Section("Answers to eval prompts", [answers] if answers else []),
            Section("Training curves", [Charts(charts) if charts else Paragraph("No metrics logged.", "soft")]),
            Section("Evaluation scores", [block for scores in run.scores for block in _scores(scores)]),
            Section("Data", list(_data(run))),
            Section("Time per step", list(_phases(run))),
            Section("Memory", list(_memory(run))),
            _checks(run),
            Section("Reproduce", list(_commands(run))),
            Section("Environment", list(_environment(run))),
            Section(
                "Configuration",
                [Fold("run.yaml, every key", [Code(run.settings_text, "yaml")])] * bool(run.settings_text),
            ),
        ],
    )


def status_badge(status: str) -> Badge:
    """Return the badge of a status."""
    return _STATUSES.get(status, (status, "warn"))


def method(run: SavedRun) -> str:
    """Return one line with method, model, dataset, optimizer and device."""
    chosen, path = section_of(run.manifest, "choices"), _setting(run, "dataset", "path")
    parts = (
        _tuning(run),
        path and _named(path),
        f"{_setting(run, 'optimizer', 'kind')}, {_setting(run, 'schedule', 'kind')}".strip(", "),
        ", ".join(str(chosen[key]) for key in ("precision", "attention", "device") if chosen.get(key)),
    )
    return " · ".join(part for part in parts if part)


def _named(path: Any) -> str:
    """Return the path of a model or dataset, or a name for bundled ones."""
    return _ASSETS.get(path, str(path))


def _tuning(run: SavedRun) -> str:
    adapter, model = section_of(run.settings, "adapter"), section_of(run.settings, "model")
    if not model:
        return ""
    kind = ADAPTER_KINDS.get(str(adapter.get("kind", "none")), ADAPTER_KINDS["lora"])
    base = _setting(run, "quantization", "kind")
    quantization = QUANTIZATION_KINDS.get(base or "none")
    label = (
        f"{name_of(adapter)} on an {base} base"
        if quantization is None
        else quantization.tuning.format(name_of(adapter))
    )
    label += f", rank {adapter.get('r')}" if kind.has_rank else ""
    random = " with random weights" if model.get("weights") == "random" else ""
    return f"{label} · {_named(model.get('path'))}{random}"


def _setting(run: SavedRun, *path: str) -> str:
    value = section_of(run.settings, *path[:-1]).get(path[-1])
    return "" if value is None else str(value)


def _started(run: SavedRun) -> str:
    if not run.starts:
        return str(run.folder)
    first, last = run.starts[0], run.starts[-1]
    started, resumed = first["time"].replace("T", " ").replace("+00:00", " UTC"), len(run.starts) - 1
    more = "" if not resumed else ", resumed once" if resumed == 1 else f", resumed {resumed} times"
    return f"started {started} on {last['host']}{more} · {run.folder}"


def _notes(run: SavedRun) -> Iterator[tuple[str, str]]:
    if run.status == "failed":
        yield "bad", f"Failed. {run.result.get('error') or ''}"
    if run.status == RUNNING:
        yield "busy", "Running. This page is a snapshot; its time is at the bottom."
    if run.status == UNFINISHED:
        yield "warn", "No result: the process or its machine was killed."
    if run.status in ("stopped", UNFINISHED):
        yield "warn", f"Resume with: {resume_command(_typed(run) or [], str(run.folder))}"
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
    losses, loss = [y for _, y in run.points("loss") if y is not None], smoothed_loss(run.lines)
    if loss is not None:
        yield f"training loss, was {_SHORT(losses[0])}", METRICS["eval_loss"].text(loss)
    steps, planned = result.get("steps", last.get("step")), section_of(run.manifest, "counts").get("steps")
    of = f" of {planned:,}" if planned and planned != steps else ""
    yield f"for {format_integer(steps)}{of} steps", format_or(run.seconds() if steps else None, format_duration)
    samples = format_or(result.get("samples_per_second"), format_count)
    speed = f"tokens/s{f', {samples} samples/s' if samples else ''}"
    if busy := format_or(result.get("gpu_utilization"), "{:.0%}".format):
        speed += f", GPU utilization {busy}"
    yield speed, format_or(result.get("tokens_per_second"), format_count)
    yield f"peak {run.memory_owner} memory", format_or(result.get("peak_memory_bytes"), format_bytes)


def _scores(scores: Mapping[str, Any]) -> Iterator[Block]:
    """Yield the scores in a file of finetune evaluate: of one model, or of the base and the fine-tuned model."""
    sides = [side for side in ("base_", "tuned_") if f"{side}eval_loss" in scores] or [""]
    rows = [
        (metric.label, *(format_or(scores.get(f"{side}{key}"), metric.text) for side in sides))
        for key, metric in METRICS.items()
        if key in scores
    ]
    heads = [side.rstrip("_") or scores.get("weights", "value") for side in sides]
    if rows:
        yield Table(["", *heads], rows, numbers=(1, 2))
        yield Paragraph(f"{format_integer(scores.get('rows'))} rows of {scores.get('dataset')}", "remark")


def _data(run: SavedRun) -> Iterator[Block]:
    counted = section_of(run.manifest, "counts", "data")
    sides = [section_of(counted, "train"), section_of(counted, "eval")]
    labels = list(dict.fromkeys(name for side in sides for name in section_of(side, "classes")))
    counts = [
        ("labels" if labels and key == "trained_tokens" else label, *(_count(key, side) for side in sides))
        for key, label in _COUNTS.items()
        if any(side.get(key) for side in sides)
    ]
    samples = training_samples(run.preview, "Training samples,")
    lengths = length_bars(run.preview["lengths"]) if run.preview else []
    if not (counts or samples):
        return
    left: list[Block] = [
        Paragraph((f"{name}: ", Span(side["source"], "code")), "small")
        for name, side in zip(("train", "eval"), sides, strict=True)
        if side
    ]
    left += [_of_both("", counts)] if counts else []
    if labels:
        shown = labels[:_MAX_LABELS]
        classes = [section_of(side, "classes") for side in sides]
        left.append(
            _of_both("label", [(name, *(format_integer(side.get(name, 0)) for side in classes)) for name in shown])
        )
    more = len(labels) - _MAX_LABELS
    remarks = [*([f"{more} more labels."] if more > 0 else []), *_packing(run), *counted.get("notes", ())]
    left += [Paragraph(text, "remark") for text in remarks]
    yield from [Bars(lengths, "Sample lengths (tokens)", neighbors=left)] if lengths else left
    yield from [samples] if samples else []


def _of_both(name: str, rows: Sequence[tuple[str | None, ...]]) -> Table:
    return Table([name, "train", "eval"], rows, numbers=(1, 2))


def training_samples(preview: Mapping[str, Any], title: str = "") -> TrainingSamples | None:
    """Return the rows of preview.json; None if there are none."""
    rows = [
        (
            f"{row['place']}, {format_integer(row['tokens'])} tokens, "
            f"{format_integer(row['trained_tokens'])} highlighted",
            [
                (piece["text"], piece["trained"], f"(weight {piece['weight']:g})" if "weight" in piece else "")
                for piece in row["pieces"]
            ],
        )
        for row in preview.get("rows", ())
    ]
    return TrainingSamples(rows, str(preview.get("marked", "")), title) if rows else None


def _count(key: str, split: Mapping[str, Any]) -> str:
    """Return a count of one split; an eval set split off the training rows has no rows_read."""
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
    per_step = counts["units_per_step"]
    unit = counts["unit_name"] if per_step > 1 else counts["unit_name"].removesuffix("s")
    yield f"{-(-counts['units'] // per_step):,} steps per epoch, {per_step:,} {unit} per step{full}."


def _phases(run: SavedRun) -> Iterator[Block]:
    """Yield the mean time of each phase of a step; without a result, that of the last logged line."""
    values = next((values for values in (run.result, *reversed(run.lines)) if values.get("forward_seconds")), None)
    if values is None:
        return
    seconds = {name: values[key] for key, name in PHASES.items()}
    total = sum(seconds.values())
    bars = size_bars(seconds.items(), lambda size: f"{_seconds(size)} ({size / total:.0%})")
    facts = [("all phases", _seconds(total)), ("backward / forward", f"{seconds['backward'] / seconds['forward']:.1f}")]
    yield Bars(bars, "Mean by phase", neighbors=[Facts(facts)])
    if wait := data_wait(values):
        yield Paragraph(f"{wait[0].upper()}{wait[1:]}.", "remark")


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _memory(run: SavedRun) -> Iterator[Block]:
    """Yield the estimated tensor memory by part, the difference to the measured peak, and the memory of a GPU."""
    plan, counts, stages = section_of(run.manifest, "memory_plan"), section_of(run.manifest, "counts"), _stages(run)
    if not plan:
        yield from stages
        return
    trained = f"{counts['trained_weights']:,} ({counts['trained_weights'] / counts['weights']:.1%})"
    facts = [
        ("estimated peak", format_bytes(plan["bytes"])),
        ("peak during", plan["where"].replace("backward", "backward pass")),
        ("measured", format_or(run.result.get("memory_measured_bytes"), lambda size: _off(size, plan["bytes"]))),
        ("cuBLAS workspaces", format_or(run.result.get("workspace_bytes"), format_bytes)),
        ("parameters", format_integer(counts["weights"])),
        ("trainable parameters", trained),
    ]
    parts = {name: size for name, size in plan["anatomy"].items() if format_bytes(size) != format_bytes(0)}
    bars = size_bars(((PARTS.get(name, name), size) for name, size in parts.items()), format_bytes)
    yield Bars(bars, "Estimated memory by part", neighbors=[Facts(facts), *stages])
    if run.memory_owner == "process":
        yield Paragraph(_PROCESS_MEMORY, "remark")


def _stages(run: SavedRun) -> list[Block]:
    """Return a table of the GPU memory of this run by stage; none without a GPU."""
    sizes, others = section_of(run.manifest, "device_used_bytes"), section_of(run.result, "other_processes")
    stages = {
        **{label: sizes.get(stage) for stage, label in _STAGES.items()},
        "peak": run.result.get("device_used_bytes"),
    }
    rows = [(label, size) for label, value in stages.items() if (size := format_or(value, format_bytes))]
    notes = [_ESTIMATED] if run.result.get("device_is_estimated") else []
    notes += [f"Plus up to {text}."] if (text := format_others(others)) else []
    return [Table(["memory in use on the GPU", "this run"], rows, numbers=(1,), notes=notes)] if rows else []


def _off(measured: float, planned: float) -> str:
    difference = measured / planned - 1
    if abs(difference) < _MIN_DIFFERENCE:
        return "as estimated"
    return f"{format_bytes(measured)}, {abs(difference):.1%} {'more' if difference > 0 else 'less'} than estimated"


def _checks(run: SavedRun) -> Section:
    """Return the checks before the first step, folded if all passed."""
    rows, are_passed = [], True
    for check in run.manifest.get("proofs", ()):
        is_passed = check["difference"] <= check["allowed"]
        badge = Span("passed", "badge good") if is_passed else Span("failed", "badge bad")
        rows.append((badge, check["what"], *(format_number(check[key]) for key in ("difference", "allowed"))))
        are_passed &= is_passed
    table = Table(["", "comparison", "difference", "allowed"], rows, numbers=(2, 3))
    fold = Fold(f"{len(rows)} checks before the first step", [table], is_open=not are_passed)
    return Section("Checks passed" if are_passed else "Checks failed", [fold] if rows else [])


def _typed(run: SavedRun) -> list[str] | None:
    """Return the typed settings, if known."""
    line = run.starts[0]["command_line"] if run.starts else []
    settings = line[line.index(_MODULE) + 1 :] if _MODULE in line else None
    several = section_of(run.manifest, "choices").get("processes", 1) > 1
    return None if several and not settings else settings  # our launcher passes the settings in a file


def _commands(run: SavedRun) -> Iterator[Code]:
    """Yield the command that reproduces the run, and the original command."""
    yield Code(command_text("reproduce", f"run={run.folder}"), intro="Reproduce and compare:")
    if (settings := _typed(run)) is not None:
        yield Code(command_text("train", *settings), intro=f"Original command (in {run.starts[0]['folder']}):")


def _environment(run: SavedRun) -> Iterator[Block]:
    packages = section_of(run.manifest, "packages")
    starts = [
        (start["time"], start["host"], (section_of(start, "git").get("commit") or "")[:12]) for start in run.starts
    ]
    yield Facts(list(_environment_facts(run)))
    if packages:
        yield Fold("Packages", [Facts(list(packages.items()))])
    if hashes := section_of(run.manifest, "hashes"):
        yield Fold("Hashes", [Facts([(_HASHES.get(key, key), value) for key, value in hashes.items()])])
    if len(starts) > 1:
        yield Fold("Starts", [Table(["time", "host", "commit"], starts)])


def _environment_facts(run: SavedRun) -> Iterator[tuple[str, str | None]]:
    manifest = run.manifest
    hardware, choices = section_of(manifest, "hardware"), section_of(manifest, "choices")
    program = section_of(manifest, "program")
    git = section_of(program, "git")
    changes = " with uncommitted changes" if git.get("dirty") else ""
    commit = f"commit {git['commit']}{changes}" if git else "installed"
    yield "program", f"app {program['version']}, {commit}" if program else None
    yield "device", hardware.get("gpu") or hardware.get("device")
    yield "CPU", f"{hardware.get('cpu') or ''}, {manifest['cpus']} cores".strip(", ") if program else None
    words = {key: "yes" if value is True else "no" if value is False else value for key, value in choices.items()}
    yield "auto settings", ", ".join(f"{_CHOICES.get(key, key)} {text}" for key, text in words.items())
    for key in ("python", "platform", "seed"):
        yield key, None if manifest.get(key) is None else str(manifest[key])


def curves(run: SavedRun) -> list[LineChart]:
    """Return the charts of a run; empty if nothing was logged."""
    losses = [*_training_loss("train", run), Series("eval", run.points("eval_loss"), 1)]
    losses += [Series("general", points, 2)] if (points := run.points("also_eval_loss")) else []
    kinds = {**_SCORES, **_OTHERS}
    lines = {key: Series(key.replace("_", " "), _points(run, key), int(key in _SCORES)) for key in kinds}
    return _logged([LineChart(_LOSS, losses), *(LineChart(kinds[key], [line]) for key, line in lines.items())])


def curves_of_several(runs: Sequence[tuple[str, SavedRun]]) -> list[LineChart]:
    """Return the charts of several named runs, one color per run; single points are in tables."""
    losses = {
        "eval_loss": replace(_LOSS, title="Eval loss"),
        "loss": replace(_LOSS, title="Training loss", axis="smoothed"),
    }

    def series(key: str, name: str, run: SavedRun, color: int) -> Series:
        if key == "loss":
            return _training_loss(name, run, color)[-1]  # raw lines of several runs would overlap
        return Series(name, _points(run, key), color)

    charts = (
        LineChart(kind, [series(key, name, run, at) for at, (name, run) in enumerate(runs)], has_legend=False)
        for key, kind in {**losses, **_SCORES, **_OTHERS}.items()
    )
    return _logged(chart for chart in charts if any(len(line.points) > 1 for line in chart.series))


def _points(run: SavedRun, key: str) -> list[Point]:
    """Return the logged values of a metric; without the memory of a process, which hardly changes after the start."""
    return [] if key == "peak_memory_bytes" and run.memory_owner == "process" else run.points(key)


def _training_loss(name: str, run: SavedRun, color: int = 0) -> list[Series]:
    """Return the logged line and, if it is long enough, the smoothed one."""
    points = run.points("loss")
    means = smoothed(points)
    if not means:
        return [Series(name, points, color)]
    return [Series(name, points, color, "raw"), Series(f"{name}, smoothed", means, color, "mean")]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Return moving averages over a tenth of the line; empty for a short line."""
    reach = len(points) // _MEAN_REACH
    means = []
    for at in range(0, len(points) if reach else 0, max(1, len(points) // _MEAN_POINTS)):
        values = [y for _, y in points[max(0, at - reach) : at + reach + 1] if y is not None]
        means.append((points[at][0], fmean(values) if values else None))
    return means


def _logged(charts: Iterable[LineChart]) -> list[LineChart]:
    """Return the charts with points, all over the same range of steps."""
    shown = [chart for chart in charts if any(line.points for line in chart.series)]
    steps = [x for chart in shown for line in chart.series for x, _ in line.points]
    return [replace(chart, steps=(min(steps), max(steps))) for chart in shown]


def answers_before_and_after(lines: Sequence[Mapping[str, Any]]) -> AnswerTable | None:
    """Return the answers of the first and last steps in samples.jsonl; None if there are none."""
    steps = sorted({line["step"] for line in lines})
    answered = {_moment(step): _answers_at(lines, step) for step in (*steps[:1], *steps[-1:])}
    if not answered:
        return None
    counts = (
        f"{sum(map(_is_right, answers.values()))} of {len(answers)} {moment}" for moment, answers in answered.items()
    )
    return _shown(answered, list(list(answered.values())[-1]), f"Exact matches: {', '.join(counts)}.")


def last_answers(runs: Sequence[tuple[str, SavedRun]]) -> AnswerTable | None:
    """Return the last answers of several runs to prompts that at least two share; None if there are none."""
    answered = {}
    for name, run in runs:
        if run.samples:
            step = max(line["step"] for line in run.samples)
            answered[f"{name}, {_moment(step)}"] = _answers_at(run.samples, step)
    prompts = dict.fromkeys(prompt for answers in answered.values() for prompt in answers)
    shared = [prompt for prompt in prompts if sum(prompt in answers for answers in answered.values()) > 1]
    return _shown(answered, shared) if shared else None


def _answers_at(lines: Sequence[Mapping[str, Any]], step: int) -> dict[_Prompt, Sample]:
    names = Sample.__dataclass_fields__
    samples = [Sample(**{key: line[key] for key in names if key in line}) for line in lines if line["step"] == step]
    return {(sample.prompt, sample.expected): sample for sample in samples}


def _shown(
    answered: Mapping[str, Mapping[_Prompt, Sample]], prompts: Sequence[_Prompt], summary: str = ""
) -> AnswerTable:
    shown = []
    for prompt in prompts[:_MAX_PROMPTS]:
        answers = [
            Answer(label, samples[prompt].answer_text, _is_right(samples[prompt]))
            for label, samples in answered.items()
            if prompt in samples
        ]
        shown.append((prompt[0], [Answer("expected", prompt[1]), *answers]))
    return AnswerTable(shown, summary, len(prompts) - len(shown))


def _is_right(sample: Sample) -> bool:
    return sample.answer.strip() == sample.expected.strip()


def _moment(step: int) -> str:
    return "before training" if step == 0 else f"after step {step:,}"
