"""Lines printed by a run, and facts for its manifest."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from app.adapters.adapters import ALL_LINEAR
from app.base.base_model import open_base
from app.base.source import base_fingerprint, fetch_folder
from app.base.tokenizer import tokenizer_hash
from app.config.dataset import formats_of, has_held_out_rows
from app.config.kinds import SUMMARY_METRICS, balance_notes, without_numbers
from app.config.rules import BLOCKS
from app.config.schema import RunConfig
from app.config.tasks import TASKS
from app.data.length_statistics import padded_fill
from app.data.packing import min_bins
from app.data.transform import origin_of, transform_hash
from app.distributed.process_group import default_device, machine_notes
from app.layers.experts import stacks_of
from app.layers.recurrent import layers_read_past
from app.optim import requirements
from app.program import command_text
from app.safe_text import listed, many
from app.tasks.preference import LABEL_PREFERENCES
from app.tracking.formatting import data_wait, format_bytes, format_count, format_others
from app.tracking.output_dir import RunFolder
from app.training import gpu_usage
from app.training.auto_settings import BUDGET_CHOICE, TILE_CHOICE, offload_notes, size_notes
from app.training.checkpoint import Progress
from app.training.plan import Plan
from app.training.rows import Rows, read_rows
from app.training.scores import ALSO, finite
from app.training.train_step import Rehearsal

_MIN_SHOWN_DIFFERENCE = 0.0005  # of measured and estimated memory; smaller ones would be shown as 0.0%


def run_table(plan: Plan) -> list[tuple[str, str]]:
    """Return the rows printed before a run starts; the manifest and the report have the details."""
    run, steps, counts = plan.run, plan.steps, plan.counts
    epochs = f"{steps.epoch(steps.steps):.3g} epochs" if steps.steps != steps.steps_per_epoch else "1 epoch"
    quantizer = plan.sections.quantizer
    base = "" if quantizer is None else f"{quantizer.kind}{' base' if quantizer.packs else ''}, "
    machine = f"{base}{plan.choices.precision} on {plan.runtime.device.type}"
    loader, processes = plan.loader, plan.runtime.processes
    share = loader.units_per_step / loader.num_units  # of an epoch
    samples, tokens = len(plan.rows.data.train) * share, plan.rows.data.report.train.tokens * share
    shared = f", shared by {processes} processes" if processes > 1 else ""
    shared += f", {run.parallel.context} per row" if run.parallel.context > 1 else ""
    step_size = f"about {many(max(1, round(samples)), 'sample')} ({tokens:,.0f} tokens) per step{shared}"
    return [
        ("model", f"{run.model.path}, {counts}"),
        ("data", "\n".join(plan.rows.data.report.lines())),
        ("steps", f"{steps.steps:,} ({epochs}), {step_size}"),
        ("with", f"{run.optimizer.kind}, learning rate {run.optimizer.lr:g} ({run.schedule.kind}), {machine}"),
        *(("note", note) for note in _notes(plan)),
    ]


def _notes(plan: Plan) -> Iterator[str]:
    run, device = plan.run, plan.runtime.device.type
    yield from _unusual_settings(run, plan.steps.epoch(plan.steps.steps))
    if run.task.labels:
        head = f"classification head of {len(run.task.labels)} labels"
        yield f"{head}: fully trained; initialized from seed={run.seed} if the model has none of this size"
    if run.preference.kind in LABEL_PREFERENCES:
        weights = {f"preference.{name}": getattr(run.preference, name) for name in ("desirable", "undesirable")}
        yield from balance_notes(weights, plan.rows.data.train.class_counts())
    quantizer = plan.sections.quantizer
    if quantizer is not None:
        yield from quantizer.notes(device)
    if run.adapter.kind != "none" and not run.adapter.experts and stacks_of(plan.rows.base.on_meta()):
        yield "experts and router stay frozen (adapter.experts=true trains the experts)"
    if run.adapter.kind != "none" and ALL_LINEAR in run.adapter.targets:
        yield from _uncalled_layers(plan.rows.base.on_meta())
    if plan.uncompiled_because:
        yield f"layers are not compiled: {'; '.join(plan.uncompiled_because)} (compile=auto)"
    yield from requirements.notes(run.optimizer, device)
    yield from offload_notes(run.training, device)
    yield from machine_notes(run.parallel, plan.runtime.processes)
    yield from gpu_usage.notes()
    if device == "cuda":
        yield from size_notes(run, plan.rows.base)
    if (run.training.profile_step or 0) > plan.steps.steps:
        yield f"training.profile_step={run.training.profile_step} is after the last step; no step is profiled"


def _unusual_settings(run: RunConfig, epochs: float) -> Iterator[str]:
    """Yield settings that are far from usual ones, such as a learning rate with a wrong exponent."""
    suggest, rate = run.model.suggest, run.optimizer.lr
    rates = (suggest.lr_full, suggest.lr_adapter, suggest.lr_preference)
    usual = min(rates, key=lambda suggested: abs(math.log(rate / suggested)))
    if not usual / 100 < rate < usual * 100:
        ratio = f"{rate / usual:,.0f}" if rate > usual else f"1/{usual / rate:,.0f}"
        yield f"optimizer.lr={rate:g} is {ratio} times the learning rate suggested for this model ({usual:g})"
    if epochs >= 100 and run.dataset.max_rows is None and run.dataset.sample is None:
        yield f"{epochs:,.0f} epochs: every row is trained {epochs:,.0f} times (training.epochs); 1 to 5 are usual"
    if run.adapter.r > 256 and run.adapter.kind != "none":
        yield f"adapter.r={run.adapter.r}: ranks of 8 to 128 are usual"


def _uncalled_layers(lm: Any) -> Iterator[str]:
    names = sorted(set(map(without_numbers, layers_read_past(lm))))
    if names:
        yield f"adapter.targets=[{ALL_LINEAR}] skips {listed(names, 3)} (not called in training)"


def manifest_facts(plan: Plan) -> dict[str, Any]:
    """Return the auto settings, counts and hashes of a run."""
    run, runtime, loader = plan.run, plan.runtime, plan.loader
    others, batching = gpu_usage.taken_by_others(), run.batching
    bin_tokens = batching.bin_tokens if batching.packing else None
    why_padded, why_uncompiled = plan.rows.base.tier.reason, plan.uncompiled_because
    return {
        "seed": run.seed,
        **({"varied_from": run.varied_from} if run.varied_from else {}),
        **({} if run.dataset.transform is None else {"transform": origin_of(run.dataset)}),
        "choices": {
            **asdict(plan.choices),
            "recompute": run.training.recompute,
            "tokens": batching.tokens if batching.packing else None,
            **({BUDGET_CHOICE: run.compile.memory_budget} if plan.choices.compile == BLOCKS else {}),
            **({TILE_CHOICE: run.training.tile} if run.training.tile else {}),
            **({"uncompiled_because": list(why_uncompiled)} if why_uncompiled else {}),
            **({} if batching.packing or not why_padded else {"padded_because": why_padded}),
            "format": formats_of(run.dataset),
            "device": runtime.device.type,
            "threads": runtime.threads,
            "processes": runtime.processes,
            **({"parallel": run.parallel.kind} if runtime.processes > 1 else {}),
            **({"context": run.parallel.context} if run.parallel.context > 1 else {}),
        },
        "counts": {
            "steps": plan.steps.steps,
            "weights": plan.counts.total,
            "trained_weights": plan.counts.trained,
            "units": loader.num_units,
            "units_per_step": loader.units_per_step,
            "unit_name": loader.unit_name,
            "fill": _fill(plan),
            "least_units": bin_tokens and min_bins(plan.rows.data.train.lengths, bin_tokens),
            "data": asdict(plan.rows.data.report),
        },
        "hardware": _hardware(),
        "memory_taken": None if others is None else asdict(others),
        "clocks": gpu_usage.clocks(),
        "hashes": _content_hashes(plan.rows)
        | ({} if plan.rows.also is None else {"general": plan.rows.also.fingerprint}),  # of eval.also
    }


def _fill(plan: Plan) -> float | None:
    """Return the share of positions filled by tokens, in bins or in the padded rows of an epoch."""
    batching, loader = plan.run.batching, plan.loader
    if batching.packing:
        return plan.rows.data.report.train.tokens / (loader.num_units * batching.bin_tokens)
    if plan.rows.objective.documents_per_row > 1:
        return None  # lengths are of rows, and each document is padded
    return padded_fill(plan.rows.data.train.lengths, batching.rows, loader.units_per_step)


def provenance(run: RunConfig) -> dict[str, Any]:
    """Return `hardware` and `hashes` of the manifest for `run` on this machine."""
    prepared = read_rows(run, open_base(run.model, run.task), lambda _note: None)
    if run.model.weights == "pretrained":
        fetch_folder(run.model, run.model.path, with_weights=True)
    hashes = {**_content_hashes(prepared), "base": base_fingerprint(run.model)}
    return {"hardware": _hardware(), "hashes": hashes}


def _hardware() -> dict[str, str | None]:
    """Return the hardware facts that determine which kernels run."""
    device = default_device()
    return {
        "device": device.type,
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else None,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def _content_hashes(prepared: Rows) -> dict[str, str | None]:
    data, dataset = prepared.data, prepared.run.dataset
    return {
        "train": data.train.fingerprint,
        "eval": None if data.eval is None else data.eval.fingerprint,
        "tokenizer": tokenizer_hash(prepared.tokenizer),
        **({} if dataset.transform is None else {"transform": transform_hash(dataset)}),
    }


_SMALLER_IS_FASTER = (
    "The gradient is the same and no data is dropped. A smaller batching.tokens (or batching.rows) with more "
    "batching.accumulation is faster"
)


def split_message(step: int, depth: int) -> str:
    """Return the message for a step that ran out of memory and was repeated in smaller parts."""
    return (
        f"step {step}: out of memory. From now on micro-batches are split by document into up to {2**depth} "
        f"parts. {_SMALLER_IS_FASTER}"
    )


def resume_message(plan: Plan, step: int) -> str:
    """Return the start of a run with `resume=`: the checkpoint and its step, or that there is none."""
    run, save = plan.run, plan.start.checkpoint
    if save is None:
        return f"resume={run.resume}: no checkpoint in {run.output_dir}, starting at step 0"
    return f"Resumed from step {step:,} of {plan.steps.steps:,} ({save})"


def resumed_split_note(depth: int) -> list[str]:
    """Return a note for the first table if the run was out of memory before this resume."""
    if not depth:
        return []
    parts = f"micro-batches are split by document into up to {2**depth} parts"
    return [f"{parts}: the run was out of memory before it was resumed"]


def rehearsal_message(rehearsal: Rehearsal) -> str:
    """Return the result of the rehearsal, printed before the first step."""
    what = "a step and an evaluation" if rehearsal.evaluated else "a step"
    parts = f"up to {2**rehearsal.depth} parts"
    if rehearsal.deepened:
        fits = (
            "fits only in parts: micro-batches are split by document from the first step, into "
            f"{parts}. {_SMALLER_IS_FASTER}"
        )
    else:
        fits = f"fits in {parts}, as before" if rehearsal.depth else "fits"
    if more := rehearsal.recomputed_more:
        fits = f"{fits}, with gradient checkpointing of {more} more layer{'s' * (more != 1)} than estimated"
    return (
        f"rehearsed {what} with the largest micro-batch, {rehearsal.tokens:,} tokens ({rehearsal.seconds:.1f} s, "
        f"peak {format_bytes(rehearsal.peak_bytes)}): {fits}"
    )


def closing_facts(
    run: RunConfig, folder: RunFolder, result: Mapping[str, Any], progress: Progress
) -> Iterator[tuple[str, str]]:
    """Yield the last lines of a complete run: its results, with the smoothed loss, and the command to try the model."""
    metrics, start = progress.metrics, progress.start_metrics
    what = "model" if run.adapter.kind == "none" else "adapter"
    reached = "" if progress.last_eval_loss is None else f", eval loss {progress.last_eval_loss:.4f}"
    reached += "".join(_shares(finite(metrics), start)) + _general_loss(metrics, start)
    yield from _memory_facts(result)
    yield from _gpu_facts(result)
    last_loss = progress.last_loss if result.get("train_loss") is None else result["train_loss"]
    loss = f"loss {progress.first_loss:.4f} -> {last_loss:.4f}{reached}"
    yield (
        "done",
        f"{many(progress.step, 'step')}, {loss}{'' if 'seconds' in result else '; the run was already complete'}",
    )
    if "seconds" in result:
        samples = format_count(result["samples_per_second"])
        yield "speed", f"{result['tokens_per_second']:,.0f} tokens/s, {samples} samples/s, {result['seconds']:,.1f} s"
    if "seconds" in result and (wait := data_wait(result)):
        yield "data", wait
    experts = result.get("experts", {})
    if experts.get("untrained"):
        yield "note", f"{experts['untrained']} of {experts['total']} experts received no tokens and are unchanged"
    if what == "adapter" and run.model.vocab_size is not None:
        yield (
            "note",
            "to load the adapter in another program, first call "
            f"base.resize_token_embeddings({run.model.vocab_size}) (see final/README.md), or export kind=merged",
        )
    chosen = "chosen_log_probability"
    if chosen in start and metrics.get(chosen, start[chosen]) < start[chosen]:  # there may be no eval set now
        fall = f"log-probability {start[chosen]:.3f} -> {metrics[chosen]:.3f} per token"
        yield "note", f"chosen answers became less likely: {fall}. Check the answers; preference.sft=1 counteracts this"
    yield what, str(folder.final)
    task = TASKS[run.task.kind]
    if task.writes_text or task.has_classes:
        name, then = "generate", ' prompt="..."'
    else:  # a masked language model does not generate text
        name, then = "evaluate", "" if has_held_out_rows(run.dataset) else " dataset.path=..."
    trust = ["model.trust_remote_code=true"] if run.model.trust_remote_code else []
    yield "Try it:", f"{command_text(name, f'run={folder.path}', *trust)}{then}"


def _shares(metrics: Mapping[str, float], start: Mapping[str, float]) -> Iterator[str]:
    """Yield the share of correct answers, and its value before the first step."""
    for share in SUMMARY_METRICS:
        if share.name in metrics:
            was = f" (was {share.text(start[share.name])})" if share.name in start else ""
            yield f", {share.label} {share.text(metrics[share.name])}{was}"


def _general_loss(metrics: Mapping[str, float], start: Mapping[str, float]) -> str:
    """Return the loss on the rows of `eval.also`, which rises if the model forgets."""
    key = f"{ALSO}eval_loss"
    if key not in metrics:
        return ""
    return f", general loss {metrics[key]:.4f}" + (f" (was {start[key]:.4f})" if key in start else "")


def _memory_facts(result: Mapping[str, float | None]) -> Iterator[tuple[str, str]]:
    estimated, measured, peak = (
        result[f"{name}_bytes"] for name in ("memory_predicted", "memory_measured", "peak_memory")
    )
    if estimated is None or measured is None or peak is None:
        return
    difference = measured / estimated - 1
    off = "" if abs(difference) < _MIN_SHOWN_DIFFERENCE else f" ({difference:+.1%})"
    tensors = f"tensors: {format_bytes(estimated)} estimated, {format_bytes(measured)} measured"
    if default_device().type == "cpu":  # on a GPU, tensors are measured in all steps and are the peak
        yield "memory", f"{tensors} in one step{off}; whole process: {format_bytes(peak)}"
    else:
        workspaces = result.get("workspace_bytes")
        part = f", {format_bytes(workspaces)} of them cuBLAS workspaces" if workspaces else ""
        yield "memory", f"{tensors}{off}{part}"


def _gpu_facts(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the memory of this run and of other processes on the GPU, and its utilization."""
    if "other_processes" in result:
        how = " (estimated)" if result.get("device_is_estimated") else ""
        in_use = f"peak {format_bytes(result['device_used_bytes'])} by this run{how}"
        share = f"utilization {result['gpu_utilization']:.0%}" if "gpu_utilization" in result else ""
        yield "GPU", ", ".join(text for text in (in_use, format_others(result["other_processes"]), share) if text)
