"""A network on meta becomes fake tensors of the CPU, and operations that torch cannot fake are answered."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_SECOND_BLOCK = 256  # blocks of 64 weights whose scales share one in turn
# They change what they are given and take nothing. torch knows no shapes of the first, and would compute it on zeros
# of its own: a model's weights, gradients and states.
_STEP_IN_PLACE = frozenset({"aten::_fused_sgd_", "bitsandbytes::optimizer_update_8bit_blockwise"})


class FakeAnswers(TorchDispatchMode):
    """Answers for tensors that have no numbers: optimizers ask for one now and then, and shapes never depend on it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A number where one is asked for; all else goes on to torch."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 1
        if func is torch.ops.aten._grouped_mm.default:
            return _grouped_product(func, args, kwargs)
        if func._overloadpacket._qualified_op_name in _STEP_IN_PLACE:
            return None
        return func(*args, **kwargs)


def _grouped_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Of experts: torch computes it in other dtypes than bf16, too, but tells its shapes only there."""
    left, right, *rest = args
    if left.dtype == torch.bfloat16:
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    out = func(_narrow(left), _narrow(right), *rest, **kwargs)
    return torch.empty_strided(out.size(), out.stride(), dtype=left.dtype)


def _narrow(given: Tensor) -> Tensor:
    return torch.empty_strided(given.size(), given.stride(), dtype=torch.bfloat16)


def materialise(network: nn.Module) -> None:
    """Every parameter and buffer; tied ones stay tied."""
    made: dict[int, Any] = {}
    for module in network.modules():
        if hasattr(module._parameters.get("weight"), "quant_type"):
            _pack(module)
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type == "meta":
                module._parameters[name] = made.setdefault(id(parameter), _parameter_like(parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                module._buffers[name] = made.setdefault(id(buffer), _like(buffer))


def _parameter_like(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(_like(parameter), requires_grad=parameter.requires_grad)


def _like(given: Tensor) -> Tensor:
    return torch.empty_strided(given.size(), given.stride(), dtype=given.dtype)


def _pack(layer: Any) -> None:
    """What bitsandbytes leaves of a weight; its own class of parameter cannot be made of tensors without memory."""
    from bitsandbytes.functional import QuantState

    def empty(size: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype)

    given = layer.weight
    blocks = -(-given.numel() // given.blocksize)
    weight = nn.Parameter(empty(((given.numel() + 1) // 2, 1), torch.uint8), requires_grad=False)
    state = {
        "shape": torch.Size((layer.out_features, layer.in_features)),
        "dtype": given.dtype,
        "blocksize": given.blocksize,
        "code": empty(16),
        "quant_type": given.quant_type,
    }
    if given.compress_statistics:
        state["offset"] = empty(())
        state["state2"] = QuantState(
            absmax=empty(-(-blocks // _SECOND_BLOCK)),
            blocksize=_SECOND_BLOCK,
            code=empty(256),
            dtype=torch.float32,
        )
    scales = empty(blocks, torch.uint8 if given.compress_statistics else torch.float32)
    layer.quant_state = weight.quant_state = QuantState(absmax=scales, **state)  # type: ignore[attr-defined]
    layer._parameters["weight"] = weight
