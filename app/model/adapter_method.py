"""What a method of adapting a frozen base answers about itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from app.config.schema import AdapterConfig
from app.model.base_weights import Put


@dataclass(frozen=True, slots=True)
class AdapterMethod(ABC):
    """One method of PEFT with its settings: what building, checking, stepping, loading and merging a model ask."""

    peft_type: ClassVar[str]  # in adapter_config.json
    # its own keys in that file, with the values that runs write
    written: ClassVar[Mapping[str, Callable[[Any], bool]]]
    moves_in: ClassVar[Mapping[int, str]]  # by step, skipped ones not counted: those of them that must get a gradient

    config: AdapterConfig

    @property
    @abstractmethod
    def trained(self) -> tuple[str, ...]:
        """Parameters that are trained, by the ends of their names, after the layer's."""

    @property
    def on_meta(self) -> bool:
        """Whether it is attached to a base on meta, and drawn once that is filled; else to a filled one."""
        return False

    @abstractmethod
    def peft_config(self, lm: Any, layers: list[str], shared: Mapping[str, Any]) -> Any:
        """The configuration of PEFT, or a refusal; `shared` are the arguments of every method."""

    def draw(self, network: nn.Module, device: torch.device, put: Put) -> None:
        """Draw what was attached on meta."""
        raise NotImplementedError("draw: the weights of an adapter that is attached on meta")

    def lr_factor(self, name: str) -> float:  # noqa: ARG002
        """Learning rate of a trained parameter as a multiple of that of the run."""
        return 1.0
