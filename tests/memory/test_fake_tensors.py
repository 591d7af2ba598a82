"""Plans run no kernel on real tensors, which would need the memory of a whole model."""

from typing import Any

import pytest
import torch._subclasses.fake_tensor as fake_tensor

from app.memory.estimate import plan_memory
from app.optim.optimizers import OPTIMIZERS
from tests.memory.truth import PACKED, small_run


@pytest.mark.parametrize(
    ("recipe", "optimizer"), [*(("full", each) for each in sorted(OPTIMIZERS)), ("qlora", "paged_adamw_8bit")]
)
def test_plan_runs_no_fallback_kernel(recipe: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch runs an operation without a fake kernel on real zeros, the fallback kernel."""
    operations: list[str] = []
    run_kernel = fake_tensor.run_fallback_kernel

    def recorded(mode: Any, operation: Any, *rest: Any) -> Any:
        operations.append(str(operation))
        return run_kernel(mode, operation, *rest)

    monkeypatch.setattr(fake_tensor, "run_fallback_kernel", recorded)
    plan_memory(small_run(f"recipe={recipe}", f"optimizer={optimizer}", "precision=bf16"), PACKED)
    assert operations == []
