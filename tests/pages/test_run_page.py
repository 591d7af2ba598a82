"""The page of a run, in any state of its folder."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from app.pages.charts import LineChart
from app.pages.page import (
    AnswerTable,
    Bars,
    Charts,
    Code,
    Facts,
    Fold,
    Page,
    Paragraph,
    Section,
    Table,
    TrainingSamples,
    as_html,
    as_text,
)
from app.pages.read_run import read_run
from app.pages.run_page import run_page
from app.tracking.output_dir import RunFolder
from tests.pages.folders import MANIFEST, jsonl, lines_of, made_run, result_of, sample, step
from tests.pages.values import all_of, chart, lines, section, texts, titles

LINES = [*lines_of([4.0, 3.0, 2.5]), {"step": 3, "epoch": 0.03, "eval_loss": 2.75}]


def cells(part: Section) -> list[list[str]]:
    return [[str(cell or "") for cell in row] for table in all_of(Table, part) for row in table.cells]


def notes(page: Page) -> list[str]:
    return [text for _, text in page.notes]


def tiles(page: Page) -> dict[str, str | None]:
    """Those that are shown."""
    return {name: value for name, value in page.tiles if value is not None}


def commands(page: Page) -> list[str]:
    return [each.text for each in all_of(Code, section(page, "Reproduce"))]


def test_run_page_finished_run(tmp_path: Path) -> None:
    result = result_of(LINES, exact_match=0.9714, start_metrics={"eval_loss": 4.5, "exact_match": 0.0})
    page = run_page(made_run(tmp_path / "mine", LINES, result=result))
    assert (page.heading, page.title, page.badges) == ("mine", "mine: finished", [("finished", "good")])
    method, _ = page.about
    assert str(method.text).split(" · ") == [
        "LoRA, rank 32",
        "bundled tiny model with random weights",
        "bundled sample data",
        "adamw, cosine",
        "fp32, sdpa, cpu",
    ]
    assert notes(page) == []
    assert tiles(page) == {
        "held-out loss, was 4.5": "2.7500",
        "exact match, was 0.00%": "97.14%",
        "training loss, was 4": "2.5000",
        "for 3 of 100 steps": "0:01:30",
        "tokens/s, 31.1 samples/s": "5.2k",
        "peak process memory": "548 MB",
    }
    assert lines(page, "Loss") == {"train": [(1, 4.0), (2, 3.0), (3, 2.5)], "eval": [(3, 2.75)]}
    others = {"Learning rate": 1e-3, "Gradient norm": 1.25, "Throughput": 5200.0}
    for title, value in others.items():
        ((line),) = lines(page, title).values()
        assert line == [(at, value) for at in (1, 2, 3)]
    assert "Peak" not in texts(page), "the memory of a process has no chart"
    assert cells(section(page, "Checks passed")) == [["passed", "logits of packed documents", "1.5e-6", "1e-5"]]
    assert commands(page) == [
        f"finetune reproduce run={tmp_path / 'mine'}",
        "finetune train optimizer.lr=1e-3 'dataset.path=a b.jsonl'",
    ]
    data = section(page, "Data")
    assert "156 steps per epoch, 1 bin per step, 99.1% full." in as_text(data)
    assert ["trained tokens", "210 (21%)", "21 (21%)"] in cells(data)
    (samples,), (bars,) = all_of(TrainingSamples, data), all_of(Bars, data)
    assert samples.marked == "tokens in the loss"
    assert [text for _, pieces in samples.samples for text, trained, _ in pieces if trained] == ["hi<end>"]
    assert [(bar.label, bar.text) for bar in bars.bars] == [("1-2", "4"), ("3-4", "60"), ("5-6", "24")]
    environment = section(page, "Environment")
    assert "with uncommitted changes" in as_text(environment)
    (hashes,) = [fold for fold in all_of(Fold, environment) if fold.summary == "Hashes"]
    assert ("training data", "aa" * 32) in all_of(Facts, Section("", [hashes]))[0].facts
    assert "lr: 0.001" in as_text(section(page, "Configuration"))


def test_run_page_has_scores_of_own_and_other_rows(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "mine", LINES, result=result_of(LINES))
    (folder / "evaluate-new-3fa9c1.json").write_text(json.dumps({"eval_loss": 2.5, "rows": 9, "dataset": "new.jsonl"}))
    (folder / "evaluate.json").write_text(json.dumps({"eval_loss": 1.5, "rows": 300, "dataset": "own.jsonl"}))
    scores = section(run_page(folder), "Evaluation scores")
    assert cells(scores) == [["loss", "1.5000"], ["loss", "2.5000"]]
    assert [each.text for each in all_of(Paragraph, scores)] == ["300 rows of own.jsonl", "9 rows of new.jsonl"]


def test_run_page_memory_without_repetition(tmp_path: Path) -> None:
    anatomy = {"frozen_weights": 300_000_000, "gathered_weights": 0, "gradients": 90_000, "loss_head": 100_000_000}
    plan = {"bytes": 400_090_000, "where": "head", "anatomy": anatomy}
    for measured, told in ((400_090_000, "as estimated"), (390_000_000, "390 MB, 2.5% less than estimated")):
        folder = made_run(
            tmp_path / str(measured),
            LINES,
            result=result_of(LINES, memory_predicted_bytes=400_090_000, memory_measured_bytes=measured),
            manifest={**MANIFEST, "memory_plan": plan},
        )
        memory = section(run_page(folder), "Memory")
        (facts,), (bars,) = all_of(Facts, memory), all_of(Bars, memory)
        shown = [value for _, value in facts.facts if value]
        assert shown == ["400 MB", "head", told, "2,827,968", "466,944 (16.5%)"]
        assert [(bar.label, bar.text) for bar in bars.bars] == [("frozen weights", "300 MB"), ("loss head", "100 MB")]
        assert "The peak of the process" in as_text(memory)
        assert "548 MB" not in as_text(memory), "it has a tile"


PHASES: dict[str, Any] = {
    "forward_seconds": 0.2,
    "backward_seconds": 0.4,
    "optimizer_seconds": 0.1,
    "data_seconds": 0.3,
}


def test_run_page_time_per_step_names_data_that_limits_the_run(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "mine", LINES, result=result_of(LINES, **PHASES))
    (bars,) = all_of(Bars, part := section(run_page(folder), "Time per step"))
    shown = {"forward": "200 ms (20%)", "backward": "400 ms (40%)", "optimizer": "100 ms (10%)"}
    assert {bar.label: bar.text for bar in bars.bars} == {**shown, "waiting for data": "300 ms (30%)"}
    assert all_of(Facts, part)[0].facts == [("all phases", "1.00 s"), ("backward / forward", "2.0")]
    assert "Waiting for data takes 30% of each step" in as_text(part)


def test_run_page_time_per_step_of_a_run_without_result_is_that_of_its_last_line(tmp_path: Path) -> None:
    lines = [step(1, 4.0, **PHASES), step(2, 3.0, **{**PHASES, "data_seconds": 0.01}), step(3, 2.0)]
    part = section(run_page(made_run(tmp_path / "mine", lines, result={})), "Time per step")
    assert [bar.text for bar in all_of(Bars, part)[0].bars if bar.label == "waiting for data"] == ["10 ms (1%)"]
    assert "takes" not in as_text(part)


def test_run_page_best_loss_beside_last(tmp_path: Path) -> None:
    more = [*LINES, step(4, 2.0), {"step": 4, "epoch": 0.04, "eval_loss": 3.0}]
    assert tiles(run_page(made_run(tmp_path / "mine", more)))["held-out loss, best 2.75"] == "3.0000"


def test_run_page_classification_has_one_tile_for_both_scores(tmp_path: Path) -> None:
    result = result_of(LINES, accuracy=0.9123, macro_f1=0.874, start_metrics={"accuracy": 0.5, "macro_f1": 0.4})
    found = tiles(run_page(made_run(tmp_path / "mine", LINES, result=result)))
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
        data = section(run_page(made_run(tmp_path / name, LINES, manifest={**MANIFEST, "counts": counts})), "Data")
        rows = cells(data)
        assert [row for row in rows if row[0] in ("trained tokens", "labels", "bad", "good")] == told
        assert ["rows read", "90", ""] in rows
        assert ["longest sample (tokens)", "40", ""] in rows


def test_run_page_scores_are_drawn_from_the_start(tmp_path: Path) -> None:
    scores = [{"step": at, "epoch": 0.0, "eval_loss": 1.0, "exact_match": at / 100} for at in (0, 40, 80)]
    page = run_page(made_run(tmp_path / "mine", [*scores[:1], *lines_of([4.0, 2.0] * 40), *scores[1:]]))
    assert lines(page, "Exact match") == {"exact match": [(at, at / 100) for at in (0, 40, 80)]}
    raw, mean, _ = chart(page, LineChart, "Loss").series
    assert (len(raw.points), raw.kind, mean.kind) == (80, "raw", "mean")
    middle = [y for _, y in mean.points[4:-4]]
    assert middle == pytest.approx([3.0] * len(middle), rel=0.04), "means over nine lines"
    assert [name for name, _ in chart(page, LineChart, "Loss").plot().legend] == ["train, smoothed", "eval"]
    assert tiles(page)["training loss, was 4"] == "3.0000", "the smoothed loss, as in the terminal"
    assert titles(page)[0] == "Training curves"


def test_run_page_on_a_gpu_charts_its_memory_over_the_same_steps(tmp_path: Path) -> None:
    choices = {**MANIFEST["choices"], "device": "cuda"}
    logged = [{"step": 0, "epoch": 0.0, "eval_loss": 5.0}, *LINES]
    page = run_page(made_run(tmp_path / "mine", logged, manifest={**MANIFEST, "choices": choices}))
    assert lines(page, "Peak GPU memory") == {"peak memory bytes": [(at, 548e6) for at in (1, 2, 3)]}
    axes = [chart.plot().across for block in all_of(Charts, *page.sections) for chart in block.charts]
    assert [(axis.low, axis.high) for axis in axes] == [(0, 3)] * 5


@pytest.mark.parametrize("is_planned", [True, False])
def test_run_page_on_a_gpu_shows_memory_by_stage_and_of_others(is_planned: bool, tmp_path: Path) -> None:
    plan = {"bytes": 4_000_000_000, "where": "head", "anatomy": {"loss_head": 4_000_000_000}}
    stages = {"start": 0, "context": 650_000_000, "weights": 2_600_000_000, "first_step": 4_700_000_000}
    manifest = {**MANIFEST, "device_used_bytes": stages, **({"memory_plan": plan} if is_planned else {})}
    measured: dict[str, Any] = {
        "device_used_bytes": 4_900_000_000,
        "workspace_bytes": 67_108_864,
        "gpu_utilization": 0.937,
    }
    others: dict[str, Any] = {"device_is_estimated": True, "other_processes": {"count": 2, "bytes": 19_000_000_000}}
    folder = made_run(tmp_path / "mine", LINES, result=result_of(LINES, **measured, **others), manifest=manifest)
    memory = section(run_page(folder), "Memory")
    (table,) = all_of(Table, memory)
    assert [*map(list, table.cells)] == [
        ["CUDA context created", "650 MB"],
        ["weights loaded", "2.6 GB"],
        ["after the first step", "4.7 GB"],
        ["peak", "4.9 GB"],
    ]
    estimated = "Estimated: the driver does not report the memory of this process."
    assert table.notes == [estimated, "Plus up to 19.0 GB by 2 other processes."]
    assert tiles(run_page(folder))["tokens/s, 31.1 samples/s, GPU utilization 94%"] == "5.2k"
    if is_planned:
        (facts,) = all_of(Facts, memory)
        assert dict(facts.facts)["cuBLAS workspaces"] == "67 MB"


def test_run_page_failed_check_is_open(tmp_path: Path) -> None:
    checks = [*MANIFEST["proofs"], {"what": "fused Linear", "difference": 0.5, "allowed": 0.1}]
    part = section(run_page(made_run(tmp_path / "mine", LINES, manifest={**MANIFEST, "proofs": checks})), "Checks")
    assert part.title == "Checks failed"
    assert [fold.is_open for fold in all_of(Fold, part)] == [True]
    assert [row[0] for row in cells(part)] == ["passed", "failed"]


def test_run_page_answers_judged(tmp_path: Path) -> None:
    samples = [
        sample(0, "2+2?", "4", "fish"),
        sample(0, "Name?", "Ada", "Ada"),
        sample(50, "2+2?", "4", "5"),
        sample(100, "2+2?", "4", " 4\n"),
        sample(100, "Name?", "Ada", "Bob"),
    ]
    page = run_page(made_run(tmp_path / "mine", LINES, samples=samples))
    assert titles(page)[:2] == ["Answers to eval prompts", "Training curves"]
    (table,) = all_of(AnswerTable, section(page, "Answers"))
    assert table.summary == "Exact matches: 1 of 2 before training, 1 of 2 after step 100."
    assert {prompt: [(each.label, each.text, each.right) for each in given] for prompt, given in table.prompts} == {
        "2+2?": [("expected", "4", None), ("before training", "fish", False), ("after step 100", " 4\n", True)],
        "Name?": [("expected", "Ada", None), ("before training", "Ada", True), ("after step 100", "Bob", False)],
    }


def test_run_page_status(tmp_path: Path) -> None:
    settings = "optimizer.lr=1e-3 'dataset.path=a b.jsonl'"
    for status, said in {
        "failed": "Failed. error: no memory",
        "stopped": f"finetune train {settings} output_dir={tmp_path / 'stopped'} resume=auto",
        "dry_run": None,
    }.items():
        error = {"error": "error: no memory"} if status == "failed" else {}
        page = run_page(made_run(tmp_path / status, LINES, result=result_of(LINES, status, **error)))
        assert [said in note for note in notes(page)] == [True] if said else notes(page) == []
        assert [text for text, _ in page.badges] == [status.replace("_", " ")]


def test_run_page_without_result_running_or_killed(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "mine", LINES, result={})
    killed = run_page(folder)
    assert killed.badges == [("unfinished", "warn")]
    assert "was killed" in notes(killed)[0]
    with RunFolder.claim(str(folder), "auto"):
        running = run_page(folder)
    assert running.badges == [("still running", "busy")]
    assert "snapshot" in notes(running)[0]


def test_run_page_unreadable_files_reported(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "mine", LINES)
    (folder / "metrics.jsonl").write_text(jsonl(LINES) + '{"step": 4, "lo')
    for name, text in {"manifest.json": "[1]", "preview.json": "\x00", "run.yaml": "a: ["}.items():
        (folder / name).write_text(text)
    page = run_page(folder)
    told = [
        f"{name} cannot be read; its content is missing here." for name in ("manifest.json", "preview.json", "run.yaml")
    ]
    assert sorted(notes(page)) == told
    assert len(lines(page, "Loss")["train"]) == 3


@pytest.mark.parametrize(
    "name", ["run.yaml", "manifest.json", "preview.json", "samples.jsonl", "log.txt", "result.json", "evaluate.json"]
)
def test_run_page_link_to_another_file_not_followed(name: str, tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.write_text('{"seed": "private text", "step": 1, "status": "private text"}\n')
    folder = made_run(tmp_path / "mine", LINES)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(private)
    page = run_page(folder)
    assert "private text" not in as_html(page)
    assert f"{name} is a link and was not followed." in notes(page)


def test_run_page_empty_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    page = run_page(tmp_path)
    assert "No metrics logged." in texts(page)
    assert tiles(page) == {}


def test_run_page_metrics_without_numbers(tmp_path: Path) -> None:
    page = run_page(made_run(tmp_path / "mine", [step(1, 3.0), step(2, None), step(3, 2.0, lr=None)]))
    for title, name in (("Loss", "train"), ("Learning rate", "lr")):
        assert chart(page, LineChart, title).plot().remarks == [f"1 of 3 lines have no number for {name}."]


def test_run_page_many_lines_stay_small(tmp_path: Path) -> None:
    logged = [step(at, 2 + math.sin(at / 50) + 1 / at, grad_norm=1 + at % 7) for at in range(1, 20_001)]
    logged[11_000]["loss"] = 77.0
    page = run_page(made_run(tmp_path / "mine", logged))
    assert len(as_html(page).encode()) < 100_000
    assert max(y or 0 for _, y in lines(page, "Loss")["train, smoothed"]) < 4, "one of 2,000"


def test_read_run_seconds_excludes_pauses(tmp_path: Path) -> None:
    starts = [{"time": f"2026-01-02T0{hour}:00:00+00:00"} for hour in (1, 5)]
    folder = made_run(tmp_path / "mine", LINES, manifest={**MANIFEST, "starts": starts})
    times = ("02:00:00+01:00", "02:10:00+01:00", "06:00:30+01:00", "06:20:00+01:00")
    (folder / "log.txt").write_text("".join(f"2026-01-02 {time}  said\n" for time in times))
    assert read_run(folder).seconds() == (10 + 20) * 60


def test_run_page_redacts_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "horse-battery-staple")
    samples = [sample(1, "the horse-battery-staple", "x", "horse-battery-staple")]
    page = as_html(run_page(made_run(tmp_path / "mine", LINES, samples=samples)))
    assert "horse-battery" not in page
    assert "the ***" in page


def test_run_page_launched_run_hides_worker_command(tmp_path: Path) -> None:
    """Our own launcher hands the settings over in a file, so the processes have no words of their own."""
    start = {**MANIFEST["starts"][0], "command_line": ["python", "-u", "-m", "app.train"]}
    several = {**MANIFEST, "starts": [start], "choices": {**MANIFEST["choices"], "processes": 2}}
    page = run_page(made_run(tmp_path / "mine", LINES, manifest=several))
    assert commands(page) == [f"finetune reproduce run={tmp_path / 'mine'}"]
