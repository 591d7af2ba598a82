"""An export from a finished run: files written aside, proven by a fresh process, then put in their place."""

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from app.config.finished_run import ExportConfig
from app.errors import CheckpointError, EnvironmentProblem
from app.evaluation.run import Say, Scoring
from app.exports.folder import REPORT, empty, existing, hashes_of, write_plain_json, written_aside
from app.exports.verify import (
    Certificate,
    Expected,
    Tolerance,
    beside_training,
    certify,
    expected,
    four_bit_options,
    plain_name,
    tolerance,
)
from app.files import MANIFEST, verify_checksums
from app.model.build import base_path
from app.model.dtypes import DTYPES
from app.model.merge import (
    EXPORTED,
    Merge,
    fully_trained_weights,
    merged_config,
    plan_merge,
    read_lora_deltas,
    stored_tensors,
)
from app.model.quantization import missing_hardware, quantization_after_training
from app.model.tasks import task_of
from app.tracking.formatting import format_bytes
from app.tracking.model_card import Loading
from app.tracking.redact import masked

CARD = "README.md"
_ADAPTER = "adapter_config.json"
_NOT_COPIED = {MANIFEST, CARD, REPORT}
_OF_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "adapter_*")
_WITH_WEIGHTS = ("generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*")
_SPARE = 16 << 20  # for what is small: cards, configurations, the blocks of a file system


@dataclass(frozen=True)
class Export:
    """What is going to be written, known before anything is."""

    config: ExportConfig
    scoring: Scoring
    files: tuple[Path, ...]  # that are copied
    base: Path  # of a whole model: its own weights
    merge: Merge | None
    trained: Scoring | None  # where training held the base otherwise than whoever loads it

    @property
    def keeps_base(self) -> bool:
        """A base of random weights goes along with its adapter: nothing else has it."""
        return self.merge is None and (self.config.folder / "base").is_dir()

    @cached_property
    def bytes(self) -> int:
        """Of all files together."""
        copied = [*self.files, *(self._base_files() if self.keeps_base else ())]
        sizes: list[int] = [file.stat().st_size for file in copied]
        return sum(sizes) + (0 if self.merge is None else self.merge.bytes)

    def write(self, folder: Path) -> int:
        """Everything but card and report; returns how many matrices were rounded."""
        for file in self.files:
            shutil.copyfile(file, folder / file.name)
        if self.merge is not None:
            write_plain_json(folder / "config.json", merged_config(self._numbers, self.config.dtype))
            return self.merge.write(folder, self.config.shard_gb * 1e9)
        if self.keeps_base:
            (folder / "base").mkdir()
            for file in self._base_files():
                shutil.copyfile(file, folder / "base" / file.name)
        adapter = json.loads((folder / _ADAPTER).read_text())
        named = base_path(self.config.model, self.config.target / "base")
        write_plain_json(folder / _ADAPTER, adapter | {"base_model_name_or_path": named})
        return self._rounded_on_loading()

    @property
    def _numbers(self) -> Path:
        """The folder whose config.json a whole model has; that of an adapter names its classes."""
        final = self.config.folder / "final"
        return final if (final / "config.json").is_file() else self.base

    def _rounded_on_loading(self) -> int:
        """Matrices of a head in fp32, which whoever loads the base in fewer digits rounds to as many."""
        final = self.config.folder / "final"
        if self._numbers != final:
            return 0
        stored = stored_tensors(final)
        return sum(len(stored[name].shape) > 1 for name in fully_trained_weights(final).values())

    def certify(self, folder: Path, want: Expected, allowed: Tolerance) -> Certificate:
        """By a process that loads what was written to `folder`."""
        if self.merge is not None:
            return certify(folder, None, want, self.scoring, allowed)
        return certify(folder, folder / "base" if self.keeps_base else self.base, want, self.scoring, allowed)

    def _base_files(self) -> list[Path]:
        return _files(self.config.folder / "base")


def lay_export(config: ExportConfig, scoring: Scoring) -> Export:
    """Refuses what cannot be exported, and a disk that is too small, before anything is written."""
    final = config.folder / "final"
    damaged = verify_checksums(final)
    if damaged:
        raise CheckpointError(
            f"run={config.run}: {final}: {damaged}. Train it again, or take a copy of the run."
        )
    scoring.require_same_base(tuned=True)
    scoring, trained = _as_it_is_used(scoring)
    sections = scoring.sections(tuned=True)
    base = Path(sections.model.path)
    merge = None
    if config.kind == "merged":
        adapter = final if (final / _ADAPTER).is_file() else None
        deltas = {} if adapter is None else read_lora_deltas(adapter)
        merge = plan_merge(sections, deltas, config.dtype, scoring.runtime.device, adapter)
    export = Export(config, scoring, tuple(_copied(config, final, base)), base, merge, trained)
    _require_room(export)
    return export


def _as_it_is_used(scoring: Scoring) -> tuple[Scoring, Scoring | None]:
    """What whoever loads the export has; and what training had, where that is another and can be computed here."""
    run, device = scoring.run, scoring.runtime.device
    later = quantization_after_training(run.quantization)
    if later == run.quantization:
        return scoring, None
    used = replace(scoring, run=replace(run, quantization=later))
    return used, scoring if missing_hardware(run.quantization, device) is None else None


def make_export(export: Export, card: str, facts: dict[str, Any], say: Say) -> Certificate:
    """Written, proven, and in its place; of one that failed only the report is left there."""
    config = export.config
    with written_aside(config.target) as folder:
        rounded = export.write(folder)
        say(f"written {format_bytes(export.bytes)}; a fresh process loads it")
        want = expected(export.scoring)
        dtype = config.dtype if export.merge else _name_of(export.scoring.choices.precision)
        certificate = export.certify(folder, want, tolerance(dtype, rounded))
        if export.trained is not None:
            certificate = beside_training(certificate, want, expected(export.trained))
        if certificate.passed:
            (folder / CARD).write_text(card, encoding="utf-8")
        else:
            empty(folder)
        report = {**facts, "kind": config.kind, "dtype": config.dtype if export.merge else None}
        report |= {**certificate.as_dict(), "files": hashes_of(folder)}
        write_plain_json(folder / REPORT, masked(report))
    return certificate


def _name_of(precision: str) -> str:
    """Of the dtype that a frozen base is held in."""
    return next(name for name, dtype in EXPORTED.items() if dtype == DTYPES[precision].base)


def loading_of(export: Export) -> Loading:
    """How the card says that it is loaded."""
    sections = export.scoring.sections(tuned=True)
    auto_class = task_of(sections.task).auto_class
    if export.merge is not None:
        return Loading(auto_class, None, base_inside=False, dtype=plain_name(EXPORTED[export.config.dtype]))
    return Loading(
        auto_class,
        base_path(export.config.model, export.config.target / "base"),
        base_inside=export.keeps_base,
        dtype=plain_name(DTYPES[sections.precision].base),
        four_bit=four_bit_options(sections),
        own_classes=task_of(sections.task).pooled,
    )


def _copied(config: ExportConfig, final: Path, base: Path) -> Iterable[Path]:
    """Of an adapter all of final/; of a merged model its tokenizer, and beside the weights what belongs to them."""
    found = {file.name: file for file in _files(final)}
    if config.kind == "merged":
        code = ("*.py",) if config.model.trust_remote_code else ()
        beside = {file.name: file for pattern in (*_WITH_WEIGHTS, *code) for file in base.glob(pattern)}
        weights = {file.name for pattern in _OF_WEIGHTS for file in final.glob(pattern)}
        found = {name: file for name, file in (beside | found).items() if name not in weights}
        found.pop("config.json", None)
    return (file for name, file in sorted(found.items()) if name not in _NOT_COPIED)


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file() and file.name != MANIFEST)


def _require_room(export: Export) -> None:
    needed = export.bytes + _SPARE
    place = existing(export.config.target)
    free = shutil.disk_usage(place).free
    if free < needed:
        raise EnvironmentProblem(
            f"to={export.config.to}: the export takes {format_bytes(needed)}, and {place} has {format_bytes(free)} "
            "free. Free space, or give a folder on another disk."
        )
