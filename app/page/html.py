"""Markup that cannot be broken by what is put into it: text is escaped unless an element made it."""

from collections.abc import Iterable
from html import escape
from typing import Any

from app.record.lines import printable

_VOID = {"meta", "br"}  # have no end


class Html(str):
    """Markup. Only `element` and `joined` make it; whatever else is a text, also what f-strings make of it."""

    __slots__ = ()


Child = str | None | Iterable["Child"]


def element(tag: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """`class_` and `stroke_width` are `class` and `stroke-width`; an attribute that is None or false is left out."""
    named = "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in _VOID:
        return Html(f"<{tag}{named}>")
    return Html(f"<{tag}{named}>{joined(*children)}</{tag}>")


def joined(*children: Child) -> Html:
    """One after the other."""
    return Html("".join(_markup(child) for child in children))


def style_sheet(css: str) -> Html:
    """A style sheet of the program's own: in it nothing can be escaped."""
    assert "<" not in css
    return Html(f"<style>{css}</style>")


def _markup(child: Child) -> str:
    if isinstance(child, Html):
        return child
    if isinstance(child, str):
        return escape(printable(child))
    return "" if child is None else joined(*child)


def _attribute(name: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(printable(str(value)))}"'
