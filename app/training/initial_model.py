"""Model before step 1, kept with the run: initial adapter weights, and log-probabilities of answers.

Adapter weights that were split off the base (PiSSA, OLoRA, CorDA) are kept: at the end of the run the adapter is saved
as the difference from them, which is an adapter of the ordinary base.

The reference of a preference loss is scored once, before training. Rows are identified by content.
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
from app.config.kinds import OWN
from app.config.load import read_run
from app.config.schema import RunConfig
from app.config.validate import format_value
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
    file, remedy = folder / ADAPTER_WEIGHTS, "Restore the adapter from a backup."
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
    """Return the base hash of an adapter, from the manifest of its run or export, else from the base stored there."""
    run = read_manifest(folder.parent / "manifest.json").get("hashes", {}).get("base")
    recorded: str | None = run or read_manifest(folder / "export.json").get("base_hash")
    bases = [files for place in (folder.parent, folder) if (files := weight_files(place / "base"))]
    return weights_fingerprint(bases[0]) if recorded is None and bases else recorded


def _require_same_base(run: RunConfig, folder: Path, fingerprint: str | None, named: str) -> list[str]:
    """Raise if the base is not that of the adapter; return a remark if its hash is unknown."""
    setting, base_hash, file = f"adapter.start={run.adapter.start}", base_hash_of(folder), folder.parent / "run.yaml"
    first = read_run(file) if file.is_file() else None
    if first is not None and first.model.weights == run.model.weights == "random":
        is_same = (first.seed, first.model.architecture) == (run.seed, run.model.architecture)
    else:
        is_same = base_hash in (None, fingerprint)
    if not is_same:
        raise ConfigError(
            f"{setting} was trained on another base (different weight hash, or different seed or architecture of "
            "random weights). Set model.path to the base of that adapter."
        )
    if first is not None and _rope_settings(first) != _rope_settings(run):
        return [f"{setting} was trained with {_rope_settings(first)}, this run has {_rope_settings(run)}"]
    is_known = base_hash is not None or first is not None
    unknown = f"{setting}: the hash of its base is unknown, so only shapes were compared (its base: {named})"
    return [] if is_known else [unknown]


def _rope_settings(run: RunConfig) -> str:
    model = run.model
    keys = ("rope",) if model.rope == OWN else ("rope", "rope_factor", "rope_original")
    return " ".join(f"model.{key}={format_value(getattr(model, key))}" for key in keys)


@torch.no_grad()
def _load(folder: Path, run: RunConfig, targets: list[str], model: TrainingModel, names: Names) -> None:
    """Load the tensors saved by PEFT; raise if it adapts other layers, or layers of other shapes."""
    named = {names.of_adapter(name): tensor.detach() for name, (_, tensor) in adapter_tensors(model).items()}
    setting = f"adapter.start={run.adapter.start}"
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as saved:
        odd = sorted(named.keys() ^ set(saved.keys()))
        if odd and sorted(run.adapter.targets) == sorted(targets):
            raise ConfigError(
                f"{setting}: its tensors differ from those of this run, e.g. {odd[0]}. Set adapter.train_whole and "
                "adapter.experts as in its training."
            )
        if odd:
            layers = ",".join(sorted({name.rpartition(".")[2] for name in targets}))
            raise ConfigError(
                f"{setting} adapts {layers.replace(',', ', ')}, but adapter.targets=[{','.join(run.adapter.targets)}] "
                f"selects other layers. Set adapter.targets=[{layers}], or remove adapter.targets."
            )
        for name, tensor in named.items():
            rows, shard = saved.get_slice(name), local(tensor)
            if tuple(rows.get_shape()) != tuple(tensor.shape):
                raise ConfigError(
                    f"{setting}: {name} has shape {rows.get_shape()}, but this model needs {list(tensor.shape)}. "
                    "Set model.path to the base of that adapter."
                )
            if shard.numel():
                values = rows[own_rows(tensor)]
                require_finite(name, values)
                shard.copy_(values)


def drawn_start(plan: Plan, model: TrainingModel) -> dict[str, Tensor]:
    """Return copies of the initial adapter matrices, by their names in files; call it before loading a checkpoint."""
    if not changes_base(plan.run.adapter):
        return {}
    named = {name: tensor.detach() for name, tensor in saved_tensors(model).items() if ".lora_" in name}
    tensors = named.items() if model.sharding is None else whole_tensors(named)
    return {name.replace(".default.", "."): tensor.to("cpu", copy=True) for name, tensor in tensors if world().is_first}


def keep_start(drawn: dict[str, Tensor], plan: Plan, folder: Path) -> None:
    """Write the initial adapter weights of a new run, or of one resumed in another folder. In a resumed run they must
    equal those computed again, else the base differs.
    """
    if not drawn:
        return
    place = plan.start.kept_with_run(folder)
    saved = read_start(place) if plan.start.checkpoint else drawn
    if saved.keys() != drawn.keys() or not all(torch.equal(saved[name], tensor) for name, tensor in drawn.items()):
        raise CheckpointError(
            f"adapter.init={plan.run.adapter.init}: the initial adapter weights computed here differ from "
            f"{place}. Resume on the machine and with the packages of the first start, or start again in another "
            "output_dir."
        )
    if not (plan.start.checkpoint and folder.is_dir()):
        with checksummed_folder(folder) as target:
            save_file(drawn, target / ADAPTER_WEIGHTS)
    drawn.clear()  # frees the memory for the run


def read_start(folder: Path) -> dict[str, Tensor]:
    """Return the initial adapter weights of a run; raise if they are damaged or missing."""
    remedy = "It has the initial adapter weights of this run. Restore the folder, or start a new run."
    require_intact(folder, remedy, (ADAPTER_WEIGHTS,))
    return adapter_weights(folder)


# ---- reference


_FILE = "answers.safetensors"
_CODE_VERSION = 1  # of the code that determines the scores

Reference = Mapping[int, tuple[float, ...]]  # row hash: log-probabilities of the answers


def with_reference(plan: Plan, model: TrainingModel, folder: Path, fingerprint: str | None) -> Plan:
    """Return the plan with reference log-probabilities if the loss needs them; a resumed run reads `folder`."""
    if not plan.run.preference.has_reference:
        return plan
    place = plan.start.kept_with_run(folder)
    reference = read_reference(place) if plan.start.checkpoint else _scored_reference(plan, model, fingerprint)
    splits = (rows for rows in (plan.rows.data.train, plan.rows.data.eval) if rows is not None)
    return plan.with_objective(comparing(plan.rows.objective, reference, *splits))


def keep_reference(plan: Plan, folder: Path) -> None:
    """Write the reference of a new run, or of one resumed in another folder, if it has one."""
    objective = plan.rows.objective
    if isinstance(objective, Compared) and objective.reference and not (plan.start.checkpoint and folder.is_dir()):
        _write(folder, objective.reference)


def comparing(objective: Objective, reference: Reference, *splits: TokenRows) -> Objective:
    """Return the objective with a reference; raise if it lacks any of `rows`."""
    assert isinstance(objective, Compared)
    scored = (part for rows in splits for part in compared_rows(objective, rows))
    unknown = sum(content_hash not in reference for part in scored for content_hash in part.content_hashes.tolist())
    if unknown:
        raise CheckpointError(
            f"dataset.eval_path: the run has no reference for {unknown:,} of these rows, and it cannot be computed "
            "after training. Use the eval set of the run."
        )
    return replace(objective, reference=reference)


def read_reference(folder: Path) -> Reference:
    """Return the reference of a run; raise if it is damaged or missing, since it cannot be computed again."""
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


def _scored_reference(plan: Plan, model: TrainingModel, fingerprint: str | None) -> Reference:
    """Score the answers of both splits, or use the scores of another run with the same rows and base."""
    place = Path(plan.run.cache_dir).expanduser() / "references" / _key(plan, fingerprint)
    cached = read_reference(place) if world().is_first and not verify_checksums(place, (_FILE,)) else {}
    reference: dict[int, tuple[float, ...]] = plan.runtime.host_group.all_gather_object(cached)[0]
    if not reference:
        assert isinstance(plan.rows.objective, Compared)
        for rows in (plan.rows.data.train, plan.rows.data.eval):
            for part in () if rows is None else compared_rows(plan.rows.objective, rows):
                reference |= _scored(plan, model, part)
        _share(place, reference)
    return reference


def _share(place: Path, reference: Reference) -> None:
    """Cache the scores for other runs, which may run at the same time: the first to rename its folder wins."""
    if not world().is_first:
        return
    temporary = place.with_name(uuid.uuid4().hex)
    _write(temporary, reference)
    if verify_checksums(place, (_FILE,)):
        shutil.rmtree(place, ignore_errors=True)
    with suppress(OSError):
        temporary.rename(place)
    shutil.rmtree(temporary, ignore_errors=True)


def _scored(plan: Plan, model: TrainingModel, rows: TokenRows) -> dict[int, tuple[float, ...]]:
    runtime, layout = plan.runtime, plan.layout(plan.run.eval.rows)
    rows = rows.select(np.unique(rows.content_hashes, return_index=True)[1])
    batches = eval_batches(rows, layout, runtime.processes, runtime.rank)
    sums = score_documents(model, batches, runtime, len(rows), plan.rows.objective.documents_per_row)
    return dict(zip(rows.content_hashes.tolist(), map(tuple, sums.tolist()), strict=True))


def _key(plan: Plan, fingerprint: str | None) -> str:
    """Return a hash of everything that determines the scores: rows, base, quantization, precision."""
    run, data, choices = plan.run, plan.rows.data, plan.choices
    # adapters that may change the model before step 1: random weights, or weights computed from the base
    initial = (
        {}
        if run.adapter.kind != "peft" and run.adapter.init == "default"
        else {**asdict(run.adapter), "seed": run.seed}
    )
    parts: dict[str, Any] = {
        "rows": [rows.fingerprint for rows in (data.train, data.eval) if rows is not None],
        "base": fingerprint or [run.model.path, run.model.architecture, run.seed],
        "start": start_hash(run.adapter) | initial,
        "quantization": asdict(run.quantization),
        "vocabulary": run.model.vocab_size,
        "computed": [choices.precision, choices.attention, run.model.norm, torch.__version__],
        "code": _CODE_VERSION,
        **({} if run.model.rope == OWN else {"rope": _rope_settings(run)}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
