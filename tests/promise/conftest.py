"""Puts kinds of a test into the tables of a running program, and runs its commands in this process."""

import gc
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.adapters.adapters import ADAPTERS
from app.config import conf_files
from app.config.adapters import ADAPTER_KINDS
from app.config.finished_run import EXPORT_KINDS
from app.config.kinds import METRICS, PREFERENCE_KINDS, PROBLEMS, QUANTIZATION_KINDS, ROW_FORMATS
from app.config.load import compose_run
from app.config.tasks import TASKS
from app.data.formats import READERS
from app.data.labels import LABELINGS
from app.exports.export import EXPORTS
from app.layers.attention import BACKENDS, register
from app.layers.quantization import QUANTIZATIONS
from app.tasks.classification import CLASS_PROBLEMS
from app.tasks.preference import PREFERENCES
from app.tasks.table import IMPLEMENTATIONS
from app.train import train
from app.training.trainer import Trainer
from tests.harness.runs import SMALL

# every table of a kind, by its name in the program
TABLES: dict[str, dict[str, Any]] = {
    "adapter": {"app.config.adapters.ADAPTER_KINDS": ADAPTER_KINDS, "app.adapters.adapters.ADAPTERS": ADAPTERS},
    "attention": {"app.layers.attention.BACKENDS": BACKENDS},
    "export": {"app.config.finished_run.EXPORT_KINDS": EXPORT_KINDS, "app.exports.export.EXPORTS": EXPORTS},
    "quantization": {
        "app.config.kinds.QUANTIZATION_KINDS": QUANTIZATION_KINDS,
        "app.layers.quantization.QUANTIZATIONS": QUANTIZATIONS,
    },
    "row format": {"app.config.kinds.ROW_FORMATS": ROW_FORMATS, "app.data.formats.READERS": READERS},
    "metric": {"app.config.kinds.METRICS": METRICS},
    "preference loss": {
        "app.config.kinds.PREFERENCE_KINDS": PREFERENCE_KINDS,
        "app.tasks.preference.PREFERENCES": PREFERENCES,
    },
    "problem": {
        "app.config.kinds.PROBLEMS": PROBLEMS,
        "app.data.labels.LABELINGS": LABELINGS,
        "app.tasks.classification.CLASS_PROBLEMS": CLASS_PROBLEMS,
    },
    "task": {"app.config.tasks.TASKS": TASKS, "app.tasks.table.IMPLEMENTATIONS": IMPLEMENTATIONS},
}


@dataclass
class Toys:
    """Kinds that are in the tables until the test ends."""

    monkeypatch: pytest.MonkeyPatch
    folder: Path

    def __post_init__(self) -> None:
        conf = shutil.copytree(conf_files.CONF, self.folder / "conf")
        self.monkeypatch.setattr(conf_files, "CONF", conf)

    def add(self, kind: str, name: str, entries: Mapping[str, Any]) -> None:
        """One entry in each table of the kind."""
        tables = {full.rpartition(".")[2]: table for full, table in TABLES[kind].items()}
        assert entries.keys() == tables.keys()
        for each, entry in entries.items():
            self.monkeypatch.setitem(tables[each], name, entry)

    def choice(self, group: str, name: str, yaml: str) -> None:
        """A file in the folder of a group of conf/."""
        (conf_files.CONF / group / f"{name}.yaml").write_text(yaml)

    def last_trainer(self) -> Callable[[], Trainer]:
        """What gives the loop of the last run."""
        trainers: list[Trainer] = []
        fit = Trainer.fit

        def kept(trainer: Trainer, request: Any) -> bool:
            trainers.append(trainer)
            return fit(trainer, request)

        self.monkeypatch.setattr(Trainer, "fit", kept)
        return lambda: trainers[-1]

    def train(self, name: str, *overrides: str) -> Path:
        """The folder of a run of a few steps."""
        folder = self.folder / name
        given = {each.partition("=")[0] for each in overrides}
        small = [each for each in (*SMALL, "training.max_steps=6") if each.partition("=")[0] not in given]
        run = compose_run([*small, f"output_dir={folder}", *overrides])
        assert train(run) == (75 if run.training.stop_after else 0)
        return folder


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Toys]:
    yield Toys(monkeypatch, tmp_path)
    register("sdpa")  # for transformers, which keeps the kernel of the last run
    gc.unfreeze()  # what runs have left
