"""Trials of a sweep: overrides, outcomes, folder, ranking, and child process."""

import ctypes
import math
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import Any

from hydra.errors import HydraException

from app.config.kinds import cost_of
from app.config.overrides import parse_override
from app.errors import AppError, CheckpointError, ConfigError
from app.files import read_json, report_write_errors, write_json
from app.safe_text import listed, redact
from app.signals import CTRL_C
from app.tracking.formatting import NO_VALUE, align_columns, format_count, format_duration, format_integer, format_or
from app.tracking.output_dir import ClaimedFolder

PENDING, RUNNING, FAILED, STOPPED = "pending", "running", "failed", "stopped"
FINISHED, DRY_RUN, REFUSED = "finished", "dry_run", "refused"
_CONTENT = "sweep.json"
_MAX_NAME_CHARACTERS = 96
_BRACKETS = re.compile(r"[\[\]{}()'\"]")
_UNSAFE_CHARACTERS = re.compile(r"[^\w.=,+-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial: all `overrides`, the `swept` ones among them, and the `name` of its folder.

    `proposed` is the point of the search space. Number 0 is a point that is only checked.
    `refused` is the reason why a rung of a ladder is not run.
    """

    number: int
    overrides: tuple[str, ...]
    swept: tuple[str, ...]
    name: str
    proposed: Mapping[str, Any] | None = None
    refused: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A trial in sweep.json. `values` are the typed swept values; `seconds` is the time of all its starts."""

    number: int
    overrides: Sequence[str]
    swept: Sequence[str]
    folder: str
    values: Mapping[str, Any] = field(default_factory=dict)
    proposed: Mapping[str, Any] | None = None
    status: str = PENDING
    objective: float | None = None
    objective_is: str | None = None  # the metric; None: the training loss
    steps: int | None = None
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    seconds: float = 0.0
    other_cpu_share: float | None = None  # of the CPU time, used by other programs just before the trial of a ladder
    exit_code: int | None = None
    error: str | None = None

    @property
    def cost(self) -> float | None:
        """The objective as a number to minimize."""
        return None if self.objective is None else cost_of(self.objective, self.objective_is)


def describe(swept: Sequence[str]) -> str:
    """Return the swept overrides of a trial as text."""
    return " ".join(text.lstrip("+") for text in swept)


def name_of(number: int, digits: int, swept: Sequence[str]) -> str:
    """Return the folder name of a trial, valid on any file system: a unique number and a readable, truncated rest."""
    text = _UNSAFE_CHARACTERS.sub("_", _BRACKETS.sub("", describe(swept).replace(" ", ",")))
    return f"{number:0{digits}}-{text}"[:_MAX_NAME_CHARACTERS].rstrip("-._,")


def key_of(text: str) -> str:
    """Return the key of an override, without its prefix."""
    return text.partition("=")[0].lstrip("+~")


def values_of(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the typed values of overrides by key."""
    return {key_of(text): value_of(text) for text in overrides}


@cache
def value_of(text: str) -> Any:
    """Return the typed value of an override; unreadable values, NaN and infinity are text."""
    try:
        value = parse_override(text).value()
    except HydraException:
        return text.partition("=")[2]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class SweepFolder(ClaimedFolder):
    """Folder of a sweep; only a folder from `claim` may be written to."""

    @classmethod
    def claim(cls, output_dir: str, identity: str) -> "SweepFolder":
        """Lock the folder for this process."""
        path = Path(output_dir).expanduser()
        folder = cls._claim(output_dir, path, lambda names: _refuse_foreign(output_dir, names))
        try:
            before = folder.read()
            if before and before["identity"] != identity:
                raise ConfigError(
                    f"output_dir={output_dir}: the folder has another sweep; choose another output_dir, or resume "
                    f"that sweep: {shlex.join(before['command'])}"
                )
        except AppError:
            folder.release()
            raise
        return folder

    @property
    def content(self) -> Path:
        """sweep.json, with the command and the outcomes of the trials."""
        return self.path / _CONTENT

    def read(self) -> dict[str, Any]:
        """Return the content of sweep.json; empty before the first start."""
        if not self.content.exists():
            return {}
        try:
            values: dict[str, Any] = read_json(self.content)
            why = "" if {"identity", "command", "trials"} <= {*values} else "command or trials are missing"
        except (ValueError, TypeError) as fault:
            why = str(fault)
        if why:
            raise CheckpointError(f"{self.content} cannot be read ({why}): restore it, or choose another output_dir")
        return values

    def write(self, facts: dict[str, Any], trials: Sequence[Outcome]) -> None:
        """Replace sweep.json atomically, for programs that read it."""
        write_json(self.content, redact({**facts, "trials": [asdict(trial) for trial in trials]}))


def _refuse_foreign(output_dir: str, names: Sequence[str]) -> None:
    """Raise if the folder is neither empty nor of a sweep."""
    if names and _CONTENT not in names:
        raise ConfigError(
            f"output_dir={output_dir}: the folder is not empty and not a sweep (found {listed(names, 4)}); "
            "choose a new or empty folder"
        )


def ranked(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return outcomes sorted by objective, the best first and those without one (failed, NaN) last."""
    return sorted(outcomes, key=lambda outcome: (outcome.cost is None, outcome.cost or 0.0, outcome.number))


def best(outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """Return the best finished trial for sweep.json; `line` has the arguments for `finetune train`."""
    first = next(iter(ranked(outcomes)), None)
    if first is None or first.objective is None or first.status != FINISHED:
        return None
    return {
        "number": first.number,
        "objective": first.objective,
        "folder": first.folder,
        "overrides": list(first.overrides),
        "line": shlex.join(first.overrides),
    }


def leaderboard(outcomes: Sequence[Outcome]) -> str:
    """Return a table with a row for each trial and a column for each swept setting."""
    keys = list(dict.fromkeys(key_of(text) for outcome in outcomes for text in outcome.swept))
    names = ("rank", "trial", "objective", "steps", "tokens/s", "samples/s", "time")
    rows: list[Sequence[str]] = [(*names, *keys, "status")]
    for rank, outcome in enumerate(ranked(outcomes), 1):
        values = {key_of(text): text.partition("=")[2] for text in outcome.swept}
        rows.append(
            (
                NO_VALUE if outcome.objective is None else str(rank),
                str(outcome.number),
                format_or(outcome.objective, "{:.4f}".format) or NO_VALUE,
                format_integer(outcome.steps) or NO_VALUE,
                format_or(outcome.tokens_per_second, format_count) or NO_VALUE,
                format_or(outcome.samples_per_second, format_count) or NO_VALUE,
                format_or(outcome.seconds or None, format_duration) or NO_VALUE,
                *(values.get(key, NO_VALUE) for key in keys),
                f"{outcome.status} ({outcome.exit_code})" if outcome.status == FAILED else outcome.status,
            )
        )
    return align_columns(rows, gap=2)


# ---- trial process


_PR_SET_PDEATHSIG = 1
_MAX_REASON_LINES = 12
_STEP_PREFIX = "step "


class TrialProcess:
    """A process `finetune train` that prints to a file: a pipe would break when the sweep is killed."""

    def __init__(self, overrides: Sequence[str], environment: Mapping[str, str], printed: Path) -> None:
        with report_write_errors(printed):
            file = printed.open("ab")
        with file:
            self._process = Popen(
                [sys.executable, "-m", "app.train", *overrides],
                stdin=DEVNULL,
                stdout=file,
                stderr=STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches only the sweep, which passes it on once
                preexec_fn=_terminate_with_parent(),  # noqa: PLW1509 (a sweep has no threads)
            )

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, negative for a signal; None if the process still runs after `seconds`."""
        try:
            return self._process.wait(seconds)
        except TimeoutExpired:
            return None

    def request_stop(self, exit_code: int) -> None:
        """Request a checkpoint and this exit code, by SIGINT like a terminal or SIGTERM like a scheduler."""
        if exit_code == CTRL_C:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGINT)
        else:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> int:
        """Kill the process and all its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


def cpu_share(seconds: float) -> float:
    """Return the share of CPU time that programs use during the next `seconds`, without this one, which waits."""
    before = _cpu_ticks()
    time.sleep(seconds)
    busy, idle = (now - then for now, then in zip(_cpu_ticks(), before, strict=True))
    return round(busy / max(busy + idle, 1), 3)


def _cpu_ticks() -> tuple[int, int]:
    """Return the time that all cores were busy and idle."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system, idle, waiting, *interrupts = map(int, words[1:9])  # the rest are parts of `user`
    return user + nice + system + sum(interrupts), idle + waiting


class TrialLog:
    """Output file of a trial, read from its current end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin = self._seen = path.stat().st_size if path.exists() else 0
        self._latest = "starting"

    def text(self) -> str:
        return self._since(self._begin).decode("utf-8", "replace")

    def latest(self) -> str:
        """Return the newest line of a step, or the newest line before the first step."""
        whole, newline, _ = self._since(self._seen).rpartition(b"\n")
        self._seen += len(whole) + len(newline)
        lines = whole.decode("utf-8", "replace").splitlines()
        steps = [line for line in lines if line.startswith(_STEP_PREFIX)]
        if steps or (lines and not self._latest.startswith(_STEP_PREFIX)):
            self._latest = (steps or lines)[-1]
        return self._latest

    def _since(self, place: int) -> bytes:
        if not self.path.exists():
            return b""
        with self.path.open("rb") as file:
            file.seek(place)
            return file.read()


def reason(exit_code: int, text: str) -> str:
    """Return the reason why a trial failed, in a few lines."""
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"killed by {name}" + (": out of memory?" if name == "SIGKILL" else "")
    lines = text.rstrip().splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if errors:
        return "\n".join(lines[errors[-1] :][:_MAX_REASON_LINES])
    return lines[-1] if lines else "no output"


def _terminate_with_parent() -> Callable[[], None]:
    """Return a function for the forked child that requests SIGTERM when this process ends or is killed."""
    libc, sweep = ctypes.CDLL(None), os.getpid()

    def ask_the_kernel() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != sweep:  # the parent ended before the request
            os._exit(1)

    return ask_the_kernel
