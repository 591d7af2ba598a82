"""Parameters that are stepped during the backward pass, each when its gradient is complete, which is let go then.

No gradient waits for the others, so they take the memory of one. What is given up: gradients cannot be clipped to a
common norm, added up over micro-batches or processes, or made again once the first weight has changed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from app.config.schema import OptimizerConfig
from app.errors import ConfigError
from app.oom_retry import does_not_fit
from app.optim.gradient_scaling import skips_on_device
from app.optim.one_by_one import OneByOne


def require_one_process(optimizer: OptimizerConfig, processes: int) -> None:
    """Refuse several processes, which add their gradients up first."""
    if optimizer.in_backward and processes > 1:
        raise ConfigError(
            f"optimizer.in_backward=true steps weights before gradients of other processes are there, and this run has "
            f"{processes}. Set optimizer.in_backward=false, or launch.num_processes=1."
        )


def require_unscaled(optimizer: OptimizerConfig, precision: str) -> None:
    """Refuse what `precision=auto` came to where it is fp16, whose gradients are checked as a whole."""
    if optimizer.in_backward and precision == "fp16":
        raise ConfigError(
            "optimizer.in_backward=true does not go with fp16, which precision=auto means on this GPU. "
            "Set optimizer.in_backward=false, or precision=fp32."
        )


def in_backward(parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> "InBackward | None":
    """What runs the steps of an optimizer that was built for it."""
    if isinstance(optimizer, OneByOne) and optimizer.in_backward:
        return InBackward(parameters, optimizer)
    return None


class InBackward:
    """In place of a reduction (`engine.reduction`): of one process, its gradients used up as they come."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: OneByOne) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._skips_on_device = skips_on_device(optimizer)
        self._norms: dict[nn.Parameter, Tensor] = {}  # of what was stepped, on the device
        self._last = False
        self._rehearses = False
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def begin(self) -> None:
        """A step."""
        self._last = False
        self._norms.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def require_unchanged(self) -> None:
        """Before passes are made again: a forward pass that did not fit is, in parts, whose gradients add up."""
        if self._norms:
            raise does_not_fit(
                "the rest of a backward pass in which weights have changed already, so that it cannot be made again in "
                "smaller parts as with optimizer.in_backward=false,",
                {},
            )

    def last_loss(self, loss: Tensor) -> Tensor:
        """After the backward pass of this loss gradients are complete."""
        self._last = True
        return loss

    def finish(self) -> None:
        """Gradients of parts before the last one that it has not added to."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._take(parameter)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Inside, gradients come and go, and no weight or state is changed."""
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses = False

    def taken(self) -> tuple[Tensor, Tensor]:
        """The norm of all gradients of the step, and whether one of them was not finite."""
        self._optimizer.step()  # there are no gradients left: it only counts
        norms = [self._norms[parameter] for parameter in self._parameters if parameter in self._norms]
        norm = torch.stack(norms).square().sum().sqrt()
        return norm, ~torch.isfinite(norm)

    def _arrived(self, parameter: nn.Parameter) -> None:
        if self._last:
            self._take(parameter)

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        """A gradient that is not finite leaves its own parameter as it is; others may have been stepped by then."""
        if self._rehearses:
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
