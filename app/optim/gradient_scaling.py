"""Sum of squares of a gradient, the fp16 loss scale, and steps that are skipped on the device.

torch's fused optimizers read a flag in device memory within the kernel: the contract they have with torch's gradient
scaler. `step_unless` is the one place that relies on it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of squares in float64, so that it does not depend on how the gradient is sharded."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(list(gradients), 2.0, dtype=torch.float64)
    total: Tensor = torch.stack(list(norms)).square().sum()
    return total


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether `step_unless` works; else the caller must read the flag and leave the step out."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_unless(optimizer: Optimizer, found_inf: Tensor) -> None:
    """Step; changes neither parameters nor states if `found_inf`, a float32 scalar, is 1 and not 0."""
    assert skips_on_device(optimizer)
    assert found_inf.ndim == 0, "the step counters are scalars and take the flag off in place"
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


START, GROWTH_INTERVAL = 65536.0, 2000  # initial scale; finite steps before it doubles


class LossScale:
    """Loss scale of fp16: halved by a step that is not finite, doubled after many finite ones.

    As torch's GradScaler, but decided by the gradient norm, which is equal on every rank.
    """

    def __init__(self, device: torch.device, value: float = START) -> None:
        self.value = torch.tensor(value, device=device)
        self._finite_steps = torch.zeros((), dtype=torch.int32, device=device)  # since it changed

    def update(self, finite: Tensor) -> None:
        found_inf = (~finite).float().to(self.value.device)
        torch._amp_update_scale_(self.value, self._finite_steps, found_inf, 2.0, 0.5, GROWTH_INTERVAL)

    def state_dict(self) -> dict[str, Any]:
        """State under the names of torch's GradScaler."""
        return {"scale": float(self.value), "_growth_tracker": int(self._finite_steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value.fill_(float(state["scale"]))
        self._finite_steps.fill_(int(state["_growth_tracker"]))
