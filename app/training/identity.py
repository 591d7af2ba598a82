"""What makes a run the same run: what decides the numbers of its next step."""

from typing import Any

from app.config.schema import RunConfig
from app.data.loader import Loader
from app.data.token_dataset import TokenRows
from app.model.training_model import TrainingModel


def identity(
    run: RunConfig, rows: TokenRows, loader: Loader, trainee: TrainingModel, steps: int
) -> dict[str, Any]:
    """Plain values by the key to type; a checkpoint with other values is of another run."""
    return {
        "dataset (its tokens)": rows.fingerprint,
        "batching": f"{loader.units_per_step} {loader.unit_name} a step, {loader.num_units} an epoch",
        "seed": run.seed,
        "model.path": run.model.path,
        "model.weights": run.model.weights,
        "task.kind": run.task.kind,
        "task.mask_share": run.task.mask_share,
        # not where there are none: checkpoints of before know nothing of labels
        **({"task.labels": ", ".join(run.task.labels)} if run.task.labels else {}),
        "quantization.kind": run.quantization.kind,
        "quantization.double_quant": run.quantization.double_quant,
        "adapter.kind": run.adapter.kind,
        "adapter.alpha": run.adapter.alpha,
        "adapter.dropout": run.adapter.dropout,
        "trained parameters": sum(p.numel() for p in trainee.trained().values()),
        **({"precision.trained": run.precision.trained} if run.precision.trained != "fp32" else {}),
        "optimizer.kind": run.optimizer.kind,
        "optimizer.lr": run.optimizer.lr,
        "schedule.kind": run.schedule.kind,
        "steps": steps if run.schedule.kind != "constant" else "any",
    }
