"""Setup of a run before its next step: load and check the model, build the optimizer, restore the checkpoint."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from app.adapters.adapters import adapter_of, lr_factor
from app.base.source import base_fingerprint, base_path, local_place, require_intact_base
from app.batch import Batch
from app.config.adapters import changes_base
from app.config.schema import AdapterConfig, RunConfig
from app.data.loader import Loader
from app.distributed.fsdp import Sharding, first_number
from app.distributed.gradient_reduction import AllReduce, GradientReduction, ShardedGradients
from app.distributed.launch import world
from app.distributed.process_group import Runtime
from app.files import checksummed_folder
from app.finished.save import save_base
from app.layers import frozen_linear
from app.layers.activation_checkpointing import recompute_rest, recomputing
from app.layers.comparison import Comparison, max_difference
from app.model.build import build_training_model, choose_loss_head, random_base
from app.model.checks import check_adapter, check_causal, check_head, check_packing, check_slices
from app.model.training_model import TrainingModel, evaluating
from app.model.verification import verify_compiled
from app.oom_retry import RetryOnRestart, few_rows, out_of_memory_error, try_or_none
from app.optim.optimizers import build_optimizer, needs_whole_matrices
from app.tasks.table import loss_of
from app.tracking.console import Console
from app.tracking.output_dir import RunFolder
from app.tracking.recorder import Recorder
from app.training.auto_settings import RunPlanner
from app.training.checkpoint import Checkpoints, Progress
from app.training.initial_model import drawn_start, load_start, with_reference
from app.training.memory import Forecast
from app.training.mirror import Mirror
from app.training.plan import Plan, without_compiled_layers
from app.training.samples import sampler
from app.training.storage_counter import kept_bytes
from app.training.train_step import Stepper
from app.training.trainer import Parts

# allowed relative difference of a reduced gradient: another order of sums, in fp32 and in rounded arithmetic
_EXACT_REDUCTION, _ROUNDED_REDUCTION = 1e-4, 2e-2
_FEW_ROWS = 4  # data rows in repeated checks and in the check of a reduction


@dataclass(frozen=True, slots=True)
class RunSetup:
    """A run ready for its next step. `plan` differs from the first one if compiled layers were disabled."""

    plan: Plan
    forecast: Forecast
    stepper: Stepper
    checks: list[Comparison]
    checkpoints: Checkpoints
    progress: Progress
    fingerprint: str | None  # of the base weights
    drawn: dict[str, Tensor]  # initial adapter weights that were split off the base (PiSSA, OLoRA, CorDA)


def set_up(
    planned: Plan, forecast: Forecast, folder: RunFolder, planner: RunPlanner | None, console: Console
) -> RunSetup:
    """Load the model, check it on a real micro-batch, build the optimizer, restore a checkpoint or start adapter."""
    run, runtime = planned.run, planned.runtime
    console.status("Loading weights ...")
    torch.ones(1, device=runtime.device)  # creates the context of a GPU
    planned.machine.gpu.note_stage("context")
    model = _build(planned, base_path(run.model, folder.base))
    planned.machine.gpu.note_stage("weights")
    fingerprint = _shared_fingerprint(planned)
    identity = planned.identity(sum(parameter.numel() for parameter in model.trained().values()), fingerprint)
    checkpoints = Checkpoints(folder.checkpoints, run.checkpoint, identity, planned.stored_choices())
    console.status("Checking the model ..." if model.compiled_layers is None else "Compiling ...")
    with split_depth_noted(checkpoints):  # after OOM, the next start uses smaller parts
        depth = checkpoints.noted_depth()
        checks = check_on_loader(model, run.adapter, planned.loader, runtime.device, depth)
        checks += check_on_slices(model, planned.loader, runtime)
    replanned = _without_failed_layers(planned, model, planner, console.say)
    plan = replanned or planned
    checkpoints.keep_choices(plan.stored_choices())
    stepper = stepper_of(model, plan.run, runtime, plan.choices.precision)
    runtime.seed(run.seed)  # again: building the model and checking it draw random numbers
    drawn = drawn_start(plan, model)
    progress = restore_progress(plan, checkpoints, stepper, fingerprint)
    return RunSetup(
        plan=with_reference(plan, model, folder.reference, fingerprint),
        forecast=forecast if replanned is None else forecast_of(replanned, planner),
        stepper=stepper,
        checks=checks,
        checkpoints=checkpoints,
        progress=progress,
        fingerprint=fingerprint,
        drawn=drawn,
    )


def forecast_of(plan: Plan, planner: RunPlanner | None) -> Forecast:
    """Estimate the peak memory on rank 0: the micro-batches of all ranks have the same shape."""
    if planner is None or not world().is_first:
        return Forecast(None, "")
    return Forecast.estimate(
        planner.predict, plan.run, plan.choices, *plan.largest_micro_batch(), plan.runtime.device.type
    )


def _build(plan: Plan, place: str) -> TrainingModel:
    """Build the model; a new adapter may be initialized from rows of the run."""
    run, runtime = plan.run, plan.runtime
    if run.model.weights == "pretrained" and world().is_first:
        require_intact_base(local_place(run.model.path))
    rows = plan.loader.first_epoch if changes_base(run.adapter) or not plan.start.checkpoint else None
    sharding = runtime.sharding(run.parallel)
    return build_training_model(plan.sections, loss_of(run), runtime.device, run.seed, place, sharding, rows)


def _without_failed_layers(
    planned: Plan, model: TrainingModel, planner: RunPlanner | None, say: Callable[[str], None]
) -> Plan | None:
    """Return a new plan if compiled layers of any process failed verification, else None.

    All processes then disable compilation, and recompute more layers if `auto` requires it.
    """
    layers = model.compiled_layers
    faults = [] if layers is None else planned.runtime.host_group.all_gather_object(layers.fault)
    fault = next((fault for fault in faults if fault is not None), None)
    if layers is None or fault is None:
        return None
    layers.give_up(fault)
    before = planned.run.training.recompute
    replanned = without_compiled_layers(planned, str(layers.fault), planner, say)
    count = replanned.run.training.recompute
    if before is not True and count != before:
        recompute_rest(model.network, int(before), None if count is True else int(count))
    return replanned


@contextmanager
def split_depth_noted(checkpoints: Checkpoints) -> Iterator[None]:
    """Record on disk that the next start must split deeper, for ranks that only see a broken connection."""
    depth_before = checkpoints.noted_depth()
    try:
        yield
    except RetryOnRestart as fault:
        checkpoints.note_depth(fault.depth)
        raise
    except RuntimeError as fault:
        depth = checkpoints.noted_depth()
        if depth <= depth_before:
            raise
        raise RetryOnRestart("a micro-batch of another process", depth) from fault


def check_on_loader(
    model: TrainingModel, adapter: AdapterConfig, loader: Loader, device: torch.device, depth: int = 0
) -> list[Comparison]:
    """Check the model on the micro-batch of an epoch with the most rows; raise if a check fails.

    `depth`: how often micro-batches are halved, as noted by an earlier start that ran out of memory.
    """
    check = partial(_compare_for_training, model, adapter)
    return _within_memory(model, check, loader.with_most_rows().to(device), depth)


def check_on_slices(model: TrainingModel, loader: Loader, runtime: Runtime) -> list[Comparison]:
    """Check that slices of a row give the results of the row, on short documents of a micro-batch."""
    if runtime.context is None:
        return []
    check = partial(check_slices, model, loader.with_most_rows().to(runtime.device), runtime)
    if model.sharding is None:
        return check()
    with model.sharding.checking():
        return model.within(check)


def check_on_batch(model: TrainingModel, batch: Batch) -> list[Comparison]:
    """Check the model on an eval batch."""
    return _within_memory(model, partial(_compare, model), batch)


def _within_memory(
    model: TrainingModel, check: Callable[[Batch], list[Comparison]], batch: Batch, depth: int = 0
) -> list[Comparison]:
    """Run checks; repeat them once after OOM: on few rows, with all layers recomputed.

    For a sharded model the next start repeats them: other processes are in the same pass.
    """
    comparisons, is_sharded = None, model.sharding is not None
    if not (is_sharded and depth):
        comparisons = try_or_none(check, batch)
        if comparisons is None and is_sharded:
            raise RetryOnRestart("a check of the model", depth + 1)
    if comparisons is None:
        few = few_rows(batch, _FEW_ROWS)
        if model.compiled_layers is not None:  # a graph has the shape of the full micro-batch
            model.compiled_layers.give_up("the checks before the first step ran out of memory")
        with recomputing(model.network):
            comparisons = try_or_none(check, few)
        if comparisons is None:
            raise out_of_memory_error(f"a check of the model on {few.num_tokens:,} tokens", kept_bytes(model, None))
    return comparisons


def _compare_for_training(model: TrainingModel, adapter: AdapterConfig, batch: Batch) -> list[Comparison]:
    if model.sharding is None:
        comparisons = _compare(model, batch)
        with _uncompiled(model):
            check_adapter(model, adapter, batch)  # for a sharded model the first steps check it
        return comparisons
    with model.sharding.checking():
        comparisons = model.within(partial(_compare, model, batch))
    return [*comparisons, check_reduction(model, model.sharding, batch)]


def _compare(model: TrainingModel, batch: Batch) -> list[Comparison]:
    """Compare with the original model: experts, logits of the head, packed with separate documents."""
    gathered = nullcontext if model.sharding is None else model.sharding.gathered
    rounding = frozen_linear.compare_products(model.network, gathered)
    with frozen_linear.without_row_rounding(model.network), _uncompiled(model):
        head = [check_head(model, batch), *choose_loss_head(model, batch)]
        comparisons = [*head, *check_causal(model, batch), *check_packing(model, batch)]
    comparisons += [*model.grouped_experts, *rounding]
    layers = model.compiled_layers
    if layers is not None and layers.fault is None:
        comparisons += verify_compiled(model, layers, batch).or_leave(layers.give_up)
    return comparisons


def check_reduction(model: TrainingModel, sharding: Sharding, batch: Batch) -> Comparison:
    """Raise if the gradient reduced by FSDP is not the sum over all processes."""
    few = few_rows(batch, _FEW_ROWS)

    def backward() -> None:
        loss, _ = model(few)
        (loss * (1 + world().rank)).backward()  # the batch is the same on all processes, the gradients are not

    unrounded = frozen_linear.without_row_rounding(model.network)
    with evaluating(model), unrounded, _uncompiled(model), recomputing(model.network):
        name, reduced, expected = sharding.first_gradient(backward)
    is_rounded = model.compute is not None or reduced.dtype != torch.float32
    allowed = _ROUNDED_REDUCTION if is_rounded else _EXACT_REDUCTION
    difference = max_difference([reduced], [expected])
    comparison = Comparison("gradient reduced by FSDP against the plain sum", difference, allowed)
    return comparison.or_refuse(
        f"parallel: the gradient of {name} reduced by FSDP is not the sum over all processes (relative "
        f"difference {comparison.difference:.1e}, limit {allowed:.0e}). Set parallel=ddp, or install another version "
        "of torch."
    )


def _uncompiled(model: TrainingModel) -> AbstractContextManager[None]:
    """Return a context without compilation for checks, whose many shapes would each be compiled."""
    return nullcontext() if model.compiled_layers is None else model.compiled_layers.paused()


def stepper_of(model: TrainingModel, run: RunConfig, runtime: Runtime, precision: str) -> Stepper:
    """Return the stepper of a model, sharded or not, with gradient reduction and optimizer."""
    trained, whole = list(model.trained().values()), needs_whole_matrices(run.optimizer)
    reduction, shards = GradientReduction(trained), None
    if model.sharding is not None:
        reduction = sharded = ShardedGradients(trained, model.sharding, whole_matrices=whole)
        shards = None if whole else {weight: (shard, first_number(weight)) for weight, shard in sharded.local.items()}
    elif runtime.processes > 1:
        reduction = AllReduce(trained, overlap=run.parallel.overlap, in_lockstep=runtime.context is not None)
    optimizer = build_optimizer(run.optimizer, model, run.seed, shards, lr_factor(run.adapter))
    return Stepper(model, optimizer, runtime, run.training.clip, fp16=precision == "fp16", reduction=reduction)


def restore_progress(plan: Plan, checkpoints: Checkpoints, stepper: Stepper, fingerprint: str | None) -> Progress:
    """Load the checkpoint, or the start adapter of a new run, and use the deepest split of all starts of this run.
    `fingerprint`: hash of the base weights.
    """
    host_group, checkpoint = plan.runtime.host_group, plan.start.checkpoint
    progress = checkpoints.load(checkpoint, stepper, host_group) if checkpoint else Progress()
    if checkpoint is None:
        for remark in load_start(plan.run, stepper.model, fingerprint, plan.rows.base.names):
            stepper.model.add_remark(remark)
    progress.depth = stepper.split_depth = max(progress.depth, checkpoints.noted_depth())
    return progress


def _shared_fingerprint(plan: Plan) -> str | None:
    """Return the hash of the base weights, read by rank 0 for all."""
    fingerprint = base_fingerprint(plan.run.model) if world().is_first else None
    shared: str | None = plan.runtime.host_group.all_gather_object(fingerprint)[0]
    return shared


def record_base(plan: Plan, model: TrainingModel, recorder: Recorder, fingerprint: str | None) -> None:
    """Record the hash of the base, and save a base of random weights with the run."""
    if not world().is_first:
        return
    run, sections, is_there = plan.run, plan.sections, recorder.folder.base.is_dir()
    recorder.add_facts(hashes={"base": fingerprint})
    needs_base = sections.model.weights == "random" and sections.adapter.kind != "none"
    if needs_base and run.checkpoint.save_random_base and not (plan.start.checkpoint and is_there):
        method = adapter_of(run.adapter)
        is_plain = sections.quantizer is None and model.sharding is None and method is not None and method.on_meta
        drawn = None if is_plain else random_base(sections, plan.runtime.device, run.seed)
        with checksummed_folder(recorder.folder.base) as folder:
            save_base(model, plan.rows.tokenizer, folder, drawn)


def trainer_parts(
    plan: Plan, stepper: Stepper, checkpoints: Checkpoints, recorder: Recorder, mirror: Mirror | None
) -> Parts:
    """Return the components of the trainer."""
    return Parts(
        config=plan.run,
        runtime=plan.runtime,
        gpu=plan.machine.gpu,
        plan=plan.steps,
        loader=plan.loader,
        eval_batches=plan.eval_batches(plan.rows.data.eval),
        also_batches=plan.eval_batches(plan.rows.also),
        stepper=stepper,
        learning_rate=plan.learning_rate,
        checkpoints=checkpoints,
        recorder=recorder,
        show_samples=sampler(plan, stepper.model, recorder),
        mirror=mirror,
    )
