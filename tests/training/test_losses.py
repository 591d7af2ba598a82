"""A loss over documents: its sum and gradient are those of its formula over all logits, however rows are laid out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from app.batch import Batch
from app.config.schema import PreferenceConfig, TaskConfig
from app.data.collate import Layout, Packed, Padded
from app.data.objectives import LabeledTokens, label_next_tokens
from app.data.token_dataset import MismatchedRows, TokenRows
from app.distributed.gradient_reduction import GradientReduction
from app.distributed.process_group import Runtime
from app.layers.head import linear_head
from app.model.losses import over_documents
from app.model.training_model import TrainingModel
from app.oom_retry import split_batch
from app.tasks.classification import CLASS_PROBLEMS, class_loss
from app.tasks.interface import LABELS, LOSS, WEIGHT
from app.tasks.preference import LABELED_ANSWERS, LabeledAnswers
from app.tasks.table import counts_of
from app.training.scores import score, score_rows
from app.training.train_step import Stepper
from tests.harness.scarcity import scarce
from tests.model.small import distance, documents_of, gradients, lora, outcome, training_model_of
from tests.training.conftest import small_run

LENGTHS = ((9, 5), (12, 12), (4, 11))
ANSWERS_FROM = 2


def preference(sums: Tensor, batch: Batch) -> Tensor:
    """Of pairs: a function of both answers, their references and a mean of the step, neither linear nor symmetric."""
    assert batch.step_mean is not None
    gains = gains_of(sums, batch)
    lengths = torch.tensor(batch.lengths, dtype=torch.float64, device=sums.device)
    return -F.logsigmoid(0.3 * (gains[0::2] - gains[1::2] - batch.step_mean)) - 0.2 * sums[0::2] / lengths[0::2]


def baseline(sums: Tensor, batch: Batch) -> Tensor:
    return 0.5 * gains_of(sums, batch)[1::2].clamp(min=-30.0)


def gains_of(sums: Tensor, batch: Batch) -> Tensor:
    assert batch.document_values is not None
    return sums - batch.document_values[:, 0]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Each row is two answers."""

    documents_per_row: ClassVar[int] = 2
    over_documents: ClassVar[bool] = True
    marked: ClassVar[str] = "tokens in the loss"
    bidirectional: bool = False

    def label(self, rows: TokenRows, i: int, epoch: int) -> tuple[LabeledTokens, ...]:
        documents = np.split(rows.ids(i), [rows.second_start(i)])
        labeled = [label_next_tokens(document, np.arange(len(document)) >= ANSWERS_FROM) for document in documents]
        return tuple(replace(tokens, values=(-4.0 * len(tokens.at) - i, i)) for tokens in labeled)

    def shown(self, rows: TokenRows, i: int) -> Any:
        raise NotImplementedError


class Rows:
    """Rows of two documents, one behind the other."""

    lengths = np.array([sum(documents) for documents in LENGTHS], np.int32)

    def __len__(self) -> int:
        return len(LENGTHS)

    def ids(self, i: int) -> Any:
        return torch.cat(documents_of(LENGTHS[i], seed=i)).numpy().astype(np.int32)

    def second_start(self, i: int) -> int:
        return LENGTHS[i][0]


ROWS: Any = Rows()
LAYOUTS: dict[str, Layout] = {"packed": Packed(64, 0, 12, Pairs()), "padded": Padded(3, 0, Pairs())}


def batch_of(layout: str, rows: Sequence[int] = range(3)) -> Batch:
    return LAYOUTS[layout].batch(ROWS, [np.array(rows, np.int64)], 8, epoch=0)


def model_of(adapter: Any = None, *, linear: bool = True, recompute: bool = False) -> TrainingModel:
    model = training_model_of("llama", adapter, task=TaskConfig(kind="causal"), recompute=recompute)
    model.loss = over_documents(preference, baseline)
    model.use_linear_head(linear_head(model.language_model) if linear else None)
    return model


def formula(model: TrainingModel) -> Tensor:
    """The loss of each row, of its documents by themselves: all logits, log-probabilities in float64."""
    terms = []
    for i in range(len(LENGTHS)):
        for document in documents_of(LENGTHS[i], seed=i):
            logits = model.language_model(input_ids=document[None], use_cache=False).logits[0]
            scores = logits.double().log_softmax(-1)[ANSWERS_FROM - 1 : -1]
            terms.append(scores.gather(1, document[ANSWERS_FROM:, None]).sum())
    sums, whole = torch.stack(terms), batch_of("padded")
    return preference(sums, replace(whole, step_mean=baseline(sums.detach(), whole).mean()))


def step(
    model: TrainingModel, batches: Sequence[Batch], runtime: Runtime, reduction: GradientReduction | None = None
) -> tuple[float, Stepper]:
    """The mean loss of all rows, by a step that changes no weight."""
    trained = list(model.trained().values()) if reduction is None else reduction.stepped
    optimizer = torch.optim.SGD(trained, lr=0.0)
    stepper = Stepper(model, optimizer, runtime, clip=0.0, fp16=False, reduction=reduction)
    result = stepper.run(batches, 0.0)
    assert result.weight == len(LENGTHS)
    return result.mean(runtime.host_group.totals([float(result.loss_sum)])[0]), stepper


def test_weighted_classes_are_summed_in_fp32_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    losses, weights = torch.linspace(0.0, 20.0, 9000), torch.linspace(0.5, 3.7, 9000)
    batch: Any = SimpleNamespace(num_labels=9000, weights=SimpleNamespace(per_target=weights))
    answers: Any = replace(CLASS_PROBLEMS["single"], of_answers=lambda logits, *_: logits)
    monkeypatch.setitem(CLASS_PROBLEMS, "single", answers)
    head: Any = SimpleNamespace(class_logits=lambda states: states)
    batch.targets = None
    with torch.autocast("cpu", torch.float16):
        total = class_loss(TaskConfig(), PreferenceConfig()).of_states(head, losses, batch)
    assert float(total) == pytest.approx(float((losses.double() * weights).sum()), rel=1e-6)


@pytest.mark.parametrize(
    ("adapter", "layout", "linear", "recompute"),
    [
        (None, "packed", True, False),
        (None, "padded", False, False),
        (lora(), "packed", False, False),
        (lora(), "packed", True, True),
        (lora(), "padded", True, False),
    ],
)
def test_loss_over_documents_equals_its_formula(
    adapter: Any, layout: str, linear: bool, recompute: bool, runtime: Runtime
) -> None:
    model = model_of(adapter, linear=linear, recompute=recompute)
    loss, expected = outcome(model, lambda: formula(model).mean())
    batch = batch_of(layout)
    for parts in ([batch], split_batch(batch, 1), [batch_of(layout, rows) for rows in ((2,), (), (0, 1))]):
        value, _ = step(model, parts, runtime)
        assert value == pytest.approx(loss, rel=1e-6)
        assert distance(gradients(model), expected) <= 2e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_over_documents_out_of_memory_stays_its_formula(layout: str, runtime: Runtime) -> None:
    """Both passes are repeated in parts: the one for the mean of the step, and that with the gradient."""
    model = model_of()
    loss, expected = outcome(model, lambda: formula(model).mean())
    with scarce("forward", tokens=35) as memory:
        value, stepper = step(model, [batch_of(layout)], runtime)
    assert memory.times > stepper.split_depth >= 1
    assert value == pytest.approx(loss, rel=1e-6)
    assert distance(gradients(model), expected) <= 2e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_scored_by_their_loss(layout: str, runtime: Runtime) -> None:
    model, counts = model_of(), counts_of(small_run())
    losses = formula(model).tolist()
    batches = [replace(batch_of(layout, rows), samples=rows) for rows in ((2, 0), (1,))]
    sums = score_rows(model, batches, runtime, 3, counts)
    assert sums[:, LOSS].tolist() == pytest.approx(losses, rel=1e-6)
    assert sums[:, WEIGHT].tolist() == [1.0, 1.0, 1.0]
    assert sums[:, LABELS].sum() == batch_of(layout).num_labels
    assert score(model, batches, runtime, counts)["eval_loss"] == pytest.approx(sum(losses) / 3, rel=1e-6)


class Labeled(TokenRows):
    """Answers to prompts, the second and the last of them unwanted."""

    lengths = np.array([11, 19, 8, 15], np.int32)
    content_hashes = np.array([5, 11, 2, 7], np.uint64)

    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return len(self.lengths)

    def ids(self, i: int) -> Any:
        return documents_of((int(self.lengths[i]),), seed=i)[0].numpy().astype(np.int32)

    def loss_mask(self, i: int) -> Any:
        return np.arange(self.lengths[i]) >= 3 + i

    def class_of(self, i: int) -> str:
        return "false" if i % 2 else "true"


LABELED = Labeled()
BETA = 0.4


def kto_objective() -> LabeledAnswers:
    others = MismatchedRows(LABELED)
    reference = {int(h): (-9.0 - 20 * i,) for i, h in enumerate(LABELED.content_hashes)}
    return LabeledAnswers(reference=reference | {int(h): (-60.0 - i,) for i, h in enumerate(others.content_hashes)})


def kto_model(adapter: Any = None) -> TrainingModel:
    model = model_of(adapter)
    config = PreferenceConfig(kind="kto", beta=BETA, desirable=0.7, undesirable=1.3)
    model.loss = LABELED_ANSWERS.loss(TaskConfig(kind="preference_label"), config)
    return model


def kto_batch(layout: str, rows: Sequence[int]) -> Batch:
    objective = kto_objective()
    collator: Layout = Packed(64, 0, 19, objective) if layout == "packed" else Padded(4, 0, objective)
    return collator.batch(LABELED, [np.array(rows, np.int64)], 8, epoch=0)


def kto_formula(model: TrainingModel) -> Tensor:
    """The mean loss of all rows; the mean over mismatched answers is over all of them, and has no gradient."""

    def ratio(rows: TokenRows, i: int) -> Tensor:
        ids, at = torch.from_numpy(np.array(rows.ids(i))).long(), np.flatnonzero(rows.loss_mask(i))
        scores = model.language_model(input_ids=ids[None], use_cache=False).logits[0].double().log_softmax(-1)
        log_ratio: Tensor = scores[at - 1].gather(1, ids[at, None]).sum() - reference[int(rows.content_hashes[i])][0]
        return log_ratio

    reference, others = kto_objective().reference, MismatchedRows(LABELED)
    with torch.no_grad():
        mean = torch.stack([ratio(others, i) for i in range(4)]).mean()
    assert mean > 1.0, "or the test sees nothing of it"
    gains = BETA * (torch.stack([ratio(LABELED, i) for i in range(4)]) - mean)
    desirable = torch.tensor([LABELED.class_of(i) == "true" for i in range(4)])
    return torch.where(desirable, 0.7 * torch.sigmoid(-gains), 1.3 * torch.sigmoid(gains)).mean()


@pytest.mark.parametrize(("layout", "adapter"), [("packed", None), ("padded", lora())])
def test_kto_equals_its_formula_however_a_step_is_divided(layout: str, adapter: Any, runtime: Runtime) -> None:
    model = kto_model(adapter)
    loss, expected = outcome(model, lambda: kto_formula(model))
    stepper = Stepper(model, torch.optim.SGD(list(model.trained().values()), lr=0.0), runtime, clip=0.0, fp16=False)
    for parts in ((range(4),), ((2,), (0, 3), (), (1,)), ((3, 1), (2, 0))):
        for stepper.split_depth in (0, 1):
            result = stepper.run([kto_batch(layout, part) for part in parts], 0.0)
            assert result.mean(float(result.loss_sum)) == pytest.approx(loss, rel=1e-6)
            assert distance(gradients(model), expected) <= 2e-6


def test_mismatched_answers_are_packed_into_bins_of_their_own() -> None:
    whole = kto_batch("packed", range(4))
    (bin_of_all,) = whole.mean_of
    assert sorted(bin_of_all.lengths) == sorted(MismatchedRows(LABELED).lengths.tolist())
    narrow = Packed(40, 0, 19, kto_objective()).batch(LABELED, [np.array([0, 1], np.int64)], 3, epoch=0)
    assert [batch.ids.shape for batch in narrow.mean_of] == [(1, 40)] * len(narrow.mean_of)
    assert sum(len(batch.lengths) for batch in narrow.mean_of) == 2
