"""task=classification and task=tokens from the command line."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from tests.harness.runs import Zygote, losses, metrics

GOOD, BAD = (
    ("lovely", "great", "warm", "bright", "kind", "happy"),
    ("awful", "cold", "rotten", "sad", "cruel", "dull"),
)
ALWAYS = (
    "task=classification",
    "precision=fp32",
    "launch.threads=1",
    "record.every=1",
    "eval.samples=2",
    "eval.every=0",
    "eval.at_start=true",
)
DECODER = (*ALWAYS, "dataset=labelled_text", "dataset.path=rows.jsonl", "recipe=lora")
BERT = (
    "model=bert",
    "model.weights=random",
    "model.tokenizer=tokenizer",
    "model.architecture.vocab_size=1600",
    "model.architecture.hidden_size=64",
    "model.architecture.intermediate_size=64",
    "model.architecture.num_hidden_layers=2",
    "model.architecture.num_attention_heads=4",
    "dataset.max_length=48",
    "batching.tokens=96",
)
ENCODER = (*ALWAYS, *BERT, "dataset=text_pair", "dataset.path=pairs.jsonl", "optimizer.lr=3e-3")


def review(choose: random.Random, number: int) -> dict[str, str]:
    label = choose.choice(["good", "bad"])
    word = choose.choice(GOOD if label == "good" else BAD)
    place, end = choose.choice(["day", "house", "meal", "book"]), choose.choice(["left", "stayed", "slept"])
    return {"text": f"The {place} number {number} was {word} and we {end}.", "label": label}


def pair(choose: random.Random, number: int) -> dict[str, Any]:
    """Whether the second side names what the first has: nothing that one side alone would tell."""
    first, second = (choose.choice(["dog", "cat", "cow"]) for _ in range(2))
    return {"sentence1": f"{number}. I saw a {first}.", "sentence2": f"A {second}?", "label": int(first == second)}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def encoder_tokenizer(folder: Path) -> None:
    """The small tokenizer with the frame of BERT's."""
    from tokenizers.processors import TemplateProcessing

    from app.base.tokenizer import load_tokenizer
    from app.config.load import compose_run

    tokenizer: Any = load_tokenizer(compose_run([]).model, needs_template=False)
    tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", tokenizer.cls_token_id), ("[SEP]", tokenizer.sep_token_id)],
    )
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.save_pretrained(str(folder))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labels")
    choose = random.Random(0)
    write(folder / "rows.jsonl", [review(choose, i) for i in range(240)])
    write(folder / "pairs.jsonl", [pair(choose, i) for i in range(120)])
    encoder_tokenizer(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def made(zygote: Zygote, place: Path) -> Callable[[str], Path]:
    """Each run once."""
    given = {"decoder": (*DECODER, "training.epochs=2"), "encoder": (*ENCODER, "recipe=lora", "training.epochs=2")}

    def make(name: str) -> Path:
        run = place / name
        if not run.exists():
            ended = zygote.run(place, *given[name], f"output_dir={name}", code=0)
            (place / f"{name}.txt").write_text(ended.stdout)
        return run

    return make


def asked(zygote: Zygote, place: Path, run: Path, *given: str) -> str:
    ended = zygote.finish(place, f"run={run}", *given, module="app.generate")
    return ended.stdout


def scored(zygote: Zygote, place: Path, run: Path, *given: str) -> dict[str, Any]:
    zygote.finish(place, f"run={run}", "output_dir=scores", *given, module="app.evaluate")
    found: dict[str, Any] = json.loads((place / "scores" / "evaluate.json").read_text())
    return found


def test_classifier_learns_labels(zygote: Zygote, place: Path, made: Callable[[str], Path]) -> None:
    run = made("decoder")
    shown = (place / "decoder.txt").read_text()
    assert "2 labels: bad " in shown
    assert "classification head of 2 labels: fully trained; initialized from seed=0" in shown
    result = json.loads((run / "result.json").read_text())
    start = result["start_metrics"]
    assert (
        f", accuracy {result['accuracy']:.2%} (was {start['accuracy']:.2%}), macro F1 {result['macro_f1']:.2%}" in shown
    )
    assert result["accuracy"] > 0.9
    assert yaml.safe_load((run / "run.yaml").read_text())["task"]["labels"] == ["bad", "good"]
    assert "accuracy" in (run / "report.html").read_text()
    samples = (run / "samples.jsonl").read_text()
    assert '"expected": "good"' in samples
    assert '"likelihood": ' in samples

    both = scored(zygote, place, run, "weights=both")
    assert both["tuned_accuracy"] == result["accuracy"]
    assert both["base_accuracy"] < 0.8, "a new classifier knows nothing"
    assert both["difference_macro_f1_interval"][0] > 0
    assert "perplexity" not in both
    one = scored(zygote, place, run, "batching.packing=false", "eval.rows=3")
    assert one["eval_loss"] == pytest.approx(both["eval_loss"], rel=1e-5)
    assert (one["accuracy"], one["macro_f1"]) == (both["accuracy"], both["macro_f1"])

    answer = asked(zygote, place, run, "prompt=The day number 7 was lovely and we left.")
    assert answer.startswith("good\n")
    known = [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()[:8]]
    write(place / "questions.jsonl", known)
    lines = [json.loads(line) for line in asked(zygote, place, run, "prompts=questions.jsonl").splitlines()]
    assert [line["label"] for line in lines] == [row["label"] for row in known]
    assert sum(lines[0]["probabilities"].values()) == pytest.approx(1)


def test_encoder_learns_pairs(zygote: Zygote, place: Path, made: Callable[[str], Path]) -> None:
    run = made("encoder")
    found = losses(run)
    assert sum(found[-5:]) < sum(found[:5])
    assert yaml.safe_load((run / "run.yaml").read_text())["task"]["labels"] == ["0", "1"]
    packed = scored(zygote, place, run)
    padded = scored(zygote, place, run, "batching.packing=false")
    assert packed["eval_loss"] == pytest.approx(padded["eval_loss"], rel=1e-5)
    last = [line for line in metrics(run) if "eval_loss" in line][-1]
    assert packed["eval_loss"] == pytest.approx(last["eval_loss"], rel=1e-5)

    pair = {"sentence1": "I saw a dog.", "sentence2": "A dog?"}
    write(place / "orders.jsonl", [pair, dict(zip(pair, reversed(pair.values()), strict=True))])
    answers = [json.loads(line) for line in asked(zygote, place, run, "prompts=orders.jsonl").splitlines()]
    assert answers[0]["probabilities"] != answers[1]["probabilities"], "the order of the texts counts"


@pytest.mark.parametrize(("name", "kind"), [("decoder", "merged"), ("encoder", "adapter")])
def test_exported_classifier_is_the_same(
    name: str, kind: str, quick_zygote: Zygote, place: Path, made: Callable[[str], Path]
) -> None:
    out = place / f"out-{name}-{kind}"
    proof = check_export(quick_zygote, made(name), out, kind, "AutoModelForSequenceClassification")
    assert proof["tolerance_is"].endswith("to bf16") is (kind == "merged")
    assert proof["same_choice"] == 1.0
    assert 'pipeline_tag: "text-classification"' in (out / "README.md").read_text()


def check_export(zygote: Zygote, run: Path, out: Path, kind: str, auto_class: str) -> dict[str, Any]:
    """The proof of an export that the class of its card loads, without any head of other tasks."""
    zygote.finish(out.parent, f"run={run}", f"to={out}", f"kind={kind}", module="app.export")
    proof: dict[str, Any] = json.loads((out / "export.json").read_text())
    assert proof["passed"]
    assert json.loads((out / "config.json").read_text())["label2id"]
    assert f"{auto_class}.from_pretrained(" in (out / "README.md").read_text()
    if kind == "merged":
        _, found = getattr(transformers, auto_class).from_pretrained(str(out), output_loading_info=True)
        assert not found["missing_keys"]
        assert not found["unexpected_keys"], "heads of other tasks stay behind"
    return proof


def test_check_data_shows_labels_and_rare_ones(place: Path, tmp_path: Path, zygote: Zygote) -> None:
    rows = [{"text": f"text {i}", "label": "often"} for i in range(30)] + [{"text": "one", "label": "rare"}]
    write(tmp_path / "few.jsonl", [*rows, {"text": "text 3", "label": "rare"}])
    ended = zygote.run(
        place,
        "data",
        "task=classification",
        "task.labels=[often,rare,never]",
        "dataset=auto",
        "dataset.eval_fraction=0",
        f"dataset.path={tmp_path}/few.jsonl",
        f"output_dir={tmp_path}/check",
        module="app.check",
        code=0,
    )
    shown = " ".join(ended.stdout.split())
    assert "detected dataset.format=labelled_text: found text and its label in" in shown
    assert "often 30, rare 2" in shown
    assert "no training row has the label never" in shown
    assert "very few rows have the label rare (2)" in shown
    assert "texts with more than one label: 1" in shown
    facts = json.loads((tmp_path / "check" / "check.json").read_text())["data"]
    assert facts["labels"] == {"often": 30, "rare": 2}


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
def tags_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tags")
    choose = random.Random(0)
    write(folder / "names.jsonl", [sentence(choose) for _ in range(200)])
    encoder_tokenizer(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def run(zygote: Zygote, tags_place: Path) -> Path:
    ended = zygote.run(tags_place, *GIVEN, "recipe=lora", "training.epochs=4", "output_dir=run", code=0)
    (tags_place / "shown.txt").write_text(ended.stdout)
    return tags_place / "run"


def test_tags_are_learnt_scored_and_answered(zygote: Zygote, tags_place: Path, run: Path) -> None:
    shown, result = (tags_place / "shown.txt").read_text(), json.loads((run / "result.json").read_text())
    assert "5 labels: B-LOC" in shown
    assert f"entity F1 {result['final_metrics']['entity_f1']:.2%}" in shown
    assert result["final_metrics"]["entity_f1"] > 0.8 > result["start_metrics"]["entity_f1"]
    found = losses(run)
    assert sum(found[-5:]) < sum(found[:5]) / 2
    assert '"expected": "B-' in (run / "samples.jsonl").read_text()

    padded = scored(zygote, tags_place, run, "batching.packing=false", "eval.rows=3")
    assert padded["entity_f1"] == result["final_metrics"]["entity_f1"]
    assert padded["eval_loss"] == pytest.approx(result["final_metrics"]["eval_loss"], rel=1e-5)

    lines = asked(zygote, tags_place, run, "prompt=Anna saw New Town").splitlines()
    assert [line.split() for line in lines] == [["Anna", "B-PER"], ["saw", "O"], ["New", "B-LOC"], ["Town", "I-LOC"]]
    write(tags_place / "ask.jsonl", [{"tokens": ["Tom", "Bell", "left"]}, {"tokens": ["and"] * 60}])
    ended = zygote.run(tags_place, f"run={run}", "prompts=ask.jsonl", module="app.generate", code=0)
    assert ended.stderr == "truncated to dataset.max_length=48 of the run: 1 of 2\n"
    first, long = map(json.loads, ended.stdout.splitlines())
    assert first == {"tokens": ["Tom", "Bell", "left"], "tags": ["B-PER", "I-PER", "O"]}
    assert long["tags"][0] == "O"
    assert long["tags"][-1] is None
    assert len(long["tags"]) == 60


def test_exported_tagger_is_the_same(quick_zygote: Zygote, tags_place: Path, run: Path) -> None:
    out = tags_place / "out"
    check_export(quick_zygote, run, out, "merged", "AutoModelForTokenClassification")
    assert json.loads((out / "config.json").read_text())["label2id"]["B-LOC"] == 0
    assert 'pipeline_tag: "token-classification"' in (out / "README.md").read_text()
