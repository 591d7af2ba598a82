"""Accuracy and macro F1 are one number for any batch, and those that their definitions give."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from app.batch import Batch
from app.data.collate import Layout, Packed, Padded
from app.data.loader import Loader, StepSplit, eval_batches
from app.data.objectives import Classification
from app.data.prepare import prepare
from app.distributed.process_group import Runtime
from app.evaluation.compare import Comparison
from app.oom_retry import split_batch
from app.training.scores import counts_of, score, score_rows
from tests.data.small import write_jsonl
from tests.model.classes import in_one_row, in_rows, of_classes
from tests.training.conftest import small_run, stepper_of

NAMES = ("a", "b", "c", "d")
GIVEN = (
    *("task=classification", "dataset=labelled_text", "dataset.eval_fraction=0.5", "recipe=lora"),
    *(f"task.labels=[{','.join(NAMES)}]", "dataset.max_rows=null", "dataset.eval_max_rows=null"),
)


def f1(true: list[int], chosen: list[int], name: int) -> float:
    hit = sum(t == c == name for t, c in zip(true, chosen, strict=True))
    precision = hit / max(1, chosen.count(name))
    recall = hit / max(1, true.count(name))
    return 0.0 if not hit else 2 * precision * recall / (precision + recall)


def test_class_scores_do_not_depend_on_batches(tmp_path: Path, tokenizer: Any, runtime: Runtime) -> None:
    rows = [{"text": f"number {i} of {'rain ' * (i % 9)}", "label": NAMES[i % 3]} for i in range(60)]
    run = small_run(*GIVEN, f"dataset.path={write_jsonl(tmp_path / 'a.jsonl', rows)}")
    data = prepare(run.dataset, tokenizer, str(tmp_path / "cache"), classes=NAMES)
    assert data.eval is not None
    labels = Classification(NAMES, bidirectional=False, pad_id=0)
    stepper = stepper_of(run, runtime)
    loader = Loader(data.train, Padded(8, 0, labels), StepSplit(1), seed=0)
    for step in range(loader.steps_per_epoch):
        stepper.run(loader.batches(step), 1e-2)

    layouts: list[Layout] = [*(Padded(size, 0, labels) for size in (1, 7, 1000)), Packed(64, 0, 64, labels)]
    count, model, counts = len(data.eval), stepper.model.eval(), counts_of(run)
    found = [score(model, eval_batches(data.eval, layout), runtime, counts) for layout in layouts]
    true, chosen, losses = [], [], []
    for i in range(count):
        logits = model.language_model(torch.tensor(data.eval.ids(i).tolist())[None]).logits.detach()
        true.append(NAMES.index(data.eval.class_of(i)))
        chosen.append(int(logits.argmax()))
        losses.append(float(F.cross_entropy(logits, torch.tensor(true[-1:]))))
    there = sorted({*true, *chosen})
    assert 3 not in true
    for each in found:
        assert each["eval_loss"] == pytest.approx(sum(losses) / count, rel=1e-5)
        assert each["accuracy"] == sum(t == c for t, c in zip(true, chosen, strict=True)) / count
        assert each["macro_f1"] == pytest.approx(sum(f1(true, chosen, name) for name in there) / len(there))
    sums = score_rows(model, eval_batches(data.eval, layouts[-1]), runtime, count, counts)
    together = counts.metrics(sums.sum(axis=0))
    assert together == pytest.approx({key: found[-1][key] for key in together})
    told = Comparison.of({"tuned": sums, "base": sums}, data.eval.split_hashes, counts)
    assert told.as_dict()["difference_macro_f1"] == 0
    low, high = told.as_dict()["macro_f1_interval"]
    assert low <= found[-1]["macro_f1"] <= high
    assert "accuracy" in told.table()
    assert "perplexity" not in told.table()


def test_macro_f1_ignores_absent_classes() -> None:
    # three documents of classes 0, 0, 1, all taken for 0; class 2 is neither
    sums = np.array([3.0, 3, 2, 0, 0, 3, *(2, 1, 0), *(3, 0, 0), *(2, 0, 0)])
    counts = counts_of(small_run(*GIVEN, "dataset.path=a.jsonl"))
    assert counts.metrics(sums)["macro_f1"] == pytest.approx((2 * 2 / 5 + 0) / 2)


@pytest.mark.parametrize("layout", [in_one_row, in_rows])
def test_split_parts_keep_token_type_ids(layout: Callable[[str], Batch]) -> None:
    model = of_classes("bert").eval()
    whole = layout("bert")
    parts = split_batch(whole, 2)
    assert len(parts) == 3
    loss = sum(float(model(part)[0].detach()) for part in parts)
    assert loss == pytest.approx(float(model(whole)[0].detach()), rel=1e-5)
    without = replace(whole, token_type_ids=None)
    assert loss != pytest.approx(float(model(without)[0].detach()), rel=1e-4), "or it would show nothing"
