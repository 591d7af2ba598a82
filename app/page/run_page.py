"""The page of one run: what it was, how it went, what it learnt from, and how to do it again."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from app.page import run_data, run_origin
from app.page.answers import answers
from app.page.curves import curves
from app.page.document import badge, document, facts_table, folded, note, section, table, tiles
from app.page.figures import duration, figure, memory, number, quantity, whole
from app.page.html import Child, Html, element, joined
from app.page.kept import RUNNING, UNFINISHED, KeptRun, read_kept, section_of

KINDS = {"finished": "good", "failed": "bad", "stopped": "warn", "dry_run": "busy", RUNNING: "busy"}
_PARTS = {
    "frozen_weights": "frozen weights",
    "quantization_constants": "constants of quantisation",
    "trained_weights": "trained weights",
    "gradients": "their gradients",
    "optimizer_states": "optimizer states",
    "borrowed_weights": "weights that other processes keep, of layers that are computed",
    "saved_activations": "activations kept for the backward pass",
    "temporary": "made and let go on the way",
    "loss_head": "logits and what is made of them",
    "all_else": "all else: activations, batches, libraries",
}
_WORDS = {"dry_run": "dry run", RUNNING: "still running"}


def run_page(folder: Path) -> str:
    """From what lies in a folder that has a run."""
    run = read_kept(folder)
    return document(
        f"{run.name}: {_WORDS.get(run.status, run.status)}",
        _head(run),
        _notes(run),
        tiles(_tiles(run)),
        section("Curves, by step", curves(run) or element("p", "Nothing has been logged.", class_="soft")),
        section("Answers on held-out rows", answers(run.samples)),
        section("Scores of app.evaluate", run_data.scores(run)),
        section("Data", run_data.data(run)),
        section("Memory", _memory(run)),
        section("Self-checks", run_origin.proofs(run)),
        section("Again", run_origin.again(run)),
        section("Environment", run_origin.environment(run)),
        section(
            "Configuration",
            folded("run.yaml, every key", element("pre", run.settings_text)) if run.settings_text else None,
        ),
    )


def status_badge(status: str) -> Html:
    """How a run ended, as a word in its colour."""
    return badge(_WORDS.get(status, status), KINDS.get(status, "warn"))


def _head(run: KeptRun) -> Html:
    when = [text for text in (_when(run), str(run.folder)) if text]
    return joined(
        element("div", element("h1", run.name), status_badge(run.status), class_="top"),
        element("p", what_it_is(run)),
        element("p", " · ".join(when), class_="soft small"),
    )


def what_it_is(run: KeptRun) -> str:
    """In a line: how which model was tuned on what, and with what."""
    chosen = section_of(run.manifest, "choices")
    return " · ".join(
        text
        for text in (
            _tuning(run),
            _of(run, "dataset", "path") and f"on {_of(run, 'dataset', 'path')}",
            f"{_of(run, 'optimizer', 'kind')}, {_of(run, 'schedule', 'kind')}".strip(", "),
            ", ".join(str(chosen[key]) for key in ("precision", "attention", "device") if chosen.get(key)),
        )
        if text
    )


def _tuning(run: KeptRun) -> str:
    adapter, model = section_of(run.settings, "adapter"), section_of(run.settings, "model")
    if not model:
        return ""
    kind = adapter.get("kind", "none")
    if kind == "none":
        how = "full fine-tuning"
    else:
        base = _of(run, "quantization", "kind")
        name = {"": "LoRA", "none": "LoRA", "nf4": "QLoRA"}.get(base, f"LoRA on an {base} base")
        how = f"{name}, rank {adapter.get('r')}"
    drawn = " with random weights" if model.get("weights") == "random" else ""
    return f"{how} of {model.get('path')}{drawn}"


def _of(run: KeptRun, *path: str) -> str:
    value = section_of(run.settings, *path[:-1]).get(path[-1])
    return "" if value is None else str(value)


def _when(run: KeptRun) -> str:
    starts = run.starts
    if not starts:
        return ""
    more = f", started {len(starts)} times" if len(starts) > 1 else ""
    where = f" on {starts[-1]['host']}" if starts[-1].get("host") else ""
    begun = str(starts[0].get("time", "")).replace("T", " ").replace("+00:00", " UTC")
    return f"begun {begun}{where}{more}"


def _notes(run: KeptRun) -> Iterator[Html]:
    if run.status == "failed":
        yield note("bad", element("b", "It failed. "), str(run.result.get("error") or "No reason was kept."))
    if run.status == RUNNING:
        yield note("warn", "It is still at work: this page is of the moment at which it was made.")
    if run.status == UNFINISHED:
        yield note(
            "warn", "It did not come to its end and left no result: it was killed, or its machine was."
        )
    if run.status in ("stopped", UNFINISHED):
        go_on = shlex.join(["python", "-m", "app.train", "...", f"output_dir={run.folder}", "resume=auto"])
        yield note("warn", f"It can go on from its last checkpoint: {go_on}")
    for remark in run.remarks:
        yield note("warn", remark)


def _tiles(run: KeptRun) -> Iterator[tuple[str, str | None]]:
    result, last = run.result, run.lines[-1] if run.lines else {}
    steps, planned = result.get("steps", last.get("step")), section_of(run.manifest, "counts").get("steps")
    objective, evaluated = number(result.get("objective")), number(result.get("eval_loss"))
    yield "objective", None if objective is None else figure(objective)
    yield "training loss", _first_and_last(run)
    yield "held-out loss, last", None if evaluated is None else figure(evaluated)
    for key, words in (("accuracy", "accuracy, last"), ("macro_f1", "macro F1, last")):
        share = number(result.get(key))
        yield words, None if share is None else f"{share:.2%}"
    yield f"steps of {whole(planned)}" if number(planned) else "steps", whole(steps)
    speed, seconds = number(result.get("tokens_per_second")), run.seconds()
    yield "tokens a second", None if speed is None else quantity(speed)
    peak = number(result.get("peak_memory_bytes"))
    yield "peak memory", None if peak is None else memory(peak)
    yield "time", None if seconds is None else duration(seconds)


def _first_and_last(run: KeptRun) -> str | None:
    known = [y for _, y in run.points("loss") if y is not None]
    return f"{known[0]:.3g} → {known[-1]:.3g}" if known else None


def _memory(run: KeptRun) -> Child:
    """What was measured, and what of it is known to the byte."""
    peaks = [y for _, y in run.points("peak_memory_bytes") if y is not None]
    if not peaks:
        return None
    device = section_of(run.manifest, "choices").get("device")
    of = "of the process, weights and libraries included" if device == "cpu" else "of the device"
    weights, trained = (
        number(section_of(run.manifest, "counts").get(key)) for key in ("weights", "trained_weights")
    )
    measured = facts_table(
        [
            *_predicted(run),
            ("peak, measured", f"{memory(max(peaks))} {of}"),
            ("after the first step", memory(peaks[0])),
            ("weights", whole(weights)),
            ("trained weights", f"{trained:,.0f} ({trained / weights:.1%})" if trained and weights else None),
        ]
    )
    tables = (measured, _anatomy(run, max(peaks)), _predicted_anatomy(run))
    return element("div", *tables, class_="charts")


def _predicted(run: KeptRun) -> Iterator[tuple[str, str | None]]:
    """What the tensors of this program were to take at most, and what they took."""
    predicted, measured = (
        number(run.result.get(f"memory_{kind}_bytes")) for kind in ("predicted", "measured")
    )
    where = section_of(run.manifest, "memory_plan").get("where")
    yield "predicted before the run", f"{memory(predicted)} ({where})" if predicted else None
    yield (
        "measured",
        f"{memory(measured)} ({measured / predicted - 1:+.1%})" if predicted and measured else None,
    )


def _predicted_anatomy(run: KeptRun) -> Child:
    """The whole of the predicted peak, by part."""
    parts = section_of(run.manifest, "memory_plan", "anatomy")
    known = {name: number(size) or 0.0 for name, size in parts.items()}
    total = sum(known.values())
    if not total:
        return None
    rows = [
        (_PARTS.get(name, name), memory(size), f"{size / total:.1%}") for name, size in known.items() if size
    ]
    return table(("part of the predicted peak", "bytes", "share"), rows, numbers=(1, 2))


def _anatomy(run: KeptRun, peak: float) -> Child:
    """The parts that stay from step to step, beside the peak."""
    parts = section_of(run.manifest, "memory")
    known = {name: number(parts.get(name)) or 0.0 for name in parts}
    if not known:
        return None
    known["all_else"] = max(0.0, peak - sum(known.values()))
    rows = [
        (_PARTS.get(name, name), memory(held), f"{held / peak:.1%}") for name, held in known.items() if held
    ]
    return table(("part of the peak", "bytes", "share"), rows, numbers=(1, 2))
