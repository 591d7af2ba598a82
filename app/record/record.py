"""Everything that a run writes besides weights, in one hand."""

import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from omegaconf import OmegaConf

from app.config.schema import TrackerConfig
from app.errors import AppError, Unfinished
from app.record.console import Console
from app.record.files import append_text, sync, write_json, write_text, writing
from app.record.folder import RunFolder
from app.record.lines import Sample, aligned, evaluation_line, samples_text, step_line
from app.record.manifest import Manifest
from app.record.masking import masked, masked_text
from app.record.metrics import StepLines
from app.record.summary import Summary
from app.record.terminal import open_console
from app.record.tracker import NoTracker, Tracker, TrackerError
from app.record.trackers import open_tracker


class Record:
    """A context: a run that leaves it by an exception has written how it failed."""

    def __init__(self, folder: RunFolder, manifest: Manifest, tracker: Tracker, console: Console) -> None:
        self.folder = folder
        self._manifest = manifest
        self._tracker = tracker
        self._console = console
        self._metrics = StepLines(folder.metrics)
        self._samples = StepLines(folder.samples)
        self._summary = Summary()
        self._total: int | None = None
        self._finished = False

    @classmethod
    def open(
        cls,
        folder: RunFolder,
        tracker_config: TrackerConfig,
        run: Mapping[str, Any],
        manifest_facts: Mapping[str, Any],
        console: Console | None = None,
    ) -> "Record":
        """The files of a start. `run` is the resolved configuration as plain data, `folder` was claimed."""
        safe_run = masked(run)
        tracker = open_tracker(tracker_config, folder, safe_run)
        with writing(folder.result):
            folder.result.unlink(missing_ok=True)  # that of an earlier start: this one has not ended
        write_text(folder.run_yaml, OmegaConf.to_yaml(OmegaConf.create(safe_run)))
        record = cls(folder, Manifest(folder.manifest), tracker, console or open_console())
        record.add_facts(**manifest_facts)
        if tracker.place:
            record.message(f"tracker: {tracker.place}")
        return record

    def add_facts(self, **facts: Any) -> None:
        """What is known only by now, into the manifest."""
        self._manifest.add(facts)

    def preview(self, rows: Mapping[str, Any]) -> None:
        """What is trained of a few rows; for people, so a run does not depend on it."""
        write_json(self.folder.preview, masked(rows))

    def begin(self, total: int, done: int = 0) -> None:
        """The run has `total` steps, `done` of them before this start: from now on progress is shown."""
        self._total = total
        self._console.begin(total, done)

    def rewind(self, step: int) -> None:
        """Take back what was written after `step`: that of the checkpoint, -1 where there is none."""
        for values in self._metrics.rewind(step):
            self._summary.see(values)
        self._samples.rewind(step)
        self._tracker.rewind(step)

    def message(self, text: str) -> None:
        """To the screen and to log.txt."""
        safe = masked_text(text)
        self._console.say(safe)
        self._write_log(safe)

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Names and values in two columns, as the run starts with."""
        self.message(aligned(rows))

    def step(self, values: Mapping[str, float | int | None], seconds_left: float | None = None) -> None:
        """The numbers of one step; metrics.jsonl keeps their order. How long the rest takes is for the screen."""
        self._metrics.write(values)
        self._summary.see(values)
        self._console.step(values, seconds_left)
        self._write_log(step_line(values, self._total, None))
        self._track(values)

    def evaluation(self, values: Mapping[str, float | int | None]) -> None:
        """The numbers of one evaluation: `step`, `eval_loss` and what else there is."""
        self._metrics.write(values)
        self._summary.see(values)
        self.message(evaluation_line(values))
        self._track(values)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """What the model answers by now. On the screen only between: the table of both ends has the rest."""
        for each in samples:
            known = {key: value for key, value in asdict(each).items() if value is not None}
            self._samples.write({"step": step, **known})
        if samples:
            self._write_log(samples_text(step, samples))
        if samples and step not in {0, self._total}:
            self._console.samples(step, samples)

    def sync(self) -> None:
        """Onto the disk; before a checkpoint says that these lines exist."""
        sync(self.folder.metrics)
        sync(self.folder.samples)

    def finish(self, status: str, **result: Any) -> None:
        """How it ended. What `result` leaves out is taken from the metrics, else null."""
        outcome = masked(self._summary.result(status, result))
        self._finished = True
        with ExitStack() as closing:
            closing.callback(self._close_tracker, status)
            closing.callback(self._console.close)
            write_json(self.folder.result, outcome)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._finished:
            return
        stopped = isinstance(fault, KeyboardInterrupt | SystemExit | Unfinished)
        # What it failed of may keep these from being written too, and must stay what is raised.
        with suppress(AppError):
            if not isinstance(fault, KeyboardInterrupt | SystemExit):
                self._write_log(masked_text(_account_of(fault)))
        with suppress(AppError):
            self.finish("stopped" if stopped else "failed", error=_reason_of(fault))
        assert fault is not None, "the run ended without a result"

    def _write_log(self, text: str) -> None:
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        append_text(self.folder.log, f"{now}  {text}\n")

    def _track(self, values: Mapping[str, Any]) -> None:
        try:
            self._tracker.log(values)
        except TrackerError as fault:
            self._tracker = NoTracker()
            self.message(f"{fault}; the run goes on, its numbers are in {self.folder.metrics}")

    def _close_tracker(self, status: str) -> None:
        try:
            self._tracker.close(status)
        except TrackerError as fault:
            self.message(f"{fault}; the numbers of the run are in {self.folder.metrics}")


def _account_of(fault: BaseException | None) -> str:
    """A fault of ours with its traceback, which means nothing to a user whose own problem it is."""
    if fault is None or isinstance(fault, AppError):
        return _reason_of(fault)
    return "".join(traceback.format_exception(fault)).rstrip()


def _reason_of(fault: BaseException | None) -> str:
    if isinstance(fault, AppError):
        return fault.report()
    return f"{type(fault).__name__}: {fault}" if fault else "the run ended without a result"
