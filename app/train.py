"""Fine-tune a model.

python -m app.train                                   the small model and data that ship, on any machine
python -m app.train recipe=lora model=llama dataset=messages dataset.path=chat.jsonl
python -m app.train output_dir=runs/mine resume=auto  go on where it was stopped
"""

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, NoReturn

import hydra
from omegaconf import DictConfig

from app.config.groups import CONF
from app.config.load import VERSION_BASE, checked_arguments, load_run, store_schema
from app.config.platforms import require_platform
from app.config.schema import RunConfig
from app.errors import AppError, ConfigError
from app.record.console import Console
from app.record.folder import RunFolder
from app.record.record import Record
from app.record.terminal import open_console

if TYPE_CHECKING:
    from app.engine.checkpoint import Checkpoints
    from app.engine.ground import Ground
    from app.engine.loop import Parts
    from app.engine.step import Stepper
    from app.model.trainee import Trainee

# torch, and what needs it, is imported inside functions: a mistake in the command line must not cost seconds


def train(run: RunConfig) -> int:
    """From a checked config to a finished folder; returns the exit code."""
    _check_parts(run)
    with RunFolder.claim(run.output_dir, run.resume) as folder:
        return _train_in(folder, run, open_console())


def _check_parts(run: RunConfig) -> None:
    """What each part can say in milliseconds, all problems together."""
    from app.data import sources
    from app.model import templates
    from app.optim import requirements
    from app.record import trackers

    problems = [
        *sources.check(run.dataset),
        *templates.check(run.model),
        *requirements.check(run.optimizer),
        *trackers.check(run.tracker),
    ]
    if problems:
        raise ConfigError(problems)


def _train_in(folder: RunFolder, run: RunConfig, console: Console) -> int:
    """The assembly: each line needs only the lines above it."""
    console.say(f"output  {folder.path}")
    from app.engine.checkpoint import Checkpoints
    from app.engine.finish import finish
    from app.engine.ground import facts, lay_ground, table
    from app.engine.identity import identity
    from app.engine.limits import within_positions
    from app.engine.loop import Loop, Rhythm
    from app.engine.progress import Progress
    from app.engine.proofs import prove
    from app.engine.signals import listening
    from app.engine.step import Stepper
    from app.model.build import base_path, build_trainee
    from app.optim.optimizers import build_optimizer

    run = within_positions(run, console.say)
    ground = lay_ground(run, folder.checkpoints, console.say)
    told, described = table(run, ground), (asdict(run), facts(run, ground))
    if run.dry_run:
        with Record.open(folder, run.tracker, *described, console) as record:
            record.table([*told, ("dry_run", "no weights were loaded")])
            record.finish("dry_run")
            return 0

    base = base_path(run.model, folder.base)
    trainee = build_trainee(ground.sections, ground.runtime.device, run.seed, base)
    prove(trainee, ground.loader, ground.runtime.device)
    optimizer = build_optimizer(run.optimizer, trainee)
    fp16 = ground.choices.precision == "fp16"
    stepper = Stepper(trainee, optimizer, ground.runtime, run.training.clip, fp16=fp16)
    same = identity(run, ground.data.train, ground.loader, trainee, ground.plan.steps)
    checkpoints = Checkpoints(folder.checkpoints, run.checkpoint, same, asdict(ground.choices))
    progress = checkpoints.load(ground.save, stepper) if ground.save else Progress()

    with Record.open(folder, run.tracker, *described, console) as record:
        record.rewind(progress.step if ground.save else -1)
        record.table(told)
        _tell_base(run, ground, trainee, record)
        record.begin(ground.plan.steps, progress.step)
        rhythm = Rhythm(run.training, run.eval, run.checkpoint, run.record.every)
        loop = Loop(_parts(run, ground, stepper, checkpoints, record), rhythm, progress)
        with listening() as request:
            ended = loop.fit(request)
        return finish(run, ground, loop, record, stopped_by=None if ended else request.exit_code)


def _tell_base(run: RunConfig, ground: "Ground", trainee: "Trainee", record: Record) -> None:
    """By its hash; one that no file has is kept."""
    from app.model.build import unpacked_base
    from app.model.fingerprint import base_fingerprint
    from app.model.save import save_base

    record.add_facts(hashes={"base": base_fingerprint(run.model)})
    if ground.sections.keeps_random_base and run.checkpoint.save_random_base and not ground.save:
        unpacked = unpacked_base(ground.sections, ground.runtime.device, run.seed)
        save_base(trainee, ground.tokenizer, record.folder.base, unpacked)


def _parts(
    run: RunConfig, ground: "Ground", stepper: "Stepper", checkpoints: "Checkpoints", record: Record
) -> "Parts":
    from app.engine.ground import layout_of
    from app.engine.loop import Parts
    from app.engine.samples import sampler

    return Parts(
        runtime=ground.runtime,
        plan=ground.plan,
        loader=ground.loader,
        eval_batches=ground.eval_batches(layout_of(run, run.eval.rows, ground.tokenizer)),
        stepper=stepper,
        learning_rate=ground.learning_rate(run.schedule, run.optimizer.lr),
        checkpoints=checkpoints,
        journal=record,
        show_samples=sampler(run.eval, ground.data.eval, stepper.trainee, ground.tokenizer, record),
    )


@hydra.main(version_base=VERSION_BASE, config_path=str(CONF), config_name="config")
def _under_hydra(config: DictConfig) -> None:
    try:
        code = train(load_run(config))
    except AppError as problem:  # caught here, because Hydra would put a line of its own before the message
        _leave(problem)
    if code:
        sys.exit(code)


def _leave(problem: AppError) -> NoReturn:
    sys.stderr.write(f"{problem.report()}\n")
    sys.exit(problem.exit_code)


def main() -> None:
    """Exit codes: 0 done, 1 our fault, 2 the user's, 75 saved (start me again), 130 Ctrl-C."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # a fault of ours keeps its whole traceback
    # threads that wait without end for each other make two runs on one machine four times slower, not two
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        require_platform()
        sys.argv[1:] = checked_arguments(sys.argv[1:])
        store_schema()
        _under_hydra()
    except AppError as problem:
        _leave(problem)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
