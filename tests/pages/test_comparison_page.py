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
    newer = {**MANIFEST, "packages": {"torch": "2.14.0"}, "hashes": {**MANIFEST["hashes"], "eval": "dd" * 32}}
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
    assert results["length"] == ["2 steps, 1.0k tokens", "2 steps, 1.0k tokens"]
    assert lines(page, "Training loss")["b"] == [(1.0, 4.0), (2.0, 2.0)]
    (charts,) = all_of(Charts, section(page, "Training curves"))
    assert charts.legend == [("a", 0), ("b", 1)]
    assert cells(page, "Settings that differ") == {"optimizer.lr": ["0.001", "0.01"], "schedule.kind": ["cosine", "-"]}
    assert "2 lines up to step 2\nfirst:   loss at step 2: 3 then, 2 now" in texts(page)
    origin = cells(page, "Differences in metrics, program and data")
    assert origin["torch"] == ["2.13.0", "2.14.0"]
    assert origin["eval data"] == ["bb" * 6, "dd" * 6]
    (answers,) = all_of(AnswerTable, section(page, "Final answers"))
    ((prompt, given),) = answers.prompts
    assert (prompt, [each.text for each in given]) == ("2+2?", ["4", "4", "5"])


@pytest.mark.parametrize(
    ("rows", "key", "name", "text"),
    [
        (None, "eval", "exact match", "90.00% ✓"),
        ("eval", "eval", "exact match (different eval sets)", "90.00%"),
        ("train", "train", "final training loss (different training sets)", "2"),
    ],
)
def test_comparison_page_best_result_of_the_same_rows_only(
    rows: str | None, key: str, name: str, text: str, tmp_path: Path
) -> None:
    other = {**MANIFEST, "hashes": {**MANIFEST["hashes"], **({rows: "dd" * 32} if rows else {})}}
    lines, better = lines_of([4.0, 3.0]), lines_of([4.0, 2.0])
    first = made_run(tmp_path / "a", lines, result=result_of(lines, exact_match=0.5))
    second = made_run(tmp_path / "b", better, result=result_of(better, exact_match=0.9), manifest=other)
    results = cells(comparison_page([first, second]), "Results")
    assert results[name] == ["50.00%" if key == "eval" else "3", text]


@pytest.mark.parametrize(
    ("key", "values", "shown"),
    [
        ("tokens_per_second", (274.0, 269.0), ["274", "269"]),
        ("tokens_per_second", (274.0, 229.0, 269.0), ["274 ✓", "229", "269 ✓"]),
        ("peak_memory_bytes", (2e9, 1.8e9), ["2.0 GB", "1.8 GB ✓"]),
        ("eval_loss", (1.0, 1.009), ["1.0000", "1.0090"]),
        ("eval_loss", (1.0, 1.02), ["1.0000 ✓", "1.0200"]),
        ("exact_match", (0.95, 0.98), ["95.00%", "98.00%"]),
        ("exact_match", (0.95, 0.9), ["95.00% ✓", "90.00%"]),
    ],
)
def test_comparison_page_marks_meaningful_differences_only(
    key: str, values: tuple[float, ...], shown: list[str], tmp_path: Path
) -> None:
    """Intervals of 2 percent points to either side are separate from a difference of 4."""
    lines, metrics = lines_of([4.0, 3.0]), {"exact_match_margin": 0.02, "eval_loss_margin": 0.5}
    results = [{**result_of(lines, final_metrics=metrics), key: value} for value in values]
    runs = [made_run(tmp_path / str(at), lines, result=result) for at, result in enumerate(results)]
    name = {"tokens_per_second": "tokens/s", "peak_memory_bytes": "peak memory"}.get(key, key.replace("_", " "))
    assert cells(comparison_page(runs), "Results")[name] == shown


def test_comparison_page_marks_no_value_of_a_run_of_another_length(tmp_path: Path) -> None:
    runs = [
        made_run(tmp_path / str(at), lines_of(losses)) for at, losses in enumerate(([4.0, 3.0], [4.0, 2.0], [1.0] * 30))
    ]
    page = comparison_page(runs)
    results = cells(page, "Results")
    assert results["length"] == ["2 steps, 1.0k tokens"] * 2 + ["30 steps, 15.4k tokens: not comparable"]
    assert results["final training loss"] == ["3", "2 ✓", "1"]
    assert "Not comparable: the number of tokens" in texts(page)
    short = cells(comparison_page(runs[1:]), "Results")
    assert short["length"][0] == "2 steps, 1.0k tokens: not comparable", "the longest run is the reference"
    assert short["final training loss"] == ["2", "1"]


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
        assert cells(page, "Results")["length"][-1] == "-"
        assert "Not comparable" not in texts(page)
