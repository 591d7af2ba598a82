"""How a model's weights are held: for whoever loads them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Held:
    """`attention`: a name that transformers knows."""

    dtype: torch.dtype
    device: torch.device
    attention: str
