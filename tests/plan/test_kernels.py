"""The ways of a GPU, whose kernels take nothing and whose packed weights share one room, planned as they are."""

import pytest

from app.model.kernels import as_on_gpu
from app.plan.planner import plan_memory
from tests.plan.test_truth import NEAR
from tests.plan.truth import PACKED, counted_peak, small_run


@pytest.mark.parametrize("recipe", ["full", "lora", "qlora"])
def test_equals_a_real_step(recipe: str) -> None:
    run = small_run(f"recipe={recipe}", "training.recompute=0")
    with as_on_gpu():
        planned = plan_memory(run, PACKED, "cpu").peak_bytes
        assert abs(planned - counted_peak(run, PACKED)) <= NEAR


def test_a_plan_for_a_gpu_has_the_room_once() -> None:
    """As large as the largest weight, and it stays; without fused layers bitsandbytes unpacks each by itself."""
    run = small_run("recipe=qlora", "precision=bf16", "model.architecture.intermediate_size=12800")
    plan = plan_memory(run, PACKED, "gpu", exact=True)
    assert plan.events is not None
    room = 2 * 128 * 12800
    assert [size for _, size in plan.events if size == room] == [room]
    assert -room not in [size for _, size in plan.events]
