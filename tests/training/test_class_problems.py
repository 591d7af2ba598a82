"""Several labels, numbers and weights of classes: losses and metrics are those of plain torch and scikit-learn."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from app.base.base_model import BaseModel
from app.batch import IGNORE
from app.config.schema import RunConfig
from app.config.tasks import task_of
from app.data.collate import Layout, Packed, Padded
from app.data.labels import class_weights
from app.data.loader import Loader, StepSplit, eval_batches
from app.data.objectives import Objective
from app.data.prepare import Data
from app.distributed.process_group import Runtime
from app.errors import ConfigError, DataError
from app.model.training_model import TrainingModel
from app.oom_retry import split_batch
from app.tasks.table import counts_of
from app.training.rows import read_rows
from app.training.scores import score, score_rows
from tests.data.small import write_jsonl
from tests.training.conftest import small_run, stepper_of

WORDS = ("rain", "roof", "cat", "sun")
PROBLEMS = ("single", "weighted", "multi", "pos_weight", "regression", "numbers")
LR = 5e-3


def row(problem: str, i: int) -> dict[str, Any]:
    chosen = [word for at, word in enumerate(WORDS[:3]) if (i >> at) & 1]
    text = f"number {i} of {' '.join(chosen)} {'and so ' * (i % 5)}"
    if problem in ("multi", "pos_weight"):
        return {"text": text, "label": chosen}
    if problem == "regression":
        return {"text": text, "label": 0.5 * len(chosen) - 0.25 if i != 9 else float(IGNORE)}  # which is a number too
    if problem == "numbers":
        return {"text": text, "label": [len(chosen), -0.5 * (i % 3)]}
    return {"text": text, "label": "none" if not chosen else chosen[0]}


def run_of(problem: str, folder: Path) -> RunConfig:
    rows = write_jsonl(folder / f"{problem}.jsonl", [row(problem, i) for i in range(40)])
    kind = {"weighted": "single", "pos_weight": "multi", "numbers": "regression"}.get(problem, problem)
    weights = ["task.class_weights=balanced"] if problem in ("weighted", "pos_weight") else []
    return small_run(
        *("task=classification", f"task.problem={kind}", "dataset=labelled_text", f"dataset.path={rows}"),
        *("recipe=full", "dataset.eval_fraction=0.4", "optimizer=sgd", f"cache_dir={folder / 'cache'}", *weights),
        folder=folder,
    )


def prepared(run: RunConfig) -> tuple[RunConfig, Data, Objective]:
    rows = read_rows(run, BaseModel(run.model, task_of(run.task)), lambda _note: None)
    return rows.run, rows.data, rows.objective


def plain_loss(run: RunConfig, logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of a batch, by torch's own reductions."""
    weights = None if run.task.class_weights is None else torch.tensor(run.task.class_weights)
    if run.task.problem == "single":
        return F.cross_entropy(logits, targets, weight=weights)
    if run.task.problem == "multi":
        return F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weights)
    return F.mse_loss(logits, targets)


def alone(lm: Any, data: Any, objective: Objective, i: int) -> tuple[Tensor, Tensor]:
    """Logits and targets of one row by the model's own forward."""
    (document,) = objective.label(data, i, 0)
    logits = lm(input_ids=torch.from_numpy(document.ids.astype(np.int64))[None]).logits[0]
    targets = torch.from_numpy(document.targets)
    return logits, targets[0].long() if targets.ndim == 1 else targets[0]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_problem_is_learnt_as_a_plain_loop_of_transformers_learns_it(
    problem: str, tmp_path: Path, runtime: Runtime
) -> None:
    run, data, objective = prepared(run_of(problem, tmp_path))
    stepper = stepper_of(run, runtime)
    lm = copy.deepcopy(stepper.model.language_model).train()
    lm.set_attn_implementation("eager")
    # Adam would magnify the rounding of gradients that are nearly 0
    plain = torch.optim.SGD(lm.parameters(), LR, momentum=run.optimizer.momentum)
    loader = Loader(data.train, Packed(96, 0, 96, objective), StepSplit(2), seed=0)

    def loss_of(indices: Sequence[int]) -> Tensor:
        pairs = [alone(lm, data.train, objective, i) for i in indices]
        return plain_loss(run, *(torch.stack(side) for side in zip(*pairs, strict=True)))

    before = float(loss_of(range(len(data.train))).detach())
    for step in range(loader.steps_per_epoch):
        expected = loss_of(rows_of_step(loader, step))
        plain.zero_grad()
        expected.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), run.training.clip)
        plain.step()
        result = stepper.run(loader.batches(step), LR)
        assert float(result.loss_sum) / result.weight == pytest.approx(float(expected.detach()), rel=1e-4, abs=1e-4)
    assert float(loss_of(range(len(data.train))).detach()) < before


def rows_of_step(loader: Loader, step: int) -> list[int]:
    places = loader.source_locations(step)
    return [known_places(loader).index(place) for place in places]


def known_places(loader: Loader) -> list[str]:
    rows: Any = loader._rows
    return [rows.source_location(i) for i in range(len(rows))]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_scores_equal_those_of_scikit_learn_for_any_batches(problem: str, tmp_path: Path, runtime: Runtime) -> None:
    run, data, objective = prepared(run_of(problem, tmp_path))
    assert data.eval is not None
    model = stepper_of(run, runtime).model.eval()
    with torch.no_grad():
        for parameter in model.language_model.score.parameters():
            parameter.mul_(30)  # so that all classes are chosen somewhere
    counts, count = counts_of(run), len(data.eval)
    layouts: list[Layout] = [Padded(3, 0, objective), Padded(100, 0, objective), Packed(96, 0, 96, objective)]
    metrics_by_layout = [score(model, eval_batches(data.eval, layout), runtime, counts) for layout in layouts]
    with torch.no_grad():
        pairs = [alone(model.language_model, data.eval, objective, i) for i in range(count)]
    logits, targets = (torch.stack(side) for side in zip(*pairs, strict=True))
    expected = {"eval_loss": float(plain_loss(run, logits, targets)), **by_scikit_learn(run, logits, targets)}
    for metrics in metrics_by_layout:
        assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    sums = score_rows(model, eval_batches(data.eval, layouts[-1]), runtime, count, counts)
    assert counts.metrics(sums.sum(axis=0)) == pytest.approx(
        {key: metrics_by_layout[0][key] for key in expected}, rel=1e-5
    )


def by_scikit_learn(run: RunConfig, logits: Tensor, targets: Tensor) -> dict[str, float]:
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, mean_absolute_error

    true = targets.numpy()
    if run.task.problem == "regression":
        values = logits.numpy()
        columns = list(zip(true.T, values.T, strict=True))
        return {
            "mae": float(mean_absolute_error(true, values)),
            "pearson": float(np.mean([pearsonr(*pair)[0] for pair in columns])),
            "spearman": float(np.mean([spearmanr(*pair)[0] for pair in columns])),
        }
    chosen = (logits.argmax(-1) if run.task.problem == "single" else (logits.sigmoid() >= 0.5).float()).numpy()
    scores = {
        "accuracy": float(accuracy_score(true, chosen)),
        "macro_f1": float(f1_score(true, chosen, average="macro")),
    }
    return scores | (
        {} if run.task.problem == "single" else {"micro_f1": float(f1_score(true, chosen, average="micro"))}
    )


@pytest.mark.parametrize("problem", ["weighted", "pos_weight", "regression"])
def test_loss_of_parts_is_that_of_the_whole(problem: str, tmp_path: Path, runtime: Runtime) -> None:
    run, data, objective = prepared(run_of(problem, tmp_path))
    model = stepper_of(run, runtime).model.eval()
    layouts: list[Layout] = [Padded(6, 0, objective), Packed(96, 0, 96, objective)]
    for layout in layouts:
        batch = next(iter(eval_batches(data.train, layout)))
        whole, split = gradients(model, [batch]), gradients(model, split_batch(batch, 2))
        assert split == pytest.approx(whole, rel=1e-4, abs=1e-6)
    empty = layouts[0].batch(data.train, [], 1, 0)
    assert float(model(empty)[0].detach()) == 0.0


def gradients(model: TrainingModel, batches: list[Any]) -> list[float]:
    model.zero_grad()
    for batch in batches:
        model(batch)[0].backward()
    return [float(parameter.grad.norm()) for parameter in model.parameters() if parameter.grad is not None]


def test_macro_f1_ignores_absent_classes() -> None:
    from sklearn.metrics import f1_score

    # three documents of classes 0, 0, 1, all taken for 0; class 2 is neither
    sums = np.array([3.0, 3, 2, 0, 0, 3, *(2, 1, 0), *(3, 0, 0), *(2, 0, 0)])
    run = small_run("task=classification", "task.labels=[a,b,c]", "dataset=labelled_text", "dataset.path=a.jsonl")
    assert counts_of(run).metrics(sums)["macro_f1"] == pytest.approx((2 * 2 / 5 + 0) / 2)
    # of documents 0, 0, 1 the last is taken for 2: a class that is predicted and never true counts
    wrong = np.array([3.0, 3, 2, 0, 0, 3, *(2, 1, 0), *(2, 0, 1), *(2, 0, 0)])
    assert counts_of(run).metrics(wrong)["macro_f1"] == pytest.approx(f1_score([0, 0, 1], [0, 0, 2], average="macro"))


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    counts = {"a": 7, "b": 2, "c": 3}
    labels = np.repeat(list(counts), list(counts.values()))
    expected = compute_class_weight("balanced", classes=np.array(list(counts)), y=labels)
    assert class_weights("single", [*counts], counts, 12) == pytest.approx(expected.tolist(), rel=1e-5)
    assert class_weights("multi", [*counts], counts, 12) == pytest.approx([5 / 7, 5, 3])


def problems(folder: Path, rows: list[Any], *overrides: str) -> str:
    path = write_jsonl(folder / "rows.jsonl", [{"text": f"text {i}", "label": label} for i, label in enumerate(rows)])
    run = small_run(
        *("task=classification", "dataset=labelled_text", f"dataset.path={path}", "dataset.eval_fraction=0"),
        *(f"cache_dir={folder / 'cache'}", "recipe=lora", *overrides),
        folder=folder,
    )
    with pytest.raises((ConfigError, DataError)) as refusal:
        read_rows(run, BaseModel(run.model, task_of(run.task)), lambda _note: None)
    return " ".join(refusal.value.problems)


@pytest.mark.parametrize(
    ("rows", "overrides", "why"),
    [
        ([0.5, "good"], ("task.problem=regression",), "rows.jsonl:2: column 'label' must be a number, found 'good'"),
        ([0.5, [1, 2]], ("task.problem=regression",), "rows.jsonl:2: column 'label' has 2 numbers, expected 1 per row"),
        (
            [["a"], ["a", 0.5]],
            ("task.problem=multi",),
            "rows.jsonl:2: column 'label' has 0.5, but labels must be words",
        ),
        (["a", ["a", "b"]], (), "set task.problem=multi for several labels per row"),
        (["a", 1.5], (), "set task.problem=regression for numbers"),
        (
            ["a", "b"],
            ("task.labels=[a,b,c]", "task.class_weights=balanced"),
            "task.class_weights=balanced: no training row has the label c",
        ),
        (["a", "b"], ("task.class_weights=[1,2,3]",), "has 3 numbers, but there are 2 labels: a, b"),
        ([["a"], ["c"]], ("task.problem=multi", "task.labels=[a,b]"), "rows.jsonl:2: unknown label 'c'"),
    ],
)
def test_labels_that_do_not_suit_the_problem_are_named(
    rows: list[Any], overrides: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    assert why in problems(tmp_path, rows, *overrides)
