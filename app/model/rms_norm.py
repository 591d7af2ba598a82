"""RMSNorm that saves its input and one number a row, enough to recompute its output.

y = x / sqrt(mean(x^2) + eps), weighted. A model's own forward saves several fp32 copies of its input. Layers that read
the output save the norm's input, which is saved anyway, in place of the output (`Recompute`), and recompute the output
in the backward pass. Kinds differ in when they round and in what they multiply by; a comparison finds out which.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from app.model.comparison import max_or_nan

_COMPARED_ROWS = 8
_ALLOWED_FP32 = 1e-6
_ALLOWED_BF16 = 8 * torch.finfo(torch.bfloat16).eps
# of weights and rows
_DTYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16))


@dataclass(frozen=True, slots=True)
class Recompute:
    """How to recompute a tensor. `version` is the tensor's: after a change in place the recipe is invalid."""

    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    version: int


def with_recompute(made: Tensor, function: Callable[..., Tensor], *tensors: Tensor) -> None:
    """Attach a recipe to `made` for layers that would otherwise save it for their backward pass."""
    if made.requires_grad:
        made.recompute = Recompute(function, tuple(each.detach() for each in tensors), version_of(made))  # type: ignore[attr-defined]


def recompute_of(x: Tensor) -> Recompute | None:
    """The recipe of a tensor; None for one that has to be saved itself."""
    found: Recompute | None = getattr(x, "recompute", None)
    return found if found is not None and found.version == version_of(x) else None


def version_of(x: Tensor) -> int:
    """The number of changes of `x` in place; 0 in compiled layers, which cannot read it and are compared as a whole."""
    return 0 if torch.compiler.is_compiling() else x._version


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """A kind of RMSNorm."""

    eps: float
    rounds_first: bool = False  # normalised rows, to their own dtype, before they are multiplied
    offset: float = 0.0  # of the weight

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        out, root = _RmsNorm.apply(x, weight, self)  # type: ignore[no-untyped-call]
        with_recompute(out, self.output, x, root, weight)
        result: Tensor = out
        return result

    def root(self, x: Tensor) -> Tensor:
        return x.float().pow(2).mean(-1, keepdim=True).add_(self.eps).rsqrt_()

    def output(self, x: Tensor, root: Tensor, weight: Tensor) -> Tensor:
        """The weighted rows, in their dtype or in a wider one of the weight."""
        if self.rounds_first:
            return weight * (x * root).to(x.dtype)
        return (x * root * self._factor(weight)).to(x.dtype)

    def input_gradient(self, gradient: Tensor, normal: Tensor, root: Tensor, weight: Tensor) -> Tensor:
        """The gradient of the rows in fp32; overwrites `normal`."""
        reached = gradient * self._factor(weight)
        along = (reached * normal).mean(-1, keepdim=True)
        return torch.addcmul(reached, normal, along, value=-1, out=normal).mul_(root)

    def _factor(self, weight: Tensor) -> Tensor:
        return weight.float() + self.offset if self.offset else weight.float()


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, norm: RmsNorm) -> tuple[Tensor, Tensor]:
        root = norm.root(x)
        out = norm.output(x, root, weight)
        ctx.save_for_backward(x, root, weight)
        ctx.mark_non_differentiable(root)
        ctx.norm = norm
        return out, root

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _of_root: Any) -> tuple[Tensor | None, ...]:
        x, root, weight = ctx.saved_tensors
        normal = x * root
        of_x = of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (gradient * normal).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            of_x = ctx.norm.input_gradient(gradient, normal, root, weight).to(x.dtype)
        return of_x, of_weight, None


def rms_norm_of(module: nn.Module) -> RmsNorm | None:
    """The norm that a module computes; None if it computes something else, or takes more than its rows.

    Copies with fixed weights on the CPU are compared, so that a model on meta gets the same answer.
    """
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    takes = len(inspect.signature(type(module).forward).parameters)
    if not isinstance(eps, float) or not _has_one_weight(module) or takes != 2:  # itself and the rows, but no gate
        return None
    # Llama, Mistral and Qwen; OLMo and gpt-oss; Gemma
    norms = [RmsNorm(eps, rounds_first=True), RmsNorm(eps), RmsNorm(eps, offset=1.0)]
    with _disable_current_modes(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own is slower with rows and weights of several dtypes
        differences = _differences(module, norms)
    (exact, rounded), norm = min(
        zip(differences, norms, strict=True), key=lambda each: (each[0][0] > _ALLOWED_FP32, each[0][1])
    )
    return norm if exact <= _ALLOWED_FP32 and rounded <= _ALLOWED_BF16 else None


def _has_one_weight(module: nn.Module) -> bool:
    given = {name: each for name, each in module._parameters.items() if each is not None}
    alone = given.keys() == {"weight"} and not module._modules and not module._buffers
    return alone and given["weight"].ndim == 1


def _differences(module: Any, norms: Sequence[RmsNorm]) -> list[tuple[float, float]]:
    """Differences of each norm from the module's own forward: in fp32, and the largest with rows in bf16."""
    width = module.weight.shape[0]
    places = torch.arange(_COMPARED_ROWS * width, dtype=torch.float32, device="cpu")
    # rows so small that eps counts, and a mean that is not zero
    x = (torch.sin(places) + 0.3).view(_COMPARED_ROWS, width) * torch.logspace(-3, 1, _COMPARED_ROWS, device="cpu")[
        :, None
    ]
    weight = torch.cos(places[:width] * 1.7) + 0.5
    found = []
    for weight_in, x_in in _DTYPES:
        stand_in = copy.copy(module)
        stand_in.__dict__["_parameters"] = module._parameters | {"weight": nn.Parameter(weight.to(weight_in))}
        own = type(module).forward(stand_in, x.to(x_in))
        found.append([_difference(norm(x.to(x_in), stand_in.weight), own) for norm in norms])
    return [(exact, max_or_nan(rounded)) for exact, *rounded in zip(*found, strict=True)]


def _difference(ours: Tensor, own: Tensor) -> float:
    return float((ours - own).norm() / own.norm()) if own.dtype == ours.dtype else float("inf")
