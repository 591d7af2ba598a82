"""What memory holds from one step to the next, counted from the tensors themselves."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from app.model.trainee import Trainee


def kept_bytes(trainee: Trainee, optimizer: Optimizer) -> dict[str, int]:
    """Of this process, in bytes, by part. Gradients are there at the end of each step, as large as what is trained."""
    trained = {id(parameter) for parameter in trainee.trained().values()}
    weights = list(trainee.network.parameters())
    frozen = [weight for weight in weights if id(weight) not in trained]
    moving = [weight for weight in weights if id(weight) in trained]
    return {
        "frozen_weights": _bytes([*frozen, *trainee.network.buffers()]),
        "quantization_constants": _bytes(_constants(frozen)),
        "trained_weights": _bytes(moving),
        "gradients": _bytes(moving),
        "optimizer_states": _bytes(_tensors(optimizer.state.values())),
    }


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _constants(weights: Iterable[nn.Parameter]) -> Iterator[Tensor]:
    """What packed weights need to be unpacked."""
    for weight in weights:
        state = getattr(weight, "quant_state", None)
        if state is not None:
            yield from _tensors(state.as_dict(packed=False))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(value.values())
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for each in value:
            yield from _tensors(each)
