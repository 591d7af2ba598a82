"""`dataset=auto` from the command line: what it meant is told, kept, and what later commands go by."""

import json
from pathlib import Path

import pytest

from app.config.load import read_run
from tests.harness.runs import SMALL, Zygote

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
RECOGNISED = "dataset.format=auto: taken as dataset.format=sharegpt dataset.columns.conversations=talk, because"


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
    assert RECOGNISED in " ".join(ended.stdout.split())
    manifest = json.loads((folder / "run" / "manifest.json").read_text())
    assert manifest["choices"]["format"] == "sharegpt"
    assert manifest["counts"]["data"]["notes"][0].startswith(RECOGNISED)
    kept = read_run(folder / "run" / "run.yaml").dataset
    assert (kept.format, kept.columns.conversations) == ("sharegpt", "talk")

    scored = zygote.run(folder, "run=run", "precision=fp32", module="app.evaluate", code=0)
    assert "these are the rows that the run held out" in " ".join(scored.stdout.split())
    other = ("dataset=auto", "dataset.path=rows.jsonl", "dataset.max_length=64", "output_dir=other")
    scored = zygote.run(folder, "run=run", *other, "precision=fp32", module="app.evaluate", code=0)
    assert RECOGNISED in " ".join(scored.stdout.split())
    checked = zygote.run(folder, "data", *ROWS[:4], "output_dir=check", module="app.check", code=0)
    assert RECOGNISED in " ".join(checked.stdout.split())
    assert json.loads((folder / "check" / "check.json").read_text())["data"]["format"] == "sharegpt"
    zygote.run(folder, "run=run", "prompt=Say 3 two", "max_new_tokens=2", module="app.generate", code=0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "dataset.train_on=completion",
            "dataset.train_on=completion means nothing for dataset.format=sharegpt. Choose auto or assistant",
        ),
        ("dataset.on_overflow=split", "would tear a row of dataset.format=sharegpt apart"),
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
    assert "knows no format for these rows; columns found: words (text)" in " ".join(refused.stderr.split())
