"""The scores are one set of numbers, whatever way the rows are batched."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from app.data.collate import Layout, Packed, Padded
from app.data.loader import Loader, eval_batches
from app.data.prepare import Data
from app.distributed.process_group import Runtime
from app.tasks.table import counts_of
from app.training.scores import logged, score
from tests.training.conftest import small_run, stepper_of


def test_scores_do_not_depend_on_batches(data: Data, runtime: Runtime, loader_of: Callable[..., Loader]) -> None:
    assert data.eval is not None
    rows = data.eval
    run, loader = small_run("recipe=lora", "adapter.dropout=0.5"), loader_of(8, 1)
    stepper, counts = stepper_of(run, runtime), counts_of(run)
    for step in range(loader.steps_per_epoch):
        stepper.run(loader.batches(step), 3e-2)  # or it would be right by no accident
    model = stepper.model
    layouts: list[Layout] = [
        *(Padded(size, pad_id=0) for size in (1, 3, 16, 1000)),
        *(Packed(t, pad_id=0, max_length=t) for t in (64, 256)),
    ]
    scores = [score(model, eval_batches(rows, layout), runtime, counts) for layout in layouts]
    losses = [metrics["eval_loss"] for metrics in scores]
    assert losses == pytest.approx([losses[0]] * len(layouts), rel=1e-6)
    assert model.training, "training goes on with dropout"

    model.eval()
    parts, right = [], 0
    for i in range(len(rows)):
        ids = torch.tensor(rows.ids(i).tolist())
        with torch.no_grad():
            logits = model.language_model(ids[None]).logits[0, :-1].double()
        trained = torch.from_numpy(rows.loss_mask(i)[1:].copy())
        parts.append(F.cross_entropy(logits, ids[1:], reduction="none")[trained])
        right += int((logits.argmax(-1) == ids[1:])[trained].sum())
    assert losses[0] == pytest.approx(float(torch.cat(parts).mean()), rel=1e-6)
    assert right > 0
    assert [metrics["token_accuracy"] for metrics in scores] == [right / rows.num_trained] * len(layouts)
    residuals = [float(part.sum()) - losses[0] * len(part) for part in parts]
    error = (len(parts) / (len(parts) - 1) * sum(residual**2 for residual in residuals)) ** 0.5 / rows.num_trained
    assert [metrics["eval_loss_margin"] for metrics in scores] == pytest.approx([1.96 * error] * len(layouts), rel=1e-4)


def test_metrics_of_rows_without_answers_omit_exact_match() -> None:
    counts = counts_of(small_run())

    def metrics(*sums: float) -> dict[str, float]:
        return {key: float(value) for key, value in counts.metrics(np.array(sums)).items()}

    assert logged(metrics(6.0, 4.0, 3.0, 0.0, 0.0, 4.0)) == {"eval_loss": 1.5}
    assert logged(metrics(6.0, 4.0, 3.0, 8.0, 2.0, 4.0)) == {"eval_loss": 1.5, "exact_match": 0.25}
    weighted = metrics(6.0, 4.0, 3.0, 8.0, 2.0, 12.0)
    assert weighted == {"eval_loss": 0.5, "perplexity": math.exp(0.5), "token_accuracy": 0.75, "exact_match": 0.25}
    assert metrics(1000.0, 1.0, 0.0, 1.0, 1.0, 1.0)["perplexity"] == math.inf
