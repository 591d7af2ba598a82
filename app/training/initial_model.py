"""Model before step 1, kept with the run: the first weights of its adapter, and its log-probabilities of answers.

Adapter weights that the base gave up (PiSSA, OLoRA, CorDA) are kept: at the end of the run the adapter is saved as the
difference from them, which is an adapter of the ordinary base.

The reference of a preference loss is scored once, and never again from trained weights. Rows are found by content.
"""

import hashlib
import json
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from torch import Tensor

from app.adapters.adapters import read_adapter_config
from app.base.source import weight_files, weights_fingerprint
from app.base.weight_files import Names, adapter_weights, require_finite
from app.config.adapters import ADAPTER_WEIGHTS, adapter_layers, changes_base, check_start, start_folder, with_names
from app.config.finished_run import read_manifest
from app.config.load import read_run
from app.config.schema import RunConfig
from app.data.loader import eval_batches
from app.data.objectives import Objective
from app.data.token_dataset import TokenRows
from app.distributed.fsdp import local, own_rows, whole_tensors
from app.distributed.launch import world
from app.errors import CheckpointError, ConfigError, gist, refuse
from app.files import checksummed_folder, require_intact, verify_checksums
from app.finished.save import adapter_tensors, saved_tensors
from app.model.training_model import TrainingModel
from app.tasks.preference import Compared, compared_rows
from app.training.identity import start_hash
from app.training.plan import Plan
from app.training.scores import score_documents


def load_start(run: RunConfig, model: TrainingModel, fingerprint: str | None, names: Names) -> list[str]:
    """Load the start adapter of a new run, if any, and return remarks. `fingerprint` is the hash of the base."""
    folder = start_folder(run.adapter)
    if folder is None:
        return []
    run = replace(run, adapter=with_names(run.adapter, names.of_folder))  # the names in the adapter file
    refuse(check_start(replace(run, resume=None)))
    file, remedy = folder / ADAPTER_WEIGHTS, "Restore the adapter from a copy."
    require_intact(folder, remedy, sealed=False)
    config = read_adapter_config(folder, of_peft=True)
    remarks = _require_same_base(run, folder, fingerprint, str(config.get("base_model_name_or_path")))
    try:
        _load(folder, run, adapter_layers(folder, config), model, names)
    except (OSError, ValueError, SafetensorError) as fault:
        raise CheckpointError(
            f"adapter.start={run.adapter.start}: {file} cannot be loaded ({gist(fault)}). {remedy}"
        ) from fault
    return remarks


def base_hash_of(folder: Path) -> str | None:
    """The hash of the base of an adapter, by the manifest of its run or export, else of a base that either keeps."""
    run = read_manifest(folder.parent / "manifest.json").get("hashes", {}).get("base")
    told: str | None = run or read_manifest(folder / "export.json").get("base_hash")
    kept = [files for place in (folder.parent, folder) if (files := weight_files(place / "base"))]
    return weights_fingerprint(kept[0]) if told is None and kept else told


def _require_same_base(run: RunConfig, folder: Path, fingerprint: str | None, named: str) -> list[str]:
    """Refuse another base than the adapter was trained on, where its hash is known; else say so."""
    given, known, file = f"adapter.start={run.adapter.start}", base_hash_of(folder), folder.parent / "run.yaml"
    first = read_run(file) if file.is_file() else None
    if first is not None and first.model.weights == run.model.weights == "random":
        is_same = (first.seed, first.model.architecture) == (run.seed, run.model.architecture)
    else:
        is_same = known in (None, fingerprint)
    if not is_same:
        raise ConfigError(
            f"{given}: it was trained on another base, by the hash of its weights or by what they were drawn from. "
            "Give the base of that adapter as model.path."
        )
    is_known = known is not None or first is not None
    unknown = f"{given}: no hash of its base is beside it, so only shapes were compared (it names {named})"
    return [] if is_known else [unknown]


@torch.no_grad()
def _load(folder: Path, run: RunConfig, targets: list[str], model: TrainingModel, names: Names) -> None:
    """Load the tensors that PEFT saves; refused where it adapts other layers, or layers of other shapes."""
    named = {names.of_adapter(name): each.detach() for name, (_, each) in adapter_tensors(model).items()}
    given = f"adapter.start={run.adapter.start}"
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as saved:
        odd = sorted(named.keys() ^ set(saved.keys()))
        if odd and sorted(run.adapter.targets) == sorted(targets):
            raise ConfigError(
                f"{given}: its file and this run differ in {odd[0]} among others. Type adapter.train_whole and "
                "adapter.experts as it was trained with."
            )
        if odd:
            layers = ",".join(sorted({name.rpartition(".")[2] for name in targets}))
            raise ConfigError(
                f"{given}: it is of {layers.replace(',', ', ')}, and adapter.targets=[{','.join(run.adapter.targets)}] "
                f"means others here. Type adapter.targets=[{layers}], or leave it out."
            )
        for name, tensor in named.items():
            rows, own = saved.get_slice(name), local(tensor)
            if tuple(rows.get_shape()) != tuple(tensor.shape):
                raise ConfigError(
                    f"{given}: {name} has the shape {rows.get_shape()}, and this model takes {list(tensor.shape)}. "
                    "Give the base of that adapter as model.path."
                )
            if own.numel():
                values = rows[own_rows(tensor)]
                require_finite(name, values)
                own.copy_(values)


def drawn_start(plan: Plan, model: TrainingModel) -> dict[str, Tensor]:
    """Copies of the halves as they were drawn, by their names in files; call it before a checkpoint is loaded."""
    if not changes_base(plan.run.adapter):
        return {}
    named = {name: each.detach() for name, each in saved_tensors(model).items() if ".lora_" in name}
    found = named.items() if model.sharding is None else whole_tensors(named)
    return {name.replace(".default.", "."): each.to("cpu", copy=True) for name, each in found if world().is_first}


def keep_start(drawn: dict[str, Tensor], plan: Plan, folder: Path) -> None:
    """Write the start of a run that is new, or goes on in another folder; that of a continued one must be what was
    drawn again, or its base is another.
    """
    if not drawn:
        return
    kept = plan.start.kept_with_run(folder)
    known = read_start(kept) if plan.start.checkpoint else drawn
    if known.keys() != drawn.keys() or not all(torch.equal(known[name], each) for name, each in drawn.items()):
        raise CheckpointError(
            f"adapter.init={plan.run.adapter.init}: the initial adapter weights computed here differ from "
            f"{kept}. Resume on the machine and with the packages of the first start, or start again in another "
            "output_dir."
        )
    if not (plan.start.checkpoint and folder.is_dir()):
        with checksummed_folder(folder) as target:
            save_file(drawn, target / ADAPTER_WEIGHTS)
    drawn.clear()  # it would stay in memory through the run


def read_start(folder: Path) -> dict[str, Tensor]:
    """The start that a run keeps; refused where it is damaged or lost."""
    remedy = "It has the initial adapter weights of this run. Restore the folder, or start a new run."
    require_intact(folder, remedy, (ADAPTER_WEIGHTS,))
    return adapter_weights(folder)


# ---- reference


_FILE = "answers.safetensors"
_CODE_VERSION = 1  # of what decides the numbers

Reference = Mapping[int, tuple[float, ...]]  # by the hash of a row: log-probabilities of its answers


def with_reference(plan: Plan, model: TrainingModel, folder: Path, fingerprint: str | None) -> Plan:
    """The run with the reference that its loss reads, if it reads one; that of a continued run is in `folder`."""
    if not plan.run.preference.has_reference:
        return plan
    kept = plan.start.kept_with_run(folder)
    reference = read_reference(kept) if plan.start.checkpoint else _made(plan, model, fingerprint)
    splits = (rows for rows in (plan.rows.data.train, plan.rows.data.eval) if rows is not None)
    return plan.with_objective(comparing(plan.rows.objective, reference, *splits))


def keep_reference(plan: Plan, folder: Path) -> None:
    """Write the reference of a run that is new, or goes on in another folder, if it has one."""
    objective = plan.rows.objective
    if isinstance(objective, Compared) and objective.reference and not (plan.start.checkpoint and folder.is_dir()):
        _write(folder, objective.reference)


def comparing(objective: Objective, reference: Reference, *rows: TokenRows) -> Objective:
    """The objective with a reference; `rows` that it does not have are refused."""
    assert isinstance(objective, Compared)
    scored = (part for each in rows for part in compared_rows(objective, each))
    unknown = sum(each not in reference for part in scored for each in part.content_hashes.tolist())
    if unknown:
        raise CheckpointError(
            f"dataset.eval_path: of these rows the run has no reference for {unknown:,}, and it was made before the "
            "model was trained. Give the rows that it held out."
        )
    return replace(objective, reference=reference)


def read_reference(folder: Path) -> Reference:
    """The reference that a run keeps; refused where it is damaged or lost, since it cannot be made again."""
    remedy = (
        "The reference of this run cannot be computed again, because the model has been trained since. Restore the "
        "folder, or start a new run."
    )
    require_intact(folder, remedy, (_FILE,))
    try:
        stored = load_arrays(folder / _FILE)
        rows, scores = stored["rows"].tolist(), torch.from_numpy(stored["log_probabilities"])
        require_finite("log_probabilities", scores)
        return dict(zip(rows, map(tuple, scores.tolist()), strict=True))
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as fault:
        raise CheckpointError(f"{folder / _FILE} cannot be read ({gist(fault)}). {remedy}") from fault


def _write(folder: Path, reference: Reference) -> None:
    if not world().is_first:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    values = np.array([*reference.values()], np.float64)
    with checksummed_folder(folder) as target:
        save_arrays({"rows": np.array([*reference], np.uint64), "log_probabilities": values}, target / _FILE)


def _made(plan: Plan, model: TrainingModel, fingerprint: str | None) -> Reference:
    """Score the answers of both splits, or take the scores of another run of the same rows and base."""
    kept = Path(plan.run.cache_dir).expanduser() / "references" / _key(plan, fingerprint)
    known = read_reference(kept) if world().is_first and not verify_checksums(kept, (_FILE,)) else {}
    found: dict[int, tuple[float, ...]] = plan.runtime.host_group.all_gather_object(known)[0]
    if not found:
        assert isinstance(plan.rows.objective, Compared)
        for rows in (plan.rows.data.train, plan.rows.data.eval):
            for part in () if rows is None else compared_rows(plan.rows.objective, rows):
                found |= _scored(plan, model, part)
        _share(kept, found)
    return found


def _share(kept: Path, reference: Reference) -> None:
    """Keep the scores for other runs, several of which may be here at once: the first to rename its folder stays."""
    if not world().is_first:
        return
    own = kept.with_name(uuid.uuid4().hex)
    _write(own, reference)
    if verify_checksums(kept, (_FILE,)):
        shutil.rmtree(kept, ignore_errors=True)
    with suppress(OSError):
        own.rename(kept)
    shutil.rmtree(own, ignore_errors=True)


def _scored(plan: Plan, model: TrainingModel, rows: TokenRows) -> dict[int, tuple[float, ...]]:
    runtime, layout = plan.runtime, plan.layout(plan.run.eval.rows)
    rows = rows.select(np.unique(rows.content_hashes, return_index=True)[1])
    batches = eval_batches(rows, layout, runtime.processes, runtime.rank)
    sums = score_documents(model, batches, runtime, len(rows), plan.rows.objective.documents_per_row)
    return dict(zip(rows.content_hashes.tolist(), map(tuple, sums.tolist()), strict=True))


def _key(plan: Plan, fingerprint: str | None) -> str:
    """A hash of what decides the numbers: rows, base, how it is stored and computed."""
    run, data, choices = plan.run, plan.rows.data, plan.choices
    # what may not begin as the base: numbers that a method draws, or that are computed of the base
    own = (
        {}
        if run.adapter.kind != "peft" and run.adapter.init == "default"
        else {**asdict(run.adapter), "seed": run.seed}
    )
    parts: dict[str, Any] = {
        "rows": [rows.fingerprint for rows in (data.train, data.eval) if rows is not None],
        "base": fingerprint or [run.model.path, run.model.architecture, run.seed],
        "start": start_hash(run.adapter) | own,
        "quantization": asdict(run.quantization),
        "vocabulary": run.model.vocab_size,
        "computed": [choices.precision, choices.attention, run.model.norm, torch.__version__],
        "code": _CODE_VERSION,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
