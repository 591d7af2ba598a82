"""The memory on the page of app.check: its figures are those of check.json, and the bar has their proportions."""

from itertools import pairwise
from typing import Any

import pytest

from app.page.check_page import check_page
from tests.page.memory_facts import MEMORY, TOO_LARGE
from tests.page.reading import Element, read, section
from tests.page.test_check_page import FACTS
from tests.page.test_html import HOSTILE
from tests.page.test_run_page import notes, tiles


def page_of(facts: dict[str, Any]) -> Element:
    return read(check_page({"memory": facts}))


def badges(page: Element) -> list[str]:
    return [each.text for each in page.all("span", "badge")]


def test_its_numbers_are_those_of_the_file() -> None:
    page = page_of(MEMORY)
    assert page.one("h1").text == MEMORY["subject"]
    assert badges(page) == ["nothing stops a run", "fits RTX 4090"]
    assert tiles(page) == {
        "peak": "20.0 GB",
        "needed, all in all": "22.1 GB",
        "of RTX 4090": "25.2 GB",
        "tokens a second, at most": "3.4k",
        "a token": "48.0 GFLOP",
    }
    cells = [[cell.text for cell in row.all("td")] for row in section(page, "Memory").all("tr")]
    assert ["frozen weights", "15.0 GB", "68.0%"] in cells
    assert ["allocator", "500 MB", "2.3%"] in cells
    assert cells[-1] == ["needed", "22.1 GB", ""]
    assert [each.text for each in section(page, "What brings").all("pre")] == [
        "training.recompute=true",
        "recipe=qlora",
    ]
    assert "saves 1.9 GB; 31% slower: more arithmetic" in section(page, "What brings").text
    assert ["backward", "20.0 GB"] in [
        [cell.text for cell in row.all("td")] for row in section(page, "Phases").all("tr")
    ]
    assert notes(page) == ["the context of this GPU was not measured yet"]


@pytest.mark.parametrize(("facts", "ends"), [(MEMORY, 22_057 / 25_233), (TOO_LARGE, 1.0)])
def test_the_bar_has_their_proportions_and_no_gap(facts: dict[str, Any], ends: float) -> None:
    bar = page_of(facts).one("svg", "stack")
    edges = [
        (float(str(each.attributes["x"])[:-1]), float(str(each.attributes["width"])[:-1]))
        for each in bar.all("rect")
    ]
    assert len(edges) == 10  # no part of 0 bytes
    for (start, width), (following, _) in pairwise(edges):
        assert start + width == pytest.approx(following, abs=0.02)
    assert sum(edges[-1]) == pytest.approx(100 * ends, abs=0.05)
    assert len(bar.all("line", "limit")) == (not facts["fits"])


def test_what_does_not_fit_is_said_first_and_what_brings_it_in() -> None:
    page = page_of(TOO_LARGE)
    assert badges(page) == ["a run would stop", "does not fit RTX 4090"]
    assert notes(page)[0] == "it needs 30.1 GB"
    assert "saves 10.9 GB, alone brings it in; as fast:" in section(page, "What brings").text
    together = {"override": "a=1 b=2", "needed_bytes": 9e9}
    shown = section(
        page_of({**TOO_LARGE, "knobs": TOO_LARGE["knobs"][:1], "together": together}), "What brings"
    )
    assert [each.text for each in shown.all("pre")] == ["training.recompute=true", "a=1 b=2"]
    assert "together 9.0 GB, which fits" in shown.text


def test_both_checks_share_a_page() -> None:
    page = read(check_page({"data": FACTS, "memory": MEMORY}))
    assert page.one("h1").text == "chat.jsonl"
    assert badges(page) == ["nothing stops a run", "fits RTX 4090"]
    assert section(page, "Memory").all("svg")
    assert section(page, "Advice").all("pre")


def test_settings_stay_text_and_little_is_enough() -> None:
    page = page_of(
        {**MEMORY, "subject": HOSTILE, "notes": [HOSTILE], "label": HOSTILE, "peak_where": HOSTILE}
    )
    assert page.all("script") == page.all("img") == []
    assert page_of({"peak_bytes": None, "anatomy": {}, "knobs": None}).all("h1")
