"""Renders pages by jinja: every text in them is escaped; they have no script, and may not load anything."""

from collections.abc import Callable
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import app
from app.files import write_text
from app.pages.charts import percent
from app.tracking.formatting import (
    printable,
)

GENERATOR = "app.report"  # by it a page is known as one of ours, which may be written over
_LONGEST = 1500  # characters of a prompt or an answer


def render(template: str, **values: Any) -> str:
    """A whole file, from templates/NAME.html.j2."""
    made = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    page = environment().get_template(f"{template}.html.j2")
    return page.render(generator=GENERATOR, made=made, version=app.__version__, **values)


def written_page(target: Path, make: Callable[[], str]) -> str:
    """What to say of a page that is made at the end of something that must not fail by it."""
    try:
        write_text(target, make())
    except Exception as fault:  # noqa: BLE001  whatever it is, what the page is about has not suffered
        return f"report  could not be made ({type(fault).__name__}: {fault}); nothing else is missing"
    return f"report  {target}"


@cache
def environment() -> Environment:
    """The templates of this package, and what they may call."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printed,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(percent=percent, shortened=_shortened)
    return made


def _printed(value: Any) -> Any:
    """What stands for a value that a template puts into a page, before it is escaped."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return printable(value)
    return "" if value is None else value


def _shortened(text: str) -> str:
    """Long texts by their beginning, with what is left out."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]} … ({len(text) - _LONGEST:,} more characters)"
