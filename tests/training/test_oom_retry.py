"""Out of memory: the same gradient in smaller parts, no row lost, and a message where that does not help."""

import gc
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.batch import IGNORE, Batch
from app.data.collate import Layout, Packed, Padded
from app.data.loader import Loader, eval_batches
from app.data.prepare import Data
from app.distributed.process_group import Runtime
from app.errors import EnvironmentProblem
from app.oom_retry import RetryOnRestart, explain_out_of_memory, few_rows, halve, split_batch, try_or_none
from app.tasks.table import counts_of
from app.training.scores import score
from app.training.train_step import Stepper
from tests.harness.scarcity import scarce
from tests.training.conftest import small_run, stepper_of, trainee_of
from tests.training.test_train_step import gradients, relative

TOKENS = 256


@pytest.fixture
def batches(
    request: pytest.FixtureRequest, loader_of: Callable[..., Loader], packed_loader_of: Callable[..., Loader]
) -> list[Batch]:
    """Packed ones, unless a test asks for `padded`."""
    is_padded = getattr(request, "param", "packed") == "padded"
    return (loader_of(8, 2) if is_padded else packed_loader_of(TOKENS, 2)).batches(0)


packed_and_padded = pytest.mark.parametrize("batches", ["packed", "padded"], indirect=True)


def stepper_for(*overrides: str, runtime: Runtime) -> Stepper:
    """Return a stepper whose adapter has a random B: at the start B is zero, and the gradient of A with it."""
    stepper = stepper_of(small_run(*overrides), runtime)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in stepper.model.trained().items():
        if ".lora_B." in name:
            parameter.data = 0.02 * torch.randn(parameter.shape, generator=generator)
    return stepper


def total(stepper: Stepper, batches: list[Batch]) -> tuple[float, list[torch.Tensor]]:
    """The loss sum and the gradient."""
    result = stepper.run(batches, lr=0.0)
    return float(result.loss_sum), gradients(stepper)


def scanty(batches: list[Batch]) -> int:
    """Tokens that hold half of a batch and not all of it."""
    return int(0.8 * min(batch.ids.numel() for batch in batches))


@packed_and_padded
def test_split_parts_keep_all_documents_and_labels(batches: list[Batch]) -> None:
    for batch in batches:
        for depth in (0, 1, 2, 12):
            parts = split_batch(batch, depth)
            assert tuple(n for part in parts for n in part.lengths) == batch.lengths
            assert sum(part.num_labels for part in parts) == batch.num_labels
            assert sum(part.num_tokens for part in parts) == batch.num_tokens
        documents = split_batch(batch, depth=12)
        assert [halve(part) for part in documents] == [[]] * len(batch.lengths)
        first, second = halve(batch)
        assert max(first.ids.numel(), second.ids.numel()) <= 0.75 * batch.ids.numel()


@packed_and_padded
def test_few_rows_are_first_ones_with_a_label(batches: list[Batch]) -> None:
    whole = batches[0]
    few = few_rows(whole, 4)
    assert few.lengths == whole.lengths[:4]
    assert few.num_labels > 0
    assert few_rows(few, 4) is few
    targets = whole.targets.clone()
    later = replace(whole, num_labels=0, targets=targets.fill_(IGNORE))
    assert few_rows(later, 4).lengths == whole.lengths[:4]


@packed_and_padded
def test_split_parts_give_the_same_gradient(batches: list[Batch], runtime: Runtime) -> None:
    stepper = stepper_for("recipe=lora", runtime=runtime)
    expected = total(stepper, batches)
    for depth, allowed in ((1, 1e-6), (3, 1e-6), (12, 5e-6)):  # at last each document by itself
        stepper.split_depth = depth
        loss, gradient = total(stepper, batches)
        assert loss == pytest.approx(expected[0], rel=1e-6)
        assert relative(gradient, expected[1]) <= allowed


@pytest.mark.parametrize(
    ("where", "recipe", "batches"),
    [
        ("forward", "full", "padded"),
        ("forward", "lora", "packed"),
        ("backward", "lora", "padded"),
        ("recomputed", "full", "packed"),
    ],
    indirect=["batches"],
)
def test_step_out_of_memory_is_repeated_in_parts(
    where: str, recipe: str, batches: list[Batch], runtime: Runtime
) -> None:
    """The second micro-batch runs out of memory, when the first one has left its gradient."""
    run = (f"recipe={recipe}", f"training.recompute={str(where == 'recomputed').lower()}")
    stepper = stepper_for(*run, runtime=runtime)
    expected = total(stepper, batches)
    layers, per_batch = 2, 2 if where == "recomputed" else 1
    with scarce(where, tokens=scanty(batches), calls=layers * per_batch) as memory:
        loss, gradient = total(stepper, batches)
        total(stepper, batches)
    assert 1 <= memory.times == stepper.split_depth <= 2, "a later step begins split"
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert relative(gradient, expected[1]) <= 1e-6


def test_sharded_evaluation_out_of_memory_asks_for_a_restart(data: Data, runtime: Runtime) -> None:
    """With smaller parts, if there are any: else it would begin again for ever."""
    assert data.eval is not None
    model = trainee_of(small_run("recipe=lora"))
    model.sharding = SimpleNamespace(at_rest=lambda: None)
    batches = list(eval_batches(data.eval, Padded(4, pad_id=0)))
    with scarce("forward", tokens=batches[0].ids.numel() - 1), pytest.raises(RetryOnRestart) as fault:
        score(model, batches, runtime, counts_of(small_run()), depth=0)
    assert fault.value.depth == 1
    with scarce("forward", tokens=3), pytest.raises(EnvironmentProblem, match=r"a single document of .* tokens"):
        score(model, batches, runtime, counts_of(small_run()), depth=12)


def test_try_or_none_frees_memory(batches: list[Batch], runtime: Runtime) -> None:
    """Parts are made when nothing of the failed attempt is alive."""
    stepper = stepper_for("recipe=lora", runtime=runtime)
    seen: list[int] = []
    forward = stepper.model.forward

    def counting(batch: Batch) -> Any:
        seen.append(sum(1 for tensor in _alive() if tensor.grad_fn is not None and tensor.numel() > 1))
        return forward(batch)

    stepper.model.forward = counting  # type: ignore[method-assign]
    gc.collect()  # what other tests have left would go in between
    with scarce("backward", tokens=scanty(batches), calls=2) as memory:
        stepper.run(batches, lr=0.0)
    assert memory.times
    assert len(seen) > 4
    assert set(seen) == {seen[0]}, "others may have left some"


def _alive() -> list[torch.Tensor]:
    return [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]


def test_single_document_out_of_memory_is_an_error(batches: list[Batch], runtime: Runtime) -> None:
    stepper = stepper_for("recipe=lora", runtime=runtime)
    with scarce("forward", tokens=4) as memory, pytest.raises(EnvironmentProblem) as refusal:
        stepper.run(batches, lr=0.0)
    assert 2 <= memory.times <= 10, "bounded"
    message = str(refusal.value)
    assert re.match(r"out of memory: a single document of \d+ tokens does not fit", message)
    for words in ("frozen weights 0.00 GB", "training.recompute=true", "dataset.max_length", "recipe=qlora"):
        assert words in message


def test_optimizer_out_of_memory_is_an_error(
    batches: list[Batch], runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepper = stepper_for("recipe=lora", runtime=runtime)

    def step(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(stepper.optimizer, "step", step)
    with pytest.raises(EnvironmentProblem, match="out of memory: the optimizer step does not fit"):
        stepper.run(batches, lr=0.0)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_evaluation_in_parts_gives_the_same_scores(layout: str, data: Data, runtime: Runtime) -> None:
    model = trainee_of(small_run("recipe=lora"))
    shape: Layout = Packed(TOKENS, 0, TOKENS) if layout == "packed" else Padded(8, 0)
    rows = data.eval
    assert rows is not None

    def scored() -> Any:
        return score(model, eval_batches(rows, shape, 1, 0), runtime, counts_of(small_run()))

    expected = scored()
    with scarce("forward", tokens=60) as memory:
        metrics = scored()
    assert memory.times > 1
    assert metrics == pytest.approx(expected, rel=1e-6)
    assert (metrics["token_accuracy"], metrics["exact_match"]) == (expected["token_accuracy"], expected["exact_match"])


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "Triton Error [CUDA]: out of memory",
    ],
)
def test_other_errors_that_mean_out_of_memory(words: str) -> None:
    def work() -> None:
        raise RuntimeError(words)

    assert try_or_none(work) is None
    with (
        pytest.raises(EnvironmentProblem, match="out of memory: memory needed outside of training steps"),
        explain_out_of_memory(),
    ):
        work()


def test_memory_that_the_host_has_not_is_out_of_memory() -> None:
    assert try_or_none(torch.empty, 1 << 55) is None


def test_errors_of_another_kind_are_raised() -> None:
    def work() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        try_or_none(work)
    with pytest.raises(RuntimeError, match="illegal memory access"), explain_out_of_memory():
        work()
