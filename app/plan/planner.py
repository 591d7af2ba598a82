"""The plan of a run: its step traced on tensors without memory, the depth extrapolated from one of few layers."""

from dataclasses import replace
from functools import partial

from app.config.schema import ParallelConfig, PrecisionConfig, RunConfig
from app.engine.choices import Choices
from app.engine.divided import DIVIDING
from app.engine.ground import sections_of
from app.engine.layers import layers_of
from app.engine.precision import choose_precision
from app.model.attention import register, register_kernel
from app.model.outline import Outline, base_of
from app.plan import attention
from app.plan.depth import Depths
from app.plan.known import Known
from app.plan.lent import Owners
from app.plan.memory_plan import MemoryPlan, Shape
from app.plan.parts import Parts
from app.plan.share import Division
from app.plan.trace import Asked


def plan_memory(
    run: RunConfig,
    shape: Shape,
    device: str = "gpu",
    *,
    exact: bool = False,
    choices: Choices | None = None,
    steps_only: bool = False,
    processes: int = 1,
) -> MemoryPlan:
    """Of one process. `device`: gpu or cpu; `exact` traces every layer; `choices` of a run that has made them."""
    choices = choices or planned_choices(run.precision, device)
    depths = depths_of(run, shape, device, choices, steps_only=steps_only, processes=processes)
    return depths.planned(layers_of(run.training), exact=exact)


def depths_of(
    run: RunConfig,
    shape: Shape,
    device: str,
    choices: Choices,
    *,
    steps_only: bool = False,
    known: Known | None = None,
    processes: int = 1,
) -> Depths:
    """The same for any number of recomputed layers. What is `known` of similar runs is not made again."""
    known = known or Known()
    evaluated = None if steps_only else _evaluated(run, shape)
    outline = outline_of(run, device, choices, known)
    division = _division(run.parallel, outline, processes, known)
    parts = None if division is None else _parts(division, outline)
    asked = Asked(run, choices.precision, shape, evaluated, device == "gpu", parts)
    return Depths(asked, outline, division, known)


def outline_of(run: RunConfig, device: str, choices: Choices, known: Known) -> Outline:
    """With the attention that is planned for there."""
    on_gpu = device == "gpu"
    name = register_kernel(attention.planned, attention.NAME) if on_gpu else register(choices.attention)
    sections = sections_of(run, choices)
    base = known.bases.of(
        partial(base_of, sections, name), sections.model, sections.task, name, sections.base_dtype
    )
    return Outline(sections, base)


def _parts(division: Division, outline: Outline) -> Parts:
    lends = division.owners is not None
    return Parts(division.bucket_bytes, lends=lends, trained=outline.sections.trains_base)


def _division(parallel: ParallelConfig, outline: Outline, processes: int, known: Known) -> Division | None:
    """Where there is something to divide."""
    if parallel.kind not in DIVIDING or processes == 1:
        return None

    def make() -> Division:
        owners = None
        if parallel.kind == "zero3":
            owners = Owners(outline.bare(outline.depth), processes, trained=outline.sections.trains_base)
        return Division(outline.trained(outline.depth), processes, owners)

    return known.divisions.of(make, outline.of_any_recompute, parallel.kind, processes)


def _evaluated(run: RunConfig, shape: Shape) -> Shape:
    """Of an evaluation: the same bins, or other rows of the same length, all of them with as many labels."""
    if run.batching.packing:
        return shape
    rows, places = run.eval.rows, 2 * run.eval.rows if shape.documents else 0
    documents = (shape.width,) * rows if shape.documents else ()
    labels = -(-shape.label_rows * rows // shape.rows)
    return replace(shape, rows=rows, documents=documents, places=places, label_rows=labels)


def planned_choices(precision: PrecisionConfig, device: str) -> Choices:
    """What `auto` means there: a GPU that is planned for has bf16."""
    if device == "gpu":
        return Choices("bf16" if precision.kind == "auto" else precision.kind, "varlen")
    return Choices(choose_precision(precision), "sdpa")
