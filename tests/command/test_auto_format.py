"""`dataset=auto` and `eval.also` from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.config.load import read_run
from tests.harness.runs import FINISHED, SMALL, FinishedRuns, Zygote, losses, metrics, result

ROWS = (
    "dataset=auto",
    "dataset.path=rows.jsonl",
    "dataset.eval_path=null",
    "dataset.eval_fraction=0.2",
    "precision=fp32",
    "eval.every=0",
)
FEW = (*SMALL, *ROWS, "training.max_steps=4", "output_dir=run")
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
RECOGNIZED = "dataset.format=auto: detected dataset.format=sharegpt dataset.columns.conversations=talk: found"


def write_talks(folder: Path) -> None:
    talks = [
        [{"from": "human", "value": f"Say {n} {word}"}, {"from": "gpt", "value": word}]
        for n in range(12)
        for word in WORDS
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"talk": talk}) + "\n" for talk in talks))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_talks(tmp_path)
    return tmp_path


def test_detected_format_is_written_to_run_yaml(zygote: Zygote, folder: Path) -> None:
    ended = zygote.run(folder, *FEW, code=0)
    assert RECOGNIZED in " ".join(ended.stdout.split())
    manifest = json.loads((folder / "run" / "manifest.json").read_text())
    assert manifest["choices"]["format"] == "sharegpt"
    assert manifest["counts"]["data"]["notes"][0].startswith(RECOGNIZED)
    kept = read_run(folder / "run" / "run.yaml").dataset
    assert (kept.format, kept.columns.conversations) == ("sharegpt", "talk")

    scored = zygote.run(folder, "run=run", "precision=fp32", module="app.evaluate", code=0)
    assert "this is the eval set of the run" in " ".join(scored.stdout.split())
    other = ("dataset=auto", "dataset.path=rows.jsonl", "dataset.max_length=64", "output_dir=other")
    scored = zygote.run(folder, "run=run", *other, "precision=fp32", module="app.evaluate", code=0)
    assert RECOGNIZED in " ".join(scored.stdout.split())
    checked = zygote.run(folder, "data", *ROWS[:4], "output_dir=check", module="app.check", code=0)
    assert RECOGNIZED in " ".join(checked.stdout.split())
    assert json.loads((folder / "check" / "check.json").read_text())["data"]["format"] == "sharegpt"
    zygote.run(folder, "run=run", "prompt=Say 3 two", "max_new_tokens=2", module="app.generate", code=0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "dataset.train_on=completion",
            "dataset.train_on=completion is not supported for dataset.format=sharegpt. Choose auto or assistant",
        ),
        ("dataset.on_overflow=split", "is not supported for dataset.format=sharegpt"),
    ],
)
def test_detected_format_that_the_settings_do_not_suit_is_a_user_error(
    zygote: Zygote, folder: Path, given: str, said: str
) -> None:
    refused = zygote.run(folder, *FEW, given, code=2)
    assert said in " ".join(refused.stderr.split())
    assert not (folder / "run").exists()


def test_undetectable_format_is_a_user_error(zygote: Zygote, folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"words": "a"}\n')
    refused = zygote.run(folder, *FEW, code=2)
    assert "no format fits these rows; columns found: words (text)" in " ".join(refused.stderr.split())


@pytest.fixture
def general(tmp_path: Path) -> Path:
    path = tmp_path / "general.jsonl"
    rows = [{"text": f"In the year {1900 + n} it rained on {n} days."} for n in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_general_rows_are_scored_beside_and_change_nothing(
    general: Path, tmp_path: Path, zygote: Zygote, finished: FinishedRuns
) -> None:
    without = finished("lora")
    ended = zygote.run(tmp_path, *FINISHED["lora"], f"eval.also={general}", "output_dir=run", code=0)
    run = tmp_path / "run"
    assert losses(run) == losses(without), "nothing of training changes"
    found, before = result(run), result(without)
    assert found["objective"] == before["objective"]
    assert found["final_metrics"].items() >= before["final_metrics"].items()
    end, start = (found[key]["also_eval_loss"] for key in ("final_metrics", "start_metrics"))
    assert end != start
    assert f", general loss {end:.4f} (was {start:.4f})" in ended.stdout
    assert "also: 9 rows" in ended.stdout
    assert "also: read as dataset=text" in ended.stdout
    lines = [line for line in metrics(run) if "eval_loss" in line]
    assert [line["also_eval_loss"] for line in (lines[0], lines[-1])] == [start, end]
    assert "general" in (run / "report.html").read_text()
    hashes = json.loads((run / "manifest.json").read_text())["hashes"]
    assert len(hashes["general"]) == len(hashes["eval"])
    assert hashes["general"] != hashes["eval"]

    given = ("dataset=text", f"dataset.path={general}", "dataset.max_length=64", "output_dir=scores")
    zygote.finish(tmp_path, "run=run", *given, module="app.evaluate")
    scored: dict[str, Any] = json.loads((tmp_path / "scores" / "evaluate.json").read_text())
    assert scored["eval_loss"] == pytest.approx(end, rel=1e-6)


def test_general_rows_that_cannot_be_read_are_refused(tmp_path: Path, zygote: Zygote) -> None:
    (tmp_path / "odd.jsonl").write_text('{"number": 3}\n')
    for path, why in (("nowhere.jsonl", "eval.also=nowhere.jsonl"), ("odd.jsonl", "eval.also=odd.jsonl: dataset.for")):
        ended = zygote.run(tmp_path, *FINISHED["lora"], f"eval.also={path}", "output_dir=run", code=2)
        assert why in ended.stderr
