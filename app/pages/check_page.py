"""Results of finetune check as sections of a page, also shown in the terminal."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from app.pages.charts import Bar, length_bars, size_bars
from app.pages.ladder_tables import planned_tables
from app.pages.page import Bars, Code, Facts, Page, Paragraph, Section
from app.pages.run_page import PARTS, training_samples
from app.safe_text import many
from app.tracking.formatting import format_bytes, format_count, speedup_line

_BEYOND_TENSORS = ("lost_bytes", "context_bytes", "margin_bytes", "shared_bytes")
_MAX_REASONS = 5
_MAX_LAYERS = 5
CheckFacts = Mapping[str, Any]  # result of a check in check.json


def check_page(checks: Mapping[str, CheckFacts]) -> Page:
    """Return the page for check.json, with a section per check."""
    memory = checks.get("memory")
    stops = [problem for facts in checks.values() for problem in facts["stops"]]
    badges = [("training would fail", "bad") if stops else ("no problems found", "good")]
    if memory:
        fits = ("fits", "good") if memory["fits"] else ("does not fit", "bad")
        badges.append((f"{fits[0]} {memory['label']}", fits[1]))
    name = next((subject(checks[key]) for key, subject in _SUBJECTS.items() if key in checks), next(iter(checks)))
    return Page(
        title=f"Check: {name}",
        heading=name,
        badges=badges,
        about=[Paragraph("checked before training", "soft small")],
        notes=[("bad", problem) for problem in stops],
        sections=[section for key, make in SECTIONS.items() if key in checks for section in make(checks[key])],
    )


def data_sections(facts: CheckFacts) -> list[Section]:
    """Return the sections for `data` in check.json."""
    percentiles, preview = facts["length_percentiles"], facts["preview"]
    samples = training_samples(preview)
    advice = [Code(str(setting["set"]), why=str(setting["why"])) for setting in facts["advice"]]
    sections = [Section("Data", [Facts(list(_data_rows(facts)))], label="data")]
    if percentiles is not None:
        text = "  ".join(f"{name} {length:,}" for name, length in percentiles.items())
        dropped = (f">{facts['max_length']:,}", facts["dropped"]) if facts["dropped"] else None
        bars = Bars(length_bars(facts["lengths"], dropped), counts=True)
        sections.append(Section("Sample lengths (before truncation)", [Facts([("lengths", text)]), bars]))
    return [
        *sections,
        Section("First samples", [samples] if samples else [], label="samples"),
        Section("Advice", advice, label="advice"),
    ]


def memory_sections(facts: CheckFacts) -> list[Section]:
    """Return the sections for `memory` in check.json."""
    options = []
    for option in facts["knobs"]:
        share, enough = option["slower_by"], " (enough)" if option["fits"] else ""
        cost = f"{abs(share):.0%} {'slower' if share > 0 else 'faster'}" if abs(share) >= 0.005 else "as fast"
        saves = f"saves {format_bytes(option['saves_bytes'])}{enough}, {cost}"
        options.append(Code(str(option["override"]), why=f"{saves}: {option['why']}"))
    if facts["together"]:
        needed = format_bytes(facts["together"]["needed_bytes"])
        options.append(Code(str(facts["together"]["override"]), why=f"together: {needed}, fits"))
    bars = _memory_bars(_parts(facts), facts)
    peak = Facts([("peak", f"{format_bytes(facts['peak_bytes'])} ({facts['peak_where']})")])
    sections = [
        Section("Estimated run", [Facts([("memory", facts["subject"]), ("micro-batch", facts["worst_case"])])]),
        Section("Memory at the peak", [peak, bars]),
        Section("Verdict", [Facts(list(_verdict(facts)))]),
    ]
    if answers := facts.get("answers"):
        size = f"{answers['rows']} of {answers['length']:,} tokens, {many(answers['beams'], 'beam')}"
        needs = f"{_needed({**facts, **answers})}: {'fits' if answers['fits'] else 'does not fit'}"
        parts = _memory_bars(answers["anatomy"].items(), facts)
        sections.append(Section("Memory of generation", [Facts([("answers", size), ("", needs)]), parts]))
    return [*sections, Section("Memory-saving options, cheapest first", options, label="options")]


def _memory_bars(parts: Iterable[tuple[str, int]], facts: CheckFacts) -> Bars:
    """Return bars of parts of the memory; a part that alone exceeds the memory of the hardware is `beyond` it."""
    return Bars(size_bars(((PARTS.get(name, name), size) for name, size in parts), format_bytes, facts["memory_bytes"]))


def _parts(facts: CheckFacts) -> list[tuple[str, int]]:
    """Return the parts of the required memory by their names in PARTS, without those that round to 0."""
    parts = [*facts["anatomy"].items(), *((name, facts.get(name, 0)) for name in _BEYOND_TENSORS)]
    return [(name, size) for name, size in parts if format_bytes(size) != format_bytes(0)]


def cluster_sections(facts: CheckFacts) -> list[Section]:
    """Return the sections for `cluster` in check.json."""
    first = facts["ranks"][0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    members = [("", counted_processes(facts)), ("versions", versions)]
    members += [(f"process {rank['rank']}", _member(rank)) for rank in facts["ranks"]]
    rates, before = [], ""
    for row in facts["collectives"]:
        algorithm, bus = (format_bytes(row[f"{kind}_bytes_per_second"]) for kind in ("algorithm", "bus"))
        took = f"{row['bytes'] / 2**20:.3g} MiB in {1000 * row['seconds']:.2f} ms"
        rates.append(("" if row["name"] == before else row["name"], f"{took}: {algorithm}/s, bus {bus}/s"))
        before = row["name"]
    notes = [("note", text) for text in facts["notes"]]
    return [
        Section("Processes", [Facts(members)], label="processes"),
        Section("Collectives", [Facts(rates or [("timed", "skipped: training would fail")])]),
        Section("Notes", [Facts([*notes, ("took", f"{facts['seconds']:.1f} s")])]),
    ]


def quantization_sections(facts: CheckFacts) -> list[Section]:
    """Return the sections for `quantization` in check.json."""
    worst = max(number_format["error"] for number_format in facts["formats"]) or 1.0
    bars = [
        Bar(
            f"{number_format['format']} ({number_format['bits_per_weight']:.2f} bits)",
            number_format["error"] / worst,
            f"{number_format['error']:.2%}",
        )
        for number_format in facts["formats"]
    ]
    layers = sorted(facts["layers"], key=lambda layer: -layer["largest_in_stds"])[:_MAX_LAYERS]
    outliers = [
        (
            "" if at else "outliers",
            f"{layer['layer']}: maximum {layer['largest_in_stds']:.1f} standard deviations, "
            f"{layer['outlier_share']:.2%} beyond 6",
        )
        for at, layer in enumerate(layers)
    ]
    weights = f"{facts['weights']:,} weights in {len(facts['layers'])} linear layers, {facts['seconds']:.1f} s"
    title = "Quantization error by format"
    sections = [
        Section(title, [Facts([("weights", weights)]), Bars(bars)]),
        Section("Layers with the largest outliers", [Facts(outliers)]),
    ]
    if "activations" in facts:
        sections.append(Section("Outliers of layer inputs", [Facts(list(_activation_rows(facts["activations"])))]))
    return sections


def _activation_rows(facts: CheckFacts) -> Iterator[tuple[str, str]]:
    """Yield the outliers of all layers, then the layers with the largest error of plain int8 products."""
    layers = sorted(facts["layers"], key=lambda layer: -layer["int8_error"])
    columns = {name: sum(layer[name] for layer in layers) for name in ("outlier_columns", "columns")}
    yield "inputs", f"{many(facts['rows'], 'sample')}, {facts['tokens']:,} tokens, {len(layers)} linear layers"
    yield "outliers", _outliers({**facts, **columns})
    yield "error", f"of the outputs: {_int8_errors(facts)}, which keeps these columns in 16 bits"
    for at, layer in enumerate(layers[:_MAX_LAYERS]):
        yield "" if at else "worst", f"{layer['layer']}: {_outliers(layer)}; error {_int8_errors(layer)}"


def _outliers(facts: CheckFacts) -> str:
    columns = f"{facts['outlier_columns']:,} of {facts['columns']:,} columns"
    return f"{facts['outlier_share']:.2%} of values beyond 6, in {columns}"


def _int8_errors(facts: CheckFacts) -> str:
    return f"{facts['int8_error']:.2%} in int8, {facts['llm_int8_error']:.2%} in LLM.int8()"


def models_sections(facts: CheckFacts) -> list[Section]:
    """Return the sections for `models` in check.json: counts by task, then the types that are not packed."""
    labels = {"packed": "packed", "padded": "padded", "own": "padded with own attention", "refused": "not trainable"}
    counts = [
        (
            task,
            f"{', '.join(f'{sums[tier]} {text}' for tier, text in labels.items())}, of {many(sums['total'], 'type')}",
        )
        for task, sums in facts["by_task"].items()
    ]
    others = [kind for kind in facts["kinds"] if kind["tier"] != "packed" or len(facts["kinds"]) == 1]
    of_whole = {kind["kind"]: f"its text part, {kind['text_of']}: " for kind in others if kind["text_of"]}
    rows = [
        (kind["kind"], f"{kind['task']}, {kind['tier']}: {of_whole.get(kind['kind'], '')}{kind['reason']}".strip(": "))
        for kind in others
    ]
    heading = f"Model types of transformers {facts['transformers']}"
    title = "Not packed" if len(rows) != 1 else "This model"
    return [Section(heading, [Facts(counts)]), Section(title, [Facts(rows)])]


def counted_processes(facts: CheckFacts) -> str:
    """Return the number of processes and machines, and the backend, of a cluster check."""
    machines = many(facts["machines"], "machine")
    return f"{facts['processes']} processes on {machines}, {facts['backend']}"


def _member(rank: CheckFacts) -> str:
    parts = [rank["host"], f"{rank['device']['name']}, {many(rank['device']['cores'], 'core')}"]
    if "matmul_flops" in rank:
        parts.append(f"{rank['matmul_flops'] / 1e12:.3g} TFLOP/s")
        parts.append(f"clock {rank['clock_offset_seconds']:+.1f} s")
    return "; ".join(parts)


def out_of_memory_problem(facts: CheckFacts) -> str:
    """Return the problem of a run that does not fit: the required memory by part, and the cheapest fix."""
    parts = ", ".join(f"{PARTS.get(name, name)} {format_bytes(size)}" for name, size in _parts(facts))
    return f"it needs {_needed(facts)}: {parts}; peak: {facts['peak_where']}. {_way_in(facts)}"


def _data_rows(facts: CheckFacts) -> Iterator[tuple[str, str]]:
    yield "", f"{facts['source']}, {facts['format']}"
    for at, line in enumerate(facts["lines"]):  # the lines that a run prints
        yield "" if at else "rows", line
    yield from _bad_rows("bad", facts["bad"])
    yield from _bad_rows("eval bad", facts["eval"]["bad"] if facts["eval"] else ())
    yield "packing", _packing(facts)
    yield "steps", _steps(facts)


def _bad_rows(label: str, reasons: Sequence[CheckFacts]) -> Iterator[tuple[str, str]]:
    """Yield each reason with its first row and the number of other rows."""
    for at, reason in enumerate(reasons[:_MAX_REASONS]):
        others = f" and {many(reason['rows'] - 1, 'more row')}" if reason["rows"] > 1 else ""
        yield "" if at else label, f"{reason['first']}{others}: {reason['reason']}"
    if len(reasons) > _MAX_REASONS:
        yield "", f"and {len(reasons) - _MAX_REASONS} more reasons"


def _packing(facts: CheckFacts) -> str:
    if facts["fill"] is None:
        return "nothing to pack"
    least = f"lower bound {facts['lower_bound_bins']:,}"
    bins = f"{many(facts['bins'], 'bin')} of {facts['bin_tokens']:,} tokens, {facts['fill']:.2%} full, {least}"
    padded = f"{facts['padded_fill']:.1%} full"
    return f"{bins}; padded rows: {padded}" if facts["packing"] else f"off: padded rows, {padded}; on: {bins}"


def _steps(facts: CheckFacts) -> str:
    size = many(facts["units_per_step"], facts["unit_name"].removesuffix("s"))
    shared = f", shared by {facts['processes']} processes" if facts["processes"] > 1 else ""
    tokens = f"about {facts['tokens_per_step']:,.0f} tokens, {facts['trained_tokens_per_step']:,.0f} trained"
    epochs = f"{facts['epochs']:.3g} {'epoch' if facts['epochs'] == 1 else 'epochs'}"
    return f"{facts['steps']:,} ({epochs}), {size} per step, {tokens}{shared}"


def _verdict(facts: CheckFacts) -> Iterator[tuple[str, str]]:
    yield "needs", f"{_needed(facts)}: {'fits' if facts['fits'] else 'does not fit'}"
    for text in facts["notes"]:
        yield "", text
    bound, speed = facts["bound"], _flops(facts)
    if bound is not None:
        rate = f"{format_count(bound['tokens_per_second'])} tokens/s on {facts['label']}"
        speed = f"{speed}; upper bound {rate} (hardware peak)"
    yield "speed", speed
    for at, entry in enumerate(facts["faster"]):
        yield "" if at else "faster", speedup_line(entry)
    if not facts["knobs"]:
        yield "options", "none needed" if facts["fits"] else "none saves memory"
    traced = "every layer" if facts["exact"] else f"{facts['traced_layers']} layers"
    yield "took", f"{facts['seconds']:.1f} s, {traced} traced{'' if facts['exact'] else ', the rest extrapolated'}"


def _flops(facts: CheckFacts) -> str:
    """Return the FLOPs per token, with those of backward and recomputation relative to forward."""
    flops, forward = facts["flops_per_token"], facts["forward_flops"]
    parts = f"forward 1 : backward {flops / forward - 1:.1f}"
    if facts["recomputed_flops"]:
        parts = f"{parts} : recomputed {facts['recomputed_flops'] / forward:.1f}"
    size = f"{flops / 1e9:,.1f} GFLOP" if flops >= 1e9 else f"{flops / 1e6:,.1f} MFLOP"
    return f"{size} per token ({parts})"


def _needed(facts: CheckFacts) -> str:
    return f"{format_bytes(facts['needed_bytes'])} of {format_bytes(facts['memory_bytes'])} on {facts['label']}"


def _way_in(facts: CheckFacts) -> str:
    if facts["together"]:  # costs less than a single setting that is enough
        return f"Set {facts['together']['override']}."
    for option in facts["knobs"]:
        if option["fits"]:
            return f"Set {option['override']}, which saves {format_bytes(option['saves_bytes'])}."
    return "No setting makes it fit: choose a smaller model or a larger GPU."


SECTIONS = {
    "data": data_sections,
    "memory": memory_sections,
    "cluster": cluster_sections,
    "quantization": quantization_sections,
    "models": models_sections,
    "ladder": planned_tables,
}
# the first of these names a page with several checks
_SUBJECTS: dict[str, Callable[[CheckFacts], str]] = {
    "data": lambda facts: " + ".join(PurePath(source).name for source in facts["source"].split(" + ")),
    "memory": lambda facts: str(facts["subject"]),
    "quantization": lambda facts: str(facts["model"]),
    "ladder": lambda facts: str(facts["sweep"]),
    "models": lambda facts: f"models of transformers {facts['transformers']}",
    "cluster": counted_processes,
}
