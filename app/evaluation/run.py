"""An evaluation of a finished run: what is known before weights are loaded, then the weights one after the other."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from app.batch import Batch
from app.config.dataset import has_chats, has_held_out_rows, paths_of, trains_answers
from app.config.schema import RunConfig
from app.data.collate import Layout
from app.data.data_report import split_lines
from app.data.loader import crowded_batch, eval_batches
from app.data.objectives import build_objective
from app.data.prepare import rows_to_score
from app.data.token_dataset import TokenRows
from app.distributed.process_group import start
from app.model.build import plan_model
from app.model.load import weights_of
from app.model.tokenizer import load_tokenizer
from app.tracking.formatting import format_duration
from app.training.choices import choose
from app.training.eta import Course, Pace
from app.training.limits import within_positions
from app.training.proofs import prove_on
from app.training.resolve import with_format
from app.training.scores import Sums, score_rows
from app.training.setup import attention_needs, is_bidirectional, layout_of, require_known_ids
from app.training.subject import Subject, sections_of

Say = Callable[[str], None]
_SECONDS_BETWEEN_WORDS = 10.0


@dataclass(frozen=True, slots=True)
class Scoring(Subject):
    """The rows to score, and how."""

    rows: TokenRows
    told: list[str]  # of the rows, for people
    layout: Layout

    @property
    def rows_are(self) -> str:
        """`held_out` by the run, `trained_on` by it, or `other`; by their tokens, whatever the file is called."""
        known = {self.hashes.get("train"): "trained_on", self.hashes.get("eval"): "held_out"}
        return known.get(self.rows.fingerprint, "other")

    def table(self) -> list[tuple[str, str]]:
        """What is going to be scored, for people."""
        batching, held_rows = self.run.batching, self.run.eval.rows
        units = (
            f"packed in bins of {batching.bin_tokens} tokens"
            if batching.packing
            else f"{held_rows} rows at a time"
        )
        machine = f"{self.choices.precision}, {self.choices.attention} attention, {self.runtime.device.type}"
        return [("data", "\n".join([*self.told, self._origin()])), ("with", f"{units}, {machine}")]

    def _origin(self) -> str:
        if self.rows_are == "held_out":
            return "these are the rows that the run held out"
        if self.rows_are == "trained_on":
            return "these are the very rows that the run was trained on: they say nothing of others"
        if has_held_out_rows(self.run.dataset):
            return "these are not the same rows as the run held out"
        return f"these are all rows of {paths_of(self.run.dataset)}: nothing is held out of them"

    def sums(self, *, tuned: bool, say: Say) -> Sums:
        """Of each row, by the tuned model or by its base; one of them in memory at a time."""
        trainee = self.trainee(tuned=tuned)
        device = self.runtime.device
        prove_on(trainee, crowded_batch(self.rows, self.layout).to(device))
        answers = trains_answers(self.run.dataset)
        rows, classes = len(self.rows), len(self.run.task.labels)
        return score_rows(trainee, self._batches(say), self.runtime, rows, answers=answers, classes=classes)

    def facts(self) -> dict[str, Any]:
        """What was scored, and how."""
        dataset = self.run.dataset
        return {
            "rows": len(self.rows),
            "tokens": int(self.rows.lengths.sum(dtype="int64")),
            "trained_tokens": self.rows.num_trained,
            "run": str(self.folder),
            "dataset": dataset.eval_path or paths_of(dataset),
            "rows_are": self.rows_are,
            "hash": self.rows.fingerprint,
            "precision": self.choices.precision,
            "attention": self.choices.attention,
            "packing": self.run.batching.packing,
        }

    def _batches(self, say: Say) -> Iterator[Batch]:
        """This process's share of the rows; now and then it says how far it is."""
        total = int(self.rows.lengths.sum(dtype="int64"))
        pace, told = Pace(Course(end=total)), time.monotonic()
        done, left = 0, pace.seconds_left(0)
        for batch in eval_batches(self.rows, self.layout, self.runtime.processes, self.runtime.rank):
            yield batch
            done += batch.num_tokens * self.runtime.processes
            left = pace.seconds_left(done)
            if left is not None and time.monotonic() - told > _SECONDS_BETWEEN_WORDS:
                told = time.monotonic()
                say(f"scored {done:,} of {total:,} tokens | {format_duration(left)} left")


def lay_scoring(run: RunConfig, folder: Path, hashes: Mapping[str, Any], *, tuned: bool, say: Say) -> Scoring:
    """Tokenizer, rows, machine: each line needs only those above it. `tuned`: of the weights that come first."""
    read = within_positions(replace(run, model=weights_of(folder, run.model, tuned=tuned)), say)
    read, why = with_format(read)
    tokenizer = load_tokenizer(run.model, needs_template=has_chats(read.dataset))
    rows, counts, notes = rows_to_score(read.dataset, tokenizer, run.cache_dir, run.task.labels)
    choices = choose(run.precision, run.attention, partial(attention_needs, read), {})
    runtime = start(run.launch, choices.precision, run.seed)
    sections = sections_of(run, folder, choices, tuned=tuned)
    require_known_ids(run.model, [rows], plan_model(sections).vocabulary)
    labels = build_objective(run.task, tokenizer, run.seed, bidirectional=is_bidirectional(read))
    return Scoring(
        folder=folder,
        run=replace(run, dataset=read.dataset),
        hashes=hashes,
        rows=rows,
        told=[*split_lines("scored", counts), *why, *notes],
        layout=layout_of(read, run.eval.rows, tokenizer, labels),
        choices=choices,
        runtime=runtime,
    )
