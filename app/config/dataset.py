"""What is known of a dataset before any row is read: its sources, and what their formats mean."""

from collections.abc import Mapping
from dataclasses import fields, replace

from app.config.schema import Columns, DatasetConfig, MixSource

# rendered by a chat template
CHAT_FORMATS = ("messages", "sharegpt", "instruction", "question_answer", "chat_completion")

LABELLED_FORMATS = ("labelled_text", "text_pair")  # a text or two, and the class that they are of

# what `dataset.train_on` can mean for rows of each format
TRAIN_ON: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(CHAT_FORMATS, ("auto", "assistant", "last", "all")),
    "chat_completion": ("auto", "completion", "assistant", "last", "all"),
    "prompt_completion": ("auto", "completion", "all"),
    "text": ("auto", "all"),
    **dict.fromkeys(LABELLED_FORMATS, ("auto",)),
    "auto": ("auto", "assistant", "last", "completion", "all"),  # asked again once the rows are known
}


def sources_of(dataset: DatasetConfig) -> dict[str, DatasetConfig]:
    """The section of each source that has a weight, by its name in `dataset.mix`; of a single one, without a name."""
    if not dataset.mix:
        return {"": dataset}
    return {name: _section(dataset, source) for name, source in dataset.mix.items() if source.weight}


def _section(dataset: DatasetConfig, source: MixSource) -> DatasetConfig:
    """A revision and a configuration of the hub belong to one source; the rest is that of the dataset unless given."""
    known = {each.name for each in fields(Columns)}  # a misspelt one is told by the rules
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
    """Where the keys of a source begin."""
    return f"dataset.mix.{name}" if name else "dataset"


def paths_of(dataset: DatasetConfig) -> str:
    """Where the rows are from, for people."""
    return " + ".join(str(section.path) for section in sources_of(dataset).values())


def formats_of(dataset: DatasetConfig) -> str:
    """Of all sources, for people."""
    return " + ".join(dict.fromkeys(section.format for section in sources_of(dataset).values()))


def formats_for(task: str) -> tuple[str, ...]:
    """Those whose rows a task can learn from; `dataset.format=auto` looks for no other."""
    of_labels = task == "classification"
    return tuple(fmt for fmt in TRAIN_ON if fmt != "auto" and (fmt in LABELLED_FORMATS) is of_labels)


def trains_answers(dataset: DatasetConfig) -> bool:
    """Whether what is trained of a row answers what stands before it; else it is the whole row."""
    formats = {source.format for source in sources_of(dataset).values()}
    return not formats <= {"text", *LABELLED_FORMATS} and dataset.train_on != "all"


def has_chats(dataset: DatasetConfig) -> bool:
    """Whether a chat template writes any of the rows, held-out ones of a file of their own among them."""
    formats = {source.format for source in sources_of(dataset).values()}
    if dataset.eval_path is not None:
        formats.add(dataset.format)
    return not formats.isdisjoint(CHAT_FORMATS)
