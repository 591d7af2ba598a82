"""What result.json says, as far as the metrics tell it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.record.metrics import finite_or_none

STATUSES = ("finished", "stopped", "failed", "dry_run")
RESULT_KEYS = (
    "objective",
    "steps",
    "train_loss_first",
    "train_loss_last",
    "eval_loss",
    "exact_match",
    "tokens_per_second",
    "peak_memory_bytes",
    "memory_predicted_bytes",
    "memory_measured_bytes",
    "final",
)


_OF_CLASSES = ("accuracy", "macro_f1")  # only there where labels are learnt


class Summary:
    """Follows the lines of metrics.jsonl."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def see(self, values: Mapping[str, Any]) -> None:
        """One line, in the order in which they were written."""
        if "loss" in values:
            self._known.setdefault("train_loss_first", values["loss"])
            self._known["train_loss_last"] = values["loss"]
            self._known["steps"] = values["step"]
        for key in ("eval_loss", "exact_match", *_OF_CLASSES, "tokens_per_second", "peak_memory_bytes"):
            if key in values:
                self._known[key] = values[key]

    def result(self, status: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Every key, null where nothing is known; what the caller gives goes before what the lines told."""
        assert status in STATUSES, status
        assert given.keys() <= {*RESULT_KEYS, "error"}, given.keys()
        values = {**dict.fromkeys(RESULT_KEYS), **self._known, **given}
        return {"status": status, **{key: finite_or_none(value) for key, value in values.items()}}


def read_result(output_dir: str | Path) -> dict[str, Any]:
    """What result.json of a run says; nothing while it runs, and where there is none."""
    try:
        values = json.loads((Path(output_dir).expanduser() / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
