"""What app.check found in the data, in a terminal: colours and bars where it has them, plain words elsewhere."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TextIO, cast

from rich.console import Console as Terminal
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from app.record.console import SafeStream
from app.record.lines import printable

_CLASSES = 12  # of lengths
_BAR = 32  # characters of the longest
_REASONS = 5
_LABELS = 24
_TRAINED = "black on green"
NARROW = 60  # columns; below, names stand above what they name
Facts = Mapping[str, Any]


def show_survey(facts: Facts, stream: TextIO | None = None) -> None:
    """All of it. Rich honours NO_COLOR and the width of the terminal."""
    safe = SafeStream(stream or sys.stdout)
    terminal = Terminal(file=cast(TextIO, safe), markup=False, highlight=False, emoji=False)
    narrow = terminal.width < NARROW
    has_colour = terminal.color_system is not None and not terminal.no_color
    for rows in (_numbers(facts), _lengths(facts, terminal), _samples(facts, has_colour), _ends(facts)):
        if rows:
            terminal.print(stacked(rows) if narrow else beside(rows))


def beside(rows: Sequence[tuple[str, RenderableType]]) -> Table:
    """Names, and what they are to their right."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, min_width=8)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name, style="bold"), value)
    return table


def stacked(rows: Sequence[tuple[str, RenderableType]]) -> Table:
    """The same for narrow terminals."""
    table = Table.grid()
    table.add_column(overflow="fold")
    for name, value in rows:
        if name:
            table.add_row(Text(name, style="bold"))
        table.add_row(value)
    return table


def _numbers(facts: Facts) -> list[tuple[str, RenderableType]]:
    held = facts["eval"]
    rows = [
        ("data", f"{facts['source']}, {facts['format']}"),
        ("rows", _rows(facts, f"{_many(facts['duplicate_rows'], 'duplicate')}")),
        ("tokens", _tokens(facts)),
        *_labels("labels", facts),
        *(("" if at else "bad", text) for at, text in enumerate(_bad(facts))),
        *_empty(facts, "empty"),
        *(("" if at else "sources", text) for at, text in enumerate(_sources(facts))),
        ("packing", _packing(facts)),
        ("steps", _steps(facts)),
    ]
    if held is None:
        rows.append(("eval", "nothing is held out"))
    else:
        shared = f", {held['also_trained_on']:,} also trained on" if held["also_trained_on"] else ""
        duplicates = f"{_many(held['duplicate_rows'], 'duplicate')}{shared}"
        of_train = held["source"] == facts["source"] and not held["rows"]
        told = _held_of_train(held, duplicates) if of_train else _rows(held, duplicates)
        bad = (("eval bad", text) for text in _bad(held))
        rows += [("eval", told), *_labels("", held), *bad, *_empty(held, "eval empty")]
    rows += [("note", text) for text in facts["notes"]]
    return [(name, Text(printable(text))) for name, text in rows]


def _rows(split: Facts, more: str) -> str:
    lost = f" ({_many(split['overlong_tokens'], 'token')} lost)" if split["overlong_tokens"] else ""
    counts = f"{split['bad_rows']:,} bad, {split['overlong_rows']:,} over-long{lost}, {more}"
    return f"{split['rows']:,}: {counts}; {_many(split['samples'], 'sample')}"


def _held_of_train(held: Facts, more: str) -> str:
    return f"{_many(held['samples'], 'sample')} of the same rows, {held['total_tokens']:,} tokens, {more}"


def _tokens(facts: Facts) -> str:
    share = facts["trained_share"]
    is_learnt = share is not None and not facts.get("labels")
    trained = f", {facts['trained_tokens']:,} trained ({share:.1%})" if is_learnt else ""
    return f"{facts['total_tokens']:,}{trained}{_weighted(facts.get('weights'))}"


def _weighted(weights: Facts | None) -> str:
    if weights is None:
        return ""
    count = f"{weights['trained_tokens_count_as']:,.1f} ({weights['share']:.1%})"
    return f", which count as {count} by the weights in {_many(weights['samples'], 'sample')}"


def _labels(name: str, split: Facts) -> Iterator[tuple[str, str]]:
    """How many samples each label has."""
    counted = list(split.get("labels", {}).items())
    if counted:
        more = f" and {len(counted) - _LABELS:,} more" if len(counted) > _LABELS else ""
        yield name, ", ".join(f"{label} {number:,}" for label, number in counted[:_LABELS]) + more


def _bad(split: Facts) -> Iterator[str]:
    for each in split["bad"][:_REASONS]:
        more = f" and {_many(each['rows'] - 1, 'more row')}" if each["rows"] > 1 else ""
        yield f"{each['first']}{more}: {each['reason']}"
    if len(split["bad"]) > _REASONS:
        yield f"and {len(split['bad']) - _REASONS} more reasons"


def _empty(split: Facts, name: str) -> Iterator[tuple[str, str]]:
    """Texts without a word: no row is bad for it, and no model learns from it what was meant."""
    if split["empty"]:
        yield name, ", ".join(f"{number:,} in {where}" for where, number in split["empty"].items())


def _sources(facts: Facts) -> Iterator[str]:
    for each in facts["sources"]:
        lost = f", {_many(each['overlong_tokens'], 'token')} lost" if each["overlong_tokens"] else ""
        long = f"{each['overlong_rows']:,} over-long ({each['dropped']:,} dropped{lost})"
        counts = f"{each['bad_rows']:,} bad, {long}, {_many(each['duplicate_rows'], 'duplicate')}"
        held = f", {each['held_out']:,} held out" if each["held_out"] else ""
        yield f"{each['name']}: {_many(each['rows'], 'row')}: {counts}; {_many(each['samples'], 'sample')}{held}"
        drawn = f"{_many(each['drawn'], 'sample')} and {_many(each['tokens'], 'token')} an epoch"
        yield f"  weight {each['weight']:g}: {drawn}, {each['share']:.1%} of its tokens"


def _packing(facts: Facts) -> str:
    if facts["fill"] is None:
        return "nothing to pack"
    more = facts["bins"] - facts["lower_bound_bins"]
    bound = f"{more:,} more than the provable least" if more else "provably the fewest"
    told = (
        f"{_many(facts['bins'], 'bin')} of {facts['bin_tokens']:,} tokens, {facts['fill']:.2%} full ({bound})"
    )
    padded = f"padded rows {facts['padded_fill']:.1%} full"
    return f"{told}; {padded} otherwise" if facts["packing"] else f"off: {padded}; on: {told}"


def _steps(facts: Facts) -> str:
    size = f"{facts['units_per_step']:,} {facts['unit_name']}"
    if facts["units_per_step"] == 1:
        size = size.removesuffix("s")
    shared = f", shared by {facts['processes']} processes" if facts["processes"] > 1 else ""
    tokens = f"about {facts['tokens_per_step']:,.0f} tokens, {facts['trained_tokens_per_step']:,.0f} trained"
    epochs = f"{facts['epochs']:.3g} {'epoch' if facts['epochs'] == 1 else 'epochs'}"
    return f"{facts['steps']:,} ({epochs}) of {size}, {tokens}{shared}"


def _lengths(facts: Facts, terminal: Terminal) -> list[tuple[str, RenderableType]]:
    percentiles = facts["length_percentiles"]
    if percentiles is None:
        return []
    told = "  ".join(f"{name} {length:,}" for name, length in percentiles.items())
    rows: list[tuple[str, RenderableType]] = [("lengths", Text(told))]
    classes = [*_classes(facts["lengths"]), *_beyond(facts)]
    if not classes:
        return rows
    most = max(number for _, number in classes)
    width = max(len(name) for name, _ in classes)
    longest = max(1, min(_BAR, terminal.width - width - len(f"{most:,}") - 14))
    block = "█" if terminal.encoding.startswith("utf") else "#"
    for name, number in classes:
        bar = block * (max(1, round(longest * number / most)) if number else 0)
        style = "yellow" if name.startswith(">") else "cyan"
        rows.append(("", Text.assemble(f"{name:>{width}} ", (bar, style), f" {number:,}")))
    return rows


def _classes(lengths: Facts) -> list[tuple[str, int]]:
    """Neighbours put together, as many as fit a screen."""
    edges, samples = lengths["edges"], lengths["samples"]
    at_once = -(-len(samples) // _CLASSES)
    starts = range(0, len(samples), at_once)
    bounds = [*(edges[start] for start in starts), edges[-1]]
    counts = [sum(samples[start : start + at_once]) for start in starts]
    return [
        (f"{low:,}-{high - 1:,}" if high - 1 > low else f"{low:,}", count)
        for (low, high), count in zip(pairwise(bounds), counts, strict=True)
    ]


def _beyond(facts: Facts) -> list[tuple[str, int]]:
    number = facts["dropped"]  # what was cut off or split stands among the others
    return [(f">{facts['max_length']:,}", number)] if number else []


def _samples(facts: Facts, has_colour: bool) -> list[tuple[str, RenderableType]]:
    rows = facts["preview"]["rows"]
    if not rows:
        return []
    what = facts["preview"]["marked"]
    key = Text.assemble("the first, ", _marked(what, has_colour))
    told: list[tuple[str, RenderableType]] = [("samples", key)]
    for row in rows:
        place = f"{row['place']}, {row['tokens']:,} tokens, {row['trained_tokens']:,} of them marked"
        told += [("", Text(printable(place), style="dim")), ("", _sample(row, has_colour))]
    return told


def _sample(row: Facts, has_colour: bool) -> Text:
    return Text.assemble(
        *(
            part
            for piece in row["pieces"]
            for part in (
                _marked(printable(piece["text"]), has_colour)
                if piece["trained"]
                else printable(piece["text"]),
                (f"(weight {piece['weight']:g})" if "weight" in piece else "", "dim"),
            )
        )
    )


def _marked(text: str, has_colour: bool) -> Text:
    """Brackets where there are no colours."""
    return Text(text, style=_TRAINED) if has_colour else Text(f"[[{text}]]", style="bold")


def _ends(facts: Facts) -> list[tuple[str, RenderableType]]:
    told: list[tuple[str, RenderableType]] = [
        (
            "" if at else "advice",
            Text.assemble((printable(each["set"]), "bold cyan"), "\n", printable(each["why"])),
        )
        for at, each in enumerate(facts["advice"])
    ]
    return told or [("advice", Text("none"))]


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
