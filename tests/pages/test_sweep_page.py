"""The page of a sweep: the same ranking as its table, and what the values did."""

import shlex
from pathlib import Path

from app.pages.charts import DotChart
from app.pages.comparison_page import sweep_page
from app.pages.page import Charts, Code, Page, Span, Table, as_html
from app.pages.read_run import read_sweep
from app.sweeps.trials import Outcome, best, ranked
from tests.pages.folders import lines_of, made_run, made_sweep, trial
from tests.pages.values import all_of, chart, lines, section, titles

GRID = [
    trial(1, ["optimizer.lr=1e-3", "adapter.r=4"], 3.5),
    trial(2, ["optimizer.lr=1e-3", "adapter.r=16"], 3.25),
    trial(3, ["optimizer.lr=1e-1", "adapter.r=4"], None, error="error: it blew up"),
    trial(4, ["optimizer.lr=1e-1", "adapter.r=16"], 3.75),
    trial(5, ["optimizer.lr=1e-2", "adapter.r=4"], 3.25, status="stopped"),
    trial(6, ["optimizer.lr=1e-2", "adapter.r=64"], 3.5),
]


def page_of(folder: Path, target: Path | None = None) -> Page:
    content = read_sweep(folder)
    assert content is not None
    return sweep_page(folder, content, target or folder / "report.html")


def leaderboard(page: Page) -> Table:
    (table,) = all_of(Table, section(page, "Leaderboard"))
    return table


def rows(page: Page) -> list[list[str]]:
    return [list(map(str, row)) for row in leaderboard(page).cells]


def links(page: Page) -> list[str]:
    return [cell.link for row in leaderboard(page).cells for cell in row if isinstance(cell, Span) and cell.link]


def test_sweep_page_ranking(tmp_path: Path) -> None:
    outcomes = [Outcome(**{**each, "seconds": 61.0}) for each in GRID]
    page = page_of(made_sweep(tmp_path / "sweep", GRID))
    assert [int(row[1]) for row in rows(page)] == [each.number for each in ranked(outcomes)]
    assert rows(page)[0] == ["1", "2", "3.25", "0.001", "16", "9", "5.0k", "299", "0:01:01", "finished"]
    assert rows(page)[-1] == ["-", "3", "-", "0.1", "4", "9", "5.0k", "299", "0:01:01", "failed"]
    winner = best(outcomes)
    assert winner is not None
    (command,), (again,) = (all_of(Code, section(page, title)) for title in ("Best", "Rerun"))
    assert shlex.split(command.text)[:2] == ["finetune", "train"]
    assert shlex.split(command.text)[2:] == winner["overrides"]
    assert again.text == "finetune train -m optimizer.lr=1e-3,1e-4"
    assert [each.text for each in all_of(Code, section(page, "Failed"))] == ["error: it blew up"]
    (_, failed), (_, left) = page.notes
    assert failed.startswith("1 of 6 trials failed")
    assert left.startswith("1 of 6 trials are unfinished")
    assert page.badges == [("stopped", "warn")]


def test_sweep_page_chart_per_key(tmp_path: Path) -> None:
    page = page_of(made_sweep(tmp_path / "sweep", GRID))
    for key, left_to_right in (("optimizer.lr", [1, 2, 5, 6, 4]), ("adapter.r", [1, 5, 2, 4, 6])):
        dots = chart(page, DotChart, f"Objective by {key}").plot().dots
        told = {int(dot.text.split()[1].rstrip(":")): dot for dot in dots}
        places = {number: float(dot.x[:-1]) for number, dot in told.items()}
        assert sorted(places, key=lambda number: (places[number], number)) == left_to_right
        assert {number for number, dot in told.items() if dot.best} == {2, 5}
        assert told[1].text == f"trial 1: {GRID[0]['values'][key]}\nobjective 3.5"
    lr, ranks = (chart(page, DotChart, f"Objective by {key}").plot() for key in ("optimizer.lr", "adapter.r"))
    assert lr.across.low < 1e-3 < 1e-1 < lr.across.high
    assert [text for _, text in lr.across.ticks] == ["0.001", "0.01", "0.1"]
    assert ([text for _, text in ranks.across.ticks], ranks.x_name) == (["4", "16", "64"], "adapter.r, log scale")
    assert list(dict(page.tiles)) == ["best objective (lower is better)", "finished of 6 trials", "total time"]
    assert titles(page) == ["Best trial", "Leaderboard", "Effect of each setting", "Failed", "Rerun"]


def test_sweep_page_curves_of_best_trials(tmp_path: Path) -> None:
    folder = made_sweep(tmp_path / "sweep", GRID)
    made_run(folder / "2-trial", lines_of([4.0, 3.25]))
    (folder / "2-trial" / "report.html").touch()
    made_run(folder / "1-trial", lines_of([4.5, 3.5]))
    page = page_of(folder)
    assert "best training loss (lower is better)" in dict(page.tiles), "no rows were held out"
    assert links(page) == ["./2-trial/report.html"]
    assert 'href="./2-trial/report.html"' in as_html(page)
    names = ["2: optimizer.lr=0.001 adapter.r=16", "1: optimizer.lr=0.001 adapter.r=4"]
    assert lines(page, "Training loss") == {names[0]: [(1.0, 4.0), (2.0, 3.25)], names[1]: [(1.0, 4.5), (2.0, 3.5)]}
    (curves,) = all_of(Charts, section(page, "Training curves of the best"))
    assert curves.legend == [(names[0], 0), (names[1], 1)]
    assert links(page_of(folder, tmp_path / "elsewhere.html")) == [], "it would lead nowhere"


def test_read_sweep_unreadable_is_none(tmp_path: Path) -> None:
    for text in ("{", "[]", "{}"):
        (tmp_path / "sweep.json").write_text(text)
        assert read_sweep(tmp_path) is None


def test_sweep_page_without_objective(tmp_path: Path) -> None:
    page = page_of(made_sweep(tmp_path / "sweep", [trial(1, ["seed=1"], None), trial(2, [], None)]))
    assert page.badges == [("failed", "bad")]
    assert titles(page) == ["Leaderboard", "Failed", "Rerun"]


def test_sweep_page_lists_have_no_chart(tmp_path: Path) -> None:
    trials = [trial(n, [f"adapter.targets=[{name}]"], 3.0 + n) for n, name in enumerate(("q_proj", "v_proj"), 1)]
    page = page_of(made_sweep(tmp_path / "sweep", trials))
    assert len(rows(page)) == 2
    assert all_of(Charts, *page.sections) == []


def test_sweep_page_two_values_have_no_chart(tmp_path: Path) -> None:
    page = page_of(made_sweep(tmp_path / "sweep", [trial(n, [f"adapter.r={4 * n}"], 3.0 + n) for n in (1, 2)]))
    assert titles(page) == ["Best trial", "Leaderboard", "Rerun"]


def test_sweep_page_chart_of_a_share_in_percent(tmp_path: Path) -> None:
    scores = [trial(n, [f"adapter.r={4 * n}"], 0.9 + n / 100, objective_is="exact_match") for n in (1, 2, 3)]
    up = chart(page_of(made_sweep(tmp_path / "sweep", scores)), DotChart, "Objective by adapter.r").plot().up
    assert (up.low, up.high, up.ticks[-1][1]) == (0, 1, "100%")


def test_sweep_page_trial_that_is_a_link_not_followed(tmp_path: Path) -> None:
    folder, private = made_sweep(tmp_path / "sweep", GRID), tmp_path / "private"
    made_run(private, lines_of([3.0, 2.0]))
    place = folder / Path(GRID[0]["folder"]).name
    place.symlink_to(private)
    assert "Training curves of the best trials" not in titles(page_of(folder))
    place.unlink()
    private.rename(place)
    assert "Training curves of the best trials" in titles(page_of(folder))
