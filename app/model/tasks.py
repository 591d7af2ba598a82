"""The classes of transformers for a task, and what their configuration takes from it."""

from typing import Any

import transformers

from app.config.tasks import Task


def model_class(task: Task) -> Any:
    """The auto class of transformers that builds the task's models."""
    return getattr(transformers, task.auto_class)


def class_of(task: Task, numbers: Any) -> Any | None:
    """The model class for a configuration, None where its kind has none."""
    return getattr(transformers, task.mapping).get(type(numbers), None)


def has_class_for(task: Task, kind: str) -> bool:
    """Whether transformers has a class of this task for the kind."""
    from transformers.models.auto import modeling_auto

    return kind in getattr(modeling_auto, f"{task.mapping}_NAMES")


def configured(task: Task, numbers: Any) -> Any:
    """The configuration with the labels of the run."""
    if task.labels:
        numbers.id2label = dict(enumerate(task.labels))
        numbers.label2id = {label: at for at, label in enumerate(task.labels)}
        numbers.problem_type = "single_label_classification"
    if task.pooled and hasattr(numbers, "classifier_pooling"):
        numbers.classifier_pooling = "cls"  # the classifier is new: nothing has learnt the mean of all tokens
    return numbers
