"""A network on meta gets tensors of the CPU, under fake tensors still without memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from app.plan import experts

_SECOND_BLOCK = 256  # blocks of 64 weights whose scales share one in turn
_LEAST_PAGED = 1e5  # numbers; what is smaller stays on the device
# Change what they are given and take nothing. Of the first torch knows no shapes and would compute in place of asking
# them, on zeros of its own: a model's weights, gradients and states.
_STEP_IN_PLACE = frozenset({"aten::_fused_sgd_", "bitsandbytes::optimizer_update_8bit_blockwise"})


Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def any_number(call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answers for tensors that have no numbers: optimizers ask one of theirs now and then, and shapes never do."""
    if func is torch.ops.aten._local_scalar_dense.default:
        return False if args[0].dtype == torch.bool else 1
    name = func._overloadpacket._qualified_op_name
    if name in _STEP_IN_PLACE:
        return None
    if name == experts.NAME:
        return experts.grouped(call, func, args, kwargs)
    return call(func, args, kwargs)


class AnyNumber(TorchDispatchMode):
    """The same where nothing is counted."""

    def __init__(self, call: Call) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """See LayerCounter."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A number where one is asked for."""
        if func is torch.ops.prim.device.default:  # nothing below needs to be asked
            return args[0].device
        return any_number(self._call, func, args, kwargs or {})


def materialise(network: nn.Module) -> None:
    """Every parameter and buffer; tied ones stay tied."""
    made: dict[int, Any] = {}
    for module in network.modules():
        if hasattr(module._parameters.get("weight"), "quant_type"):
            _packed(module)
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type == "meta":
                module._parameters[name] = made.setdefault(id(parameter), _parameter_like(parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                module._buffers[name] = made.setdefault(id(buffer), _empty(buffer))


def _parameter_like(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(_empty(parameter), requires_grad=parameter.requires_grad)


def _empty(given: Tensor) -> Tensor:
    """By numbers: a tensor on meta is none of ours, and what it is asked would be worked out each time."""
    return torch.empty_strided(given.size(), given.stride(), dtype=given.dtype)


def _packed(layer: Any) -> None:
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


class Paged:
    """States that an optimizer keeps on the host; those too small for it stay where they are."""

    def __init__(self) -> None:
        self.host_bytes = 0

    def take_from(self, optimizer: Any, *, on_gpu: bool) -> None:
        """Count what it would put there; on a CPU it is no other memory."""
        if getattr(optimizer, "is_paged", False) and on_gpu:
            optimizer.get_state_buffer = self._buffer
            optimizer.prefetch_state = lambda _parameter: None

    def _buffer(self, parameter: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        if parameter.numel() < _LEAST_PAGED:
            return torch.zeros_like(parameter, dtype=dtype)
        self.host_bytes += parameter.numel() * dtype.itemsize
        buffer: Tensor = torch.empty(parameter.shape, dtype=dtype, device="meta")
        buffer.is_paged = True  # type: ignore[attr-defined]
        return buffer
