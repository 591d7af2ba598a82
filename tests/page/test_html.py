"""Nothing that is put into a page can become markup."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.page.document import document
from app.page.html import Html, element, joined, style_sheet
from tests.page.reading import read

HOSTILE = "</script></style></title><img src=x onerror=alert(1)>\"'`&amp;\x00\x1b[2J"


def test_texts_and_attributes_are_escaped() -> None:
    made = element("p", HOSTILE, title=HOSTILE)
    (found,) = read(made).all("p")
    assert found.children == []
    assert found.text == HOSTILE.replace("\x00", "\N{REPLACEMENT CHARACTER}").replace(
        "\x1b", "\N{REPLACEMENT CHARACTER}"
    )
    assert found.attributes == {"title": found.text}


@given(st.text(), st.text())
def test_any_text_comes_back_as_one_text(content: str, attribute: str) -> None:
    (found,) = read(element("p", content, title=attribute)).all("p")
    assert found.children == []
    assert list(found.attributes) == ["title"]


def test_what_is_made_of_markup_is_a_text_again() -> None:
    bold = element("b", "x")
    assert isinstance(bold, Html)
    assert element("p", bold) == "<p><b>x</b></p>"
    assert element("p", f"{bold}") == "<p>&lt;b&gt;x&lt;/b&gt;</p>"
    assert element("p", bold + "<i>") == "<p>&lt;b&gt;x&lt;/b&gt;&lt;i&gt;</p>"
    assert element("p", bold.upper()) == "<p>&lt;B&gt;X&lt;/B&gt;</p>"


def test_attributes_have_the_names_of_html() -> None:
    assert element("line", stroke_width=2, class_="a", x1=None, hidden=True, off=False) == (
        '<line stroke-width="2" class="a" hidden></line>'
    )
    assert element("br") == "<br>"
    assert joined(None, "a", ["b", [element("i")]]) == "ab<i></i>"


def test_a_style_sheet_cannot_end_itself() -> None:
    with pytest.raises(AssertionError):
        style_sheet("p{}</style>")


def test_a_page_forbids_itself_everything_that_is_not_in_it() -> None:
    page = read(document(HOSTILE, element("p", "hello")))
    policies = [
        each.attributes["content"]
        for each in page.all("meta")
        if each.attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    assert "x onerror" in page.one("head").one("title").text
    assert not any(page.all(tag) for tag in ("script", "img", "link", "iframe"))
    assert "url(" not in page.one("style").text
    assert "@import" not in page.one("style").text
