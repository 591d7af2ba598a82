"""What a run learnt from: rows, tokens, what became of them, and a few rows with what is trained of them."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from app.page.axis import Axis, axis_of
from app.page.chart import chart_figure, frame, percent, plot
from app.page.document import folded, table
from app.page.figures import figure, number, whole
from app.page.html import Child, Html, element, joined
from app.page.kept import KeptRun, section_of

_COUNTS = (
    ("rows_read", "rows read"),
    ("samples", "samples"),
    ("tokens", "tokens"),
    ("trained_tokens", "trained tokens"),
    ("longest", "longest sample, in tokens"),
    ("bad_rows", "bad rows skipped"),
    ("rows_lost", "rows of which nothing is left"),
    ("dropped", "dropped as too long"),
    ("truncated", "cut off"),
    ("split", "split"),
    ("tokens_lost", "tokens lost"),
    ("unstable", "conversations that the template rewrites"),
    ("left_over", "left over by a limit of rows"),
    ("held_out", "held out of these"),
)
_SCORED = ("eval_loss", "perplexity", "token_accuracy", "exact_match", "accuracy", "macro_f1")
_PIECES = 400
_LABELS = 50


def data(run: KeptRun) -> Child:
    """Counts, lengths, preview; None where nothing is known."""
    counted = section_of(run.manifest, "counts", "data")
    train, held = section_of(counted, "train"), section_of(counted, "eval")
    if not train and not run.preview:
        return None
    notes = [str(text) for text in _texts(counted.get("notes"))]
    counts = element(
        "div",
        _source("train", train),
        _source("held out", held),
        table(("", "train", "held out"), _counts(train, held), numbers=(1, 2)) if train else None,
        labels_table(section_of(train, "classes"), section_of(held, "classes")),
        [element("p", text, class_="remark") for text in (*_filling(run), *notes)],
    )
    return joined(
        element("div", counts, lengths_chart(section_of(run.preview, "lengths")), class_="charts"),
        samples_shown(run.preview),
    )


def labels_table(train: Mapping[str, Any], held: Mapping[str, Any]) -> Html | None:
    """How many samples each label has; None where rows have none."""
    names = [*train, *(name for name in held if name not in train)]
    rows = [(name, whole(train.get(name, 0)), whole(held.get(name, 0))) for name in names[:_LABELS]]
    left_out = f"{len(names) - _LABELS:,} more labels." if len(names) > _LABELS else None
    if not rows:
        return None
    return element(
        "div",
        table(("label", "train", "held out"), rows, numbers=(1, 2)),
        element("p", left_out, class_="remark") if left_out else None,
    )


def scores(run: KeptRun) -> Child:
    """What app.evaluate left in the folder of the run."""
    sides = [side for side in ("base", "tuned") if f"{side}_eval_loss" in run.scores] or [""]
    rows = [
        (
            key.replace("_", " "),
            *(_scored(run.scores.get(f"{side}_{key}" if side else key)) for side in sides),
        )
        for key in _SCORED
        if key in run.scores
    ]
    if not rows:
        return None
    heads = [side or str(run.scores.get("weights") or "value") for side in sides]
    of = f"{whole(run.scores.get('rows'))} rows of {run.scores.get('dataset')}"
    return joined(
        table(("", *heads), rows, numbers=range(1, len(heads) + 1)), element("p", of, class_="remark")
    )


def _scored(value: Any) -> str:
    known = number(value)
    return "" if known is None else figure(known)


def _counts(train: Mapping[str, Any], held: Mapping[str, Any]) -> Iterator[tuple[Child, ...]]:
    for key, words in _COUNTS:
        if train.get(key) or held.get(key):
            yield words, *(_with_share(key, side) for side in (train, held))


def _source(name: str, split: Mapping[str, Any]) -> Html | None:
    source = split.get("source")
    return element("p", f"{name}: ", element("code", str(source)), class_="small") if source else None


def _with_share(key: str, split: Mapping[str, Any]) -> str:
    count, tokens = number(split.get(key)), number(split.get("tokens"))
    if count is None:
        return ""
    return f"{count:,.0f} ({count / tokens:.0%})" if key == "trained_tokens" and tokens else f"{count:,.0f}"


def _filling(run: KeptRun) -> Iterator[str]:
    counts = section_of(run.manifest, "counts")
    units, per_step, fill = (number(counts.get(key)) for key in ("units", "units_per_step", "fill"))
    if units is None or per_step is None:
        return
    name = str(counts.get("unit_name", "units"))
    full = "" if fill is None else f", {fill:.1%} full"
    least = number(counts.get("least_units"))
    if least is not None:
        full += (
            f", {units - least:,.0f} more than provably needed" if units > least else ", provably the fewest"
        )
    yield f"{units:,.0f} {name} an epoch, {per_step:,.0f} a step{full}."


def _texts(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def lengths_chart(lengths: Mapping[str, Any], dropped: float = 0.0) -> Html | None:
    """How many samples have how many tokens; those that were dropped as too long beyond the last."""
    edges = [number(each) for each in _texts(lengths.get("edges"))]
    counts = [number(each) for each in _texts(lengths.get("samples"))]
    known = [each for each in edges if each is not None]
    rising = all(start < end for start, end in pairwise(known))
    if (
        not counts
        or None in counts
        or len(known) != len(counts) + 1
        or len(edges) != len(known)
        or not rising
    ):
        return None
    bars = [
        (start, end, count or 0.0, f"{start:,.0f} to {end - 1:,.0f} tokens", "bar")
        for (start, end), count in zip(pairwise(known), counts, strict=True)
    ]
    if dropped:
        width = max(known[-1] - known[-2], (known[-1] - known[0]) / 20)
        bars.append((known[-1], known[-1] + width, dropped, "over-long", "bar over"))
    remarks = [f"The last bar: {dropped:,.0f} over-long samples, dropped."] if dropped else []
    return _bars("Samples by their length in tokens", bars, remarks)


_Bar = tuple[float, float, float, str, str]  # from, to, how many, in words, class


def _bars(title: str, bars: list[_Bar], remarks: list[str]) -> Html:
    edges = [bars[0][0], *(end for _, end, *_ in bars)]
    ticks = tuple(tick for tick in axis_of(edges).ticks if edges[0] <= tick[0] <= edges[-1])
    across = Axis(edges[0], edges[-1], ticks)
    up = axis_of([count for _, _, count, *_ in bars], lambda n: f"{n:,.0f}", from_zero=True)
    drawn = []
    for start, end, count, words, paint in bars:
        left, share = across.share(start), up.share(count)
        width = max(across.share(end) - left - 0.002, 0.001)
        told = element("title", f"{words}: {count:,.0f} samples")
        drawn.append(
            element(
                "rect", told, x=percent(left), y=percent(1 - share), width=percent(width), height=percent(share),
                class_=paint,
            )
        )  # fmt: skip
    return chart_figure(title, [], plot(title, across, up, frame(across, up), drawn), remarks, wide=False)


def samples_shown(preview: Mapping[str, Any]) -> Html | None:
    """A few rows with what is trained of them marked."""
    rows = [row for row in _texts(preview.get("rows")) if isinstance(row, Mapping)]
    if not rows:
        return None
    what = preview.get("marked", "trained")
    shown = joined(_row(row) for row in rows)
    return element(
        "div",
        element("h3", "Training samples, ", element("mark", f"marked: {what}")),
        shown if len(rows) <= 4 else folded(f"{len(rows)} samples", shown),
    )


def _row(row: Mapping[str, Any]) -> Html:
    pieces = []
    for piece in _texts(row.get("pieces"))[:_PIECES]:
        known = piece if isinstance(piece, Mapping) else {}
        text, weight = str(known.get("text", "")), number(known.get("weight"))
        pieces.append(element("mark", text) if known.get("trained") else joined(text))
        if weight is not None:
            pieces.append(element("span", f" (weight {weight:g})", class_="soft"))
    tokens, trained = whole(row.get("tokens")), whole(row.get("trained_tokens"))
    place = f"{row.get('place', '')}, {tokens} tokens, {trained} of them marked"
    return element(
        "div",
        element("span", place, class_="label"),
        element("div", pieces, class_="text"),
        class_="row",
    )
