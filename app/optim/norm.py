"""The norm of a gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor


def squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of all squares in float64, so that it does not depend on how the gradient is divided among processes."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(list(gradients), 2.0, dtype=torch.float64)
    total: Tensor = torch.stack(list(norms)).square().sum()
    return total


def scale_gradients(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """In place, without reading the factor."""
    torch._foreach_mul_(list(gradients), factor)


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What a gradient of this norm is multiplied with."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)
