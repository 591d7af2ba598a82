"""Which norms give fp8 layers their rows: seen while the network computes once.

Such norms round their output as they make it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from app.model.fp8.layer import Fp8Linear
from app.model.fused.norm import RootNorm


@dataclass(frozen=True, slots=True)
class NormOf:
    """A norm with the weight of its module, and the layers that are given just its output."""

    module: Any
    norm: RootNorm
    readers: list[Fp8Linear] = field(default_factory=list)

    def __call__(self, x: Tensor) -> Tensor:
        """Of rows in any leading shape."""
        return self.norm(x, self.module.weight, self.readers)


@contextmanager
def readers_watched(network: nn.Module, norms: Iterable[Any]) -> Iterator[None]:
    """Inside, whatever `network` computes tells the readers of `norms`, which are of the kind above."""
    layers = [module for module in network.modules() if isinstance(module, Fp8Linear)]
    made: dict[int, tuple[Tensor, int, NormOf]] = {}  # kept until the end: another would get the same id
    hooks = []
    try:
        for norm in norms if layers else ():
            hooks.append(norm.module.register_forward_hook(partial(_note, made, norm)))
        for layer in layers:
            hooks.append(layer.register_forward_pre_hook(partial(_settle, made)))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _note(made: dict[int, Any], norm: NormOf, _module: Any, _given: Any, out: Tensor) -> None:
    made[id(out)] = out, out._version, norm


def _settle(made: dict[int, Any], layer: Fp8Linear, given: tuple[Any, ...]) -> None:
    out, version, norm = made.get(id(given[0]), (None, None, None))
    if out is not None and out._version == version and layer not in norm.readers:
        norm.readers.append(layer)
        layer.given_by = norm.norm.form
