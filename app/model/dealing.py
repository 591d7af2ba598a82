"""Which of several processes keeps what, by shapes alone."""

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor, nn

from app.model.quantization import constants_of
from app.model.recompute import repeated_layers

_Key = TypeVar("_Key")


def owners_of(lm: nn.Module, processes: int, *, trained: bool) -> dict[str, int]:
    """Who keeps the tensors of each module, by its name: of those inside layers, or of all if they are `trained`."""
    inside = {part for layer in repeated_layers(lm) for part in layer.modules()}
    seen: set[int] = set()
    sizes: dict[str, int] = {}
    for name, module in lm.named_modules():
        own = [each for each in module.parameters(recurse=False) if id(each) not in seen]
        seen |= {id(each) for each in own}
        if own and (trained or module in inside):
            sizes[name] = sum(each.numel() * each.element_size() for each in own)
    return deal(sizes, processes)


def deal(sizes: Mapping[_Key, int], processes: int) -> dict[_Key, int]:
    """The largest first, to who has least."""
    owners, loads = {}, [0] * processes
    for key in sorted(sizes, key=lambda each: -sizes[each]):
        owners[key] = min(range(processes), key=lambda rank: loads[rank])
        loads[owners[key]] += sizes[key]
    return owners


def held_by(module: nn.Module) -> list[Tensor]:
    """A module's own tensors, as plain ones: weights, buffers, and what packed weights need to be unpacked."""
    weights = list(module.parameters(recurse=False))
    for weight in weights:
        if (
            weight.untyped_storage().nbytes() > weight.nbytes
        ):  # a piece of a file, or of what was read with it
            weight.data = weight.data.clone()
    constants = [each for weight in weights for each in constants_of(weight)]
    return [each.data for each in (*weights, *module.buffers(recurse=False), *constants)]
