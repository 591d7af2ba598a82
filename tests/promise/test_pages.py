"""A kind of chart is one class: every renderer shows a toy of one, without knowing it."""

from dataclasses import dataclass

from app.pages.charts import Bar, Dot, Plot, Quantity, axis_of, percent
from app.pages.page import Bars, Charts, Page, Section, as_html, as_markdown, as_text


@dataclass(frozen=True)
class Steps:
    """Two values as dots."""

    before: float
    after: float

    def plot(self) -> Plot:
        across, up = axis_of([0, 1]), axis_of([self.before, self.after])
        places = ((0, self.before), (1, self.after))
        dots = [Dot(percent(across.share(x)), percent(1 - up.share(y)), f"toy {y}", 0) for x, y in places]
        return Plot(Quantity("A toy", "value"), "time", across, up, dots=dots)

    def words(self) -> str:
        return f"A toy: {self.before} -> {self.after}"


def test_toy_chart_in_every_renderer() -> None:
    page = Page("toys", [Section("Toys", [Charts([Steps(1.5, 2.5)]), Bars([Bar("toy bar", 1.0, "all")])])])
    html = as_html(page)
    assert "<figcaption>A toy</figcaption>" in html
    assert html.count("<title>toy ") == 2
    for text in (as_text(*page.sections), as_markdown(page)):
        assert "A toy: 1.5 -> 2.5" in text
        assert "toy bar" in text
