"""What a run is told of its memory before its weights are loaded."""

from app.batch import Batch
from app.config.schema import RunConfig
from app.engine.choices import Choices
from app.engine.memory import Predicted
from app.engine.world import world
from app.plan.memory_plan import Shape
from app.plan.planner import plan_memory


def predict(run: RunConfig, choices: Choices, largest: Batch, micro_batches: int, device: str) -> Predicted:
    """On a CPU one step is counted, so it is a step that is predicted."""
    on_cpu = device == "cpu"
    shape = Shape.of(largest, micro_batches)
    plan = plan_memory(
        run, shape, "cpu" if on_cpu else "gpu", choices=choices, steps_only=on_cpu, processes=world().size
    )
    return Predicted(plan.peak_bytes, plan.peak_where, plan.anatomy)
