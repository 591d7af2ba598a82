"""A training run from its configuration to its finished folder: the assembly, read from top to bottom."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from app.config.dataset import trains_answers
from app.config.schema import RunConfig
from app.distributed.environment import world
from app.distributed.fsdp import first_number
from app.distributed.gradient_reduction import ShardedGradients
from app.errors import AppError
from app.model.build import base_path, build_training_model, random_base
from app.model.fingerprint import base_fingerprint
from app.model.save import save_base
from app.model.training_model import TrainingModel
from app.oom_retry import RetryOnRestart, explain_out_of_memory
from app.optim.optimizers import build_optimizer, needs_whole_matrices
from app.pages.render import write_page
from app.pages.run_page import run_page
from app.signals import listening
from app.tracking.console import Console
from app.tracking.output_dir import RunFolder
from app.tracking.recorder import Recorder
from app.training.auto_batch import MaxBinTokens, MinRecomputedLayers
from app.training.checkpoint import Checkpoints, Progress
from app.training.finish import finish, stop
from app.training.memory import Forecast, Predict
from app.training.proofs import prove, remarks_on
from app.training.rehearsal import is_due, rehearse
from app.training.resolve import ResolvedRun, resolve_run
from app.training.samples import preview, sampler
from app.training.storage_counter import kept_bytes
from app.training.summary import manifest_facts, rehearsal_message, resumed_split_note, run_table
from app.training.train_step import Stepper
from app.training.trainer import Intervals, Parts, Trainer


@explain_out_of_memory()
def train_in(
    folder: RunFolder,
    run: RunConfig,
    console: Console,
    resume_hint: str,
    predict: Predict | None = None,
    min_recomputed_layers: MinRecomputedLayers | None = None,
    max_bin_tokens: MaxBinTokens | None = None,
) -> int:
    """Train, or report what would be trained; returns the exit code.

    `resume_hint` says how to continue a stopped run. The memory planner, a higher layer, predicts the peak and
    answers what `auto` asks of it.
    """
    resolved = resolve_run(run, folder.checkpoints, console.say, min_recomputed_layers, max_bin_tokens)
    run, runtime = resolved.config, resolved.runtime
    forecast = _forecast(resolved, predict)
    if run.dry_run:
        return _report_dry_run(folder, resolved, console, forecast)
    trainee = _trainee(run, resolved, folder)
    proofs = prove(trainee, resolved.loader, runtime.device)
    stepper = _stepper(run, resolved, trainee)
    identity = resolved.identity(sum(each.numel() for each in trainee.trained().values()))
    checkpoints = Checkpoints(folder.checkpoints, run.checkpoint, identity, resolved.stored_choices())
    progress = _progress(resolved, checkpoints, stepper)
    with (
        listening(speaks=world().is_first) as request,
        _opened(folder, resolved, console, progress.step if resolved.checkpoint else -1) as recorder,
        _split_depth_noted(checkpoints),
    ):
        notes = [*remarks_on(trainee, proofs), *resumed_split_note(progress.depth)]
        recorder.table([*run_table(resolved), *forecast.rows(), *(("note", note) for note in notes)])
        recorder.add_facts(proofs=[asdict(proof) for proof in proofs])
        _tell_base(run, resolved, trainee, recorder)
        recorder.begin(resolved.steps.steps, progress.step)
        parts = _parts(resolved, stepper, checkpoints, recorder)
        if is_due(run.training, runtime.device) and progress.step < resolved.steps.steps:
            rehearsed = rehearse(parts, progress, *resolved.largest_micro_batch())
            recorder.message(rehearsal_message(rehearsed))
            recorder.add_facts(rehearsal=asdict(rehearsed))
        if progress.step == 0:
            parts.show_samples(0)
        gc.freeze()  # no later collection walks through what is loaded by now
        trainer = Trainer(
            parts, Intervals(run.training, run.eval, run.checkpoint, run.record.every), progress
        )
        is_complete = trainer.fit(request)
        recorder.add_facts(memory=kept_bytes(trainee, stepper.optimizer), memory_plan=forecast.facts())
        if is_complete:
            code = finish(run, resolved, trainer, recorder, forecast.predicted)
        else:
            code = stop(trainer, recorder, forecast.predicted)
        runtime.leave()
    if resume_hint and not is_complete:
        recorder.message(resume_hint)  # the last line, ready to be copied
    return code


def _forecast(resolved: ResolvedRun, predict: Predict | None) -> Forecast:
    """The first process predicts for all: their micro-batches are alike."""
    if not world().is_first:
        return Forecast.made(None)
    device = resolved.runtime.device.type
    return Forecast.made(predict, resolved.config, resolved.choices, *resolved.largest_micro_batch(), device)


def _report_dry_run(folder: RunFolder, resolved: ResolvedRun, console: Console, forecast: Forecast) -> int:
    with _opened(folder, resolved, console) as recorder:
        recorder.table([*run_table(resolved), *forecast.rows(), ("dry_run", "no weights were loaded")])
        recorder.add_facts(memory_plan=forecast.facts())
        predicted = forecast.predicted
        recorder.finish("dry_run", memory_predicted_bytes=None if predicted is None else predicted.bytes)
        resolved.runtime.leave()
    return 0


def _trainee(run: RunConfig, resolved: ResolvedRun, folder: RunFolder) -> TrainingModel:
    runtime, place = resolved.runtime, base_path(run.model, folder.base)
    return build_training_model(
        resolved.sections, runtime.device, run.seed, place, runtime.sharding(run.parallel)
    )


def _stepper(run: RunConfig, resolved: ResolvedRun, trainee: TrainingModel) -> Stepper:
    """Ready for its first step, with random numbers that do not depend on what was built before."""
    trained = list(trainee.trained().values())
    whole = needs_whole_matrices(run.optimizer)
    reduction = resolved.runtime.reduction(
        trained, trainee.sharding, whole_matrices=whole, overlap=run.parallel.overlap
    )
    shards = None
    if isinstance(reduction, ShardedGradients) and not whole:
        shards = {each: (own, first_number(each)) for each, own in reduction.local.items()}
    optimizer = build_optimizer(run.optimizer, trainee, run.seed, shards)
    fp16 = resolved.choices.precision == "fp16"
    stepper = Stepper(trainee, optimizer, resolved.runtime, run.training.clip, fp16=fp16, reduction=reduction)
    resolved.runtime.seed(run.seed)
    return stepper


@contextmanager
def _opened(
    folder: RunFolder, resolved: ResolvedRun, console: Console, step: int | None = None
) -> Iterator[Recorder]:
    """The first process records for all and writes the report at the end; each other one has a log of its own."""
    here, run = world(), resolved.config
    if not here.is_first:
        with Recorder(folder, rank=here.rank) as recorder:
            yield recorder
        return
    recorder = Recorder.open(folder, run.tracker, asdict(run), manifest_facts(resolved), console, step)
    try:
        with recorder:
            recorder.preview(preview(resolved.data.train, resolved.objective, resolved.tokenizer))
            yield recorder
    finally:
        with suppress(AppError):  # the outcome of the run has been reported by now
            recorder.message(write_page(folder.report, lambda: run_page(folder.path)))


def _progress(resolved: ResolvedRun, checkpoints: Checkpoints, stepper: Stepper) -> Progress:
    """Counts of the checkpoint, and the deepest split that any start of this run has needed."""
    peers, checkpoint = resolved.runtime.peers, resolved.checkpoint
    progress = checkpoints.load(checkpoint, stepper, peers) if checkpoint else Progress()
    progress.depth = stepper.depth = max(progress.depth, checkpoints.noted_depth())
    return progress


@contextmanager
def _split_depth_noted(checkpoints: Checkpoints) -> Iterator[None]:
    """Note on disk that the next start must split deeper. The other processes see only a broken connection."""
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


def _tell_base(run: RunConfig, resolved: ResolvedRun, trainee: TrainingModel, record: Recorder) -> None:
    """By its hash; one that no file has is kept."""
    if not world().is_first:
        return
    record.add_facts(hashes={"base": base_fingerprint(run.model)})
    if resolved.sections.keeps_random_base and run.checkpoint.save_random_base and not resolved.checkpoint:
        is_plain = resolved.sections.quantizer is None and trainee.sharding is None
        drawn = None if is_plain else random_base(resolved.sections, resolved.runtime.device, run.seed)
        save_base(trainee, resolved.tokenizer, record.folder.base, drawn)


def _parts(resolved: ResolvedRun, stepper: Stepper, checkpoints: Checkpoints, recorder: Recorder) -> Parts:
    run, trainee = resolved.config, stepper.trainee
    samples: Any = (run.eval, resolved.data.eval, resolved.objective, trainee, resolved.tokenizer, recorder)
    return Parts(
        runtime=resolved.runtime,
        plan=resolved.steps,
        loader=resolved.loader,
        eval_batches=resolved.eval_batches(),
        stepper=stepper,
        learning_rate=resolved.learning_rate,
        checkpoints=checkpoints,
        recorder=recorder,
        show_samples=_on_first_process(trainee, sampler(*samples)),
        answers=trains_answers(run.dataset),
        classes=len(run.task.labels),
        eval_size=resolved.eval_size,
    )


def _on_first_process(trainee: TrainingModel, show: Callable[[int], None]) -> Callable[[int], None]:
    """A sharded model takes all processes to generate; only the first one records the answers."""
    if trainee.sharding is None:
        return show if world().is_first else lambda _step: None

    def show_in_step(step: int) -> None:
        trainee.within(lambda: show(step))
        trainee.sharding.at_rest()

    return show_in_step
