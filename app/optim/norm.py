"""The norm of a gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Of all of them together, in float32: of bfloat16's own, two digits would be right."""
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    norms = torch._foreach_norm(list(gradients), 2.0, dtype=torch.float32)
    total: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return total
