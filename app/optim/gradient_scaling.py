"""The norm of a gradient."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of all squares in float64, so that it does not depend on how the gradient is divided among processes."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(list(gradients), 2.0, dtype=torch.float64)
    total: Tensor = torch.stack(list(norms)).square().sum()
    return total


def scale_gradients(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """In place, without reading the factor."""
    torch._foreach_mul_(list(gradients), factor)


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What a gradient of this norm is multiplied with."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether `step_unless` works for it; else the caller must read the flag and leave the step out."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_unless(optimizer: Optimizer, found_inf: Tensor) -> None:
    """A step that changes neither parameters nor states if `found_inf`, a float32 scalar, is 1 and not 0."""
    assert skips_on_device(optimizer)
    assert found_inf.ndim == 0, "the step counters are scalars and take the flag off in place"
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


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
