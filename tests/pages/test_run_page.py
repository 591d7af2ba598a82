"""The page of a run, in any state of its folder."""

import json
import math
from pathlib import Path

import pytest

from app.pages.read_run import read_run
from app.pages.run_page import run_page
from app.tracking.output_dir import RunFolder
from tests.pages.folders import MANIFEST, PREVIEW, SETTINGS, jsonl, lines_of, made_run, result_of, sample, step
from tests.pages.reading import Element, chart, drawn, notes, read, section, tiles
from tests.pages.test_render import HOSTILE

LINES = [*lines_of([4.0, 3.0, 2.5]), {"step": 3, "epoch": 0.03, "eval_loss": 2.75}]


def page_of(folder: Path) -> Element:
    return read(run_page(folder))


def cells(part: Element, tag: str = "td", class_: str | None = None) -> list[str]:
    return [cell.text for cell in part.all(tag, class_)]


def test_run_page_finished_run(tmp_path: Path) -> None:
    result = result_of(LINES, exact_match=0.9714, start_metrics={"eval_loss": 4.5, "exact_match": 0.0})
    page = page_of(made_run(tmp_path / "mine", LINES, result=result))
    assert page.one("h1").text == "mine"
    assert page.one("head").one("title").text == "mine: finished"
    assert "LoRA, rank 32 · the small model with random weights · the sample rows · adamw, cosine" in page.text
    assert notes(page) == []
    assert tiles(page) == {
        "held-out loss, was 4.5": "2.7500",
        "exact match, was 0.00%": "97.14%",
        "last training loss, was 4": "2.5000",
        "for 3 of 100 steps": "0:01:30",
        "tokens a second, 31.1 samples": "5.2k",
        "peak memory of the process": "548 MB",
    }
    loss = chart(page, "Loss")
    assert [y for _, y in drawn(loss, "c0")[0]] == pytest.approx([4.0, 3.0, 2.5], rel=1e-4)
    assert drawn(loss, "c1") == [[pytest.approx((3.0, 2.75), abs=1e-2)]]
    others = {"Learning rate": 1e-3, "Gradient norm": 1.25, "Speed": 5200.0, "Peak memory": 548e6}
    for title, value in others.items():
        assert [y for _, y in drawn(chart(page, title))[0]] == pytest.approx([value] * 3, rel=1e-4)
    assert cells(section(page, "Checks")) == ["passed", "logits of packed documents", "1.5e-6", "1e-5"]
    assert section(page, "Checks").one("h2").text == "Checks passed"
    assert cells(page, "pre", "command") == [
        f"python -m app.reproduce run={tmp_path / 'mine'}",
        "python -m app.train optimizer.lr=1e-3 'dataset.path=a b.jsonl'",
    ]
    data = section(page, "Data")
    assert "156 steps an epoch, each of 1 bin, 99.1% full." in data.text
    assert "210 (21%)" in data.text
    assert cells(data, "mark") == ["marked: to be predicted", "hi<end>"]
    bars = [[cell.text for cell in row.children[:2]] for row in data.one("table", "bars").all("tr")]
    assert bars == [["1-2", "4"], ["3-4", "60"], ["5-6", "24"]]
    assert "with changes that are in no commit" in section(page, "Environment").text
    assert "lr: 0.001" in section(page, "Configuration").text


def test_run_page_has_scores_of_own_and_other_rows(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "mine", LINES, result=result_of(LINES))
    (folder / "evaluate-new-3fa9c1.json").write_text(json.dumps({"eval_loss": 2.5, "rows": 9, "dataset": "new.jsonl"}))
    (folder / "evaluate.json").write_text(json.dumps({"eval_loss": 1.5, "rows": 300, "dataset": "own.jsonl"}))
    scores = section(page_of(folder), "Scores of app.evaluate")
    assert cells(scores) == ["loss", "1.5000", "loss", "2.5000"]
    assert cells(scores, "p", "remark") == ["300 rows of own.jsonl", "9 rows of new.jsonl"]


def test_run_page_memory_without_repetition(tmp_path: Path) -> None:
    anatomy = {"frozen_weights": 300_000_000, "gathered_weights": 0, "gradients": 90_000, "loss_head": 100_000_000}
    plan = {"bytes": 400_090_000, "where": "head", "anatomy": anatomy}
    for measured, told in ((400_090_000, "as planned"), (390_000_000, "390 MB, 2.5% less than planned")):
        folder = made_run(
            tmp_path / str(measured),
            LINES,
            result=result_of(LINES, memory_predicted_bytes=400_090_000, memory_measured_bytes=measured),
            manifest={**MANIFEST, "memory_plan": plan},
        )
        memory = section(page_of(folder), "Memory")
        facts = ["400 MB", "head", told, "2,827,968", "466,944 (16.5%)"]
        assert cells(memory.one("table", "facts")) == facts
        assert [row.text.strip() for row in memory.one("table", "bars").all("tr")] == [
            "frozen weights300 MB",
            "loss head100 MB",
        ]
        assert "The process takes more" in memory.text
        assert "548 MB" not in memory.text, "it has a tile"


def test_run_page_best_loss_beside_last(tmp_path: Path) -> None:
    lines = [*LINES, step(4, 2.0), {"step": 4, "epoch": 0.04, "eval_loss": 3.0}]
    assert tiles(page_of(made_run(tmp_path / "mine", lines)))["held-out loss, best 2.75"] == "3.0000"


def test_run_page_classification_has_one_tile_for_both_scores(tmp_path: Path) -> None:
    result = result_of(LINES, accuracy=0.9123, macro_f1=0.874, start_metrics={"accuracy": 0.5, "macro_f1": 0.4})
    found = tiles(page_of(made_run(tmp_path / "mine", LINES, result=result)))
    assert found["accuracy, was 50.00%; macro F1 87.40%"] == "91.23%"
    assert len(found) == 6, "one, two or three rows of equal length"


def test_run_page_counts_of_held_out_rows_and_labels(tmp_path: Path) -> None:
    """Rows of `eval_fraction` were not read for themselves; what a classifier predicts are labels."""
    train = {"source": "a.jsonl", "rows_read": 90, "samples": 80, "tokens": 1000, "trained_tokens": 80, "longest": 40}
    held = {**train, "rows_read": 0, "samples": 10, "tokens": 100, "trained_tokens": 10, "longest": 0}
    labels = {"classes": {"bad": 40, "good": 40}}
    for name, more, told in (
        ("texts", {}, [["trained tokens", "80 (8%)", "10 (10%)"]]),
        ("labels", labels, [["labels", "80", "10"], ["bad", "40", "40"], ["good", "40", "40"]]),
    ):
        counts = {**MANIFEST["counts"], "data": {"train": {**train, **more}, "eval": {**held, **more}}}
        data = section(page_of(made_run(tmp_path / name, LINES, manifest={**MANIFEST, "counts": counts})), "Data")
        rows = [[cell.text for cell in row.all("td")] for row in data.all("tr")]
        assert [row for row in rows if row[:1] and row[0] in ("trained tokens", "labels", "bad", "good")] == told
        assert ["rows read", "90", ""] in rows
        assert ["longest sample, in tokens", "40", ""] in rows


def test_run_page_scores_are_drawn_from_the_start(tmp_path: Path) -> None:
    scores = [{"step": at, "epoch": 0.0, "eval_loss": 1.0, "exact_match": at / 100} for at in (0, 40, 80)]
    page = page_of(made_run(tmp_path / "mine", [*scores[:1], *lines_of([4.0, 2.0] * 40), *scores[1:]]))
    assert drawn(chart(page, "Exact match"), "c1") == [[pytest.approx((at, at / 100), abs=1e-2) for at in (0, 40, 80)]]
    raw, mean = drawn(chart(page, "Loss"))
    assert (len(raw), drawn(chart(page, "Loss"), "raw")) == (80, [raw])
    assert [y for _, y in mean[4:-4]] == pytest.approx([3.0] * (len(mean) - 8), rel=0.04), "means over nine lines"
    assert [each.text for each in chart(page, "Loss").all("span", "key")] == ["train, smoothed", "held out"]
    assert tiles(page)["last training loss, was 4"] == "2.0000", "as the terminal and result.json have it"
    headings = [each.text for each in page.all("h2")]
    assert headings[0] == "Curves, by step"


def test_run_page_failed_check_is_open(tmp_path: Path) -> None:
    checks = [*MANIFEST["proofs"], {"what": "fused Linear", "difference": 0.5, "allowed": 0.1}]
    part = section(page_of(made_run(tmp_path / "mine", LINES, manifest={**MANIFEST, "proofs": checks})), "Checks")
    assert part.one("h2").text == "Checks failed"
    assert "open" in part.one("details").attributes
    assert cells(part, "span", "badge") == ["passed", "failed"]


def test_run_page_long_texts_folded(tmp_path: Path) -> None:
    long = "word " * 300
    page = page_of(made_run(tmp_path / "mine", LINES, samples=[sample(3, long, "4", "a\n" * 9)]))
    folded = section(page, "Answers").all("details", "fold")
    assert [each.one("div", "text").text for each in folded] == [long.strip(), ("a\n" * 9).strip()]
    assert section(page, "Data").all("details") == [], "short ones are not"


def test_run_page_answers_judged(tmp_path: Path) -> None:
    samples = [
        sample(0, "2+2?", "4", "fish"),
        sample(0, "Name?", "Ada", "Ada"),
        sample(50, "2+2?", "4", "5"),
        sample(100, "2+2?", "4", " 4\n"),
        sample(100, "Name?", "Ada", "Bob"),
    ]
    whole = page_of(made_run(tmp_path / "mine", LINES, samples=samples))
    assert [each.text for each in whole.all("h2")][:2] == ["Answers on held-out rows", "Curves, by step"]
    page = section(whole, "Answers")
    assert "As expected: 1 of 2 before training, 1 of 2 after step 100." in page.text
    first, second = page.all("div", "row")
    assert cells(first, "div", "text") == ["2+2?", "4", "fish", "4"]
    assert cells(second, "div", "text") == ["Name?", "Ada", "Ada", "Bob"]
    assert cells(page, "div", "right") == ["after step 100 ✓4", "before training ✓Ada"]


def test_run_page_hostile_text_escaped(tmp_path: Path) -> None:
    start = {"host": HOSTILE, "command_line": ["python", "-m", "app.train", HOSTILE], "folder": HOSTILE}
    counts = {"train": {"source": HOSTILE, "tokens": 1, "rows_read": 1, "classes": {HOSTILE: 1}}, "notes": [HOSTILE]}
    hostile = {
        **MANIFEST,
        "starts": [{**MANIFEST["starts"][0], **start}],
        **{name: {HOSTILE: HOSTILE} for name in ("choices", "packages", "hashes")},
        "proofs": [{"what": HOSTILE, "difference": 1, "allowed": 2}],
        "counts": {**MANIFEST["counts"], "data": counts},
    }
    pieces = [{"text": HOSTILE, "trained": True}]
    folder = made_run(
        tmp_path / "a<b>&'\"",
        LINES,
        result=result_of(LINES, "failed", error=HOSTILE),
        samples=[sample(1, HOSTILE, HOSTILE, HOSTILE)],
        settings={**SETTINGS, "model": {"path": HOSTILE}, "dataset": {"path": HOSTILE}},
        manifest=hostile,
        preview={**PREVIEW, "marked": HOSTILE, "rows": [{**PREVIEW["rows"][0], "place": HOSTILE, "pieces": pieces}]},
    )
    page = page_of(folder)
    assert not any(page.all(tag) for tag in ("script", "img", "b>", "iframe", "object", "a"))
    assert page.one("h1").text == "a<b>&'\""
    assert page.text.count("onerror") >= 17


def test_run_page_status(tmp_path: Path) -> None:
    for status, said in {
        "failed": "It failed. error: no memory",
        "stopped": "python -m app.train optimizer.lr=1e-3 'dataset.path=a b.jsonl' resume=auto",
        "dry_run": None,
    }.items():
        error = {"error": "error: no memory"} if status == "failed" else {}
        page = page_of(made_run(tmp_path / status, LINES, result=result_of(LINES, status, **error)))
        assert [said in note for note in notes(page)] == [True] if said else notes(page) == []
        assert page.one("div", "top").one("span").text == status.replace("_", " ")


def test_run_page_without_result_running_or_killed(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "mine", LINES, result={})
    killed = page_of(folder)
    assert killed.one("div", "top").one("span").text == "unfinished"
    assert "was killed" in notes(killed)[0]
    with RunFolder.claim(str(folder), "auto"):
        running = page_of(folder)
    assert running.one("div", "top").one("span").text == "still running"
    assert "still at work" in notes(running)[0]


def test_run_page_unreadable_files_reported(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "mine", LINES)
    (folder / "metrics.jsonl").write_text(jsonl(LINES) + '{"step": 4, "lo')
    for name, text in {"manifest.json": "[1]", "preview.json": "\x00", "run.yaml": "a: ["}.items():
        (folder / name).write_text(text)
    page = page_of(folder)
    told = [
        f"{name} cannot be read; what it would tell is missing here."
        for name in ("manifest.json", "preview.json", "run.yaml")
    ]
    assert sorted(notes(page)) == told
    assert len(drawn(chart(page, "Loss"))[0]) == 3


@pytest.mark.parametrize(
    "name", ["run.yaml", "manifest.json", "preview.json", "samples.jsonl", "log.txt", "result.json", "evaluate.json"]
)
def test_run_page_link_to_another_file_not_followed(name: str, tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.write_text('{"seed": "private text", "step": 1, "status": "private text"}\n')
    folder = made_run(tmp_path / "mine", LINES)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(private)
    page = page_of(folder)
    assert "private text" not in page.text
    assert f"{name} is a link, which is not followed." in notes(page)


def test_run_page_empty_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    page = page_of(tmp_path)
    assert "Nothing has been logged." in page.text
    assert tiles(page) == {}


def test_run_page_metrics_without_numbers(tmp_path: Path) -> None:
    lines = [step(1, 3.0), step(2, None), step(3, 2.0, lr=None)]
    page = page_of(made_run(tmp_path / "mine", lines))
    assert "1 of 3 lines have no number for train" in chart(page, "Loss").text
    assert "1 of 3 lines have no number for lr" in chart(page, "Learning rate").text


def test_run_page_many_lines_stay_small(tmp_path: Path) -> None:
    lines = [step(at, 2 + math.sin(at / 50) + 1 / at, grad_norm=1 + at % 7) for at in range(1, 20_001)]
    lines[11_000]["loss"] = 77.0
    page = run_page(made_run(tmp_path / "mine", lines))
    assert len(page.encode()) < 100_000
    line, mean = drawn(chart(read(page), "Loss"))
    assert max(y for _, y in mean) < 4, "one of 2,000"
    assert max(y for _, y in line) == pytest.approx(77.0, rel=1e-4)


def test_read_run_seconds_excludes_pauses(tmp_path: Path) -> None:
    starts = [{"time": f"2026-01-02T0{hour}:00:00+00:00"} for hour in (1, 5)]
    folder = made_run(tmp_path / "mine", LINES, manifest={**MANIFEST, "starts": starts})
    times = ("02:00:00+01:00", "02:10:00+01:00", "06:00:30+01:00", "06:20:00+01:00")
    (folder / "log.txt").write_text("".join(f"2026-01-02 {time}  said\n" for time in times))
    assert read_run(folder).seconds() == (10 + 20) * 60


def test_run_page_redacts_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "horse-battery-staple")
    samples = [sample(1, "the horse-battery-staple", "x", "horse-battery-staple")]
    page = run_page(made_run(tmp_path / "mine", LINES, samples=samples))
    assert "horse-battery" not in page
    assert "the ***" in page


def test_run_page_launched_run_hides_worker_command(tmp_path: Path) -> None:
    """Our own launcher hands the settings over in a file, so the processes have no words of their own."""
    start = {**MANIFEST["starts"][0], "command_line": ["python", "-u", "-m", "app.train"]}
    several = {**MANIFEST, "starts": [start], "choices": {**MANIFEST["choices"], "processes": 2}}
    page = page_of(made_run(tmp_path / "mine", LINES, manifest=several))
    assert cells(page, "pre", "command") == [f"python -m app.reproduce run={tmp_path / 'mine'}"]
