"""That the installed versions work together on a GPU."""

import torch


def test_nf4_survives_the_way_to_the_gpu_and_back() -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weights = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    results: list[torch.Tensor] = []
    for device in ("cpu", "cuda"):
        packed, state = quantize_4bit(weights.to(device), blocksize=64, quant_type="nf4")
        results.append(dequantize_4bit(packed, state).cpu())
    on_cpu, on_gpu = results
    assert torch.allclose(on_cpu, on_gpu, atol=1e-6)
    assert 0 < (on_cpu - weights).norm() / weights.norm() < 0.15
