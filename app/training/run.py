"""A run from its configuration to its finished folder: the assembly. Each line needs only the lines above it."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from app.batch import Batch
from app.config.dataset import trains_answers
from app.config.schema import RunConfig
from app.distributed.environment import world
from app.distributed.fsdp import first_number
from app.distributed.gradient_reduction import ShardedGradients
from app.errors import AppError
from app.model.activation_checkpointing import repeated_layers
from app.model.build import base_path, build_training_model, unpacked_base
from app.model.fingerprint import base_fingerprint
from app.model.save import save_base
from app.model.training_model import TrainingModel
from app.oom_retry import TooLargeTogether, told_where_it_ends_a_run
from app.optim.optimizers import build_optimizer, needs_whole_matrices
from app.pages.render import written_page
from app.pages.run_page import run_page
from app.signals import listening
from app.tracking.console import Console
from app.tracking.output_dir import RunFolder
from app.tracking.recorder import Recorder
from app.training.auto_batch import (
    AUTO,
    BINS_CHOICE,
    LAYERS_CHOICE,
    MaxBinTokens,
    MinRecomputedLayers,
    found_layers,
    kept_layers,
)
from app.training.checkpoint import Checkpoints, choices_of
from app.training.finish import finish, stop
from app.training.identity import identity
from app.training.limits import within_positions
from app.training.memory import Forecast, Predict
from app.training.preview import preview
from app.training.progress import Progress
from app.training.proofs import prove, remarks_on
from app.training.rehearsal import is_due, rehearse
from app.training.resolve import with_format
from app.training.samples import sampler
from app.training.setup import Ground, facts, lay_ground, layout_of, table
from app.training.storage_counter import kept_bytes
from app.training.train_step import Stepper
from app.training.trainer import Loop, Parts, Rhythm


@told_where_it_ends_a_run()
def train_in(
    folder: RunFolder,
    run: RunConfig,
    console: Console,
    go_on: str,
    predict: Predict | None = None,
    fewest: MinRecomputedLayers | None = None,
    largest: MaxBinTokens | None = None,
) -> int:
    """Returns the exit code. `go_on` is for who stops the run: how to continue it; `predict` tells its memory, `fewest`
    how many layers must be recomputed, `largest` how large bins may be.
    """
    run, notes = with_format(within_positions(run, console.say))
    ground = lay_ground(run, folder.checkpoints, console.say, notes, largest)
    run, ground = _with_layers(ground.run, ground, fewest, console)
    forecast = _forecast(run, ground, predict)
    if run.dry_run:
        return _told_only(folder, run, ground, console, forecast)
    trainee = _trainee(run, ground, folder)
    proofs = prove(trainee, ground.loader, ground.runtime.device)
    stepper = _stepper(run, ground, trainee)
    same = identity(run, ground.data.train, ground.loader, trainee, ground.plan.steps)
    checkpoints = Checkpoints(folder.checkpoints, run.checkpoint, same, _choices(run, ground))
    progress = _progress(ground, checkpoints, stepper)
    with (
        listening(speaks=world().is_first) as request,
        _opened(folder, run, ground, console, progress.step if ground.save else -1) as record,
        _noted(checkpoints),
    ):
        remarks = [("note", each) for each in (*remarks_on(trainee, proofs), *progress.remarks())]
        record.table([*table(run, ground), *forecast.rows(), *remarks])
        record.add_facts(proofs=[asdict(proof) for proof in proofs])
        _tell_base(run, ground, trainee, record)
        record.begin(ground.plan.steps, progress.step)
        rhythm = Rhythm(run.training, run.eval, run.checkpoint, run.record.every)
        parts = _parts(run, ground, stepper, checkpoints, record)
        _rehearse_if_due(run, ground, parts, progress, record)
        if progress.step == 0:
            parts.show_samples(0)
        gc.freeze()  # what is loaded by now stays: no step looks through it for garbage
        loop = Loop(parts, rhythm, progress)  # its clock begins here
        ended = loop.fit(request)
        record.add_facts(memory=kept_bytes(trainee, stepper.optimizer), memory_plan=forecast.facts())
        predicted = forecast.predicted
        code = finish(run, ground, loop, record, predicted) if ended else stop(loop, record, predicted)
        ground.runtime.leave()
    if go_on and not ended:
        record.message(go_on)  # the last line of all: it is to be copied
    return code


def _rehearse_if_due(
    run: RunConfig, ground: Ground, parts: Parts, progress: Progress, record: Recorder
) -> None:
    if is_due(run.training, ground.runtime.device) and progress.step < ground.plan.steps:
        record.add_facts(rehearsal=asdict(rehearse(parts, progress, *_largest(run, ground))))


def _with_layers(
    run: RunConfig, ground: Ground, fewest: MinRecomputedLayers | None, console: Console
) -> tuple[RunConfig, Ground]:
    """What training.recompute=auto means in this run, from its first start on."""
    if run.training.recompute != AUTO or fewest is None:
        return run, ground
    layers = kept_layers(choices_of(ground.save))
    if layers is None:
        find = partial(fewest, run, ground.choices, *_largest(run, ground), ground.counts.layers)
        layers, remark = found_layers(find, ground.runtime.peers, ground.counts.layers)
        console.say(remark)
    run = replace(run, training=replace(run.training, recompute=layers))
    return run, replace(ground, sections=replace(ground.sections, recompute=layers))


def _choices(run: RunConfig, ground: Ground) -> dict[str, str]:
    """What a continued run keeps to."""
    bins = {BINS_CHOICE: str(run.batching.tokens)} if run.batching.packing else {}
    return {**asdict(ground.choices), LAYERS_CHOICE: str(run.training.recompute), **bins}


def _largest(run: RunConfig, ground: Ground) -> tuple[Batch, int]:
    """The micro-batch that needs most, and how many a step has. Gradients that are sent stay between steps."""
    several = ground.runtime.processes > 1
    return ground.loader.largest(), max(run.batching.accumulation, 2 if several else 1)


def _forecast(run: RunConfig, ground: Ground, predict: Predict | None) -> Forecast:
    """One process speaks for all: their micro-batches are alike."""
    if not world().is_first:
        return Forecast.made(None)
    return Forecast.made(predict, run, ground.choices, *_largest(run, ground), ground.runtime.device.type)


def _told_only(
    folder: RunFolder, run: RunConfig, ground: Ground, console: Console, forecast: Forecast
) -> int:
    with _opened(folder, run, ground, console) as record:
        record.table([*table(run, ground), *forecast.rows(), ("dry_run", "no weights were loaded")])
        record.add_facts(memory_plan=forecast.facts())
        predicted = forecast.predicted
        record.finish("dry_run", memory_predicted_bytes=None if predicted is None else predicted.bytes)
        ground.runtime.leave()
    return 0


_ENTRIES = (
    "scores",
    "predicted",
    "likelihoods",
    "within",
)  # where passes of a divided model begin


def _trainee(run: RunConfig, ground: Ground, folder: RunFolder) -> TrainingModel:
    sections, runtime = ground.sections, ground.runtime
    trainee = build_training_model(sections, runtime.device, run.seed, base_path(run.model, folder.base))
    sharding = runtime.sharding(run.parallel)
    if sharding is not None:
        sharding.divide(trainee, repeated_layers(trainee.language_model), _ENTRIES)
        trainee.divided_by(sharding)
    return trainee


def _stepper(run: RunConfig, ground: Ground, trainee: TrainingModel) -> Stepper:
    """Ready for its first step, with random numbers that do not depend on what was built before."""
    trained = list(trainee.trained().values())
    whole = needs_whole_matrices(run.optimizer)
    reduction = ground.runtime.reduction(
        trained, trainee.sharding, whole_matrices=whole, overlap=run.parallel.overlap
    )
    shards = None
    if isinstance(reduction, ShardedGradients) and not whole:
        shards = {each: (own, first_number(each)) for each, own in reduction.local.items()}
    optimizer = build_optimizer(run.optimizer, trainee, run.seed, shards)
    fp16 = ground.choices.precision == "fp16"
    stepper = Stepper(trainee, optimizer, ground.runtime, run.training.clip, fp16=fp16, reduction=reduction)
    ground.runtime.seed(run.seed)
    return stepper


@contextmanager
def _opened(
    folder: RunFolder, run: RunConfig, ground: Ground, console: Console, step: int | None = None
) -> Iterator[Recorder]:
    """The first process writes for all, at last a page of how it ended; each other one has a log."""
    here = world()
    if not here.is_first:
        with Recorder(folder, rank=here.rank) as recorder:
            yield recorder
        return
    recorder = Recorder.open(folder, run.tracker, asdict(run), facts(run, ground), console, step)
    try:
        with recorder:
            recorder.preview(preview(ground.data.train, ground.labels, ground.tokenizer))
            yield recorder
    finally:
        with suppress(AppError):  # how the run ended is told already
            recorder.message(written_page(folder.report, lambda: run_page(folder.path)))


def _progress(ground: Ground, checkpoints: Checkpoints, stepper: Stepper) -> Progress:
    """Of the save that the run continues from; parts are as small as any start before has found necessary."""
    peers = ground.runtime.peers
    progress = checkpoints.load(ground.save, stepper, peers) if ground.save else Progress()
    progress.depth = stepper.depth = max(progress.depth, checkpoints.noted_depth())
    return progress


@contextmanager
def _noted(checkpoints: Checkpoints) -> Iterator[None]:
    """What ran out of memory is made in smaller parts by the next start. To the other processes it is a broken line."""
    known = checkpoints.noted_depth()
    try:
        yield
    except TooLargeTogether as fault:
        checkpoints.note_depth(fault.depth)
        raise
    except RuntimeError as fault:
        depth = checkpoints.noted_depth()
        if depth <= known:
            raise
        raise TooLargeTogether("a micro-batch of another process", depth) from fault


def _tell_base(run: RunConfig, ground: Ground, trainee: TrainingModel, record: Recorder) -> None:
    """By its hash; one that no file has is kept. Layers that are lent come from all processes."""
    is_kept = ground.sections.keeps_random_base and run.checkpoint.save_random_base and not ground.save
    gathers = is_kept and ground.sections.quantizer is None
    named = trainee.language_model.state_dict() if gathers else {}
    state = trainee.gathered(named, keeps=world().is_first) if gathers else None
    if not world().is_first:
        return
    record.add_facts(hashes={"base": base_fingerprint(run.model)})
    if is_kept:
        unpacked = unpacked_base(ground.sections, ground.runtime.device, run.seed)
        save_base(trainee, ground.tokenizer, record.folder.base, unpacked, state)


def _parts(
    run: RunConfig, ground: Ground, stepper: Stepper, checkpoints: Checkpoints, record: Recorder
) -> Parts:
    layout = layout_of(run, run.eval.rows, ground.tokenizer, ground.labels)
    samples: Any = (run.eval, ground.data.eval, ground.labels, stepper.trainee, ground.tokenizer, record)
    return Parts(
        runtime=ground.runtime,
        plan=ground.plan,
        loader=ground.loader,
        eval_batches=ground.eval_batches(layout),
        stepper=stepper,
        learning_rate=ground.learning_rate(run.schedule, run.optimizer.lr),
        checkpoints=checkpoints,
        journal=record,
        show_samples=_shown(stepper.trainee, sampler(*samples)),
        answers=trains_answers(run.dataset),
        classes=len(run.task.labels),
        eval_size=_eval_size(ground),
    )


def _shown(trainee: TrainingModel, show: Callable[[int], None]) -> Callable[[int], None]:
    """The first process asks; where the model is divided all do, with the same words, and the first one notes it."""
    if trainee.sharding is None:
        return show if world().is_first else lambda _step: None

    def shown_by_all(step: int) -> None:
        trainee.within(lambda: show(step))
        trainee.sharding.at_rest()

    return shown_by_all


def _eval_size(ground: Ground) -> float:
    """Tokens of an evaluation over those of a step."""
    if ground.data.eval is None:
        return 0.0
    of_a_step = ground.data.train.lengths.sum() / ground.plan.steps_per_epoch
    return float(ground.data.eval.lengths.sum() / of_a_step)
