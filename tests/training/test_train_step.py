"""The gradient and the loss of a step do not depend on how its rows are split, and are those of the plain formula."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from peft.optimizers import create_loraplus_optimizer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from app.data.loader import Loader
from app.distributed.gradient_reduction import GradientReduction
from app.distributed.process_group import Runtime
from app.model.training_model import TrainingModel
from app.optim.optimizers import LossScale
from app.training.train_step import Stepper
from tests.training.conftest import small_run, stepper_of, trainee_of

RECIPES = ["full", "lora", "qlora"]


def gradients(stepper: Stepper) -> list[Tensor]:
    return [p.grad.clone() for p in stepper.model.trained().values() if p.grad is not None]


def relative(left: list[Tensor], right: list[Tensor]) -> float:
    assert len(left) == len(right) > 0
    difference = torch.nn.utils.get_total_norm([a - b for a, b in zip(left, right, strict=True)])
    return float(difference / torch.nn.utils.get_total_norm(right))


def warm(stepper: Stepper, loader: Loader) -> Stepper:
    """One step first: at the start every lora_B is zero, and half of the gradients with it."""
    stepper.run(loader.batches(1), 1e-2)
    return stepper


def plain_loss(model: TrainingModel, loader: Loader, step: int) -> Tensor:
    """The mean over all trained tokens, from the full logits of one row at a time, written out."""
    losses = []
    for batch in loader.batches(step):
        for r in range(batch.ids.shape[0]):
            width = batch.ids.shape[1]
            mine = (batch.label_rows >= r * width) & (batch.label_rows < (r + 1) * width)
            at, targets = batch.label_rows[mine] - r * width, batch.targets[mine]
            logits = model.language_model(batch.ids[r : r + 1, : batch.lengths[r]]).logits[0]
            losses.append(F.cross_entropy(logits[at].double(), targets, reduction="none"))
    return torch.cat(losses).mean()


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradient_does_not_depend_on_micro_batches(
    recipe: str, runtime: Runtime, loader_of: Callable[..., Loader]
) -> None:
    run = small_run(f"recipe={recipe}", "training.clip=0")
    found = {}
    for rows, micro in ((8, 1), (4, 2), (2, 4), (1, 8)):
        loader = loader_of(rows, micro)
        stepper = stepper_of(run, runtime)
        losses = []
        for step in range(3):
            result = stepper.run(loader.batches(step), 1e-3)
            losses.append(float(result.loss_sum) / result.labels)
        found[rows, micro] = gradients(stepper), losses
    reference, reference_losses = found[8, 1]
    for grads, losses in found.values():
        assert relative(grads, reference) <= 1e-6
        assert losses == pytest.approx(reference_losses, rel=1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_loss_and_gradient_equal_the_formula(recipe: str, runtime: Runtime, loader_of: Callable[..., Loader]) -> None:
    run = small_run(f"recipe={recipe}", "training.clip=0")
    loader = loader_of(4, 2)
    ours, theirs = warm(stepper_of(run, runtime), loader), warm(stepper_of(run, runtime), loader)
    result = ours.run(loader.batches(0), 0.0)

    theirs.optimizer.zero_grad()
    loss = plain_loss(theirs.model, loader, 0)
    loss.backward()
    assert float(result.loss_sum) / result.labels == pytest.approx(float(loss.detach()), rel=1e-6)
    assert relative(gradients(ours), gradients(theirs)) <= 1e-6


def test_clipping_reports_the_unclipped_norm(runtime: Runtime, loader_of: Callable[..., Loader]) -> None:
    loader = loader_of(8, 1)
    free = stepper_of(small_run("recipe=full", "training.clip=0"), runtime)
    tight = stepper_of(small_run("recipe=full", "training.clip=0.01"), runtime)
    results = [stepper.run(loader.batches(0), 0.0) for stepper in (free, tight)]
    assert float(results[0].grad_norm) == pytest.approx(float(results[1].grad_norm))
    assert float(results[0].grad_norm) > 0.1
    assert float(torch.nn.utils.get_total_norm(gradients(tight))) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon", "adamw_8bit"])
def test_nonfinite_gradient_skips_the_step(optimizer: str, runtime: Runtime, loader_of: Callable[..., Loader]) -> None:
    run = small_run("recipe=full", f"optimizer={optimizer}")
    loader = loader_of(8, 1)
    stepper, untouched = (warm(stepper_of(run, runtime), loader) for _ in range(2))
    hook = next(iter(stepper.model.trained().values())).register_hook(lambda g: g * float("nan"))
    result = stepper.run(loader.batches(2), 1e-3)
    hook.remove()
    assert bool(result.skipped)
    for each in (stepper, untouched):
        assert not bool(each.run(loader.batches(3), 1e-3).skipped)
    pairs = zip(stepper.model.trained().values(), untouched.model.trained().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_fp16_scaled_gradient_equals_fp32(runtime: Runtime, loader_of: Callable[..., Loader]) -> None:
    loader = loader_of(2, 1)
    half = stepper_of(small_run("recipe=full", "precision=fp16", "training.clip=0"), runtime)
    exact = stepper_of(small_run("recipe=full", "training.clip=0"), runtime)
    assert half.scale is not None
    assert half.scale.value > 1
    results = [stepper.run(loader.batches(0), 0.0) for stepper in (half, exact)]
    assert not bool(results[0].skipped)
    difference = relative(gradients(half), gradients(exact))
    assert difference < 0.02
    assert difference > 0, "fp16 computed in fp32"


def test_fp16_overflow_lowers_the_scale_and_skips(runtime: Runtime, loader_of: Callable[..., Loader]) -> None:
    stepper = stepper_of(small_run("recipe=full", "precision=fp16"), runtime)
    assert stepper.scale is not None
    before = [p.clone() for p in stepper.model.trained().values()]
    hook = next(iter(stepper.model.trained().values())).register_hook(lambda g: g * float("inf"))
    assert bool(stepper.run(loader_of(2, 1).batches(0), 1e-3).skipped)
    hook.remove()
    assert stepper.scale.value == 2.0**15
    assert all(torch.equal(a, b) for a, b in zip(before, stepper.model.trained().values(), strict=True))


def test_fp16_gradients_of_offloaded_shards_are_scaled_on_the_host() -> None:
    stepper = Stepper.__new__(Stepper)
    with FakeTensorMode():
        device = torch.device("cuda")
        stepper.optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], fused=True)
        stepper.scale, stepper._clip, stepper._skips_on_device = LossScale(device), 1.0, True
        stepper._runtime, stepper._reduction = SimpleNamespace(device=device), GradientReduction([])  # type: ignore[assignment]
        norm, skipped = stepper._update([torch.ones(2)])
        assert norm.device == skipped.device == torch.device("cpu"), "a factor on the GPU would multiply none of them"


def test_lr_ratio_trains_as_lora_plus_of_peft(runtime: Runtime, loader_of: Callable[..., Loader]) -> None:
    loader = loader_of(64, 1)
    run = small_run("recipe=lora", "adapter.lr_ratio=16", "training.clip=0", "optimizer.weight_decay=0.01")
    stepper, model = stepper_of(run, runtime), trainee_of(run)
    theirs = create_loraplus_optimizer(
        model.network, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16, loraplus_weight_decay=0.01
    )
    for step in range(3):
        stepper.run(loader.batches(step), 1e-3)
        theirs.zero_grad()
        plain_loss(model, loader, step).backward()
        theirs.step()
    assert {group["lr"] for group in stepper.optimizer.param_groups} == {1e-3, 16e-3}
    plain = model.trained()
    assert all(relative([each], [plain[name]]) <= 1e-5 for name, each in stepper.model.trained().items())


@pytest.mark.parametrize(("recipe", "tokens"), [("full", 64), ("lora", 256), ("qlora", 64)])
def test_packed_gradient_equals_padded(
    recipe: str,
    tokens: int,
    runtime: Runtime,
    loader_of: Callable[..., Loader],
    packed_loader_of: Callable[..., Loader],
) -> None:
    """All rows in one step, once padded and once packed: nothing leaks from one document into the next."""
    run = small_run(f"recipe={recipe}", "training.clip=0")
    padded = loader_of(64, 1)
    packed = packed_loader_of(tokens, packed_loader_of(tokens, 1).num_units)
    assert padded.steps_per_epoch == packed.steps_per_epoch == 1
    found = []
    for loader in (padded, packed):
        stepper = warm(stepper_of(run, runtime), padded)
        result = stepper.run(loader.batches(0), 0.0)
        found.append((gradients(stepper), float(result.loss_sum) / result.labels, result.tokens))
    assert relative(found[1][0], found[0][0]) <= 1e-6
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-6)
    assert found[1][2] == found[0][2]
