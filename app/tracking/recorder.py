"""Recorder of a run: messages, metrics, samples, result, tracker, and manifest.json with its provenance."""

import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import app
from app.config.conf_files import to_yaml
from app.config.finished_run import read_manifest
from app.config.kinds import LOGGED
from app.config.schema import TrackerConfig
from app.errors import AppError, CheckpointError, EnvironmentProblem, Unfinished
from app.files import append_text, is_own_file, read_object, report_write_errors, write_json, write_text
from app.safe_text import redact, redact_text, safe_text
from app.tracking.console import Console, open_console
from app.tracking.formatting import PHASES, Sample, align_columns, evaluation_line, samples_text, step_line, truncate
from app.tracking.output_dir import RunFolder, StepLog, finite_or_none, read_lines
from app.tracking.trackers import TRACKERS, Tracker, open_tracker

PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "bitsandbytes",
    "datasets",
    "tokenizers",
    "safetensors",
    "hydra-core",
    "omegaconf",
    "numpy",
    "rich",
    *(kind.name for kind in TRACKERS.values() if kind),
)


class Manifest:
    """manifest.json of this start; `starts` lists the earlier starts of the run too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.problem = ""  # of the file of earlier starts
        try:
            before = read_manifest(path)
        except CheckpointError as fault:
            before, self.problem = {}, f"{fault} Writing a new one without the earlier starts"
        here = program_here()
        start = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "command_line": sys.orig_argv,
            "folder": str(Path.cwd()),
            "host": platform.node(),
            "process": os.getpid(),
            "git": here["program"]["git"],
        }
        created = before.get("created", start["time"])
        self._content = {"created": created, **here, "starts": [*before.get("starts", []), start]}

    def add(self, facts: Mapping[str, Any]) -> None:
        """Add facts and write the file; a mapping is merged into the existing one of the same name."""
        for name, value in facts.items():
            old = self._content.get(name)
            self._content[name] = value
            if isinstance(old, dict) and isinstance(value, Mapping):
                self._content[name] = {**old, **value}
        write_json(self._path, redact(self._content))


def versions() -> dict[str, str]:
    """Return the versions of the installed packages."""
    from importlib.metadata import PackageNotFoundError, version  # takes 15 ms, too long for a config error

    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def git_state(package: Path) -> dict[str, Any] | None:
    """Return the commit of the checkout with `package`, and whether files differ; None for an installed package."""
    if not (package.parent / ".git").exists():
        return None
    commit = _git(package.parent, "rev-parse", "HEAD")
    changes = _git(package.parent, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changes is None:
        return None
    return {"commit": commit, "dirty": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "--no-optional-locks", *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def program_here() -> dict[str, Any]:
    """Return the version of the program, its packages and the machine."""
    return {
        "program": {"version": app.__version__, "git": git_state(Path(app.__file__).parent)},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "packages": versions(),
    }


# ---- recorder


STATUSES = ("finished", "stopped", "failed", "dry_run")
RESULT_KEYS = (
    "objective",
    "objective_is",
    "steps",
    "train_loss_first",
    "train_loss_last",
    "eval_loss",
    "exact_match",
    "tokens_per_second",
    "samples_per_second",
    "seconds",
    *PHASES,
    "peak_memory_bytes",
    "device_used_bytes",
    "memory_predicted_bytes",
    "memory_measured_bytes",
    "experts",
    "start_metrics",
    "final_metrics",
    "final",
)
_GPU_KEYS = ("device_is_estimated", "other_processes", "workspace_bytes", "gpu_utilization")  # absent without a GPU
_TABLE_WIDTH, _MIN_TABLE_WIDTH, _TABLE_GAP = 100, 90, 2
_RESULT_METRICS = (*LOGGED, "tokens_per_second", "samples_per_second", "peak_memory_bytes", "device_used_bytes")


class Recorder:
    """Context that records a run; an exception is recorded as a failure.

    Only the recorder of rank 0 is `enabled`; other ranks write messages to their own logs.
    """

    def __init__(self, folder: RunFolder, console: Console | None = None, rank: int = 0) -> None:
        self.folder = folder
        self.enabled = rank == 0
        self._log = folder.path / f"log-rank-{rank}.txt" if rank else folder.log
        self._console = console or Console(enabled=False)
        self._manifest = Manifest(folder.manifest) if self.enabled else None
        self._metrics = StepLog(folder.metrics)
        self._samples = StepLog(folder.samples)
        self._tracker: Tracker | None = None
        self._result: dict[str, Any] = {}  # values of result.json that come from metrics.jsonl
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
        """Write the files of a start. `run` is the resolved configuration as plain data, `folder` is claimed.

        `step` is the step of the checkpoint, or -1 without one: later lines are removed. None keeps all lines.
        """
        safe_run = redact(run)
        recorder = cls(folder, console or open_console())
        problem = recorder._open_tracker(tracker, safe_run, step)
        with report_write_errors(folder.result):
            folder.result.unlink(missing_ok=True)  # of an earlier start
        write_text(folder.run_yaml, to_yaml(safe_run))
        if recorder._manifest and recorder._manifest.problem:
            recorder.message(recorder._manifest.problem)
        recorder.add_facts(**facts)
        if recorder._tracker:
            recorder.message(f"tracker: {recorder._tracker.location}")
        elif problem:
            recorder.message(f"{problem}; continuing without a tracker")
        if step is not None:
            for values in recorder._metrics.truncate_after(step):
                recorder._update_result(values)
            recorder._samples.truncate_after(step)
        return recorder

    def add_facts(self, **facts: Any) -> None:
        if self._manifest:
            self._manifest.add(facts)

    def preview(self, rows: Mapping[str, Any]) -> None:
        """Write preview.json: a few training rows with their loss masks."""
        write_json(self.folder.preview, redact(rows))

    def begin(self, total: int, done: int = 0, *, on_gpu: bool = False) -> None:
        """Show progress over `total` steps, of which `done` are from earlier starts; `on_gpu`: with GPU memory."""
        self._total = total
        self._console.begin(total, done, on_gpu=on_gpu)

    def message(self, text: str) -> None:
        """Print a message and add it to the log."""
        self._console.say(redact_text(text))
        self._write_log(text)

    def step(self, values: Mapping[str, float | int | None], seconds_left: float | None = None) -> None:
        """Record the metrics of a step: `step`, `loss` and others."""
        if self.enabled:
            self._note(values)
            self._console.step(values, seconds_left)
            self._write_log(step_line(values, self._total, None))
            self._ask_tracker(lambda tracker: tracker.log(values))

    def evaluation(self, values: Mapping[str, float | int | None]) -> None:
        """Record the metrics of an evaluation: `step`, `eval_loss` and others."""
        if self.enabled:
            self._note(values)
            self.message(evaluation_line(values))
            self._ask_tracker(lambda tracker: tracker.log(values))

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Record answers of the model; answers of the first and last step are printed at the end of the run."""
        if not self.enabled or not samples:
            return
        safe = [
            redact({key: value for key, value in asdict(sample).items() if value is not None}) for sample in samples
        ]
        for sample in safe:
            self._samples.write({"step": step, **sample})
        text = samples_text(step, [Sample(**sample) for sample in safe])
        self._write_log(text)
        if step not in {0, self._total}:
            self._console.say(text)

    def first_and_last_samples(self) -> None:
        """Print the first and last answers as a table that fits the terminal; the log has it at a fixed width."""
        log_table = samples_table(self.folder.samples)
        if log_table:
            self._write_log(log_table)
            width = self._console.width
            self._console.say((width and samples_table(self.folder.samples, width)) or log_table)

    def sync(self) -> None:
        """Flush metrics and samples to disk, before a checkpoint refers to them."""
        if self.enabled:
            if not self.folder.run_yaml.is_file():
                raise EnvironmentProblem(
                    f"output_dir: {self.folder.run_yaml} was deleted, so no checkpoint of this run can be resumed. "
                    "Start again with another output_dir, and do not change the folder during a run."
                )
            self._metrics.fsync()
            self._samples.fsync()

    def finish(self, status: str, **result: Any) -> None:
        """Write result.json. Values missing in `result` come from the metrics, else null."""
        assert status in STATUSES, status
        assert result.keys() <= {*RESULT_KEYS, *_GPU_KEYS, "error"}, result.keys()
        self._finished = True
        if not self.enabled:
            self.message(status)
            return
        values = {"status": status, **dict.fromkeys(RESULT_KEYS), **self._result, **result}
        with ExitStack() as closing:
            self._ask_tracker(lambda tracker: self.message(f"tracker {tracker.location}"))
            closing.callback(self._ask_tracker, lambda tracker: tracker.close(failed=status == "failed"))
            closing.callback(self._console.close)
            outcome = {key: finite_or_none(value) for key, value in values.items()}
            write_json(self.folder.result, redact(outcome))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.enabled and fault is not None:
            self.message(f"{type(fault).__name__}: {fault}")
        if not self.enabled or self._finished:
            return
        assert fault is not None, "the run ended without a result"
        stopped = isinstance(fault, KeyboardInterrupt | SystemExit | Unfinished)
        if isinstance(fault, AppError):  # a user error
            logged = error = fault.report()
        else:
            logged, error = "".join(traceback.format_exception(fault)).rstrip(), f"{type(fault).__name__}: {fault}"
        # The same fault may also prevent these writes; the first exception must be the one raised.
        with suppress(AppError):
            if not isinstance(fault, KeyboardInterrupt | SystemExit):
                self._write_log(logged)
        with suppress(AppError):
            self.finish("stopped" if stopped else "failed", error=error)

    def _note(self, values: Mapping[str, Any]) -> None:
        self._metrics.write(values)
        self._update_result(values)

    def _update_result(self, values: Mapping[str, Any]) -> None:
        """Update the result by a line of metrics.jsonl, except the evaluation before the first step."""
        if values["step"] == 0:
            return
        if "loss" in values:
            self._result.setdefault("train_loss_first", values["loss"])
            self._result |= {"train_loss_last": values["loss"], "steps": values["step"]}
        self._result |= {key: values[key] for key in _RESULT_METRICS if key in values}

    def _write_log(self, text: str) -> None:
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        append_text(self._log, f"{now}  {safe_text(text)}\n")

    def _open_tracker(self, config: TrackerConfig, run: Mapping[str, Any], step: int | None) -> str | None:
        """Open the tracker. On failure raise for a new run; return the problem as text for a resumed one."""
        step = -1 if step is None else step
        try:
            self._tracker = open_tracker(config, self.folder.path, run, step)
        except EnvironmentProblem as problem:
            if step < 0:
                raise
            return str(problem)
        return None

    def _ask_tracker(self, request: Callable[[Tracker], None]) -> None:
        if not self._tracker:
            return
        try:
            request(self._tracker)
        except Exception as fault:  # noqa: BLE001  trackers raise any exception and must not end a run
            self._tracker = None
            why = " ".join(str(fault).split()) or type(fault).__name__
            self.message(f"tracker failed ({why}); metrics are still written to {self.folder.metrics}")


def read_result(output_dir: str | Path) -> dict[str, Any]:
    """Return the content of result.json; empty during the run and for a folder without a run."""
    file = Path(output_dir).expanduser() / "result.json"
    return read_object(file) if is_own_file(file) else {}


def samples_table(samples: Path, width: int = _TABLE_WIDTH) -> str | None:
    """Return the first and the last answers in samples.jsonl as a table, or None if the file lacks either.

    Below 90 columns a row has two lines: prompt and expected answer, then the answers before and after training.
    """
    by_step: dict[int, list[Sample]] = {}
    for line in read_lines(samples) if samples.exists() else ():
        values = {key: line[key] for key in ("prompt", "expected", "answer", "likelihood") if key in line}
        by_step.setdefault(line["step"], []).append(Sample(**values))
    last = max(by_step, default=0)
    if 0 not in by_step or last == 0:
        return None
    answers = zip(by_step[0], by_step[last], strict=False)
    texts = [("prompt", "expected", "before", f"after step {last}")]
    texts += [(old.prompt, old.expected, old.answer_text, new.answer_text) for old, new in answers]
    rows = [[" ".join(text.split()) for text in row] for row in texts]
    is_narrow, indent = width < _MIN_TABLE_WIDTH, " " * _TABLE_GAP
    prompt, expected, before, after = (max(map(len, column)) for column in zip(*rows, strict=True))
    if is_narrow:
        left, right = _fitted([max(prompt, before + _TABLE_GAP), max(expected, after)], width)
        widths = [left, right, left - _TABLE_GAP, right]
    else:
        widths = _fitted([prompt, expected, before, after], width)
    ends = (False, True, True, True)  # prompts often start alike
    cells = [[truncate(*cell[:2], at_end=cell[2]) for cell in zip(row, widths, ends, strict=True)] for row in rows]
    if is_narrow:
        cells = [line for row in cells for line in (row[:2], [indent + row[2], row[3]])]
    return align_columns(cells, gap=_TABLE_GAP)


def _fitted(widths: Sequence[int], total: int) -> list[int]:
    """Reduce the widest columns until all columns and gaps fit in `total`."""
    fitted = list(widths)
    while sum(fitted) + _TABLE_GAP * (len(fitted) - 1) > total:
        fitted[fitted.index(max(fitted))] -= 1
    return fitted
