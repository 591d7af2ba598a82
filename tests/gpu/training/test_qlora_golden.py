"""A small QLoRA run whose losses are known: a CPU gives them in fp32, a GPU in bf16 with its own kernels comes near."""

from pathlib import Path

import pytest

from app.data.prepare import Data
from tests.training.test_qlora_golden import GOLDEN, losses, run_on_a_saved_base


def test_on_a_gpu_they_are_near(tmp_path: Path, data: Data) -> None:
    found = losses(run_on_a_saved_base(tmp_path, "precision=bf16", "attention=auto"), data)
    assert found == pytest.approx(GOLDEN, rel=2e-2)
