"""What a run writes besides weights, and what it says."""

import json
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from omegaconf import OmegaConf

from app.config.schema import TrackerConfig
from app.errors import AppError, CheckpointError, ConfigError, EnvironmentProblem, Unfinished
from app.files import append_text, report_write_errors, write_json, write_text
from app.tracking.console import Console, open_console
from app.tracking.formatting import (
    Sample,
    align,
    align_columns,
    evaluation_line,
    samples_text,
    step_line,
    truncate,
)
from app.tracking.jsonl_metrics import StepLines, finite_or_none, read_lines
from app.tracking.manifest import Manifest
from app.tracking.output_dir import RunFolder
from app.tracking.redact import masked, masked_text
from app.tracking.trackers import Tracker, open_tracker

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
_OF_LINES = ("eval_loss", "exact_match", "accuracy", "macro_f1", "tokens_per_second", "peak_memory_bytes")


class Recorder:
    """A context: a run that leaves it by an exception has written how it failed.

    Only that of the first process is `enabled`. That of another one has a log of its own and writes nothing else.
    """

    def __init__(self, folder: RunFolder, console: Console | None = None, rank: int = 0) -> None:
        self.folder = folder
        self.enabled = rank == 0
        self._log = folder.log_of(rank)
        self._console = console or Console(enabled=False)
        self._manifest = Manifest(folder.manifest) if self.enabled else None
        self._metrics = StepLines(folder.metrics)
        self._samples = StepLines(folder.samples)
        self._tracker: Tracker | None = None
        self._known: dict[str, Any] = {}  # of result.json, from the lines of metrics.jsonl
        self._total: int | None = None
        self._finished = False

    @classmethod
    def open(
        cls,
        folder: RunFolder,
        tracker: TrackerConfig,
        run: Mapping[str, Any],
        facts: Mapping[str, Any],
        console: Console | None = None,
        step: int | None = None,
    ) -> "Recorder":
        """The files of a start. `run` is the resolved configuration as plain data, `folder` was claimed.

        What was written after `step` is taken back: that of the checkpoint, -1 where there is none, nothing for None.
        """
        safe_run = masked(run)
        recorder = cls(folder, console or open_console())
        problem = recorder._open_tracker(tracker, safe_run, step)
        with report_write_errors(folder.result):
            folder.result.unlink(missing_ok=True)  # that of an earlier start: this one has not ended
        write_text(folder.run_yaml, OmegaConf.to_yaml(OmegaConf.create(safe_run)))
        recorder.add_facts(**facts)
        if recorder._tracker:
            recorder.message(f"tracker: {recorder._tracker.place}")
        elif problem:
            recorder.message(f"{problem}; the run goes on without it")
        if step is not None:
            recorder._rewind(step)
        return recorder

    def add_facts(self, **facts: Any) -> None:
        """What is known only by now, into the manifest."""
        if self._manifest:
            self._manifest.add(facts)

    def preview(self, rows: Mapping[str, Any]) -> None:
        """What is trained of a few rows; for people, so a run does not depend on it."""
        write_json(self.folder.preview, masked(rows))

    def begin(self, total: int, done: int = 0) -> None:
        """The run has `total` steps, `done` of them before this start: from now on progress is shown."""
        self._total = total
        self._console.begin(total, done)

    def message(self, text: str) -> None:
        """Something worth a line, on the screen and in the log."""
        safe_text = masked_text(text)
        self._console.say(safe_text)
        self._write_log(safe_text)

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Names and values in two columns."""
        self.message(align(rows))

    def step(self, values: Mapping[str, float | int | None], seconds_left: float | None = None) -> None:
        """The numbers of one step that is logged: `step`, `loss` and what else there is."""
        if self.enabled:
            self._note(values)
            self._console.step(values, seconds_left)
            self._write_log(step_line(values, self._total, None))
            self._track(values)

    def evaluation(self, values: Mapping[str, float | int | None]) -> None:
        """The numbers of one evaluation: `step`, `eval_loss` and what else there is."""
        if self.enabled:
            self._note(values)
            self.message(evaluation_line(values))
            self._track(values)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """What the model answers by now. On the screen only between: the table of both ends has the rest."""
        if not self.enabled:
            return
        for each in samples:
            known = {key: value for key, value in asdict(each).items() if value is not None}
            self._samples.write({"step": step, **known})
        if samples:
            self._write_log(samples_text(step, samples))
        if samples and step not in {0, self._total}:
            self._console.samples(step, samples)

    def sync(self) -> None:
        """Onto the disk; before a checkpoint says that these lines exist."""
        if self.enabled:
            self._metrics.fsync()
            self._samples.fsync()

    def finish(self, status: str, **result: Any) -> None:
        """How it ended. What `result` leaves out is taken from the metrics, else null."""
        assert status in STATUSES, status
        assert result.keys() <= {*RESULT_KEYS, "error"}, result.keys()
        self._finished = True
        if not self.enabled:
            self.message(status)
            return
        values = {"status": status, **dict.fromkeys(RESULT_KEYS), **self._known, **result}
        with ExitStack() as closing:
            closing.callback(self._close_tracker, status)
            closing.callback(self._console.close)
            outcome = {key: finite_or_none(value) for key, value in values.items()}
            write_json(self.folder.result, masked(outcome))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.enabled and fault is not None:
            self.message(f"{type(fault).__name__}: {fault}")
        if not self.enabled or self._finished:
            return
        stopped = isinstance(fault, KeyboardInterrupt | SystemExit | Unfinished)
        # What it failed of may keep these from being written too, and must stay what is raised.
        with suppress(AppError):
            if not isinstance(fault, KeyboardInterrupt | SystemExit):
                self._write_log(masked_text(_account_of(fault)))
        with suppress(AppError):
            self.finish("stopped" if stopped else "failed", error=_reason_of(fault))
        assert fault is not None, "the run ended without a result"

    def _note(self, values: Mapping[str, Any]) -> None:
        self._metrics.write(values)
        self._see(values)

    def _see(self, values: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl, in the order in which they were written."""
        if "loss" in values:
            self._known.setdefault("train_loss_first", values["loss"])
            self._known |= {"train_loss_last": values["loss"], "steps": values["step"]}
        self._known |= {key: values[key] for key in _OF_LINES if key in values}

    def _rewind(self, step: int) -> None:
        for values in self._metrics.rewind(step):
            self._see(values)
        self._samples.rewind(step)

    def _write_log(self, text: str) -> None:
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        append_text(self._log, f"{now}  {text}\n")

    def _open_tracker(self, config: TrackerConfig, run: Mapping[str, Any], step: int | None) -> str | None:
        """What is wrong with it, for a run that has begun: a new one is refused."""
        step = -1 if step is None else step
        try:
            self._tracker = open_tracker(config, self.folder.path, run, step)
        except EnvironmentProblem as problem:
            if step < 0:
                raise
            return str(problem)
        return None

    def _track(self, values: Mapping[str, Any]) -> None:
        if self._tracker:
            try:
                self._tracker.log(values)
            except Exception as fault:  # noqa: BLE001  trackers raise what they like: none ends a run
                self._tracker = None
                self.message(f"{_lost(fault)}; the run goes on, its numbers are in {self.folder.metrics}")

    def _close_tracker(self, status: str) -> None:
        if self._tracker:
            try:
                self._tracker.close(failed=status == "failed")
            except Exception as fault:  # noqa: BLE001
                self.message(f"{_lost(fault)}; the numbers of the run are in {self.folder.metrics}")


def read_result(output_dir: str | Path) -> dict[str, Any]:
    """What result.json of a run says; nothing while it runs, and where there is none."""
    try:
        values = json.loads((Path(output_dir).expanduser() / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def logged_lines(folder: RunFolder, steps: int | None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a run, up to `steps` if given; there is one at least."""
    missing = [file.name for file in (folder.manifest, folder.metrics) if not file.is_file()]
    lines = [] if missing else list(read_lines(folder.metrics))
    if not lines:
        why = f"there is no {' and no '.join(missing)} in it" if missing else "no step of it was logged"
        raise CheckpointError(f"run={folder.path}: {why}, so there is nothing to compare with.")
    wanted = [line for line in lines if steps is None or line["step"] <= steps]
    if not wanted:
        first = lines[0]["step"]
        raise ConfigError(
            f"steps={steps}: the first line of {folder.metrics} is of step {first}. Give steps={first} or more."
        )
    return wanted


def before_after(samples: Path) -> str | None:
    """A table of the first and the last answers in samples.jsonl, or None if the file does not tell both."""
    by_step: dict[int, list[Sample]] = {}
    for line in read_lines(samples) if samples.exists() else ():
        given = {key: line[key] for key in ("prompt", "expected", "answer", "likelihood") if key in line}
        by_step.setdefault(line["step"], []).append(Sample(**given))
    last = max(by_step, default=0)
    if 0 not in by_step or last == 0:
        return None
    rows = [
        (truncate(before.prompt, 40, at_end=False), before.expected, before.answer_text, after.answer_text)
        for before, after in zip(by_step[0], by_step[last], strict=False)
        if before.prompt == after.prompt
    ]
    if not rows:
        return None
    head = ("held out", "expected", "before", f"after step {last}")
    cut = [
        [truncate(text, width) for text, width in zip(row, (40, 20, 28, 28), strict=True)]
        for row in (head, *rows)
    ]
    return align_columns(cut, gap=2)


def _lost(fault: Exception) -> str:
    return f"the tracker stopped working ({' '.join(str(fault).split()) or type(fault).__name__})"


def _account_of(fault: BaseException | None) -> str:
    """A fault of ours with its traceback, which means nothing to a user whose own problem it is."""
    if fault is None or isinstance(fault, AppError):
        return _reason_of(fault)
    return "".join(traceback.format_exception(fault)).rstrip()


def _reason_of(fault: BaseException | None) -> str:
    if isinstance(fault, AppError):
        return fault.report()
    return f"{type(fault).__name__}: {fault}" if fault else "the run ended without a result"
