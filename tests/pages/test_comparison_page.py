"""Runs beside each other."""

from pathlib import Path

import pytest

from app.pages.comparison_page import comparison_page
from app.pages.page import AnswerTable, Charts, Page, Table
from tests.pages.folders import MANIFEST, SETTINGS, lines_of, made_run, result_of, sample
from tests.pages.values import all_of, lines, section, texts


def cells(page: Page, title: str) -> dict[str, list[str]]:
    (table,) = all_of(Table, section(page, title))
    return {str(name): [str(cell) for cell in row] for name, *row in table.cells}


def test_comparison_page_content(tmp_path: Path) -> None:
    other = {**SETTINGS, "output_dir": "x", "optimizer": {"kind": "adamw", "lr": 0.01}}
    del other["schedule"]
    newer = {**MANIFEST, "packages": {"torch": "2.14.0"}, "hashes": {"train": "dd" * 32}}
    first = made_run(tmp_path / "a", lines_of([4.0, 3.0]), samples=[sample(2, "2+2?", "4", "4")])
    second = made_run(
        tmp_path / "b",
        lines_of([4.0, 2.0]),
        settings=other,
        manifest=newer,
        samples=[sample(0, "2+2?", "4", "x"), sample(2, "2+2?", "4", "5")],
    )
    page = comparison_page([first, second])
    results = cells(page, "Results")
    assert results["final training loss"] == ["3", "2 ✓"]
    assert "best objective" not in results, "it is the training loss"
    assert results["peak memory"] == ["548 MB", "548 MB"]
    assert lines(page, "Training loss")["b"] == [(1.0, 4.0), (2.0, 2.0)]
    (charts,) = all_of(Charts, section(page, "Training curves"))
    assert charts.legend == [("a", 0), ("b", 1)]
    assert cells(page, "Settings that differ") == {"optimizer.lr": ["0.001", "0.01"], "schedule.kind": ["cosine", "-"]}
    assert "2 lines up to step 2\nfirst:   loss at step 2: 3 then, 2 now" in texts(page)
    origin = cells(page, "Differences in metrics, program and data")
    assert origin["torch"] == ["2.13.0", "2.14.0"]
    assert origin["training data"] == ["aa" * 6, "dd" * 6]
    (answers,) = all_of(AnswerTable, section(page, "Final answers"))
    ((prompt, given),) = answers.prompts
    assert (prompt, [each.text for each in given]) == ("2+2?", ["4", "4", "5"])


@pytest.mark.parametrize(
    ("rows", "name", "told"), [("bb", "exact match", "90.00% ✓"), ("dd", "exact match (different eval sets)", "90.00%")]
)
def test_comparison_page_best_score_of_the_same_rows_only(rows: str, name: str, told: str, tmp_path: Path) -> None:
    other = {**MANIFEST, "hashes": {**MANIFEST["hashes"], "eval": rows * 32}}
    lines = lines_of([4.0, 3.0])
    first = made_run(tmp_path / "a", lines, result=result_of(lines, exact_match=0.5))
    second = made_run(tmp_path / "b", lines, result=result_of(lines, exact_match=0.9), manifest=other)
    results = cells(comparison_page([first, second]), "Results")
    assert results[name] == ["50.00%", told]


def test_comparison_page_equal_runs(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / name / "run", lines_of([4.0, 3.0])) for name in ("a", "b")]
    page = comparison_page(runs)
    assert "all settings are equal" in texts(page)
    assert "2 lines up to step 2, bit-identical" in texts(page)
    assert "Same versions, commit, hardware, data, tokenizer and base model." in texts(page)
    assert page.title == "2 runs: a/run, b/run"


def test_comparison_page_incomplete_runs(tmp_path: Path) -> None:
    broken = made_run(tmp_path / "broken", result={})
    whole = made_run(tmp_path / "whole", lines_of([1.0]))
    (broken / "manifest.json").unlink()
    for pair in ([broken, broken], [whole, broken]):
        page = comparison_page(pair)
        assert "no steps in common" in texts(page)
        assert "unfinished" in cells(page, "Results")["status"]
