"""Rendering of pages by jinja2: all values are escaped; pages have no script and load nothing."""

from collections.abc import Callable
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

import app
from app.files import write_text
from app.pages.charts import percent
from app.safe_text import printable

GENERATOR = "app.report"  # marks pages that app.report may overwrite
# of files that are not as runs write them
PAGE_FAULTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError)
_MAX_TEXT_CHARACTERS = 20_000  # of a prompt or an answer
_MAX_OPEN_CHARACTERS, _MAX_OPEN_LINES = 400, 6  # of a text that is not folded


def render(template: str, **values: Any) -> str:
    """Render templates/NAME.html.j2 as a whole file."""
    made = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    page = environment().get_template(f"{template}.html.j2")
    return page.render(generator=GENERATOR, made=made, version=app.__version__, **values)


def write_page(target: Path, make: Callable[[], str]) -> str:
    """Write a page at the end of a run or sweep, which must not fail by it; returns the message about it."""
    try:
        write_text(target, make())
    except Exception as fault:  # noqa: BLE001  a fault of a page must not fail the run that it reports
        return f"report  could not be made ({type(fault).__name__}: {fault}); nothing else is missing"
    return f"report  {target}"


@cache
def environment() -> Environment:
    """The templates of this package with their filters."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(percent=percent, shortened=_shortened, is_long=_is_long)
    return made


def _finalize(value: Any) -> Any:
    """Text of a value before it is escaped: without control characters, empty for None."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return printable(value)
    return "" if value is None else value


def _shortened(text: str) -> str:
    """The beginning of a long text, with the number of characters left out."""
    if len(text) <= _MAX_TEXT_CHARACTERS:
        return text
    return f"{text[:_MAX_TEXT_CHARACTERS]} … ({len(text) - _MAX_TEXT_CHARACTERS:,} more characters)"


def _is_long(text: str) -> bool:
    return len(text) > _MAX_OPEN_CHARACTERS or text.count("\n") >= _MAX_OPEN_LINES
