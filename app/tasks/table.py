"""Tasks by name, and the parts of a task that a run uses."""

import numpy as np

from app.config.schema import RunConfig, TaskConfig
from app.data.objectives import Objective
from app.data.tokenizer import Tokenizer
from app.model.losses import Loss
from app.tasks.causal import CAUSAL
from app.tasks.classification import CLASSIFICATION
from app.tasks.interface import NUM_BASIC, Counts, Implementation
from app.tasks.masked import MASKED
from app.tasks.preference import LABELED_ANSWERS, PAIRS
from app.tasks.tagging import TAGGING

IMPLEMENTATIONS: dict[str, Implementation] = {
    "causal": CAUSAL,
    "masked": MASKED,
    "classification": CLASSIFICATION,
    "tokens": TAGGING,
    "preference": PAIRS,
    "preference_label": LABELED_ANSWERS,
}


def build_objective(config: TaskConfig, tokenizer: Tokenizer, seed: int, *, bidirectional: bool) -> Objective:
    """Return the objective of a task for a model with bidirectional or causal attention."""
    return IMPLEMENTATIONS[config.kind].objective(config, tokenizer, seed, bidirectional)


def loss_of(run: RunConfig) -> Loss:
    """Return the loss of a run."""
    return IMPLEMENTATIONS[run.task.kind].loss(run.task, run.preference)


def counts_of(run: RunConfig) -> Counts:
    """Return the counts of the eval set."""
    return IMPLEMENTATIONS[run.task.kind].counts(run)


def metrics_of(run: RunConfig) -> list[str]:
    """Return the metric names of the eval set."""
    counts = counts_of(run)
    rows = np.zeros((1, NUM_BASIC + counts.num_task_columns))
    return list(counts.metrics(rows if counts.of_all is None else counts.of_all(rows)))
