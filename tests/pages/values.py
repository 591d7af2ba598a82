"""What stands in a page: its sections, blocks and charts."""

from collections.abc import Iterable
from typing import TypeVar

from app.pages.charts import DotChart, LineChart
from app.pages.page import Bars, Block, Charts, Fold, Page, Section, as_text

Kind = TypeVar("Kind", bound=Block)
Figure = TypeVar("Figure", LineChart, DotChart)


def section(page: Page, title: str) -> Section:
    (found,) = [each for each in page.sections if each.title.startswith(title)]
    return found


def titles(page: Page) -> list[str]:
    """Of the sections that are shown."""
    return [each.title for each in page.sections if each.blocks]


def all_of(kind: type[Kind], *sections: Section) -> list[Kind]:
    """The blocks of a kind, also those inside of others."""
    return [each for part in sections for each in _inside(part.blocks) if isinstance(each, kind)]


def _inside(blocks: Iterable[Block]) -> Iterable[Block]:
    for each in blocks:
        yield each
        yield from _inside(each.blocks if isinstance(each, Fold) else each.neighbors if isinstance(each, Bars) else ())


def chart(page: Page, kind: type[Figure], title: str) -> Figure:
    charts = [each for block in all_of(Charts, *page.sections) for each in block.charts]
    (found,) = [each for each in charts if isinstance(each, kind) and each.quantity.title.startswith(title)]
    return found


def lines(page: Page, title: str) -> dict[str, list[tuple[float, float | None]]]:
    """The points of each line of a chart."""
    return {each.name: list(each.points) for each in chart(page, LineChart, title).series if each.points}


def texts(page: Page) -> str:
    """All that the sections say, as in a terminal."""
    return as_text(*page.sections)
