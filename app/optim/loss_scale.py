"""The scale of the loss in fp16: small gradients would be zero without it."""

from typing import Any

import torch
from torch import Tensor

START, GROWTH_INTERVAL = 65536.0, 2000


class LossScale:
    """Halved by a step that is not finite, doubled after many that are. The norm of the gradient decides, which is the
    same on every process; the host never reads it.
    """

    def __init__(self, device: torch.device, value: float = START) -> None:
        self.value = torch.tensor(value, device=device)
        self._finite_steps = torch.zeros((), dtype=torch.int32, device=device)  # since it changed

    def update(self, finite: Tensor) -> None:
        """After a step."""
        steps = torch.where(finite, self._finite_steps + 1, 0)
        grows = steps == GROWTH_INTERVAL
        self.value = torch.where(finite, torch.where(grows, self.value * 2, self.value), self.value / 2)
        self._finite_steps = torch.where(grows, 0, steps)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; names as torch's GradScaler has them, whose states are read too."""
        return {"scale": float(self.value), "_growth_tracker": int(self._finite_steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue."""
        self.value.fill_(float(state["scale"]))
        self._finite_steps.fill_(int(state["_growth_tracker"]))
