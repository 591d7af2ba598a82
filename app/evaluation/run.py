"""Evaluation of a finished run: rows and settings first, then one model after the other."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.base.base_model import BaseModel, open_base
from app.base.source import base_fingerprint, require_intact_base
from app.batch import Batch
from app.config.dataset import has_held_out_rows, paths_of
from app.config.finished_run import require_intact_final
from app.config.schema import CompileConfig, RunConfig
from app.data.collate import Layout
from app.data.data_report import split_lines
from app.data.loader import batch_with_most_rows, eval_batches
from app.data.token_dataset import TokenRows
from app.distributed.process_group import Runtime, start
from app.errors import CheckpointError
from app.finished.inference import load_training_model, reads_base, weights_of
from app.model.build import ModelSections
from app.model.training_model import TrainingModel
from app.tasks.interface import Sums
from app.tasks.table import counts_of, loss_of
from app.tracking.formatting import format_duration
from app.training.auto_settings import Choices, choose, sections_of
from app.training.eta import Eta
from app.training.initial_model import comparing, read_reference
from app.training.rows import SCORED, layout_of, read_rows
from app.training.scores import score_rows
from app.training.setup import check_on_batch

SECONDS_BETWEEN_MESSAGES = 10.0
_MAX_NAME_LENGTH = 40  # of a dataset in a file name


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A finished run resolved for this machine. `hashes` are from its manifest."""

    folder: Path
    run: RunConfig
    hashes: Mapping[str, Any]
    base: BaseModel
    choices: Choices
    runtime: Runtime

    def model(self, *, tuned: bool) -> TrainingModel:
        """Load the fine-tuned model, or its base, in the dtypes and packing of training."""
        sections = self.sections(tuned=tuned)
        self.require_same_base(tuned=tuned)
        return load_training_model(
            self.folder, sections, loss_of(self.run), self.runtime.device, self.run.seed, tuned=tuned
        )

    def sections(self, *, tuned: bool) -> ModelSections:
        """Return the settings to build the model; `model.path` is the local folder of the weights."""
        return replace(
            sections_of(self.run, self.choices),
            model=weights_of(self.folder, self.run.model, tuned=tuned),
            recompute=False,
            offload=False,
            compile=CompileConfig(kind="none"),
        )

    def require_same_base(self, *, tuned: bool) -> None:
        """Raise if the base is not the one that the adapter was trained on: the loss would be wrong."""
        if not reads_base(self.folder, tuned=tuned):
            return
        expected, model = self.hashes.get("base"), self.sections(tuned=tuned).model
        if model.weights == "pretrained":
            require_intact_base(Path(model.path))
        if expected is not None and base_fingerprint(model) != expected:
            raise CheckpointError(
                f"model.path={self.run.model.path}: these weights are not the base of run={self.folder} (the hash "
                "differs from its manifest.json). Set model.path=DIR to the base of that run."
            )


@dataclass(frozen=True, slots=True)
class Evaluation(FinishedRun):
    """Finished run with rows to score, and how they are batched."""

    rows: TokenRows
    row_lines: list[str]  # printed lines about the rows
    layout: Layout

    @property
    def rows_are(self) -> str:
        """`held_out`, `trained_on` or `other`: rows are recognized by their tokens, not by their file."""
        names = {self.hashes.get("train"): "trained_on", self.hashes.get("eval"): "held_out"}
        return names.get(self.rows.fingerprint, "other")

    def table(self) -> list[tuple[str, str]]:
        """Return printed lines on rows and machine."""
        batching, rows = self.run.batching, self.run.eval.rows
        units = f"packed in bins of {batching.bin_tokens} tokens" if batching.packing else f"{rows} rows at a time"
        machine = f"{self.choices.precision}, {self.choices.attention} attention, {self.runtime.device.type}"
        return [("data", "\n".join([*self.row_lines, self._origin()])), ("with", f"{units}, {machine}")]

    def _origin(self) -> str:
        if self.rows_are == "held_out":
            return "this is the eval set of the run"
        if self.rows_are == "trained_on":
            return "the run was trained on these rows: the scores do not measure generalization"
        if has_held_out_rows(self.run.dataset):
            return "these rows are not the eval set of the run"
        return f"these are all rows of {paths_of(self.run.dataset)} (no eval split)"

    def sums(self, *, tuned: bool, say: Callable[[str], None]) -> Sums:
        """Score each row with the fine-tuned model or its base; only one of them is in memory at a time."""
        model = self.model(tuned=tuned)
        check_on_batch(model, batch_with_most_rows(self.rows, self.layout).to(self.runtime.device))
        return score_rows(model, self.batches(say), self.runtime, len(self.rows), counts_of(self.run))

    def file_name(self, weights: str, recorded_precision: str, checkpoint: str | None = None) -> str:
        """Return the file name for scores in the run folder: other rows or settings get another name."""
        parts = ["evaluate"]
        if self.rows_are != "held_out":
            name = re.sub(r"\W+", "-", Path(self._dataset).stem).strip("-")
            parts += [name[:_MAX_NAME_LENGTH] or "rows", self.rows.fingerprint[:6]]
        if weights == "base":
            parts.append("base")
        if checkpoint is not None:
            parts.append(checkpoint if checkpoint == "best" else f"step-{int(checkpoint)}")
        if self.choices.precision != recorded_precision:
            parts.append(self.choices.precision)
        return f"{'-'.join(parts)}.json"

    def facts(self) -> dict[str, Any]:
        """Return rows and settings, for evaluate.json."""
        return {
            "rows": len(self.rows),
            "tokens": int(self.rows.lengths.sum(dtype="int64")),
            "trained_tokens": self.rows.num_trained,
            "run": str(self.folder),
            "dataset": self._dataset,
            "rows_are": self.rows_are,
            "hash": self.rows.fingerprint,
            "precision": self.choices.precision,
            "attention": self.choices.attention,
            "packing": self.run.batching.packing,
        }

    @property
    def _dataset(self) -> str:
        return self.run.dataset.eval_path or paths_of(self.run.dataset)

    def batches(self, say: Callable[[str], None]) -> Iterator[Batch]:
        """Yield the batches of this process, with a progress message every few seconds."""
        total = int(self.rows.lengths.sum(dtype="int64"))
        eta, last_message = Eta(total, {}), time.monotonic()
        done, left = 0, eta.seconds_left(0)
        for batch in eval_batches(self.rows, self.layout, self.runtime.processes, self.runtime.rank):
            yield batch
            done += batch.num_tokens * self.runtime.processes
            left = eta.seconds_left(done)
            if left is not None and time.monotonic() - last_message > SECONDS_BETWEEN_MESSAGES:
                last_message = time.monotonic()
                say(f"scored {done:,} of {total:,} tokens | {format_duration(left)} left")


def open_finished_run(run: RunConfig, folder: Path, hashes: Mapping[str, Any], *, tuned: bool) -> FinishedRun:
    """Resolve precision and attention and start the processes. `tuned`: read the fine-tuned weights first."""
    base = _base_of(run, folder, tuned=tuned)
    choices = choose(run, base, {})
    return FinishedRun(folder, run, hashes, base, choices, start(run.launch, choices.precision, run.seed))


def prepare_evaluation(
    run: RunConfig, folder: Path, hashes: Mapping[str, Any], *, tuned: bool, say: Callable[[str], None]
) -> Evaluation:
    """Read the rows to score, then start the processes. `tuned`: read the fine-tuned weights first."""
    base = _base_of(run, folder, tuned=tuned)
    prepared = read_rows(run, base, say, splits=SCORED)
    rows, report = prepared.data.eval, prepared.data.report
    assert rows is not None
    assert report.eval is not None
    if run.preference.has_reference:
        objective = comparing(prepared.objective, read_reference(folder / "reference"), rows)
        prepared = replace(prepared, objective=objective)
    choices = choose(prepared.run, base, {})
    return Evaluation(
        folder=folder,
        run=prepared.run,
        hashes=hashes,
        base=base,
        choices=choices,
        runtime=start(run.launch, choices.precision, run.seed),
        rows=rows,
        row_lines=[*split_lines("scored", report.eval), *report.notes],
        layout=layout_of(prepared.run, run.eval.rows, prepared.objective, prepared.pad_id),
    )


def _base_of(run: RunConfig, folder: Path, *, tuned: bool) -> BaseModel:
    require_intact_final(folder)
    return open_base(weights_of(folder, run.model, tuned=tuned), run.task)
