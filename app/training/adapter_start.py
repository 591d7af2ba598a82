"""Where an adapter begins: at another one of the same base and layers, or at numbers that its base gave up.

The latter (PiSSA, OLoRA, CorDA) are kept with the run: at its end the adapter is saved as the difference from them,
which is one of the ordinary base.
"""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from app.adapters.adapters import read_adapter_config
from app.base.names import Names
from app.base.safetensors_files import adapter_weights, require_finite
from app.base.source import weight_files, weights_fingerprint
from app.config.adapter_start import adapter_layers, check_start, start_folder, with_names
from app.config.adapters import ADAPTER_WEIGHTS, changes_base
from app.config.finished_run import read_manifest
from app.config.load import read_run
from app.config.schema import RunConfig
from app.distributed.environment import world
from app.distributed.fsdp import local, own_rows, whole_tensors
from app.errors import CheckpointError, ConfigError, gist, refuse
from app.files import checksummed_folder, require_intact
from app.finished.save import adapter_tensors, saved_tensors
from app.model.training_model import TrainingModel
from app.training.plan import Plan


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
