"""The labels of a run: learnt from its rows before anything is built that depends on how many they are."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from app.config.dataset import paths_of
from app.config.schema import RunConfig
from app.errors import ConfigError

Run = TypeVar("Run", bound=RunConfig)


def with_classes(run: Run, known: Sequence[str]) -> Run:
    """The run with its labels in their order, which run.yaml keeps."""
    if run.task.kind != "classification" or run.task.labels:
        return run
    if len(known) < 2:
        only = f"all have the label {known[0]}" if known else "none has a label"
        raise ConfigError(
            f"dataset.path={paths_of(run.dataset)}: of its rows {only}, so there is nothing to choose. Give rows "
            "of two labels or more, or name all there are: task.labels=[one,other]."
        )
    return replace(run, task=replace(run.task, labels=list(known)))


def class_notes(run: RunConfig) -> Iterator[str]:
    """What is new about the model, for people."""
    if run.task.labels:
        drawn = f"drawn from seed={run.seed} where the model has none of its size"
        yield f"the classifier, of {len(run.task.labels)} labels, is {drawn}; it is trained as a whole in any recipe"
