"""The loss of a step is sum(w * l) / sum(w) over all trained tokens, however they are split; of an evaluation too."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from app.data.collate import Layout, Packed, Padded
from app.data.loader import Loader, StepSplit, eval_batches
from app.data.objectives import NEXT_TOKEN
from app.data.prepare import Data, prepare
from app.data.token_dataset import TokenRows
from app.distributed.process_group import Runtime
from app.model.training_model import TrainingModel
from app.tasks.interface import LABELS, LOSS, WEIGHT
from app.tasks.table import counts_of
from app.training.samples import preview
from app.training.scores import score, score_rows
from tests.training.conftest import small_run, stepper_of
from tests.training.test_train_step import gradients, relative

LONGEST = 128
WEIGHTS = (0.3, None, 2.0, 0.05, 1, None, 7)


def chats(weights: tuple[float | None, ...]) -> list[dict[str, Any]]:
    """Conversations of one to three turns; each answer has the next of the weights, and a fourth has none at all."""
    rows, number = [], 0
    for at in range(24):
        messages: list[dict[str, Any]] = []
        for turn in range(1 + at % 3):
            messages.append({"role": "user", "content": f"How much is {at} and {turn}?"})
            answer: dict[str, Any] = {"role": "assistant", "content": f"It is {at + turn}" + ", quite" * (at % 5)}
            weight = None if at % 4 == 3 else weights[number % len(weights)]
            messages.append(answer | ({} if weight is None else {"weight": weight}))
            number += 1
        rows.append({"messages": messages})
    return rows


def rows_of(folder: Path, tokenizer: Any, weights: tuple[float | None, ...]) -> TokenRows:
    folder.mkdir(exist_ok=True)
    path = folder / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in chats(weights)))
    run = small_run("dataset=messages", f"dataset.path={path}", f"dataset.max_length={LONGEST}", "batching.tokens=128")
    data: Data = prepare(replace(run.dataset, eval_fraction=0.0), tokenizer, str(folder / "cache"))
    return data.train


@pytest.fixture(scope="module")
def rows(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    weighted = rows_of(tmp_path_factory.mktemp("weighted"), tokenizer, WEIGHTS)
    assert 0 < weighted.num_weighted < len(weighted) == 24
    return weighted


def layouts() -> list[tuple[Layout, int]]:
    """Each with as many micro-batches as hold all rows."""
    return [
        (Padded(24, pad_id=0), 1),
        (Padded(1, pad_id=0), 24),
        (Padded(5, pad_id=0), 5),
        (Packed(LONGEST, pad_id=0, max_length=LONGEST), 24),
        (Packed(8 * LONGEST, pad_id=0, max_length=LONGEST), 3),
    ]


def plain(model: TrainingModel, rows: TokenRows) -> tuple[Tensor, Tensor]:
    """Of all trained tokens the loss and the weight, from the full logits of one row at a time, written out."""
    losses, counts = [], []
    for i in range(len(rows)):
        ids, trained = torch.tensor(rows.ids(i).tolist()), torch.tensor(rows.loss_mask(i).tolist())
        weights = rows.weights(i)
        logits = model.language_model(ids[None]).logits[0, :-1].double()
        losses.append(F.cross_entropy(logits, ids[1:], reduction="none")[trained[1:]])
        counts.append(torch.tensor((rows.loss_mask(i) if weights is None else weights).tolist())[trained].double())
    return torch.cat(losses), torch.cat(counts)


@pytest.mark.parametrize("recipe", ["full", "lora"])
def test_weighted_loss_equals_the_formula_for_any_split(recipe: str, rows: TokenRows, runtime: Runtime) -> None:
    run = small_run(f"recipe={recipe}", "training.clip=0")
    theirs = stepper_of(run, runtime)
    warm = Loader(rows, Padded(24, pad_id=0), StepSplit(1), seed=0).batches(0)
    theirs.run(warm, 1e-2)  # or every lora_B would be zero
    theirs.optimizer.zero_grad()
    losses, weights = plain(theirs.model, rows)
    expected = (losses * weights).sum() / weights.sum()
    expected.backward()
    assert abs(float(losses.detach().mean() / expected.detach()) - 1) > 1e-4, "weights change nothing here"
    ours = stepper_of(run, runtime)
    ours.run(warm, 1e-2)
    for layout, micro_batches in layouts():
        loader = Loader(rows, layout, StepSplit(micro_batches), seed=1)
        assert loader.steps_per_epoch == 1
        result = ours.run(loader.batches(0), 0.0)
        assert result.labels == len(losses)
        assert result.weight == pytest.approx(float(weights.sum()), rel=1e-12)
        assert result.mean(float(result.loss_sum)) == pytest.approx(float(expected.detach()), rel=1e-6)
        assert relative(gradients(ours), gradients(theirs)) <= 1e-6


def test_weighted_evaluation_is_the_same_mean(rows: TokenRows, runtime: Runtime) -> None:
    model = stepper_of(small_run("recipe=full"), runtime).model
    with torch.no_grad():
        losses, weights = plain(model, rows)
    expected = float((losses * weights).sum() / weights.sum())
    scores, counts = [], counts_of(small_run())
    for layout, _ in layouts():
        scores.append(score(model, eval_batches(rows, layout), runtime, counts))
        assert scores[-1]["eval_loss"] == pytest.approx(expected, rel=1e-6)
        sums = score_rows(model, eval_batches(rows, layout), runtime, len(rows), counts)
        assert sums[:, LABELS].tolist() == [int(rows.loss_mask(i).sum()) for i in range(len(rows))]
        ends = np.cumsum(sums[:, LABELS]).astype(int)[:-1]
        for i, (loss, weight) in enumerate(
            zip(torch.tensor_split(losses, ends.tolist()), torch.tensor_split(weights, ends.tolist()), strict=True)
        ):
            assert sums[i, WEIGHT] == pytest.approx(float(weight.sum()), rel=1e-9)
            assert sums[i, LOSS] == pytest.approx(float((loss * weight).sum()), rel=1e-5)
    assert len({metrics["token_accuracy"] for metrics in scores}) == 1


def test_weights_of_one_change_no_bit(tokenizer: Any, tmp_path: Path, runtime: Runtime) -> None:
    ones, none = (rows_of(tmp_path / name, tokenizer, weights) for name, weights in (("a", (1, 1.0)), ("b", (None,))))
    assert ones.fingerprint == none.fingerprint
    losses = []
    for rows in (ones, none):
        stepper = stepper_of(small_run("recipe=lora"), runtime)
        loader = Loader(rows, Packed(256, pad_id=0, max_length=LONGEST), StepSplit(2), seed=0)
        batches = [loader.batches(step) for step in range(3)]
        assert all(batch.weights is None for step in batches for batch in step)
        losses.append([float(stepper.run(step, 1e-2).loss_sum) for step in batches])
    assert losses[0] == losses[1]


def test_preview_has_message_weights(rows: TokenRows, tokenizer: Any) -> None:
    shown = preview(rows, NEXT_TOKEN, tokenizer, first=True)["rows"]
    marks = [[(piece["trained"], piece.get("weight")) for piece in row["pieces"] if piece["trained"]] for row in shown]
    assert marks == [
        [(True, 0.3)],
        [(True, None), (True, 2.0)],
        [(True, 0.05), (True, None), (True, None)],
        [(True, None)],
    ]
    for i, row in enumerate(shown):
        assert row["trained_tokens"] == rows.loss_mask(i).sum()
        assert "".join(piece["text"] for piece in row["pieces"]) == tokenizer.decode(rows.ids(i))
