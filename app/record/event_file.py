"""TensorBoard's event files, written with its own record format; neither tensorflow nor torch is imported."""

import math
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from app.record.files import writing
from app.record.folder import RunFolder


class EventFile:
    """One file per start in output_dir/tensorboard; TensorBoard reads them as one run."""

    def __init__(self, folder: RunFolder) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._events, self._summaries = event_pb2, summary_pb2
        self._folder = folder.path / "tensorboard"
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.0"
        with writing(self._folder):
            self._folder.mkdir(exist_ok=True)
            self._writer = RecordWriter((self._folder / name).open("wb"))
        self._write(file_version="brain.Event:2")

    @property
    def place(self) -> str | None:
        """The command that shows it."""
        return f"tensorboard --logdir {self._folder}"

    def log(self, values: Mapping[str, Any], /) -> None:
        """Everything that is a number."""
        numbers = {
            key: float(value)
            for key, value in values.items()
            if isinstance(value, int | float) and key != "step" and not math.isnan(value)
        }
        scalars = [
            self._summaries.Summary.Value(tag=key, simple_value=number) for key, number in numbers.items()
        ]
        self._write(step=values["step"], summary=self._summaries.Summary(value=scalars))

    def rewind(self, step: int, /) -> None:
        """TensorBoard drops what it has read from `step + 1` on."""
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(step=step + 1, session_log=start)

    def close(self, _status: str, /) -> None:
        """The status is in result.json."""
        self._writer.close()

    def _write(self, **content: Any) -> None:
        with writing(self._folder):
            self._writer.write(self._events.Event(wall_time=time.time(), **content).SerializeToString())
            self._writer.flush()
