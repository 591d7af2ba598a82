"""Layer inputs offloaded to the host: gradients equal to the bit, and less GPU memory."""

import torch
from torch import Tensor

from app.layers.activation_checkpointing import HostOffload


def layer(given: Tensor) -> Tensor:
    """Stays finite, and far from zero, through many layers."""
    return given + (given @ given.mT).tanh() @ given / given.shape[1]


def test_offload_gradients_equal_and_peak_is_lower() -> None:
    """Many layers, so that their inputs are most of what lives."""
    from torch.utils.checkpoint import checkpoint

    def run(host: HostOffload | None) -> tuple[Tensor, int]:
        torch.manual_seed(0)
        x = torch.randn(1, 4096, 1024, device="cuda", requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        y = x * 1.0
        for at in range(24):
            with host.offload(at) if host else torch.enable_grad():
                y = checkpoint(layer, y, use_reentrant=False)
        y.sum().backward()
        assert x.grad is not None
        return x.grad, torch.cuda.max_memory_allocated()

    run(None)
    (here, much), (away, less) = run(None), run(HostOffload())
    assert here.isfinite().all()
    assert here.std() > 1
    assert torch.equal(here, away)
    assert much - less > 15 * 4096 * 1024 * 4
