"""What a run builds before its first step: the model and its checks, the optimizer, progress of a checkpoint."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from app.adapters.adapters import adapter_of, lr_factor
from app.base.source import base_fingerprint
from app.batch import Batch
from app.config.schema import AdapterConfig, RunConfig
from app.data.loader import Loader
from app.distributed.environment import world
from app.distributed.fsdp import Sharding, first_number
from app.distributed.gradient_reduction import AllReduce, GradientReduction, ShardedGradients
from app.distributed.process_group import Runtime
from app.files import checksummed_folder
from app.finished.save import save_base
from app.layers import fp8_linear
from app.layers.activation_checkpointing import recomputing
from app.layers.comparison import Comparison, max_difference
from app.model.build import choose_loss_head, random_base
from app.model.checks import check_adapter, check_causal, check_head, check_packing
from app.model.training_model import TrainingModel, evaluating
from app.model.verification import verify_compiled
from app.oom_retry import RetryOnRestart, few_rows, out_of_memory_error, try_or_none
from app.optim.optimizers import build_optimizer, needs_whole_matrices
from app.tracking.recorder import Recorder
from app.training.adapter_start import load_start
from app.training.checkpoint import Checkpoints, Progress
from app.training.resolve import ResolvedRun
from app.training.samples import sampler
from app.training.storage_counter import kept_bytes
from app.training.train_step import Stepper
from app.training.trainer import Parts

# relative differences of a reduced gradient: sums in another order, in fp32 and where arithmetic is rounded
_EXACT_REDUCTION, _ROUNDED_REDUCTION = 1e-4, 2e-2
_FEW_ROWS = 4  # of data: in checks that are repeated, and of a reduction, which any row shows


def check_on_loader(
    model: TrainingModel, adapter: AdapterConfig, loader: Loader, device: torch.device, depth: int = 0
) -> list[Comparison]:
    """Check the model on the micro-batch of an epoch with the most rows; refuse the run where a check fails.

    `depth`: how often micro-batches are halved, as an earlier start that ran out of memory has noted.
    """
    check = partial(_compare_for_training, model, adapter)
    return _within_memory(model, check, loader.with_most_rows().to(device), depth)


def check_on_batch(model: TrainingModel, batch: Batch) -> list[Comparison]:
    """Check the model on a batch of an evaluation."""
    return _within_memory(model, partial(_compare, model), batch)


def _within_memory(
    model: TrainingModel, check: Callable[[Batch], list[Comparison]], batch: Batch, depth: int = 0
) -> list[Comparison]:
    """Run checks; repeat them once where memory does not suffice: on few rows, with all layers recomputed.

    The next start repeats those of a sharded model: other processes are in the middle of them.
    """
    comparisons, is_sharded = None, model.sharding is not None
    if not (is_sharded and depth):
        comparisons = try_or_none(check, batch)
        if comparisons is None and is_sharded:
            raise RetryOnRestart("a check of the model", depth + 1)
    if comparisons is None:
        few = few_rows(batch, _FEW_ROWS)
        if model.compiled_layers is not None:  # a graph has the shape of the whole micro-batch
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
            check_adapter(model, adapter, batch)  # of a sharded model the first steps tell
        return comparisons
    with model.sharding.checking():
        comparisons = model.within(partial(_compare, model, batch))
    return [*comparisons, check_reduction(model, model.sharding, batch)]


def _compare(model: TrainingModel, batch: Batch) -> list[Comparison]:
    """Compare with the model's own computation: experts, the head's logits, packed with separate documents."""
    gathered = nullcontext if model.sharding is None else model.sharding.gathered
    rounding = fp8_linear.compare_products(model.network, gathered)
    with fp8_linear.without_row_rounding(model.network), _uncompiled(model):
        head = [check_head(model, batch), *choose_loss_head(model, batch)]
        comparisons = [*head, *check_causal(model, batch), *check_packing(model, batch)]
    comparisons += [*model.grouped_experts, *rounding]
    layers = model.compiled_layers
    if layers is not None and layers.fault is None:
        comparisons += verify_compiled(model, layers, batch).or_leave(layers.give_up)
    return comparisons


def check_reduction(model: TrainingModel, sharding: Sharding, batch: Batch) -> Comparison:
    """Refuse to train where the gradient that FSDP reduces is not the plain sum of those of all processes."""
    few = few_rows(batch, _FEW_ROWS)

    def backward() -> None:
        loss, _ = model(few)
        (loss * (1 + world().rank)).backward()  # the batch is the same on all processes, the gradients are not

    unrounded = fp8_linear.without_row_rounding(model.network)
    with evaluating(model), unrounded, _uncompiled(model), recomputing(model.network):
        name, reduced, expected = sharding.first_gradient(backward)
    is_rounded = model.compute is not None or reduced.dtype != torch.float32
    allowed = _ROUNDED_REDUCTION if is_rounded else _EXACT_REDUCTION
    found = Comparison("gradient reduced by FSDP against the plain sum", max_difference([reduced], [expected]), allowed)
    return found.or_refuse(
        f"parallel: the gradient of {name} that FSDP reduces is not the sum of those of all processes (relative "
        f"difference {found.difference:.1e}, allowed {allowed:.0e}), so the model would be trained wrongly. Set "
        "parallel=ddp, or install another version of torch."
    )


def _uncompiled(model: TrainingModel) -> AbstractContextManager[None]:
    """Context of checks, which use many shapes: each of them would be compiled."""
    return nullcontext() if model.compiled_layers is None else model.compiled_layers.paused()


def stepper_of(model: TrainingModel, run: RunConfig, runtime: Runtime, precision: str) -> Stepper:
    """The gradient reduction of a model, sharded or not, its optimizer and its step."""
    trained, whole = list(model.trained().values()), needs_whole_matrices(run.optimizer)
    reduction, shards = GradientReduction(trained), None
    if model.sharding is not None:
        reduction = sharded = ShardedGradients(trained, model.sharding, whole_matrices=whole)
        shards = None if whole else {each: (own, first_number(each)) for each, own in sharded.local.items()}
    elif runtime.processes > 1:
        reduction = AllReduce(trained, overlap=run.parallel.overlap)
    optimizer = build_optimizer(run.optimizer, model, run.seed, shards, lr_factor(run.adapter))
    return Stepper(model, optimizer, runtime, run.training.clip, fp16=precision == "fp16", reduction=reduction)


def restore_progress(
    resolved: ResolvedRun, checkpoints: Checkpoints, stepper: Stepper, fingerprint: str | None
) -> Progress:
    """Load the checkpoint, of a new run the adapter that it goes on from, and take the deepest split that any start of
    this run has needed. `fingerprint`: that of the base's weights.
    """
    host_group, checkpoint = resolved.runtime.host_group, resolved.checkpoint
    progress = checkpoints.load(checkpoint, stepper, host_group) if checkpoint else Progress()
    if checkpoint is None:
        for remark in load_start(resolved.config, stepper.model, fingerprint, resolved.base.names):
            stepper.model.add_remark(remark)
    progress.depth = stepper.split_depth = max(progress.depth, checkpoints.noted_depth())
    return progress


def shared_fingerprint(resolved: ResolvedRun) -> str | None:
    """The hash of the base's weights, which the first process reads for all."""
    own = base_fingerprint(resolved.config.model) if world().is_first else None
    shared: str | None = resolved.runtime.host_group.all_gather_object(own)[0]
    return shared


def record_base(resolved: ResolvedRun, model: TrainingModel, recorder: Recorder, fingerprint: str | None) -> None:
    """Note the hash of the base; a base of random weights, which no file has, is saved beside the run."""
    if not world().is_first:
        return
    run, sections, is_there = resolved.config, resolved.sections, recorder.folder.base.is_dir()
    recorder.add_facts(hashes={"base": fingerprint})
    needs_base = sections.model.weights == "random" and sections.adapter.kind != "none"
    if needs_base and run.checkpoint.save_random_base and not (resolved.checkpoint and is_there):
        method = adapter_of(run.adapter)
        is_plain = sections.quantizer is None and model.sharding is None and method is not None and method.on_meta
        drawn = None if is_plain else random_base(sections, resolved.runtime.device, run.seed)
        with checksummed_folder(recorder.folder.base) as folder:
            save_base(model, resolved.tokenizer, folder, drawn)


def trainer_parts(resolved: ResolvedRun, stepper: Stepper, checkpoints: Checkpoints, recorder: Recorder) -> Parts:
    """All that the trainer works with."""
    return Parts(
        config=resolved.config,
        runtime=resolved.runtime,
        plan=resolved.steps,
        loader=resolved.loader,
        eval_batches=resolved.eval_batches(resolved.data.eval),
        also_batches=resolved.eval_batches(resolved.also),
        stepper=stepper,
        learning_rate=resolved.learning_rate,
        checkpoints=checkpoints,
        recorder=recorder,
        show_samples=sampler(resolved, stepper.model, recorder),
    )
