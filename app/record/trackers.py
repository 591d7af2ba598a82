"""Where metrics go besides metrics.jsonl. A package is imported only when its tracker was chosen."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from app.config.schema import TrackerConfig
from app.record.folder import RunFolder
from app.record.tracker import NoTracker, Tracker
from app.record.wandb_login import can_log_in


@dataclass(frozen=True, slots=True)
class TrackerKind:
    """How it is opened (for a run as plain data), and what keeps it from being opened here."""

    open: Callable[[TrackerConfig, RunFolder, Mapping[str, Any]], Tracker]
    check: Callable[[], list[str]]


def check(config: TrackerConfig) -> list[str]:
    """What is missing, and what to type."""
    return TRACKERS[config.kind].check()


def open_tracker(config: TrackerConfig, folder: RunFolder, run: Mapping[str, Any]) -> Tracker:
    """Of the kind that was chosen. `run` has no secrets any more."""
    return TRACKERS[config.kind].open(config, folder, run)


def _open_none(_config: TrackerConfig, _folder: RunFolder, _run: Mapping[str, Any]) -> Tracker:
    return NoTracker()


def _open_wandb(config: TrackerConfig, folder: RunFolder, run: Mapping[str, Any]) -> Tracker:
    from app.record.wandb_run import WandbRun

    return WandbRun(config, folder, run)


def _open_tensorboard(_config: TrackerConfig, folder: RunFolder, _run: Mapping[str, Any]) -> Tracker:
    from app.record.event_file import EventFile

    return EventFile(folder)


def _check_wandb() -> list[str]:
    if find_spec("wandb") is None:
        return [
            "tracker=wandb needs the package wandb, which is not installed: "
            "pip install wandb, or choose tracker=none"
        ]
    if not can_log_in(os.environ):
        return [
            "tracker=wandb: no login was found; type `wandb login` or set WANDB_API_KEY, "
            "set WANDB_MODE=offline to record without an account, or choose tracker=none"
        ]
    return []


def _check_tensorboard() -> list[str]:
    if find_spec("tensorboard") is None:
        return [
            "tracker=tensorboard needs the package tensorboard, which is not installed: "
            "pip install tensorboard, or choose tracker=none"
        ]
    return []


TRACKERS: dict[str, TrackerKind] = {
    "none": TrackerKind(_open_none, list),
    "wandb": TrackerKind(_open_wandb, _check_wandb),
    "tensorboard": TrackerKind(_open_tensorboard, _check_tensorboard),
}
