"""The curves of one run, or of several over each other."""

from collections.abc import Sequence
from dataclasses import replace

from app.page.chart import Form, Series, keys, line_chart
from app.page.figures import figure, memory, quantity
from app.page.html import Html, element, joined
from app.page.kept import KeptRun

_LOSS = Form(may_log=True, wide=True)
_OTHERS = (
    ("Learning rate", "lr", Form(words=figure, from_zero=True), False),
    ("Gradient norm, before clipping", "grad_norm", Form(may_log=True), True),
    ("Tokens a second", "tokens_per_second", Form(words=quantity, from_zero=True), True),
    ("Peak memory, measured", "peak_memory_bytes", Form(words=memory, from_zero=True), False),
)


def curves(run: KeptRun) -> Html | None:
    """Of one run; None when nothing was logged."""
    losses = [
        Series("train", run.points("loss"), 0, noisy=True),
        Series("held out", run.points("eval_loss"), 1, measured=True),
    ]
    charts = [
        line_chart("Loss, mean of a trained token", losses, _LOSS),
        *(
            line_chart(title, [Series(key, run.points(key), 0, noisy=noisy)], form)
            for title, key, form, noisy in _OTHERS
        ),
    ]
    return _grid(charts)


def curves_of_several(runs: Sequence[tuple[str, KeptRun]]) -> Html | None:
    """Each run in a colour of its own, by the name that is given with it."""
    kinds = (
        ("Loss on held-out rows", "eval_loss", _LOSS, False),
        ("Training loss", "loss", _LOSS, True),
        *_OTHERS,
    )
    charts = [
        line_chart(
            title,
            [
                Series(name, run.points(key), at, measured=key == "eval_loss", noisy=noisy)
                for at, (name, run) in enumerate(runs)
            ],
            replace(form, legend=False),
        )
        for title, key, form, noisy in kinds
    ]
    drawn = _grid(charts)
    named = [Series(name, (), at) for at, (name, _) in enumerate(runs)]
    return drawn and joined(element("div", keys(named), class_="legend"), drawn)


def _grid(charts: Sequence[Html | None]) -> Html | None:
    there = [chart for chart in charts if chart is not None]
    return element("div", there, class_="charts") if there else None
