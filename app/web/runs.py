"""Runs of a folder by name: their status and metrics, and the processes that the board started."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from app.config.commands import CHECKS, check_config
from app.config.load import compose_run
from app.config.overrides import key_of, split_arguments, untrusted_problems, values_in
from app.config.validate import STARTS_PROCESSES
from app.errors import AppError, ConfigError, refuse
from app.files import is_own_file, report_write_errors
from app.pages.read_run import RUNNING, UNFINISHED, is_run, read_sweep, status_in
from app.pages.run_page import status_badge
from app.program import as_started, command_text
from app.tracking.formatting import format_count, format_integer, format_number, format_or
from app.tracking.output_dir import RunFolder, lock_owner, read_lines
from app.tracking.recorder import read_result

STARTING, STOPPING, NOT_STARTED = "starting", "stopping", "did not start"
_ACTIONS = {STARTING: "stop", RUNNING: "stop", "stopped": "resume", UNFINISHED: "resume", "failed": "resume"}
_COLORS = {STARTING: "busy", STOPPING: "busy", NOT_STARTED: "bad"}
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)


def command(name: str, *words: str) -> list[str]:
    """Return a command of this program for a child process."""
    return [sys.executable, "-m", f"app.{name}", *words]


def shown(words: Sequence[str]) -> str:
    """Return the command as the user types it."""
    return as_started(command_text(words[2].removeprefix("app."), *words[3:]))


@lru_cache(maxsize=1000)
def _last_values(metrics: Path, _stamp: str) -> dict[str, Any]:
    """Return the last value of each metric; `_stamp` invalidates the cache."""
    return {key: value for line in read_lines(metrics) for key, value in line.items()} if is_own_file(metrics) else {}


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)


def _has_address(folder: Path) -> bool:
    """Return whether the name can be part of an address; names in a file system may be any bytes."""
    return folder.is_dir() and folder.name.isprintable()


class Runs:
    """Folders with a run, and runs that the board started, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stopping: set[str] = set()
        self._earlier: dict[str, dict[str, Any]] = {}  # results of the runs that these processes resume
        self._composing = Lock()  # Hydra composes one configuration at a time

    def folders(self) -> dict[str, Path]:
        """Return the folders by name, newest first; the folder of a run that did not start does not exist."""
        runs = {path.name: path for path in self.folder.iterdir() if _has_address(path) and is_run(path)}
        runs |= {name: self.folder / name for name in list(self._processes)}
        times = {name: file.stat().st_mtime for name, path in runs.items() if (file := path / "run.yaml").is_file()}
        return {name: runs[name] for name in sorted(runs, key=lambda name: (-times.get(name, float("inf")), name))}

    def sweeps(self) -> dict[str, tuple[Path, dict[str, Any]]]:
        """Return the folder and the content of sweep.json by name."""
        folders = [file.parent for file in sorted(self.folder.glob("*/sweep.json")) if _has_address(file.parent)]
        return {folder.name: (folder, content) for folder in folders if (content := read_sweep(folder))}

    def row(self, name: str) -> dict[str, Any]:
        """Return the facts of a run in the list; `stamp` changes with its files."""
        status, files = self._status(name), RunFolder(self.folder / name)
        stats = [file.stat() for file in (files.metrics, files.samples, files.manifest, files.result) if file.is_file()]
        stamp = f"{status} {[stat.st_mtime_ns for stat in stats]}"
        last = _last_values(files.metrics, stamp)
        return {
            "name": name,
            "badge": (status, _COLORS[status]) if status in _COLORS else status_badge(status),
            "step": format_integer(last.get("step")),
            "losses": [format_or(last.get(key), format_number) for key in ("loss", "eval_loss")],
            "speed": format_or(last.get("tokens_per_second"), format_count),
            "action": _ACTIONS.get(status),
            "stamp": stamp,
        }

    def _status(self, name: str) -> str:
        folder, result = self.folder / name, read_result(self.folder / name)
        if self._is_alive(name):
            is_early = not is_run(folder) or (bool(result) and result == self._earlier[name])
            return STOPPING if name in self._stopping else STARTING if is_early else RUNNING
        return status_in(folder, result and {"status": UNFINISHED, **result}) if is_run(folder) else NOT_STARTED

    def _is_alive(self, name: str) -> bool:
        return name in self._processes and self._processes[name].poll() is None

    def log(self, name: str) -> str:
        """Return the end of the output of the last process of a run."""
        file = self._log(name)
        return file.read_bytes()[-8000:].decode(errors="replace") if is_own_file(file) else ""

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.board.log"

    def check(self, settings: Sequence[str], what: str, name: str) -> None:
        """Raise an error for invalid settings, as the command line does, or an invalid or existing run name."""
        problems = [f"{text}: set by the run name. Leave it out." for text in settings if key_of(text) == "output_dir"]
        words = [text for text in settings if not text.startswith("-")]
        problems += untrusted_problems(values_in(words), "the form", allowed=(STARTS_PROCESSES,))
        is_taken = name in self.folders() and self._status(name) != NOT_STARTED
        if what not in CHECKS and (is_taken or not _NAME.fullmatch(name)):
            problems.append(f"name={name}: set a new name of letters, digits, dots, dashes and underscores.")
        try:
            with self._composing:
                if what in CHECKS:
                    check_config([what, *settings])
                else:
                    overrides, switches = split_arguments(settings)
                    refuse(f"{word}: the form accepts only settings. Leave it out." for word in switches)
                    compose_run(overrides)
        except AppError as error:
            problems += error.problems
        refuse(problems)

    def command(self, name: str, settings: Sequence[str] | None = None) -> list[str]:
        """Return the command that starts a run with settings, or resumes it."""
        folder = self.folder / name
        again = (f"from={folder}", f"output_dir={folder}", "resume=auto")
        return command("train", *(again if settings is None else (*settings, f"output_dir={folder}")))

    def start(self, name: str, settings: Sequence[str] | None = None) -> None:
        """Start a run with settings that `check` has accepted, or resume it."""
        if settings is not None and self._is_alive(name):
            raise ConfigError(f"name={name}: this run is already started. See the list of runs.")
        if settings is None and _ACTIONS.get(self._status(name)) != "resume":
            raise ConfigError(f"{name}: only a stopped, killed or failed run can be resumed.")
        self._stopping.discard(name)
        self._earlier[name] = read_result(self.folder / name)
        file, mode = self._log(name), "ab" if settings is None else "wb"
        with report_write_errors(file), open(file, mode, opener=_without_links) as log:
            self._processes[name] = subprocess.Popen(
                self.command(name, settings), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def stop(self, name: str) -> None:
        """Signal a run that the board started to save and stop."""
        if not self._is_alive(name):
            owner = lock_owner(self.folder / name) or "nothing"
            raise ConfigError(f"{name}: not started by this board; running: {owner}. Stop it with kill -TERM.")
        self._stopping.add(name)
        self._processes[name].terminate()

    def stop_command(self, name: str) -> str:
        """Return the command that stops a run of the board; empty if it is not running."""
        return f"kill -TERM {self._processes[name].pid}" if self._is_alive(name) else ""
