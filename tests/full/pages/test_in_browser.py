"""Pages as Chromium shows them: nothing is asked for, nothing is too wide, everything can be read."""

import math
from pathlib import Path

import pytest

from app.pages.check_page import check_page
from app.pages.comparison_page import comparison_page
from app.pages.page import Charts, Page, Section, as_html
from app.pages.run_page import run_page
from tests.full.pages.browser import looked_at, printed_pages
from tests.harness.marks import requires_chromium
from tests.pages.facts import DATA, TOO_LARGE
from tests.pages.folders import made_run, sample, step
from tests.pages.test_page import EVERYTHING, HOSTILE, hostile

pytestmark = requires_chromium
PHONE, DESK = 360, 1200
LONG = "an-unbroken-word-" * 40


def pages(folder: Path) -> dict[str, Path]:
    """Every block with ordinary, long and hostile texts, and a run with long lines in its charts."""
    lines = [step(at, None if at == 70 else 3 + math.cos(at / 9)) for at in range(1, 200)]
    blocks = {
        text: [each for each in hostile(text).sections[0].blocks if not isinstance(each, Charts)]
        for text in (LONG, HOSTILE)
    }
    made = {
        "everything": EVERYTHING,
        **{
            str(at): Page(text, [Section(text, of)], notes=[("bad", text)])
            for at, (text, of) in enumerate(blocks.items())
        },
        "run": run_page(made_run(folder / LONG[:120], lines, samples=[sample(199, LONG, "4", "4")])),
        "compared": comparison_page([folder / LONG[:120], made_run(folder / "short", lines[:9])]),
        "check": check_page({"data": {**DATA, "source": LONG, "stops": [LONG]}, "memory": TOO_LARGE}),
    }
    for name, page in made.items():
        (folder / f"{name}.html").write_text(as_html(page))
    return {name: folder / f"{name}.html" for name in made}


@pytest.mark.parametrize("dark", [False, True])
def test_pages_load_nothing_and_fit_phone(tmp_path: Path, dark: bool) -> None:
    shown = {f"{name}-{width}": (file, width) for name, file in pages(tmp_path).items() for width in (PHONE, DESK)}
    found, said = looked_at(tmp_path, shown, dark=dark)
    assert said == []
    assert found.keys() == shown.keys()
    for name, page in found.items():
        assert page["asked"] == [], name
        assert page["wide"] == page["room"] == shown[name][1], name
        assert not {"script", "img", "iframe", "link", "object"} & set(page["elements"]), name
        assert page["texts"] > 30, name
        assert page["dark"] == dark
        assert (sum(page["background"]) < 150) == dark, page["background"]
        assert page["worst"][0] >= 4.5, (name, page["worst"])
        assert page["faint"][0] >= 3, (name, page["faint"])
        assert page["longest"] > shown[name][1] / 3 or not name.startswith("run"), name
        assert all(text.startswith("step ") for text in page["tooltips"]), (name, page["tooltips"])
        assert len(page["tooltips"]) >= 10 or not name.startswith(("run", "everything")), name


def test_run_page_prints_on_few_sheets(tmp_path: Path) -> None:
    lines = [step(at, 3 + math.cos(at / 9), exact_match=0.5) for at in range(1, 200)]
    samples = [sample(199, f"prompt {at}", "4", "4") for at in range(4)]
    (tmp_path / "run.html").write_text(as_html(run_page(made_run(tmp_path / "run", lines, samples=samples))))
    assert printed_pages(tmp_path, tmp_path / "run.html") <= 4


def test_content_security_policy_blocks_script(tmp_path: Path) -> None:
    """As if an element had slipped into a page."""
    page = as_html(run_page(made_run(tmp_path / "run", [step(1, 3.0)])))
    slipped = "<img src='http://nowhere.invalid/x.png'><script>document.title = 'taken'</script></main>"
    (tmp_path / "run.html").write_text(page.replace("</main>", slipped))
    found, said = looked_at(tmp_path, {"run": (tmp_path / "run.html", PHONE)}, dark=False)
    assert found["run"]["title"] == "run: finished"
    assert len([line for line in said if "Content Security Policy" in line]) == 2
