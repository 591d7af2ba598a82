"""RMSNorm that keeps its input and one number for each row: y = x / sqrt(mean(x^2) + eps), weighted.

A model's own forward keeps several copies of its input in fp32. Kinds differ in when they round and in what they
multiply by: which of the ways below is a module's is found by comparing.
"""

import copy
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from app.model.fused.rows import hang_on
from app.model.proof import worst

_ROWS = 8  # that are compared
_EXACT = 1e-6
_NEAR = 8 * torch.finfo(torch.bfloat16).eps
# of weights and rows
_DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
)


@dataclass(frozen=True, slots=True)
class Way:
    """How normalised numbers, in fp32, become those of a dtype, and the derivative of the one by the other."""

    weighted: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    factor: Callable[[Tensor], Tensor]


def _rounded_first(normal: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight * normal.to(dtype)


def _rounded_last(normal: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return (weight * normal).to(dtype)


def _one_more(normal: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return (normal * (1.0 + weight.float())).to(dtype)


# Llama, Mistral and Qwen; OLMo and gpt-oss; Gemma
WAYS = (
    Way(_rounded_first, Tensor.float),
    Way(_rounded_last, Tensor.float),
    Way(_one_more, lambda weight: 1.0 + weight.float()),
)


@dataclass(frozen=True, slots=True)
class RootNorm:
    """One kind of norm. `tells`: whether a layer that is given its output may make that again."""

    way: Way
    eps: float
    tells: bool

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Of rows in any leading shape."""
        out, root = _Normed.apply(x, weight, self)  # type: ignore[no-untyped-call]
        if self.tells and x.requires_grad and torch.is_grad_enabled():
            hang_on(out, self.again, x, root, weight)
        result: Tensor = out
        return result

    def root(self, x: Tensor) -> Tensor:
        """What each row is multiplied by, in fp32."""
        return x.float().pow(2).mean(-1, keepdim=True).add_(self.eps).rsqrt_()

    def again(self, x: Tensor, root: Tensor, weight: Tensor) -> Tensor:
        """The output."""
        return self.way.weighted(x * root, weight, x.dtype)

    def of_input(self, gradient: Tensor, normal: Tensor, root: Tensor, weight: Tensor) -> Tensor:
        """From the gradient of the output that of the input, in fp32; takes the place of `normal`."""
        reached = gradient * self.way.factor(weight)
        along = (reached * normal).mean(-1, keepdim=True)
        return torch.addcmul(reached, normal, along, value=-1, out=normal).mul_(root)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, norm: RootNorm) -> tuple[Tensor, Tensor]:
        root = norm.root(x)
        ctx.save_for_backward(x, root, weight)
        ctx.mark_non_differentiable(root)
        ctx.norm = norm
        return norm.again(x, root, weight), root

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _of_root: Any) -> tuple[Tensor | None, ...]:
        x, root, weight = ctx.saved_tensors
        normal = x * root
        of_x = of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (gradient * normal).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            of_x = ctx.norm.of_input(gradient, normal, root, weight).to(x.dtype)
        return of_x, of_weight, None


def root_norm_of(module: nn.Module, *, tells: bool) -> RootNorm | None:
    """None for what is no such norm: it computes something else, or takes more than its rows.

    Compared are copies with weights of their own on the CPU, so that a model without numbers is told the same.
    """
    eps = eps_of(module)
    if not isinstance(eps, float) or not _has_one_weight(module) or not _takes_rows_alone(module):
        return None
    with _disable_current_modes(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own is slower with rows and weights of several dtypes
        found = [(_apart(module, RootNorm(way, eps, tells)), way) for way in WAYS]
    (exact, rounded), way = min(found, key=lambda each: (each[0][0] > _EXACT, each[0][1]))
    return RootNorm(way, eps, tells) if exact <= _EXACT and rounded <= _NEAR else None


def eps_of(module: nn.Module) -> Any:
    """Under either of its names; None for a module that has neither."""
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _has_one_weight(module: nn.Module) -> bool:
    given = {name: each for name, each in module._parameters.items() if each is not None}
    alone = given.keys() == {"weight"} and not module._modules and not module._buffers
    return alone and given["weight"].ndim == 1


def _takes_rows_alone(module: nn.Module) -> bool:
    taken = inspect.signature(type(module).forward).parameters.values()
    required = [each for each in taken if each.default is inspect.Parameter.empty]
    return len(required) == 2  # itself and the rows


def _apart(module: Any, norm: RootNorm) -> tuple[float, float]:
    """How far the norm is from the module's own forward: in fp32, and where rows are in bf16."""
    width = module.weight.shape[0]
    places = torch.arange(_ROWS * width, dtype=torch.float32, device="cpu")
    # rows so small that eps counts, and a mean that is not zero
    x = (torch.sin(places) + 0.3).view(_ROWS, width) * torch.logspace(-3, 1, _ROWS, device="cpu")[:, None]
    weight = torch.cos(places[:width] * 1.7) + 0.5
    found = []
    for weight_in, x_in in _DTYPES:
        stand_in = copy.copy(module)
        stand_in.__dict__["_parameters"] = module._parameters | {"weight": nn.Parameter(weight.to(weight_in))}
        own = type(module).forward(stand_in, x.to(x_in))
        ours = norm(x.to(x_in), stand_in.weight)
        same_kind = own.dtype == ours.dtype
        found.append(float((ours - own).norm() / own.norm()) if same_kind else float("inf"))
    return found[0], worst(found[1:])
