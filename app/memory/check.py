"""Facts of `finetune check memory` for check.json."""

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
from app.memory.planner import COSTS, SPEED, Candidate, Planned, Planner, Suggestion, Suggestions, random_if_missing
from app.memory.speedups import MAX_SPEEDUPS, MIN_FACTOR, Speedup, bound_seconds, facts_of, speedups
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
    """Return the facts about memory, without `stops` and `seconds`.

    They have suggestions that save memory if the run does not fit, and faster ones if it leaves much of a GPU free.
    """
    machine = machine_of(hardware)
    if hardware is None:
        require_hardware(run.quantization, default_device())
    planner = Planner(machine, processes)
    suggestions = Suggestions(planner, overrides)
    planned = planner.at(random_if_missing(run), exact=exact)
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
        "knobs": [_suggestion_facts(suggestion) for suggestion in single],
        "together": suggestions.together(planned, single),
        "faster": [facts_of(speedup) for speedup in planned_speedups(suggestions, planned, machine)],
        "processes": processes,
        "notes": list(_notes(planned, machine, processes)),
        **({} if answers is None else {"answers": plan_answers(planned, answers, machine)}),
    }


def _suggestion_facts(suggestion: Suggestion) -> dict[str, Any]:
    return {
        "override": " ".join(suggestion.candidate.overrides),
        "saves_bytes": suggestion.saves_bytes,
        "slower_by": round(suggestion.slower_by, 4),
        "fits": suggestion.fits,
        "costs": COSTS[suggestion.candidate.costs],
        "why": suggestion.candidate.why,
    }


def planned_speedups(suggestions: Suggestions, now: Planned, machine: Hardware) -> list[Speedup]:
    """Return the faster settings that the command line allows; those with unknown memory are planned."""
    options = []
    for option in speedups(now.run, now.plan, now.shape.tokens, machine)[:MAX_SPEEDUPS]:
        candidate = Candidate(option.overrides, SPEED, option.why)
        if option.needed_bytes is not None and suggestions.run([candidate]) is not None:
            options.append(option)
        elif option.needed_bytes is None:
            options += _planned_speedup(option, suggestions.plan(now, [candidate]), now, machine)
    return sorted(options, key=lambda option: -option.factor)


def _planned_speedup(option: Speedup, other: Planned | None, now: Planned, machine: Hardware) -> list[Speedup]:
    if other is None or not other.verdict.fits:
        return []
    before, after = (bound_seconds(plan.run, plan.plan, plan.shape.tokens, machine) for plan in (now, other))
    speedup = replace(option, factor=before / after, needed_bytes=other.verdict.needed_bytes)
    return [speedup] if speedup.factor >= MIN_FACTOR else []


def planned_parts(run: RunConfig, hardware: HardwareConfig | None, *, exact: bool, processes: int) -> dict[str, int]:
    """Return the bytes of each kind at its maximum, of the estimated peak, and the total need of one process."""
    planned = Planner(machine_of(hardware), processes).at(random_if_missing(run), exact=exact)
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
        part = f" (one of {shape.sharers} slices)" if shape.sharers > 1 else ""
        size = f"{shape.width:,} tokens{part}, rows of up to {shape.longest:,}"
    batches = "1 micro-batch" if shape.micro_batches == 1 else f"{shape.micro_batches:,} micro-batches"
    return f"{size}, {shape.label_rows:,} tokens trained; {batches} per step"


def _notes(planned: Planned, machine: Hardware, processes: int) -> Iterator[str]:
    yield from _choice_notes(planned)
    yield from offload_notes(planned.run.training, machine.device)
    if machine.device == "cpu":
        yield "context: Python, torch and other libraries; allocator overhead is unknown on a CPU"
        return
    yield from size_notes(planned.run, open_base(planned.run.model, planned.run.task))
    yield from _machine_notes(machine)
    if not has_expandable_segments():
        yield "the environment disables expandable segments; torch needs more memory without them"
    if processes > 1 and planned.run.parallel.divides:
        yield f"each of {processes} processes stores its shard of weights, gradients and states, and gathers layers"
    elif processes > 1:
        yield f"each of {processes} processes needs this memory: data parallelism splits rows, not the model"
    if planned.plan.host_bytes:
        offloads = processes > 1 and planned.run.parallel.offload
        parts = "shards, gradients and optimizer state is offloaded" if offloads else "optimizer state is paged"
        yield f"{planned.plan.host_bytes / 1e9:.1f} GB of {parts} to CPU RAM"
    if planned.plan.offloaded_bytes:
        yield f"{planned.plan.offloaded_bytes / 1e9:.1f} GB of layer inputs are offloaded to CPU RAM"


def _machine_notes(machine: Hardware) -> Iterator[str]:
    if machine.before_ampere:
        yield (
            f"{machine.label} has no bf16, FlashAttention or Triton kernels: precision=auto is fp16, attention=auto is "
            "sdpa, and layers of packed rows are not compiled"
        )
    if machine.shares_host:
        yield (
            f"CPU and GPU of {machine.label} share this memory: the rows, the system and other programs need a part of "
            "it, and offloading saves nothing"
        )
    if not machine.context_is_measured:
        yield f"context of {machine.label}: {machine.context_bytes / 1e9:.1f} GB (assumed, not measured)"


def _choice_notes(planned: Planned) -> Iterator[str]:
    if planned.chosen:
        count = planned.run.training.recompute
        layers = f"{count} layers (training.recompute=auto)" if count else "off (enough memory)"
        yield f"gradient checkpointing: {layers}"
    if planned.chosen_tile and planned.run.training.tile:
        yield f"MLPs: tiles of {planned.run.training.tile:,} tokens (training.tile=auto)"
    if planned.chosen_budget:
        yield f"compiled layers: compile.memory_budget={planned.run.compile.memory_budget:g} (auto)"
    if planned.parallel_reason:
        yield f"parallel=auto: {planned.parallel_reason}"
    if planned.chosen_bins:
        batching = planned.run.batching
        chosen = f"batching.tokens={batching.tokens} batching.accumulation={batching.accumulation}"
        yield f"batching.tokens=auto: {chosen}"


def plan_answers(planned: Planned, answers: AnswersConfig, machine: Hardware) -> dict[str, Any]:
    """Return the memory of `finetune generate` with the model of the run; `anatomy` sums to the peak.

    All tokens are processed at once, with the attention and cache of transformers: decoding one by one needs less
    besides the cache. Beams are rows, and several prompts need a mask, because their lengths differ.
    """
    run = replace(planned.run, quantization=quantization_after_training(planned.run.quantization))
    length = open_base(run.model, run.task).longest_row(answers.length or run.dataset.max_length)
    sections = sections_of(run, planned_choices(run, machine.device, before_ampere=machine.before_ampere))
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
        before, parameters = counter.current, signature(lm.forward).parameters
        arguments = {**inputs, "use_cache": True, "logits_to_keep": 1}  # if the model has them, as in its `generate`
        with counter:
            out = lm(**{name: value for name, value in arguments.items() if name in parameters})
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
