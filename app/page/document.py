"""The frame of a page, and the pieces that pages are made of."""

from collections.abc import Iterable, Sequence
from datetime import datetime

import app
from app.page.html import Child, Html, element, joined, style_sheet
from app.page.look import CSS

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
GENERATOR = "app.report"  # by it a page is known as one of ours, which may be written over


def document(title: str, *body: Child) -> str:
    """A whole file. It asks for nothing outside itself, and a browser would refuse it."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="generator", content=GENERATOR),
        element("title", title),
        style_sheet(CSS),
    )
    made = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    footer = element(
        "footer", f"Made on {made} by app {app.__version__} from the files of the output folder."
    )
    main = element("body", element("main", *body, footer))
    return f"<!doctype html>\n{element('html', head, main, lang='en')}\n"


def section(title: str, *content: Child) -> Html:
    """A card; nothing where there is nothing to show."""
    inside = joined(*content)
    return element("section", element("h2", title), inside) if inside else inside


def note(kind: str, *content: Child) -> Html:
    """A remark that must not be overlooked: `bad` or `warn`."""
    return element("div", *content, class_=f"note {kind}")


def badge(text: str, kind: str) -> Html:
    """A word on a coloured ground: good, bad, warn, busy."""
    return element("span", text, class_=f"badge {kind}")


def tiles(facts: Iterable[tuple[str, str | None]]) -> Html:
    """The few numbers that matter; those that are not known are left out."""
    shown = [
        element("div", element("b", value), element("span", name), class_="tile")
        for name, value in facts
        if value is not None
    ]
    return element("div", *shown, class_="tiles") if shown else joined()


def facts_table(rows: Iterable[tuple[str, Child]]) -> Html:
    """Names and what they are; nothing where nothing is known."""
    lines = [
        element("tr", element("th", name, scope="row"), element("td", value)) for name, value in rows if value
    ]
    return scrolled(element("table", element("tbody", *lines), class_="facts")) if lines else joined()


def table(head: Sequence[str], rows: Iterable[Iterable[Child]], *, numbers: Sequence[int] = ()) -> Html:
    """With a head; `numbers` are the columns that stand to the right."""

    def cells(tag: str, values: Iterable[Child]) -> Html:
        return joined(
            element(tag, value, class_="number" if at in numbers else None) for at, value in enumerate(values)
        )

    body = [element("tr", cells("td", row)) for row in rows]
    return scrolled(
        element("table", element("thead", element("tr", cells("th", head))), element("tbody", *body))
    )


def scrolled(wide: Child) -> Html:
    """What may be wider than a phone moves by itself; the page does not."""
    return element("div", wide, class_="scroll")


def command(words: str) -> Html:
    """A line to copy: one click selects all of it."""
    return element("pre", words, class_="command")


def folded(title: str, *content: Child) -> Html:
    """Shown when it is asked for."""
    return element("details", element("summary", title), *content)
