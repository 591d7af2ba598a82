"""Tasks of lm-evaluation-harness, an optional package, on the model of a run in the dtypes of training.

Its model class wraps ours, with the attention of transformers: packed attention has neither caches nor padding.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config.validate import did_you_mean
from app.distributed.launch import world
from app.errors import EnvironmentProblem, gist, refuse
from app.tracking.formatting import align_columns

if TYPE_CHECKING:
    from app.model.training_model import TrainingModel

# torch and lm_eval are imported inside functions, so that a missing lm_eval is reported at once

Metrics = dict[str, dict[str, float]]  # by task


@dataclass(frozen=True, slots=True)
class Harness:
    """Tasks whose rows are on this machine."""

    tasks: Sequence[str]
    manager: Any
    limit: int | None
    chat: bool

    def evaluate(self, training_model: "TrainingModel", tokenizer: Any, rows: int) -> Metrics:
        """Return the metrics of each task and group, in batches of `rows`."""
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        from app.layers.attention import own_attention

        lm = training_model.language_model
        lm.set_attn_implementation(own_attention(lm))
        compute_dtype = training_model.compute
        model = HFLM(pretrained=lm, tokenizer=tokenizer, batch_size=rows, mixed_precision_dtype=compute_dtype)
        output = simple_evaluate(
            model=model,
            tasks=list(self.tasks),
            task_manager=self.manager,
            limit=self.limit,
            apply_chat_template=self.chat,
            log_samples=False,
        )
        results = {**output["results"], **output.get("groups", {})}
        return {name: scores_of(values) for name, values in results.items()}

    def facts(self) -> dict[str, Any]:
        """Return settings and version, for harness.json."""
        return {"limit": self.limit, "chat": self.chat, "lm_eval": version("lm_eval")}


def require_harness(tasks: Sequence[str]) -> None:
    """Raise for several processes or a missing package, before slow imports."""
    if world().is_joined:
        raise EnvironmentProblem("harness= runs in one process: start it without torchrun or srun")
    if find_spec("lm_eval") is None:
        raise EnvironmentProblem(
            f"harness={','.join(tasks)} needs the package lm_eval (lm-evaluation-harness), which is not installed: "
            "pip install 'lm_eval>=0.4.13,<0.5', or remove harness="
        )


def prepare_harness(tasks: Sequence[str], limit: int | None, *, chat: bool) -> Harness:
    """Check that every task exists and download its rows, before weights are loaded."""
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager()
    refuse(
        f"harness={name}: unknown task, and no such file.{did_you_mean(name, manager.all_tasks)}"
        for name in tasks
        if name not in manager.all_tasks and not Path(name).is_file()
    )
    try:
        manager.load(list(tasks))
    except (OSError, ValueError) as fault:
        raise EnvironmentProblem(
            f"harness={','.join(tasks)}: could not read the rows of a task ({gist(fault)}). Most tasks download them "
            "from the Hugging Face hub: connect to it, or set HF_HOME to a cache that has them."
        ) from fault
    return Harness(tasks, manager, limit, chat)


def with_earlier_tasks(sides: Mapping[str, Metrics], facts: Mapping[str, Any], file: Path) -> dict[str, Metrics]:
    """Add the results of other tasks in `file`, if they have the same settings."""
    before = json.loads(file.read_text()) if file.is_file() else {}
    if any(before.get(key) != value for key, value in facts.items()):
        return dict(sides)
    names = [name for name in ("tuned", "base") if name in before or name in sides]
    return {name: {**before.get(name, {}), **sides.get(name, {})} for name in names}


def table(sides: Mapping[str, Metrics]) -> str:
    """Return a text table, the base first."""
    names = [name for name in ("base", "tuned") if name in sides]
    lines = [["", "", *names]] + [
        [task, metric, *(_with_error(sides[name].get(task, {}), metric) for name in names)]
        for task, metrics in sides[names[0]].items()
        for metric in metrics
        if not metric.endswith("_stderr")
    ]
    return align_columns(lines)


def _with_error(metrics: Mapping[str, float], metric: str) -> str:
    if metric not in metrics:
        return "none"
    error = metrics.get(f"{metric}_stderr")
    return f"{metrics[metric]:.4f}" + (f" +- {error:.4f}" if error is not None else "")


def scores_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Return scores by plain names: `acc,none` is a metric and its filter; the filter `none` is omitted."""
    scores = {}
    for key, value in values.items():
        metric, comma, how = key.partition(",")
        if comma and isinstance(value, int | float) and math.isfinite(value):
            stem, error, _ = metric.partition("_stderr")
            scores[f"{stem}{'' if how == 'none' else ' ' + how}{error}"] = float(value)
    return scores
