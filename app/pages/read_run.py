"""Read the folders of runs and sweeps, in which any file may be missing, for example after a kill.

Links are treated as missing files: a link in a received folder may point to a private file, and pages are shared.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from app.config.conf_files import read_yaml
from app.files import is_own_file, read_json, read_object
from app.safe_text import redact
from app.tracking.formatting import finite_number
from app.tracking.output_dir import RunFolder, lock_owner, read_lines
from app.tracking.recorder import read_result

UNFINISHED, RUNNING = "unfinished", "running"
_STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d)  ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SavedRun:
    """Content of the files of a run; `remarks` are about unreadable files."""

    folder: Path
    status: str
    result: Mapping[str, Any]
    manifest: Mapping[str, Any]
    settings: Mapping[str, Any]
    settings_text: str
    lines: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    preview: Mapping[str, Any]
    scores: list[dict[str, Any]]  # of finetune evaluate, evaluate.json first
    message_times: list[datetime]  # in log.txt
    remarks: list[str]

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def starts(self) -> list[Mapping[str, Any]]:
        """Starts of the run, in order."""
        starts: list[Mapping[str, Any]] = self.manifest.get("starts", [])
        return starts

    @property
    def memory_owner(self) -> str:
        """Owner of the memory in peak_memory_bytes: process or GPU."""
        return "process" if section_of(self.manifest, "choices").get("device") == "cpu" else "GPU"

    def seconds(self) -> float | None:
        """Return the total time from each start to the last message before the next start."""
        starts = [datetime.fromisoformat(entry["time"]) for entry in self.starts]
        if not starts:
            return None
        total = 0.0
        for start, after in zip(starts, [*starts[1:], datetime.max.replace(tzinfo=UTC)], strict=True):
            last = max((time for time in self.message_times if start <= time < after), default=start)
            total += (last - start).total_seconds()
        return total or None

    def points(self, key: str) -> list[tuple[float, float | None]]:
        """Return the logged values of a metric by step."""
        points = [(float(line["step"]), finite_number(line[key])) for line in self.lines if key in line]
        return sorted(points, key=lambda point: point[0])


def section_of(values: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """Return the mapping at a path of keys; empty if there is none."""
    for name in path:
        values = values.get(name) or {}
    return values


def is_run(folder: Path) -> bool:
    """Return whether the folder has any file of a run."""
    files = RunFolder(folder)
    return any(is_own_file(file) for file in (files.run_yaml, files.manifest, files.metrics, files.result))


def status_in(folder: Path, result: Mapping[str, Any]) -> str:
    """Return the status of a run; without result.json it is running or was killed."""
    return str(result["status"]) if result else RUNNING if lock_owner(folder) else UNFINISHED


def read_run(folder: Path) -> SavedRun:
    """Read the run in a folder for which `is_run` is true."""
    files, links = RunFolder(folder), sorted(path.name for path in folder.iterdir() if path.is_symlink())
    remarks = [f"{name} is a link and was not followed." for name in links]
    result = read_result(folder)
    return SavedRun(
        folder=folder,
        status=status_in(folder, result),
        result=result,
        manifest=_mapping(files.manifest, remarks),
        settings=_mapping(files.run_yaml, remarks),
        settings_text=_text(files.run_yaml),
        lines=_lines(files.metrics),
        samples=redact(_lines(files.samples)),
        preview=redact(_mapping(files.preview, remarks)),
        scores=[_mapping(file, remarks) for file in sorted(folder.glob("evaluate*.json"), key=lambda file: file.stem)],
        message_times=[datetime.fromisoformat(stamp) for stamp in _STAMP.findall(_text(files.log))],
        remarks=remarks,
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if is_own_file(path) else ""


def _mapping(path: Path, remarks: list[str]) -> dict[str, Any]:
    """Return the content of a YAML or JSON file; empty, with a remark, if it cannot be read."""
    read = read_json if path.suffix == ".json" else read_yaml
    try:
        values = read(path) if is_own_file(path) and path.stat().st_size else {}
    except (ValueError, yaml.YAMLError):
        values = None
    if isinstance(values, dict):
        return values
    remarks.append(f"{path.name} cannot be read; its content is missing here.")
    return {}


def _lines(path: Path) -> list[dict[str, Any]]:
    return list(read_lines(path)) if is_own_file(path) else []


def read_sweep(folder: Path) -> dict[str, Any] | None:
    """Return the content of sweep.json; None if it cannot be read."""
    file = folder / "sweep.json"
    values = read_object(file) if is_own_file(file) else {}
    return values if "trials" in values else None
