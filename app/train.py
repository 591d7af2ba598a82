"""Fine-tune a model.

finetune train                                   the included small model and data, on any machine
finetune train recipe=lora model=llama dataset=messages dataset.path=chat.jsonl
finetune train output_dir=runs/mine resume=auto  resume after a stop
finetune train from=runs/mine optimizer.lr=1e-4  the settings of a run, modified
finetune train from=mine.yaml optimizer.lr=1e-4  the settings of a file; the command line overrides it
finetune train -m recipe=lora,full seed=1,2,3    a sweep: one run per combination
"""

import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from app.config.arguments import is_sweep, split_arguments
from app.config.commands import print_settings_notes, require_platform
from app.config.conf_files import to_yaml
from app.config.help import print_help_or_version, train_help
from app.config.load import compose_run, read_run
from app.config.overrides import key_of
from app.config.schema import RunConfig
from app.config.validate import format_value
from app.distributed.launch import (
    end_as_one_of_several,
    fail_as_one_of_several,
    launched_run,
    processes_to_start,
    quiet_connections,
    reporting_crashes,
    require_named_folder,
    train_in_processes,
    world,
)
from app.errors import AppError, CheckpointError, ConfigError, refuse
from app.files import is_own_file
from app.program import command_text, remember_settings, resume_command
from app.signals import CTRL_C, Stopped, ending_on_signals
from app.tracking.console import Console, open_console
from app.tracking.output_dir import RunFolder
from app.training.torch_environment import set_inductor_cache, use_expandable_segments

# torch is imported inside functions, so that an error in the command line is reported at once


def train(run: RunConfig, resume_hint: str = "") -> int:
    """Train a checked config; return the exit code. `resume_hint` is printed after a stop."""
    _check_parts(run)
    _check_resume(run)
    set_inductor_cache(run)
    count = processes_to_start(run.launch)
    if count:
        from app.training.checkpoint import DEPTH

        return train_in_processes(count, run, resume_hint, RunFolder.joined(run.output_dir).checkpoints / DEPTH)
    if not world().is_first:
        return _train_in(RunFolder.joined(run.output_dir), run, Console(enabled=False), resume_hint)
    with RunFolder.claim(run.output_dir, run.resume) as folder:
        return _train_in(folder, run, open_console(), resume_hint)


def _train_in(folder: RunFolder, run: RunConfig, console: Console, resume_hint: str) -> int:
    console.say(f"output  {folder.path}")  # before imports that take seconds
    with closing(console):
        console.status("Importing torch ...")
        from app.memory.planner import LocalPlanner
        from app.training.run import train_in

        return train_in(folder, run, console, resume_hint, LocalPlanner())


def _check_parts(run: RunConfig) -> None:
    """Run the fast checks of all packages, and report all problems together."""
    from app.base import source, tokenizer
    from app.config import adapters
    from app.data import sources
    from app.distributed import launch
    from app.optim import requirements
    from app.tracking import trackers
    from app.training import mirror

    refuse(
        [
            *sources.check(run.dataset),
            *source.check(run.model),
            *tokenizer.check(run.model),
            *adapters.check_start(run),
            *requirements.check(run.optimizer),
            *launch.check(run),
            *trackers.check(run.tracker),
            *mirror.check(run.checkpoint),
        ]
    )


def _check_resume(run: RunConfig) -> None:
    """Raise an error if the run to resume has other settings, before torch is imported."""
    from app.config.finished_run import how_to_resume
    from app.training.identity import changed_settings

    folder = RunFolder(Path(run.output_dir).expanduser())
    if run.resume != "auto" or not folder.checkpoints.is_dir() or not is_own_file(folder.run_yaml):
        return
    try:
        changed = changed_settings(read_run(folder.run_yaml), run)
    except CheckpointError:  # from another version, or damaged: settings are compared with the checkpoint
        return
    if changed:
        listed = ", ".join(f"{key} changed from {before} to {value}" for key, (before, value) in changed.items())
        settings = (f"{key}={format_value(value)}" for key, (_, value) in changed.items())
        raise ConfigError(
            f"output_dir={run.output_dir}: {listed}. A resumed run keeps its settings. For a new run with the change: "
            f"{command_text('train', f'from={run.output_dir}', *settings)}{how_to_resume(folder.path)}"
        )


def _require_run_to_resume(overrides: Sequence[str]) -> None:
    """Raise an error for `resume=auto` without `output_dir=`, which would resume nothing."""
    from app.tracking.recorder import read_result

    keys = {key_of(word): word.partition("=")[2] for word in overrides}
    if keys.get("resume") != "auto" or "output_dir" in keys:
        return
    runs = [folder.parent for folder in Path("runs").glob("*/checkpoints")]
    stopped = [folder for folder in runs if read_result(folder).get("status") != "finished"]
    newest = max(stopped, key=lambda folder: folder.stat().st_mtime, default=None)
    settings = [word for word in overrides if not word.startswith("varied_from=")]
    meant = "" if newest is None else f" To resume the last one: {resume_command(settings, str(newest))}"
    raise ConfigError(f"resume=auto needs output_dir=, the folder of the run to resume.{meant}")


def _resume_hint(run: RunConfig, arguments: list[str]) -> str:
    if world().is_joined:  # the command of another launcher is unknown
        return "To resume, start the same command with resume=auto."
    return f"To resume:\n{resume_command(arguments, run.output_dir)}"


def _exit_with(problem: AppError) -> NoReturn:
    fail_as_one_of_several(problem)
    sys.stderr.write(f"{problem.report()}\n")
    sys.exit(problem.exit_code)


def main() -> None:
    """Exit codes: 0 success, 1 a bug, 2 a user error, 3 a trial failed, 75 saved (start again), 130 Ctrl-C."""
    # without a limit on spinning threads two runs on one machine are four times slower, not two
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    quiet_connections()
    use_expandable_segments()
    try:
        require_platform()
        with reporting_crashes(), ending_on_signals(answers_signal=world().is_first):
            _dispatch(sys.argv[1:])
    except AppError as problem:
        _exit_with(problem)
    except Stopped as stopped:
        end_as_one_of_several(stopped.exit_code)
        raise
    except KeyboardInterrupt:
        end_as_one_of_several(CTRL_C)
        sys.exit(CTRL_C)


def _dispatch(arguments: list[str]) -> None:
    launched = launched_run()
    if launched is not None:
        sys.exit(train(*launched))
    if print_help_or_version(arguments, train_help):
        return
    if is_sweep(arguments):
        from app.sweeps.sweep import sweep

        sys.exit(sweep(arguments, _check_parts))
    remember_settings(arguments)
    overrides, switches, notes = split_arguments(arguments)
    if world().is_first:
        print_settings_notes(notes)
    run = compose_run(overrides)
    if switches:  # --cfg job
        sys.stdout.write(to_yaml(asdict(run)))
        return
    require_named_folder(overrides)
    _require_run_to_resume(overrides)
    sys.exit(train(run, _resume_hint(run, arguments)))


if __name__ == "__main__":
    main()
