"""Weights stepped during the backward pass: the same numbers as after it, without gradients; and what goes wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from app.data.loader import Loader
from app.distributed.process_group import Runtime
from app.errors import ConfigError, EnvironmentProblem
from app.training.storage_counter import kept_bytes
from app.training.train_step import Stepper, require_gradients_one_by_one
from tests.harness.scarcity import scarce
from tests.training.conftest import small_run, stepper_of

FULL = ("recipe=full", "training.clip=0", "training.recompute=1")
BF16 = ("precision=bf16", "precision.trained=bf16")
AS_THEY_COME = "optimizer.in_backward=true"


def weights(stepper: Stepper) -> list[Tensor]:
    return [p.detach().clone() for p in stepper.model.trained().values()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def norms(stepper: Stepper, loader: Loader, steps: range) -> list[float]:
    return [float(stepper.run(loader.batches(step), 1e-3).grad_norm) for step in steps]


@pytest.mark.parametrize(("optimizer", "words"), [("adamw", BF16), ("adamw_8bit", ()), ("muon", BF16)], ids=str)
def test_in_backward_gives_the_same_weights(
    optimizer: str, words: tuple[str, ...], runtime: Runtime, loader_of: Callable[..., Loader]
) -> None:
    """To the last bit: also of a head tied to the embedding, which has its gradient from two places."""
    tied = "model.architecture.tie_word_embeddings=true"
    run = (*FULL, *words, tied, f"optimizer={optimizer}")
    loader = loader_of(4, 1)
    after, within = (stepper_of(small_run(*run, *more), runtime) for more in ((), (AS_THEY_COME,)))
    assert norms(within, loader, range(3)) == norms(after, loader, range(3))
    assert same(weights(within), weights(after))
    assert {p.dtype for p in weights(within)} == {torch.bfloat16 if words else torch.float32}
    assert all(p.grad is None for p in within.model.parameters())
    assert kept_bytes(within.model, within.optimizer)["gradients"] == 0


def test_in_backward_holds_two_gradients_at_most(runtime: Runtime, loader_of: Callable[..., Loader]) -> None:
    stepper = stepper_of(small_run(*FULL, AS_THEY_COME), runtime)
    parameters = list(stepper.model.trained().values())
    alive = []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in parameters))
        )
    stepper.run(loader_of(4, 1).batches(0), 1e-3)
    assert len(alive) == len(parameters) > 10
    assert max(alive) <= 2


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_in_backward_skips_only_nonfinite_parameters(
    optimizer: str, runtime: Runtime, loader_of: Callable[..., Loader]
) -> None:
    loader = loader_of(4, 1)
    stepper = stepper_of(small_run(*FULL, *BF16, AS_THEY_COME, f"optimizer={optimizer}"), runtime)
    norms(stepper, loader, range(1))
    before = weights(stepper)
    at, victim = next((i, p) for i, p in enumerate(stepper.model.trained().values()) if p.ndim == 2)
    hook = victim.register_hook(lambda g: g * float("nan"))
    result = stepper.run(loader.batches(1), 1e-3)
    hook.remove()
    assert bool(result.skipped)
    assert not result.grad_norm.isfinite()
    changed = [not torch.equal(a, b) for a, b in zip(weights(stepper), before, strict=True)]
    assert not changed[at]
    assert sum(changed) == len(changed) - 1
    assert not bool(stepper.run(loader.batches(2), 1e-3).skipped)
    assert not torch.equal(weights(stepper)[at], before[at])


def test_in_backward_retries_a_forward_pass_in_parts(runtime: Runtime, loader_of: Callable[..., Loader]) -> None:
    """Nothing has changed by then; the gradients of the parts add up, and the last one makes the steps."""
    loader = loader_of(8, 1)
    whole, parts = (stepper_of(small_run(*FULL, AS_THEY_COME, "optimizer=sgd"), runtime) for _ in range(2))
    tokens = int(0.8 * loader.batches(0)[0].ids.numel())
    expected = whole.run(loader.batches(0), 1e-2)
    with scarce("forward", tokens=tokens) as memory:
        found = parts.run(loader.batches(0), 1e-2)
    assert memory.times == parts.split_depth >= 1
    assert float(found.grad_norm) == pytest.approx(float(expected.grad_norm), rel=1e-5)
    for a, b in zip(weights(parts), weights(whole), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert all(p.grad is None for p in parts.model.parameters())


def test_in_backward_never_repeats_after_an_update(runtime: Runtime, loader_of: Callable[..., Loader]) -> None:
    loader = loader_of(8, 1)
    stepper = stepper_of(small_run(*FULL, AS_THEY_COME), runtime)
    with (
        scarce("backward", tokens=4) as memory,
        pytest.raises(EnvironmentProblem, match="weights have changed already, so that it cannot be made again"),
    ):
        stepper.run(loader.batches(0), 1e-3)
    assert memory.times == 1


def test_in_backward_update_out_of_memory_ends_the_run(
    runtime: Runtime, loader_of: Callable[..., Loader], monkeypatch: pytest.MonkeyPatch
) -> None:
    stepper = stepper_of(small_run(*FULL, AS_THEY_COME), runtime)
    optimizer: Any = stepper.optimizer

    def out(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(optimizer.inner, "step", out)
    with pytest.raises(EnvironmentProblem, match="weights have changed already"):
        stepper.run(loader_of(8, 1).batches(0), 1e-3)


def test_in_backward_refuses_processes_and_fp16_early() -> None:
    section = small_run(*FULL, AS_THEY_COME).optimizer
    require_gradients_one_by_one(section, 1, "bf16")
    with pytest.raises(ConfigError, match=r"this run has 2 processes, .* or launch\.num_processes=1"):
        require_gradients_one_by_one(section, 2, "bf16")
    with pytest.raises(ConfigError, match=r"this run has fp16, .* or precision=fp32"):
        require_gradients_one_by_one(section, 1, "fp16")
    require_gradients_one_by_one(small_run().optimizer, 2, "fp16")
