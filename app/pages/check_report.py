"""Findings of app.check, as a page and in a terminal."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TextIO

from rich.table import Table
from rich.text import Text

from app.pages.check_summary import SECTIONS, Section, counted_processes
from app.pages.ladder_table import planned_tables
from app.pages.read_run import TrainingSample
from app.pages.render import render
from app.safe_text import printable
from app.tracking.console import SafeStream, print_table, rich_terminal

if TYPE_CHECKING:
    from rich.console import Console as Terminal

_MAX_BAR_CHARACTERS = 32
_NAMED_BY = {"data": "source", "memory": "subject", "quantization": "model", "ladder": "sweep"}  # key of the facts
Rows = Iterator[tuple[str, Text]]


def check_page(found: Mapping[str, Any]) -> str:
    """The page for check.json, which has a section for each check."""
    data, memory, models, ladder = map(found.get, ("data", "memory", "models", "ladder"))
    stops = [problem for facts in found.values() for problem in facts["stops"]]
    badges = [("a run would stop", "bad") if stops else ("nothing stops a run", "good")]
    if memory:
        fits = ("fits", "good") if memory["fits"] else ("does not fit", "bad")
        badges.append((f"{fits[0]} {memory['label']}", fits[1]))
    sections = [section for key, make in SECTIONS.items() if key in found for section in make(found[key])]
    name = next((found[key][of] for key, of in _NAMED_BY.items() if key in found), "")
    if not name:
        name = f"models of transformers {models['transformers']}" if models else counted_processes(found["cluster"])
    if data:  # the folders stand below
        name = " + ".join(PurePath(each).name for each in name.split(" + "))
    notes = [("bad", problem) for problem in stops]
    tables = planned_tables(ladder) if ladder else []
    title = f"Check: {name}"
    return render("check", title=title, name=name, badges=badges, notes=notes, sections=sections, ladder=tables)


def show_check(sections: Sequence[Section], stream: TextIO | None = None) -> None:
    """Print the sections; rich honours NO_COLOR and the width of the terminal."""
    safe = SafeStream(stream or sys.stdout)
    terminal = rich_terminal(safe)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, min_width=8)
    table.add_column(overflow="fold")
    for section in sections:
        for name, value in _rows(section, terminal):
            table.add_row(Text(name, style="bold"), value)
    print_table(safe, table)


def _rows(section: Section, terminal: "Terminal") -> Rows:
    for name, text in section.rows:
        yield name, Text(printable(text))
    yield from _bars(section, terminal)
    if section.samples:
        yield from _samples(section.samples, section.marked, terminal)
    for at, (override, why) in enumerate(section.advice):
        name = "" if at else section.label
        yield name, Text.assemble((printable(override), "bold cyan"), "\n", printable(why))


def _bars(section: Section, terminal: "Terminal") -> Rows:
    labels, texts = ([getattr(bar, name) for bar in section.bars] for name in ("label", "text"))
    width, numbers = (max(map(len, each), default=0) for each in (labels, texts))
    longest = max(1, min(_MAX_BAR_CHARACTERS, terminal.width - width - numbers - 14))
    block = "█" if terminal.encoding.startswith("utf") else "#"
    for bar in section.bars:
        drawn = block * (max(1, round(longest * bar.share)) if bar.share else 0)
        before = f"{bar.label:>{width}} " if section.counts else f"{bar.label:<{width}} {bar.text:>8} "
        after = f" {bar.text}" if section.counts else ""
        yield "", Text.assemble(before, (drawn, "yellow" if bar.beyond else "cyan"), after)


def _samples(samples: Sequence[TrainingSample], marked: str, terminal: "Terminal") -> Rows:
    has_colour = terminal.color_system is not None and not terminal.no_color

    def mark(text: str) -> Text:
        """Mark by colour, or by brackets where there is none."""
        return Text(text, style="black on green") if has_colour else Text(f"[[{text}]]", style="bold")

    yield "samples", Text.assemble("the first, ", mark(marked))
    for sample in samples:
        yield "", Text(printable(sample.place), style="dim")
        yield (
            "",
            Text.assemble(
                *(
                    part
                    for text, trained, weight in sample.pieces
                    for part in (mark(printable(text)) if trained else printable(text), (weight, "dim"))
                )
            ),
        )
