"""How a model's weights are held: for whoever loads them."""

from dataclasses import dataclass

import torch

from app.model.lending import Lending


@dataclass(frozen=True, slots=True)
class Held:
    """`attention`: a name that transformers knows; `lending`: who keeps which layers, where several processes share."""

    dtype: torch.dtype
    device: torch.device
    attention: str
    lending: Lending | None = None
