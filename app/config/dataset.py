"""Facts and rules about the dataset: sources, formats, trained tokens, labels, mixtures."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from app.config.kinds import CHAT_FORMATS, PROBLEMS, ROW_FORMATS, WITHOUT_ANSWERS
from app.config.schema import Columns, DatasetConfig, MixSource, RunConfig
from app.config.tasks import TASKS
from app.config.validate import did_you_mean_key, format_value

RANDOM = "random:"  # path of rows generated from a seed
RANDOM_ROWS = "dataset.random."  # prefix of their keys
WITHOUT_HELD_OUT_ROWS: Mapping[str, Any] = {"eval_path": None, "eval_split": None, "eval_fraction": 0.0}


def sources_of(dataset: DatasetConfig) -> dict[str, DatasetConfig]:
    """Return the section of each source with a weight by its name in `dataset.mix`; a single source has no name."""
    if not dataset.mix:
        return {"": dataset}
    return {name: _section(dataset, source) for name, source in dataset.mix.items() if source.weight}


def _section(dataset: DatasetConfig, source: MixSource) -> DatasetConfig:
    """Return `dataset` with the keys of the source; sources never share `hub_config` and `revision`."""
    column_names = {column.name for column in fields(Columns)}  # the rules report unknown ones
    return replace(
        dataset,
        mix={},
        path=source.path,
        format=source.format or dataset.format,
        split=source.split or dataset.split,
        max_rows=source.max_rows or dataset.max_rows,
        sample=source.sample or dataset.sample,
        hub_config=source.hub_config,
        revision=source.revision,
        columns=replace(dataset.columns, **{k: v for k, v in source.columns.items() if k in column_names}),
    )


def key_of(name: str) -> str:
    """Return the key prefix of a source."""
    return f"dataset.mix.{name}" if name else "dataset"


def paths_of(dataset: DatasetConfig) -> str:
    """Return the paths of all sources as text."""
    return " + ".join(str(section.path) for section in sources_of(dataset).values())


def paths_read(dataset: DatasetConfig) -> list[str | None]:
    """Return the paths of all sources and of the eval set."""
    return [*(section.path for section in sources_of(dataset).values()), dataset.eval_path]


def formats_of(dataset: DatasetConfig) -> str:
    """Return the formats of all sources as text."""
    return " + ".join(dict.fromkeys(section.format for section in sources_of(dataset).values()))


def formats_for(task: str) -> tuple[str, ...]:
    """Return the formats that a task supports; `dataset.format=auto` detects one of them."""
    return tuple(fmt for fmt in ROW_FORMATS if fmt in TASKS[task].formats)


def trains_answers(dataset: DatasetConfig) -> bool:
    """Return whether only answers to prompts are trained, not whole rows."""
    formats = {source.format for source in sources_of(dataset).values()}
    return not formats.issubset(WITHOUT_ANSWERS) and dataset.train_on != "all"


def has_chats(dataset: DatasetConfig) -> bool:
    """Return whether any rows, including those of `dataset.eval_path`, are rendered by a chat template."""
    formats = {source.format for source in sources_of(dataset).values()}
    if dataset.eval_path is not None:
        formats.add(dataset.format)
    return not formats.isdisjoint(CHAT_FORMATS)


def has_pairs(dataset: DatasetConfig) -> bool:
    """Return whether any rows are text pairs."""
    return any(section.format == "text_pair" for section in sources_of(dataset).values())


def has_held_out_rows(dataset: DatasetConfig) -> bool:
    """Return whether the dataset has an eval set."""
    return any(getattr(dataset, name) != nothing for name, nothing in WITHOUT_HELD_OUT_ROWS.items())


# ---- data rules


_LIST_PATH = re.compile(r"[^*]+\.\*(\.[^*]+)?")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def _train_on_problems(run: RunConfig) -> Iterator[str]:
    for name, source in sources_of(run.dataset).items():
        allowed = ROW_FORMATS[source.format].train_on if source.format in ROW_FORMATS else ()
        if allowed and source.train_on not in allowed:
            yield (
                f"dataset.train_on={source.train_on} is not supported for {key_of(name)}.format={source.format}. "
                f"Choose {' or '.join(allowed)}."
            )


def _thinking_problems(run: RunConfig) -> Iterator[str]:
    thinking, sources = run.dataset.thinking, sources_of(run.dataset).values()
    if thinking == "train":
        return
    if all(source.format not in (*CHAT_FORMATS, "auto") for source in sources):
        formats = " and ".join(sorted({source.format for source in sources}))
        yield f"dataset.thinking={thinking} has no effect: rows of dataset.format={formats} are not messages."
    elif thinking == "mask" and run.dataset.train_on == "all":
        yield (
            "dataset.thinking=mask with dataset.train_on=all, which trains on all tokens including reasoning. Set "
            "dataset.train_on=auto, or dataset.thinking=train."
        )


def _format_problems(run: RunConfig) -> Iterator[str]:
    task = TASKS[run.task.kind]
    for name, source in sources_of(run.dataset).items():
        if source.format in (*task.formats, "auto"):
            continue
        recipes = ROW_FORMATS[source.format].learnt_by if source.format in ROW_FORMATS else ()
        remedy = f"such rows need {' or '.join(recipes)}." if recipes else task.other_rows
        yield f"{key_of(name)}.format={source.format}: {remedy}"


def _mask_share_problems(run: RunConfig) -> Iterator[str]:
    task = TASKS[run.task.kind]
    if task.unit == "token" and task.sees == "both" and run.task.mask_share <= 0:
        yield f"task.mask_share={run.task.mask_share:g} masks nothing. Set task.mask_share=0.15."


def _label_problems(run: RunConfig) -> Iterator[str]:
    labels, setting = run.task.labels, f"task.labels={format_value(run.task.labels)}"
    least = PROBLEMS[run.task.problem].least_labels
    if labels and not TASKS[run.task.kind].has_classes:
        yield f"{setting} has no effect with task={run.task.kind}. Set task=classification, or leave it out."
    elif 0 < len(labels) < least:
        yield f"{setting}: at least two labels are needed. List all, or none to use those of the rows."
    elif len(set(labels)) < len(labels):
        duplicates = sorted({label for label in labels if labels.count(label) > 1})
        yield f"{setting}: duplicate label {', '.join(duplicates)}. List each label once."


def _class_weight_problems(run: RunConfig) -> Iterator[str]:
    weights, labels = run.task.class_weights, run.task.labels
    setting = f"task.class_weights={format_value(weights)}"
    if weights is None:
        return
    if not PROBLEMS[run.task.problem].named:
        yield f"{setting} with task.problem={run.task.problem}: regression has no classes. Leave it out."
    elif isinstance(weights, list) and not all(0 < weight < math.inf for weight in weights):
        yield f"{setting}: weights must be above 0 and finite. To exclude a label, leave it out of the rows."
    elif isinstance(weights, list) and labels and len(labels) != len(weights):
        yield f"{setting} has {len(weights)} numbers for {len(labels)} labels of task.labels. Give one per label."


def _list_column_problems(run: RunConfig) -> Iterator[str]:
    shared_columns = _starred(run.dataset, "dataset")
    yield from _star_problems(shared_columns)
    for name, section in sources_of(run.dataset).items():
        source_columns = _starred(section, key_of(name))
        if list(source_columns.values()) != list(shared_columns.values()):
            yield from _star_problems(source_columns)


def _starred(section: DatasetConfig, key: str) -> dict[str, str]:
    columns = ((name, part) for name, path in asdict(section.columns).items() for part in str(path or "").split("+"))
    return {f"{key}.columns.{name}": part for name, part in columns if "*" in part}


def _star_problems(starred: dict[str, str]) -> Iterator[str]:
    for key, path in starred.items():
        if not _LIST_PATH.fullmatch(path):
            yield f"{key}={path}: use * for each element of a list, as in instances.*.output."
    if len({path.partition(".*")[0] for path in starred.values()}) > 1:
        settings = " ".join(f"{key}={path}" for key, path in starred.items())
        yield f"{settings}: rows come from the elements of one list. Use * after the same column everywhere."


def _overflow_problems(run: RunConfig) -> Iterator[str]:
    for name, source in sources_of(run.dataset).items():
        if source.on_overflow == "split" and source.format not in ("text", "auto"):
            yield (
                f"dataset.on_overflow=split is not supported for {key_of(name)}.format={source.format}. "
                "Choose drop, truncate or error."
            )


def _mix_problems(run: RunConfig) -> Iterator[str]:
    dataset = run.dataset
    if dataset.path is None and not dataset.mix:
        yield (
            "dataset.path=null: no dataset. Set dataset.path=FILE, or dataset.mix.NAME.path=FILE for each of several."
        )
    if not dataset.mix:
        return
    if dataset.path is not None:
        yield (
            f"dataset.path={dataset.path} and dataset.mix both set the dataset. Set dataset=mix or dataset.path=null, "
            "and add a dataset.mix.NAME.path to include those rows."
        )
    if dataset.eval_split is not None:
        yield (
            f"dataset.eval_split={dataset.eval_split} is not supported with dataset.mix. "
            "Set dataset.eval_path=FILE or dataset.eval_fraction=0.02."
        )
    if not any(source.weight for source in dataset.mix.values()):
        yield "dataset.mix: all weights are 0, so there is nothing to train on. Set dataset.mix.NAME.weight=1."
    for name, source in dataset.mix.items():
        yield from _source_problems(key_of(name), source)


def _source_problems(key: str, source: MixSource) -> Iterator[str]:
    formats = (*ROW_FORMATS, "auto")
    if source.format is not None and source.format not in formats:
        yield f"{key}.format={source.format}: expected one of {', '.join(formats)}."
    valid_keys = [f"{key}.columns.{schema_field.name}" for schema_field in fields(Columns)]
    for column, value in source.columns.items():
        if f"{key}.columns.{column}" not in valid_keys:
            yield f"Unknown setting {key}.columns.{column}.{did_you_mean_key(f'{key}.columns.{column}', valid_keys)}"
        elif value is not None and not isinstance(value, str):
            yield f"{key}.columns.{column}={value}: expected a column name."


def _sample_problems(run: RunConfig) -> Iterator[str]:
    shared = run.dataset
    conflicts = []
    for name, section in sources_of(shared).items():
        if section.sample is not None and section.max_rows is not None:
            source = shared.mix.get(name, shared)
            keys = [key_of(name if getattr(source, limit) else "") for limit in ("sample", "max_rows")]
            conflicts.append(f"{keys[0]}.sample={section.sample} and {keys[1]}.max_rows={section.max_rows}")
    for conflict in dict.fromkeys(conflicts):
        yield f"{conflict} both limit the rows. Keep one; set the other to null."


def _random_row_problems(run: RunConfig) -> Iterator[str]:
    dataset, rows = run.dataset, run.dataset.random
    if RANDOM not in paths_read(dataset):
        return
    if rows.shortest is not None and rows.shortest > rows.length:
        yield f"dataset.random.shortest={rows.shortest} exceeds dataset.random.length={rows.length}. Swap them."
    if rows.shortest is None and rows.lengths != "uniform":
        yield (
            f"dataset.random.lengths={rows.lengths} has no effect: all rows have dataset.random.length={rows.length}. "
            "Set dataset.random.shortest=8, or leave it out."
        )
    if rows.shortest is None and dataset.max_length > rows.length:
        yield (
            f"dataset.max_length={dataset.max_length} exceeds dataset.random.length={rows.length} (words per row), so "
            f"rows would be shorter. Set dataset.random.length={dataset.max_length}, or "
            "dataset.random.shortest for variable lengths."
        )


def _eval_set_problems(run: RunConfig) -> Iterator[str]:
    settings = [
        f"dataset.{name}={getattr(run.dataset, name)}"
        for name in ("eval_path", "eval_split", "eval_fraction")
        if getattr(run.dataset, name)
    ]
    if len(settings) > 1:
        yield f"{' and '.join(settings)} both set the eval set. Keep one; set the other to null or 0."


def _transform_problems(run: RunConfig) -> Iterator[str]:
    transform = run.dataset.transform
    if transform is not None and not _FUNCTION.fullmatch(transform):
        yield (
            f"dataset.transform={transform}: expected MODULE:FUNCTION, e.g. dataset.transform=mine:clean for "
            "clean(row) in mine.py."
        )


def _streaming_problems(run: RunConfig) -> Iterator[str]:
    splits = {f"{key_of(name)}.split": section.split for name, section in sources_of(run.dataset).items()}
    for key, split in {**splits, "dataset.eval_split": run.dataset.eval_split}.items():
        if run.dataset.streaming and "[" in (split or ""):
            yield (
                f"{key}={split}: dataset.streaming=true reads whole splits. Set {key}={str(split).partition('[')[0]}"
                " and dataset.max_rows=N, or dataset.streaming=false."
            )


def _worker_problems(run: RunConfig) -> Iterator[str]:
    if run.dataset.workers is not None:
        yield (
            f"dataset.workers={run.dataset.workers} has no effect anymore: one process prepares the rows, and its "
            "tokenizer uses all cores. Leave it out."
        )


DATA_RULES: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    _train_on_problems,
    _thinking_problems,
    _format_problems,
    _mask_share_problems,
    _label_problems,
    _class_weight_problems,
    _list_column_problems,
    _overflow_problems,
    _mix_problems,
    _sample_problems,
    _random_row_problems,
    _eval_set_problems,
    _transform_problems,
    _streaming_problems,
    _worker_problems,
)
