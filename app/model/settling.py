"""Graphs of compiled layers are made and held against the layers' own forward, before the first step."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from app.batch import Batch
from app.model.compiling import Blocks, gist, timed
from app.model.proof import Proof, worst
from app.model.trainee import Trainee

_EXACT = 1e-4  # of the gradient's norm, in float32
_ROUNDINGS = 8  # of the dtype that is computed in


def settle(trainee: Trainee, blocks: Blocks, batch: Batch) -> Proof | None:
    """Loss and gradient of `batch`, once compiled and once not; where they differ, or nothing can be compiled, the run
    goes on without. None: there is nothing to compare.
    """
    own = _Gradients()
    with blocks.paused():
        expected = _loss(trainee, batch, own.keep)
    try:
        timed(blocks, lambda: _loss(trainee, batch, _let_go))
        loss = _loss(trainee, batch, own.compare)  # as all later ones: without a graph being made
    except RuntimeError as fault:  # of any stage of the compiler, and of what it made
        blocks.give_up(f"the compiler cannot do this model ({gist(fault)})")
        return None
    blocks.settled = True
    found = worst([abs(loss - expected) / max(abs(expected), 1e-30), own.difference])
    compute = trainee.compute
    allowed = _EXACT if compute is None else _ROUNDINGS * torch.finfo(compute).eps
    proof = Proof("loss and gradient of compiled layers against their own", found, allowed)
    if not proof.holds:
        blocks.give_up(f"compiled layers differ by {found:.1e} (allowed {allowed:.1e})")
        return None
    return proof


class _Gradients:
    """Of the layers' own forward. They wait on the host: the device has room for those of one pass, if that."""

    def __init__(self) -> None:
        self._kept: dict[nn.Parameter, Tensor] = {}
        self._square = self._square_apart = 0.0

    def keep(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """One of them."""
        self._kept[parameter] = gradient.to("cpu")
        self._square += _square(gradient)

    def compare(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """With that of a compiled pass."""
        kept = self._kept.pop(parameter, None)
        apart = gradient.float() if kept is None else gradient.float() - kept.to(gradient.device).float()
        self._square_apart += _square(apart)

    @property
    def difference(self) -> float:
        """Of all together, relative; what compiled passes had no gradient for is missing from theirs."""
        missing = sum(_square(each) for each in self._kept.values())
        return math.sqrt((self._square_apart + missing) / max(self._square, 1e-60))


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) ** 2


def _let_go(_parameter: nn.Parameter, _gradient: Tensor) -> None:
    pass


def _loss(trainee: Trainee, batch: Batch, take: Callable[[nn.Parameter, Tensor], None]) -> float:
    """Forward and backward; each gradient is taken as it comes. The run's random numbers stay as they are."""
    device = batch.ids.device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad(), _taken(trainee, take):
        loss, _ = trainee(batch)
        (loss / (batch.label_weight or 1.0)).backward()
        return float(loss.detach())


@contextmanager
def _taken(trainee: Trainee, take: Callable[[nn.Parameter, Tensor], None]) -> Iterator[None]:
    def arrived(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        take(parameter, parameter.grad)
        parameter.grad = None

    hooks = [each.register_post_accumulate_grad_hook(arrived) for each in trainee.trained().values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in trainee.trained().values():
            parameter.grad = None
