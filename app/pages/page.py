"""Pages: sections of blocks (facts, tables, bars, charts, commands), rendered as HTML, terminal text or Markdown.

A block is a class with rows for a terminal, and a macro of the same name in templates/macros.html.j2. Its Markdown is
these rows, or the result of its method `markdown`.
"""

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

import app
from app.files import write_text
from app.pages.charts import Bar, Chart, percent
from app.safe_text import printable
from app.tracking.console import SafeStream, print_table, rich_terminal
from app.tracking.formatting import align, align_columns

GENERATOR = "app.report"  # marks pages that app.report may overwrite
# errors from damaged files
PAGE_FAULTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError)
_MAX_TEXT_CHARACTERS = 20_000  # of a prompt or answer
_MAX_OPEN_CHARACTERS, _MAX_OPEN_LINES = 400, 6  # of a text that is not folded
_MIN_LABEL_CHARACTERS = 8
_MAX_BAR_CHARACTERS = 32
_MARKDOWN_SIGNS = re.compile(r"[\\`*\[\]|#]|(?<!\w)_|_(?!\w)")


@dataclass(frozen=True, slots=True)
class Span:
    """Part of a text or table cell: `code`, `best`, a link, or other CSS classes such as `badge good`."""

    text: str
    kind: str = ""
    link: str | None = None

    def __str__(self) -> str:
        return f"{self.text} ✓" if self.kind == "best" else self.text


Inline = str | Span | None
Badge = tuple[str, str]  # text and tone: good, bad, warn, busy
Rows = Iterable[tuple[str, Sequence[tuple[str, str]]]]  # label, texts and their styles in rich


@dataclass(frozen=True, slots=True)
class Screen:
    """Width, bar character and color support of a terminal; the defaults are those of a file."""

    width: int = 80
    ink: str = "#"
    has_color: bool = False

    def marked(self, text: str) -> tuple[str, str]:
        """Return the text with a style that highlights it: color, or brackets without color."""
        return (text, "black on green") if self.has_color else (f"[[{text}]]", "bold")


class Block(ABC):
    """Part of a section, rendered as HTML by the macro with the name of its class."""

    @abstractmethod
    def rows(self, screen: Screen, /) -> Rows:
        """Return the rows for a terminal."""

    def markdown(self) -> str:
        return Code(as_text(Section("", [self]))).markdown()


@dataclass(frozen=True)
class Paragraph(Block):
    """Text; `tone` is `heading` or CSS classes."""

    text: str | Sequence[Inline]
    tone: str = ""

    @property
    def parts(self) -> Sequence[Inline]:
        return (self.text,) if isinstance(self.text, str) else self.text

    def rows(self, _: Screen) -> Rows:
        yield "", [(str(part or ""), "bold" if self.tone == "heading" else "") for part in self.parts]

    def markdown(self) -> str:
        return "### " * (self.tone == "heading") + "".join(map(_escaped, self.parts))


@dataclass(frozen=True)
class Facts(Block):
    """Names and values; rows without a value are omitted, rows without a name continue the row before."""

    facts: Sequence[tuple[str, str | None]]

    def rows(self, _: Screen) -> Rows:
        return ((name, [(value, "")]) for name, value in self.facts if value)

    def markdown(self) -> str:
        return Table(("", ""), [fact for fact in self.facts if fact[1]]).markdown()


@dataclass(frozen=True)
class Table(Block):
    """Table; the columns `numbers` are right-aligned, `notes` are below."""

    head: Sequence[str]
    cells: Sequence[Sequence[Inline]]
    numbers: Sequence[int] = ()
    notes: Sequence[str] = ()

    def rows(self, _: Screen) -> Rows:
        cells = [[str(cell or "") for cell in row] for row in (self.head, *self.cells)]
        return (("", [(text, "")]) for text in (align_columns(cells, gap=2), *self.notes))

    def markdown(self) -> str:
        rows = [[*map(_escaped, self.head)], ["---"] * len(self.head), *([*map(_escaped, row)] for row in self.cells)]
        notes = (f"- {_escaped(note)}" for note in self.notes)
        return "\n\n".join(["\n".join(f"| {' | '.join(row)} |" for row in rows), *notes])


@dataclass(frozen=True)
class Bars(Block):
    """Bar chart next to other blocks; with `counts`, labels are right-aligned."""

    bars: Sequence[Bar]
    title: str = ""
    counts: bool = False
    neighbors: Sequence[Block] = ()

    def rows(self, screen: Screen) -> Rows:
        labels, texts = ([getattr(bar, name) for bar in self.bars] for name in ("label", "text"))
        width, numbers = (max(map(len, column), default=0) for column in (labels, texts))
        longest = max(1, min(_MAX_BAR_CHARACTERS, screen.width - width - numbers - 14))
        yield from chain.from_iterable(block.rows(screen) for block in self.neighbors)
        for bar in self.bars:
            drawn = screen.ink * (max(1, round(longest * bar.share)) if bar.share else 0)
            before = f"{bar.label:>{width}} " if self.counts else f"{bar.label:<{width}} {bar.text:>8} "
            after = f" {bar.text}" if self.counts else ""
            yield "", [(before, ""), (drawn, "yellow" if bar.beyond else "cyan"), (after, "")]


@dataclass(frozen=True)
class Charts(Block):
    """Charts next to each other; `legend` has the names and colors of the lines in all of them."""

    charts: Sequence[Chart]
    legend: Sequence[tuple[str, int]] = ()

    def rows(self, _: Screen) -> Rows:
        return (("", [(chart.words(), "")]) for chart in self.charts)


@dataclass(frozen=True)
class Code(Block):
    """Text to copy, with an introduction before and a reason after it; `kind` is `command`, a language, or empty."""

    text: str
    kind: str = "command"
    intro: str = ""
    why: str = ""

    def rows(self, _: Screen) -> Rows:
        intro, why = f"{self.intro}\n" if self.intro else "", f"\n{self.why}" if self.why else ""
        yield "", [(intro, ""), (self.text, "bold cyan"), (why, "")]

    def markdown(self) -> str:
        fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", self.text)), 3)  # longer than any fence inside
        fenced = f"{fence}{self.kind.removeprefix('command')}\n{self.text}\n{fence}"
        return "\n\n".join(filter(None, (_escaped(self.intro), fenced, _escaped(self.why))))


@dataclass(frozen=True)
class TrainingSamples(Block):
    """Training rows by place: pieces of text, whether in the loss, and weight; `marked` names the highlighted ones."""

    samples: Sequence[tuple[str, Sequence[tuple[str, bool, str]]]]
    marked: str
    title: str = ""

    def rows(self, screen: Screen) -> Rows:
        yield "", [("highlighted: ", ""), screen.marked(self.marked)]
        for place, pieces in self.samples:
            yield "", [(place, "dim")]
            shown = (
                (screen.marked(text) if in_loss else (text, ""), (weight, "dim")) for text, in_loss, weight in pieces
            )
            yield "", [*chain.from_iterable(shown)]


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer; `right` is None if it is not scored."""

    label: str
    text: str
    right: bool | None = None


@dataclass(frozen=True)
class AnswerTable(Block):
    """Prompts with the expected and generated answers; `more` is the number of omitted prompts."""

    prompts: Sequence[tuple[str, Sequence[Answer]]]
    summary: str
    more: int

    def rows(self, _: Screen) -> Rows:
        yield "", [(self.summary, "")]
        for prompt, answers in self.prompts:
            yield "prompt", [(prompt, "")]
            yield from ((answer.label, [(answer.text, "green" if answer.right else "")]) for answer in answers)


@dataclass(frozen=True)
class Fold(Block):
    """Blocks that a page shows after a click on the summary."""

    summary: str
    blocks: Sequence[Block]
    is_open: bool = False

    def rows(self, screen: Screen) -> Rows:
        return chain([("", [(self.summary, "bold")])], *(block.rows(screen) for block in self.blocks))


@dataclass(frozen=True, slots=True)
class Section:
    """Title and blocks; not shown without blocks. `label` names the first row in `show`, which prints no title."""

    title: str
    blocks: Sequence[Block]
    label: str = ""

    def rows(self, screen: Screen) -> Rows:
        return chain.from_iterable(block.rows(screen) for block in self.blocks)


@dataclass(frozen=True, slots=True)
class Page:
    """Page; `title` is the window title, `notes` have a tone and a text."""

    heading: str
    sections: Sequence[Section]
    title: str = ""
    badges: Sequence[Badge] = ()
    about: Sequence[Paragraph] = ()
    notes: Sequence[tuple[str, str]] = ()
    tiles: Sequence[tuple[str, str | None]] = ()  # names and values


def as_html(page: Page) -> str:
    """Return the page as self-contained HTML with escaped values and no scripts."""
    created = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    template = environment().get_template("page.html.j2")
    return template.render(page=page, generator=GENERATOR, created=created, version=app.__version__)


def write_page(target: Path, make: Callable[[], Page]) -> str:
    """Write a page at the end of a run or sweep, and return a message; errors do not fail the run."""
    try:
        write_text(target, as_html(make()))
    except Exception as fault:  # noqa: BLE001  a page error must not fail the run
        return f"report  could not be written ({type(fault).__name__}: {fault}); all other files are complete"
    return f"report  {target}"


@cache
def environment() -> Environment:
    """Return the templates of this package with their filters."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(percent=percent, shortened=_shortened, is_long=_is_long, draw=_draw)
    return templates


def _draw(block: Block) -> Any:
    return getattr(environment().get_template("macros.html.j2").module, type(block).__name__)(block)


def _finalize(value: Any) -> Any:
    """Return a value without control characters, before it is escaped; empty for None."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return printable(value)
    return "" if value is None else value


def _shortened(text: str) -> str:
    """Return the beginning of a long text and the number of omitted characters."""
    if len(text) <= _MAX_TEXT_CHARACTERS:
        return text
    return f"{text[:_MAX_TEXT_CHARACTERS]} … ({len(text) - _MAX_TEXT_CHARACTERS:,} more characters)"


def _is_long(text: str) -> bool:
    return len(text) > _MAX_OPEN_CHARACTERS or text.count("\n") >= _MAX_OPEN_LINES


def show(sections: Iterable[Section], stream: TextIO | None = None) -> None:
    """Print sections without their titles; rich honors NO_COLOR and the width of the terminal."""
    from rich.table import Table as Grid
    from rich.text import Text

    safe = SafeStream(stream or sys.stdout)
    terminal = rich_terminal(safe)
    has_color = terminal.color_system is not None and not terminal.no_color
    screen = Screen(terminal.width, "█" if terminal.encoding.startswith("utf") else "#", has_color)
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, min_width=_MIN_LABEL_CHARACTERS)
    grid.add_column(overflow="fold")
    for section in sections:
        for at, (label, parts) in enumerate(section.rows(screen)):
            texts = [(printable(text), style) for text, style in parts]
            grid.add_row(Text(printable(label or ("" if at else section.label)), style="bold"), Text.assemble(*texts))
    print_table(safe, grid)


def as_text(*sections: Section) -> str:
    """Return sections with their titles as plain text."""
    texts = []
    for section in filter(lambda section: section.blocks, sections):
        rows = [(label, "".join(text for text, _ in parts)) for label, parts in section.rows(Screen())]
        width = _MIN_LABEL_CHARACTERS if any(label for label, _ in rows) else 0
        texts.append("\n".join(filter(None, (section.title, align(rows, width, gap=1)))))
    return "\n\n".join(texts)


def as_markdown(page: Page) -> str:
    """Return the page as Markdown with escaped values."""
    notes, tiles = (Paragraph(text) for _, text in page.notes), [Facts(page.tiles)] if page.tiles else []
    texts = [f"# {_escaped(page.heading)}", *(block.markdown() for block in (*page.about, *notes, *tiles))]
    for section in page.sections:
        if section.blocks:
            texts += [f"## {_escaped(section.title)}", *(block.markdown() for block in section.blocks)]
    return "\n\n".join(texts) + "\n"


def _escaped(cell: Inline) -> str:
    """Return text with Markdown and HTML escaped; underscores inside words are not Markdown."""
    if isinstance(cell, Span) and cell.link:
        return f"<{cell.link}>" if cell.text == cell.link else f"[{_escaped(cell.text)}]({cell.link})"
    if isinstance(cell, Span) and cell.kind == "code":
        return f"`{cell.text}`"
    return _MARKDOWN_SIGNS.sub(r"\\\g<0>", escape(re.sub(r"\s+", " ", str(cell or "")), quote=False))
