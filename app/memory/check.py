"""Facts of `app.check memory`, as check.json has them."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from inspect import signature
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from app.base.base_model import open_base
from app.config.adapters import ADAPTER_KINDS, name_of
from app.config.commands import AnswersConfig, HardwareConfig
from app.config.kinds import QUANTIZATION_KINDS
from app.config.schema import RunConfig
from app.distributed.process_group import default_device
from app.layers.attention import own_attention
from app.layers.quantization import quantization_after_training, require_hardware
from app.memory.estimate import Hardware, check_fit, machine_of, planned_choices, time_bound
from app.memory.fake_tensors import FakeTensorFallbacks, MetaModel, materialize
from app.memory.planner import COSTS, Planned, Planner, Suggestions, random_if_missing
from app.memory.trace import Shape
from app.training.auto_settings import offload_notes, sections_of, size_notes
from app.training.storage_counter import StorageCounter, rounded
from app.training.torch_environment import has_expandable_segments


def check_memory(
    run: RunConfig,
    overrides: Sequence[str],
    hardware: HardwareConfig | None,
    *,
    exact: bool = False,
    processes: int = 1,
    answers: AnswersConfig | None = None,
) -> dict[str, Any]:
    """Facts about memory, without `stops` and `seconds`; with suggestions where the plan does not fit."""
    machine = machine_of(hardware)
    if hardware is None:
        require_hardware(run.quantization, default_device())
    planner = Planner(machine, processes)
    suggestions = Suggestions(planner, overrides)
    planned = planner.at(random_if_missing(run, overrides), exact=exact)
    verdict = planned.verdict
    single = [] if verdict.fits else suggestions.alone(planned)
    return {
        "hardware": machine.name,
        "label": machine.label,
        "device": machine.device,
        "subject": _describe_run(run),
        "worst_case": _describe_shape(planned.shape),
        "shape": asdict(planned.shape),
        **asdict(planned.plan),
        **asdict(verdict),
        "reserved_bytes": verdict.reserved_bytes,
        "needed_bytes": verdict.needed_bytes,
        "fits": verdict.fits,
        "bound": time_bound(planned.plan, planned.shape, machine, run.precision.kind),
        "knobs": [
            {
                "override": " ".join(each.candidate.overrides),
                "saves_bytes": each.saves_bytes,
                "slower_by": round(each.slower_by, 4),
                "fits": each.fits,
                "costs": COSTS[each.candidate.costs],
                "why": each.candidate.why,
            }
            for each in single
        ],
        "together": suggestions.together(planned, single),
        "processes": processes,
        "notes": list(_notes(planned, machine, processes)),
        **({} if answers is None else {"answers": plan_answers(planned, answers, machine)}),
    }


def planned_parts(
    run: RunConfig, overrides: Sequence[str], hardware: HardwareConfig | None, *, exact: bool, processes: int
) -> dict[str, int]:
    """Bytes of each kind where it is largest, of all at the planned peak, and what one process needs of the machine."""
    planned = Planner(machine_of(hardware), processes).at(random_if_missing(run, overrides), exact=exact)
    parts = {kind: size for kind, size in planned.plan.largest.items() if size >= 1e5}
    return {**parts, "tensors": planned.plan.peak_bytes, "needs": planned.verdict.needed_bytes}


def _describe_run(run: RunConfig) -> str:
    adapter, bits = run.adapter, run.quantization.kind
    kind = ADAPTER_KINDS[adapter.kind]
    how = f"{adapter.kind} of rank {adapter.r}" if kind.has_rank else name_of(asdict(adapter))
    on = "" if bits == "none" else f" {'with' if QUANTIZATION_KINDS[bits].trains else 'on'} {bits}"
    return f"{run.model.path}: {how}{on}, {run.optimizer.kind}"


def _describe_shape(shape: Shape) -> str:
    size = f"{shape.rows:,} x {shape.width:,} tokens"
    if shape.documents and shape.rows == 1:
        size = f"{shape.width:,} tokens, rows of up to {shape.longest:,}"
    batches = "1 micro-batch" if shape.micro_batches == 1 else f"{shape.micro_batches:,} micro-batches"
    return f"{size}, {shape.label_rows:,} tokens trained; {batches} a step"


def _notes(planned: Planned, machine: Hardware, processes: int) -> Iterator[str]:
    yield from _choice_notes(planned)
    yield from offload_notes(planned.run.training, machine.device)
    if machine.device == "cpu":
        yield "the context is Python, torch and other libraries; what the allocator adds is not known on a CPU"
        return
    yield from size_notes(planned.run, open_base(planned.run.model, planned.run.task))
    if not machine.context_is_measured:
        yield f"the context of {machine.label} was not measured yet: {machine.context_bytes / 1e9:.1f} GB are assumed"
    if not has_expandable_segments():
        yield "the environment switches expandable segments off; without them torch takes more"
    if processes > 1 and planned.run.parallel.divides:
        yield f"each of {processes} processes keeps its share of weights, gradients and states, and gathers layers"
    elif processes > 1:
        yield f"each of {processes} processes needs as much: data parallelism divides rows, not the model"
    if planned.plan.host_bytes:
        offloads = processes > 1 and planned.run.parallel.offload
        parts = "shards, gradients and optimizer states" if offloads else "optimizer states"
        yield f"{planned.plan.host_bytes / 1e9:.1f} GB of {parts} lie in the memory of the host"
    if planned.plan.offloaded_bytes:
        yield f"{planned.plan.offloaded_bytes / 1e9:.1f} GB of inputs of layers wait in the memory of the host"


def _choice_notes(planned: Planned) -> Iterator[str]:
    if planned.chosen:
        yield f"training.recompute=auto means {planned.run.training.recompute} layers here"
    if planned.chosen_budget:
        yield f"layers are compiled, with compile.memory_budget={planned.run.compile.memory_budget:g} (auto)"
    if planned.parallel_reason:
        yield f"parallel=auto means {planned.parallel_reason}"
    if planned.chosen_bins:
        batching = planned.run.batching
        means = f"batching.tokens={batching.tokens} batching.accumulation={batching.accumulation}"
        yield f"batching.tokens=auto means {means} here"


def plan_answers(planned: Planned, answers: AnswersConfig, machine: Hardware) -> dict[str, Any]:
    """Facts about `app.generate` of the model that the run makes; `anatomy` adds up to the peak.

    All tokens are read at once, by transformers' own attention and cache: writing them one by one takes less beside the
    cache. Beams are rows, and several prompts need a mask, because they differ in length.
    """
    run = replace(planned.run, quantization=quantization_after_training(planned.run.quantization))
    length = open_base(run.model, run.task).longest_row(answers.length or run.dataset.max_length)
    sections = sections_of(run, planned_choices(run, machine.device))
    meta_model, counter = MetaModel(sections, "eager"), StorageCounter(as_on_gpu=machine.device == "gpu")
    network: Any = meta_model.network(meta_model.depth).eval()
    lm = getattr(network, "get_base_model", lambda: network)()
    lm.set_attn_implementation(own_attention(lm))
    with FakeTensorMode(allow_non_fake_inputs=True), FakeTensorFallbacks(), torch.no_grad():  # type: ignore[no-untyped-call]
        materialize(network, sections)
        constants = [] if sections.quantizer is None else sections.quantizer.constants(network)
        counter.hold("weights", [*network.parameters(), *network.buffers(), *constants])
        weights = counter.current
        inputs = {"input_ids": torch.zeros(answers.rows * answers.beams, length, dtype=torch.int64)}
        if answers.rows > 1:
            inputs |= {name: torch.ones_like(inputs["input_ids"]) for name in ("attention_mask", "position_ids")}
        counter.hold("inputs", inputs.values())
        before, known = counter.current, signature(lm.forward).parameters
        given = {**inputs, "use_cache": True, "logits_to_keep": 1}  # where the model knows them, as in its `generate`
        with counter:
            out = lm(**{name: value for name, value in given.items() if name in known})
        logits = rounded(out.logits.nbytes)
        _cache = [value for name, value in out.items() if name != "logits"]
        del out
        cache = counter.current - before
    peak = counter.peak + machine.workspace_bytes
    temporary = peak - weights - cache - logits
    verdict = check_fit(replace(planned.plan, peak_bytes=peak, kept_bytes=weights), machine)
    return {
        **(asdict(answers) | {"length": length}),
        "anatomy": {"weights": weights, "cache": cache, "logits": logits, "temporary": temporary},
        "needed_bytes": verdict.needed_bytes,
        "fits": verdict.fits,
    }
