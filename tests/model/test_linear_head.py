"""The way of a head that is one linear layer, and how it is told from others."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from app.batch import IGNORE, Weights
from app.engine.counting import StorageCounter
from app.model import head_proof, linear_head
from app.model.head import token_loss_sum, token_scores
from app.model.head_proof import settle_head
from app.model.kernels import as_on_gpu
from app.model.kernels.loss import spend as spend_logits
from app.model.linear_head import LinearHead, rows_of_a_chunk
from tests.choices import pairwise, taking_turns
from tests.model.small import ALL_KINDS, KINDS, VOCABULARY, batch_of, distance, documents_of, lora, trainee_of
from tests.model.test_head import BATCH, check_against_plain

MORE_THAN_LINEAR = {"gemma2", "granite", "cohere2", "bert", "roberta", "modernbert"}


def layer_of(hidden: int, vocabulary: int, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(hidden, vocabulary, bias=bias)


def rows_for(layer: nn.Linear, count: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = 3 * torch.randn(count, layer.in_features, generator=generator)
    targets = torch.randint(layer.out_features, (count,), generator=generator)
    targets[::5] = IGNORE
    return rows.requires_grad_(), targets, 10 ** torch.randn(count, generator=generator)


@pytest.mark.parametrize(("chunk", "bias", "weighted"), pairwise([4, None], [False, True], [False, True]))
def test_equals_float64_arithmetic(chunk: int | None, *, bias: bool, weighted: bool) -> None:
    layer = layer_of(32, VOCABULARY, bias=bias)
    rows, targets, weights = rows_for(layer, 23)
    leaves = [rows, *layer.parameters()]
    loss = LinearHead(layer, chunk=chunk).loss_sum(rows, targets, weights if weighted else None)
    found = torch.autograd.grad(loss, leaves)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    losses = F.cross_entropy(F.linear(*exact), targets, ignore_index=IGNORE, reduction="none")
    wanted = (losses * weights if weighted else losses).sum()
    assert distance(loss.detach(), wanted.detach()) <= 1e-6
    assert distance(found, torch.autograd.grad(wanted, exact)) <= 1e-6


@pytest.mark.parametrize(("kind", "adapter"), taking_turns(ALL_KINDS, (None, lora())))
def test_every_kind_gets_what_it_is(kind: str, adapter: Any) -> None:
    trainee = trainee_of(kind, adapter)
    before = [p.detach().clone() for p in trainee.parameters()]
    proofs = settle_head(trainee, BATCH)
    assert (trainee.linear is None) == (kind in MORE_THAN_LINEAR)
    assert len(proofs) == (trainee.linear is not None)
    assert all(proof.holds for proof in proofs)
    assert trainee.remarks() == []
    assert trainee.training
    assert all(torch.equal(p, old) for p, old in zip(trainee.parameters(), before, strict=True))
    assert all(p.grad is None for p in trainee.parameters())
    if kind in KINDS:
        check_against_plain(trainee)


def test_labels_of_different_weight_are_proven_so() -> None:
    trainee = trainee_of("llama")
    each = torch.linspace(0.1, 2.0, len(BATCH.targets))
    batch = replace(BATCH, weights=Weights(each, float(each.sum())))
    general = trainee(batch)[0]
    assert settle_head(trainee, batch)[0].holds
    assert float(trainee(batch)[0].detach()) == pytest.approx(float(general.detach()), rel=1e-6)


@pytest.mark.parametrize("kind", ["gemma2", "granite"])
def test_the_proof_refuses_what_only_looks_linear(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soft-capping leaves small logits nearly as they are, so they are tried large too."""
    trainee = trainee_of(kind)
    lm = trainee.language_model
    with torch.no_grad():
        lm.get_output_embeddings().weight.mul_(1e-3)
    monkeypatch.setattr(head_proof, "linear_head", lambda _lm: LinearHead(lm.get_output_embeddings()))
    assert settle_head(trainee, BATCH) == []
    assert trainee.linear is None
    assert "the model's own way is taken" in trainee.remarks()[0]


@pytest.mark.parametrize("fault", ["raises", "differs"])
def test_a_kernel_that_fails_is_replaced_by_plain_torch(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = spend_logits

    def spend(logits: Tensor, *others: Any, kernel: bool, **given: Any) -> Tensor:
        if kernel and fault == "raises":
            raise RuntimeError("Failed to find C compiler.\nmore")
        return real(logits, *others, kernel=kernel, **given) * (1.01 if kernel else 1)

    monkeypatch.setattr(linear_head, "spend", spend)
    trainee = trainee_of("llama", lora())
    with as_on_gpu():
        (proof,) = settle_head(trainee, BATCH)
    assert proof.holds
    assert trainee.linear is not None
    assert not trainee.linear.kernel
    (remark,) = trainee.remarks()
    assert remark.startswith("loss head: its plain arithmetic is taken for the faster one: ")
    assert ("Failed to find C compiler." if fault == "raises" else "differs by 1.0e-02") in remark


def test_gradients_that_are_no_numbers_are_seen_beside_a_right_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_head, "_scaled", lambda gradient, *_: gradient * float("nan"))
    trainee = trainee_of("llama", lora())
    assert settle_head(trainee, BATCH) == []
    assert "the model's own way is taken" in trainee.remarks()[0]


@pytest.mark.parametrize(("precision", "adapter"), taking_turns(("fp32", "bf16", "fp16"), (None, lora())))
def test_is_as_near_to_the_general_way_in_every_precision(precision: str, adapter: Any) -> None:
    trainee = trainee_of("qwen2", adapter, precision)
    assert settle_head(trainee, BATCH)[0].holds
    assert trainee.linear is not None
    losses, chosen = trainee.scores(BATCH)
    loss = trainee(BATCH)[0]
    assert float(losses.double().sum()) == pytest.approx(float(loss.detach()), rel=1e-6)
    trainee.linear = None
    others, others_chosen = trainee.scores(BATCH)
    torch.testing.assert_close(losses, others, rtol=2e-3 if precision != "fp32" else 1e-6, atol=1e-5)
    assert torch.equal(chosen, others_chosen)


def test_a_trained_head_in_fp16_has_a_gradient_that_a_scale_can_save() -> None:
    """As the general way: it leaves float16 for it."""
    layer = layer_of(4, VOCABULARY)
    rows = torch.full((400, 4), 300.0, dtype=torch.float16)
    targets = torch.zeros(400, dtype=torch.long)
    with torch.no_grad():
        layer.weight.zero_()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = LinearHead(layer).loss_sum(rows, targets)
    (loss * 65536 / 400).backward()
    assert layer.weight.grad is not None
    expected = -300.0 * (1 - 1 / VOCABULARY) * 65536
    assert layer.weight.grad[0].tolist() == pytest.approx([expected] * 4, rel=1e-3)


def test_a_weight_in_bf16_gets_the_sum_of_its_chunks_rounded_once() -> None:
    exact = layer_of(32, VOCABULARY)
    layer = layer_of(32, VOCABULARY).bfloat16()
    with torch.no_grad():
        exact.weight.copy_(layer.weight)
    rows, targets, _ = rows_for(exact, 4000)
    rounded = rows.detach().bfloat16().requires_grad_()
    loss = LinearHead(layer, chunk=40).loss_sum(rounded, targets)
    (found,) = torch.autograd.grad(loss, [layer.weight])
    wide = rounded.detach().double()
    wanted = F.cross_entropy(wide @ exact.weight.double().T, targets, ignore_index=IGNORE, reduction="sum")
    (gradient,) = torch.autograd.grad(wanted, [exact.weight])
    assert found.dtype == torch.bfloat16
    assert distance(found.double(), gradient.double()) <= 6e-3


def test_a_batch_without_labels_gives_zeros_that_can_go_backward() -> None:
    trainee = trainee_of("llama")
    settle_head(trainee, BATCH)
    loss, count = trainee(batch_of(documents_of((12, 5)), labels_from=99))
    loss.backward()
    assert (float(loss.detach()), count) == (0.0, 0)
    assert all(p.grad is not None and not p.grad.any() for p in trainee.trained().values())


def test_it_goes_backward_once() -> None:
    layer = layer_of(8, 16)
    rows, targets, _ = rows_for(layer, 6)
    loss = LinearHead(layer).loss_sum(rows, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward once"):
        loss.backward()


@contextmanager
def counted(*given: Tensor) -> Iterator[StorageCounter]:
    counter = StorageCounter("cpu")
    counter.ignore(given)
    with counter:
        yield counter


@pytest.mark.parametrize("trained", [False, True])
def test_takes_less_memory_than_the_general_way(*, trained: bool) -> None:
    layer = layer_of(64, 4096).requires_grad_(trained)
    parameters = list(layer.parameters()) if trained else []
    rows, targets, _ = rows_for(layer, 512)

    def peak(loss_of: Callable[[], Tensor]) -> int:
        with counted(rows, targets, layer.weight) as counter:
            torch.autograd.grad(loss_of(), [rows, *parameters])
        return counter.peak

    ours = peak(lambda: LinearHead(layer, chunk=256).loss_sum(rows, targets))
    general = peak(lambda: token_loss_sum(layer, rows, targets, parameters, 256))
    logits = 4 * 256 * 4096
    own = 4 * (2 * rows.numel() + layer.weight.numel() * trained)
    assert ours <= logits + own + (64 << 10)
    assert general > 2 * logits
    with counted(rows, targets, layer.weight) as scored:
        LinearHead(layer, chunk=256).scores(rows, targets)
    with counted(rows, targets, layer.weight) as generally:
        token_scores(layer, rows, targets, parameters, 256)
    assert scored.peak <= generally.peak


@pytest.mark.parametrize(("rows", "vocabulary"), taking_turns((1, 512, 4097, 6528), (1000, 128256)))
def test_chunks_are_alike_and_bounded(vocabulary: int, rows: int) -> None:
    size = rows_of_a_chunk(rows, vocabulary, 2)
    chunks = -(-rows // size)
    assert size <= 4096
    assert size * vocabulary * 2 <= 512 << 20
    assert chunks * size - rows < chunks
    assert rows_of_a_chunk(0, vocabulary, 2) == 1
    assert rows_of_a_chunk(9000, 10_000_000, 4) == 500, "512 at most where even those are large"
