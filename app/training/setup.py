"""Everything of a run that is known before its weights are loaded."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from app import __version__
from app.batch import Batch
from app.config.dataset import formats_of, has_chats
from app.config.schema import BatchingConfig, ModelConfig, RunConfig, ScheduleConfig
from app.data.collate import Layout, Packed, Padded
from app.data.loader import Loader, StepSplit, eval_batches
from app.data.objectives import Objective, build_objective
from app.data.packing import beyond_least, least_bins
from app.data.prepare import Data, prepare
from app.data.token_dataset import TokenRows
from app.distributed.environment import world
from app.distributed.process_group import Runtime, crowded_cores, idle_gpus, parallel_notes, start
from app.errors import ConfigError
from app.model import quantization
from app.model.attention import Needs, needs_of
from app.model.build import ModelPlan, ModelSections, plan_model
from app.model.compile import require_compilable
from app.model.dtypes import DTYPES
from app.model.tasks import task_of
from app.model.tokenizer import load_tokenizer
from app.model.weights import build_on_meta
from app.optim import requirements
from app.optim.lr_schedule import learning_rate
from app.training import gpu_in_use
from app.training.auto_batch import MaxBinTokens, offload_notes, recomputed_layers, settled_bins
from app.training.checkpoint import choices_of, find_checkpoint
from app.training.choices import Choices, choose
from app.training.classes import class_notes, with_classes
from app.training.optimizer_in_backward import require_alone, require_unscaled
from app.training.origin import content_hashes, hardware
from app.training.steps import StepPlan, plan_steps

_OF_PROCESS = {"output_dir", "cache_dir", "launch"}  # compared by themselves, or free


@dataclass(frozen=True, slots=True)
class Ground:
    """What a run stands on. `run` knows its labels now; `save` is the checkpoint it continues from."""

    run: RunConfig
    tokenizer: Any
    data: Data
    labels: Objective
    save: Path | None
    choices: Choices
    runtime: Runtime
    loader: Loader
    plan: StepPlan
    sections: ModelSections
    counts: ModelPlan

    def eval_batches(self, layout: Layout) -> Callable[[], Iterator[Batch]] | None:
        """This process's share of the held-out rows, anew at each call."""
        if self.data.eval is None:
            return None
        return partial(eval_batches, self.data.eval, layout, self.runtime.processes, self.runtime.rank)

    def learning_rate(self, schedule: ScheduleConfig, peak: float) -> Callable[[int], float]:
        """Of each step, counted from 0."""
        return partial(learning_rate, schedule, peak, total=self.plan.steps)


def layout_of(run: RunConfig, rows: int, tokenizer: Any, labels: Objective) -> Layout:
    """Bins, or `rows` padded rows. Any pad token serves: padding is known by the lengths of rows, never by its id."""
    pad_id = 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
    if run.batching.packing:
        return Packed(run.batching.bin_tokens, pad_id, run.dataset.max_length, labels)
    return Padded(rows, pad_id, labels)


def lay_ground(
    run: RunConfig,
    checkpoints: Path,
    say: Callable[[str], None],
    notes: Sequence[str] = (),
    largest: MaxBinTokens | None = None,
) -> Ground:
    """Tokenizer, data, machine, plan: each line needs only those above it. `notes` is told with the data; `largest`
    finds bins where none are given.
    """
    require_alone(run.optimizer, world().size)
    tokenizer = load_tokenizer(run.model, needs_template=has_chats(run.dataset))
    data = prepare(run.dataset, tokenizer, run.cache_dir, notes, classes=run.task.labels)
    run = with_classes(run, data.classes)
    labels = build_objective(run.task, tokenizer, run.seed, bidirectional=is_bidirectional(run))
    save, remarks = find_checkpoint(checkpoints, run.resume, tidy=world().is_first)
    for note in gpu_in_use.notes():  # asked before this process takes anything itself
        say(f"memory  {note}")
    kept = choices_of(save)
    choices = choose(run.precision, run.attention, partial(attention_needs, run), kept)
    require_unscaled(run.optimizer, choices.precision)
    runtime = start(run.launch, choices.precision, run.seed)
    quantization.require_hardware(run.quantization, runtime.device)
    sections = sections_of(run, choices)
    counts = plan_model(sections)
    run, found = settled_bins(run, choices, counts.layers, kept, largest, runtime.peers)
    for remark in (*remarks, *found):
        say(remark)
    require_compilable(run.compile, runtime.device)
    share = StepSplit(run.batching.accumulation, runtime.processes, runtime.rank)
    layout = layout_of(run, run.batching.rows, tokenizer, labels)
    loader = Loader(data.train, layout, share, run.seed)
    require_known_ids(run.model, [data.train, data.eval], counts.vocabulary)
    ground = Ground(
        run=run,
        tokenizer=tokenizer,
        data=data,
        labels=labels,
        save=save,
        choices=choices,
        runtime=runtime,
        loader=loader,
        plan=plan_steps(run.training, loader.steps_per_epoch),
        sections=sections,
        counts=counts,
    )
    runtime.peers.require_same(_shared(run, ground, checkpoints))
    return ground


def _shared(run: RunConfig, ground: Ground, checkpoints: Path) -> dict[str, Any]:
    """What every process must have found alike, by the key to type."""
    settings = json.dumps({k: v for k, v in asdict(run).items() if k not in _OF_PROCESS}, sort_keys=True)
    return {
        "the settings (as a hash)": hashlib.sha256(settings.encode()).hexdigest()[:12],
        "dataset (its tokens)": ground.data.train.fingerprint[:12],
        "output_dir": str(checkpoints.parent),
        "resume": ground.save.name if ground.save else "from the start",
        "precision": ground.choices.precision,
        "attention": ground.choices.attention,
        "the code of app": __version__,
    }


def sections_of(run: RunConfig, choices: Choices) -> ModelSections:
    """What decides which model is built."""
    return ModelSections(
        model=run.model,
        task=run.task,
        adapter=run.adapter,
        quantization=run.quantization,
        attention=choices.attention,
        precision=choices.precision,
        recompute=recomputed_layers(run.training),
        trained=run.precision.trained,
        offload=run.training.offload,
        compile=run.compile,
    )


def attention_needs(run: RunConfig, precision: str) -> Needs:
    """What attention must do in this run, asked of its model without memory."""
    task = task_of(run.task)
    lm = build_on_meta(run.model, task, "eager")
    packed = run.batching.packing or task.is_bidirectional(lm)
    return needs_of(lm, DTYPES[precision].compute, packed=packed, longest=run.dataset.max_length)


def is_bidirectional(run: RunConfig) -> bool:
    """Whether tokens of the run's model see those after them; the model is asked where its task does not say."""
    task = task_of(run.task)
    return task.is_bidirectional(
        None if task.bidirectional is not None else build_on_meta(run.model, task, "eager")
    )


def require_known_ids(model: ModelConfig, data: Sequence[TokenRows | None], vocabulary: int) -> None:
    """An id beyond the embedding is an IndexError on a CPU, and on a GPU the end of the process."""
    largest = max(rows.largest_id for rows in data if rows is not None)
    if largest >= vocabulary:
        raise ConfigError(
            f"model.tokenizer={model.tokenizer or 'null'}: it gives ids up to {largest}, but the model knows only "
            f"{vocabulary} (0 to {vocabulary - 1}). Give the tokenizer that belongs to model.path={model.path}."
        )


def table(run: RunConfig, ground: Ground) -> list[tuple[str, str]]:
    """What the run is going to do, for people."""
    plan, counts, device = ground.plan, ground.counts, ground.runtime.device.type
    epochs = f"{plan.epoch(plan.steps):.3g} epochs" if plan.steps != plan.steps_per_epoch else "1 epoch"
    share = f"{counts.total:,} weights, {counts.trained:,} trained ({counts.trained_share:.1%})"
    base = "" if run.quantization.kind == "none" else f"{run.quantization.kind} base, "
    choices = f"{base}{ground.choices.precision}, {ground.choices.attention} attention, {device}"
    remarks = quantization.notes(run.quantization, run.precision, ground.choices.precision, device)
    return [
        ("model", f"{run.model.path}, {share}"),
        ("data", "\n".join(ground.data.report.lines())),
        ("steps", f"{plan.steps:,} ({epochs}) of {_step_words(run.batching, ground)}"),
        ("with", f"{run.optimizer.kind} lr {run.optimizer.lr:g}, {run.schedule.kind}, {choices}"),
        *(
            ("note", note)
            for note in (
                *class_notes(run),
                *remarks,
                *requirements.notes(run.optimizer, device),
                *offload_notes(run.training, device),
                *idle_gpus(),
                *crowded_cores(),
                *parallel_notes(run.parallel, ground.runtime.processes),
                *gpu_in_use.notes(),
            )
        ),
    ]


def _step_words(batching: BatchingConfig, ground: Ground) -> str:
    loader, tokens = ground.loader, ground.data.report.train.tokens
    fill = _fill(batching, ground)
    count = loader.units_per_step
    shared = f", shared by {ground.runtime.processes} processes" if ground.runtime.processes > 1 else ""
    name = loader.unit_name.removesuffix("s") if count == 1 else loader.unit_name
    if fill is not None:
        bound = beyond_least(loader.num_units, _least(batching, ground) or 0)
        return f"{count} {name} of {batching.bin_tokens} tokens, {fill:.1%} full ({bound}){shared}"
    return f"{count} {name}, about {tokens / loader.num_units * count:,.0f} tokens{shared}"


def _fill(batching: BatchingConfig, ground: Ground) -> float | None:
    """How much of the bins is tokens; rows have no fixed size."""
    if not batching.packing:
        return None
    return ground.data.report.train.tokens / (ground.loader.num_units * batching.bin_tokens)


def _least(batching: BatchingConfig, ground: Ground) -> int | None:
    """Bins that the best plan would need at least."""
    return least_bins(ground.data.train.lengths, batching.bin_tokens) if batching.packing else None


def facts(run: RunConfig, ground: Ground) -> dict[str, Any]:
    """For the manifest: what was chosen, counted and hashed."""
    return {
        "seed": run.seed,
        "choices": {
            **asdict(ground.choices),
            "recompute": run.training.recompute,
            "tokens": run.batching.tokens if run.batching.packing else None,
            "format": formats_of(run.dataset),
            "device": ground.runtime.device.type,
            "threads": ground.runtime.threads,
            "processes": ground.runtime.processes,
        },
        "counts": {
            "steps": ground.plan.steps,
            "weights": ground.counts.total,
            "trained_weights": ground.counts.trained,
            "units": ground.loader.num_units,
            "units_per_step": ground.loader.units_per_step,
            "unit_name": ground.loader.unit_name,
            "fill": _fill(run.batching, ground),
            "least_units": _least(run.batching, ground),
            "data": ground.data.report.as_dict(),
        },
        "hardware": hardware(),
        "memory_taken": None if (held := gpu_in_use.taken_by_others()) is None else asdict(held),
        "hashes": content_hashes(ground.data, ground.tokenizer),
    }
