"""What memory holds from one step to the next, counted from the tensors themselves."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from app.distributed.fsdp import local
from app.model.quantization import constants_of
from app.model.trainee import Trainee
from app.optim.one_by_one import stepped_by, steps_in_backward


def kept_bytes(trainee: Trainee, optimizer: Optimizer) -> dict[str, int]:
    """Of this process, in bytes, by part. Gradients are there at the end of each step, as large as what this process
    steps; none are where weights are stepped in the backward pass.
    """
    kept = kept_tensors(trainee, optimizer)
    found = {part: sum(map(_bytes_here, kept[part])) for part in kept}
    return {
        "frozen_weights": found["frozen_weights"],
        "quantization_constants": found["quantization_constants"],
        "trained_weights": found["trained_weights"],
        "gradients": 0 if steps_in_backward(optimizer) else sum(map(_bytes_here, stepped_by(optimizer))),
        "optimizer_states": found["optimizer_states"],
    }


def _bytes_here(tensor: Tensor) -> int:
    """Where it is divided, of the part that this process keeps."""
    own = local(tensor)
    return own.numel() * own.element_size()


def kept_tensors(trainee: Trainee, optimizer: Optimizer | None) -> dict[str, list[Tensor]]:
    """By part, without gradients."""
    trained = {id(parameter) for parameter in trainee.trained().values()}
    weights = list(trainee.network.parameters())
    frozen = [weight for weight in weights if id(weight) not in trained]
    return {
        "frozen_weights": [*frozen, *trainee.network.buffers()],
        "quantization_constants": [each for weight in frozen for each in constants_of(weight)],
        "trained_weights": [weight for weight in weights if id(weight) in trained],
        "optimizer_states": [] if optimizer is None else list(_tensors(optimizer.state.values())),
    }


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(value.values())
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for each in value:
            yield from _tensors(each)
