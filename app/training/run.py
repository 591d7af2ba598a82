"""A training run from its configuration to its finished folder."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial

from app.base.base_model import open_base
from app.base.source import random_model_if_missing
from app.config.schema import ModelConfig, RunConfig
from app.distributed.launch import world
from app.distributed.process_group import Runtime
from app.errors import AppError, EnvironmentProblem
from app.layers.activation_checkpointing import recompute_rest
from app.oom_retry import explain_out_of_memory
from app.pages.page import write_page
from app.pages.run_page import run_page
from app.signals import listening
from app.tracking.console import Console
from app.tracking.formatting import align, format_bytes
from app.tracking.output_dir import RunFolder
from app.tracking.recorder import Recorder
from app.training.auto_settings import RunPlanner
from app.training.final_model import record_stop, write_final
from app.training.initial_model import keep_reference, keep_start
from app.training.memory import Forecast, free_host_bytes
from app.training.mirror import Mirror
from app.training.plan import Plan, find_start, join, make_plan, shared_facts
from app.training.rows import read_rows
from app.training.samples import preview
from app.training.setup import RunSetup, forecast_of, record_base, set_up, split_depth_noted, trainer_parts
from app.training.storage_counter import kept_bytes
from app.training.summary import manifest_facts, rehearsal_message, resume_message, resumed_split_note, run_table
from app.training.train_step import is_due, rehearse
from app.training.trainer import Trainer


@explain_out_of_memory()
def train_in(
    folder: RunFolder, run: RunConfig, console: Console, resume_hint: str, planner: RunPlanner | None = None
) -> int:
    """Train, or report a dry run, and return the exit code. `resume_hint` is printed after a stop."""
    console.status("Reading rows ...")
    model = random_model_if_missing(run.model) if run.dry_run else run.model
    rows = read_rows(
        replace(run, model=model), open_base(model, run.task), console.say
    )  # tokens; formats, labels, packing, vocabulary
    start = find_start(folder.checkpoints, run.resume)
    machine = join(rows, start, console.say)  # processes, device, precision, attention
    console.status("Planning memory ...")
    planned = make_plan(rows, machine, start, planner, console.say)  # parallelism, bins, recomputed and compiled layers
    machine.runtime.host_group.require_same(shared_facts(planned, folder.path))
    forecast = forecast_of(planned, planner)
    if run.dry_run:
        return _report_dry_run(folder, planned, run.model, console, forecast)
    _require_host_memory(forecast, machine.runtime)
    mirror = _opened_mirror(planned, folder)  # of checkpoints, outside of this machine
    setup = set_up(planned, forecast, folder, planner, console)  # weights, adapter, checks, optimizer, checkpoint
    with listening(answers_signal=world().is_first) as request, _recording(setup, folder, console) as recorder:
        trainer = _rehearsed(setup, recorder, mirror)
        is_complete = trainer.fit(request)
        code = _record_end(setup, trainer, is_complete=is_complete)
        for remark in mirror.finish() if mirror else ():  # while the others wait: launchers end the last process
            recorder.message(remark)
        machine.runtime.leave()
    if resume_hint and not is_complete:
        recorder.message(resume_hint)  # last, ready to be copied
    return code


@contextmanager
def _recording(setup: RunSetup, folder: RunFolder, console: Console) -> Iterator[Recorder]:
    """Open the recorder of a run and record its setup."""
    plan, progress, model = setup.plan, setup.progress, setup.stepper.model
    with _opened(folder, plan, console, setup) as recorder, split_depth_noted(setup.checkpoints):
        notes = (("note", note) for note in (*model.remarks(), *resumed_split_note(progress.depth)))
        if plan.run.resume:
            recorder.message(resume_message(plan, progress.step))
        forecast = setup.forecast.rows(is_new=plan.start.checkpoint is None)
        recorder.message(align([*run_table(plan), *forecast, *notes]))
        recorder.add_facts(proofs=[asdict(check) for check in setup.checks], device_used_bytes=plan.machine.gpu.stages)
        keep_reference(plan, folder.reference)
        keep_start(setup.drawn, plan, folder.start)
        record_base(plan, model, recorder, setup.fingerprint)
        recorder.begin(plan.steps.steps, progress.step, on_gpu=plan.runtime.device.type == "cuda")
        try:
            yield recorder
        finally:  # also after a failure, which other processes may have caused
            with suppress(AppError):
                for note in plan.machine.gpu.note_others():
                    recorder.message(f"memory  {note}")


def _record_end(setup: RunSetup, trainer: Trainer, *, is_complete: bool) -> int:
    """Record the outcome, write final/ if the run is complete, and return the exit code."""
    facts, stepper = setup.forecast.facts(), setup.stepper
    trainer.parts.recorder.add_facts(memory=kept_bytes(stepper.model, stepper.optimizer), memory_plan=facts)
    if (layers := stepper.model.compiled_layers) is not None:
        trainer.parts.recorder.add_facts(compile_seconds=round(layers.seconds, 3))
    predicted = setup.forecast.predicted
    return write_final(setup.plan, trainer, predicted) if is_complete else record_stop(trainer, predicted)


def _opened_mirror(plan: Plan, folder: RunFolder) -> Mirror | None:
    url = plan.run.checkpoint.mirror
    if url is None or not world().is_first:
        return None
    mirror = Mirror(folder.path, url)
    mirror.require_own(plan.start.checkpoint)
    return mirror


def _require_host_memory(forecast: Forecast, runtime: Runtime) -> None:
    """Raise if the estimated peak exceeds free CPU memory: the kernel would kill the run without a message."""
    predicted = forecast.predicted
    if predicted is None or runtime.device.type != "cpu":
        return
    needed, free = predicted.bytes * world().local_size, free_host_bytes()
    if needed > free:
        raise EnvironmentProblem(
            f"out of memory: estimated peak {format_bytes(needed)} ({predicted.where}), but this machine has "
            f"{format_bytes(free)} free. Choose a smaller model=, dataset.max_length= or batching.tokens=, or set "
            "training.recompute=true or recipe=qlora. finetune check memory, with the same settings, shows what fits."
        )


def _rehearsed(setup: RunSetup, recorder: Recorder, mirror: Mirror | None) -> Trainer:
    """Return the trainer, after a rehearsal if due, which may add gradient checkpointing with `auto`."""
    plan, progress, stepper = setup.plan, setup.progress, setup.stepper
    parts = trainer_parts(plan, stepper, setup.checkpoints, recorder, mirror)
    if is_due(plan.run.training, plan.runtime.device) and progress.step < plan.steps.steps:
        count = plan.run.training.recompute
        if plan.layers_are_auto and count is not True:
            stepper.recompute_rest = partial(recompute_rest, stepper.model.network, int(count))
        rehearsed = rehearse(stepper, plan.runtime, *plan.largest_micro_batch(), parts.try_evaluation)
        progress.depth = rehearsed.depth
        recorder.message(rehearsal_message(rehearsed))
        recorder.add_facts(rehearsal=asdict(rehearsed))
    gc.freeze()  # later collections skip the objects loaded so far
    return Trainer(parts, progress)


def _report_dry_run(folder: RunFolder, plan: Plan, model: ModelConfig, console: Console, forecast: Forecast) -> int:
    notes = [("dry_run", "no weights were loaded")]
    if plan.run.model.weights != model.weights:
        notes.append(
            ("", f"{model.path} is not on this machine: token counts and steps are approximate (another tokenizer)")
        )
        # run.yaml is for the run with its weights
        plan = replace(plan, run=replace(plan.run, model=replace(plan.run.model, weights=model.weights)))
    with _opened(folder, plan, console) as recorder:
        recorder.message(align([*run_table(plan), *forecast.rows(), *notes]))
        recorder.add_facts(memory_plan=forecast.facts())
        predicted = forecast.predicted
        recorder.finish("dry_run", memory_predicted_bytes=None if predicted is None else predicted.bytes)
        plan.runtime.leave()
    return 0


@contextmanager
def _opened(folder: RunFolder, plan: Plan, console: Console, setup: RunSetup | None = None) -> Iterator[Recorder]:
    """Open the recorder: rank 0 records and writes the report at the end, other ranks write their own logs."""
    here, run = world(), plan.run
    if not here.is_first:
        with Recorder(folder, rank=here.rank) as recorder:
            yield recorder
        return
    step, resumed = None, plan.start.checkpoint
    if setup is not None:
        step = setup.progress.step if resumed else -1
        if resumed and run.resume != "auto":
            setup.checkpoints.note_resumed(resumed)  # before later lines are removed
    recorder = Recorder.open(folder, run.tracker, asdict(run), manifest_facts(plan), console, step)
    try:
        with recorder:
            data = plan.rows.data
            recorder.preview(preview(data.train, plan.rows.objective, plan.rows.tokenizer, data.report.shares.values()))
            yield recorder
    finally:
        with suppress(AppError):  # the outcome of the run is already reported
            recorder.message(write_page(folder.report, lambda: run_page(folder.path)))
