"""What is kept of a layer's rows for its backward pass: the rows, or what they are made from again.

A norm whose output is cheap to make again hangs a recipe on it. Who is given just this tensor may keep what the recipe
needs, which the norm itself keeps anyway, in place of the rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Form = Callable[..., Tensor]  # makes the same numbers again from the tensors of a recipe


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a tensor was made. `version` is that of the tensor: changed in place, it is no longer what was made."""

    form: Form
    tensors: tuple[Tensor, ...]
    version: int


def hang_on(made: Tensor, form: Form, *tensors: Tensor) -> None:
    """Tell whoever is given `made` how it can be made again; what it says lives no longer than `made`."""
    made.recipe = Recipe(form, tuple(each.detach() for each in tensors), made._version)  # type: ignore[attr-defined]


def recipe_of(given: Tensor) -> Recipe | None:
    """None for a tensor that nobody knows how to make, and for one that was changed since."""
    recipe: Recipe | None = getattr(given, "recipe", None)
    return recipe if recipe is not None and recipe.version == given._version else None


def kept_rows(rows: Tensor, recipe: Recipe | None) -> tuple[Tensor, ...]:
    """What to keep."""
    return (rows,) if recipe is None else recipe.tensors


def rows_again(kept: Sequence[Tensor], form: Form | None, dtype: torch.dtype) -> Tensor:
    """The rows [n, in] that this was kept for."""
    return kept[0] if form is None else form(*kept).flatten(0, -2).to(dtype)
