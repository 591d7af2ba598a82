"""What app.check memory finds out, as check.json has it."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from app.config.hardware import HardwareConfig
from app.config.schema import RunConfig
from app.distributed.process_group import default_device
from app.memory.estimate import MemoryPlan
from app.memory.fit import Machine, Verdict, bound, machine_of
from app.memory.planner import Planned, Planner, by_facts
from app.memory.shape import Shape
from app.memory.suggest import COSTS, Suggestion, Suggestions
from app.model.quantization import require_hardware
from app.training.auto_batch import offload_notes
from app.training.torch_environment import has_expandable_segments


def check_memory(
    run: RunConfig,
    overrides: Sequence[str],
    hardware: HardwareConfig | None,
    *,
    exact: bool = False,
    processes: int = 1,
) -> dict[str, Any]:
    """`memory` but its `stops` and `seconds`. Knobs are tried where it does not fit."""
    machine = machine_of(hardware)
    if hardware is None:
        require_hardware(run.quantization, default_device())
    planner = Planner(machine, processes)
    suggestions = Suggestions(planner, overrides)
    found = planner.at(by_facts(run, overrides), exact=exact)
    knobs = [] if found.verdict.fits else suggestions.alone(found)
    return {
        "hardware": machine.name,
        "label": machine.label,
        "device": machine.device,
        "subject": subject(run),
        "worst_case": told(found.shape),
        **_planned(found),
        **_judged(found.verdict),
        "bound": _bound(found, machine),
        "knobs": [_suggested(each) for each in knobs],
        "together": suggestions.together(found, knobs),
        "processes": processes,
        "notes": list(_notes(found, machine, processes)),
    }


def subject(run: RunConfig) -> str:
    """In a line: how which model would be tuned."""
    adapter, bits = run.adapter, run.quantization.kind
    how = "full fine-tuning" if adapter.kind == "none" else f"{adapter.kind} of rank {adapter.r}"
    on = "" if bits == "none" else f" on {bits}"
    return f"{run.model.path}: {how}{on}, {run.optimizer.kind}"


def told(shape: Shape) -> str:
    """A micro-batch in words."""
    size = f"{shape.rows:,} x {shape.width:,} tokens"
    if shape.documents and shape.rows == 1:
        size = f"{shape.width:,} tokens, rows of up to {shape.longest:,}"
    batches = "1 micro-batch" if shape.micro_batches == 1 else f"{shape.micro_batches:,} micro-batches"
    return f"{size}, {shape.label_rows:,} tokens predicted; {batches} a step"


def _planned(found: Planned) -> dict[str, Any]:
    plan = found.plan
    return {
        "phases": plan.phases,
        "peak_bytes": plan.peak_bytes,
        "peak_where": plan.peak_where,
        "anatomy": plan.anatomy,
        "kept_bytes": plan.kept_bytes,
        "host_bytes": plan.host_bytes,
        "offloaded_bytes": plan.offloaded_bytes,
        "flops_per_token": plan.flops_per_token,
        "flops": plan.flops,
        "traced_layers": plan.traced_layers,
        "exact": plan.exact,
        "shape": asdict(found.shape),
    }


def _judged(verdict: Verdict) -> dict[str, Any]:
    return {
        "buckets_bytes": verdict.buckets_bytes,
        "lost_bytes": verdict.lost_bytes,
        "context_bytes": verdict.context_bytes,
        "margin_bytes": verdict.margin_bytes,
        "reserved_bytes": verdict.reserved_bytes,
        "needed_bytes": verdict.needed_bytes,
        "memory_bytes": verdict.memory_bytes,
        "fits": verdict.fits,
    }


def _bound(found: Planned, machine: Machine) -> dict[str, float] | None:
    known = bound(found.plan, found.shape, machine, found.run.precision.kind)
    return None if known is None else asdict(known)


def _suggested(each: Suggestion) -> dict[str, Any]:
    return {
        "override": " ".join(each.knob.overrides),
        "saves_bytes": each.saves_bytes,
        "slower_by": round(each.slower_by, 4),
        "fits": each.fits,
        "costs": COSTS[each.knob.costs],
        "why": each.knob.why,
    }


def _notes(found: Planned, machine: Machine, processes: int) -> Iterator[str]:
    yield from _choice_notes(found)
    yield from offload_notes(found.run.training, machine.device)
    if machine.device == "cpu":
        yield "on a processor the context is what this program has loaded, and nothing is known of the allocator"
        return
    if not machine.context_is_measured:
        yield f"the context of {machine.label} was not measured yet: {machine.context_bytes / 1e9:.1f} GB are assumed"
    if not has_expandable_segments():
        yield "the environment switches expandable segments off; without them torch takes more"
    if processes > 1 and found.run.parallel.divides:
        yield f"each of {processes} processes keeps its share of weights, gradients and states, and gathers layers"
    elif processes > 1:
        yield f"each of {processes} processes needs as much: data parallelism divides rows, not the model"
    yield from _on_the_host(found.plan, offloads=processes > 1 and found.run.parallel.offload)


def _choice_notes(found: Planned) -> Iterator[str]:
    if found.chosen:
        yield f"training.recompute=auto means {found.run.training.recompute} layers here"
    if found.chosen_parallel:
        yield f"parallel=auto means {found.chosen_parallel}"
    if found.chosen_bins:
        yield f"batching.tokens=auto means {' '.join(found.bins)} here"


def _on_the_host(plan: MemoryPlan, *, offloads: bool) -> Iterator[str]:
    if plan.host_bytes:
        parts = "shards, gradients and optimizer states" if offloads else "optimizer states"
        yield f"{plan.host_bytes / 1e9:.1f} GB of {parts} lie in the memory of the host"
    if plan.offloaded_bytes:
        yield f"{plan.offloaded_bytes / 1e9:.1f} GB of inputs of layers wait in the memory of the host"
