"""As few recomputed layers as fit: what is kept need not be computed again."""

from collections.abc import Callable

from app.batch import Batch
from app.config.schema import RunConfig
from app.engine.choices import Choices
from app.engine.segments import segments_grow
from app.engine.world import world
from app.plan.lost import lost_bytes
from app.plan.machine import Machine, machine_of
from app.plan.memory_plan import MemoryPlan, Shape
from app.plan.planner import depths_of
from app.plan.verdict import Verdict, judge


def judged(plan: MemoryPlan, machine: Machine, processes: int) -> Verdict:
    """With what the allocator takes on a GPU."""
    lost = lost_bytes(plan, grow=segments_grow()) if machine.device == "gpu" else 0
    return judge(plan, machine, lost, processes)


def fewest(layers: int, at: Callable[[int], Verdict], *, doubtful: bool = False) -> tuple[int, Verdict]:
    """All of them where nothing fits. Each recomputed layer between the first and the last saves memory, so halving
    finds it. The last is computed again at once and hardly saves any: where all do not fit, all but one may.

    `doubtful`: that any number fits, so all of them are looked at first.
    """
    low, high = 0, layers
    if doubtful and (found := at(high)).is_hopeless:
        return high, found
    found = at(low)
    if found.fits:
        return low, found
    is_hopeless = found.is_hopeless
    found = at(high)
    if not found.fits and high > 1 and not is_hopeless:
        one_less = at(high - 1)
        high, found = (high - 1, one_less) if one_less.fits else (high, found)
    while found.fits and high - low > 1:
        middle = (low + high) // 2
        tried = at(middle)
        low, high, found = (low, middle, tried) if tried.fits else (middle, high, found)
    return high, found


def fewest_on(
    machine: Machine, run: RunConfig, choices: Choices, shape: Shape, layers: int, processes: int
) -> tuple[int, Verdict]:
    """Of this step."""
    depths = depths_of(run, shape, machine.device, choices, processes=processes)
    return fewest(layers, lambda count: judged(depths.planned(count), machine, processes))


def recompute_fewest(
    run: RunConfig, choices: Choices, largest: Batch, micro_batches: int, layers: int
) -> tuple[int, str]:
    """Of a run on this machine, and in words how that was found."""
    machine = machine_of(None).shared_by(world().local_size)
    shape = Shape.of(largest, micro_batches)
    count, verdict = fewest_on(machine, run, choices, shape, layers, world().size)
    return count, words(count, layers, verdict, machine)


def words(count: int, layers: int, verdict: Verdict, machine: Machine) -> str:
    """What was chosen and why."""
    needs = f"{verdict.needed_bytes / 1e9:.1f} of {verdict.memory_bytes / 1e9:.1f} GB of {machine.label}"
    if not verdict.fits:
        return f"training.recompute=auto: all {layers} layers, and the plan does not fit even so ({needs})"
    return f"training.recompute=auto: {count} of {layers} layers, which needs {needs}"
