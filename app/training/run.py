"""A training run from its configuration to its finished folder: the assembly, read from top to bottom."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from app.base.source import base_path, local_place, require_intact_base
from app.config.adapters import changes_base
from app.config.schema import RunConfig
from app.distributed.environment import world
from app.distributed.process_group import Runtime
from app.errors import AppError, EnvironmentProblem
from app.layers.activation_checkpointing import recompute_rest
from app.layers.comparison import Comparison
from app.model.build import build_training_model
from app.model.training_model import TrainingModel
from app.oom_retry import RetryOnRestart, explain_out_of_memory
from app.pages.render import write_page
from app.pages.run_page import run_page
from app.signals import listening
from app.tracking.console import Console
from app.tracking.formatting import align, format_bytes
from app.tracking.output_dir import RunFolder
from app.tracking.recorder import Recorder
from app.training.adapter_start import drawn_start, keep_start
from app.training.auto_settings import RunPlanner
from app.training.checkpoint import Checkpoints, Progress
from app.training.final_model import record_stop, write_final
from app.training.memory import Forecast
from app.training.memory_in_use import device_used_bytes, free_host_bytes
from app.training.reference import keep_reference, with_reference
from app.training.rehearsal import is_due, rehearse
from app.training.resolve import ResolvedRun, resolve_run, without_compiled_layers
from app.training.samples import preview
from app.training.setup import (
    check_on_loader,
    record_base,
    restore_progress,
    shared_fingerprint,
    stepper_of,
    trainer_parts,
)
from app.training.storage_counter import kept_bytes
from app.training.summary import manifest_facts, rehearsal_message, resumed_split_note, run_table
from app.training.trainer import Parts, Trainer


@explain_out_of_memory()
def train_in(
    folder: RunFolder, run: RunConfig, console: Console, resume_hint: str, planner: RunPlanner | None = None
) -> int:
    """Train, or report what would be trained, and return the exit code; `resume_hint` says how to continue a run."""
    in_use = {"start": device_used_bytes()}
    resolved = resolve_run(run, folder.checkpoints, console.say, planner)
    run, runtime = resolved.config, resolved.runtime
    forecast = _forecast(resolved, planner)
    if run.dry_run:
        return _report_dry_run(folder, resolved, console, forecast)
    _require_host_memory(forecast, runtime)
    in_use["context"] = _context_bytes(runtime)
    model = _build(resolved, base_path(run.model, folder.base))
    fingerprint = shared_fingerprint(resolved)
    checkpoints = _checkpoints(resolved, model, folder.checkpoints, fingerprint)
    checks = _checks(resolved, model, checkpoints)
    if _is_uncompiled(model, runtime):
        resolved, forecast = _replanned(resolved, model, checkpoints, planner, console)
    stepper = stepper_of(model, run, runtime, resolved.choices.precision)
    runtime.seed(run.seed)  # again: building the model and checking it draw random numbers
    drawn = drawn_start(resolved, model)
    progress = restore_progress(resolved, checkpoints, stepper, fingerprint)
    resolved = with_reference(resolved, model, folder.reference, fingerprint)
    with (
        listening(answers_signal=world().is_first) as request,
        _opened(folder, resolved, console, checkpoints, progress.step if resolved.checkpoint else -1) as recorder,
        _split_depth_noted(checkpoints),
    ):
        recorder.message(align([*run_table(resolved), *forecast.rows(), *_note_rows(model, progress)]))
        recorder.add_facts(proofs=[asdict(check) for check in checks], device_used_bytes=in_use)
        keep_reference(resolved, folder.reference)
        keep_start(drawn, resolved, folder.start)
        record_base(resolved, model, recorder, fingerprint)
        recorder.begin(resolved.steps.steps, progress.step)
        parts = trainer_parts(resolved, stepper, checkpoints, recorder)
        _prepare_first_step(resolved, parts, progress)
        trainer = Trainer(parts, progress)
        is_complete = trainer.fit(request)
        recorder.add_facts(memory=kept_bytes(model, stepper.optimizer), memory_plan=forecast.facts())
        planned = forecast.predicted
        code = write_final(resolved, trainer, planned) if is_complete else record_stop(trainer, planned)
        runtime.leave()
    if resume_hint and not is_complete:
        recorder.message(resume_hint)  # the last line, ready to be copied
    return code


def _context_bytes(runtime: Runtime) -> int | None:
    """Create the context of a GPU and return the memory in use."""
    torch.ones(1, device=runtime.device)
    return device_used_bytes()


def _checks(resolved: ResolvedRun, model: TrainingModel, checkpoints: Checkpoints) -> list[Comparison]:
    """Check the model before the first step. Where memory does not suffice, the next start takes smaller parts."""
    with _split_depth_noted(checkpoints):
        depth = checkpoints.noted_depth()
        return check_on_loader(model, resolved.config.adapter, resolved.loader, resolved.runtime.device, depth)


def _note_rows(model: TrainingModel, progress: Progress) -> Iterator[tuple[str, str]]:
    """Yield the rows of the start screen on the model and on a resumed run."""
    for note in (*model.remarks(), *resumed_split_note(progress.depth)):
        yield "note", note


def _build(resolved: ResolvedRun, place: str) -> TrainingModel:
    """Build the model; a new adapter may begin with rows of the run."""
    run, runtime = resolved.config, resolved.runtime
    if run.model.weights == "pretrained" and world().is_first:
        require_intact_base(local_place(run.model.path))
    rows = resolved.loader.first_epoch if changes_base(run.adapter) or not resolved.checkpoint else None
    sharding = runtime.sharding(run.parallel)
    return build_training_model(resolved.sections, runtime.device, run.seed, place, sharding, rows)


def _is_uncompiled(model: TrainingModel, runtime: Runtime) -> bool:
    """Return whether compiled layers of any process have failed their verification; then all give up on theirs."""
    layers = model.compiled_layers
    faults = [] if layers is None else runtime.host_group.all_gather_object(layers.fault)
    fault = next((each for each in faults if each is not None), None)
    if layers is not None and fault is not None:
        layers.give_up(fault)
    return fault is not None


def _replanned(
    resolved: ResolvedRun, model: TrainingModel, checkpoints: Checkpoints, planner: RunPlanner | None, console: Console
) -> tuple[ResolvedRun, Forecast]:
    """Plan for layers that are not compiled after all, and recompute more of them where `auto` needs that."""
    before = resolved.config.training.recompute
    assert model.compiled_layers is not None
    replanned = without_compiled_layers(resolved, str(model.compiled_layers.fault), planner, console.say)
    count = replanned.config.training.recompute
    if before is not True and count != before:
        recompute_rest(model.network, int(before), None if count is True else int(count))
    checkpoints.keep_choices(replanned.stored_choices())
    return replanned, _forecast(replanned, planner)


def _checkpoints(resolved: ResolvedRun, model: TrainingModel, folder: Path, fingerprint: str | None) -> Checkpoints:
    identity = resolved.identity(sum(each.numel() for each in model.trained().values()), fingerprint)
    return Checkpoints(folder, resolved.config.checkpoint, identity, resolved.stored_choices())


def _require_host_memory(forecast: Forecast, runtime: Runtime) -> None:
    """Refuse a run on the CPU whose planned peak the machine does not have: the system would kill it without a word."""
    predicted = forecast.predicted
    if predicted is None or runtime.device.type != "cpu":
        return
    needed, free = predicted.bytes * world().local_size, free_host_bytes()
    if needed > free:
        raise EnvironmentProblem(
            f"out of memory: this run needs {format_bytes(needed)} at its peak ({predicted.where}), and this machine "
            f"has {format_bytes(free)} left. Choose a smaller model=, dataset.max_length= or batching.tokens=, "
            "training.recompute=true or recipe=qlora; app.check memory, with the same settings, says what is enough."
        )


def _prepare_first_step(resolved: ResolvedRun, parts: Parts, progress: Progress) -> None:
    """Rehearse where that is due; of layers that `auto` chose, more may be recomputed then."""
    if is_due(resolved.config.training, parts.runtime.device) and progress.step < resolved.steps.steps:
        count = resolved.config.training.recompute
        if resolved.layers_are_auto and count is not True:
            parts.stepper.recompute_rest = partial(recompute_rest, parts.stepper.model.network, int(count))
        rehearsed = rehearse(parts.stepper, parts.runtime, *resolved.largest_micro_batch(), parts.try_evaluation)
        progress.depth = rehearsed.depth
        parts.recorder.message(rehearsal_message(rehearsed))
        parts.recorder.add_facts(rehearsal=asdict(rehearsed))
    gc.freeze()  # no later collection walks through what is loaded by now


def _forecast(resolved: ResolvedRun, planner: RunPlanner | None) -> Forecast:
    """Only rank 0 predicts: the micro-batches of all ranks have one shape."""
    if planner is None or not world().is_first:
        return Forecast(None, "")
    device = resolved.runtime.device.type
    return Forecast.made(planner.predict, resolved.config, resolved.choices, *resolved.largest_micro_batch(), device)


def _report_dry_run(folder: RunFolder, resolved: ResolvedRun, console: Console, forecast: Forecast) -> int:
    with _opened(folder, resolved, console) as recorder:
        recorder.message(align([*run_table(resolved), *forecast.rows(), ("dry_run", "no weights were loaded")]))
        recorder.add_facts(memory_plan=forecast.facts())
        predicted = forecast.predicted
        recorder.finish("dry_run", memory_predicted_bytes=None if predicted is None else predicted.bytes)
        resolved.runtime.leave()
    return 0


@contextmanager
def _opened(
    folder: RunFolder,
    resolved: ResolvedRun,
    console: Console,
    checkpoints: Checkpoints | None = None,
    step: int | None = None,
) -> Iterator[Recorder]:
    """The first process records for all and writes the report at the end; each other one has a log of its own."""
    here, run = world(), resolved.config
    if not here.is_first:
        with Recorder(folder, rank=here.rank) as recorder:
            yield recorder
        return
    if checkpoints is not None and resolved.checkpoint and run.resume != "auto":
        checkpoints.note_resumed(resolved.checkpoint)  # before later lines are cut
    recorder = Recorder.open(folder, run.tracker, asdict(run), manifest_facts(resolved), console, step)
    try:
        with recorder:
            data = resolved.data
            recorder.preview(preview(data.train, resolved.objective, resolved.tokenizer, data.report.shares.values()))
            yield recorder
    finally:
        with suppress(AppError):  # the outcome of the run has been reported by now
            recorder.message(write_page(folder.report, lambda: run_page(folder.path)))


@contextmanager
def _split_depth_noted(checkpoints: Checkpoints) -> Iterator[None]:
    """Write to disk that the next start must split deeper; ranks that see only a broken connection read it there."""
    known = checkpoints.noted_depth()
    try:
        yield
    except RetryOnRestart as fault:
        checkpoints.note_depth(fault.depth)
        raise
    except RuntimeError as fault:
        depth = checkpoints.noted_depth()
        if depth <= known:
            raise
        raise RetryOnRestart("a micro-batch of another process", depth) from fault
