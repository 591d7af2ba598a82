"""Runs of a folder by name: their status and metrics, and the processes that the board started."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.config.commands import CHECKS
from app.config.overrides import key_of, untrusted_problems, values_in
from app.config.validate import STARTS_PROCESSES
from app.errors import AppError, ConfigError, refuse
from app.files import is_own_file, report_write_errors
from app.pages.read_run import RUNNING, UNFINISHED, is_run, read_sweep, status_in
from app.pages.run_page import status_badge
from app.program import TARGETS, as_started, command_text
from app.tracking.output_dir import RunFolder, lock_owner
from app.tracking.recorder import read_result
from app.web.form import check_settings, is_sweep
from app.web.rows import run_row, sweep_row, trial_row, would_fail_again
from app.web.uploads import UPLOADS

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


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)


def _has_address(folder: Path) -> bool:
    """Return whether the name can be part of an address; names in a file system may be any bytes."""
    return folder.is_dir() and folder.name.isprintable()


def _settings_in(sweep: Mapping[str, Any]) -> list[str]:
    """Return the settings in the content of a sweep.json, which anyone may have written."""
    typed = sweep.get("command")
    words = [str(word) for word in typed[2:] if word not in ("-m", "--multirun")] if isinstance(typed, list) else []
    options = [f"{word}: only settings are accepted from sweep.json." for word in words if word.startswith("-")]
    refuse([*options, *untrusted_problems(values_in(words), "sweep.json", allowed=(STARTS_PROCESSES,))])
    return [word for word in words if key_of(word) not in TARGETS]


class Runs:
    """Folders with a run or a sweep, and those that the board started, by name; SWEEP/TRIAL is a trial."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._swept: dict[str, Sequence[str]] = {}  # settings of the sweeps among them
        self._stopping: set[str] = set()
        self._earlier: dict[str, dict[str, Any]] = {}  # results of the runs that these processes resume

    def folders(self) -> dict[str, Path]:
        """Return the folders of runs by name; the folder of a run that did not start does not exist."""
        paths = [path for path in self._subfolders() if is_run(path)]
        paths += [self.folder / name for name in list(self._processes) if name not in self._swept]
        trials = {f"{name}/{path.name}": path for name in self.sweeps() for path in self._trials(name)}
        return {path.name: path for path in paths} | trials

    def sweeps(self) -> dict[str, tuple[Path, dict[str, Any]]]:
        """Return the folder and the content of sweep.json by name; empty content if the sweep did not start."""
        contents = {path.name: read_sweep(path) for path in self._subfolders()}
        started = {name: contents.get(name) or {} for name in list(self._swept)}
        read = {name: content for name, content in contents.items() if content}
        return {name: (self.folder / name, content) for name, content in (read | started).items()}

    def _subfolders(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if _has_address(path) and path.name != UPLOADS]

    def _trials(self, sweep: str) -> list[Path]:
        folder = self.folder / sweep
        return [path for path in folder.iterdir() if _has_address(path) and is_run(path)] if folder.is_dir() else []

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the list, the newest first; trials are on the page of their sweep."""
        sweeps = self.sweeps()
        names = [name for name in self.folders() if "/" not in name and name not in sweeps]
        rows = [self.row(name) for name in names] + [self.sweep_row(name, sweeps[name][1]) for name in sweeps]
        return sorted(rows, key=lambda row: (-row["time"], row["name"]))

    def row(self, name: str) -> dict[str, Any]:
        """Return the facts of a run in the list; `stamp` changes with its files."""
        folder, status = self.folder / name, self._status(name)
        files = RunFolder(folder)
        stats = [file.stat() for file in (files.metrics, files.samples, files.manifest, files.result) if file.is_file()]
        stamp = f"{status} {[stat.st_mtime_ns for stat in stats]}"
        return {
            **self._head(name, status, files.run_yaml),
            "stamp": stamp,
            **run_row(folder, stamp, is_running=status in (RUNNING, STOPPING)),
        }

    def sweep_row(self, name: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the facts of a sweep in the list; `stamp` changes with its content."""
        columns = sweep_row(content)
        status = self._sweep_status(name, content, columns["status"])
        head = self._head(name, status, self.folder / name / "sweep.json")
        return {**head, "is_sweep": True, **columns, "stamp": f"{status} {head['time']}"}

    def _head(self, name: str, status: str, file: Path) -> dict[str, Any]:
        """Return the facts that runs and sweeps share; `file` has the time of the row."""
        badge = (status, _COLORS[status]) if status in _COLORS else status_badge(status)
        time = file.stat().st_mtime if file.is_file() else float("inf")
        return {"name": name, "badge": badge, "action": self._action(name, status), "time": time, "is_sweep": False}

    def trial_rows(self, name: str, content: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the rows of the trials of a sweep, each with the name of its run if it has started."""
        runs = {path.name for path in self._trials(name)}
        places = [(trial, f"{name}/{Path(trial['folder']).name}") for trial in content.get("trials", [])]
        pending = {"name": None, "progress": None, "speed": None, "memory": None, "duration": None}
        return [
            trial_row(trial, self.row(place))
            if place.rpartition("/")[2] in runs
            else trial_row(trial, {**pending, "badge": status_badge(trial["status"])})
            for trial, place in places
        ]

    def _status(self, name: str) -> str:
        folder, result = self.folder / name, read_result(self.folder / name)
        if self._is_alive(name):
            is_early = not is_run(folder) or (bool(result) and result == self._earlier[name])
            return STOPPING if name in self._stopping else STARTING if is_early else RUNNING
        return status_in(folder, result and {"status": UNFINISHED, **result}) if is_run(folder) else NOT_STARTED

    def _sweep_status(self, name: str, content: Mapping[str, Any], ended: str) -> str:
        if self._is_alive(name):
            return STOPPING if name in self._stopping else RUNNING if content else STARTING
        if not content:
            return NOT_STARTED
        return RUNNING if lock_owner(self.folder / name) else ended

    def _action(self, name: str, status: str) -> str | None:
        """Return what can be done with a run, if it helps; a trial is stopped and resumed by its sweep."""
        action = _ACTIONS.get(status)
        is_useless = action == "resume" and would_fail_again(read_result(self.folder / name))
        return None if is_useless or "/" in name else action

    def _is_alive(self, name: str) -> bool:
        return name in self._processes and self._processes[name].poll() is None

    def log(self, name: str) -> str:
        """Return the end of the output of the last process of a run."""
        file = self._log(name)
        return file.read_bytes()[-8000:].decode(errors="replace") if is_own_file(file) else ""

    def _log(self, name: str) -> Path:
        return self.folder / (f"{name}.txt" if "/" in name else f"{name}.board.log")

    def taken_names(self) -> set[str]:
        """Return the names that a new run cannot have."""
        return {path.name for path in self.folder.iterdir()} | {
            name for name in self._processes if self._is_alive(name)
        }

    def check(self, settings: Sequence[str], what: str, name: str) -> int:
        """Return the number of runs; raise an error for invalid settings or an invalid or existing run name."""
        problems, count = list[str](), 0
        if what not in CHECKS and (not _NAME.fullmatch(name) or name == UPLOADS or name in self.taken_names()):
            problems.append(f"name={name}: set a new name of letters, digits, dots, dashes and underscores.")
        try:
            count = check_settings(settings, what)
        except AppError as error:
            problems += error.problems
        refuse(problems)
        return count

    def command(self, name: str, settings: Sequence[str] | None = None) -> list[str]:
        """Return the command that starts a run or a sweep with settings, or resumes it."""
        folder, swept = self.folder / name, self._swept_settings(name, settings)
        if swept is not None:
            return command("train", "-m", *swept, f"output_dir={folder}")
        again = (f"from={folder}", f"output_dir={folder}", "resume=auto")
        return command("train", *(again if settings is None else (*settings, f"output_dir={folder}")))

    def _swept_settings(self, name: str, settings: Sequence[str] | None) -> Sequence[str] | None:
        """Return the settings if they are of a sweep, which are those of its first start; None for a run."""
        if settings is not None:
            return settings if is_sweep(settings) else None
        if name in self._swept:
            return self._swept[name]
        sweeps = self.sweeps()
        return _settings_in(sweeps[name][1]) if name in sweeps else None

    def start(self, name: str, settings: Sequence[str] | None = None) -> None:
        """Start a run or a sweep with settings that `check` has accepted, or resume it."""
        if settings is not None and self._is_alive(name):
            raise ConfigError(f"name={name}: this run is already started. See the list of runs.")
        if settings is None and self._row_of_any(name)["action"] != "resume":
            raise ConfigError(f"{name}: only a stopped, killed or failed run can be resumed.")
        words, swept = self.command(name, settings), self._swept_settings(name, settings)
        self._stopping.discard(name)
        self._earlier[name] = read_result(self.folder / name)
        file, mode = self._log(name), "ab" if settings is None else "wb"
        with report_write_errors(file), open(file, mode, opener=_without_links) as log:
            self._swept.pop(name, None)
            if swept is not None:
                self._swept[name] = swept
            self._processes[name] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _row_of_any(self, name: str) -> dict[str, Any]:
        sweeps = self.sweeps()
        return self.sweep_row(name, sweeps[name][1]) if name in sweeps else self.row(name)

    def stop(self, name: str) -> None:
        """Signal a run or a sweep that the board started to save and stop."""
        if not self._is_alive(name):
            owner = lock_owner(self.folder / name) or "nothing"
            raise ConfigError(f"{name}: not started by this board; running: {owner}. Stop it with kill -TERM.")
        self._stopping.add(name)
        self._processes[name].terminate()

    def stop_command(self, name: str) -> str:
        """Return the command that stops a run of the board; empty if it is not running."""
        return f"kill -TERM {self._processes[name].pid}" if self._is_alive(name) else ""
