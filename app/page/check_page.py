"""The page of app.check: what a run would learn from and what it needs, what would stop it, what could be better."""

from collections.abc import Iterator, Mapping
from typing import Any

from app.page.document import badge, command, document, facts_table, note, section, table, tiles
from app.page.figures import number, whole
from app.page.html import Child, Html, element, joined
from app.page.kept import section_of
from app.page.memory_section import memory_badge, memory_sections
from app.page.run_data import labels_table, lengths_chart, samples_shown

_ROWS = (
    ("rows", "rows read"),
    ("bad_rows", "bad rows"),
    ("overlong_rows", "over-long samples"),
    ("overlong_tokens", "tokens lost by them"),
    ("duplicate_rows", "duplicates"),
    ("also_trained_on", "also trained on"),
    ("samples", "samples"),
    ("total_tokens", "tokens"),
    ("trained_tokens", "trained tokens"),
    ("longest", "longest sample, in tokens"),
)
_OF_SOURCE = (
    ("rows", "rows"),
    ("bad_rows", "bad"),
    ("overlong_rows", "over-long"),
    ("dropped", "dropped"),
    ("duplicate_rows", "duplicates"),
    ("held_out", "held out"),
)
Facts = Mapping[str, Any]


def check_page(found: Facts) -> str:
    """From what check.json holds."""
    facts, memory = section_of(found, "data"), section_of(found, "memory")
    source = str(facts.get("source", "")) if facts else str(memory.get("subject", ""))
    stops = any(part.get("stops") for part in (facts, memory))
    return document(
        f"Check: {source}",
        element(
            "div",
            element("h1", source),
            badge("a run would stop", "bad") if stops else badge("nothing stops a run", "good"),
            memory_badge(memory) if memory else None,
            class_="top",
        ),
        _of_data(facts) if facts else None,
        memory_sections(memory),
    )


def _of_data(facts: Facts) -> Iterator[Child]:
    yield element("p", f"dataset.format={facts.get('format')}, before any training", class_="soft small")
    yield [note("bad", str(problem)) for problem in facts.get("stops") or []]
    yield [note("warn", str(text)) for text in facts.get("notes") or []]
    yield tiles(_tiles(facts))
    yield section("Advice", _advice(facts))
    yield section("Rows and lengths", _rows(facts))
    yield section("Sources", _sources(facts))
    yield section("Labels", labels_table(section_of(facts, "labels"), section_of(facts, "eval", "labels")))
    yield section("Bad rows", _bad(facts))
    yield section("Empty texts", _empty(facts))
    yield section("Packing and steps", facts_table(_packing(facts)))
    yield section("First samples", samples_shown(section_of(facts, "preview")))


def _tiles(facts: Facts) -> Iterator[tuple[str, str | None]]:
    share, fill = number(facts.get("trained_share")), number(facts.get("fill"))
    yield "rows", whole(facts.get("rows"))
    yield "bad rows", whole(facts.get("bad_rows"))
    yield "tokens", whole(facts.get("total_tokens"))
    labels = section_of(facts, "labels")
    yield "labels", whole(len(labels)) if labels else None
    yield "of them trained", None if share is None or labels else f"{share:.1%}"
    yield "steps", whole(facts.get("steps"))
    yield "bins full", None if fill is None else f"{fill:.2%}"


def _advice(facts: Facts) -> Child:
    given = facts.get("advice") or []
    if not given:
        return element("p", "None: nothing stands out.", class_="soft")
    return [
        element("div", command(str(each.get("set"))), element("p", str(each.get("why"))), class_="advice")
        for each in given
    ]


def _rows(facts: Facts) -> Html:
    held = section_of(facts, "eval")
    rows = [
        (words, _told(key, facts), _told(key, held))
        for key, words in _ROWS
        if facts.get(key) is not None or held.get(key)
    ]
    percentiles = section_of(facts, "length_percentiles")
    lengths = (
        table(tuple(percentiles), [[whole(each) for each in percentiles.values()]]) if percentiles else None
    )
    return joined(
        element(
            "div",
            element("div", table(("", "train", "held out"), rows, numbers=(1, 2))),
            element(
                "div",
                lengths_chart(section_of(facts, "lengths"), number(facts.get("dropped")) or 0.0),
                element("h3", "Tokens of a sample, before any was cut"),
                lengths,
            ),
            class_="charts",
        )
    )


def _told(key: str, split: Facts) -> str:
    count, share = whole(split.get(key)), number(split.get("trained_share"))
    is_part = split.get("rows") == 0 and bool(
        split.get("samples")
    )  # held out of rows that were read for training
    if count is None or (is_part and count == "0"):
        return ""
    if key != "trained_tokens" or share is None:
        return count
    weights = section_of(split, "weights")
    sum_of, part = number(weights.get("trained_tokens_count_as")), number(weights.get("share"))
    weighted = "" if sum_of is None or part is None else f", weighted {sum_of:,.1f} ({part:.1%})"
    return f"{count} ({share:.1%}){weighted}"


def _sources(facts: Facts) -> Html | None:
    """Of a mix; as many columns as are needed to see which source weighs too much, and which one loses rows."""
    given = facts.get("sources") or []
    if not given:
        return None
    rows = [
        [
            element("b", str(each.get("name"))),
            each.get("format"),
            *(whole(each.get(key)) for key, _ in _OF_SOURCE),
            _figure(each.get("weight"), "{:g}"),
            *(whole(each.get(key)) for key in ("drawn", "tokens")),
            _figure(each.get("share"), "{:.1%}"),
        ]
        for each in given
    ]
    head = ("source", "format", *(words for _, words in _OF_SOURCE))
    in_an_epoch = ("weight", "samples an epoch", "tokens an epoch", "share")
    return table((*head, *in_an_epoch), rows, numbers=range(2, len(head) + len(in_an_epoch)))


def _figure(value: Any, form: str) -> str | None:
    known = number(value)
    return None if known is None else form.format(known)


def _bad(facts: Facts) -> Html | None:
    rows = [
        (str(each.get("first")), whole(each.get("rows")), str(each.get("reason")))
        for split in (facts, section_of(facts, "eval"))
        for each in split.get("bad") or []
    ]
    return table(("first", "rows", "why"), rows, numbers=(1,)) if rows else None


def _empty(facts: Facts) -> Html | None:
    rows = [
        (where, whole(texts))
        for split in (facts, section_of(facts, "eval"))
        for where, texts in section_of(split, "empty").items()
    ]
    return table(("where words are missing", "texts"), rows, numbers=(1,)) if rows else None


def _packing(facts: Facts) -> Iterator[tuple[str, Child]]:
    bins, least, fill = (number(facts.get(key)) for key in ("bins", "lower_bound_bins", "fill"))
    padded = number(facts.get("padded_fill"))
    if bins and least is not None and fill is not None:
        off = "" if facts.get("packing") else " (batching.packing is off)"
        yield "bins", f"{bins:,.0f} of {whole(facts.get('bin_tokens'))} tokens{off}"
        yield "full", f"{fill:.2%}"
        yield "provably needed", f"{least:,.0f}; the plan has {bins - least:,.0f} more"
    if padded is not None:
        yield "padded rows instead", f"{padded:.1%} full"
    epochs = number(facts.get("epochs"))
    if epochs:
        units = _many(facts.get("units_per_step"), facts.get("unit_name"))
        shared = (
            f", shared by {facts['processes']} processes" if (number(facts.get("processes")) or 1) > 1 else ""
        )
        yield (
            "steps",
            f"{whole(facts.get('steps'))}, {epochs:.3g} {'epoch' if epochs == 1 else 'epochs'}; {units} each{shared}",
        )
        yield "tokens of a step", f"about {whole(facts.get('tokens_per_step'))}"
        yield "trained tokens of a step", f"about {whole(facts.get('trained_tokens_per_step'))}"


def _many(count: Any, names: Any) -> str:
    """One bin, two bins."""
    return f"{whole(count)} {str(names).removesuffix('s') if count == 1 else names}"
