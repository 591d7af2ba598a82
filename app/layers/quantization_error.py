"""How far weights are from themselves in fewer bits: error and outliers of each linear layer, for many number formats.

A group of weights is divided by its scale, rounded to the numbers of the format, and multiplied again.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

Rounding = Callable[[Tensor], Tensor]  # of groups [n, size] of float32 weights

_SCALE_BITS = 32
_OUTLIER_STDS = 6.0  # beyond which LLM.int8 calls a value an outlier


def _symmetric(levels: float, to_level: Rounding, groups: Tensor) -> Tensor:
    """The largest weight of a group becomes the largest number of the format."""
    scale = groups.abs().amax(1, keepdim=True).clamp_min(1e-30) / levels
    return to_level(groups / scale) * scale


def _asymmetric(levels: float, groups: Tensor) -> Tensor:
    """Smallest and largest weight of a group become the first and the last of 256 integers."""
    low, high = groups.aminmax(dim=1, keepdim=True)
    scale = ((high - low) / levels).clamp_min(1e-30)
    return ((groups - low) / scale).round() * scale + low


def _cast(dtype: torch.dtype, numbers: Tensor) -> Tensor:
    return numbers.to(dtype).float()


def _nearest(positive: tuple[float, ...], numbers: Tensor) -> Tensor:
    """The nearest of the positive numbers, their negatives and zero."""
    code = torch.tensor([-each for each in reversed(positive)] + [0.0, *positive])
    return code[torch.bucketize(numbers, (code[1:] + code[:-1]) / 2)]


def _by_bitsandbytes(kind: str, groups: Tensor) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    result: Tensor = dequantize_4bit(*quantize_4bit(groups, blocksize=groups.shape[1], quant_type=kind))
    return result


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """Bits of a weight, how many weights share a scale (0: all of a layer; -1: a row), and how they are rounded."""

    bits: int
    group: int
    rounded: Rounding
    numbers_of_scale: int = 1

    def dequantized(self, weight: Tensor) -> Tensor:
        """The weight [out, in] as the format gives it back."""
        size = {0: weight.numel(), -1: weight.shape[1]}.get(self.group, self.group)
        flat = weight.flatten()
        filled = torch.nn.functional.pad(flat, (0, -len(flat) % size)).view(-1, size)
        return self.rounded(filled).flatten()[: len(flat)].view_as(weight)

    def bits_per_weight(self, weight: Tensor) -> float:
        """With its scales, in float32."""
        size = {0: weight.numel(), -1: weight.shape[1]}.get(self.group, self.group)
        return self.bits + _SCALE_BITS * self.numbers_of_scale / size


_INT8 = partial(_symmetric, 127, torch.round)
_E2M1 = partial(_symmetric, 6, partial(_nearest, (0.5, 1, 1.5, 2, 3, 4, 6)))
_E3M0 = partial(_symmetric, 16, partial(_nearest, (0.25, 0.5, 1, 2, 4, 8, 16)))
NUMBER_FORMATS: dict[str, NumberFormat] = {
    "int8, a scale for the layer": NumberFormat(8, 0, _INT8),
    "int8, for a row": NumberFormat(8, -1, _INT8),
    "int8, for 64 weights": NumberFormat(8, 64, _INT8),
    "int8, for a row, asymmetric": NumberFormat(8, -1, partial(_asymmetric, 255), 2),
    "E4M3, for a row": NumberFormat(8, -1, partial(_symmetric, 448, partial(_cast, torch.float8_e4m3fn))),
    "E5M2, for a row": NumberFormat(8, -1, partial(_symmetric, 57344, partial(_cast, torch.float8_e5m2))),
    **{f"NF4, for {size} weights": NumberFormat(4, size, partial(_by_bitsandbytes, "nf4")) for size in (64, 128, 256)},
    **{f"FP4, for {size} weights": NumberFormat(4, size, partial(_by_bitsandbytes, "fp4")) for size in (64, 128, 256)},
    "E2M1, for 64 weights": NumberFormat(4, 64, _E2M1),
    "E3M0, for 64 weights": NumberFormat(4, 64, _E3M0),
}


def quantization_errors(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """Error of each format over all layers and in each one: the norm of the difference over that of the weights."""
    layers = list(_layers(weights))
    total = sum(layer["squares"] for layer in layers) or 1.0
    count = sum(layer["weights"] for layer in layers)
    formats = [
        {
            "format": name,
            "error": (sum(layer["errors"][name] ** 2 * layer["squares"] for layer in layers) / total) ** 0.5,
            "bits_per_weight": sum(layer["bits"][name] * layer["weights"] for layer in layers) / count,
        }
        for name in NUMBER_FORMATS
    ]
    return {
        "weights": count,
        "formats": formats,
        "layers": [{key: layer[key] for key in layer if key not in {"squares", "bits"}} for layer in layers],
    }


@torch.no_grad()
def _layers(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Any]]:
    for name, weight in weights:
        norm, std = float(weight.norm()) or 1.0, float(weight.std()) or 1.0
        size = weight.abs()
        yield {
            "layer": name,
            "weights": weight.numel(),
            "outlier_share": float((size > _OUTLIER_STDS * std).float().mean()),
            "largest_in_stds": float(size.max()) / std,
            "errors": {
                kind: float((each.dequantized(weight) - weight).norm()) / norm for kind, each in NUMBER_FORMATS.items()
            },
            "bits": {kind: each.bits_per_weight(weight) for kind, each in NUMBER_FORMATS.items()},
            "squares": norm**2,
        }
