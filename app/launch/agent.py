"""The processes of a run on this machine, under torch's elastic agent; several machines are torchrun's business."""

import contextlib
import inspect
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

from omegaconf import OmegaConf

from app.config.schema import LaunchConfig, RunConfig
from app.distributed.environment import world
from app.errors import ConfigError
from app.launch.failures import FOLDER, Failure, account_of, first_of, left_by
from app.launch.worker import GO_ON, RUN
from app.training.signals import CODES

MAX_RESTARTS = 3  # of a run that needs smaller parts
_GRACE = 20  # seconds for the others after one has failed
_SAVED = frozenset(CODES.values())  # the processes have said what there is to say


def processes_to_start(launch: LaunchConfig) -> int:
    """0 where this process trains itself: alone, or as one of those that a launcher has started."""
    here = world()
    wanted = launch.num_processes
    if here.is_joined:
        if isinstance(wanted, int) and wanted > 1 and wanted != here.size and FOLDER not in os.environ:
            raise ConfigError(
                f"launch.num_processes={wanted}, but this process was started as one of {here.size}. Leave "
                "launch.num_processes out: torchrun, accelerate or srun decide."
            )
        return 0
    if wanted == "auto":
        wanted = _visible_gpus()
    assert isinstance(wanted, int)
    _require_gpus(wanted)
    return wanted if wanted > 1 else 0


def train_in_processes(count: int, run: RunConfig, go_on: str) -> int:
    """`app.train` for this very run: what a clock or an environment decided is decided once, for all.

    Where a divided model ran out of memory it starts again from its last checkpoint, in smaller parts.
    """
    from app.training.checkpoint import DEPTH

    noted = Path(run.output_dir) / "checkpoints" / DEPTH
    for restarts_left in range(MAX_RESTARTS, -1, -1):
        before = _depth(noted)
        settings = OmegaConf.to_yaml(OmegaConf.create(asdict(run)))
        code = launch(count, ["-m", "app.train"], {RUN: settings, GO_ON: go_on})
        depth = _depth(noted)
        if depth <= before or not restarts_left:
            break
        sys.stderr.write(
            f"starting again from the last checkpoint, micro-batches in up to {2**depth} parts\n"
        )
        run = replace(run, resume="auto")
    return code


def _depth(noted: Path) -> int:
    return int(noted.read_text()) if noted.is_file() else 0


def launch(count: int, program: Sequence[str], files: Mapping[str, str] | None = None) -> int:
    """`python program` in `count` processes; returns the exit code of the first that failed, else 0."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what is to be told, we tell
    with tempfile.TemporaryDirectory(prefix="app-launch-") as name, _passed_on() as asked:
        for file, text in (files or {}).items():
            (Path(name) / file).write_text(text)
        os.environ[FOLDER] = name
        try:
            elastic_launch(_settings(count, name), sys.executable)("-u", *program)
        except ChildFailedError as failed:
            return _tell(_failures(failed, Path(name)), count, asked, Path(name))
        finally:
            del os.environ[FOLDER]
    return 0


def _settings(count: int, folder: str) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig as ElasticConfig

    grace: dict[str, Any] = {
        "shutdown_timeout": _GRACE
    }  # torch 2.11 and before have 30 seconds and no name for them
    known = inspect.signature(ElasticConfig).parameters
    return ElasticConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=dict.fromkeys(range(1, count), Std.ALL)),
        signals_to_handle="SIGHUP,SIGQUIT",  # the others are passed on by us, and waited for
        **{key: value for key, value in grace.items() if key in known},
    )


@contextlib.contextmanager
def _passed_on() -> Iterator[list[int]]:
    """Signals that ask the run to stop reach every process once; each saves and ends with the code for it.

    The agent would send its own, wait half a minute and kill whatever is still saving.
    """
    asked: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        for child in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)

    before = {number: signal.signal(number, pass_on) for number in CODES}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _children() -> list[int]:
    me = os.getpid()
    return [int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()]


def _failures(failed: Any, folder: Path) -> list[Failure]:
    return [
        left_by(folder, rank) or Failure(rank, each.exitcode, float(each.timestamp or time.time()))
        for rank, each in failed.failures.items()
    ]


def _tell(failures: list[Failure], count: int, asked: list[int], folder: Path) -> int:
    """One message for what happened, however many processes it ended; none where it was asked for."""
    first = first_of(failures)
    if first.code in _SAVED and not first.text:
        return first.code
    if asked and first.code == -asked[0]:
        return first.exit_code  # before it could do anything that is worth saving
    printed = "".join(
        f.read_text(errors="replace") for f in sorted(folder.glob(f"*/*/{first.rank}/stderr.log"))
    )
    sys.stderr.write(f"{account_of(first, count, printed)}\n")
    return first.exit_code


def _visible_gpus() -> int:
    import torch

    return max(1, torch.cuda.device_count())


def _require_gpus(wanted: int) -> None:
    """On a machine with GPUs each process has one of its own; without any they share the cores."""
    if wanted == 1:
        return
    import torch

    gpus = torch.cuda.device_count()
    if 0 < gpus < wanted:
        raise ConfigError(
            f"launch.num_processes={wanted}: only {gpus} GPUs are visible here, one for each process. "
            f"Set launch.num_processes={gpus} or auto."
        )
