"""The three renderers: every kind of block in each, and texts that could become markup or control a screen."""

import io
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.pages import page as pages
from app.pages.charts import Bar, Chart, DotChart, LineChart, Quantity, Series
from app.pages.page import (
    Answer,
    AnswerTable,
    Bars,
    Block,
    Charts,
    Code,
    Facts,
    Fold,
    Inline,
    Page,
    Paragraph,
    Section,
    Span,
    Table,
    TrainingSamples,
    as_html,
    as_markdown,
    as_text,
    show,
)
from app.safe_text import printable

HOSTILE = "</script></style></title><img src=x onerror=alert(1)>\"'`&amp;\x00\x1b[2J"
REPLACED = HOSTILE.replace("\x00", "\N{REPLACEMENT CHARACTER}").replace("\x1b", "\N{REPLACEMENT CHARACTER}")
GOLDEN = Path(__file__).with_name("golden")
CELLS: list[list[Inline]] = [
    [Span("a link", link="./a.html"), Span("x=1", "code"), Span("0.5", "best")],
    ["a_b *c*", None, "0.25"],
]
LINES = [Series("train", [(1, 4.0), (2, None), (3, 2.5)]), Series("held out", [(3, 3.0)], 1)]
CHARTS: list[Chart] = [
    LineChart(Quantity("Loss", ""), LINES),
    DotChart(Quantity("Best", ""), "lr", [(1, 2, "a\nb"), (2, 1, "c")]),
]
BARS = Bars([Bar("1-9", 1.0, "8"), Bar(">9", 0.25, "2", True)], "A title", True, [Paragraph("left")])
SAMPLES = TrainingSamples([("a:1", [("Hi ", False, ""), ("yes", True, "(weight 0.3)")])], "trained")
ANSWERS = AnswerTable([("2+2?", [Answer("expected", "4"), Answer("now", "4", True)])], "1 of 1.", 3)
EVERYTHING = Page(
    title="a window",
    heading="A page",
    badges=[("finished", "good")],
    about=[Paragraph(("see ", Span("https://example.org/", link="https://example.org/")), "soft")],
    notes=[("warn", "a note")],
    tiles=[("tokens a second", "5.2k"), ("absent", None)],
    sections=[
        Section("Facts", [Facts([("first", "1\n2"), ("", "more"), ("absent", None)])]),
        Section("Table", [Table(["name", "key", "loss"], CELLS, numbers=[2], notes=["below it"])]),
        Section("Bars", [BARS]),
        Section("Charts", [Charts(CHARTS, [("a", 0)])]),
        Section("Code", [Code("a=1", intro="Do:", why="it is good"), Code("import x", "python")]),
        Section("Samples", [SAMPLES]),
        Section("Answers", [ANSWERS]),
        Section("Folded", [Paragraph("A name", "heading"), Fold("more", [Paragraph("inside")])]),
        Section("Without blocks", []),
    ],
)
RENDERERS: dict[str, Callable[[Page], str]] = {
    "html": lambda page: (
        re.sub(r"\s*\n\s*", "", as_html(page).partition("<main>")[2].partition("<footer>")[0])
        .replace("<section>", "\n<section>")
        .replace("<figure", "\n<figure")
        + "\n"
    ),
    "txt": lambda page: as_text(*page.sections) + "\n",
    "md": as_markdown,
}


@pytest.mark.parametrize("kind", RENDERERS)
def test_renderer_every_block_as_golden(kind: str) -> None:
    assert RENDERERS[kind](EVERYTHING) == (GOLDEN / f"page.{kind}").read_text(encoding="utf-8")


def test_golden_page_has_every_block() -> None:
    shown = {type(block) for part in EVERYTHING.sections for block in part.blocks}
    assert shown == {each for each in vars(pages).values() if isinstance(each, type) and Block in each.__bases__}


class Read(HTMLParser):
    """Tags, and texts that are not style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] != ["style"]:
            self.texts.append(data)


def hostile(text: str) -> Page:
    """`text` in each place of each block."""
    span, bar = Span(text, text, text), Bar(text, 1.0, text)
    chart = LineChart(Quantity(text, text), [Series(text, [(1, 1.0)], kind=text), Series(text, [(1, 1.0)])])
    dots = DotChart(Quantity(text, text), text, [(1, 2, text)])
    blocks = [
        Paragraph((text, span, Span(text, "code"), Span(text, "best")), text),
        Facts([(text, text)]),
        Table([text], [[text]], notes=[text]),
        Bars([bar], text),
        Charts([chart, dots], [(text, 0)]),
        Code(text, text, text),
        Code(text, text, text, text),
        TrainingSamples([(text, [(text, True, text)])], text, text),
        AnswerTable([(text, [Answer(text, text)])], text, 1),
        Fold(text, [Code(text)]),
    ]
    pair = [(text, text)]
    return Page(text, [Section(text, blocks, text)], text, pair, [Paragraph(text)], pair, pair)


def test_as_html_hostile_text_escaped() -> None:
    read, plain = Read(as_html(hostile(HOSTILE))), Read(as_html(hostile("x")))
    assert read.tags == plain.tags
    assert len(read.texts) == len(plain.texts)
    assert sum(REPLACED in text for text in read.texts) >= 35
    assert "\x1b" not in as_html(hostile(HOSTILE))


@given(st.text())
def test_as_html_any_text_round_trip(text: str) -> None:
    shown = Read(as_html(Page("", [Section("", [Facts([("a", f"<{text}>")])])]))).texts
    assert f"<{printable(text)}>" in shown or "\r" in text


def test_as_html_content_security_policy() -> None:
    page = as_html(EVERYTHING)
    assert """content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">""" in page
    assert not {"script", "img", "link", "iframe"} & {*Read(page).tags}
    assert "url(" not in page
    assert "@import" not in page


def test_templates_never_disable_escaping() -> None:
    templates = list((Path(pages.__file__).parent / "templates").iterdir())
    assert len(templates) >= 3
    assert not [
        file.name for file in templates for word in ("|safe", "| safe", "autoescape") if word in file.read_text()
    ]


def test_as_html_long_texts_folded() -> None:
    for text, is_folded in (("word " * 300, True), ("a\n" * 9, True), ("short", False)):
        page = as_html(Page("", [Section("", [AnswerTable([(text, [])], "", 0)])]))
        assert ('<details class="fold">' in page) == is_folded


def test_as_markdown_escapes_signs_but_not_underscores_of_names() -> None:
    page = as_markdown(Page("a|b <img> [c](d) `e`\n# f", [Section("eval_loss and _it_", [Code("a ```` b")])]))
    assert page.startswith("# a\\|b &lt;img&gt; \\[c\\](d) \\`e\\` \\# f\n\n## eval_loss and \\_it\\_\n")
    assert page.endswith("`````\na ```` b\n`````\n")


ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


Shown = Callable[..., str]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    def of(sections: list[Section], columns: int = 100, **environment: str) -> str:
        for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM", "TTY_COMPATIBLE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"TERM": "xterm-256color", "COLUMNS": str(columns), **environment}.items():
            monkeypatch.setenv(name, value)
        stream = Terminal()
        show(sections, stream)
        return stream.getvalue()

    return of


def test_show_marks_trained_tokens_by_color_or_brackets(shown: Shown) -> None:
    samples = [part for part in EVERYTHING.sections if part.title == "Samples"]
    assert re.findall(r"\x1b\[30;42m(yes)\x1b\[0m", shown(samples)) == ["yes"]
    assert "[[" not in shown(samples)
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        plain = shown(samples, **environment)
        assert "Hi [[yes]](weight 0.3)" in ESCAPE.sub("", plain)
        assert not re.search(r"\x1b\[[0-9;]*(3|4)[0-9]", plain)


@pytest.mark.parametrize("columns", [120, 70])
def test_show_everything_at_any_width(shown: Shown, columns: int) -> None:
    long = Section("", [Paragraph("word " * 60)], label="first")
    text = ESCAPE.sub("", shown([long, *EVERYTHING.sections], columns, NO_COLOR="1"))
    assert max(len(line.rstrip()) for line in text.splitlines()) <= columns
    assert text.split()[0] == "first"
    seen = "".join(text.replace("█", "#").split())
    for line in as_text(*(Section("", part.blocks) for part in EVERYTHING.sections)).splitlines():
        assert "".join(line.split()).rstrip("#") in seen


def test_show_hostile_text_cannot_control_the_screen(shown: Shown) -> None:
    text = shown(list(hostile(HOSTILE).sections), TERM="dumb")
    assert "\x1b" not in text
    assert text.count("onerror") >= 15


def test_show_in_a_pipe_has_plain_lines() -> None:
    stream = io.StringIO()
    show(EVERYTHING.sections, stream)
    assert "\x1b" not in stream.getvalue()
    assert [line for line in stream.getvalue().splitlines() if line != line.rstrip()] == []
