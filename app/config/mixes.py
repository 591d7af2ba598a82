"""What `dataset.mix` means: each of its sources as a section of its own, and what is wrong with it."""

from collections.abc import Iterator
from dataclasses import fields, replace

from app.config.dataset_schema import Columns, DatasetConfig, MixSource
from app.config.suggest import did_you_mean_key


def sources_of(dataset: DatasetConfig) -> dict[str, DatasetConfig]:
    """The section of each source that has a weight, by its name in `dataset.mix`; of a single one, without a name."""
    if not dataset.mix:
        return {"": dataset}
    return {name: _section(dataset, source) for name, source in dataset.mix.items() if source.weight}


def _section(dataset: DatasetConfig, source: MixSource) -> DatasetConfig:
    """A revision and a configuration of the hub belong to one source; the rest is that of the dataset unless given."""
    known = {each.name for each in fields(Columns)}  # a misspelt one is told by mix_problems
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


def paths_of(dataset: DatasetConfig) -> str:
    """Where the rows are from, for people."""
    return " + ".join(str(section.path) for section in sources_of(dataset).values())


def formats_of(dataset: DatasetConfig) -> str:
    """Of all sources, for people."""
    return " + ".join(dict.fromkeys(section.format for section in sources_of(dataset).values()))


def key_of(name: str) -> str:
    """Where the keys of a source begin."""
    return f"dataset.mix.{name}" if name else "dataset"


def mix_problems(dataset: DatasetConfig, formats: tuple[str, ...]) -> Iterator[str]:
    """What single keys cannot say; `formats` are those that a source can have."""
    if dataset.path is None and not dataset.mix:
        yield (
            "dataset.path=null names no rows. Give dataset.path=FILE, or dataset.mix.NAME.path=FILE "
            "for each of several."
        )
    if not dataset.mix:
        return
    if dataset.path is not None:
        yield (
            f"dataset.path={dataset.path} and dataset.mix both name the rows. Choose dataset=mix or dataset.path=null, "
            "with one more dataset.mix.NAME.path if those rows are wanted too."
        )
    if dataset.eval_split is not None:
        yield (
            f"dataset.eval_split={dataset.eval_split} says not of which source of dataset.mix. "
            "Set dataset.eval_path=FILE or dataset.eval_fraction=0.02."
        )
    if not any(source.weight for source in dataset.mix.values()):
        yield "dataset.mix: every weight is 0, so nothing is trained on. Set dataset.mix.NAME.weight=1."
    for name, source in dataset.mix.items():
        yield from _source_problems(name, source, formats)


def _source_problems(name: str, source: MixSource, formats: tuple[str, ...]) -> Iterator[str]:
    key = key_of(name)
    if source.format is not None and source.format not in formats:
        yield f"{key}.format={source.format} is none of {', '.join(formats)}."
    known = [f"{key}.columns.{each.name}" for each in fields(Columns)]
    for column, value in source.columns.items():
        if f"{key}.columns.{column}" not in known:
            yield f"{key}.columns.{column} is not a key.{did_you_mean_key(f'{key}.columns.{column}', known)}"
        elif value is not None and not isinstance(value, str):
            yield f"{key}.columns.{column}={value}: expected the name of a column."
