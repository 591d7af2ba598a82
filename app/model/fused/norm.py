"""RMSNorm that keeps its input and one number for each row: y = x / sqrt(mean(x^2) + eps), weighted.

A model's own forward keeps several copies of its input in fp32. Kinds differ in when they round and in what they
multiply by: which of the ways below is a module's is found by comparing.
"""

import copy
import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from app.model.fp8.epilogue import RootMeanSquare, normed_and_rounded, read_rounded
from app.model.fp8.layer import Fp8Linear
from app.model.fused.rows import hang_on
from app.model.kernels.norms import WAYS, Way, root_of
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

# that were found, by kind of norm: a plan makes the same network a dozen times
_ways: dict[tuple[Any, ...] | None, Way | None] = {}


@dataclass(frozen=True, slots=True)
class RootNorm:
    """One kind of norm. `tells`: whether a layer that is given its output may make that again."""

    way: Way
    eps: float
    tells: bool

    def __call__(self, x: Tensor, weight: Tensor, readers: Sequence[Fp8Linear] = ()) -> Tensor:
        """Of rows in any leading shape; `readers`: layers that will be given just these."""
        rounds = bool(readers) and weight.dtype == x.dtype and read_rounded(readers, x)
        out, root = _Normed.apply(x, weight, self, rounds)  # type: ignore[no-untyped-call]
        if self.tells and x.requires_grad and torch.is_grad_enabled():
            hang_on(out, self.again, x, root, weight)
        result: Tensor = out
        return result

    @property
    def form(self) -> RootMeanSquare:
        """That rounds its output as well."""
        return RootMeanSquare(self.eps, WAYS.index(self.way))

    def root(self, x: Tensor) -> Tensor:
        """What each row is multiplied by, in fp32."""
        return root_of(x, self.eps)

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
    def forward(ctx: Any, x: Tensor, weight: Tensor, norm: RootNorm, rounds: bool) -> tuple[Tensor, Tensor]:
        if rounds:
            out, root = normed_and_rounded(norm.form, x, weight)
        else:
            root = norm.root(x)
            out = norm.again(x, root, weight)
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
            of_x = ctx.norm.of_input(gradient, normal, root, weight).to(x.dtype)
        return of_x, of_weight, None, None


def root_norm_of(module: nn.Module, *, tells: bool) -> RootNorm | None:
    """None for what is no such norm: it computes something else, or takes more than its rows.

    Compared are copies with weights of their own on the CPU, so that a model without numbers is told the same.
    """
    eps = eps_of(module)
    if not isinstance(eps, float) or not _has_one_weight(module) or not _takes_rows_alone(module):
        return None
    kind = _kind_of(module)
    way = _ways[kind] if kind in _ways else _way_of(module, eps)
    if kind is not None:
        _ways[kind] = way
    return None if way is None else RootNorm(way, eps, tells)


def _kind_of(module: Any) -> tuple[Any, ...] | None:
    """What its numbers follow from; None where it has attributes that may hold anything."""
    held = sorted((name, each) for name, each in vars(module).items() if not name.startswith("_"))
    if not all(isinstance(each, str | float | int | torch.Size | None) for _, each in held):
        return None
    return type(module), type(module).forward, module.weight.shape, *held


def _way_of(module: nn.Module, eps: float) -> Way | None:
    """The nearest of those that are no further than rounding goes."""
    with _disable_current_modes(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own is slower with rows and weights of several dtypes
        apart = _apart(module, [RootNorm(way, eps, tells=False) for way in WAYS])
    (exact, rounded), way = min(
        zip(apart, WAYS, strict=True), key=lambda each: (each[0][0] > _EXACT, each[0][1])
    )
    return way if exact <= _EXACT and rounded <= _NEAR else None


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


def _apart(module: Any, norms: Sequence[RootNorm]) -> list[tuple[float, float]]:
    """How far each norm is from the module's own forward: in fp32, and where rows are in bf16."""
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
        found.append([_from(own, norm(x.to(x_in), stand_in.weight)) for norm in norms])
    return [(exact, worst(rounded)) for exact, *rounded in zip(*found, strict=True)]


def _from(own: Tensor, ours: Tensor) -> float:
    """As a share of it."""
    return float((ours - own).norm() / own.norm()) if own.dtype == ours.dtype else float("inf")
