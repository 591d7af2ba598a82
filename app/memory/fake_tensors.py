"""Fake CPU tensors for networks on the meta device, and the CUDA behavior that a trace must reproduce.

Traces use fake CPU tensors because the alternatives fail: `cuda` ends the process on a torch built without it, and an
accelerator registered from Python has no autocast.
"""

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from app.adapters.adapters import add_adapter
from app.base.base_model import open_base
from app.base.conversion import require_packed_alike
from app.batch import PackedSequences
from app.config.tasks import task_of
from app.layers.activation_checkpointing import repeated_layers
from app.layers.attention.requirements import Rules
from app.layers.attention.sdpa import own_heads, plain_packed, shares_heads
from app.layers.head import keep_head_in_fp32
from app.layers.operations import COSTS, OperationCost, attention_backward_flops, attention_flops
from app.model.build import ModelSections


class MetaModel:
    """Builder of copies of a network with fewer layers."""

    def __init__(self, sections: ModelSections, attention: str) -> None:
        """`attention`: name of an implementation registered in transformers."""
        self.sections = sections
        self._lm = open_base(sections.model, sections.task).on_meta(attention, sections.base_dtype)
        layers = repeated_layers(self._lm)
        self.depth = len(layers)
        keys = [cost_key(layer) for layer in layers]
        adapter = sections.adapter
        names = (*adapter.targets, *adapter.rank_pattern, *adapter.alpha_pattern, *adapter.train_whole)
        numbered = any(part.isdecimal() for name in names for part in name.split("."))
        targets_single_layers = adapter.kind != "none" and (numbered or bool(adapter.layers))
        # number of layers that repeat; all of them if there is no such pattern
        self.period = next(count for count in range(1, len(keys) + 1) if keys[count:] == keys[:-count])
        if targets_single_layers:
            self.period = self.depth

    def network(self, depth: int) -> nn.Module:
        """Return the quantized network with its adapter and `depth` layers, before gradient checkpointing is set."""
        sections = self.sections
        with torch.device("meta"):
            lm = _truncated(self._lm, depth)
            require_packed_alike(sections.model, lm, sections.quantizer)
            if sections.quantizer is not None:
                sections.quantizer.require_quantizable(sections.model, lm)
                sections.quantizer.quantize(lm)
            task = task_of(sections.task)
            if task.has_classes:
                keep_head_in_fp32(lm)
            return add_adapter(sections.adapter, task, lm, sections.model.path)

    @property
    def has_equal_layers(self) -> bool:
        return self.period == 1


def cost_key(layer: nn.Module) -> tuple[Any, ...]:
    """Return weights and sliding windows of a layer: layers with equal keys cost the same. A window may need a mask."""
    weights = tuple((name, tuple(p.shape), p.dtype) for name, p in layer.named_parameters())
    windows = tuple(getattr(part, "sliding_window", None) for part in layer.modules())
    return (*weights, windows)


def _truncated(lm: Any, depth: int) -> Any:
    """Copy a model with its first `depth` layers only."""
    repeated = {id(layer) for layer in repeated_layers(lm)}
    lists = [
        (parent, name, child)
        for parent in lm.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) and all(id(layer) in repeated for layer in child)
    ]
    try:
        for parent, name, layers in lists:
            setattr(parent, name, layers[:depth])
        shorter = copy.deepcopy(lm)
    finally:
        for parent, name, layers in lists:
            setattr(parent, name, layers)
    for config in {id(m.config): m.config for m in shorter.modules() if hasattr(m, "config")}.values():
        config.num_hidden_layers = depth
    return shorter


# ---- fake tensors


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
    """Return the grouped product of experts: torch has a kernel for all dtypes but a fake kernel for bf16 only."""
    left, right, *rest = args
    if left.dtype == torch.bfloat16:
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    return _like(func(_like(left, torch.bfloat16), _like(right, torch.bfloat16), *rest, **kwargs), left.dtype)


def materialize(network: nn.Module, sections: ModelSections) -> None:
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


# ---- cuda ops


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


def attention(
    backend: str, ampere: bool, q: Tensor, k: Tensor, v: Tensor, rules: Rules, documents: PackedSequences | None
) -> Tensor:
    """Return the attention output of a traced model on a GPU with a backend, in the dtype of autocast."""
    if rules.sinks is not None or (rules.softcap is not None and backend != "flash"):
        return plain_packed(q, k, v, rules, documents)  # no fused kernel: scores of S x S, as in sdpa
    device = q.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else v.dtype
    lengths = (q.shape[2],) * q.shape[0] if documents is None else documents.lengths
    masked = rules.window is not None and max(lengths) > rules.window
    if backend == "sdpa" and not shares_heads(q, v, masked=masked, ampere=ampere):
        k, v = own_heads(q, k), own_heads(q, v)
    out: Tensor = _attention(q.to(dtype), k.to(dtype), v.to(dtype), sum(_pairs(n, rules) for n in lengths))[0]
    return out


def _pairs(length: int, rules: Rules) -> int:
    """Return the number of unmasked query-key pairs in a document of this length."""
    window = length if rules.window is None else min(rules.window, length)
    causal = window * (window + 1) // 2 + (length - window) * window
    return causal if rules.causal else length * length if window == length else 2 * causal - length


def _backward_workspace(
    _grad: Tensor, q: Tensor, k: Tensor, v: Tensor, _out: Tensor, _sums: Tensor, _pairs: int
) -> int:
    """Return the bytes that the backward kernel allocates and frees before it returns."""
    batch, heads, tokens, _ = q.shape
    of_queries = 4 * q.numel() + 4 * batch * heads * tokens
    expanded = 0 if k.shape[1] == heads else (k.nbytes + v.nbytes) * heads // k.shape[1]
    return of_queries + expanded


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
    """Mode that runs in float32 the operations that autocast runs in float32 on CUDA but not on a CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FP32_FUNCTIONS and torch.is_autocast_enabled("cpu"):
            args = tuple(_to_fp32(value) for value in args)
            kwargs = {name: _to_fp32(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    @classmethod
    def also_in_backward(cls, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a forward pass to run in this mode everywhere: torch leaves the mode in `Tensor.backward`."""

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
        """Replace the allocation of paged states; other optimizers stay unchanged."""
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


# ---- cublas


_HANDLES = 2  # the thread of the forward pass has one, that of the backward pass another
# Bytes of a handle by major compute capability, and elsewhere: `getChosenWorkspaceSize` of torch
_HANDLE_BYTES = {"9": 32 << 20, "10": 32 << 20}
_OTHER_HANDLE_BYTES = 8_519_680


def workspace_bytes(capability: str | None) -> int:
    """Return the bytes of all workspaces on a GPU of this compute capability."""
    major = (capability or "").partition(".")[0]
    return _HANDLES * _HANDLE_BYTES.get(major, _OTHER_HANDLE_BYTES)


def local_workspace_bytes() -> int:
    """Return the bytes of all workspaces on the GPU of this process, 0 without one."""
    return workspace_bytes(local_capability()) if torch.cuda.is_available() else 0


def local_capability() -> str:
    """Return the compute capability of the GPU of this process, as the `hardware` group has it."""
    return ".".join(map(str, torch.cuda.get_device_capability()))
