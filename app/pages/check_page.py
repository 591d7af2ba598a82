"""Findings of finetune check as sections of a page, which a terminal shows too."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from app.pages.charts import Bar, length_bars
from app.pages.comparison_page import planned_tables
from app.pages.page import Bars, Code, Facts, Page, Paragraph, Section
from app.pages.run_page import PARTS, training_samples
from app.safe_text import many
from app.tracking.formatting import format_bytes, format_count

_BEYOND_TENSORS = ("lost_bytes", "context_bytes", "margin_bytes")
_MAX_REASONS = 5
_MAX_LAYERS = 5
Found = Mapping[str, Any]  # of a check, in check.json


def check_page(found: Mapping[str, Found]) -> Page:
    """The page for check.json, which has a section for each check."""
    memory = found.get("memory")
    stops = [problem for facts in found.values() for problem in facts["stops"]]
    badges = [("training would fail", "bad") if stops else ("no problems found", "good")]
    if memory:
        fits = ("fits", "good") if memory["fits"] else ("does not fit", "bad")
        badges.append((f"{fits[0]} {memory['label']}", fits[1]))
    name = next((subject(found[key]) for key, subject in _SUBJECTS.items() if key in found), next(iter(found)))
    return Page(
        title=f"Check: {name}",
        heading=name,
        badges=badges,
        about=[Paragraph("checked before training", "soft small")],
        notes=[("bad", problem) for problem in stops],
        sections=[section for key, make in SECTIONS.items() if key in found for section in make(found[key])],
    )


def data_sections(facts: Found) -> list[Section]:
    """Sections for `data` of check.json."""
    percentiles, preview = facts["length_percentiles"], facts["preview"]
    samples = training_samples(preview)
    advice = [Code(str(each["set"]), why=str(each["why"])) for each in facts["advice"]]
    sections = [Section("Data", [Facts(list(_data_rows(facts)))], label="data")]
    if percentiles is not None:
        text = "  ".join(f"{name} {length:,}" for name, length in percentiles.items())
        dropped = (f">{facts['max_length']:,}", facts["dropped"]) if facts["dropped"] else None
        bars = Bars(length_bars(facts["lengths"], dropped), counts=True)
        sections.append(Section("Sample lengths (before truncation)", [Facts([("lengths", text)]), bars]))
    return [
        *sections,
        Section("First samples", [samples] if samples else [], label="samples"),
        Section("Advice", advice or [Facts([("", "none")])], label="advice"),
    ]


def memory_sections(facts: Found) -> list[Section]:
    """Sections for `memory` of check.json."""
    knobs = []
    for each in facts["knobs"]:
        share, enough = each["slower_by"], " (enough)" if each["fits"] else ""
        cost = f"{abs(share):.0%} {'slower' if share > 0 else 'faster'}" if abs(share) >= 0.005 else "as fast"
        saves = f"saves {format_bytes(each['saves_bytes'])}{enough}, {cost}"
        knobs.append(Code(str(each["override"]), why=f"{saves}: {each['why']}"))
    if facts["together"]:
        needed = format_bytes(facts["together"]["needed_bytes"])
        knobs.append(Code(str(facts["together"]["override"]), why=f"together: {needed}, fits"))
    most = max(facts["memory_bytes"], facts["needed_bytes"])
    bars = [
        Bar(PARTS.get(name, name), size / most, format_bytes(size), name in _BEYOND_TENSORS)
        for name, size in _parts(facts)
    ]
    peak = Facts([("peak", f"{format_bytes(facts['peak_bytes'])} ({facts['peak_where']})")])
    sections = [
        Section("Planned run", [Facts([("memory", facts["subject"]), ("micro-batch", facts["worst_case"])])]),
        Section("Memory at the peak", [peak, Bars(bars)]),
        Section("Verdict", [Facts(list(_verdict(facts)))]),
    ]
    if answers := facts.get("answers"):
        size = f"{answers['rows']} of {answers['length']:,} tokens, {many(answers['beams'], 'beam')}"
        needs = f"{_needed({**facts, **answers})}: {'fits' if answers['fits'] else 'does not fit'}"
        most = max(most, answers["needed_bytes"])
        parts = [Bar(PARTS.get(name, name), n / most, format_bytes(n)) for name, n in answers["anatomy"].items()]
        sections.append(Section("Memory of answers", [Facts([("answers", size), ("", needs)]), Bars(parts)]))
    return [*sections, Section("Memory-saving options, cheapest first", knobs, label="options")]


def _parts(facts: Found) -> list[tuple[str, int]]:
    """Parts of the needed memory by their names in PARTS, without those that round to 0."""
    parts = [*facts["anatomy"].items(), *((name, facts[name]) for name in _BEYOND_TENSORS)]
    return [(name, size) for name, size in parts if format_bytes(size) != format_bytes(0)]


def cluster_sections(facts: Found) -> list[Section]:
    """Sections for `cluster` of check.json."""
    first = facts["ranks"][0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    members = [("", counted_processes(facts)), ("versions", versions)]
    members += [(f"process {each['rank']}", _member(each)) for each in facts["ranks"]]
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


def quantization_sections(facts: Found) -> list[Section]:
    """Sections for `quantization` of check.json."""
    worst = max(each["error"] for each in facts["formats"]) or 1.0
    bars = [
        Bar(f"{each['format']} ({each['bits_per_weight']:.2f} bits)", each["error"] / worst, f"{each['error']:.2%}")
        for each in facts["formats"]
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
    of = f"{facts['weights']:,} weights in {len(facts['layers'])} linear layers, {facts['seconds']:.1f} s"
    title = "Quantization error by format"
    return [
        Section(title, [Facts([("weights", of)]), Bars(bars)]),
        Section("Layers with the largest outliers", [Facts(outliers)]),
    ]


def models_sections(facts: Found) -> list[Section]:
    """Sections for `models` of check.json: counts by task, then each kind that is not packed."""
    words = {"packed": "packed", "padded": "padded", "own": "padded with own attention", "refused": "not trainable"}
    counts = [
        (task, f"{', '.join(f'{each[tier]} {text}' for tier, text in words.items())}, of {many(each['total'], 'kind')}")
        for task, each in facts["by_task"].items()
    ]
    others = [each for each in facts["kinds"] if each["tier"] != "packed" or len(facts["kinds"]) == 1]
    of_whole = {each["kind"]: f"its text part, {each['text_of']}: " for each in others if each["text_of"]}
    rows = [
        (each["kind"], f"{each['task']}, {each['tier']}: {of_whole.get(each['kind'], '')}{each['reason']}".strip(": "))
        for each in others
    ]
    of = f"Model kinds of transformers {facts['transformers']}"
    title = "Not packed" if len(rows) != 1 else "This model"
    return [Section(of, [Facts(counts)]), Section(title, [Facts(rows)])]


def counted_processes(facts: Found) -> str:
    """Processes, machines and backend of a cluster check."""
    machines = many(facts["machines"], "machine")
    return f"{facts['processes']} processes on {machines}, {facts['backend']}"


def _member(each: Found) -> str:
    parts = [each["host"], f"{each['device']['name']}, {many(each['device']['cores'], 'core')}"]
    if "matmul_flops" in each:
        parts.append(f"{each['matmul_flops'] / 1e12:.3g} TFLOP/s")
        parts.append(f"clock {each['clock_offset_seconds']:+.1f} s")
    return "; ".join(parts)


def out_of_memory_problem(facts: Found) -> str:
    """Problem of a run that does not fit: the needed memory by part, and the cheapest remedy."""
    parts = ", ".join(f"{PARTS.get(name, name)} {format_bytes(size)}" for name, size in _parts(facts))
    return f"it needs {_needed(facts)}: {parts}; peak: {facts['peak_where']}. {_way_in(facts)}"


def _data_rows(facts: Found) -> Iterator[tuple[str, str]]:
    yield "", f"{facts['source']}, {facts['format']}"
    for at, line in enumerate(facts["lines"]):  # those of a run
        yield "" if at else "rows", line
    yield from _bad_rows("bad", facts["bad"])
    yield from _bad_rows("eval bad", facts["eval"]["bad"] if facts["eval"] else ())
    yield "packing", _packing(facts)
    yield "steps", _steps(facts)


def _bad_rows(label: str, reasons: Sequence[Found]) -> Iterator[tuple[str, str]]:
    """Each reason with its first place and the number of others."""
    for at, each in enumerate(reasons[:_MAX_REASONS]):
        others = f" and {many(each['rows'] - 1, 'more row')}" if each["rows"] > 1 else ""
        yield "" if at else label, f"{each['first']}{others}: {each['reason']}"
    if len(reasons) > _MAX_REASONS:
        yield "", f"and {len(reasons) - _MAX_REASONS} more reasons"


def _packing(facts: Found) -> str:
    if facts["fill"] is None:
        return "nothing to pack"
    least = f"lower bound {facts['lower_bound_bins']:,}"
    bins = f"{many(facts['bins'], 'bin')} of {facts['bin_tokens']:,} tokens, {facts['fill']:.2%} full, {least}"
    padded = f"{facts['padded_fill']:.1%} full"
    return f"{bins}; padded rows: {padded}" if facts["packing"] else f"off: padded rows, {padded}; on: {bins}"


def _steps(facts: Found) -> str:
    size = many(facts["units_per_step"], facts["unit_name"].removesuffix("s"))
    shared = f", shared by {facts['processes']} processes" if facts["processes"] > 1 else ""
    tokens = f"about {facts['tokens_per_step']:,.0f} tokens, {facts['trained_tokens_per_step']:,.0f} trained"
    epochs = f"{facts['epochs']:.3g} {'epoch' if facts['epochs'] == 1 else 'epochs'}"
    return f"{facts['steps']:,} ({epochs}), {size} per step, {tokens}{shared}"


def _verdict(facts: Found) -> Iterator[tuple[str, str]]:
    yield "needs", f"{_needed(facts)}: {'fits' if facts['fits'] else 'does not fit'}"
    for text in facts["notes"]:
        yield "", text
    bound, flops = facts["bound"], facts["flops_per_token"]
    speed = f"{flops / 1e9:,.1f} GFLOP per token" if flops >= 1e9 else f"{flops / 1e6:,.1f} MFLOP per token"
    if bound is not None:
        rate = f"{format_count(bound['tokens_per_second'])} tokens/s on {facts['label']}"
        speed = f"{speed}; upper bound {rate} (hardware peak)"
    yield "speed", speed
    if not facts["knobs"]:
        yield "options", "none needed" if facts["fits"] else "none saves memory"
    traced = "every layer" if facts["exact"] else f"{facts['traced_layers']} layers"
    yield "took", f"{facts['seconds']:.1f} s, {traced} traced{'' if facts['exact'] else ', the rest extrapolated'}"


def _needed(facts: Found) -> str:
    return f"{format_bytes(facts['needed_bytes'])} of {format_bytes(facts['memory_bytes'])} on {facts['label']}"


def _way_in(facts: Found) -> str:
    if facts["together"]:  # which costs less than what is enough alone
        return f"Set {facts['together']['override']}."
    for knob in facts["knobs"]:
        if knob["fits"]:
            return f"Set {knob['override']}, which saves {format_bytes(knob['saves_bytes'])}."
    return "No setting makes it fit: choose a smaller model or a larger GPU."


SECTIONS = {
    "data": data_sections,
    "memory": memory_sections,
    "cluster": cluster_sections,
    "quantization": quantization_sections,
    "models": models_sections,
    "ladder": planned_tables,
}
# of a page with several checks the first names it
_SUBJECTS: dict[str, Callable[[Found], str]] = {
    "data": lambda facts: " + ".join(PurePath(each).name for each in facts["source"].split(" + ")),
    "memory": lambda facts: str(facts["subject"]),
    "quantization": lambda facts: str(facts["model"]),
    "ladder": lambda facts: str(facts["sweep"]),
    "models": lambda facts: f"models of transformers {facts['transformers']}",
    "cluster": counted_processes,
}
