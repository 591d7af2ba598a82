"""A finished run with other weights in final/: those of a kept checkpoint, or several adapters combined.

It is a folder of links to the files of the run, beside a final/ of its own, for whatever takes the folder of a run.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

import torch

from app.adapters.combination import Member, combine
from app.base.source import base_path, require_intact_base
from app.base.structure import open_base
from app.base.tokenizer import load_tokenizer
from app.config.adapter_start import adapter_folder
from app.config.adapters import ADAPTER_WEIGHTS, changes_base
from app.config.dataset import has_chats
from app.config.finished_run import require_intact_final
from app.config.schema import CompileConfig, RunConfig
from app.config.yaml_files import to_yaml
from app.distributed.process_group import HostGroup
from app.errors import CheckpointError, ConfigError
from app.files import CHECKSUMS, checkpoints_in, checksummed_folder, require_intact, write_json, write_text
from app.finished.load_run import load_tuned_tokenizer, weights_of
from app.finished.save import save_model
from app.layers.quantization import quantization_after_training
from app.model.build import build_training_model
from app.pages.model_card import CARD
from app.tasks.table import loss_of
from app.tracking.recorder import read_result
from app.training.adapter_start import base_hash_of, read_start
from app.training.checkpoint import choices_of, damage_of, progress_of
from app.training.choices import Choices, sections_of
from app.training.scores import finite
from app.training.trained_state import load_weights

_OWN = {"final", "result.json", "run.yaml", "checkpoints"}


@contextmanager
def at_checkpoint(folder: Path, wanted: str | None, run: RunConfig) -> Iterator[Path]:
    """The folder itself, or one with the weights of a kept checkpoint: `best` or the number of a step."""
    if wanted is None:
        yield folder
        return
    save = kept_checkpoint(folder, wanted)
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
def combined(folder: Path, parts: Mapping[str, float], how: str, rank: int | None, run: RunConfig) -> Iterator[Path]:
    """A folder whose adapter sums those of `parts`, each with a factor; the rest is that of the run in `folder`."""
    members = [Member(given, adapter_folder(given), factor) for given, factor in parts.items()]
    require_intact_final(folder)
    own = base_hash_of(folder / "final")
    for member in members:
        require_intact(member.folder, "Leave it out, or restore it from a copy.", sealed=False)
        known = base_hash_of(member.folder)
        if None not in (own, known) and own != known:
            raise ConfigError(
                f"adapters: {member.given} was trained on another base than run={folder}, by the hash of its weights. "
                "Leave it out: only updates of one base can be summed."
            )
    with TemporaryDirectory(prefix="combined-") as place:
        with checksummed_folder(Path(place) / "final") as final:
            for file in (folder / "final").iterdir():
                if file.name not in (ADAPTER_WEIGHTS, CHECKSUMS, CARD):
                    copyfile(file, final / file.name)
            found, apart = combine(members, how, rank, final)
        run = replace(run, adapter=replace(run.adapter, r=found, alpha=float(found)))
        facts = {"adapters": dict(parts), "combine": how, "rank": found, "difference_of_updates": apart}
        unknown = dict.fromkeys(("final_metrics", "train_loss_first", "train_loss_last"))
        yield _linked(folder, Path(place), run, {**unknown, "combined": facts})


def kept_checkpoint(folder: Path, wanted: str) -> Path:
    """The checkpoint of a step, or of the best evaluation; refused where it is not kept, or damaged."""
    kept = checkpoints_in(folder / "checkpoints")
    steps = sorted(int(each.name.removeprefix("step-")) for each in kept)
    given = f"checkpoint={wanted}"
    if not kept:
        raise CheckpointError(f"{given}: run={folder} has no checkpoint. Leave it out for final/.")
    step = progress_of(kept[-1]).best_step if wanted == "best" else int(wanted)
    if step not in steps:
        what = f"the best evaluation was at step {step}, and its" if wanted == "best" else "that"
        raise CheckpointError(
            f"{given}: {what} checkpoint is not kept. run={folder} has those of steps {', '.join(map(str, steps))}."
        )
    save = folder / "checkpoints" / f"step-{step:06d}"
    fault = damage_of(save)
    if fault is not None:
        raise CheckpointError(
            f"{given}: {save} is damaged ({fault}). Give another one of {', '.join(map(str, steps))}."
        )
    return save


def _save_checkpoint(folder: Path, save: Path, run: RunConfig, target: Path) -> None:
    """Build the model as the run did, load the weights of the checkpoint, whole or sharded, and save it as final/."""
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
    """Link the other files of the run, and write what is known of the other weights."""
    for file in folder.iterdir():
        if file.name not in _OWN:
            (place / file.name).symlink_to(file.resolve())
    write_text(place / "run.yaml", to_yaml(asdict(run)))
    write_json(place / "result.json", {**read_result(folder), **result})
    return place
