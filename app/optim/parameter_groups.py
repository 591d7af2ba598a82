"""Trained parameters: which of them decay, and which are hidden matrices for Muon."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

LR_FACTOR = "lr_factor"  # of a parameter group


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained parameter with its role in the model."""

    name: str
    parameter: nn.Parameter
    decays: bool
    is_hidden_matrix: bool  # 2-D, and neither an embedding nor the output head
    is_embedding: bool  # a head tied to it too
    place: int = 0  # among all trained tensors of the model
    first: int = 0  # of a shard: where its first number stands in the whole tensor
    lr_factor: float = 1.0  # its learning rate as a multiple of that of the run


def trained_parameters(model: nn.Module, lr_factor: Callable[[str], float] = lambda _name: 1.0) -> list[Trained]:
    """Parameters with `requires_grad`, once each, in the order of `model.named_parameters()`; rates by their names."""
    embeddings = _ids(module for module in model.modules() if isinstance(module, nn.Embedding))
    ends = embeddings | _ids(_output_heads(model))
    norms = _ids(module for module in model.modules() if "norm" in type(module).__name__.lower())
    trained = ((name, each) for name, each in model.named_parameters() if each.requires_grad)
    return [
        Trained(
            name=name,
            parameter=parameter,
            # Experts keep their biases in one matrix, so the number of dimensions alone does not tell.
            decays=parameter.ndim >= 2 and id(parameter) not in embeddings | norms and not name.endswith("bias"),
            is_hidden_matrix=parameter.ndim == 2 and id(parameter) not in ends,
            is_embedding=id(parameter) in embeddings,
            place=place,
            lr_factor=lr_factor(name),
        )
        for place, (name, parameter) in enumerate(trained)
    ]


def parameter_groups(members: Iterable[Trained], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups of torch by learning rate, with and without weight decay, with names; empty ones are left out.

    Groups with the rate of the run are first, and have no factor of it.
    """
    members = list(members)
    factors = sorted({each.lr_factor for each in members}, key=lambda factor: (factor != 1, factor))
    return [
        {"params": group, "weight_decay": decay} | ({} if factor == 1 else {LR_FACTOR: factor})
        for factor in factors
        for wanted, decay in ((True, weight_decay), (False, 0.0))
        if (group := [(m.name, m.parameter) for m in members if m.decays is wanted and m.lr_factor == factor])
    ]


def _ids(modules: Iterable[nn.Module]) -> set[int]:
    return {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}


def _output_heads(model: nn.Module) -> Iterable[nn.Module]:
    """Modules of the output heads; both the model and the head may be wrapped."""
    for module in model.modules():
        ask: Callable[[], nn.Module | None] | None = getattr(module, "get_output_embeddings", None)
        head = ask() if callable(ask) else None
        if head is not None:
            yield from head.modules()
