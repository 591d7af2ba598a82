"""Facts about a dataset that its configuration gives: sources, formats, which tokens are trained."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from app.config.dataset_schema import Columns, DatasetConfig, MixSource
from app.config.row_formats import CHAT_FORMATS, ROW_FORMATS, WITHOUT_ANSWERS
from app.config.tasks import TASKS

RANDOM = "random:"  # the path of rows that are made from a seed
WITHOUT_HELD_OUT_ROWS: Mapping[str, Any] = {"eval_path": None, "eval_split": None, "eval_fraction": 0.0}


def sources_of(dataset: DatasetConfig) -> dict[str, DatasetConfig]:
    """The section of each source with a weight, by its name in `dataset.mix`; a single source has an empty name."""
    if not dataset.mix:
        return {"": dataset}
    return {name: _section(dataset, source) for name, source in dataset.mix.items() if source.weight}


def _section(dataset: DatasetConfig, source: MixSource) -> DatasetConfig:
    """The keys of `dataset` with those of the source; sources never share `hub_config` and `revision`."""
    known = {each.name for each in fields(Columns)}  # the rules report a misspelt one
    return replace(
        dataset,
        mix={},
        path=source.path,
        format=source.format or dataset.format,
        split=source.split or dataset.split,
        max_rows=source.max_rows or dataset.max_rows,
        hub_config=source.hub_config,
        revision=source.revision,
        columns=replace(dataset.columns, **{k: v for k, v in source.columns.items() if k in known}),
    )


def key_of(name: str) -> str:
    """Prefix of the keys of a source."""
    return f"dataset.mix.{name}" if name else "dataset"


def paths_of(dataset: DatasetConfig) -> str:
    """The paths of all sources as text."""
    return " + ".join(str(section.path) for section in sources_of(dataset).values())


def paths_read(dataset: DatasetConfig) -> list[str | None]:
    """The paths of all sources, and that of the held-out rows."""
    return [*(section.path for section in sources_of(dataset).values()), dataset.eval_path]


def formats_of(dataset: DatasetConfig) -> str:
    """The formats of all sources as text."""
    return " + ".join(dict.fromkeys(section.format for section in sources_of(dataset).values()))


def formats_for(task: str) -> tuple[str, ...]:
    """The formats that a task can be trained on; `dataset.format=auto` chooses among them."""
    return tuple(fmt for fmt in ROW_FORMATS if fmt in TASKS[task].formats)


def trains_answers(dataset: DatasetConfig) -> bool:
    """Whether the trained tokens answer a prompt; otherwise whole rows are trained."""
    formats = {source.format for source in sources_of(dataset).values()}
    return not formats.issubset(WITHOUT_ANSWERS) and dataset.train_on != "all"


def has_chats(dataset: DatasetConfig) -> bool:
    """Whether a chat template renders any rows, including those of `dataset.eval_path`."""
    formats = {source.format for source in sources_of(dataset).values()}
    if dataset.eval_path is not None:
        formats.add(dataset.format)
    return not formats.isdisjoint(CHAT_FORMATS)


def has_pairs(dataset: DatasetConfig) -> bool:
    """Whether any rows have two texts."""
    return any(section.format == "text_pair" for section in sources_of(dataset).values())


def has_held_out_rows(dataset: DatasetConfig) -> bool:
    """Whether the dataset has rows for evaluation."""
    return any(getattr(dataset, name) != nothing for name, nothing in WITHOUT_HELD_OUT_ROWS.items())
