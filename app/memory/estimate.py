"""The plan of a run's memory and arithmetic, for many layers from traces of few.

In each phase of a step, what is alive at most is affine in the number of layers that keep everything and in the number
of those that are computed again. So a phase is extrapolated by itself, and the peak is the largest of the phases,
whichever that is. Nothing recomputed and everything recomputed have phases of their own, so each has traces of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from app.batch import Batch
from app.config.schema import PrecisionConfig, RunConfig
from app.distributed.environment import world
from app.distributed.fsdp import MeshSizes
from app.distributed.process_group import mesh_sizes_of
from app.memory import cuda_ops
from app.memory.outline import Outline
from app.memory.phases import ANATOMY, ORDER
from app.memory.shape import Shape
from app.memory.trace import Numbers, Traced, trace
from app.model.attention import register, register_kernel
from app.training.auto_batch import recomputed_layers
from app.training.choices import Choices, choose_precision
from app.training.memory import Predicted
from app.training.resolve import sections_of

_EDGES = 2  # layers of a sort that are special, the first and the last; the others are alike
_SHARDED_EDGES = 4  # their neighbours, too: weights are gathered one layer ahead


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes as `torch.cuda.max_memory_allocated` would count them; what allocator and driver need comes on top."""

    phases: dict[str, int]  # the most while in it, in their order; save and evaluation come last
    peak_bytes: int
    peak_where: str  # one of the phases
    anatomies: dict[str, dict[str, int]]  # of each phase, by ANATOMY
    kept_bytes: int  # from one step to the next, gradients included
    host_bytes: int  # optimizer states that are paged to the host
    flops_per_token: float  # of training with nothing computed twice, over positions of the micro-batch
    flops: float  # of the step as it runs: all micro-batches, what is computed again, the optimizer
    fp8_flops: float  # of these, in fp8
    exact: bool  # whether every layer was traced
    traced_layers: int  # of the largest trace
    offloaded_bytes: int = 0  # inputs of layers that wait on the host, of a micro-batch

    @property
    def anatomy(self) -> dict[str, int]:
        """Of the peak, by ANATOMY; adds up to it."""
        return self.anatomies[self.peak_where]


class Estimate:
    """Plans of one step that differ in how many layers are recomputed; every trace is made once."""

    def __init__(
        self,
        run: RunConfig,
        shape: Shape,
        device: str,
        choices: Choices,
        *,
        steps_only: bool = False,
        mesh_sizes: MeshSizes | None = None,
    ) -> None:
        """`device`: gpu or cpu; `steps_only`: without an evaluation; `mesh_sizes`: where the model is sharded."""
        evaluated = None if steps_only else shape.of_evaluation(run)
        on_gpu = device == "gpu"
        name = (
            register_kernel(cuda_ops.attention, cuda_ops.ATTENTION) if on_gpu else register(choices.attention)
        )
        self._traced = Traced(run, choices.precision, shape, evaluated, on_gpu, mesh_sizes)
        self._outline = Outline(sections_of(run, choices), name)
        self._traces: dict[tuple[int, int], Numbers] = {}
        self.layers = self._outline.depth

    def planned(self, recompute: bool | int, *, exact: bool = False) -> MemoryPlan:
        """Of all layers; where there are few of them, or they differ, or it is to be `exact`, all are traced."""
        recomputed = self.layers if recompute is True else int(recompute)
        plain = self.layers - recomputed
        second = self._traced.run.training.offload  # is special, too
        edges = _SHARDED_EDGES if self._traced.mesh_sizes else _EDGES
        base = min(plain, edges), min(recomputed, edges + second)
        exact = exact or not self._outline.alike or sum(base) + 1 >= self.layers
        whole = plain, recomputed
        numbers = self._numbers(*whole) if exact else self._extrapolated(base, whole)
        return _plan(
            self._traced.shape, numbers, exact=exact, traced_layers=self.layers if exact else sum(base) + 1
        )

    def _extrapolated(self, base: tuple[int, int], whole: tuple[int, int]) -> Numbers:
        """A further layer adds what it adds to the base."""
        few = self._numbers(*base)
        found = dict(few)
        for sort, one_more in enumerate(((base[0] + 1, base[1]), (base[0], base[1] + 1))):
            further = whole[sort] - base[sort]
            if further:
                more = self._numbers(*one_more)
                for name in {**few, **more}:
                    added = more.get(name, 0) - few.get(name, 0)
                    found[name] = found.get(name, 0) + further * added
        return found

    def _numbers(self, plain: int, recomputed: int) -> Numbers:
        if (plain, recomputed) not in self._traces:
            self._traces[plain, recomputed] = trace(self._traced, self._outline, plain, recomputed)
        return self._traces[plain, recomputed]


def _plan(
    shape: Shape, numbers: Mapping[tuple[str, ...], int], *, exact: bool, traced_layers: int
) -> MemoryPlan:
    anatomies = {
        phase: {kind: numbers.get((phase, kind), 0) for kind in ANATOMY}
        for phase in ORDER
        if any(name[0] == phase for name in numbers)
    }
    phases = {phase: sum(kinds.values()) for phase, kinds in anatomies.items()}
    where = max(phases, key=lambda phase: phases[phase])
    return MemoryPlan(
        phases=phases,
        peak_bytes=phases[where],
        peak_where=where,
        anatomies=anatomies,
        kept_bytes=numbers["kept",],
        host_bytes=numbers["host",],
        offloaded_bytes=numbers["offloaded",],
        flops_per_token=(numbers["flops",] - numbers["repeated",]) / shape.tokens,
        flops=float(numbers["flops",] * shape.micro_batches + numbers["update",]),
        fp8_flops=float(numbers["fp8",] * shape.micro_batches),
        exact=exact,
        traced_layers=traced_layers,
    )


def plan_memory(
    run: RunConfig,
    shape: Shape,
    device: str = "gpu",
    *,
    exact: bool = False,
    choices: Choices | None = None,
    steps_only: bool = False,
    mesh_sizes: MeshSizes | None = None,
) -> MemoryPlan:
    """The plan of one process. `device`: gpu or cpu; `exact` traces every layer."""
    choices = choices or planned_choices(run.precision, device)
    estimate = Estimate(run, shape, device, choices, steps_only=steps_only, mesh_sizes=mesh_sizes)
    return estimate.planned(recomputed_layers(run.training), exact=exact)


def planned_choices(precision: PrecisionConfig, device: str) -> Choices:
    """What `auto` means there: a GPU that is planned for has bf16."""
    if device == "gpu":
        return Choices("bf16" if precision.kind == "auto" else precision.kind, "varlen")
    return Choices(choose_precision(precision), "sdpa")


def predict(run: RunConfig, choices: Choices, largest: Batch, micro_batches: int, device: str) -> Predicted:
    """What a run is told before its weights are loaded. On a CPU one step is counted, so a step is predicted."""
    on_cpu = device == "cpu"
    shape = Shape.of(largest, micro_batches)
    sizes = mesh_sizes_of(run.parallel, world().size, world().local_size)
    plan = plan_memory(
        run, shape, "cpu" if on_cpu else "gpu", choices=choices, steps_only=on_cpu, mesh_sizes=sizes
    )
    return Predicted(plan.peak_bytes, plan.peak_where, plan.anatomy)
