"""The page of a sweep: the same ranking as its table, and what the values did."""

import shlex
from pathlib import Path

import pytest

from app.pages.read_run import read_sweep
from app.pages.sweep_page import sweep_page
from app.sweeps.trials import Outcome, best, ranked
from tests.pages.folders import lines_of, made_run, made_sweep, trial
from tests.pages.reading import Element, chart, drawn, read, section, tiles

GRID = [
    trial(1, ["optimizer.lr=1e-3", "adapter.r=4"], 3.5),
    trial(2, ["optimizer.lr=1e-3", "adapter.r=16"], 3.25),
    trial(3, ["optimizer.lr=1e-1", "adapter.r=4"], None, error="error: it blew up"),
    trial(4, ["optimizer.lr=1e-1", "adapter.r=16"], 3.75),
    trial(5, ["optimizer.lr=1e-2", "adapter.r=4"], 3.25, status="stopped"),
]


def page_of(folder: Path, target: Path | None = None) -> Element:
    content = read_sweep(folder)
    assert content is not None
    return read(sweep_page(folder, content, target or folder / "report.html"))


def rows(page: Element) -> list[list[str]]:
    lines = section(page, "Leaderboard").one("tbody").all("tr")
    return [[cell.text for cell in line.all("td")] for line in lines]


def test_sweep_page_ranking(tmp_path: Path) -> None:
    outcomes = [Outcome(**{**each, "seconds": 61.0}) for each in GRID]
    page = page_of(made_sweep(tmp_path / "sweep", GRID))
    assert [int(row[1]) for row in rows(page)] == [each.number for each in ranked(outcomes)]
    assert rows(page)[0] == ["1", "2", "3.25", "0.001", "16", "9", "5.0k", "299", "0:01:01", "finished"]
    assert rows(page)[-1] == ["-", "3", "-", "0.1", "4", "9", "5.0k", "299", "0:01:01", "failed"]
    winner = best(outcomes)
    assert winner is not None
    command = section(page, "Best").one("pre", "command").text
    assert shlex.split(command)[:3] == ["python", "-m", "app.train"]
    assert shlex.split(command)[3:] == winner["overrides"]
    assert section(page, "Run it again").one("pre").text == "python -m app.train -m optimizer.lr=1e-3,1e-4"
    assert "error: it blew up" in section(page, "Failed").text
    notes = [each.text for each in page.all("div", "note")]
    assert notes[0].startswith("1 of 5 trials failed")
    assert notes[1].startswith("1 of 5 trials are not done")
    assert page.one("div", "top").one("span").text == "stopped"


def test_sweep_page_chart_per_key(tmp_path: Path) -> None:
    page = page_of(made_sweep(tmp_path / "sweep", GRID))
    for key, left_to_right in (("optimizer.lr", [1, 2, 5, 4]), ("adapter.r", [1, 5, 2, 4])):
        figure = chart(page, f"Objective by {key}")
        dots = figure.all("circle", "dot")
        assert len(dots) == 4
        told = {int(dot.one("title").text.split()[1].rstrip(":")): dot for dot in dots}
        places = {number: float(str(dot.attributes["cx"])[:-1]) for number, dot in told.items()}
        assert sorted(places, key=lambda number: (places[number], number)) == left_to_right
        assert {number for number, dot in told.items() if "best" in str(dot.attributes["class"])} == {2, 5}
        assert told[1].one("title").text == f"trial 1: {GRID[0]['values'][key]}\nobjective 3.5"
    lr = chart(page, "Objective by optimizer.lr")
    (low, high), ticks = (
        map(float, str(lr.all("svg")[0].attributes["data-x"]).split()),
        [each.text for each in lr.all("text")],
    )
    assert low < 1e-3 < 1e-1 < high
    assert {"0.001", "0.01", "0.1"} <= set(ticks)
    ranks = chart(page, "Objective by adapter.r")
    assert [each.text for each in ranks.all("text")][-3:] == ["4", "16", "adapter.r, log scale"]
    assert list(tiles(page)) == ["best objective (lower is better)", "finished of 5 trials", "time of all trials"]
    headings = [each.text for each in page.all("h2")]
    assert headings.index("Leaderboard") < headings.index("What the values did")


def test_sweep_page_curves_of_best_trials(tmp_path: Path) -> None:
    folder = made_sweep(tmp_path / "sweep", GRID)
    made_run(folder / "2-trial", lines_of([4.0, 3.25]))
    (folder / "2-trial" / "report.html").touch()
    made_run(folder / "1-trial", lines_of([4.5, 3.5]))
    page = page_of(folder)
    assert "best training loss (lower is better)" in tiles(page), "no rows were held out"
    assert [link.attributes["href"] for link in page.all("a")] == ["./2-trial/report.html"]
    curves = chart(section(page, "Curves"), "Training loss")
    assert [y for _, y in drawn(curves, "c0")[0]] == pytest.approx([4.0, 3.25], rel=1e-4)
    assert [y for _, y in drawn(curves, "c1")[0]] == pytest.approx([4.5, 3.5], rel=1e-4)
    assert [key.text for key in section(page, "Curves").one("div", "legend").all("span")] == [
        "2: optimizer.lr=0.001 adapter.r=16",
        "1: optimizer.lr=0.001 adapter.r=4",
    ]
    assert page_of(folder, tmp_path / "elsewhere.html").all("a") == [], "it would lead nowhere"


def test_read_sweep_unreadable_is_none(tmp_path: Path) -> None:
    for text in ("{", "[]", "{}"):
        (tmp_path / "sweep.json").write_text(text)
        assert read_sweep(tmp_path) is None


def test_sweep_page_without_objective(tmp_path: Path) -> None:
    page = page_of(made_sweep(tmp_path / "sweep", [trial(1, ["seed=1"], None), trial(2, [], None)]))
    assert page.one("div", "top").one("span").text == "failed"
    assert "What the values did" not in page.text
    assert "Best trial" not in page.text


def test_sweep_page_lists_have_no_chart(tmp_path: Path) -> None:
    trials = [trial(n, [f"adapter.targets=[{name}]"], 3.0 + n) for n, name in enumerate(("q_proj", "v_proj"), 1)]
    page = page_of(made_sweep(tmp_path / "sweep", trials))
    assert len(rows(page)) == 2
    assert page.all("circle", "dot") == []


def test_sweep_page_trial_that_is_a_link_not_followed(tmp_path: Path) -> None:
    folder, private = made_sweep(tmp_path / "sweep", GRID), tmp_path / "private"
    made_run(private, lines_of([3.0, 2.0]))
    place, without = folder / Path(GRID[0]["folder"]).name, len(page_of(folder).all("figure"))
    place.symlink_to(private)
    assert len(page_of(folder).all("figure")) == without
    place.unlink()
    private.rename(place)
    assert len(page_of(folder).all("figure")) > without
