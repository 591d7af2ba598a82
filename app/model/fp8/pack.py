"""`quantization=fp8`: which layers it takes, and where it can be computed."""

from typing import Any

import torch
from torch import Tensor, nn

from app.model.fp8.layer import Fp8Linear
from app.model.packing import Packing, weight_of

_SIDE = 16  # that sizes must be a multiple of
_CAPABILITY = (8, 9)  # of the first GPUs with fp8: Ada; then Hopper


class EightBit(Packing):
    """Of use while training: the adapter is one of the ordinary base, since eight bits leave little to make up for."""

    kind = "fp8"
    goes_with_adapter = False

    def packed(self, layer: Any) -> nn.Module:
        """Two copies and their scales."""
        return Fp8Linear(weight_of(layer), layer.bias)

    def unpacked(self, weight: Tensor) -> Tensor:
        """As forward has it."""
        return Fp8Linear(weight, None).unpacked(weight.dtype)

    def unfit(self, name: str, outputs: int, inputs: int) -> str | None:
        """Kernels take squares of 16."""
        if outputs % _SIDE or inputs % _SIDE:
            return f"{name} has {inputs} inputs and {outputs} outputs, not both multiples of {_SIDE}"
        return None

    def missing(self, device: torch.device) -> str | None:
        """A CPU computes the same numbers in float32."""
        if device.type != "cuda":
            return None
        found, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
        if torch.version.hip is None and found >= _CAPABILITY:
            return None
        return (
            f"quantization.kind=fp8 needs an NVIDIA GPU of compute capability 8.9 or higher (Ada, Hopper or newer), "
            f"and this {name} has {found[0]}.{found[1]}. Set quantization=none, or quantization=nf4 for less memory."
        )

    def slow_on(self, device: str) -> str | None:
        """No CPU multiplies in fp8."""
        if device != "cpu":
            return None
        return (
            "quantization=fp8: a CPU has no fp8, so its products are made in float32, slower than without it"
        )
