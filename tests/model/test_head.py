from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from app.batch import IGNORE, Batch
from app.errors import EnvironmentProblem
from app.model.head import chunk_rows, own_head, token_loss_sum
from app.model.trainee import Trainee
from tests.choices import taking_turns
from tests.model.small import (
    ALL_KINDS,
    KINDS,
    VOCABULARY,
    WIDTH,
    batch_of,
    built,
    distance,
    documents_of,
    gradients,
    lora,
    trainee_of,
)

DOCUMENTS = documents_of((12, 5, 9))
BATCH = batch_of(DOCUMENTS, labels_from=3, fill=4)


def plain_loss(trainee: Trainee, batch: Batch) -> Tensor:
    """All logits of the model's own forward, and torch's cross-entropy."""
    with trainee.arithmetic(batch.ids.device):
        out = trainee.language_model(input_ids=batch.ids, position_ids=batch.positions, use_cache=False)
    logits = out.logits.flatten(0, 1)[batch.label_rows]
    return F.cross_entropy(logits.float(), batch.targets, ignore_index=IGNORE, reduction="sum")


def measured(trainee: Trainee, loss_of: Callable[[], Tensor]) -> tuple[float, dict[str, Tensor]]:
    trainee.zero_grad()
    torch.manual_seed(0)
    loss = loss_of()
    loss.backward()
    return float(loss.detach()), gradients(trainee)


def check_against_plain(trainee: Trainee, tolerance: float = 1e-6) -> None:
    expected_loss, expected = measured(trainee, lambda: plain_loss(trainee, BATCH))
    loss, found = measured(trainee, lambda: trainee(BATCH)[0])
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert sum(float(g.abs().sum()) for g in expected.values()) > 0
    assert distance(found, expected) <= tolerance


def chunked(trainee: Trainee, rows: int) -> Trainee:
    trainee._chunk = rows
    return trainee


@pytest.mark.parametrize(("kind", "adapter"), taking_turns(tuple(KINDS), (None, lora())))
def test_loss_and_gradient_equal_those_of_all_logits(kind: str, adapter: Any) -> None:
    check_against_plain(chunked(trainee_of(kind, adapter), 7))


@pytest.mark.parametrize(
    ("chunk", "kind"), taking_turns((1, 10_000), ("llama", "gemma2"))
)  # an own and a tied head
def test_any_chunk_size_gives_the_same(kind: str, chunk: int) -> None:
    check_against_plain(chunked(trainee_of(kind), chunk))


@pytest.mark.parametrize(("chunk", "weighted"), [(4, True), (1000, False)])
def test_equals_float64_arithmetic(chunk: int, *, weighted: bool) -> None:
    lm = built("llama")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(23, WIDTH, generator=generator).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (23,), generator=generator)
    targets[::5] = IGNORE
    weight: nn.Parameter = lm.lm_head.weight
    each = 10 ** torch.randn(23, generator=generator) if weighted else None
    loss = token_loss_sum(own_head(lm), rows, targets, [weight], chunk, each)
    found = torch.autograd.grad(loss, [rows, weight])
    exact_rows, exact_weight = (t.detach().double().requires_grad_() for t in (rows, weight))
    losses = F.cross_entropy(exact_rows @ exact_weight.T, targets, ignore_index=IGNORE, reduction="none")
    exact = losses.sum() if each is None else (losses * each).sum()
    expected = torch.autograd.grad(exact, [exact_rows, exact_weight])
    assert distance(loss.detach(), exact.detach()) <= 1e-6
    assert distance(found, expected) <= 1e-6


def test_rows_to_ignore_count_for_nothing() -> None:
    trainee = trainee_of()
    without = batch_of(DOCUMENTS, labels_from=3)
    with_fill, fewer = (measured(trainee, lambda b=b: trainee(b)[0]) for b in (BATCH, without))  # type: ignore[misc]
    assert trainee(BATCH)[1] == trainee(without)[1] == 17
    assert with_fill[0] == pytest.approx(fewer[0], rel=1e-6)
    assert distance(with_fill[1], fewer[1]) <= 1e-6


@pytest.mark.parametrize("adapter", [None, lora()], ids=["full", "lora"])
@pytest.mark.parametrize("fill", [0, 4])
def test_a_batch_without_labels_gives_zeros_that_can_go_backward(adapter: Any, fill: int) -> None:
    """Under data parallelism a rank without labels must still take part in the reduction."""
    trainee = trainee_of("llama", adapter)
    loss, count = trainee(batch_of(DOCUMENTS, labels_from=99, fill=fill))
    assert (float(loss.detach()), count) == (0.0, 0)
    loss.backward()
    found = {name: p.grad for name, p in trainee.trained().items()}
    assert all(g is not None and not g.any() for g in found.values()), [
        n for n, g in found.items() if g is None
    ]


def test_logits_live_only_for_a_chunk() -> None:
    trainee = chunked(trainee_of(), 7)
    sizes: list[int] = []

    def note(_module: nn.Module, _args: Any, out: Tensor) -> None:
        sizes.append(out.shape[-2])

    with trainee.language_model.lm_head.register_forward_hook(note):
        trainee(BATCH)
    assert sizes == [7, 7, 7]


def test_the_logits_of_a_chunk_are_gone_before_the_next() -> None:
    trainee = chunked(trainee_of(), 7)
    made: list[StorageWeakRef] = []
    alive: list[int] = []

    def note(_module: nn.Module, _args: Any, out: Tensor) -> None:
        alive.append(sum(not earlier.expired() for earlier in made))
        made.append(StorageWeakRef(out.untyped_storage()))

    with trainee.language_model.lm_head.register_forward_hook(note):
        loss, _ = trainee(BATCH)
    assert alive == [0, 0, 0]
    assert all(logits.expired() for logits in made)
    assert loss.requires_grad


def test_chunks_are_bounded_in_bytes_and_not_too_small() -> None:
    assert chunk_rows(1000) * 1000 * 4 * 3 <= 256 << 20
    assert chunk_rows(1000) > 512
    assert chunk_rows(1_000_000) == 512


@pytest.mark.parametrize("adapter", [None, lora()], ids=["full", "lora"])
def test_evaluation_gives_the_loss_of_training(adapter: Any) -> None:
    trainee = trainee_of("llama", adapter)
    training = float(trainee(BATCH)[0].detach())
    trainee.eval()
    with torch.no_grad():
        loss, _ = trainee(BATCH)
    assert not loss.requires_grad
    assert float(loss) == training


@pytest.mark.parametrize(
    ("precision", "tolerance", "adapter"), [("bf16", 2e-2, None), ("fp16", 3e-3, lora())]
)
def test_half_precision_stays_near(precision: str, tolerance: float, adapter: Any) -> None:
    in_full = trainee_of("llama", adapter)
    exact = float(in_full(BATCH)[0].detach())
    trainee = chunked(trainee_of("llama", adapter, precision), 7)  # several chunks share autocast's casts
    trainee.load_state_dict(in_full.state_dict())  # not every torch draws the same numbers in every dtype
    loss, found = measured(trainee, lambda: trainee(BATCH)[0])
    assert loss == pytest.approx(exact, rel=tolerance)
    expected_loss, expected = measured(trainee, lambda: plain_loss(trainee, BATCH))
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert distance(found, expected) <= 3 * tolerance
    assert {p.dtype for p in trainee.trained().values()} == {torch.float32}


def test_a_trained_head_in_fp16_has_a_gradient_that_a_scale_can_save() -> None:
    """Its sum over rows passes 65504 before any scale; in float16 every step would be skipped, at any scale."""
    head = nn.Linear(4, VOCABULARY, bias=False)
    rows = torch.full((400, 4), 300.0, dtype=torch.float16)
    targets = torch.zeros(400, dtype=torch.long)
    with torch.no_grad():
        head.weight.zero_()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = token_loss_sum(head, rows, targets, list(head.parameters()), 512)
        (plain,) = torch.autograd.grad(
            F.cross_entropy(head(rows).float(), targets, reduction="sum"), [head.weight]
        )
    assert not plain.isfinite().all(), "the danger is real"
    (loss * 65536 / 400).backward()
    assert head.weight.grad is not None
    expected = -300.0 * (1 - 1 / VOCABULARY) * 65536
    assert head.weight.grad[0].tolist() == pytest.approx([expected] * 4, rel=1e-3)


def test_a_scaled_loss_does_not_overflow_the_rows_in_fp16() -> None:
    trainee = trainee_of("llama", lora(), "fp16")
    loss, count = trainee(BATCH)
    (loss * 65536 / count).backward()
    scaled = gradients(trainee)
    assert all(g.isfinite().all() for g in scaled.values())
    _, plain = measured(trainee, lambda: trainee(BATCH)[0] / count)
    assert distance({n: g / 65536 for n, g in scaled.items()}, plain) <= 1e-2


def test_the_backbone_is_itself_again_after_the_head_ran() -> None:
    lm = built("llama")
    backbone = lm.model
    own_head(lm)(torch.zeros(2, WIDTH))
    assert lm.model is backbone
    assert "model" not in lm.__dict__
    with pytest.raises(RuntimeError):
        own_head(lm)(torch.zeros(2, WIDTH + 1))
    assert lm.model is backbone


@pytest.mark.parametrize("kind", [*ALL_KINDS, "opt"])
def test_the_head_is_the_models_own(kind: str) -> None:
    trainee = trainee_of(kind)
    trainee.train()
    trainee.check_head(BATCH)
    assert trainee.training


def test_a_head_that_differs_is_refused() -> None:
    trainee = trainee_of("llama")
    lm = trainee.language_model
    kind = type(lm)

    class Twisted(kind):  # type: ignore[misc, valid-type]
        """Its logits depend on more than the hidden states."""

        def forward(self, input_ids: Tensor | None = None, **others: Any) -> Any:
            out = super().forward(input_ids, **others)
            if input_ids is not None:
                out.logits = out.logits * 1.01
            return out

    lm.__class__ = Twisted
    with pytest.raises(
        EnvironmentProblem, match=r"kind llama computes its logits in .* \(relative difference 9\.9e-03\)"
    ):
        trainee.check_head(BATCH)


@pytest.mark.parametrize(("chunk", "kind"), taking_turns((1, 7, 10_000), ("llama", "gemma2")))
def test_scores_are_those_of_all_logits(kind: str, chunk: int) -> None:
    trainee = chunked(trainee_of(kind), chunk).eval()
    with torch.no_grad():
        lm = trainee.language_model
        out = lm(input_ids=BATCH.ids, position_ids=BATCH.positions, use_cache=False)
    logits = out.logits.flatten(0, 1)[BATCH.label_rows]
    targets = BATCH.targets.clone()
    targets[::3] = logits.argmax(-1)[::3]  # random weights would hit next to nothing
    targets[BATCH.targets == IGNORE] = IGNORE
    expected = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
    losses, chosen = trainee.scores(replace(BATCH, targets=targets))
    hits = chosen == targets
    assert losses.tolist() == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-6)
    assert hits.tolist() == (logits.argmax(-1) == targets).tolist()
    assert hits.any()
    assert not hits[targets == IGNORE].any()
    assert not losses[targets == IGNORE].any()


@pytest.mark.parametrize(("precision", "adapter"), taking_turns(("fp32", "bf16", "fp16"), (lora(), None)))
def test_scores_add_up_to_the_loss_of_training(adapter: Any, precision: str) -> None:
    """Also where a trained head leaves float16."""
    trainee = chunked(trainee_of("llama", adapter, precision), 7)
    losses, _ = trainee.scores(BATCH)
    assert not losses.requires_grad
    assert float(losses.double().sum()) == pytest.approx(float(trainee(BATCH)[0].detach()), rel=1e-6)


def test_the_logits_of_a_scored_chunk_are_gone_before_the_next() -> None:
    trainee = chunked(trainee_of(), 7)
    made: list[StorageWeakRef] = []
    alive: list[int] = []

    def note(_module: nn.Module, _args: Any, out: Tensor) -> None:
        alive.append(sum(not earlier.expired() for earlier in made))
        made.append(StorageWeakRef(out.untyped_storage()))

    with trainee.language_model.lm_head.register_forward_hook(note):
        trainee.scores(BATCH)
    assert alive == [0, 0, 0]
