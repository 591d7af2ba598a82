"""Token rows of a run, and the settings that depend on them: formats, packing, row length, labels, vocabulary.

No weights are read, and nothing depends on the machine.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from app.adapters.adapters import short_names
from app.base.base_model import BaseModel
from app.base.tokenizer import load_tokenizer, new_ids
from app.config.adapters import with_names
from app.config.dataset import formats_for, has_chats, paths_of
from app.config.kinds import PROBLEMS
from app.config.rules import problems_of
from app.config.schema import AdapterConfig, DatasetConfig, RunConfig, TaskConfig, TrainingConfig
from app.config.tasks import Task, labeling_of, task_of
from app.data.collate import Layout, Packed, Padded
from app.data.data_report import RowCounts, stop_reasons, without_stops
from app.data.detect_format import detect_formats
from app.data.labels import KnownLabels, class_weights
from app.data.loader import Loader, StepSplit
from app.data.objectives import Objective
from app.data.prepare import Data, extra_eval_rows, prepare, rows_to_score, stop_if_wrong
from app.data.sources import Source
from app.data.token_dataset import TokenRows
from app.errors import ConfigError, refuse
from app.tasks.table import build_objective, metrics_of
from app.training.auto_settings import has_auto_bins, suggested_bin, with_packing

ROWS_MULTIPLE = 64  # of a resized vocabulary: other sizes of matrix products leave tensor cores idle
TRAINED, SCORED = "trained", "scored"  # splits to read


@dataclass(frozen=True, slots=True)
class Rows:
    """Token rows of a run; `run` has resolved the settings that depend on them."""

    run: RunConfig
    base: BaseModel
    tokenizer: Any
    data: Data
    objective: Objective
    also: TokenRows | None = None  # of `eval.also`, not read by checks and evaluations

    @property
    def pad_id(self) -> int:
        """ID of padding tokens. Any ID works, because row lengths determine padding."""
        return 0 if self.tokenizer.pad_token_id is None else int(self.tokenizer.pad_token_id)


def loader_of(rows: Rows, run: RunConfig, processes: int, rank: int = 0) -> Loader:
    """Return the loader of the training rows for this process; `run` has a resolved bin size."""
    layout = layout_of(run, run.batching.rows, rows.objective, rows.pad_id)
    split = StepSplit(run.batching.accumulation, processes, rank)
    return Loader(rows.data.train, layout, split, run.seed, run.batching.order)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Optimizer steps of the whole run and of one epoch."""

    steps: int
    steps_per_epoch: int

    def epoch(self, step: int) -> float:
        """Return the epochs after `step` steps."""
        return step / self.steps_per_epoch

    def every(self, interval: int | str) -> int:
        """Return the steps of an interval, which may be a fraction of an epoch such as 0.25epoch; at least 1."""
        if isinstance(interval, int):
            return interval
        return max(1, round(float(interval.removesuffix("epoch")) * self.steps_per_epoch))


def read_rows(
    run: RunConfig,
    base: BaseModel,
    say: Callable[[str], None],
    *,
    splits: str = TRAINED,
    problems: list[str] | None = None,
) -> Rows:
    """Read the rows of a run as tokens, and resolve the settings that depend on them.

    `base` may differ from the model in the config. `splits` is TRAINED, or SCORED to read only the rows to score, as
    `eval`. A check passes `problems`, a list that collects the errors of a run; without it they are raised.
    """
    report = refuse if problems is None else problems.extend
    limited = within_positions(run.dataset, base, say)
    packed = with_packing(run, base, say)
    _note_length_of_pairs(packed, base, say)
    load = partial(load_tokenizer, run.model, shipped=base.task.tokenizer)
    has_template = lambda: bool(load(needs_template=False).chat_template)  # noqa: E731  (may not be called)
    dataset, notes = detect_formats(limited, formats_for(run.task.kind), has_template)
    if notes and (wrong := problems_of(replace(packed, dataset=dataset))):
        raise ConfigError([*wrong[:-1], f"{wrong[-1]} ({'; '.join(notes)})"])
    tokenizer = load(needs_template=has_chats(dataset))
    data = _read(packed, dataset, tokenizer, base, notes, splits, problems)
    trains = splits == TRAINED and problems is None
    report(_class_problems(packed.task, dataset, data.classes, base.task, trains=trains))
    task, wrong_weights = _task_of_rows(packed.task, base.task, data)
    report(wrong_weights)
    of_labels = base if task.labels == packed.task.labels else replace(base, task=task_of(task))
    grown = _with_new_rows(packed, of_labels, tokenizer, say)
    vocabulary = grown.model.vocab_size
    same_rows = vocabulary == base.config.vocab_size
    resized = of_labels if same_rows else replace(of_labels, config=replace(base.config, vocab_size=vocabulary))
    objective = build_objective(task, tokenizer, run.seed, bidirectional=resized.is_bidirectional)
    report(_unknown_ids(grown, resized, data.train, data.eval))
    settled = replace(grown, dataset=dataset, task=task, adapter=_with_names_of_model(grown.adapter, resized))
    rows = Rows(settled, resized, tokenizer, data, objective)
    if not trains:
        return rows
    metrics = metrics_of(settled)
    if settled.eval.objective not in metrics:
        raise ConfigError(
            f"eval.objective={settled.eval.objective}: this task has no such metric. Choose one of "
            f"{', '.join(metrics)}."
        )
    also, lines = rows_of_also(rows)
    data.report.notes += lines
    return replace(rows, also=also)


def _read(
    run: RunConfig,
    dataset: DatasetConfig,
    tokenizer: Any,
    base: BaseModel,
    notes: list[str],
    splits: str,
    problems: list[str] | None,
) -> Data:
    labels = run.task.labels, labeling_of(run.task)
    if splits == SCORED:
        judge = partial(stop_if_wrong, longest_row=base.longest_row, trains=False)
        return rows_to_score(dataset, tokenizer, run.cache_dir, notes, judge, *labels)
    if problems is None:
        judge = partial(stop_if_wrong, longest_row=base.longest_row)
        return prepare(dataset, tokenizer, run.cache_dir, notes, judge, *labels)
    policies = {name: getattr(run.dataset, name) for name in ("on_bad_row", "on_overflow", "on_unstable_template")}

    def collect(section: DatasetConfig, source: Source, counts: RowCounts) -> None:
        problems.extend(stop_reasons(replace(section, **policies), source, counts, base.longest_row))

    if has_auto_bins(run):
        bins = suggested_bin(replace(run, dataset=dataset))
        notes = [*notes, f"batching.tokens=auto is set at the start of a run; this check uses bins of {bins:,} tokens"]
    return prepare(without_stops(dataset), tokenizer, run.cache_dir, notes, collect, *labels)


def _task_of_rows(task: TaskConfig, facts: Task, data: Data) -> tuple[TaskConfig, list[str]]:
    """Return the task with the labels and class weights of the rows, and problems of the weights."""
    if facts.has_classes and not task.labels and len(data.classes) >= PROBLEMS[task.problem].least_labels:
        task = replace(task, labels=list(data.classes))
    if task.class_weights is None or not task.labels:
        return task, []
    weights, problems = _class_weights(task, data)
    return replace(task, class_weights=weights), problems


def _with_names_of_model(adapter: AdapterConfig, base: BaseModel) -> AdapterConfig:
    """Return the adapter with the layer names of the trained model instead of those of its start adapter."""
    if adapter.start is None:
        return adapter
    adapter = with_names(adapter, lambda name: base.names.of_trained(name) or name)
    return replace(adapter, targets=short_names(adapter.targets, base.on_meta()))


def rows_of_also(rows: Rows) -> tuple[TokenRows | None, list[str]]:
    """Return the rows of `eval.also`, in any format of the task, and report lines."""
    run, base = rows.run, rows.base
    if run.eval.also is None:
        return None, []
    judge = partial(stop_if_wrong, longest_row=base.longest_row, trains=False)
    labels = KnownLabels(labeling_of(run.task), tuple(run.task.labels))
    settings = (formats_for(run.task.kind), rows.tokenizer, run.cache_dir, judge, labels)
    also, lines = extra_eval_rows(run.eval.also, run.dataset, *settings)
    refuse(_unknown_ids(run, base, also))
    return also, lines


def _note_length_of_pairs(run: RunConfig, base: BaseModel, say: Callable[[str], None]) -> None:
    """Print a note if bins of pairs limit `dataset.max_length` to less than the default of the model."""
    documents, length = base.task.documents, run.dataset.max_length
    if documents == 1 or not run.batching.packing or has_auto_bins(run):
        return
    if length == run.batching.bin_tokens // documents < run.model.suggest.length:
        both = f"a bin of batching.tokens={run.batching.tokens} must fit both answers of a pair"
        more = documents * run.model.suggest.length
        say(f"note    dataset.max_length={length}: {both}. For longer answers, raise both, e.g. batching.tokens={more}")


def within_positions(dataset: DatasetConfig, base: BaseModel, say: Callable[[str], None]) -> DatasetConfig:
    """Limit `max_length` to the positions of the model; longer rows are overlong. More than a chunk is an error."""
    longest, limit = dataset.max_length, base.longest_row(dataset.max_length)
    if limit == longest:
        return dataset
    if limit == base.attention_chunk and longest != base.config.suggest.length:
        raise ConfigError(f"dataset.max_length={longest}: {base.limit_text(limit)}. Set dataset.max_length={limit}.")
    say(f"note    dataset.max_length={longest} -> {limit}: {base.limit_text(limit)}")
    return replace(dataset, max_length=limit)


def _class_weights(task: TaskConfig, data: Data) -> tuple[list[float] | None, list[str]]:
    """Return the weight of each label, set or balanced, and problems of the weights."""
    weights, labels = task.class_weights, task.labels
    if isinstance(weights, list):
        listed = ", ".join(labels)
        wrong = (
            f"task.class_weights has {len(weights)} numbers, but there are {len(labels)} labels: {listed}. Set one for "
            "each label."
        )
        return weights, [wrong] if len(weights) != len(labels) else []
    try:
        return class_weights(labeling_of(task), labels, data.train.class_counts(), len(data.train)), []
    except ValueError as fault:
        return None, [
            f"task.class_weights=balanced: {fault}, so its weight is undefined. Remove it from task.labels and rows, "
            "or give the weights as numbers."
        ]


def _with_new_rows(run: RunConfig, base: BaseModel, tokenizer: Any, say: Callable[[str], None]) -> RunConfig:
    """Return the run with the IDs of new tokens for `train_tokens=new`, and with embedding rows for all of them."""
    ids, vocab_size = new_ids(run.model, tokenizer), run.model.vocab_size
    last = max(ids, default=-1)
    rows = base.vocabulary(last) if ids else 0
    if last >= rows and vocab_size is not None:
        raise ConfigError(
            f"model.vocab_size={vocab_size}: new tokens have ids up to {last}. Set {last + 1} or more, or null."
        )
    if last >= rows:
        vocab_size = (last // ROWS_MULTIPLE + 1) * ROWS_MULTIPLE
    adapter = replace(run.adapter, train_tokens=ids) if run.adapter.train_tokens == "new" else run.adapter
    run = replace(run, model=replace(run.model, vocab_size=vocab_size), adapter=adapter)
    refuse(_resizing_problems(run, base))
    if last >= rows:
        say(f"note    model.vocab_size={vocab_size}: the base has {rows} rows; new rows start as their mean")
    return run


def _resizing_problems(run: RunConfig, base: BaseModel) -> Iterator[str]:
    """Yield the reasons why the vocabulary cannot have `model.vocab_size` rows."""
    rows, texts = run.model.vocab_size, run.model.add_tokens
    if rows is None:
        return
    key = "model.add_tokens" if texts else f"model.vocab_size={rows}"
    other = "Resize the base with transformers, and set model.path to its folder."
    if run.model.weights == "random":
        yield f"{key}: the weights are random. Set model.architecture.vocab_size={rows}."
    elif base.text_part is not None:
        yield f"{key}: resizing the text part of a multimodal model is not supported. {other}"
    elif not base.is_resizable:
        yield f"{key}: {base.numbers.model_type} has more than two per-token tensors, which is not supported. {other}"
    elif base.task.has_classes and run.adapter.kind != "none":
        yield (
            f"{key}: not supported for an adapter with classes, because other programs load the base unresized, with "
            "the config.json of final/. Set recipe=full, or resize the base with transformers and set model.path to "
            "its folder."
        )


def with_planned_rows(run: RunConfig) -> RunConfig:
    """Return the run with one trained row per new token, for a memory estimate without a tokenizer."""
    if run.adapter.train_tokens != "new":
        return run
    return replace(run, adapter=replace(run.adapter, train_tokens=[*range(len(run.model.add_tokens))]))


def _class_problems(
    task: TaskConfig, dataset: DatasetConfig, classes: Sequence[str], facts: Task, *, trains: bool
) -> Iterator[str]:
    """Yield the problem of rows with too few labels to train on."""
    least = PROBLEMS[task.problem].least_labels if facts.has_classes else 2
    if (facts.has_classes and task.labels) or (not facts.has_classes and not (trains and len(classes) == 1)):
        return
    if len(classes) < least:
        only = f"all rows have the label {classes[0]}" if classes else "no row has a label"
        yield f"dataset.path={paths_of(dataset)}: {only}, so {facts.one_label}"


def _unknown_ids(run: RunConfig, base: BaseModel, *splits: TokenRows | None) -> Iterator[str]:
    """Yield the problem of token IDs beyond the embedding, which would crash on a GPU without a message."""
    largest = max(rows.largest_id for rows in splits if rows is not None)
    vocabulary = base.vocabulary(largest)
    if largest >= vocabulary:
        yield (
            f"model.tokenizer={run.model.tokenizer or 'null'}: it has ids up to {largest}, but the model has only "
            f"{vocabulary} (0 to {vocabulary - 1}). Set the tokenizer of model.path={run.model.path}."
        )


def layout_of(run: RunConfig, rows: int, objective: Objective, pad_id: int = 0) -> Layout:
    """Return the layout: bins, or `rows` padded rows."""
    if run.batching.packing:
        return Packed(run.batching.bin_tokens, pad_id, run.dataset.max_length, objective)
    return Padded(rows, pad_id, objective)


def plan_steps(training: TrainingConfig, steps_per_epoch: int) -> StepPlan:
    """Return the steps of `epochs`, rounded up, limited to `max_steps`."""
    steps = math.ceil(training.epochs * steps_per_epoch - 1e-9)  # 0.1 * 30 is a little more than 3
    steps = steps if training.max_steps is None else min(steps, training.max_steps)
    return StepPlan(steps=max(steps, 1), steps_per_epoch=steps_per_epoch)
