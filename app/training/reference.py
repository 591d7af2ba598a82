"""The reference of a loss over answers: their log-probabilities by the model as it was before step 1.

It is scored once, kept with the run, and never made again from trained weights. Rows are known by their content.
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
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from app.base.safetensors_files import require_finite
from app.data.loader import eval_batches
from app.data.objectives import Objective
from app.data.token_dataset import TokenRows
from app.distributed.environment import world
from app.errors import CheckpointError, gist
from app.files import checksummed_folder, require_intact, verify_checksums
from app.model.training_model import TrainingModel
from app.tasks.preference import Compared, compared_rows
from app.training.identity import start_hash
from app.training.plan import Plan
from app.training.scores import score_documents

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
        stored = load_file(folder / _FILE)
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
        save_file({"rows": np.array([*reference], np.uint64), "log_probabilities": values}, target / _FILE)


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
