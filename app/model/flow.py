"""Does the gradient reach every adapter? A mistake here trains nothing, and the loss may fall all the same."""

from collections.abc import Mapping

from torch import nn

from app.model.recompute import repeated_layers

# B starts at zero, so A has no gradient before B has moved
_HALF_OF_STEP = {1: "lora_B", 2: "lora_A"}
LAST_STEP = max(_HALF_OF_STEP)


def silent_layers(trained: Mapping[str, nn.Parameter], step: int) -> list[str]:
    """The adapted layers whose half that must move in `step` (1 or 2) has no gradient; reads the gradients.

    Counted are steps that changed something: one that was skipped left B at zero.
    """
    half = _HALF_OF_STEP[step]
    return [
        name.removeprefix("base_model.model.").partition(f".{half}")[0]
        for name, parameter in trained.items()
        if f".{half}." in name and (parameter.grad is None or not parameter.grad.any())
    ]


def lowest_reached(lm: nn.Module) -> int:
    """The repeated layer that a backward pass ends with: the first that has something trained in it or before it."""
    place = {weight: at for at, layer in enumerate(repeated_layers(lm)) for weight in layer.parameters()}
    trained = (weight for weight in lm.parameters() if weight.requires_grad)  # in the order of a forward pass
    return place.get(next(trained), 0)
