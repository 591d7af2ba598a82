"""An export from a finished run: written into a temporary folder, verified by a fresh process, then renamed."""

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from app.config.finished_run import ExportConfig
from app.config.load import read_run
from app.errors import CheckpointError, EnvironmentProblem
from app.evaluation.run import Evaluation
from app.exports.folder import REPORT, atomic_export, existing_parent, hashes_of, write_json_unflushed
from app.exports.verify import Verification, reference_of, tolerance, verify, with_training_base
from app.files import MANIFEST, read_json, verify_checksums
from app.model.build import DTYPES, base_path
from app.model.merge import EXPORTED, Merge, fully_trained_weights, merged_config, plan_merge, read_lora_deltas
from app.model.quantization import missing_hardware, quantization_after_training
from app.model.save import add_transformers_4_keys
from app.safe_text import redact
from app.tracking.formatting import format_bytes
from app.tracking.manifest import read_manifest
from app.tracking.model_card import CARD, model_card
from app.tracking.recorder import read_result
from app.training.final_model import loading_of

_ADAPTER = "adapter_config.json"
_NOT_COPIED = {MANIFEST, CARD, REPORT}
_OF_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "adapter_*")
_WITH_WEIGHTS = ("generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*")
_SPARE_BYTES = 16 << 20  # for cards, configurations and partly filled blocks of the file system


@dataclass(frozen=True)
class Export:
    """The files of an export, known before anything is written."""

    config: ExportConfig
    evaluation: Evaluation
    files: tuple[Path, ...]  # copied as they are
    base: Path  # the weights of the base, or of a fully tuned model
    merge: Merge | None
    trained: Evaluation | None  # where training computed with another base than users of the export load

    @property
    def keeps_base(self) -> bool:
        """Whether the base is exported too: one of random weights exists nowhere else."""
        return self.merge is None and (self.config.folder / "base").is_dir()

    @cached_property
    def bytes(self) -> int:
        """Size of all files."""
        copied = [*self.files, *(self._base_files() if self.keeps_base else ())]
        sizes: list[int] = [file.stat().st_size for file in copied]
        return sum(sizes) + (0 if self.merge is None else self.merge.bytes)

    def write(self, folder: Path) -> int:
        """Write all but card and report; returns the number of rounded matrices."""
        for file in self.files:
            shutil.copyfile(file, folder / file.name)
        if self.merge is not None:
            write_json_unflushed(folder / "config.json", merged_config(self._config_folder, self.config.dtype))
            add_transformers_4_keys(folder, type(self.evaluation.meta_model.config))
            return self.merge.write(folder, self.config.shard_gb * 1e9)
        if self.keeps_base:
            (folder / "base").mkdir()
            for file in self._base_files():
                shutil.copyfile(file, folder / "base" / file.name)
        adapter = json.loads((folder / _ADAPTER).read_text())
        named = base_path(self.config.model, self.config.target / "base")
        write_json_unflushed(folder / _ADAPTER, adapter | {"base_model_name_or_path": named})
        return self._rounded_on_loading()

    @property
    def _config_folder(self) -> Path:
        """Where config.json of a whole model is; that of a classifier's adapter, with its classes, is in final/."""
        final = self.config.folder / "final"
        return final if (final / "config.json").is_file() else self.base

    def _rounded_on_loading(self) -> int:
        """Count the fp32 matrices of a head that are rounded when the base is loaded in a narrower dtype."""
        final = self.config.folder / "final"
        if self._config_folder != final:
            return 0
        return sum(len(each.shape) > 1 for each in fully_trained_weights(final).values())

    def _base_files(self) -> list[Path]:
        return _files(self.config.folder / "base")


def prepare_export(config: ExportConfig, evaluation: Evaluation) -> Export:
    """Refuse what cannot be exported, and a disk that is too small, before anything is written."""
    final = config.folder / "final"
    damaged = verify_checksums(final, ("*.safetensors", "*.json", "*.jinja"))
    if damaged:
        raise CheckpointError(f"run={config.run}: {final}: {damaged}. Train it again, or take a copy of the run.")
    evaluation.require_same_base(tuned=True)
    evaluation, trained = _with_base_of_users(evaluation)
    sections = evaluation.sections(tuned=True)
    base = Path(sections.model.path)
    merge = None
    if config.kind == "merged":
        adapter = final if (final / _ADAPTER).is_file() else None
        deltas = {} if adapter is None else read_lora_deltas(adapter)
        merge = plan_merge(sections, deltas, config.dtype, evaluation.runtime.device, adapter)
    export = Export(config, evaluation, tuple(_copied(config, final, base)), base, merge, trained)
    _require_disk_space(export)
    return export


def _with_base_of_users(evaluation: Evaluation) -> tuple[Evaluation, Evaluation | None]:
    """The run on the base that users of the export load; and on that of training, if it differs and runs here."""
    run, device = evaluation.run, evaluation.runtime.device
    later = quantization_after_training(run.quantization)
    if later == run.quantization:
        return evaluation, None
    used = replace(evaluation, run=replace(run, quantization=later))
    return used, evaluation if missing_hardware(run.quantization, device) is None else None


def make_export(export: Export, facts: dict[str, Any], say: Callable[[str], None]) -> Verification:
    """Write, verify and rename into place; of an export that failed only the report is left."""
    config = export.config
    with atomic_export(config.target) as folder:
        rounded = export.write(folder)
        say(f"written {format_bytes(export.bytes)}; a fresh process loads it")
        reference = reference_of(export.evaluation)
        dtype = config.dtype if export.merge else _base_dtype_name(export.evaluation.choices.precision)
        base = folder / "base" if export.keeps_base else export.base
        allowed = tolerance(dtype, rounded)
        verification = verify(folder, None if export.merge else base, reference, export.evaluation, allowed)
        if export.trained is not None:
            verification = with_training_base(verification, reference, reference_of(export.trained))
        if verification.passed:
            (folder / CARD).write_text(_card(export, folder), encoding="utf-8")
        else:
            shutil.rmtree(folder)
            folder.mkdir()
        report = {**facts, "kind": config.kind, "dtype": config.dtype if export.merge else None}
        report |= {**asdict(verification), "files": hashes_of(folder)}
        write_json_unflushed(folder / REPORT, redact(report))
    return verification


def _base_dtype_name(precision: str) -> str:
    return next(name for name, dtype in EXPORTED.items() if dtype == DTYPES[precision].base)


def _card(export: Export, folder: Path) -> str:
    run, evaluation = export.config.folder, export.evaluation
    loading = loading_of(evaluation.sections(tuned=True), evaluation.meta_model, folder, folder / "base")
    manifest, result = read_manifest(run / "manifest.json"), read_result(run)
    return model_card(asdict(read_run(run / "run.yaml")), manifest, result, loading)


def _copied(config: ExportConfig, final: Path, base: Path) -> Iterable[Path]:
    """Files to copy: of an adapter all of final/; of a merged model its tokenizer, licences and other non-weights."""
    hashed = read_json(final / MANIFEST)
    found = {file.name: file for file in _files(final) if file.name in hashed}
    if config.kind == "merged":
        code = ("*.py",) if config.model.trust_remote_code else ()
        beside = {file.name: file for pattern in (*_WITH_WEIGHTS, *code) for file in base.glob(pattern)}
        weights = {file.name for pattern in _OF_WEIGHTS for file in final.glob(pattern)}
        found = {name: file for name, file in (beside | found).items() if name not in weights}
        found.pop("config.json", None)
    return (file for name, file in sorted(found.items()) if name not in _NOT_COPIED)


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file() and file.name != MANIFEST)


def _require_disk_space(export: Export) -> None:
    needed = export.bytes + _SPARE_BYTES
    place = existing_parent(export.config.target)
    free = shutil.disk_usage(place).free
    if free < needed:
        raise EnvironmentProblem(
            f"to={export.config.to}: the export takes {format_bytes(needed)}, and {place} has {format_bytes(free)} "
            "free. Free space, or give a folder on another disk."
        )
