"""Processes of a run: their environment, launch, and report of one failure once.

A process that waits in a collective is only reached by a flag in the store, which each process watches from a thread:
not by an error of a peer (NCCL waits forever), nor by a signal, whose handler runs only after the wait.
"""

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from app.config.conf_files import read_yaml, to_yaml
from app.config.schema import LaunchConfig, RunConfig
from app.config.validate import parse_section
from app.errors import AppError, ConfigError, EnvironmentProblem
from app.signals import CODES, NOTHING_TO_SAVE, Stopped, stop_signals

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


_REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class World:
    """Ranks and sizes as torchrun defines them; `local`: within this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes files."""
        return self.rank == 0

    @property
    def is_joined(self) -> bool:
        """Whether a launcher started this process as one of several."""
        return self.size > 1


def world() -> World:
    """Read the variables of torchrun, accelerate, our launcher, or a Slurm task."""
    if "RANK" not in os.environ:
        _translate_slurm()
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return World()
    missing = [name for name in _REQUIRED if name not in os.environ]
    if missing:
        raise EnvironmentProblem(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: this process was started as one of several, but "
            f"{' and '.join(missing)} is not set. Use torchrun, "
            "accelerate launch or srun, or unset WORLD_SIZE."
        )
    local_rank = int(os.environ["LOCAL_RANK"])
    return World(
        rank=int(os.environ["RANK"]),
        size=int(os.environ["WORLD_SIZE"]),
        local_rank=local_rank,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])),
    )


def _translate_slurm() -> None:
    """Set the variables of torchrun for a Slurm step with several tasks; a batch script alone is one process."""
    env = os.environ
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) <= 1 or "SLURM_PROCID" not in env:
        return
    tasks_here = env.get("SLURM_STEP_TASKS_PER_NODE", "1").split(",")[0].split("(")[0]
    env["RANK"], env["LOCAL_RANK"] = env["SLURM_PROCID"], env.get("SLURM_LOCALID", "0")
    env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"] = env["SLURM_STEP_NUM_TASKS"], tasks_here
    env.setdefault("MASTER_ADDR", _first_host(env.get("SLURM_STEP_NODELIST", "localhost")))
    env.setdefault("MASTER_PORT", str(20_000 + int(env.get("SLURM_JOB_ID", "0")) % 20_000))


def _first_host(nodes: str) -> str:
    """Return the first host of a Slurm list: gpu03 for `gpu[03-05,9],login1`."""
    name, bracket, rest = nodes.partition("[")
    if not bracket or "," in name:
        return name.split(",")[0]
    number, _, after = rest.partition("]")
    return f"{name}{number.split(',')[0].split('-')[0]}{after.split(',')[0]}"


# ---- failures


FOLDER = "APP_LAUNCH_FOLDER"  # environment variable: folder for the failures of processes of our own launcher
POLL_SECONDS = 0.5
MEETING_SECONDS = 3600.0  # for the store to answer at the start: process 0 may start late
AGENT_SECONDS = 5.0  # the same if the elastic agent hosts it, which starts before the processes
FAILING_CONNECT_SECONDS = 2.0  # and at a failure: its host may have died
UNMET_CONNECT_SECONDS = 5.0  # and at a failure before the processes are connected: process 0 may fail a moment later
GRACE_SECONDS = 2.5  # for a process that noticed the failure to close its records
READ_SECONDS = 1.0  # for others to read the flag before the host of the store exits
_LAST_LINES = 20
_SECONDARY_SECONDS = 5.0  # in which others fail because a peer was killed

# Set in a process that is about to end: lost connections are then not its failure.
_ENDING = threading.Event()
_WATCHING = threading.Event()
_CONNECTED = threading.Event()  # the watching thread, to the store
_SEEN: list["_Raised"] = []  # the failure of another process that ends this one


# ---- exit of this process


@contextmanager
def reporting_crashes() -> Iterator[None]:
    """Report an unexpected exception once, with its rank, and exit without waiting for the other processes."""
    if not world().is_joined:
        yield
        return
    if _has_agent_store():
        FailureFlag(world().rank).watch()  # the launcher may be killed long before the processes connect
    try:
        yield
    except (AppError, SystemExit, KeyboardInterrupt):
        raise
    except BaseException:  # noqa: BLE001  any exception is reported with its traceback
        _fail(1, traceback.format_exc().rstrip())


def fail_as_one_of_several(problem: AppError) -> None:
    """Exit with the user error if this process is one of several; else return."""
    end_as_one_of_several(problem.exit_code, problem.report())


def end_as_one_of_several(code: int, text: str = "") -> None:
    """Exit, and soon the other processes too, with a code and the message of a failure."""
    try:
        here = world()
    except AppError:  # the error being reported
        return
    if here.is_joined:
        _fail(code, text)


def quiet_connections() -> None:
    """Prevent torch, before it is loaded, from printing a C++ stack trace if a store is not reachable."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _fail(code: int, text: str) -> NoReturn:
    """Exit at once: an orderly exit would wait for peers that may never connect."""
    torch = sys.modules.get("torch")
    # before the processes are connected, each fails for its own reason
    rank, has_met = world().rank, torch is not None and torch.distributed.is_initialized()
    if _SEEN:
        os._exit(_SEEN[0].code)
    flag = FailureFlag(rank)
    first = flag.raise_first(code, text, has_met=has_met)
    if text and (first is None or not (has_met or first.text_hash == _hash(text))):
        report_failure(rank, code, text)
    sys.stdout.flush()
    sys.stderr.flush()
    if first is None:
        flag.let_others_read()
    os._exit(first.code if first is not None and has_met else code)


@dataclass(frozen=True, slots=True)
class _Raised:
    """The failure reported by a raised flag."""

    code: int
    rank: int
    text_hash: str

    @classmethod
    def parse(cls, value: bytes) -> "_Raised":
        code, rank, text_hash = value.decode().split()
        return cls(int(code), int(rank), text_hash)

    def __str__(self) -> str:
        return f"{self.code} {self.rank} {self.text_hash}"


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


class FailureFlag:
    """Failure flag of one start of a run, on a separate connection: the process group may be waiting."""

    def __init__(self, rank: int) -> None:
        run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._key = f"app/{run}/{start}/failed"
        self._rank = rank
        self._hosted: TCPStore | None = None

    def watch(self) -> None:
        """Start one thread that ends this process within seconds after another raises the flag, with its code, or
        after its launcher or the host of the store has died.
        """
        if _WATCHING.is_set():
            return
        _WATCHING.set()
        launcher = os.getppid() if _has_agent_store() else None
        import torch.distributed  # noqa: F401  here, because two threads must not load it at once

        threading.Thread(target=self._watch, args=(launcher,), name="failure flag", daemon=True).start()

    def raise_first(self, code: int, text: str, *, has_met: bool) -> _Raised | None:
        """Raise the flag; return the failure of another process that was first."""
        _ENDING.set()
        mine = _Raised(code, self._rank, _hash(text))
        try:
            store = self._store_at_failure(has_met=has_met)
            first = _Raised.parse(store.compare_set(self._key, "", str(mine)))
            store.add(f"{self._key}/read", 1)
        except RuntimeError:  # the host of the store has ended, or never started
            return None
        return None if first == mine else first

    def let_others_read(self) -> None:
        """Wait after `raise_first`, before this process ends: it may host the store."""
        if self._hosted is None:
            time.sleep(READ_SECONDS)
            return
        end = time.monotonic() + UNMET_CONNECT_SECONDS
        while self._hosted.add(f"{self._key}/read", 0) < world().size and time.monotonic() < end:
            time.sleep(POLL_SECONDS / 5)

    def _store_at_failure(self, *, has_met: bool) -> "TCPStore":
        """Connect to the store. Without a launcher, process 0 hosts it, here if the processes are not connected yet."""
        if has_met or _has_agent_store():
            return _store(FAILING_CONNECT_SECONDS)
        if self._rank > 0:
            return _store(UNMET_CONNECT_SECONDS)
        self._hosted = _store(UNMET_CONNECT_SECONDS, hosts=True)
        return self._hosted

    def _watch(self, launcher: int | None) -> None:
        was_reached = launcher is not None
        try:
            store = _store(MEETING_SECONDS if launcher is None else AGENT_SECONDS)
            was_reached = True
            _CONNECTED.set()
            while launcher in (None, os.getppid()):
                if _ENDING.wait(POLL_SECONDS):
                    return
                if store.check([self._key]):
                    _SEEN.append(_Raised.parse(store.get(self._key)))
                    store.add(f"{self._key}/read", 1)
                    self._end(_SEEN[0].code, GRACE_SECONDS)
        except RuntimeError:
            if not was_reached:  # the process itself reports that it cannot reach the others
                return
        if not _ENDING.wait(POLL_SECONDS):  # a peer that ended normally may be a moment ahead
            sys.stderr.write(f"process {self._rank}: the launcher, or the process that hosts the store, has ended\n")
            if FOLDER in os.environ:
                shutil.rmtree(os.environ[FOLDER], ignore_errors=True)
            self._end(1, 0)

    def _end(self, code: int, grace: float) -> None:
        if _ENDING.wait(grace):
            return
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_until_connected() -> None:
    """Wait until the thread of `watch` no longer reads the environment, after the processes are connected."""
    _CONNECTED.wait(AGENT_SECONDS)


def stop_watching() -> None:
    """End the thread of `watch`, before a normal exit."""
    _ENDING.set()


def _has_agent_store() -> bool:
    """Return whether the elastic agent that started this process hosts the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(timeout_seconds: float, *, hosts: bool = False) -> "TCPStore":
    from torch._C._distributed_c10d import TCPStore

    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not hosts:
        _wait_until_answered(address, timeout_seconds)
    return TCPStore(*address, is_master=hosts, wait_for_workers=False, timeout=timedelta(seconds=timeout_seconds))


def _wait_until_answered(address: tuple[str, int], seconds: float) -> None:
    """Raise a RuntimeError, like torch, if nothing answers; torch would also print a C++ stack trace."""
    end = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(address, timeout=seconds).close()
        except OSError as fault:
            if time.monotonic() > end:
                raise RuntimeError(f"no answer from {address}") from fault
        time.sleep(POLL_SECONDS / 5)


# ---- failures of processes, for their launcher


@dataclass(frozen=True, slots=True)
class Failure:
    """End of one process; `text` is empty without a message."""

    rank: int
    code: int  # negative: the signal that killed it
    at: float
    text: str = ""

    @property
    def exit_code(self) -> int:
        """128 + signal number for a killed process, as in shells."""
        return self.code if self.code > 0 else 128 - self.code


def report_failure(rank: int, code: int, text: str) -> None:
    """Write the failure for our launcher, which prints the first one; print it here under another launcher."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        sys.stderr.write(f"{text}\n(process {rank})\n")
        return
    facts = {"at": time.time(), "code": code, "text": text}
    temporary = Path(folder) / f".rank-{rank}"
    temporary.write_text(json.dumps(facts))
    temporary.rename(Path(folder) / f"rank-{rank}.json")


def read_failure(folder: Path, rank: int) -> Failure | None:
    """Read the failure of a rank written by `report_failure`."""
    file = folder / f"rank-{rank}.json"
    if not file.is_file():
        return None
    facts = json.loads(file.read_text())
    return Failure(rank, facts["code"], facts["at"], facts["text"])


def root_cause(failures: Iterable[Failure]) -> Failure:
    """Return the first failure, or a killed process whose peers failed before its death was noticed.

    The agent ends the others by SIGTERM; a failure without text followed the flag of another.
    """
    by_time = sorted(failures, key=lambda failure: (failure.code == -signal.SIGTERM, not failure.text, failure.at))
    dead = [failure for failure in by_time if failure.code < 0 and failure.code != -signal.SIGTERM]
    killed = [failure for failure in dead if failure.at - by_time[0].at < _SECONDARY_SECONDS]
    return (killed or by_time)[0]


def failure_message(failure: Failure, count: int, printed: str) -> str:
    """Return the message of a failure. `printed`: standard error of the process."""
    who = f"process {failure.rank} of {count}"
    if failure.text:
        return f"{failure.text}\n({who})"
    last = "\n".join(printed.splitlines()[-_LAST_LINES:])
    if failure.code < 0:
        name = signal.Signals(-failure.code).name
        advice = " (usually out of memory)" if failure.code == -signal.SIGKILL else ""
        return f"{who} was killed by {name}{advice}.{f' Last output:{chr(10)}{last}' if last else ''}"
    return f"{who} exited with code {failure.code}.{f' Last output:{chr(10)}{last}' if last else ''}"


# ---- launch


MAX_RESTARTS = 3  # for OOM, in smaller parts
MAX_DEPTH = 20  # of splits: a million parts
_SAVED_CODES = frozenset(CODES.values())  # the processes have printed their messages


# ---- in a started process


def launched_run() -> tuple[RunConfig, str] | None:
    """Return the run for which our launcher started this process, and the command to resume it."""
    if FOLDER not in os.environ:
        return None
    file = _start_file(os.environ[FOLDER], world().rank)
    start = read_yaml(file)
    file.unlink()  # it may have secrets, and would remain if the launcher is killed
    return parse_section(RunConfig, start["run"]), start["resume_command"]


def _start_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"start-{rank}.yaml"


def require_named_folder(overrides: Sequence[str]) -> None:
    """Raise for processes of another launcher without output_dir: each would use a folder named by its start time."""
    named = any(override.lstrip("+").startswith("output_dir=") for override in overrides)
    if world().is_joined and not named:
        raise ConfigError(
            f"output_dir= is required for {world().size} processes started by torchrun, accelerate or srun, "
            "e.g. output_dir=runs/mine"
        )


# Options of accelerate launch that would be ignored: environment variable, option, what to set instead.
_IGNORED_OPTIONS = (
    ("ACCELERATE_USE_FSDP", "--use_fsdp", "parallel=fsdp"),
    ("ACCELERATE_USE_DEEPSPEED", "--use_deepspeed", "parallel=zero2 or parallel=zero3"),
    ("ACCELERATE_USE_MEGATRON_LM", "--use_megatron_lm", "parallel=fsdp"),
    ("ACCELERATE_USE_PARALLELISM_CONFIG", "--use_parallelism_config", "parallel=fsdp or parallel=hsdp"),
)
_NO_BACKEND = ("NO", "EAGER")


def check(run: RunConfig) -> Iterator[str]:
    """Yield problems of settings that need several processes in a run with one, and of options of accelerate launch
    that differ from the run.
    """
    yield from _ignored_options(run)
    if run.parallel.offload and not world().is_joined and run.launch.num_processes == 1:
        yield (
            "parallel.offload=true keeps the shards of several processes in CPU RAM, but this run has "
            "one process. Set launch.num_processes=N parallel=fsdp; to save memory on one GPU, set recipe=qlora, "
            "optimizer=paged_adamw_8bit or training.recompute=true training.offload=true."
        )


def _ignored_options(run: RunConfig) -> Iterator[str]:
    """Yield the options of accelerate launch, or its config file, that this program would ignore."""
    env, instead = os.environ, "has no effect. Leave it out, also of Accelerate's config file, and set"
    precision, backend = env.get("ACCELERATE_MIXED_PRECISION", "no"), env.get("ACCELERATE_DYNAMO_BACKEND", "NO")
    if precision not in ("no", run.precision.kind):
        setting = "quantization=fp8" if precision == "fp8" else f"precision={precision}"
        yield f"accelerate launch --mixed_precision={precision} {instead} {setting}."
    if backend.upper() not in _NO_BACKEND:
        yield f"accelerate launch --dynamo_backend={backend.lower()} {instead} compile=blocks."
    for variable, option, setting in _IGNORED_OPTIONS:
        if env.get(variable, "false").lower() == "true":
            yield f"accelerate launch {option} {instead} {setting}."


# ---- in the launcher


def processes_to_start(launch: LaunchConfig) -> int:
    """Return the number of processes to launch; 0 if this process itself trains, alone or started by a launcher."""
    here = world()
    requested = launch.num_processes
    if here.is_joined:
        if isinstance(requested, int) and requested > 1 and requested != here.size and FOLDER not in os.environ:
            raise ConfigError(
                f"launch.num_processes={requested}, but this process was started as one of {here.size}. Remove "
                "launch.num_processes: torchrun, accelerate or srun sets the number."
            )
        return 0
    if requested == 1:
        return 0
    import torch

    gpus = torch.cuda.device_count()  # one per process; without any they share the cores
    if not isinstance(requested, int):  # auto
        return gpus if gpus > 1 else 0
    if 0 < gpus < requested:
        raise ConfigError(
            f"launch.num_processes={requested}: only {gpus} GPUs are visible, and each process needs one. "
            f"Set launch.num_processes={gpus} or auto."
        )
    return requested


def train_in_processes(count: int, run: RunConfig, resume_command: str, depth_file: Path) -> int:
    """Train in `count` processes with this resolved config, so that times and environment values are read once.

    If a sharded model ran out of memory (`depth_file`), restart from its last checkpoint, in smaller parts.
    """
    for restarts_left in range(MAX_RESTARTS, -1, -1):
        before = read_depth(depth_file)
        code = launch(count, ["-m", "app.train"], {"run": asdict(run), "resume_command": resume_command})
        depth = read_depth(depth_file)
        if depth <= before or not restarts_left:
            break
        sys.stderr.write(f"restarting from the last checkpoint, with micro-batches in up to {2**depth} parts\n")
        run = replace(run, resume="auto")
    return code


def read_depth(file: Path) -> int:
    """Return how often micro-batches are halved, as noted by a start that ran out of memory; else 0."""
    text = file.read_text(errors="replace").strip() if file.is_file() else ""
    return min(int(text[:9]), MAX_DEPTH) if text.isdecimal() else 0


def launch(count: int, program: Sequence[str], start: Mapping[str, Any] = MappingProxyType({})) -> int:
    """Run `python program` in `count` processes; return the exit code of the first that failed, else 0.

    `start`: data for `launched_run` in each of them.
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
    """Return the settings of the elastic agent for one machine; the launcher handles the stop signals."""
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
        signals_to_handle="SIGQUIT",  # the launcher forwards the others and waits
    )


@contextlib.contextmanager
def forwarding_signals() -> Iterator[list[int]]:
    """Forward stop signals to every process once; each saves and exits with the code of the signal.

    The agent would send its own signal, wait half a minute and kill a process that is still saving.
    """
    received: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        children = child_pids()
        if not children:  # none started yet
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
    """Return the ids of child processes."""
    me = os.getpid()
    return [int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()]


def _report(failed: Any, count: int, received: list[int], folder: Path) -> int:
    """Print one message for all ended processes; none after a stop signal."""
    first = root_cause(
        read_failure(folder, rank) or Failure(rank, failure.exitcode, float(failure.timestamp or time.time()))
        for rank, failure in failed.failures.items()
    )
    if first.code in _SAVED_CODES and not first.text:
        return first.code
    if received and first.code == -received[0]:
        sys.stderr.write(NOTHING_TO_SAVE)  # the process could not print it yet
        return CODES[signal.Signals(received[0])]
    printed = "".join(f.read_text(errors="replace") for f in sorted(folder.glob(f"*/*/{first.rank}/stderr.log")))
    sys.stderr.write(f"{failure_message(first, count, printed)}\n")
    return first.exit_code
