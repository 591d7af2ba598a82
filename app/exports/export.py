"""Export of a finished run: written to a temporary folder, verified in a new process, renamed."""

import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from app.config.finished_run import COMPRESSED, ExportConfig, read_manifest
from app.config.load import read_run
from app.errors import EnvironmentProblem
from app.evaluation.run import Evaluation
from app.exports.compressed_tensors import CompressedExport
from app.exports.destination import REPORT, atomic_export, existing_parent, write_json_unflushed
from app.exports.gguf import ConvertedExport, GgufExport
from app.exports.kinds import AdapterExport, Export, MergedExport, QuantizedExport
from app.exports.verify import Limits, Verification, reference_of, verify
from app.files import files_in, sha256
from app.layers.quantization import missing_hardware, quantization_after_training
from app.pages.model_card import CARD, model_card
from app.safe_text import redact
from app.tracking.formatting import format_bytes
from app.tracking.output_dir import with_smoothed_loss
from app.tracking.recorder import read_result
from app.training.final_model import loading_of

_SPARE_BYTES = 16 << 20  # for cards, configurations and partly filled blocks of the file system
EXPORTS: dict[str, type[Export]] = {
    "adapter": AdapterExport,
    "merged": MergedExport,
    "quantized": QuantizedExport,
    "gguf": GgufExport,
}


def prepare_export(config: ExportConfig, evaluation: Evaluation) -> Export:
    """Return the export; raise for an unsupported one or too little disk space, before writing."""
    evaluation.require_same_base(tuned=True)
    evaluation, trained = _with_base_of_users(evaluation)
    export = _class_of(config)(config, evaluation, trained)
    _require_disk_space(export)
    return export


def _class_of(config: ExportConfig) -> type[Export]:
    if config.llama_cpp is not None:
        return ConvertedExport
    return CompressedExport if config.quant in COMPRESSED else EXPORTS[config.kind]


def _with_base_of_users(evaluation: Evaluation) -> tuple[Evaluation, Evaluation | None]:
    """Return the run on the base that users load, and on the training base if that differs and is supported here."""
    run, device = evaluation.run, evaluation.runtime.device
    quantization = quantization_after_training(run.quantization)
    if quantization == run.quantization:
        return evaluation, None
    exported = replace(evaluation, run=replace(run, quantization=quantization))
    return exported, evaluation if missing_hardware(run.quantization, device) is None else None


def make_export(export: Export, facts: dict[str, Any], say: Callable[[str], None]) -> Verification:
    """Write, verify and rename into place; keep only the report of an export that fails."""
    config = export.config
    with atomic_export(config.target) as folder:
        rounded = export.write(folder)
        say(f"written {format_bytes(export.bytes)}; loading it in a new process")
        reference = reference_of(export.evaluation, with_base=export.measure == "kl")
        reloaded = export.reload(folder, reference)
        trained = None if export.trained is None else reference_of(export.trained)
        limits = Limits(export.measure, *export.tolerance(rounded), export.max_loss_difference, export.min_kept_share)
        verification = verify(reference, reloaded, limits, trained)
        if verification.passed:
            (folder / CARD).write_text(_card(export, folder, verification), encoding="utf-8")
        else:
            shutil.rmtree(folder)
            folder.mkdir()
        report = {**facts, "kind": config.kind, "quant": config.written("quant"), "dtype": config.written("dtype")}
        files = {str(file.relative_to(folder)): file for file in files_in(folder)}
        hashes = {name: {"sha256": sha256(file), "bytes": file.stat().st_size} for name, file in files.items()}
        report |= {**asdict(verification), "files": hashes}
        write_json_unflushed(folder / REPORT, redact(report))
    return verification


def _card(export: Export, folder: Path, verified: Verification) -> str:
    run, evaluation = export.config.folder, export.evaluation
    loading = loading_of(export.sections, evaluation.base, folder, folder / "base")
    loading = export.on_card(loading, verified)
    manifest, result = read_manifest(run / "manifest.json"), read_result(run)
    parts = export.config.factors
    if parts:
        named = ", ".join(f"{factor:g} of {Path(part).name}" for part, factor in parts.items())
        how = f"Weighted sum of several adapters ({named}), combined by {export.config.combination}."
        loading = replace(loading, made_of=how)
    shown = with_smoothed_loss(result, run / "metrics.jsonl")
    return model_card(asdict(read_run(run / "run.yaml")), manifest, shown, loading)


def _require_disk_space(export: Export) -> None:
    needed = export.disk_bytes + _SPARE_BYTES
    place = existing_parent(export.config.target)
    free = shutil.disk_usage(place).free
    if free < needed:
        raise EnvironmentProblem(
            f"to={export.config.to}: the export needs {format_bytes(needed)}, but {place} has {format_bytes(free)} "
            "free. Free space, or set a folder on another disk."
        )
