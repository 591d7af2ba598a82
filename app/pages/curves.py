"""Charts of runs over steps: losses, scores of held-out rows, learning rate, gradient norm, speed and memory."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from app.config.metrics import METRICS
from app.pages.charts import Chart, Point, Quantity, Series, line_chart
from app.pages.read_run import SavedRun
from app.tracking.formatting import format_bytes, format_count

_MEAN_REACH = 20  # a mean is over a tenth of the line: a twentieth before a point and one after it
_MEAN_POINTS = 150
_LOSS = Quantity("Loss", "", may_log=True, tall=True)
_SCORES = {
    each.name: Quantity(
        each.label[0].upper() + each.label[1:],
        each.meaning,
        formatter="{:.0%}".format if each.is_share else "{:.3g}".format,
        from_zero=each.is_share,
        tall=True,
    )
    for each in METRICS.values()
    if each.logged and each.name != "eval_loss"
}
_OTHERS = {
    "lr": Quantity("Learning rate", "", from_zero=True),
    "grad_norm": Quantity("Gradient norm", "before clipping", may_log=True, from_zero=True),
    "tokens_per_second": Quantity("Speed", "tokens a second", formatter=format_count, from_zero=True),
    "peak_memory_bytes": Quantity("Peak memory", "", formatter=format_bytes, from_zero=True),
}


def curves(run: SavedRun) -> list[Chart]:
    """Charts of a run; none if nothing was logged."""
    losses = [*_training_loss("train", run), Series("held out", run.points("eval_loss"), 1)]
    losses += [Series("general", points, 2)] if (points := run.points("also_eval_loss")) else []
    memory = replace(_OTHERS["peak_memory_bytes"], title=f"Peak memory of the {run.memory_owner}")
    kinds = {**_SCORES, **_OTHERS, "peak_memory_bytes": memory}
    lines = {key: Series(key.replace("_", " "), run.points(key), int(key in _SCORES)) for key in kinds}
    return _drawn([line_chart(_LOSS, losses), *(line_chart(kinds[key], [line]) for key, line in lines.items())])


def curves_of_several(runs: Sequence[tuple[str, SavedRun]]) -> list[Chart]:
    """Charts of several named runs, each in its own colour."""
    losses = {
        "eval_loss": replace(_LOSS, title="Loss on held-out rows"),
        "loss": replace(_LOSS, title="Training loss", axis="smoothed"),
    }

    def series(key: str, name: str, run: SavedRun, colour: int) -> Series:
        if key == "loss":
            return _training_loss(name, run, colour)[-1]  # raw lines of several runs would hide each other
        return Series(name, run.points(key), colour)

    return _drawn(
        line_chart(kind, [series(key, name, run, at) for at, (name, run) in enumerate(runs)], legend=False)
        for key, kind in {**losses, **_SCORES, **_OTHERS}.items()
    )


def _training_loss(name: str, run: SavedRun, colour: int = 0) -> list[Series]:
    """The line as it was logged, and its means where it is long enough to have any."""
    points = run.points("loss")
    means = smoothed(points)
    if not means:
        return [Series(name, points, colour)]
    return [Series(name, points, colour, "raw"), Series(f"{name}, smoothed", means, colour, "mean")]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Means over a tenth of the line around some of its points; empty for a short line."""
    reach = len(points) // _MEAN_REACH
    found = []
    for at in range(0, len(points) if reach else 0, max(1, len(points) // _MEAN_POINTS)):
        known = [y for _, y in points[max(0, at - reach) : at + reach + 1] if y is not None]
        found.append((points[at][0], fmean(known) if known else None))
    return found


def _drawn(charts: Iterable[Chart | None]) -> list[Chart]:
    return [chart for chart in charts if chart is not None]
