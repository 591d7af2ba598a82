"""The resolution of a run: its rows prepared and every `auto` settled, before any weight is loaded."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from app import __version__
from app.base.structure import BaseModel
from app.batch import Batch
from app.config.compile_rules import BLOCKS, NONE, compile_refusals
from app.config.schema import RunConfig
from app.config.tasks import task_of
from app.data.loader import Loader, eval_batches
from app.data.objectives import Objective
from app.data.token_dataset import TokenRows
from app.distributed.environment import world
from app.distributed.process_group import Runtime, start
from app.errors import ConfigError, EnvironmentProblem, refuse
from app.layers import quantization
from app.layers.compilable import attention_obstacles, machine_obstacles, model_obstacles
from app.model.build import ModelCounts, ModelSections, count_weights
from app.optim.lr_schedule import learning_rate
from app.training import memory_in_use
from app.training.auto_settings import (
    AUTO,
    BINS_CHOICE,
    BUDGET_CHOICE,
    LAYERS_CHOICE,
    PARALLEL_CHOICE,
    AutoSettings,
    RunPlanner,
    with_recompute,
)
from app.training.checkpoint import choices_of, find_checkpoint
from app.training.choices import Choices, choose, memory_budget, sections_of
from app.training.compile_choice import compile_facts, settle_compile, with_compile
from app.training.identity import base_hash, compared_settings, start_hash
from app.training.optimizer_in_backward import require_gradients_one_by_one
from app.training.rows import Rows, StepPlan, plan_steps, read_rows, rows_of_also
from app.training.scores import metrics_of

_PER_PROCESS_KEYS = {"output_dir", "cache_dir", "launch"}  # compared by themselves, or free to differ


@dataclass(frozen=True, slots=True)
class ResolvedRun(Rows):
    """A run with nothing left to choose. `config` has bins, parallelism and recomputed layers in numbers as well."""

    checkpoint: Path | None  # the one to continue from
    choices: Choices
    runtime: Runtime
    loader: Loader
    counts: ModelCounts
    layers_are_auto: bool  # whether the number of recomputed layers was planned
    uncompiled_because: tuple[str, ...] = ()  # reasons of compile=auto on a GPU
    also: TokenRows | None = None  # of `eval.also`

    @property
    def sections(self) -> ModelSections:
        return sections_of(self.config, self.choices)

    @property
    def steps(self) -> StepPlan:
        return plan_steps(self.config.training, self.loader.steps_per_epoch)

    def eval_batches(self, rows: TokenRows | None) -> Callable[[], Iterator[Batch]] | None:
        """Each call iterates over this process's share of the rows; None without rows."""
        if rows is None:
            return None
        layout = self.layout(self.config.eval.rows)
        return partial(eval_batches, rows, layout, self.runtime.processes, self.runtime.rank)

    def kept_with_run(self, folder: Path) -> Path:
        """The folder; that of the checkpoint's run for one that goes on elsewhere and does not have it yet."""
        return folder if folder.is_dir() or not self.checkpoint else self.checkpoint.parents[1] / folder.name

    def with_objective(self, objective: Objective) -> "ResolvedRun":
        """The same run with another objective, in its loader too."""
        found = replace(self, objective=objective)
        return replace(found, loader=found.loader_for(self.runtime.processes, self.runtime.rank))

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
        run = self.config
        planned = {
            PARALLEL_CHOICE: run.parallel.kind,
            LAYERS_CHOICE: str(run.training.recompute),
            BUDGET_CHOICE: str(run.compile.memory_budget),
        }
        return {**asdict(self.choices), **bins, **planned}

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
            **start_hash(run.adapter),
            "trained parameters": trained_parameters,
            "steps": self.steps.steps if run.schedule.kind != "constant" else "any",
        }


def resolve_run(
    run: RunConfig, checkpoints: Path, log: Callable[[str], None], planner: RunPlanner | None = None
) -> ResolvedRun:
    """Prepare the rows, choose for this machine, and compare with the other processes.

    The memory planner answers where the config says auto.
    """
    prepared = read_rows(run, BaseModel(run.model, task_of(run.task)), log)
    known = metrics_of(prepared.config)
    if prepared.config.eval.objective not in known:
        raise ConfigError(
            f"eval.objective={prepared.config.eval.objective}: this task has no such metric. Choose one of "
            f"{', '.join(known)}."
        )
    also, lines = rows_of_also(prepared)
    prepared.data.report.notes += lines
    prepared.base.on_meta()  # a model that cannot be trained is refused before the machine is looked at
    resolved = replace(_settle(prepared, checkpoints, log, planner), also=also)
    resolved.runtime.host_group.require_same(_equal_on_all_ranks(resolved, checkpoints))
    return resolved


def _settle(prepared: Rows, checkpoints: Path, log: Callable[[str], None], planner: RunPlanner | None) -> ResolvedRun:
    """Settle what the checkpoint, the machine and the memory planner decide, in the order of what needs what."""
    config, base = prepared.config, prepared.base
    checkpoint, remarks = find_checkpoint(checkpoints, config.resume, tidy=world().is_first)
    # memory of the GPU is read before this process allocates anything on it
    for remark in (*(f"memory  {note}" for note in memory_in_use.notes()), *remarks):
        log(remark)
    stored = choices_of(checkpoint)
    choices = choose(config, base, stored)
    require_gradients_one_by_one(config.optimizer, world().size, choices.precision)
    runtime = start(config.launch, choices.precision, config.seed)
    quantization.require_hardware(config.quantization, runtime.device)
    counts = count_weights(sections_of(config, choices), base)
    auto = AutoSettings(planner, choices, stored, runtime.host_group, log)
    binned = replace(prepared, config=auto.with_bins(auto.with_parallel(config)))
    loader = binned.loader_for(runtime.processes, runtime.rank)
    lm, device = base.on_meta(), runtime.device
    obstacles = [
        *machine_obstacles(config.compile, device),
        *attention_obstacles(choices.attention, device, loader.largest),
    ]
    if config.compile.kind == BLOCKS:
        refuse(compile_refusals([*model_obstacles(lm), *obstacles]))
    steps = plan_steps(config.training, loader.steps_per_epoch).steps
    facts = partial(compile_facts, binned.config, lm, device.type, obstacles, steps)
    compiled = settle_compile(config, stored, runtime.host_group, facts)
    auto = replace(auto, choices=replace(choices, compile=compiled.kind))
    config = with_compile(binned.config, compiled.kind)
    return ResolvedRun(
        config=auto.with_recompute(config, loader.largest, counts.layers),
        base=base,
        tokenizer=prepared.tokenizer,
        data=prepared.data,
        objective=prepared.objective,
        checkpoint=checkpoint,
        choices=auto.choices,
        runtime=runtime,
        loader=loader,
        counts=counts,
        layers_are_auto=config.training.recompute == AUTO,
        uncompiled_because=compiled.reasons,
    )


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


def without_compiled_layers(
    resolved: ResolvedRun, fault: str, planner: RunPlanner | None, log: Callable[[str], None]
) -> ResolvedRun:
    """Plan a run again whose layers are not compiled after all; they save more for their backward pass."""
    run, layers = with_compile(resolved.config, NONE), resolved.counts.layers
    choices = replace(resolved.choices, compile=NONE)
    auto = AutoSettings(planner, choices, {}, resolved.runtime.host_group, log)
    least = auto.least_recomputed(run, resolved.loader.largest, layers)
    count = layers if run.training.recompute is True else int(run.training.recompute)
    if resolved.layers_are_auto:
        # layers that are recomputed already stay so
        run = with_recompute(run, layers if least is None else max(least, count), memory_budget(run.compile))
    elif least is not None and least > count:
        raise EnvironmentProblem(
            f"compiled layers disabled: {fault}. Uncompiled ones need more memory: training.recompute={count} does not "
            f"fit. Set training.recompute={least}, or auto."
        )
    return replace(resolved, config=run, choices=choices)
