"""What a trace of tensors on the CPU must do otherwise to be that of a GPU.

A trace on a device of a GPU's own is worth less: `cuda` ends the process on a torch without it, and an accelerator
registered from Python has no autocast. So the tensors are of the CPU, and what differs is listed here: autocast's list
of what is done in float32. Attention is in `plan.attention`, paged states are in `plan.fakes`.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

_IN_FLOAT32 = frozenset(
    {
        *(
            F.layer_norm,
            F.group_norm,
            F.softmax,
            F.log_softmax,
            F.softplus,
            F.nll_loss,
            F.mse_loss,
            F.l1_loss,
        ),
        *(torch.layer_norm, torch.softmax, torch.log_softmax, torch.pow, torch.rsqrt, torch.exp, torch.log),
        *(torch.norm, torch.sum, torch.prod, torch.cumsum, torch.cumprod, torch.logsumexp),
        *(Tensor.softmax, Tensor.log_softmax, Tensor.pow, Tensor.rsqrt, Tensor.exp, Tensor.log),
        *(
            Tensor.norm,
            Tensor.sum,
            Tensor.prod,
            Tensor.cumsum,
            Tensor.cumprod,
            Tensor.logsumexp,
            Tensor.__pow__,
        ),
    }
)


class AutocastOfCuda(TorchFunctionMode):
    """Widens what CUDA's autocast widens and the CPU's does not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Before autograd, as autocast itself."""
        kwargs = kwargs or {}
        if func in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args = tuple(_widened(each) for each in args)
            kwargs = {name: _widened(each) for name, each in kwargs.items()}
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if narrow else value
