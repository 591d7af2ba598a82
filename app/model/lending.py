"""Weights of repeated layers, each kept by one of several processes and lent to the others while a layer computes.

Forward: as a layer begins, the weights of the one above are on their way; what was lent is let go as it ends. Backward:
the same, from the last layer to the first. A tensor that is lent keeps its shape and gives up its memory, so whoever
holds it (autograd, an optimizer, a fused pass) need not know. What lies outside repeated layers is read at both ends of
a pass and stays where it is; so do small tensors, which would cost a message each.

All processes make the same passes in the same order, or wait for each other for ever: `serve` is a pass of a process
that has nothing to compute in it, `led` and `follow` are passes that one process makes alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from app.model.dealing import held_by, owners_of
from app.model.recompute import repeated_layers

LEAST_BYTES = 32 << 10  # of a tensor that is lent

_OPS = torch.library.Library("app_lending", "DEF")
_OPS.define("room(Tensor(a!) tensor, int size) -> ()")


def _room(tensor: Tensor, size: int) -> None:
    tensor.untyped_storage().resize_(size)


_OPS.impl("room", _room, "CompositeExplicitAutograd")
ROOM = torch.ops.app_lending.room.default  # an operation, so that whoever counts memory sees it


class Wire(Protocol):
    """What goes from process to process."""

    def broadcast(self, tensor: Tensor, of: int) -> Any:
        """To all of them, in place; returns what can be waited for."""

    def highest(self, value: float) -> float:
        """Of all processes' values."""


@dataclass(frozen=True, slots=True)
class Lent:
    """A tensor, and the name of the module that has it."""

    name: str
    tensor: Tensor
    size: int
    owner: int


@dataclass(slots=True)
class _Layer:
    lent: list[Lent] = field(default_factory=list)
    coming: list[Any] | None = None  # what to wait for; None: it is away
    is_here: bool = False


class Lending:
    """Of one network. `trained`: whether its weights are, so that what lies outside of layers is dealt with them."""

    def __init__(self, wire: Wire, rank: int, processes: int, *, trained: bool) -> None:
        self.rank = rank
        self._wire = wire
        self._processes = processes
        self._trained = trained
        self._owners: Mapping[str, int] = {}  # by the name of a module
        self._layers: list[_Layer] = []
        self._modules: Sequence[nn.Module] = ()
        self._layer_of: dict[str, _Layer] = {}
        self._known: dict[int, tuple[int, Tensor]] = {}  # owners, by the address of a storage
        self._lent: set[int] = set()  # such addresses
        self._leads = self._goes_back = False

    def deal(self, lm: nn.Module) -> None:
        """Decide who keeps what, by shapes alone: `lm` may be on meta."""
        self._owners = owners_of(lm, self._processes, trained=self._trained)
        modules = repeated_layers(lm)
        self._layers = [_Layer() for _ in modules]
        places = dict(zip(modules, self._layers, strict=True))
        for name, module in lm.named_modules():
            if module in places:
                self._layer_of |= {
                    _joined(name, inside): places[module] for inside, _ in module.named_modules()
                }

    def take(self, name: str, module: nn.Module) -> None:
        """The tensors of a module, known by its name as it was dealt: kept here from now on, or let go."""
        layer, owner = self._layer_of.get(name), self._owners.get(name)
        if owner is None:
            return
        for tensor in held_by(module):
            size = tensor.numel() * tensor.element_size()
            storage = tensor.untyped_storage()
            if storage._cdata in self._known or tensor.is_meta:
                continue
            self._known[storage._cdata] = owner, tensor
            if layer is None or size < LEAST_BYTES or storage.nbytes() != size:  # others have a part of it
                continue
            flat = tensor.as_strided((tensor.numel(),), (1,))  # what is sent must be contiguous
            layer.lent.append(Lent(name, flat, size, owner))
            self._lent.add(storage._cdata)
            if owner != self.rank:
                ROOM(tensor, 0)

    def take_layer(self, lm: nn.Module, layer: nn.Module) -> None:
        """The same of all of a layer."""
        place = next(name for name, module in lm.named_modules() if module is layer)
        for inside, module in layer.named_modules():
            self.take(_joined(place, inside), module)

    def settle(self, lm: nn.Module) -> None:
        """All that was not taken yet; from here on layers call for what they need."""
        if not self._layers:
            self.deal(lm)
        for name, module in lm.named_modules():
            self.take(name, module)
        self.serve_layers(repeated_layers(lm))

    def serve_layers(self, modules: Sequence[nn.Module]) -> None:
        """These call for what they need."""
        self._modules = modules
        for at, module in enumerate(modules):
            module.register_forward_pre_hook(partial(self._begins, at))
            module.register_forward_hook(partial(self._ends, at))

    def owner_of(self, weight: Tensor) -> int | None:
        """Who keeps it, and steps it if it is trained; None for what came later, as adapters do."""
        known = self._known.get(weight.untyped_storage()._cdata)
        return None if known is None else known[0]

    @property
    def lent(self) -> list[Lent]:
        """All that is."""
        return [each for layer in self._layers for each in layer.lent]

    @property
    def away(self) -> list[Tensor]:
        """What other processes keep."""
        return [each.tensor for each in self.lent if each.owner != self.rank]

    def is_lent(self, weight: Tensor) -> bool:
        """Whether it is let go where it is not kept."""
        return weight.untyped_storage()._cdata in self._lent

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """Inside, this module of one of the layers, or a layer itself, has its weights. All processes together."""
        inside = (
            at for at, each in enumerate(self._modules) if any(module is part for part in each.modules())
        )
        away = [at for at in inside if not self._layers[at].is_here]
        for at in away:
            self._wait_for(at)
        try:
            yield
        finally:
            for at in away:
                self._let_go(at)

    def state_on_host(self, lm: nn.Module) -> dict[str, Tensor]:
        """All of the model's tensors, layers in memory of the host; empty but for the first process."""
        is_first = self.rank == 0
        state = dict(lm.state_dict()) if is_first else {}
        names = {module: name for name, module in lm.named_modules()}
        for module in self._modules:
            with self.whole(module):
                if is_first:
                    held = module.state_dict(prefix=f"{names[module]}.")
                    state |= {name: tensor.to("cpu", copy=True) for name, tensor in held.items()}
        return state

    def serve(self, *, backward: bool = False, lowest: int = 0) -> None:
        """A pass of other processes. `lowest`: the layer that a backward pass ends with."""
        for at in range(len(self._layers)):
            self._forward(at)
            self._after(at, keeps=backward)
        if backward:
            for at in reversed(range(lowest, len(self._layers))):
                self._backward(at)
            self._let_all_go()

    @contextmanager
    def led(self) -> Iterator[None]:
        """Passes inside are of this process alone; the others `follow`."""
        self._leads = True
        try:
            yield
        finally:
            self._leads = False
        self._wire.highest(0)

    def follow(self) -> None:
        """Until whoever leads has come to the end."""
        while self._wire.highest(0):
            self.serve()

    def _begins(self, at: int, _module: nn.Module, _given: Any) -> None:
        if at == 0:
            self._goes_back = False  # a backward pass that failed has not come to its end
            if self._leads:
                self._wire.highest(1)
        self._forward(at)

    def _ends(self, at: int, _module: nn.Module, _given: Any, out: Any) -> None:
        goes_back = [each for each in _tensors(out) if each.requires_grad]
        for each in goes_back[:1]:
            each.register_hook(partial(self._turns_to, at))
        self._after(at, keeps=bool(goes_back))

    def _turns_to(self, at: int, _gradient: Tensor) -> None:
        if not self._goes_back:
            self._goes_back = True
            torch.autograd.Variable._execution_engine.queue_callback(self._let_all_go)
        self._backward(at)

    def _forward(self, at: int) -> None:
        self._wait_for(at)
        self._call_for(at + 1)

    def _after(self, at: int, *, keeps: bool) -> None:
        """The last layer is the first to be needed again."""
        if not (keeps and at == len(self._layers) - 1):
            self._let_go(at)

    def _backward(self, at: int) -> None:
        for above in range(at + 1, len(self._layers)):
            self._let_go(above)
        self._wait_for(at)
        self._call_for(at - 1)

    def _let_all_go(self) -> None:
        self._goes_back = False
        for at in range(len(self._layers)):
            self._let_go(at)

    def _call_for(self, at: int) -> None:
        if not 0 <= at < len(self._layers) or self._layers[at].coming is not None:
            return
        layer = self._layers[at]
        for each in layer.lent:
            if each.owner != self.rank:
                ROOM(each.tensor, each.size)
        layer.coming = [self._wire.broadcast(each.tensor, each.owner) for each in layer.lent]

    def _wait_for(self, at: int) -> None:
        self._call_for(at)
        layer = self._layers[at]
        if not layer.is_here:
            for work in layer.coming or ():
                work.wait()
            layer.is_here = True

    def _let_go(self, at: int) -> None:
        layer = self._layers[at]
        if layer.coming is None:
            return
        self._wait_for(at)
        for each in layer.lent:
            if each.owner != self.rank:
                ROOM(each.tensor, 0)
        layer.coming, layer.is_here = None, False


def owned(lending: Lending | None, weights: Iterable[nn.Parameter]) -> dict[nn.Parameter, int]:
    """Of these the ones that somebody keeps, and who."""
    if lending is None:
        return {}
    return {each: owner for each in weights if (owner := lending.owner_of(each)) is not None}


def whole(lending: Lending | None, module: nn.Module) -> Any:
    """Inside, the weights of a module are there, lent or not."""
    return nullcontext() if lending is None else lending.whole(module)


def _tensors(out: Any) -> list[Tensor]:
    """What a layer returns: states, or those first among other things."""
    several = out if isinstance(out, list | tuple) else (out,)
    return [each for each in several if isinstance(each, Tensor)]


def _joined(name: str, inside: str) -> str:
    return f"{name}.{inside}" if inside else name
