"""The plan of a run: its step traced on tensors without memory, the depth extrapolated from small traces."""

from dataclasses import replace

from app.config.schema import PrecisionConfig, RunConfig
from app.engine.choices import Choices
from app.engine.ground import sections_of
from app.engine.precision import choose_precision
from app.model.attention import register, register_kernel
from app.model.outline import Outline
from app.plan import attention
from app.plan.depth import planned
from app.plan.memory_plan import MemoryPlan, Shape
from app.plan.trace import Asked


def plan_memory(
    run: RunConfig, shape: Shape, device: str = "gpu", *, exact: bool = False, choices: Choices | None = None
) -> MemoryPlan:
    """Of one process. `device`: gpu or cpu; `exact` traces every layer; `choices` of a run that has made them."""
    choices = choices or _choices(run.precision, device)
    sections = sections_of(run, choices)
    on_gpu = device == "gpu"
    name = register_kernel(attention.planned, attention.NAME) if on_gpu else register(choices.attention)
    evaluated = shape if run.batching.packing else replace(shape, rows=run.eval.rows)
    asked = Asked(run, choices.precision, shape, evaluated, on_gpu)
    return planned(asked, Outline(sections, name), sections.recompute, exact=exact)


def _choices(precision: PrecisionConfig, device: str) -> Choices:
    """What `auto` means there: a GPU that is planned for has bf16."""
    if device == "gpu":
        return Choices("bf16" if precision.kind == "auto" else precision.kind, "varlen")
    return Choices(choose_precision(precision), "sdpa")
