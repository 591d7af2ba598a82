"""This process as one of several: what it was started with, and how it fails."""

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from app.config.load import read_run
from app.config.schema import RunConfig
from app.distributed.environment import world
from app.errors import AppError, ConfigError
from app.launch.failures import FOLDER, leave_failure

if TYPE_CHECKING:
    from app.distributed.failure_flag import FailureFlag

RUN, GO_ON = "run.yaml", "go_on.txt"


def run_given() -> RunConfig | None:
    """The run that our launcher started this process for."""
    folder = os.environ.get(FOLDER)
    return None if folder is None else read_run(Path(folder) / RUN)


def go_on_given() -> str:
    """How to continue that run: its command is known to the launcher alone."""
    return (Path(os.environ[FOLDER]) / GO_ON).read_text()


def require_named_folder(overrides: Sequence[str]) -> None:
    """Processes that another launcher started would each name a folder by the clock."""
    named = any(override.lstrip("+").startswith("output_dir=") for override in overrides)
    if world().is_joined and not named:
        raise ConfigError(
            f"output_dir has no value that all {world().size} processes share. Give output_dir=DIR when torchrun, "
            "accelerate or srun starts them."
        )


@contextmanager
def failing_once() -> Iterator[None]:
    """A fault of ours is told once, with its rank; waiting for the others must not keep a process from ending."""
    if not world().is_joined:
        yield
        return
    try:
        yield
    except (AppError, SystemExit, KeyboardInterrupt):
        raise
    except BaseException:  # noqa: BLE001  told with its traceback, whatever it is
        _fail(1, traceback.format_exc().rstrip(), same_for_all=False)


def fail_as_one_of_several(problem: AppError) -> None:
    """End this process with the user's problem, if it is one of several; else return."""
    try:
        here = world()
    except AppError:  # that was the problem
        return
    if here.is_joined:
        _fail(problem.exit_code, problem.report(), same_for_all=not _has_met())


def _has_met() -> bool:
    """Before the processes meet they all do the same, and fail in the same way."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_initialized()


def _fail(code: int, text: str, *, same_for_all: bool) -> NoReturn:
    """An orderly end would wait for peers that may never come."""
    rank = world().rank
    flag = _flag(rank)
    of_another = None if flag is None else flag.raise_first(code)
    if of_another is not None:  # what this process fails of is that another one has
        os._exit(of_another)
    if rank == 0 or FOLDER in os.environ or not same_for_all:
        leave_failure(rank, code, text)
    sys.stdout.flush()
    sys.stderr.flush()
    if flag is not None:
        flag.let_others_read()
    os._exit(code)


def _flag(rank: int) -> "FailureFlag | None":
    if not _has_met():
        return None
    from app.distributed.failure_flag import FailureFlag

    return FailureFlag(rank)
