"""CUDA behaviour for traces on fake CPU tensors: attention, autocast, paged optimizer states.

Traces use fake CPU tensors because the alternatives fail: `cuda` ends the process on a torch built without it, and an
accelerator registered from Python has no autocast.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from app.batch import PackedSequences
from app.layers.attention.requirements import Rules
from app.layers.attention.sdpa import own_heads, plain_packed, shares_heads
from app.layers.operations import COSTS, OperationCost, attention_backward_flops, attention_flops

ATTENTION = "planned"  # name of the attention implementation in a traced model
_MIN_PAGED_NUMEL = 1e5  # of bitsandbytes: smaller optimizer states stay on the device


# Attention with the memory of flash-attn's kernel. It saves q, k, v, the output and a float32 logsumexp per query.
# Its backward pass allocates a float32 gradient of q, one float32 number per query, and gradients of k and v per query
# head, before they are summed over the heads of a group.


@torch.library.custom_op("app_plan::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("a plan never computes")


@_attention.register_fake
def _attention_shapes(q: Tensor, _k: Tensor, v: Tensor, _pairs: int) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _ = q.shape
    out = q.new_empty(batch, tokens, heads, v.shape[3]).transpose(1, 2)
    return out, q.new_empty(batch, heads, tokens, dtype=torch.float32)


@torch.library.custom_op("app_plan::attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, pairs: int
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("a plan never computes")


@_backward.register_fake
def _backward_shapes(
    _grad: Tensor, q: Tensor, k: Tensor, v: Tensor, _out: Tensor, _sums: Tensor, _pairs: int
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.pairs = inputs
    ctx.save_for_backward(q, k, v, *output)


def _gradients(ctx: Any, grad: Tensor, _grad_of_sums: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    return (*_backward(grad, *ctx.saved_tensors, ctx.pairs), None)


_attention.register_autograd(_gradients, setup_context=_save_for_backward)


def attention(backend: str, q: Tensor, k: Tensor, v: Tensor, rules: Rules, documents: PackedSequences | None) -> Tensor:
    """Attention of a traced model on a GPU by a run's backend, in the dtype of autocast."""
    if rules.sinks is not None or (rules.softcap is not None and backend != "flash"):
        return plain_packed(q, k, v, rules, documents)  # no fused kernel: scores of S x S, as in sdpa
    device = q.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else v.dtype
    lengths = (q.shape[2],) * q.shape[0] if documents is None else documents.lengths
    masked = rules.window is not None and max(lengths) > rules.window
    if backend == "sdpa" and not shares_heads(q, v, masked=masked, ampere=True):
        k, v = own_heads(q, k), own_heads(q, v)
    out: Tensor = _attention(q.to(dtype), k.to(dtype), v.to(dtype), sum(_pairs(n, rules) for n in lengths))[0]
    return out


def _pairs(length: int, rules: Rules) -> int:
    """Unmasked pairs of a query and a key in a document of this length."""
    window = length if rules.window is None else min(rules.window, length)
    causal = window * (window + 1) // 2 + (length - window) * window
    return causal if rules.causal else length * length if window == length else 2 * causal - length


def _backward_workspace(
    _grad: Tensor, q: Tensor, k: Tensor, v: Tensor, _out: Tensor, _sums: Tensor, _pairs: int
) -> int:
    """Bytes that the backward kernel allocates and frees before it returns."""
    batch, heads, tokens, _ = q.shape
    own = 4 * q.numel() + 4 * batch * heads * tokens
    expanded = 0 if k.shape[1] == heads else (k.nbytes + v.nbytes) * heads // k.shape[1]
    return own + expanded


COSTS["app_plan::attention"] = OperationCost(attention_flops)
COSTS["app_plan::attention_backward"] = OperationCost(attention_backward_flops, gpu_bytes=_backward_workspace)

_FP32_FUNCTIONS = frozenset(
    {
        *(F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.softplus),
        *(F.nll_loss, F.mse_loss, F.l1_loss),
        *(torch.layer_norm, torch.softmax, torch.log_softmax, torch.pow, torch.rsqrt, torch.exp, torch.log),
        *(torch.norm, torch.sum, torch.prod, torch.cumsum, torch.cumprod, torch.logsumexp),
        *(Tensor.softmax, Tensor.log_softmax, Tensor.pow, Tensor.rsqrt, Tensor.exp, Tensor.log),
        *(Tensor.norm, Tensor.sum, Tensor.prod, Tensor.cumsum, Tensor.cumprod, Tensor.logsumexp),
        Tensor.__pow__,
    }
)


class CudaAutocast(TorchFunctionMode):
    """Runs in float32 what autocast runs in float32 on CUDA but not on a CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FP32_FUNCTIONS and torch.is_autocast_enabled("cpu"):
            args = tuple(_to_fp32(each) for each in args)
            kwargs = {name: _to_fp32(each) for name, each in kwargs.items()}
        return func(*args, **kwargs)

    @classmethod
    def also_in_backward(cls, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward pass under this mode wherever it is called: torch leaves the mode in `Tensor.backward`."""

        @wraps(forward)
        def under_mode(*args: Any, **kwargs: Any) -> Any:
            with cls():
                return forward(*args, **kwargs)

        return under_mode


def _to_fp32(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value


class PagedStates:
    """Counts optimizer states that bitsandbytes pages to the host."""

    def __init__(self) -> None:
        self.host_bytes = 0

    def attach(self, optimizer: Any) -> None:
        """Replace the allocation of paged states; an optimizer without them is left as it is."""
        if getattr(optimizer, "is_paged", False):
            optimizer.get_state_buffer = self._buffer
            optimizer.prefetch_state = lambda _parameter: None

    def _buffer(self, parameter: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        if parameter.numel() < _MIN_PAGED_NUMEL:
            return torch.zeros_like(parameter, dtype=dtype)
        self.host_bytes += parameter.numel() * dtype.itemsize
        buffer: Tensor = torch.empty(parameter.shape, dtype=dtype, device="meta")
        buffer.is_paged = True  # type: ignore[attr-defined]
        return buffer
