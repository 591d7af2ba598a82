"""The layers that stand for further ones: of each sort one between others of it, that begins and ends nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from app.engine.reduction import bytes_of
from app.model.offload import Host
from app.model.packing import constants_of
from app.model.recompute import repeated_layers
from app.model.trainee import Trainee
from app.plan.share import named_states, of_several
from app.plan.whose import AGAIN, NOBODY, PLAIN, LayerCounter


@dataclass(frozen=True, slots=True)
class Middle:
    """One of the layers, the one below it, and what it is called in the trainee."""

    sort: int
    name: str
    layer: nn.Module
    below: nn.Module

    @property
    def trained(self) -> list[nn.Parameter]:
        """Of its parameters."""
        return [each for each in self.layer.parameters() if each.requires_grad]

    def weights(self) -> list[Tensor]:
        """And what they are packed with."""
        weights = list(self.layer.parameters())
        return [*weights, *self.layer.buffers(), *(each for w in weights for each in constants_of(w))]

    def states(self, optimizer: Optimizer) -> list[Tensor]:
        """Of its parameters."""
        own = (tensors for name, tensors in named_states(optimizer) if name.startswith(f"{self.name}."))
        return list(chain.from_iterable(own))

    def host_bytes(self, optimizer: Optimizer) -> int:
        """Of states that are paged to the host."""
        return sum(bytes_of(each) for each in self.states(optimizer) if each.is_meta)


def middles(trainee: Trainee, recomputed: int) -> list[Middle]:
    """Of a trainee whose first layers are recomputed; none of a sort that has fewer than three.

    Where inputs wait on the host the second recomputed layer is special too, so it is the last but one that is taken.
    """
    layers = repeated_layers(trainee.language_model)
    places = {AGAIN: recomputed - 2, PLAIN: len(layers) - 2}
    count = {AGAIN: recomputed, PLAIN: len(layers) - recomputed}
    names = {id(module): name for name, module in trainee.named_modules()}
    return [
        Middle(sort, names[id(layers[at])], layers[at], layers[at - 1])
        for sort, at in places.items()
        if count[sort] > 2
    ]


def take_turns(middle: Middle, counter: LayerCounter) -> None:
    """Whenever it computes it is its turn. What it is given is its own, what it returns is not, back and forth."""

    def begin(_module: Any, _args: Any) -> None:
        counter.turn(middle.sort)

    def end(out: Tensor) -> None:
        counter.turn(NOBODY)
        counter.give(NOBODY, [out])

    def returned(gradients: Sequence[Tensor | None]) -> None:
        counter.turn(NOBODY)
        counter.give(NOBODY, [each for each in gradients if each is not None])

    middle.layer.register_forward_pre_hook(begin)
    _after(middle.layer, end, lambda _: counter.turn(middle.sort))
    _after(middle.below, lambda out: counter.give(middle.sort, [out]), returned)


def _after(
    layer: nn.Module, forward: Callable[[Tensor], None], backward: Callable[[Sequence[Tensor | None]], None]
) -> None:
    """`backward` is called before the layer's, with the gradients of what it returned."""

    def hook(_module: Any, _args: Any, out: Any) -> None:
        tensor = out[0] if isinstance(out, tuple) else out
        forward(tensor)
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(backward)

    layer.register_forward_hook(hook)


class Waiting(Host):
    """Inputs of layers on the host, and what of them waits for each sort: all of them are equal."""

    def __init__(self, device: str, counter: LayerCounter) -> None:
        super().__init__(device)
        self._counter = counter
        self._one = 0

    def offloaded(self) -> dict[int, int]:
        """Bytes: of all under nobody, and of a further layer that is recomputed."""
        return {NOBODY: self.bytes, AGAIN: self._one}

    def _sent(self, tensor: Tensor) -> Tensor:
        self._one = tensor.nbytes
        return super()._sent(tensor)

    def _fetched(self, away: Any) -> tuple[Tensor, Any]:
        """For the layer below the one whose turn it is."""
        tensor, arrived = super()._fetched(away)
        self._counter.give(NOBODY, [tensor])
        return tensor, arrived


def give_what_is_kept(among: Sequence[Middle], optimizer: Optimizer, counter: LayerCounter) -> None:
    """From step to step. A state that several parameters share is nobody's."""
    shared = of_several(optimizer)
    for middle in among:
        own = (each for each in middle.states(optimizer) if each.untyped_storage()._cdata not in shared)
        counter.give(middle.sort, [*middle.weights(), *own])
