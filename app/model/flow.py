"""Does the gradient reach every adapter? A mistake here trains nothing, and the loss may fall all the same."""

from collections.abc import Mapping

from torch import Tensor

# B starts at zero, so A has no gradient before B has moved
_HALF_OF_STEP = {1: "lora_B", 2: "lora_A"}
LAST_STEP = max(_HALF_OF_STEP)


def silent_layers(gradients: Mapping[str, Tensor | None], step: int) -> list[str]:
    """The adapted layers whose half that must move in `step` (1 or 2) has no gradient, by the names of parameters.

    Counted are steps that changed something: one that was skipped left B at zero.
    """
    half = _HALF_OF_STEP[step]
    return [
        name.removeprefix("base_model.model.").partition(f".{half}")[0]
        for name, gradient in gradients.items()
        if f".{half}." in name and (gradient is None or not gradient.any())
    ]
