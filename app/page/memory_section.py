"""What app.check memory found, as sections of its page: a bar of all that is needed, the sums, the knobs."""

from collections.abc import Iterator, Mapping
from typing import Any

from app.page.chart import percent
from app.page.document import badge, command, facts_table, note, section, table, tiles
from app.page.figures import memory, number, quantity, whole
from app.page.html import Child, Html, element, joined
from app.page.kept import section_of
from app.record.memory_screen import ON_TOP, PARTS, arithmetic, slower

Facts = Mapping[str, Any]
_COLOURS = dict(zip(PARTS, ("c0", "c5", "c2", "c3", "c4", "c1", "c6", "c7"), strict=False))
_ON_TOP = "rest"  # the colour of what lies on top of the peak


def memory_badge(facts: Facts) -> Html:
    """Whether it fits, and on what."""
    fits, label = bool(facts.get("fits")), facts.get("label")
    return badge(f"{'fits' if fits else 'does not fit'} {label}", "good" if fits else "bad")


def memory_sections(facts: Facts) -> Iterator[Child]:
    """From the part `memory` of check.json; nothing without it."""
    if not facts:
        return
    yield [note("bad", str(problem)) for problem in facts.get("stops") or []]
    yield [note("warn", str(text)) for text in facts.get("notes") or []]
    yield tiles(_tiles(facts))
    yield section("Memory at the peak", _bar(facts), _parts(facts))
    yield section("What brings it down, the cheapest first", _knobs(facts))
    yield section("Phases of a step", _phases(facts))
    yield section("What was looked at", facts_table(_looked_at(facts)))


def _tiles(facts: Facts) -> Iterator[tuple[str, str | None]]:
    yield "peak", _bytes(facts.get("peak_bytes"))
    yield "needed, all in all", _bytes(facts.get("needed_bytes"))
    yield f"of {facts.get('label')}", _bytes(facts.get("memory_bytes"))
    rate = number(section_of(facts, "bound").get("tokens_per_second"))
    yield "tokens a second, at most", None if rate is None else quantity(rate)
    flops = number(facts.get("flops_per_token"))
    yield "a token", None if flops is None else arithmetic(flops)


def _bytes(value: Any) -> str | None:
    known = number(value)
    return None if known is None else memory(known)


def _known_parts(facts: Facts) -> list[tuple[str, float]]:
    inside = section_of(facts, "anatomy")
    parts = [*inside.items(), *((name, facts.get(name)) for name in ON_TOP)]
    known = ((str(name), number(size)) for name, size in parts)
    return [(name, size) for name, size in known if size and size > 0]


def _bar(facts: Facts) -> Html | None:
    """All parts in a row, as long as the memory of the machine; beyond its end where they do not fit."""
    parts = _known_parts(facts)
    needed = sum(size for _, size in parts)
    room = number(facts.get("memory_bytes")) or needed
    whole = max(needed, room)
    if not whole:
        return None
    drawn, start = [], 0.0
    for name, size in parts:
        told = element("title", f"{PARTS.get(name, name)}: {memory(size)}")
        left, width = percent(start / whole), percent(size / whole)
        drawn.append(element("rect", told, x=left, y="0", width=width, height="100%", class_=_class(name)))
        start += size
    end = percent(room / whole)
    if needed > room:
        drawn.append(element("line", x1=end, x2=end, y1="0", y2="100%", class_="limit"))
    words = f"{memory(needed)} needed of {memory(room)}"
    bar = element("svg", *drawn, class_="stack", role="img", aria_label=words)
    line = f"The line is where the {memory(room)} of {facts.get('label')} end." if needed > room else None
    return joined(bar, element("p", line, class_="remark") if line else None)


def _class(name: str) -> str:
    return f"part {_COLOURS.get(name, _ON_TOP)}"


def _parts(facts: Facts) -> Html:
    parts = _known_parts(facts)
    whole = sum(size for _, size in parts) or 1.0
    rows = [(_named(name), memory(size), f"{size / whole:.1%}") for name, size in parts]
    rows.append((element("b", "needed"), element("b", memory(whole)), ""))
    return table(("part", "bytes", "share"), rows, numbers=(1, 2))


def _named(name: str) -> Html:
    swatch = element("i", class_=f"swatch {_COLOURS.get(name, _ON_TOP)}")
    return joined(swatch, PARTS.get(name, name))


def _knobs(facts: Facts) -> Child:
    knobs = [each for each in facts.get("knobs") or [] if isinstance(each, Mapping)]
    if not knobs:
        words = "None is needed." if facts.get("fits") else "No setting saves memory."
        return element("p", words, class_="soft")
    shown = [_knob(each, told=not facts.get("fits")) for each in knobs]
    together = section_of(facts, "together")
    if together:
        words = f"together {memory(number(together.get('needed_bytes')) or 0.0)}, which fits"
        shown.append(
            element("div", command(str(together.get("override"))), element("p", words), class_="advice")
        )
    return shown


def _knob(knob: Facts, *, told: bool) -> Html:
    cost = slower({"slower_by": number(knob.get("slower_by")) or 0.0})
    enough = " alone brings it in" if told and knob.get("fits") else ""
    saved = f"saves {_bytes(knob.get('saves_bytes'))}{',' if enough else ''}{enough}; {cost}: "
    return element(
        "div", command(str(knob.get("override"))), element("p", saved, str(knob.get("why"))), class_="advice"
    )


def _phases(facts: Facts) -> Html | None:
    phases, where = section_of(facts, "phases"), facts.get("peak_where")
    rows = [
        (element("b", str(name)) if name == where else str(name), _bytes(size))
        for name, size in phases.items()
    ]
    return table(("at most, while in it", "bytes"), rows, numbers=(1,)) if rows else None


def _looked_at(facts: Facts) -> Iterator[tuple[str, Child]]:
    yield "settings", str(facts.get("subject"))
    yield "largest micro-batch", str(facts.get("worst_case"))
    yield "kept from step to step", _bytes(facts.get("kept_bytes"))
    yield "on the host", _bytes(facts.get("host_bytes")) if facts.get("host_bytes") else None
    yield "layers traced", "all" if facts.get("exact") else whole(facts.get("traced_layers"))
    seconds = number(facts.get("seconds"))
    yield "time of the look", None if seconds is None else f"{seconds:.1f} s"
