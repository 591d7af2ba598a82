"""What a method of adapting a frozen base answers about itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from app.adapters.lora_inits import Lost, Rows
from app.base.base_weights import Put
from app.config.schema import AdapterConfig


@dataclass(frozen=True, slots=True)
class AdapterMethod(ABC):
    """One method of PEFT with its settings: what building, checking, stepping, loading and merging a model ask."""

    peft_type: ClassVar[str] = ""  # in adapter_config.json
    # its own keys in that file, with the values that runs write
    written: ClassVar[Mapping[str, Callable[[Any], bool]]] = {}
    of_text_parts: ClassVar[bool] = True  # whether it can be saved with the names of a composite model (vision, audio)

    config: AdapterConfig

    @classmethod
    def keys_of(cls, peft_type: str) -> Mapping[str, Callable[[Any], bool]] | None:
        """Its own keys in adapter_config.json, with what tells the values that runs write; None: not its file."""
        return cls.written if peft_type == cls.peft_type else None

    @property
    @abstractmethod
    def moves_in(self) -> Mapping[int, str]:
        """By step, skipped ones not counted: the part of names of which each layer must get a gradient."""

    @property
    @abstractmethod
    def trained(self) -> tuple[str, ...]:
        """Parameters that are trained, by the ends of their names, after the layer's."""

    @property
    def of_norms(self) -> bool:
        """Whether it adapts norms in place of linear layers."""
        return False

    def trained_of(self, layers: Iterable[str], names: Iterable[str]) -> set[str]:  # noqa: ARG002
        """Names of parameters that are meant to be trained; `names`: of those that PEFT trains."""
        return {layer + end for layer in layers for end in self.trained}

    def usual_targets(self, lm: Any) -> Collection[str]:  # noqa: ARG002
        """Ends of names of the layers that it adapts where none are given; empty: all."""
        return ()

    @property
    def on_meta(self) -> bool:
        """Whether it is attached to a base on meta, and drawn once that is filled; else to a filled one."""
        return False

    @abstractmethod
    def peft_config(self, lm: Any, layers: list[str], shared: Mapping[str, Any]) -> Any:
        """The configuration of PEFT, or a refusal; `shared` are the arguments of every method."""

    def require_divisible(self) -> None:  # noqa: B027
        """Refuse to be divided by layers, where these share tensors."""

    def refusing(self) -> AbstractContextManager[None]:
        """Around attaching it: what turns errors of PEFT into problems of the settings."""
        return nullcontext()

    def draw(self, network: nn.Module, device: torch.device, put: Put) -> None:
        """Draw what was attached on meta."""
        raise NotImplementedError("draw: the weights of an adapter that is attached on meta")

    @property
    def begin(self) -> Callable[[Any, Rows, Lost], str] | None:
        """What gives a new adapter on a filled base, a TrainingModel, its numbers where attaching it does not."""
        return None

    def lr_factor(self, name: str) -> float:  # noqa: ARG002
        """Learning rate of a trained parameter as a multiple of that of the run."""
        return 1.0
