"""Custom operations: costs that torch does not count, devices with Triton kernels, operation of the loss kernel.

An operation of `torch.ops.app_kernels` runs the kernel on a GPU (`layers.triton_kernels`, imported at launch) and plain
arithmetic on a CPU.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from app.batch import IGNORE

Size = Sequence[int]
Formula = Callable[..., int]


class OperationCost(NamedTuple):
    """The cost of one call; None: nothing. Bytes are allocated and freed before it returns."""

    flops: Formula | None = None  # of the call's arguments, with shapes in place of tensors
    cpu_bytes: Formula | None = None  # of the arguments
    gpu_bytes: Formula | None = None
    in_fp8: bool = False


def cost_of(name: str) -> OperationCost:
    """Return the cost of an operation: nothing for a library's operation outside the table; ours must be in it."""
    cost = COSTS.get(name, _FREE)
    if cost is _FREE and name.startswith("app"):
        raise LookupError(f"{name} has no OperationCost. Add one to COSTS, next to the operation.")
    return cost


def _product_added_in_place(_sum: Size, left: Size, right: Size, **_kwargs: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


def _grouped_product(left: Size, right: Size, *_args: Any, **_kwargs: Any) -> int:
    # a row is multiplied by the weights of one expert only, except in a batched product of 3-D tensors
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


def attention_flops(q: Size, _k: Size, v: Size, pairs: int, **_kwargs: Any) -> int:
    """Return the FLOPs of two products, q k^T and weights v, over the pairs of a query and a key."""
    return 2 * q[1] * (q[3] + v[3]) * pairs


def attention_backward_flops(
    _grad: Size, q: Size, k: Size, v: Size, _out: Size, _sums: Size, pairs: int, **_kwargs: Any
) -> int:
    """Return the FLOPs of five products: the scores again, and the gradients."""
    return attention_flops(q, k, v, pairs) * 5 // 2


def _attention_on_cpu(q: Size, k: Size, v: Size, _dropout: float = 0.0, causal: bool = False, **_kwargs: Any) -> int:
    batch, _, length, _ = q
    pairs = length * (length + 1) // 2 if causal else length * length
    return attention_flops(q, k, v, batch * pairs)


def _attention_on_cpu_backward(
    _grad: Size, q: Size, k: Size, v: Size, _out: Size, _sums: Size, dropout: float, causal: bool, **_kwargs: Any
) -> int:
    return _attention_on_cpu(q, k, v, dropout, causal) * 5 // 2


_FREE = OperationCost()
_CPU_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
COSTS: dict[str, OperationCost] = {  # by full name; those of bitsandbytes and ours are added in their modules
    "aten::addmm_": OperationCost(_product_added_in_place),
    "aten::_grouped_mm": OperationCost(_grouped_product),
    _CPU_ATTENTION: OperationCost(_attention_on_cpu),
    f"{_CPU_ATTENTION}_backward": OperationCost(_attention_on_cpu_backward),
}


# ---- kernels


_AMPERE = (8, 0)  # compute capability: supported by Triton, and the first with bf16
# of float32 logits per piece of the plain arithmetic: they fit the caches of a CPU
_PIECE_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
_ROW_BYTES = 16  # of targets and factors

_as_on_gpu = False
_plans_kernels = True  # for the GPU of `as_on_gpu`


def is_ampere(device: torch.device) -> bool:
    """Return whether `device` is an NVIDIA GPU of the Ampere generation or newer."""
    nvidia = device.type == "cuda" and torch.version.cuda is not None
    return nvidia and torch.cuda.get_device_capability(device) >= _AMPERE


@cache
def can_run(device: torch.device) -> bool:
    """Return whether the kernels can be launched for tensors of `device`."""
    return is_ampere(device) and importlib.util.find_spec("triton") is not None


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which autocast computes with `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def uses_kernels(device: torch.device) -> bool:
    """Return whether code for `device` uses kernels."""
    return _plans_kernels if _as_on_gpu else can_run(device)


def on_gpu(device: torch.device) -> bool:
    """Return whether code for `device` is GPU code, with or without kernels."""
    return _as_on_gpu or device.type == "cuda"


@contextlib.contextmanager
def as_on_gpu(*, kernels: bool = True) -> Iterator[None]:
    """Run GPU code on a CPU inside this context: for memory plans on CPU tensors, and for tests."""
    global _as_on_gpu, _plans_kernels  # the compiler cannot trace a ContextVar
    before, (_as_on_gpu, _plans_kernels) = (_as_on_gpu, _plans_kernels), (True, kernels)
    try:
        yield
    finally:
        _as_on_gpu, _plans_kernels = before


_OPS = torch.library.Library("app_kernels", "FRAGMENT")
_OPS.define(
    "loss_and_grad(Tensor(a!) logits, Tensor targets, Tensor? weights, Tensor(b!) losses, bool gradient, int width)"
    " -> ()"
)


def loss_and_grad_inplace(
    logits: Tensor, targets: Tensor, weights: Tensor | None, *, gradient: bool, width: int | None = None
) -> Tensor:
    """Return the weighted cross-entropy of each row in float32, 0 for IGNORE; overwrite `logits` [n, vocabulary].

    With `gradient` they become the gradient of the sum of these losses. `width`: the numbers of a row, from its first
    logit on, that belong to the caller; a kernel reads and writes whole vectors of them.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    torch.ops.app_kernels.loss_and_grad(logits, targets, weights, losses, gradient, width or logits.shape[1])
    return losses


def plain_loss_and_grad(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    losses: Tensor,
    gradient: bool,
    _width: int = 0,  # of rows; not needed by torch
) -> None:
    """Compute loss and gradient by plain arithmetic, a few rows at a time, in float32 and rounded once."""
    counts = targets != IGNORE
    factors = counts.float() if weights is None else weights * counts
    labels = targets.clamp_min(0)[:, None]
    rows = max(1, _PIECE_BYTES[logits.device.type] // (4 * logits.shape[1]))
    for start in range(0, len(logits), rows):
        part = slice(start, start + rows)
        exact, factor = logits[part].float(), factors[part, None]
        largest = exact.amax(1, keepdim=True)
        loss = largest - exact.gather(1, labels[part])
        total = exact.sub_(largest).exp_().sum(1, keepdim=True)
        losses[part] = (loss.add_(total.log()) * factor)[:, 0]
        if gradient:
            exact.mul_(factor / total).scatter_add_(1, labels[part], -factor)
            if exact.dtype != logits.dtype:
                logits[part] = exact


def _plain_bytes(logits: Tensor, *_others: Any, kind: str = "cpu") -> int:
    """Return the bytes that the plain arithmetic allocates and frees on a `kind` of device."""
    copied = 0 if logits.dtype == torch.float32 else min(_PIECE_BYTES[kind], 4 * logits.numel())
    return copied + _ROW_BYTES * len(logits)


def _bytes_on_gpu(logits: Tensor, *_others: Any) -> int:
    """Return the same on a GPU; the kernel needs none."""
    return 0 if _plans_kernels else _plain_bytes(logits, kind="cuda")


def _loss_and_grad_on_gpu(
    logits: Tensor, targets: Tensor, weights: Tensor | None, losses: Tensor, gradient: bool, width: int
) -> None:
    if not can_run(logits.device):
        plain_loss_and_grad(logits, targets, weights, losses, gradient)
        return
    from app.layers import triton_kernels

    triton_kernels.loss_and_grad(logits, targets, weights, losses, gradient, width)


_OPS.impl("loss_and_grad", plain_loss_and_grad, "CPU")
_OPS.impl("loss_and_grad", _loss_and_grad_on_gpu, "CUDA")
torch.library.register_fake("app_kernels::loss_and_grad", lambda *_args: None, lib=_OPS)
COSTS["app_kernels::loss_and_grad"] = OperationCost(cpu_bytes=_plain_bytes, gpu_bytes=_bytes_on_gpu)
