"""The curves of one run, or of several over each other."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from app.pages.charts import Chart, Quantity, Series, line_chart
from app.pages.read_run import SavedRun
from app.tracking.lines import memory, quantity

_LOSS = Quantity("Loss", "mean of a trained token", may_log=True, wide=True)
_OTHERS = {
    "lr": Quantity("Learning rate", "lr", from_zero=True),
    "grad_norm": Quantity("Gradient norm", "before clipping", may_log=True),
    "tokens_per_second": Quantity("Tokens a second", "tokens/s", words=quantity, from_zero=True),
    "peak_memory_bytes": Quantity("Peak memory", "measured", words=memory, from_zero=True),
}


def curves(run: SavedRun) -> list[Chart]:
    """Of one run; none where nothing was logged."""
    losses = [Series("train", run.points("loss")), Series("held out", run.points("eval_loss"), 1)]
    others = (line_chart(kind, [Series(key, run.points(key))]) for key, kind in _OTHERS.items())
    return _drawn([line_chart(_LOSS, losses), *others])


def curves_of_several(runs: Sequence[tuple[str, SavedRun]]) -> list[Chart]:
    """Each run in a colour of its own, by the name that is given with it."""
    losses = {
        "eval_loss": replace(_LOSS, title="Loss on held-out rows"),
        "loss": replace(_LOSS, title="Training loss"),
    }
    return _drawn(
        line_chart(
            kind, [Series(name, run.points(key), at) for at, (name, run) in enumerate(runs)], legend=False
        )
        for key, kind in {**losses, **_OTHERS}.items()
    )


def _drawn(charts: Iterable[Chart | None]) -> list[Chart]:
    return [chart for chart in charts if chart is not None]
