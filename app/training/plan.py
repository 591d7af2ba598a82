"""Plan of a run: start, machine, and every `auto` resolved before weights are loaded."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from app import __version__
from app.base.base_model import BaseModel
from app.batch import Batch
from app.config.rules import BLOCKS, NONE, compile_refusals
from app.config.schema import RunConfig
from app.data.collate import Layout
from app.data.loader import Loader, eval_batches
from app.data.objectives import Objective
from app.data.token_dataset import TokenRows
from app.data.transform import transform_hash
from app.distributed.launch import world
from app.distributed.process_group import Runtime
from app.distributed.process_group import start as start_processes
from app.errors import EnvironmentProblem, refuse
from app.layers import quantization
from app.layers.compile import attention_obstacles, machine_obstacles, model_obstacles
from app.model.build import ModelCounts, ModelSections, count_weights
from app.optim.lr_schedule import learning_rate
from app.training import gpu_usage
from app.training.auto_settings import (
    AUTO,
    BINS_CHOICE,
    BUDGET_CHOICE,
    LAYERS_CHOICE,
    PARALLEL_CHOICE,
    TILE_CHOICE,
    AutoSettings,
    Choices,
    CompileChoice,
    RunPlanner,
    choose,
    compile_facts,
    memory_budget,
    require_sliceable,
    sections_of,
    settle_compile,
    with_compile,
    with_recompute,
)
from app.training.checkpoint import choices_of, find_checkpoint
from app.training.gpu_usage import GpuMonitor
from app.training.identity import base_hash, compared_settings, start_hash
from app.training.rows import Rows, StepPlan, layout_of, loader_of, plan_steps
from app.training.train_step import require_gradients_one_by_one


@dataclass(frozen=True, slots=True)
class Start:
    """Checkpoint to resume from, None for a new run, and `choices`: the values of `auto` when the run first started."""

    checkpoint: Path | None
    choices: Mapping[str, str]
    remarks: tuple[str, ...] = ()  # on damaged checkpoints

    def kept_with_run(self, folder: Path) -> Path:
        """Return the folder, or that of the run of the checkpoint if the run resumes elsewhere without a copy yet."""
        return folder if folder.is_dir() or not self.checkpoint else self.checkpoint.parents[1] / folder.name


def find_start(checkpoints: Path, resume: str | None) -> Start:
    """Find the checkpoint to resume from, if any."""
    checkpoint, remarks = find_checkpoint(checkpoints, resume, tidy=world().is_first)
    return Start(checkpoint, choices_of(checkpoint), tuple(remarks))


# ---- machine


@dataclass(frozen=True, slots=True)
class Machine:
    """Processes, device, precision and attention of a run; compilation is decided by the plan."""

    runtime: Runtime
    choices: Choices
    gpu: GpuMonitor


def join(rows: Rows, start: Start, say: Callable[[str], None]) -> Machine:
    """Choose precision and attention for this machine, and connect all processes."""
    run = rows.run
    rows.base.on_meta()  # raise for an unsupported model before examining the machine
    require_sliceable(run, rows.base)
    # memory of the GPU is read before this process allocates anything on it
    for remark in (*(f"memory  {note}" for note in gpu_usage.notes()), *start.remarks):
        say(remark)
    gpu = GpuMonitor()
    choices = choose(run, rows.base, start.choices)
    require_gradients_one_by_one(run.optimizer, world().size, choices.precision)
    runtime = start_processes(run.launch, choices.precision, run.seed, run.parallel.context)
    quantization.require_hardware(run.quantization, runtime.device)
    return Machine(runtime, choices, gpu)


# ---- plan


_PER_PROCESS_KEYS = {"output_dir", "cache_dir", "launch"}  # compared separately, or free to differ


@dataclass(frozen=True, slots=True)
class Plan:
    """A run with every `auto` resolved: `run` has the bin size, parallelism and number of recomputed layers."""

    run: RunConfig
    rows: Rows
    start: Start
    machine: Machine
    choices: Choices
    loader: Loader
    counts: ModelCounts
    layers_are_auto: bool  # whether the planner chose the number of recomputed layers
    uncompiled_because: tuple[str, ...] = ()  # reasons of compile=auto on a GPU

    @property
    def runtime(self) -> Runtime:
        return self.machine.runtime

    @property
    def sections(self) -> ModelSections:
        return sections_of(self.run, self.choices)

    @property
    def steps(self) -> StepPlan:
        return plan_steps(self.run.training, self.loader.steps_per_epoch)

    def layout(self, rows: int) -> Layout:
        """Return the layout: bins, or `rows` padded rows."""
        return layout_of(self.run, rows, self.rows.objective, self.rows.pad_id)

    def eval_batches(self, rows: TokenRows | None) -> Callable[[], Iterator[Batch]] | None:
        """Return a function that iterates over the rows of this process; None without rows."""
        if rows is None:
            return None
        layout = self.layout(self.run.eval.rows)
        return partial(eval_batches, rows, layout, self.runtime.readers, self.runtime.reader)

    def with_objective(self, objective: Objective) -> "Plan":
        """Return the plan with another objective, also in its loader."""
        rows = replace(self.rows, objective=objective)
        return replace(self, rows=rows, loader=loader_of(rows, self.run, self.runtime.readers, self.runtime.reader))

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return learning_rate(self.run.schedule, self.run.optimizer.lr, step, total=self.steps.steps)

    def largest_micro_batch(self) -> tuple[Batch, int]:
        """Return the micro-batch that needs most memory, and the number of micro-batches per step."""
        return self.loader.largest(), self.run.batching.accumulation

    def stored_choices(self) -> dict[str, str]:
        """Return the resolved values of `auto`, for the checkpoints: a resumed run keeps them."""
        batching = self.run.batching
        bins = {BINS_CHOICE: str(batching.tokens)} if batching.packing else {}
        run = self.run
        planned = {
            PARALLEL_CHOICE: run.parallel.kind,
            LAYERS_CHOICE: str(run.training.recompute),
            BUDGET_CHOICE: str(run.compile.memory_budget),
            TILE_CHOICE: str(run.training.tile),
        }
        return {**asdict(self.choices), **bins, **planned}

    def identity(self, trained_parameters: int, fingerprint: str | None) -> dict[str, Any]:
        """Return the facts that determine the next step, by key; a checkpoint with other values is refused.

        `fingerprint`: hash of the base weights.
        """
        run, loader = self.run, self.loader
        return {
            **compared_settings(run, self.choices.precision),
            "dataset (its tokens)": self.rows.data.train.fingerprint,
            "dataset.transform (as a hash)": transform_hash(run.dataset)[:12],
            "batching": f"{loader.units_per_step} {loader.unit_name} a step, {loader.num_units} an epoch",
            "model.path": run.model.path,
            **base_hash(run.model, fingerprint),
            **start_hash(run.adapter),
            "trained parameters": trained_parameters,
            "steps": self.steps.steps if run.schedule.kind != "constant" else "any",
        }


def make_plan(
    rows: Rows, machine: Machine, start: Start, planner: RunPlanner | None, say: Callable[[str], None]
) -> Plan:
    """Resolve every `auto` from the checkpoint, the machine and the memory planner, in the order of dependencies."""
    run, base, runtime = rows.run, rows.base, machine.runtime
    counts = count_weights(sections_of(run, machine.choices), base)
    auto = AutoSettings(planner, machine.choices, start.choices, runtime.host_group, say)
    binned = auto.with_bins(auto.with_parallel(run))
    loader = loader_of(rows, binned, runtime.readers, runtime.reader)
    compiled = _compile_choice(binned, base, machine, start, loader)
    settled = replace(auto, choices=replace(machine.choices, compile=compiled.kind))
    return Plan(
        run=settled.with_recompute(with_compile(binned, compiled.kind), loader.largest, counts.layers),
        rows=rows,
        start=start,
        machine=machine,
        choices=settled.choices,
        loader=loader,
        counts=counts,
        layers_are_auto=run.training.recompute == AUTO,
        uncompiled_because=compiled.reasons,
    )


def _compile_choice(run: RunConfig, base: BaseModel, machine: Machine, start: Start, loader: Loader) -> CompileChoice:
    lm, device = base.on_meta(), machine.runtime.device
    obstacles = [
        *machine_obstacles(run.compile, device),
        *attention_obstacles(machine.choices.attention, device, loader.largest),
    ]
    if run.compile.kind == BLOCKS:
        refuse(compile_refusals([*model_obstacles(lm), *obstacles]))
    steps = plan_steps(run.training, loader.steps_per_epoch).steps
    facts = partial(compile_facts, run, lm, device.type, obstacles, steps)
    return settle_compile(run, start.choices, machine.runtime.host_group, facts)


def shared_facts(plan: Plan, output_dir: Path) -> dict[str, Any]:
    """Return the facts that must be equal on all processes, by key."""
    settings = {key: v for key, v in asdict(plan.run).items() if key not in _PER_PROCESS_KEYS}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return {
        "the settings (as a hash)": digest[:12],
        "dataset (its tokens)": plan.rows.data.train.fingerprint[:12],
        "output_dir": str(output_dir),
        "resume": plan.start.checkpoint.name if plan.start.checkpoint else "from the start",
        "precision": plan.choices.precision,
        "attention": plan.choices.attention,
        "the code of app": __version__,
    }


def without_compiled_layers(plan: Plan, fault: str, planner: RunPlanner | None, log: Callable[[str], None]) -> Plan:
    """Plan a run again after compilation was disabled: uncompiled layers save more activations."""
    run, layers = with_compile(plan.run, NONE), plan.counts.layers
    choices = replace(plan.choices, compile=NONE)
    auto = AutoSettings(planner, choices, {}, plan.runtime.host_group, log)
    least = auto.least_recomputed(run, plan.loader.largest, layers)
    count = layers if run.training.recompute is True else int(run.training.recompute)
    if plan.layers_are_auto:
        # the number of recomputed layers never decreases
        run = with_recompute(run, layers if least is None else max(least, count), memory_budget(run.compile))
    elif least is not None and least > count:
        raise EnvironmentProblem(
            f"compiled layers disabled: {fault}. This needs more memory, and training.recompute={count} does not "
            f"fit. Set training.recompute={least}, or auto."
        )
    return replace(plan, run=run, choices=choices)
