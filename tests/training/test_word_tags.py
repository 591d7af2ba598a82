"""Tags of words: learnt as a plain loop of transformers learns them, and entities counted by the rule of seqeval."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from app.base.base_model import BaseModel
from app.config.schema import RunConfig
from app.config.tasks import task_of
from app.data.collate import BinShape, Packed, collate_packed, collate_padded
from app.data.loader import Loader, StepSplit
from app.data.objectives import LabeledTokens
from app.distributed.process_group import Runtime
from app.errors import DataError
from app.tasks.table import counts_of
from app.tasks.tagging import are_entities
from app.training.rows import Rows, read_rows
from tests.data.small import write_jsonl
from tests.training.conftest import small_run, stepper_of

LR = 5e-3
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
NAMES = {"PER": ("Anna", "Miller", "unbelievable"), "LOC": ("Rotterdam", "Northland")}
TRAIN, BATCH = 24, 4


def row(choose: random.Random) -> dict[str, Any]:
    words, tags = ["so"], ["O"]
    for _ in range(choose.randint(1, 4)):
        kind = choose.choice(["PER", "LOC"])
        for number, word in enumerate(choose.sample(NAMES[kind], choose.randint(1, 2))):
            words.append(word)
            tags.append(f"{'I' if number else 'B'}-{kind}")
        words += choose.choice([["went", "to"], ["!"], []])
        tags += ["O"] * (len(words) - len(tags))
    return {"tokens": words, "tags": tags}


def run_of(folder: Path, *more: str, rows: list[dict[str, Any]] | None = None) -> RunConfig:
    choose = random.Random(0)
    path = write_jsonl(folder / "names.jsonl", rows or [row(choose) for _ in range(TRAIN + 16)])
    return small_run(
        *("task=tokens", "model=bert", "model.tokenizer=asset:wordpiece", "recipe=full", "dataset=tagged_words"),
        *("model.architecture.vocab_size=2048", "model.architecture.num_key_value_heads=null"),
        *("model.architecture.hidden_dropout_prob=0", "model.architecture.attention_probs_dropout_prob=0"),
        *(f"dataset.path={path}", "dataset.eval_fraction=0.4", "dataset.max_length=64", "optimizer=sgd"),
        *(f"cache_dir={folder / 'cache'}", *more),
        folder=folder,
    )


def prepared(run: RunConfig) -> Rows:
    return read_rows(run, BaseModel(run.model, task_of(run.task)), lambda _note: None)


@pytest.mark.parametrize("weights", ["null", "[1,2,3,4,5]"])
def test_tags_are_learnt_as_a_plain_loop_of_transformers_learns_them(
    weights: str, tmp_path: Path, runtime: Runtime
) -> None:
    prepared_rows = prepared(run_of(tmp_path, f"task.class_weights={weights}"))
    run, names = prepared_rows.run, prepared_rows.run.task.labels
    assert sorted(names) == sorted(TAGS)
    stepper = stepper_of(run, runtime)
    lm = copy.deepcopy(stepper.model.language_model).train()
    assert type(lm).__name__ == "BertForTokenClassification"
    assert lm.config.id2label == dict(enumerate(names))
    lm.set_attn_implementation("eager")
    plain = torch.optim.SGD(lm.parameters(), LR, momentum=run.optimizer.momentum)
    loader = Loader(prepared_rows.data.train, Packed(96, 0, 96, prepared_rows.objective), StepSplit(2), seed=0)
    by_place = {f"names.jsonl:{number}": row for number, row in enumerate(read(run), 1)}
    weight = None if run.task.class_weights is None else torch.tensor(run.task.class_weights)
    loss_of = torch.nn.CrossEntropyLoss(weight)
    for step in range(min(4, loader.steps_per_epoch)):
        rows = [by_place[place] for place in loader.source_locations(step)]
        ids = prepared_rows.tokenizer([row["tokens"] for row in rows], is_split_into_words=True)
        batch = prepared_rows.tokenizer.pad(ids, return_tensors="pt")
        targets = torch.full(batch.input_ids.shape, -100)
        for i, row in enumerate(rows):
            words = ids.word_ids(i)
            for at, word in enumerate(words):
                if word is not None and word != words[at - 1]:
                    targets[i, at] = names.index(row["tags"][word])
        plain.zero_grad()
        logits = lm(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        expected = loss_of(logits.flatten(0, 1), targets.flatten())
        expected.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), run.training.clip)
        plain.step()
        result = stepper.run(loader.batches(step), LR)
        assert float(result.loss_sum) / result.weight == pytest.approx(float(expected.detach()), rel=1e-5)


def read(run: RunConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(str(run.dataset.path)).read_text().splitlines()]


def entities(tags: list[str]) -> set[tuple[str, int, int]]:
    """Type, first and last word of each entity, by going through the words once."""
    spans, open_at = set(), -1
    for at in range(len(tags) + 1):
        tag = tags[at] if at < len(tags) else "O"
        before = tags[at - 1] if at else "O"
        is_same = tag != "O" and before != "O" and tag[2:] == before[2:]
        if open_at >= 0 and (not is_same or tag[0] in "BS" or before[0] in "ES"):
            spans.add((before[2:], open_at, at - 1))
            open_at = -1
        if tag != "O" and open_at < 0:
            open_at = at
    return spans


def f1(true: list[list[str]], chosen: list[list[str]]) -> float:
    pairs = [(entities(a), entities(b)) for a, b in zip(true, chosen, strict=True)]
    both = sum(len(a & b) for a, b in pairs)
    return 2 * both / sum(len(a) + len(b) for a, b in pairs)


def test_entities_are_those_of_the_rule() -> None:
    assert entities(["B-A", "I-A", "O", "I-A", "I-B", "B-B", "B-B"]) == {
        ("A", 0, 1), ("A", 3, 3), ("B", 4, 4), ("B", 5, 5), ("B", 6, 6)
    }  # fmt: skip
    assert entities(["S-A", "S-A", "B-A", "E-A", "I-A"]) == {("A", 0, 0), ("A", 1, 1), ("A", 2, 3), ("A", 4, 4)}
    assert are_entities(TAGS)
    assert are_entities(["O", "B", "I"])
    assert not are_entities(["NOUN", "O", "BEGIN"])
    assert not are_entities(["O"])


@pytest.mark.parametrize("names", [TAGS, ("O", "B-A", "I-A", "E-A", "S-A", "I-B", "B-B", "E-B"), ("DET", "NOUN")])
def test_entity_f1_of_random_tags_equals_a_plain_computation(names: tuple[str, ...]) -> None:
    counts = counts_of(
        small_run("task=tokens", "dataset=tagged_words", "dataset.path=x", f"task.labels=[{','.join(names)}]")
    )
    choose = np.random.default_rng(0)
    lengths = [7, 1, 30, 4, 1, 12]
    true, chosen = ([choose.integers(len(names), size=n) for n in lengths] for _ in range(2))
    rows = [
        LabeledTokens(np.zeros(n + 2, np.int32), 1 + np.arange(n), tags) for n, tags in zip(lengths, true, strict=True)
    ]
    for batch in (collate_padded(rows, 0), collate_packed(rows, 0, BinShape(80, 40, 9))):
        row_sums = counts.task_columns(batch, torch.zeros(sum(lengths)), torch.from_numpy(np.concatenate(chosen)))
        assert len(row_sums) == len(rows)
        metrics = counts.metrics(np.concatenate([np.ones(6), row_sums.sum(0).numpy()]))
        labels = [[[names[at] for at in row] for row in side] for side in (true, chosen)]
        flat = [np.concatenate(side) for side in (true, chosen)]
        assert metrics["macro_f1"] == pytest.approx(f1_score(*flat, average="macro"))
        if "O" in names:
            assert metrics["entity_f1"] == pytest.approx(f1(*labels))
        else:
            assert "entity_f1" not in metrics


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "column 'tokens' has 2 words, but 'tags' 1 tag"),
        ({"tokens": [], "tags": []}, "column 'tokens' has 0 words"),
        ({"tokens": "a b", "tags": ["O"]}, "column 'tokens' must be a list, found text"),
        ({"tokens": ["a", ""], "tags": ["O", "O"]}, "must contain words, found empty at index 1"),
        ({"tokens": ["a", "b"], "tags": ["O", 0]}, "column 'tags' mixes numbers and names"),
        ({"tokens": ["a"], "tags": [0.5]}, "column 'tags' has 0.5, but a tag must be a name or an integer"),
        ({"tokens": ["a"], "tags": [["O"]]}, "column 'tags' has a nested list"),
        ({"tokens": ["a", "\u200d"], "tags": ["O", "O"]}, "no separate token for 1 of its 2 words"),
    ],
)
def test_rows_that_do_not_fit_are_named(wrong: dict[str, Any], why: str, tmp_path: Path) -> None:
    good = [{"tokens": ["a", "b"], "tags": ["O", "B-PER"]}] * 3
    with pytest.raises(DataError) as refusal:
        prepared(run_of(tmp_path, rows=[*good, wrong]))
    assert "names.jsonl:4" in refusal.value.problems[0]
    assert why in refusal.value.problems[0]


def test_rows_too_long_are_cut_with_their_tags(tmp_path: Path) -> None:
    rows = [{"tokens": ["so"] * 20, "tags": [TAGS[i % 5] for i in range(20)]}, {"tokens": ["so"], "tags": ["O"]}]
    data = prepared(run_of(tmp_path, "dataset.max_length=12", "dataset.eval_fraction=0", rows=rows)).data
    words = int(data.train.loss_mask(0).sum())
    assert data.report.train.truncated == 1
    assert len(data.train.ids(0)) == 12
    assert 4 < words <= 10
    assert data.train.class_of(0) == json.dumps(rows[0]["tags"][:words])
    assert data.train.class_counts()["O"] == rows[0]["tags"][:words].count("O") + 1
    assert data.train.num_trained == words + 1 == data.report.train.trained_tokens


def test_columns_of_conll_are_found(tmp_path: Path) -> None:
    rows = [{"tokens": ["Anna", "ran"], "ner_tags": ["B-PER", "O"], "pos_tags": [3, 4], "id": str(i)} for i in range(9)]
    prepared_rows = prepared(run_of(tmp_path, "dataset=auto", "dataset.eval_fraction=0", rows=rows))
    assert prepared_rows.run.dataset.columns.tags == "ner_tags"
    assert prepared_rows.run.task.labels == ["B-PER", "O"]
