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
from contextlib import closing
from dataclasses import asdict
from typing import NoReturn

from app.config.command_line import help_text, print_help_or_version
from app.config.commands import print_settings_notes, require_platform
from app.config.conf_files import to_yaml
from app.config.load import compose_run
from app.config.overrides import is_sweep, split_arguments
from app.config.schema import RunConfig
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
from app.errors import AppError, refuse
from app.program import remember_settings, resume_command
from app.signals import CTRL_C, Stopped, ending_on_signals
from app.tracking.console import Console, open_console
from app.tracking.output_dir import RunFolder
from app.training.torch_environment import set_inductor_cache, use_expandable_segments

# torch is imported inside functions, so that an error in the command line is reported at once


def train(run: RunConfig, resume_hint: str = "") -> int:
    """Train a checked config; return the exit code. `resume_hint` is printed after a stop."""
    _check_parts(run)
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

    refuse(
        [
            *sources.check(run.dataset),
            *source.check(run.model),
            *tokenizer.check(run.model),
            *adapters.check_start(run),
            *requirements.check(run.optimizer),
            *launch.check(run),
            *trackers.check(run.tracker),
        ]
    )


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
    if print_help_or_version(arguments, help_text):
        return
    if is_sweep(arguments):
        from app.sweeps.sweep import sweep

        sys.exit(sweep(arguments, _check_parts))
    remember_settings(arguments)
    overrides, switches = split_arguments(arguments)
    if world().is_first:
        print_settings_notes(arguments)
    run = compose_run(overrides)
    if switches:  # --cfg job
        sys.stdout.write(to_yaml(asdict(run)))
        return
    require_named_folder(overrides)
    sys.exit(train(run, _resume_hint(run, arguments)))


if __name__ == "__main__":
    main()
