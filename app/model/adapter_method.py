"""What a method of adapting a frozen base answers about itself."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from app.config.schema import AdapterConfig
from app.model.base_weights import Put


@dataclass(frozen=True, slots=True)
class AdapterMethod(ABC):
    """One method of PEFT with its settings: what building, checking, stepping, loading and merging a model ask."""

    peft_type: ClassVar[str]  # in adapter_config.json
    # its own keys in that file, with the values that runs write
    written: ClassVar[Mapping[str, Callable[[Any], bool]]]
    trained: ClassVar[tuple[str, ...]]  # parameters, by the ends of their names, after the layer's
    moves_in: ClassVar[Mapping[int, str]]  # by step, skipped ones not counted: those of them that must get a gradient
    # whether it is attached to a base on meta, and drawn once that is filled; else it is attached to a filled one
    on_meta: ClassVar[bool] = False
    # names in the file, of a `layer` and a `part` of it, that `merged` takes; None: nothing is merged
    mergeable: ClassVar[re.Pattern[str] | None] = None

    config: AdapterConfig

    @abstractmethod
    def peft_config(self, lm: Any, layers: list[str], shared: Mapping[str, Any]) -> Any:
        """The configuration of PEFT, or a refusal; `shared` are the arguments of every method."""

    def draw(self, network: nn.Module, device: torch.device, put: Put) -> None:
        """Draw what was attached on meta."""
        raise NotImplementedError("draw: the weights of an adapter that is attached on meta")

    def lr_factor(self, name: str) -> float:  # noqa: ARG002
        """Learning rate of a trained parameter as a multiple of that of the run."""
        return 1.0

    @staticmethod
    def merged(weight: Tensor, config: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Tensor:
        """The weight [out, in] of a layer with its adapter, in fp32; `config` is adapter_config.json."""
        raise NotImplementedError("merged: the weight of an adapted layer")
