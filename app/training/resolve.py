"""What a run means: every `auto` settled, and what its data and its model decide, before any weight is loaded."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from app import __version__
from app.batch import Batch
from app.config.dataset import formats_for, has_chats, paths_of
from app.config.rules import problems_of
from app.config.schema import ModelConfig, RunConfig, TrainingConfig
from app.config.tasks import task_of
from app.data.collate import Layout, Packed, Padded
from app.data.detect_format import detect_formats
from app.data.loader import Loader, StepSplit, eval_batches
from app.data.objectives import Objective, build_objective
from app.data.prepare import Data, Judge, prepare, stop_if_wrong
from app.data.token_dataset import TokenRows
from app.distributed.environment import world
from app.distributed.process_group import Runtime, start
from app.errors import ConfigError
from app.model import quantization
from app.model.attention import Needs, needs_of
from app.model.build import DTYPES, ModelPlan, ModelSections, plan_model
from app.model.compile import require_compilable
from app.model.load_base import build_on_meta, numbers_at_hand
from app.model.source import positions_of, positions_text
from app.model.tasks import is_bidirectional
from app.model.tokenizer import load_tokenizer
from app.model.training_model import first_position
from app.optim.lr_schedule import learning_rate
from app.training import memory_in_use
from app.training.auto_settings import (
    BINS_CHOICE,
    LAYERS_CHOICE,
    PARALLEL_CHOICE,
    AutoPlanner,
    AutoSettings,
    recomputed_layers,
)
from app.training.checkpoint import choices_of, find_checkpoint
from app.training.choices import Choices, choose
from app.training.identity import base_hash, compared_settings
from app.training.optimizer_in_backward import require_gradients_one_by_one

_PER_PROCESS_KEYS = {"output_dir", "cache_dir", "launch"}  # compared by themselves, or free to differ

Run = TypeVar("Run", bound=RunConfig)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Optimizer steps of the whole run and of one epoch."""

    steps: int
    steps_per_epoch: int

    def epoch(self, step: int) -> float:
        """Epochs done after `step` steps."""
        return step / self.steps_per_epoch

    def every(self, interval: int | str) -> int:
        """The steps of an interval that may be given as a part of an epoch, such as 0.25epoch; at least one of it."""
        if isinstance(interval, int):
            return interval
        return max(1, round(float(interval.removesuffix("epoch")) * self.steps_per_epoch))


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A run with nothing left to choose. `config` has formats, labels, bins and recomputed layers in numbers."""

    config: RunConfig
    tokenizer: Any
    data: Data
    objective: Objective
    meta_model: Any  # the base network on the meta device, without an adapter
    checkpoint: Path | None  # the one to continue from
    choices: Choices
    runtime: Runtime
    loader: Loader
    steps: StepPlan
    sections: ModelSections
    counts: ModelPlan

    def eval_batches(self) -> Callable[[], Iterator[Batch]] | None:
        """Each call iterates over this process's share of the held-out rows; None without held-out rows."""
        if self.data.eval is None:
            return None
        layout = layout_of(self.config, self.config.eval.rows, self.tokenizer, self.objective)
        return partial(eval_batches, self.data.eval, layout, self.runtime.processes, self.runtime.rank)

    def learning_rate(self, step: int) -> float:
        """Steps count from 0."""
        return learning_rate(self.config.schedule, self.config.optimizer.lr, step, total=self.steps.steps)

    def largest_micro_batch(self) -> tuple[Batch, int]:
        """The micro-batch that needs most memory, and how many a step has."""
        return self.loader.largest(), self.config.batching.accumulation

    def stored_choices(self) -> dict[str, str]:
        """What `auto` came to, for the checkpoints: a continued run keeps it."""
        batching = self.config.batching
        bins = {BINS_CHOICE: str(batching.tokens)} if batching.packing else {}
        parallel = {PARALLEL_CHOICE: self.config.parallel.kind}
        return {**asdict(self.choices), LAYERS_CHOICE: str(self.config.training.recompute), **bins, **parallel}

    def identity(self, trained_parameters: int, fingerprint: str | None) -> dict[str, Any]:
        """What decides the numbers of the next step, by the key to type; a checkpoint with other values is refused.

        `fingerprint`: that of the base's weights.
        """
        run, loader = self.config, self.loader
        return {
            **compared_settings(run, self.choices.precision),
            "dataset (its tokens)": self.data.train.fingerprint,
            "batching": f"{loader.units_per_step} {loader.unit_name} a step, {loader.num_units} an epoch",
            "model.path": run.model.path,
            **base_hash(run.model, fingerprint),
            "trained parameters": trained_parameters,
            "steps": self.steps.steps if run.schedule.kind != "constant" else "any",
        }


def resolve_run(
    run: RunConfig, checkpoints: Path, log: Callable[[str], None], planner: AutoPlanner | None = None
) -> ResolvedRun:
    """Settle everything, in the order of what needs what. The memory planner answers where the config says auto."""
    run, notes = resolve_format(limit_to_positions(run, log))
    tokenizer = load_tokenizer(run.model, needs_template=has_chats(run.dataset))
    data = prepare(run.dataset, tokenizer, run.cache_dir, notes, judge_of(run.model), run.task.labels)
    run = resolve_classes(run, data.classes)
    meta_model = build_meta_model(run)
    objective = objective_of(run, tokenizer, meta_model)
    checkpoint, remarks = find_checkpoint(checkpoints, run.resume, tidy=world().is_first)
    # memory of the GPU is read before this process allocates anything on it
    for remark in (*(f"memory  {note}" for note in memory_in_use.notes()), *remarks):
        log(remark)
    stored = choices_of(checkpoint)
    choices = resolve_choices(run, meta_model, stored)
    require_gradients_one_by_one(run.optimizer, world().size, choices.precision)
    runtime = start(run.launch, choices.precision, run.seed)
    quantization.require_hardware(run.quantization, runtime.device)
    require_compilable(run.compile, runtime.device)
    counts = plan_model(sections_of(run, choices), meta_model)
    require_known_ids(run.model, [data.train, data.eval], counts.vocabulary)
    auto = AutoSettings(planner, choices, stored, runtime.host_group, log)
    run = auto.with_bins(auto.with_parallel(run))
    split = StepSplit(run.batching.accumulation, runtime.processes, runtime.rank)
    loader = Loader(data.train, layout_of(run, run.batching.rows, tokenizer, objective), split, run.seed)
    run = auto.with_recompute(run, loader.largest, counts.layers)
    resolved = ResolvedRun(
        config=run,
        tokenizer=tokenizer,
        data=data,
        objective=objective,
        meta_model=meta_model,
        checkpoint=checkpoint,
        choices=choices,
        runtime=runtime,
        loader=loader,
        steps=plan_steps(run.training, loader.steps_per_epoch),
        sections=sections_of(run, choices),
        counts=counts,
    )
    runtime.host_group.require_same(_equal_on_all_ranks(resolved, checkpoints))
    return resolved


def limit_to_positions(run: Run, log: Callable[[str], None]) -> Run:
    """Lower `dataset.max_length` to the positions of the model; longer rows are then over-long."""
    positions = positions_of(run.model)
    if positions is None or run.dataset.max_length <= positions - _max_unused_positions(run):
        return run
    positions -= first_position(build_meta_model(run))
    if run.dataset.max_length <= positions:
        return run
    limit = positions_text(run.model, positions)
    log(f"note    dataset.max_length={run.dataset.max_length} -> {positions}: {limit}")
    return replace(run, dataset=replace(run.dataset, max_length=positions))


def _max_unused_positions(run: RunConfig) -> int:
    """A bound from config.json alone, so that no model is built where rows fit anyway."""
    padding = getattr(numbers_at_hand(run.model, task_of(run.task)), "pad_token_id", None)
    return 0 if padding is None else int(padding) + 1


def judge_of(model: ModelConfig, *, trains: bool = True) -> Judge:
    """What ends a run at its rows, with the model's limit in the message about those that are too long."""
    return partial(stop_if_wrong, positions=positions_of(model), trains=trains)


def resolve_format(run: Run) -> tuple[Run, list[str]]:
    """Settle `dataset.format=auto` from the first rows, with notes; ConfigError where the format breaks a rule."""
    dataset, notes = detect_formats(run.dataset, formats_for(run.task.kind))
    if not notes:
        return run, notes
    known = replace(run, dataset=dataset)
    problems = problems_of(known)
    if problems:
        raise ConfigError([*problems[:-1], f"{problems[-1]} ({'; '.join(notes)})"])
    return known, notes


def resolve_classes(run: Run, classes: Sequence[str]) -> Run:
    """Take the labels of a classification from its rows where the config names none."""
    if task_of(run.task).unit != "class" or run.task.labels:
        return run
    if len(classes) < 2:
        only = f"all have the label {classes[0]}" if classes else "none has a label"
        raise ConfigError(
            f"dataset.path={paths_of(run.dataset)}: of its rows {only}, so there is nothing to choose. Give rows "
            "of two labels or more, or name all there are: task.labels=[one,other]."
        )
    return replace(run, task=replace(run.task, labels=list(classes)))


def build_meta_model(run: RunConfig) -> Any:
    """The run's base network without memory."""
    return build_on_meta(run.model, task_of(run.task), "eager")


def objective_of(run: RunConfig, tokenizer: Any, meta_model: Any) -> Objective:
    """The training objective: next tokens, masked tokens or a class."""
    bidirectional = is_bidirectional(task_of(run.task), meta_model)
    return build_objective(run.task, tokenizer, run.seed, bidirectional=bidirectional)


def resolve_choices(run: RunConfig, meta_model: Any, stored: Mapping[str, str]) -> Choices:
    """Precision and attention for this machine and model; `stored` ones of a checkpoint replace `auto`."""
    packed = run.batching.packing or is_bidirectional(task_of(run.task), meta_model)

    def needs(precision: str) -> Needs:
        compute = DTYPES[precision].compute
        return needs_of(meta_model, compute, packed=packed)

    return choose(run.precision, run.attention, needs, stored)


def sections_of(run: RunConfig, choices: Choices) -> ModelSections:
    """The settings that decide which model is built."""
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


def layout_of(run: RunConfig, rows: int, tokenizer: Any, objective: Objective) -> Layout:
    """Bins, or `rows` padded rows. Any pad id serves: padding is told by row lengths, never by its id."""
    pad_id = 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
    if run.batching.packing:
        return Packed(run.batching.bin_tokens, pad_id, run.dataset.max_length, objective)
    return Padded(rows, pad_id, objective)


def require_known_ids(model: ModelConfig, data: Sequence[TokenRows | None], vocabulary: int) -> None:
    """Refuse ids beyond the embedding: on a GPU they end the process without a message."""
    largest = max(rows.largest_id for rows in data if rows is not None)
    if largest >= vocabulary:
        raise ConfigError(
            f"model.tokenizer={model.tokenizer or 'null'}: it gives ids up to {largest}, but the model knows only "
            f"{vocabulary} (0 to {vocabulary - 1}). Give the tokenizer that belongs to model.path={model.path}."
        )


def plan_steps(training: TrainingConfig, steps_per_epoch: int) -> StepPlan:
    """`epochs`, rounded up to whole steps, cut at `max_steps`."""
    wanted = math.ceil(training.epochs * steps_per_epoch - 1e-9)  # 0.1 * 30 is a little more than 3
    steps = wanted if training.max_steps is None else min(wanted, training.max_steps)
    return StepPlan(steps=max(steps, 1), steps_per_epoch=steps_per_epoch)


def _equal_on_all_ranks(resolved: ResolvedRun, checkpoints: Path) -> dict[str, Any]:
    """What processes compare before they train together, by the key to type."""
    settings = {key: v for key, v in asdict(resolved.config).items() if key not in _PER_PROCESS_KEYS}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return {
        "the settings (as a hash)": digest[:12],
        "dataset (its tokens)": resolved.data.train.fingerprint[:12],
        "output_dir": str(checkpoints.parent),
        "resume": resolved.checkpoint.name if resolved.checkpoint else "from the start",
        "precision": resolved.choices.precision,
        "attention": resolved.choices.attention,
        "the code of app": __version__,
    }
