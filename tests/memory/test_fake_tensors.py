"""A plan never computes: what has no form without memory would take that of a whole model, and its time."""

from typing import Any

import pytest
import torch._subclasses.fake_tensor as torchs

from app.memory.estimate import plan_memory
from app.optim.optimizers import OPTIMIZERS
from tests.memory.truth import PACKED, small_run


@pytest.mark.parametrize(
    ("recipe", "optimizer"), [*(("full", each) for each in sorted(OPTIMIZERS)), ("qlora", "paged_adamw_8bit")]
)
def test_nothing_is_made_on_real_tensors(
    recipe: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which torch does with an operation that it knows no shapes of."""
    made: list[str] = []
    own = torchs.run_fallback_kernel

    def noted(mode: Any, operation: Any, *rest: Any) -> Any:
        made.append(str(operation))
        return own(mode, operation, *rest)

    monkeypatch.setattr(torchs, "run_fallback_kernel", noted)
    plan_memory(small_run(f"recipe={recipe}", f"optimizer={optimizer}", "precision=bf16"), PACKED)
    assert made == []
