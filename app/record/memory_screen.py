"""The screen of app.check memory: what the bytes at the peak are, whether they fit, what would bring them in."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO, cast

from rich.console import Console as Terminal
from rich.console import RenderableType
from rich.text import Text

from app.record.console import SafeStream
from app.record.lines import memory, printable, quantity
from app.record.survey_screen import NARROW, beside, stacked

_BAR = 32  # characters of the whole memory
_KNOBS = 8
Facts = Mapping[str, Any]
Rows = list[tuple[str, RenderableType]]

PARTS = {
    "frozen_weights": "frozen weights",
    "quantization_constants": "scales of 4-bit weights",
    "trained_weights": "trained weights",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "borrowed_weights": "borrowed weights",
    "saved_activations": "saved activations",
    "temporary": "temporary",
    "loss_head": "loss head",
    "buckets_bytes": "gradient buckets",
    "lost_bytes": "allocator",
    "context_bytes": "context",
    "margin_bytes": "margin",
}
ON_TOP = ("buckets_bytes", "lost_bytes", "context_bytes", "margin_bytes")  # of what lives at the peak


def show_memory(facts: Facts, stream: TextIO | None = None) -> None:
    """All of it. Rich honours NO_COLOR and the width of the terminal."""
    safe = SafeStream(stream or sys.stdout)
    terminal = Terminal(file=cast(TextIO, safe), markup=False, highlight=False, emoji=False)
    narrow = terminal.width < NARROW
    for rows in (_head(facts), _bars(facts, terminal), _ends(facts)):
        terminal.print(stacked(rows) if narrow else beside(rows))


def _head(facts: Facts) -> Rows:
    rows = [("memory", facts["subject"]), ("worst", facts["worst_case"])]
    return [(name, Text(printable(text))) for name, text in rows]


def parts_of(facts: Facts) -> list[tuple[str, int]]:
    """Everything that is needed, by its name in PARTS; nothing that would be told as 0."""
    parts = [*facts["anatomy"].items(), *((name, facts[name]) for name in ON_TOP)]
    return [(name, size) for name, size in parts if memory(size) != memory(0)]


def _bars(facts: Facts, terminal: Terminal) -> Rows:
    parts = parts_of(facts)
    whole = max(facts["memory_bytes"], facts["needed_bytes"])
    width = max(len(PARTS[name]) for name, _ in parts)
    longest = max(1, min(_BAR, terminal.width - width - 22))
    block = "█" if terminal.encoding.startswith("utf") else "#"
    rows: Rows = [("peak", Text(f"{memory(facts['peak_bytes'])}, {facts['peak_where']}"))]
    for name, size in parts:
        bar = block * max(1, round(longest * size / whole))
        style = "yellow" if name in ON_TOP else "cyan"
        rows.append(("", Text.assemble(f"{PARTS[name]:<{width}} {memory(size):>8} ", (bar, style))))
    style = "bold green" if facts["fits"] else "bold red"
    return [*rows, ("needs", Text.assemble(needed(facts), ", ", (verdict(facts), style)))]


def needed(facts: Facts) -> str:
    """The sum, and of what."""
    return f"{memory(facts['needed_bytes'])} of the {memory(facts['memory_bytes'])} of {facts['label']}"


def verdict(facts: Facts) -> str:
    """In two words."""
    return "fits" if facts["fits"] else "does not fit"


def _ends(facts: Facts) -> Rows:
    rows: list[tuple[str, str]] = [("", text) for text in facts["notes"]]
    rows.append(("speed", speed(facts)))
    rows += [("" if at else "knobs", text) for at, text in enumerate(_knobs(facts))]
    rows.append(("took", f"{facts['seconds']:.1f} s, {traced(facts)}"))
    return [(name, Text(printable(text))) for name, text in rows]


def speed(facts: Facts) -> str:
    """The bound, said to be one."""
    told = f"{arithmetic(facts['flops_per_token'])} a token"
    if facts["bound"] is None:
        return told
    rate = facts["bound"]["tokens_per_second"]
    return f"{told}; at most {quantity(rate)} tokens/s on {facts['label']}, a bound that no run reaches"


def traced(facts: Facts) -> str:
    """How much of the model was."""
    return (
        "every layer traced"
        if facts["exact"]
        else f"{facts['traced_layers']} layers traced, the others like them"
    )


def arithmetic(flops: float) -> str:
    """48.2 GFLOP."""
    return f"{flops / 1e9:,.1f} GFLOP" if flops >= 1e9 else f"{flops / 1e6:,.1f} MFLOP"


def _knobs(facts: Facts) -> Iterator[str]:
    if not facts["knobs"]:
        yield "none is needed" if facts["fits"] else "none saves memory"
    for knob in facts["knobs"][:_KNOBS]:
        enough = " (enough)" if knob["fits"] else ""
        yield f"{knob['override']}\nsaves {memory(knob['saves_bytes'])}{enough}, {slower(knob)}: {knob['why']}"
    if facts["together"]:
        words = facts["together"]["override"]
        yield f"{words}\ntogether: {memory(facts['together']['needed_bytes'])}, which fits"


def slower(knob: Facts) -> str:
    """What a knob costs in time."""
    share = knob["slower_by"]
    if abs(share) < 0.005:
        return "as fast"
    return f"{abs(share):.0%} {'slower' if share > 0 else 'faster'}"


def stop(facts: Facts) -> str:
    """What a person is told who would have started the run: the anatomy in a line, and the cheapest way in."""
    parts = ", ".join(f"{PARTS[name]} {memory(size)}" for name, size in parts_of(facts))
    return f"it needs {needed(facts)}: {parts}; the peak is in: {facts['peak_where']}. {_way_in(facts)}"


def _way_in(facts: Facts) -> str:
    if facts["together"]:  # which costs less than what is enough alone
        return f"Set {facts['together']['override']}."
    enough: Sequence[Facts] = [knob for knob in facts["knobs"] if knob["fits"]]
    if enough:
        return f"Set {enough[0]['override']}, which saves {memory(enough[0]['saves_bytes'])}."
    return "No setting brings it in: choose a smaller model or more memory."
