"""task=tokens from the command line: an encoder learns tags of words, and goes the way of any other run."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.full.command.test_classification import ALWAYS, BERT, asked, check_export, encoder_tokenizer, scored, write
from tests.harness.runs import Zygote, losses

GIVEN = (
    *(each.replace("task=classification", "task=tokens") for each in ALWAYS),
    *BERT,
    "dataset=auto",
    "dataset.path=names.jsonl",
    "dataset.eval_fraction=0.2",
    "optimizer.lr=5e-3",
)
WORDS = {"PER": ("Anna", "Tom Bell", "Lee"), "LOC": ("Rome", "New Town", "Bath"), "": ("saw", "and", "left", "went to")}


def sentence(choose: random.Random) -> dict[str, Any]:
    words, tags = list[str](), list[str]()
    for kind in choose.choices(list(WORDS), k=choose.randint(2, 6)):
        for number, word in enumerate(choose.choice(WORDS[kind]).split()):
            words.append(word)
            tags.append(f"{'I' if number else 'B'}-{kind}" if kind else "O")
    return {"tokens": words, "tags": tags}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tags")
    choose = random.Random(0)
    write(folder / "names.jsonl", [sentence(choose) for _ in range(200)])
    encoder_tokenizer(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def run(zygote: Zygote, place: Path) -> Path:
    ended = zygote.run(place, *GIVEN, "recipe=lora", "training.epochs=4", "output_dir=run", code=0)
    (place / "shown.txt").write_text(ended.stdout)
    return place / "run"


def test_tags_are_learnt_scored_and_answered(zygote: Zygote, place: Path, run: Path) -> None:
    shown, result = (place / "shown.txt").read_text(), json.loads((run / "result.json").read_text())
    assert "5 labels: B-LOC" in shown
    assert f"entity F1 {result['final_metrics']['entity_f1']:.2%}" in shown
    assert result["final_metrics"]["entity_f1"] > 0.8 > result["start_metrics"]["entity_f1"]
    found = losses(run)
    assert sum(found[-5:]) < sum(found[:5]) / 2
    assert '"expected": "B-' in (run / "samples.jsonl").read_text()

    padded = scored(zygote, place, run, "batching.packing=false", "eval.rows=3")
    assert padded["entity_f1"] == result["final_metrics"]["entity_f1"]
    assert padded["eval_loss"] == pytest.approx(result["final_metrics"]["eval_loss"], rel=1e-5)

    lines = asked(zygote, place, run, "prompt=Anna saw New Town").splitlines()
    assert [line.split() for line in lines] == [["Anna", "B-PER"], ["saw", "O"], ["New", "B-LOC"], ["Town", "I-LOC"]]
    write(place / "ask.jsonl", [{"tokens": ["Tom", "Bell", "left"]}, {"tokens": ["and"] * 60}])
    ended = zygote.run(place, f"run={run}", "prompts=ask.jsonl", module="app.generate", code=0)
    assert ended.stderr == "cut off, as longer than dataset.max_length=48 of the run: 1 of 2\n"
    first, long = map(json.loads, ended.stdout.splitlines())
    assert first == {"tokens": ["Tom", "Bell", "left"], "tags": ["B-PER", "I-PER", "O"]}
    assert long["tags"][0] == "O"
    assert long["tags"][-1] is None
    assert len(long["tags"]) == 60


def test_exported_tagger_is_the_same(quick_zygote: Zygote, place: Path, run: Path) -> None:
    out = place / "out"
    check_export(quick_zygote, run, out, "merged", "AutoModelForTokenClassification")
    assert json.loads((out / "config.json").read_text())["label2id"]["B-LOC"] == 0
    assert 'pipeline_tag: "token-classification"' in (out / "README.md").read_text()
