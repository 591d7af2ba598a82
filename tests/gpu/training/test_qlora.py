"""QLoRA: the defaults of its recipe fit 24 GB; losses near those that a CPU gives in fp32."""

from pathlib import Path

import pytest
import torch

from app.config.load import compose_run
from app.data.prepare import Data
from tests.training.test_memory import CARD, RECIPE, require_four_bits, two_steps
from tests.training.test_qlora_golden import GOLDEN, losses, run_on_a_saved_base


def test_llama_8b_with_defaults_fits_24_gb() -> None:
    """All layers recomputed, the most that `training.recompute=auto` chooses."""
    run = compose_run(RECIPE)
    assert (run.batching.tokens, run.training.recompute) == (4096, "auto")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    stepper = two_steps(run)
    assert torch.cuda.max_memory_reserved() < CARD
    require_four_bits(stepper, layers=32)
    large = [p for p in stepper.model.trained().values() if p.numel() >= 100_000]
    assert len(large) == 12 * 32  # all but lora_B of keys and values
    for parameter in large:
        state = stepper.optimizer.state[parameter]
        assert state["state1"].dtype == torch.uint8
        assert state["state1"].is_paged
        assert state["state2"].is_paged


def test_on_a_gpu_they_are_near(tmp_path: Path, data: Data) -> None:
    found = losses(run_on_a_saved_base(tmp_path, "precision=bf16", "attention=auto"), data)
    assert found == pytest.approx(GOLDEN, rel=2e-2)
