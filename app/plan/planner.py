"""The plan of a run: its step traced on fake tensors, depth extrapolated from small traces."""

from app.config.schema import RunConfig
from app.engine.choices import Choices
from app.plan.memory_plan import MemoryPlan, Shape


def plan_memory(
    run: RunConfig, shape: Shape, device: str = "gpu", *, exact: bool = False, choices: Choices | None = None
) -> MemoryPlan:
    """Of one process. `device`: gpu or cpu; `exact` traces every layer; `choices` of a run that has made them."""
    raise NotImplementedError
