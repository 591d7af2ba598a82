"""The end of a run: writes final/, the trained model or adapter, and result.json."""

import os
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from app.base.structure import BaseModel
from app.config.adapters import ADAPTER, changes_base
from app.config.finished_run import read_manifest
from app.config.metrics import METRICS
from app.config.tasks import task_of
from app.distributed.fsdp import local, whole_tensors
from app.files import checksummed_folder, read_json
from app.finished.save import needs_transformers_5, save_model, saved_tensors
from app.layers.experts import moved_experts
from app.layers.quantization import quantization_after_training
from app.model.build import DTYPES, ModelSections
from app.pages.model_card import CARD, Loading, model_card
from app.pages.page import Facts, Section, as_text
from app.tracking.recorder import samples_table
from app.training.adapter_start import read_start
from app.training.memory import Predicted
from app.training.plan import Plan
from app.training.scores import finite
from app.training.summary import closing_facts
from app.training.trained_state import load_weights
from app.training.trainer import Trainer


def write_final(plan: Plan, trainer: Trainer, predicted: Predicted | None) -> int:
    """Write final/ and the result of a complete run; returns the exit code."""
    result = result_of(trainer, predicted)
    progress, recorder = trainer.progress, trainer.parts.recorder
    metrics = progress.metrics
    if plan.run.checkpoint.final == "best" and 0 < progress.best_step < progress.step:
        if _load_best(trainer):
            metrics = progress.best_metrics
        else:
            result["objective"] = progress.metrics[plan.run.eval.objective]  # that of final/, as otherwise
    result["final_metrics"] = finite(metrics)
    model = trainer.parts.stepper.model
    tensors = None if model.sharding is None else whole_tensors(saved_tensors(model))
    if plan.runtime.rank == 0:
        with checksummed_folder(recorder.folder.final) as folder:
            start = read_start(recorder.folder.start) if changes_base(plan.run.adapter) else None
            save_model(model, plan.rows.tokenizer, folder, tensors, plan.rows.base.names, start)
            loading = loading_of(plan.sections, plan.rows.base, folder, recorder.folder.base)
            manifest = read_manifest(recorder.folder.manifest)
            card = model_card(asdict(plan.run), manifest, result, loading)
            (folder / CARD).write_text(card, encoding="utf-8")
        answers = samples_table(recorder.folder.samples)
        if answers:
            recorder.message(answers)
    else:
        deque(tensors or (), maxlen=0)  # takes part in the collectives of the first process
    closing = Facts(list(closing_facts(plan.run, recorder.folder, result, progress)))
    recorder.message(as_text(Section("", [closing])))
    recorder.finish("finished", final=str(recorder.folder.final), **result)
    return 0


def loading_of(sections: ModelSections, base: BaseModel, folder: Path, drawn: Path) -> Loading:
    """How the model in `folder` is loaded; `drawn` holds a base of random weights."""
    trained_by = sections.quantizer
    sections = replace(sections, quantization=quantization_after_training(sections.quantization))
    file = folder / ADAPTER
    adapter = read_json(file) if file.is_file() else None
    base_inside = adapter is not None and drawn.is_dir()
    return Loading(
        # a text part that was trained whole is a model of its own
        auto_class=base.auto_class if sections.adapter.kind != "none" else task_of(sections.task).auto_class,
        adapter=adapter,
        dtype=str(DTYPES[sections.precision].base).removeprefix("torch."),
        base_place=os.path.relpath(drawn, folder) if base_inside else None,
        quantization=sections.quantization.kind,
        quantized="" if trained_by is None else trained_by.card,
        bitsandbytes=None if adapter is None else sections.bitsandbytes_arguments(base),
        own_classes=adapter is not None and task_of(sections.task).has_classes,
        rows=sections.model.vocab_size,
        needs_transformers_5=needs_transformers_5(drawn if base_inside else folder),
    )


def record_stop(trainer: Trainer, predicted: Predicted | None) -> int:
    """Record the result of a run that was asked to stop and has saved; returns the exit code."""
    trainer.parts.recorder.message(f"stopped after step {trainer.progress.step}, which is saved.")
    trainer.parts.recorder.finish("stopped", **result_of(trainer, predicted))
    assert trainer.stopped_by is not None
    return trainer.stopped_by


def result_of(trainer: Trainer, predicted: Predicted | None) -> dict[str, Any]:
    """Numbers of result.json; a start that had nothing left to do has no speed of its own."""
    progress, runtime, config = trainer.progress, trainer.parts.runtime, trainer.parts.config
    metric = METRICS[config.eval.objective]
    best = None if progress.best_loss is None else metric.cost(progress.best_loss)
    losses = (best, progress.metrics.get(metric.name), progress.last_loss)
    measured = int(runtime.host_group.max(trainer.memory.bytes or 0))  # shards may differ in size
    return {
        **trainer.speed,
        "objective": next((loss for loss in losses if loss is not None), None),
        "objective_is": metric.name if progress.metrics else None,
        "steps": progress.step,
        "train_loss_first": progress.first_loss,
        "train_loss_last": progress.last_loss,
        "eval_loss": progress.last_eval_loss,
        "start_metrics": progress.start_metrics or None,
        "peak_memory_bytes": runtime.peak_memory_bytes(),
        "memory_predicted_bytes": None if predicted is None else predicted.bytes,
        "memory_measured_bytes": measured or None,
        **({"experts": _experts(trainer)} if config.adapter.experts and config.adapter.start is None else {}),
    }


def _experts(trainer: Trainer) -> dict[str, int]:
    """How many experts have adapters, and how many of these no token reached."""
    parts = trainer.parts
    of_all = parts.runtime.host_group.all_gather_object(moved_experts(parts.stepper.model.network, local))
    moved = [any(each) for modules in zip(*of_all, strict=True) for each in zip(*modules, strict=True)]
    return {"total": len(moved), "untrained": moved.count(False)}


def _load_best(trainer: Trainer) -> bool:
    """Take the weights of the best evaluation, if its checkpoint is still there."""
    progress, parts = trainer.progress, trainer.parts
    checkpoint = parts.checkpoints.best(progress)
    if checkpoint is None:
        parts.recorder.message(
            f"checkpoint.final=best: the checkpoint of step {progress.best_step}, the best evaluation, is missing or "
            f"damaged. final/ has the weights of step {progress.step}, the last one"
        )
        return False
    load_weights(checkpoint, parts.stepper.model.trained(), parts.runtime.host_group)
    parts.recorder.message(f"final/ has the weights of step {progress.best_step}, the best evaluation")
    return True
