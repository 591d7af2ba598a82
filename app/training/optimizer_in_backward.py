"""Optimizer steps during the backward pass: each parameter as soon as its gradient is complete, which is then freed.

All gradients together take the memory of one. In return they cannot be clipped to a common norm, accumulated over
micro-batches or processes, or recomputed once the first weight has changed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from app.config.schema import OptimizerConfig
from app.distributed.gradient_reduction import GradientReduction
from app.errors import ConfigError
from app.oom_retry import out_of_memory_error
from app.optim.gradient_scaling import skips_on_device
from app.optim.stochastic_rounding import OneByOne


def require_gradients_one_by_one(optimizer: OptimizerConfig, processes: int, precision: str) -> None:
    """Refuse what needs all gradients before a step: a reduction over processes, the loss scale of fp16."""
    if not optimizer.in_backward or (processes == 1 and precision != "fp16"):
        return
    found, remedy = (
        ("fp16", "precision=fp32") if processes == 1 else (f"{processes} processes", "launch.num_processes=1")
    )
    raise ConfigError(
        f"optimizer.in_backward=true steps each weight as soon as its gradient is there, and this run has {found}, "
        f"where all gradients are needed first. Set optimizer.in_backward=false, or {remedy}."
    )


class InBackward(GradientReduction):
    """Steps each weight of a single process when its gradient is complete, and frees the gradient."""

    skipping = "not made for weights whose gradient is not finite, others had been stepped by then"

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: OneByOne) -> None:
        super().__init__(parameters)
        self._optimizer = optimizer
        self._skips_on_device = skips_on_device(optimizer)
        self._norms: dict[nn.Parameter, Tensor] = {}  # of the gradients that this step has used, on the device
        self._last = False
        self._is_rehearsal = False
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    @property
    def together(self) -> list[Sequence[nn.Parameter]]:
        return [[parameter] for parameter in self.stepped]

    def begin(self) -> None:
        """Drop all gradients; passes in which weights have changed already cannot be repeated."""
        self._last = False
        super().begin()
        if self._norms:
            raise out_of_memory_error(
                "the rest of a backward pass in which weights have changed already, so that it cannot be made again in "
                "smaller parts as with optimizer.in_backward=false,",
                {},
            )

    def last_loss(self, loss: Tensor) -> Tensor:
        self._last = True  # its backward pass completes the gradients
        return loss

    def finish(self) -> None:
        """Use gradients of earlier parts that the last part did not add to."""
        for parameter in self.stepped:
            if parameter.grad is not None:
                self._step_one(parameter)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        self._is_rehearsal = True
        try:
            yield
        finally:
            self._is_rehearsal = False

    def apply(self, update: Callable[[list[Tensor]], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        self._optimizer.step()  # without gradients it only counts the step
        norms = [self._norms[parameter] for parameter in self.stepped if parameter in self._norms]
        self._norms.clear()
        norm = torch.stack(norms).square().sum().sqrt()
        return norm, ~torch.isfinite(norm)

    def _arrived(self, parameter: nn.Parameter) -> None:
        if self._last:
            self._step_one(parameter)

    @torch.no_grad()
    def _step_one(self, parameter: nn.Parameter) -> None:
        """Step one parameter, unless its gradient is not finite; others may have been stepped before."""
        if self._is_rehearsal:
            parameter.grad = None
            return
        assert parameter.grad is not None
        norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)
        self._norms[parameter] = norm
        skipped = ~norm.isfinite()
        if self._skips_on_device:
            self._optimizer.step_one(parameter, skipped.float())
        elif not bool(skipped):
            self._optimizer.step_one(parameter)
        parameter.grad = None
