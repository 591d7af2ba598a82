"""Fake CPU tensors for networks on the meta device, and kernels that torch cannot fake."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from app.model.build import ModelSections

# In-place kernels that allocate nothing. torch has no fake kernel of the first and would run it on real zeros as large
# as weights, gradients and states.
_OPTIMIZER_KERNELS = frozenset({"aten::_fused_sgd_", "bitsandbytes::optimizer_update_8bit_blockwise"})

PLANNED_AS = {"adamw_apex": "adamw"}  # kernels that are no operations of torch, and a kind with the same states


class FakeTensorFallbacks(TorchDispatchMode):
    """Results for operations that FakeTensorMode does not support. Values are arbitrary: no shape depends on them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            # a condition on a tensor [1] is `torch.rand(1) > p`: PEFT leaves out a layer's adapter with probability p
            return args[0].ndim > 0 if args[0].dtype == torch.bool else 1
        if func is torch.ops.aten._grouped_mm.default:
            return _grouped_product(func, args, kwargs)
        if func._overloadpacket._qualified_op_name in _OPTIMIZER_KERNELS:
            return None
        return func(*args, **kwargs)


def _grouped_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Grouped product of experts: torch has a kernel for all dtypes but a fake kernel for bf16 only."""
    left, right, *rest = args
    if left.dtype == torch.bfloat16:
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    return _like(func(_like(left, torch.bfloat16), _like(right, torch.bfloat16), *rest, **kwargs), left.dtype)


def materialise(network: nn.Module, sections: ModelSections) -> None:
    """Replace meta parameters and buffers in place; tied ones stay tied."""
    replaced: dict[int, Any] = {}
    quantizer = sections.quantizer
    for module in network.modules():
        if quantizer is not None:
            quantizer.fake(module)
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type == "meta":
                fake = nn.Parameter(_like(parameter), requires_grad=parameter.requires_grad)
                module._parameters[name] = replaced.setdefault(id(parameter), fake)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                module._buffers[name] = replaced.setdefault(id(buffer), _like(buffer))


def _like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype)
