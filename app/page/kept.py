"""What the folder of a run keeps, read without trust: any file may be absent, half written or torn."""

import json
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from app.page.figures import number
from app.record.masking import masked
from app.record.metrics import read_lines
from app.record.output_dir import RunFolder, user_of
from app.record.recorder import STATUSES, read_result

UNFINISHED, RUNNING = "unfinished", "running"
_STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d)  ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class KeptRun:
    """`remarks` are about files that could not be read as they should."""

    folder: Path
    status: str
    result: Mapping[str, Any]
    manifest: Mapping[str, Any]
    settings: Mapping[str, Any]
    settings_text: str
    lines: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    preview: Mapping[str, Any]
    scores: Mapping[str, Any]
    spoken: list[datetime] = field(default_factory=list)  # when each message of log.txt was written
    remarks: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.folder.resolve().name

    @property
    def starts(self) -> list[Mapping[str, Any]]:
        """One for each time that it was started, in their order."""
        return [each for each in _list(self.manifest.get("starts")) if isinstance(each, dict)]

    def seconds(self) -> float | None:
        """From each start to the last word before the next one; what lay between is not in it."""
        begun = [time for each in self.starts if (time := _time(each.get("time")))]
        if not begun or not self.spoken:
            return None
        total = 0.0
        for start, after in zip(begun, [*begun[1:], None], strict=True):
            at = len(self.spoken) if after is None else bisect_left(self.spoken, after)
            last = self.spoken[at - 1] if at else start
            total += max((last - start).total_seconds(), 0.0)
        return total

    def points(self, key: str) -> list[tuple[float, float | None]]:
        """What was logged under a name, by step."""
        found = [(float(line["step"]), number(line[key])) for line in self.lines if key in line]
        return sorted(found, key=lambda point: point[0])


def section_of(values: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """The mapping that lies there; an empty one where none does."""
    for name in path:
        inner = values.get(name)
        values = inner if isinstance(inner, Mapping) else {}
    return values


def is_run(folder: Path) -> bool:
    """Whether there is anything of a run in it."""
    own = RunFolder(folder)
    return any(file.is_file() for file in (own.run_yaml, own.manifest, own.metrics, own.result))


def read_kept(folder: Path) -> KeptRun:
    """Of a folder that `is_run`."""
    own, remarks = RunFolder(folder), list[str]()
    result = read_result(folder)
    if own.result.is_file() and not result:
        remarks.append("result.json cannot be read: how the run ended is not known.")
    settings_text, settings = _settings(own.run_yaml, remarks)
    return KeptRun(
        folder=folder,
        status=_status(folder, result),
        result=result,
        manifest=_mapping(own.manifest, remarks),
        settings=settings,
        settings_text=settings_text,
        lines=[
            numbers
            for line in _lines(own.metrics, remarks)
            if (numbers := _numbers(line))["step"] is not None
        ],
        samples=masked(_lines(own.samples, remarks)),
        preview=masked(_mapping(own.preview, remarks)),
        scores=_mapping(folder / "evaluate.json", remarks),
        spoken=_spoken(own.log),
        remarks=remarks,
    )


def _status(folder: Path, result: Mapping[str, Any]) -> str:
    """As result.json has it; without one it is at work, or was killed."""
    if result.get("status") in STATUSES:
        return str(result["status"])
    return RUNNING if user_of(folder) else UNFINISHED


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _mapping(path: Path, remarks: list[str]) -> dict[str, Any]:
    text = _text(path)
    try:
        values = json.loads(text) if text else {}
    except ValueError:
        values = None
    if isinstance(values, dict):
        return values
    remarks.append(f"{path.name} cannot be read; what it would tell is missing here.")
    return {}


def _lines(path: Path, remarks: list[str]) -> list[dict[str, Any]]:
    """What is whole; the rest is counted."""
    if not path.is_file():
        return []
    whole = list(read_lines(path))
    content = path.read_bytes()
    count = content.count(b"\n") + bool(content and not content.endswith(b"\n"))
    if count > len(whole):
        lost = count - len(whole)
        are = "line is" if lost == 1 else "lines are"
        remarks.append(f"{path.name}: {lost:,} {are} torn or unreadable and left out.")
    return whole


def _numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    """As a line of metrics is: numbers, or none."""
    return {key: None if number(value) is None else value for key, value in line.items()}


def _settings(path: Path, remarks: list[str]) -> tuple[str, dict[str, Any]]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    text = _text(path)
    try:
        values = OmegaConf.to_container(OmegaConf.create(text or "{}"))
    except (YAMLError, OmegaConfBaseException, ValueError):
        values = None
    if isinstance(values, dict):
        return text, {str(key): value for key, value in values.items()}
    remarks.append("run.yaml cannot be read as settings; it is shown as it is.")
    return text, {}


def _spoken(log: Path) -> list[datetime]:
    return sorted(datetime.fromisoformat(stamp) for stamp in _STAMP.findall(_text(log)))


def _time(text: Any) -> datetime | None:
    try:
        time = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return time if time.tzinfo else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
