"""Skipping a step without asking the device first.

torch's fused optimizers read a flag in device memory within the kernel. This is the contract they have with
torch's gradient scaler; here is the one place that relies on it.
"""

from torch import Tensor
from torch.optim import Optimizer


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
