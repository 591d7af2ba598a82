"""Root-mean-square norms in plain torch: y = x / sqrt(mean(x^2) + eps), weighted in one of three ways."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Way:
    """How normalised numbers, in fp32, become those of a dtype, and the derivative of the one by the other."""

    weighted: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    factor: Callable[[Tensor], Tensor]


def root_of(x: Tensor, eps: float) -> Tensor:
    """What each row is multiplied by, in fp32."""
    return x.float().pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()


def _rounded_first(normal: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight * normal.to(dtype)


def _rounded_last(normal: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return (weight * normal).to(dtype)


def _one_more(normal: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return (normal * (1.0 + weight.float())).to(dtype)


# Llama, Mistral and Qwen; OLMo and gpt-oss; Gemma. Kernels know them by their place.
WAYS = (
    Way(_rounded_first, Tensor.float),
    Way(_rounded_last, Tensor.float),
    Way(_one_more, lambda weight: 1.0 + weight.float()),
)
