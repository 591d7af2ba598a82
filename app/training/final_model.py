"""Final model of a run: final/ and result.json, or a stand-in folder with other weights in final/.

A stand-in is a folder of links to the files of the run with another final/ (weights of a checkpoint, or combined
adapters), for commands that take a run folder.
"""

import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

import torch

from app.adapters.merged_weights import Combination, Member, combine
from app.base.base_model import BaseModel, open_base
from app.base.source import base_path, require_intact_base
from app.base.tokenizer import load_tokenizer
from app.config.adapters import ADAPTER, ADAPTER_WEIGHTS, adapter_folder, changes_base
from app.config.conf_files import to_yaml
from app.config.dataset import has_chats
from app.config.finished_run import read_manifest, require_intact_final
from app.config.kinds import METRICS
from app.config.schema import CompileConfig, RunConfig
from app.config.tasks import task_of
from app.distributed.fsdp import local, whole_tensors
from app.distributed.process_group import HostGroup, Runtime
from app.errors import CheckpointError, ConfigError
from app.files import CHECKSUMS, checkpoints_in, checksummed_folder, read_json, require_intact, write_json, write_text
from app.finished.inference import load_tuned_tokenizer, weights_of
from app.finished.save import needs_transformers_5, save_model, saved_tensors
from app.layers.experts import moved_experts
from app.layers.quantization import quantization_after_training
from app.model.build import DTYPES, ModelSections, build_training_model
from app.pages.model_card import CARD, Loading, model_card
from app.pages.page import Facts, Section, as_text
from app.tasks.table import loss_of
from app.tracking.output_dir import with_smoothed_loss
from app.tracking.recorder import read_result
from app.training.auto_settings import Choices, sections_of
from app.training.checkpoint import choices_of, damage_of, load_weights, progress_of
from app.training.gpu_usage import GpuMonitor, free_workspaces
from app.training.initial_model import base_hash_of, read_start
from app.training.memory import Predicted
from app.training.plan import Plan
from app.training.scores import finite
from app.training.summary import closing_facts
from app.training.trainer import Trainer


def write_final(plan: Plan, trainer: Trainer, predicted: Predicted | None) -> int:
    """Write final/ and result.json of a complete run; return the exit code."""
    result = result_of(trainer, predicted)
    progress, recorder = trainer.progress, trainer.parts.recorder
    metrics = progress.metrics
    if plan.run.checkpoint.final == "best" and 0 < progress.best_step < progress.step:
        if _load_best(trainer):
            metrics = progress.best_metrics
        else:
            result["objective"] = progress.metrics[plan.run.eval.objective]  # the objective of the weights in final/
    result["final_metrics"] = finite(metrics)
    shown = with_smoothed_loss(result, recorder.folder.metrics)
    model = trainer.parts.stepper.model
    tensors = None if model.sharding is None else whole_tensors(saved_tensors(model))
    if plan.runtime.rank == 0:
        with checksummed_folder(recorder.folder.final) as folder:
            start = read_start(recorder.folder.start) if changes_base(plan.run.adapter) else None
            save_model(model, plan.rows.tokenizer, folder, tensors, plan.rows.base.names, start)
            loading = loading_of(plan.sections, plan.rows.base, folder, recorder.folder.base)
            manifest = read_manifest(recorder.folder.manifest)
            card = model_card(asdict(plan.run), manifest, shown, loading)
            (folder / CARD).write_text(card, encoding="utf-8")
        recorder.first_and_last_samples()
    else:
        deque(tensors or (), maxlen=0)  # joins the collectives of rank 0
    closing = Facts(list(closing_facts(plan.run, recorder.folder, shown, progress)))
    recorder.message(as_text(Section("", [closing])))
    recorder.finish("finished", final=str(recorder.folder.final), **result)
    return 0


def loading_of(sections: ModelSections, base: BaseModel, folder: Path, drawn: Path) -> Loading:
    """Return how to load the model in `folder`; `drawn` has a base of random weights."""
    trained_by = sections.quantizer
    sections = replace(sections, quantization=quantization_after_training(sections.quantization))
    file = folder / ADAPTER
    adapter = read_json(file) if file.is_file() else None
    base_inside = adapter is not None and drawn.is_dir()
    return Loading(
        # a fully trained text part is a separate model
        auto_class=base.auto_class if sections.adapter.kind != "none" else task_of(sections.task).auto_class,
        adapter=adapter,
        dtype=str(DTYPES[sections.precision].base).removeprefix("torch."),
        base_place=os.path.relpath(drawn, folder) if base_inside else None,
        quantization=sections.quantization.kind,
        quantized="" if trained_by is None else trained_by.card,
        bitsandbytes=None if adapter is None else sections.bitsandbytes_arguments(base),
        own_classes=adapter is not None and task_of(sections.task).has_classes,
        rows=sections.model.vocab_size,
        rope=base.rope if adapter is not None and not base_inside and not task_of(sections.task).has_classes else None,
        needs_transformers_5=needs_transformers_5(drawn if base_inside else folder),
    )


def record_stop(trainer: Trainer, predicted: Predicted | None) -> int:
    """Record the result of a stopped and saved run; return the exit code."""
    trainer.parts.recorder.message(f"Stopped. Saved checkpoint at step {trainer.progress.step}.")
    trainer.parts.recorder.finish("stopped", **result_of(trainer, predicted))
    assert trainer.stopped_by is not None
    return trainer.stopped_by


def result_of(trainer: Trainer, predicted: Predicted | None) -> dict[str, Any]:
    """Return the numbers of result.json; without speed if no step was left."""
    progress, runtime, config = trainer.progress, trainer.parts.runtime, trainer.parts.config
    metric = METRICS[config.eval.objective]
    best = None if progress.best_loss is None else metric.cost(progress.best_loss)
    losses = (best, progress.metrics.get(metric.name), progress.last_loss)
    measured = int(runtime.host_group.max(trainer.memory.bytes or 0))  # shards may differ in size
    return {
        **trainer.speed,
        **trainer.times.of_run(),
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
        **(_gpu_facts(trainer.parts.gpu, runtime) if runtime.device.type == "cuda" else {}),
        **({"experts": _experts(trainer)} if config.adapter.experts and config.adapter.start is None else {}),
    }


def _gpu_facts(gpu: GpuMonitor, runtime: Runtime) -> dict[str, Any]:
    return {**gpu.result(runtime.host_group), "workspace_bytes": free_workspaces()}


def _experts(trainer: Trainer) -> dict[str, int]:
    """Count the experts with adapters, and those of them that received no tokens."""
    parts = trainer.parts
    of_all = parts.runtime.host_group.all_gather_object(moved_experts(parts.stepper.model.network, local))
    moved = [any(flags) for modules in zip(*of_all, strict=True) for flags in zip(*modules, strict=True)]
    return {"total": len(moved), "untrained": moved.count(False)}


def _load_best(trainer: Trainer) -> bool:
    """Load the weights of the best evaluation if its checkpoint still exists."""
    progress, parts = trainer.progress, trainer.parts
    checkpoint = parts.checkpoints.best(progress)
    if checkpoint is None:
        parts.recorder.message(
            f"checkpoint.final=best: the checkpoint of step {progress.best_step} (best evaluation) is missing or "
            f"damaged. final/ has the weights of step {progress.step} (last step)"
        )
        return False
    load_weights(checkpoint, parts.stepper.model.trained(), parts.runtime.host_group)
    parts.recorder.message(f"final/ has the weights of step {progress.best_step} (best evaluation)")
    return True


# ---- stand in


_REPLACED = {"final", "result.json", "run.yaml", "checkpoints"}


@contextmanager
def at_checkpoint(folder: Path, checkpoint: str | None, run: RunConfig) -> Iterator[Path]:
    """Yield the run folder, or a stand-in with the weights of a kept checkpoint: `best` or a step number."""
    if checkpoint is None:
        yield folder
        return
    save = kept_checkpoint(folder, checkpoint)
    with TemporaryDirectory(prefix="checkpoint-") as place:
        _save_checkpoint(folder, save, run, Path(place) / "final")
        progress = progress_of(save)
        result = {
            "steps": progress.step,
            "train_loss_last": progress.last_loss,
            "eval_loss": progress.last_eval_loss,
            "final_metrics": finite(progress.metrics),
        }
        yield _linked(folder, Path(place), run, result)


@contextmanager
def combined(folder: Path, parts: Mapping[str, float], combination: Combination, run: RunConfig) -> Iterator[Path]:
    """Yield a stand-in for the run in `folder` whose adapter is the weighted sum of the adapters in `parts`."""
    members = [Member(place, adapter_folder(place), factor) for place, factor in parts.items()]
    require_intact_final(folder)
    base_hash = base_hash_of(folder / "final")
    for member in members:
        require_intact(member.folder, "Remove it, or restore it from a backup.", sealed=False)
        member_hash = base_hash_of(member.folder)
        if None not in (base_hash, member_hash) and base_hash != member_hash:
            raise ConfigError(
                f"adapters: {member.path} was trained on another base than run={folder} (different weight hash). "
                "Remove it: only adapters of the same base can be combined."
            )
    with TemporaryDirectory(prefix="combined-") as place:
        with checksummed_folder(Path(place) / "final") as final:
            for file in (folder / "final").iterdir():
                if file.name not in (ADAPTER_WEIGHTS, CHECKSUMS, CARD):
                    copyfile(file, final / file.name)
            new_rank, difference = combine(members, combination, final)
        run = replace(run, adapter=replace(run.adapter, r=new_rank, alpha=float(new_rank)))
        facts = {"adapters": dict(parts), "combine": combination.how, "rank": new_rank}
        if combination.density is not None:
            facts |= {"density": combination.density, "seed": combination.seed}
        facts["difference_of_updates"] = difference
        unknown = dict.fromkeys(("final_metrics", "train_loss_first", "train_loss_last"))
        yield _linked(folder, Path(place), run, {**unknown, "combined": facts})


def kept_checkpoint(folder: Path, checkpoint: str) -> Path:
    """Return the checkpoint of a step or of the best evaluation; raise if it was not kept or is damaged."""
    checkpoints = checkpoints_in(folder / "checkpoints")
    steps = sorted(int(path.name.removeprefix("step-")) for path in checkpoints)
    setting = f"checkpoint={checkpoint}"
    if not checkpoints:
        raise CheckpointError(f"{setting}: run={folder} has no checkpoints. Omit checkpoint= to use final/.")
    step = progress_of(checkpoints[-1]).best_step if checkpoint == "best" else int(checkpoint)
    if step not in steps:
        what = f"the checkpoint of the best evaluation (step {step})" if checkpoint == "best" else "this checkpoint"
        raise CheckpointError(
            f"{setting}: {what} was not kept. run={folder} has checkpoints of steps {', '.join(map(str, steps))}."
        )
    save = folder / "checkpoints" / f"step-{step:06d}"
    fault = damage_of(save)
    if fault is not None:
        raise CheckpointError(
            f"{setting}: {save} is damaged ({fault}). Choose another of steps {', '.join(map(str, steps))}."
        )
    return save


def _save_checkpoint(folder: Path, save: Path, run: RunConfig, target: Path) -> None:
    """Build the model of the run, load the weights of the checkpoint (sharded or not), and save it as final/."""
    final, model = folder / "final", weights_of(folder, run.model, tuned=False)
    sections = replace(
        sections_of(run, Choices(choices_of(save)["precision"], "sdpa")),
        model=model,
        quantization=quantization_after_training(run.quantization),
        recompute=False,
        offload=False,
        neftune=0.0,
        compile=CompileConfig(kind="none"),
    )
    if model.weights == "pretrained":
        require_intact_base(Path(model.path))
    place = base_path(run.model, folder / "base")
    network = build_training_model(sections, loss_of(run), torch.device("cpu"), run.seed, place)
    load_weights(save, network.trained(), HostGroup(0, 1))
    if final.is_dir():
        require_intact_final(folder)
        tokenizer = load_tuned_tokenizer(final, run.model.trust_remote_code)
    else:
        tokenizer = load_tokenizer(run.model, needs_template=has_chats(run.dataset))
    with checksummed_folder(target) as written:
        start = read_start(folder / "start") if changes_base(run.adapter) else None
        save_model(network, tokenizer, written, None, open_base(model, run.task).names, start)


def _linked(folder: Path, place: Path, run: RunConfig, result: Mapping[str, Any]) -> Path:
    """Link the other files of the run, and write run.yaml and result.json of the other weights."""
    for file in folder.iterdir():
        if file.name not in _REPLACED:
            (place / file.name).symlink_to(file.resolve())
    write_text(place / "run.yaml", to_yaml(asdict(run)))
    write_json(place / "result.json", {**read_result(folder), **result})
    return place
