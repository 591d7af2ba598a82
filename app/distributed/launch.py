"""Start the processes of a run on this machine by torch's elastic agent; on several machines torchrun does."""

import contextlib
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
from types import FrameType, MappingProxyType
from typing import Any

from app.config.schema import LaunchConfig, RunConfig
from app.config.validate import parse_section
from app.config.yaml_files import read_yaml, to_yaml
from app.distributed.environment import world
from app.distributed.failures import FOLDER, Failure, failure_message, quiet_connections, read_failure, root_cause
from app.errors import ConfigError
from app.signals import CODES, NOTHING_TO_SAVE, Stopped, stop_signals

MAX_RESTARTS = 3  # of a run that needs smaller parts
MAX_DEPTH = 20  # of splits: a million parts
_SAVED_CODES = frozenset(CODES.values())  # the processes have printed all there is to say


# ---- in a process that was started


def launched_run() -> tuple[RunConfig, str] | None:
    """The run that our launcher started this process for, and the command that continues it."""
    if FOLDER not in os.environ:
        return None
    file = _start_file(os.environ[FOLDER], world().rank)
    start = read_yaml(file)
    file.unlink()  # it may have secrets, and would stay after a kill of the launcher
    return parse_section(RunConfig, start["run"]), start["resume_command"]


def _start_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"start-{rank}.yaml"


def require_named_folder(overrides: Sequence[str]) -> None:
    """Refuse processes of another launcher that would each name a folder by the clock."""
    named = any(override.lstrip("+").startswith("output_dir=") for override in overrides)
    if world().is_joined and not named:
        raise ConfigError(
            f"output_dir has no value that all {world().size} processes share. Give output_dir=DIR when torchrun, "
            "accelerate or srun starts them."
        )


def check(run: RunConfig) -> Iterator[str]:
    """Problems of settings that only several processes have, where one trains."""
    if run.parallel.offload and not world().is_joined and run.launch.num_processes == 1:
        yield (
            "parallel.offload=true: the shards of several processes are kept in memory of the host, and this run has "
            "one process. Set launch.num_processes=N parallel=fsdp; for less memory of one GPU recipe=qlora, "
            "optimizer=paged_adamw_8bit or training.recompute=true training.offload=true."
        )


# ---- in the process that starts them


def processes_to_start(launch: LaunchConfig) -> int:
    """Number of processes to launch; 0 if this process itself trains, alone or started by a launcher."""
    here = world()
    wanted = launch.num_processes
    if here.is_joined:
        if isinstance(wanted, int) and wanted > 1 and wanted != here.size and FOLDER not in os.environ:
            raise ConfigError(
                f"launch.num_processes={wanted}, but this process was started as one of {here.size}. Leave "
                "launch.num_processes out: torchrun, accelerate or srun decide."
            )
        return 0
    if wanted == 1:
        return 0
    import torch

    gpus = torch.cuda.device_count()  # each process has one of its own; without any they share the cores
    if not isinstance(wanted, int):  # auto
        return gpus if gpus > 1 else 0
    if 0 < gpus < wanted:
        raise ConfigError(
            f"launch.num_processes={wanted}: only {gpus} GPUs are visible here, one for each process. "
            f"Set launch.num_processes={gpus} or auto."
        )
    return wanted


def train_in_processes(count: int, run: RunConfig, resume_command: str, depth_file: Path) -> int:
    """Train in `count` processes with this resolved config, so that times and environment values are read once.

    Where a sharded model ran out of memory, which `depth_file` tells, it starts again from its last checkpoint, in
    smaller parts.
    """
    for restarts_left in range(MAX_RESTARTS, -1, -1):
        before = read_depth(depth_file)
        code = launch(count, ["-m", "app.train"], {"run": asdict(run), "resume_command": resume_command})
        depth = read_depth(depth_file)
        if depth <= before or not restarts_left:
            break
        sys.stderr.write(f"starting again from the last checkpoint, micro-batches in up to {2**depth} parts\n")
        run = replace(run, resume="auto")
    return code


def read_depth(file: Path) -> int:
    """Number of times that micro-batches are halved, as a start that ran out of memory noted it; 0 where none did."""
    text = file.read_text(errors="replace").strip() if file.is_file() else ""
    return min(int(text[:9]), MAX_DEPTH) if text.isdecimal() else 0


def launch(count: int, program: Sequence[str], start: Mapping[str, Any] = MappingProxyType({})) -> int:
    """`python program` in `count` processes; returns the exit code of the first that failed, else 0.

    `start`: what `launched_run` reads in each of them.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    quiet_connections()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we print the one message
    with tempfile.TemporaryDirectory(prefix="app-launch-") as name, forwarding_signals() as received:
        for rank in range(count):
            _start_file(name, rank).write_text(to_yaml(start))
        os.environ[FOLDER] = name
        try:
            elastic_launch(elastic_config(count, name), sys.executable)("-u", *program)
        except ChildFailedError as failed:
            return _report(failed, count, received, Path(name))
        finally:
            del os.environ[FOLDER]
    return 0


def elastic_config(count: int, folder: str) -> Any:
    """Settings of torch's agent for one machine; it leaves the stop signals to the launcher."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig as ElasticConfig

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
        signals_to_handle="SIGQUIT",  # the others are forwarded by us, and waited for
    )


@contextlib.contextmanager
def forwarding_signals() -> Iterator[list[int]]:
    """Signals that ask the run to stop reach every process once; each saves and ends with the code for it.

    The agent would send its own, wait half a minute and kill a process that still saves.
    """
    received: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        children = child_pids()
        if not children:  # not yet
            raise Stopped(number)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)

    before = {number: signal.signal(number, forward) for number in stop_signals()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def child_pids() -> list[int]:
    """Processes that this one has started."""
    me = os.getpid()
    return [int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()]


def _report(failed: Any, count: int, received: list[int], folder: Path) -> int:
    """Print one message, however many processes ended; none where a signal asked for it."""
    first = root_cause(
        read_failure(folder, rank) or Failure(rank, each.exitcode, float(each.timestamp or time.time()))
        for rank, each in failed.failures.items()
    )
    if first.code in _SAVED_CODES and not first.text:
        return first.code
    if received and first.code == -received[0]:
        sys.stderr.write(NOTHING_TO_SAVE)  # the process could not say it yet
        return CODES[signal.Signals(received[0])]
    printed = "".join(f.read_text(errors="replace") for f in sorted(folder.glob(f"*/*/{first.rank}/stderr.log")))
    sys.stderr.write(f"{failure_message(first, count, printed)}\n")
    return first.exit_code
