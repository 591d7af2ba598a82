"""What all ways to hold a frozen base in fewer bits have in common: which layers they take, how they replace them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

POOLER = "pooler."  # of a backbone; it belongs to the head, which stays as it is


class Packing(ABC):
    """One way. Whoever builds, loads or plans a model asks this, and knows no kind by name."""

    kind: str  # as quantization.kind has it
    # whether the adapter is worth less on a base that is not packed: then whoever uses it later packs alike
    goes_with_adapter: bool

    def pack(self, part: nn.Module) -> None:
        """Every plain linear layer inside `part`, in place; the unpacked weights are let go one by one."""
        for name, layer in list(part.named_modules()):
            if is_linear(layer) and not name.startswith(POOLER):
                self.pack_one(part, name)

    def pack_one(self, part: nn.Module, name: str) -> None:
        """The same for the layer of this name."""
        part.set_submodule(name, self.packed(part.get_submodule(name)))

    @abstractmethod
    def packed(self, layer: Any) -> nn.Module:
        """What takes the place of a plain linear layer, frozen."""

    @abstractmethod
    def unpacked(self, weight: Tensor) -> Tensor:
        """A linear layer's weight [out, in] as the packed layer has it, in the dtype that it came in."""

    @abstractmethod
    def unfit(self, name: str, outputs: int, inputs: int) -> str | None:
        """Why a layer of these sizes cannot be packed."""

    def missing(self, device: torch.device) -> str | None:  # noqa: ARG002
        """What this device lacks to compute with packed layers, and what to do; None: nothing."""
        return None

    def slow_on(self, device: str) -> str | None:  # noqa: ARG002
        """A note, where it is only good for trying out."""
        return None

    def for_transformers(self, outside: list[str]) -> Any | None:  # noqa: ARG002
        """What from_pretrained is told to pack each weight as it is read; None: it cannot."""
        return None

    def bitsandbytes(self, outside: list[str]) -> dict[str, Any] | None:  # noqa: ARG002
        """The same as plain arguments of BitsAndBytesConfig, for whoever loads the base elsewhere; None: as it is."""
        return None

    def settle(self, lm: Any) -> None:  # noqa: ARG002
        """After all of it was packed."""
        return


def is_linear(layer: nn.Module) -> bool:
    """Of those that are replaced, not replaced yet."""
    return type(layer) is nn.Linear or type(layer).__name__ == "Conv1D"


def sizes(layer: Any) -> tuple[int, int]:
    """Outputs and inputs."""
    rows, columns = layer.weight.shape
    return (rows, columns) if isinstance(layer, nn.Linear) else (columns, rows)  # Conv1D has it transposed


def weight_of(layer: Any) -> Tensor:
    """[out, in]."""
    weight: Tensor = layer.weight.detach()
    return weight if isinstance(layer, nn.Linear) else weight.T


def constants_of(weight: Any) -> Iterator[Tensor]:
    """What a packed weight needs to be unpacked, where it is no part of its layer."""
    state = getattr(weight, "quant_state", None)
    while state is not None:
        yield from (each for each in (state.absmax, state.code, state.offset) if isinstance(each, Tensor))
        state = state.state2
