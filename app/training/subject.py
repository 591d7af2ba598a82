"""A finished run on this machine: its tuned weights, or those of its base, as training held them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from app.config.schema import RunConfig
from app.distributed.process_group import Runtime, start
from app.errors import CheckpointError
from app.model.build import ModelSections
from app.model.fingerprint import base_fingerprint
from app.model.load import load_training_model, reads_base, weights_of
from app.model.training_model import TrainingModel
from app.training.choices import Choices, choose
from app.training.setup import attention_needs


@dataclass(frozen=True, slots=True)
class Subject:
    """`hashes` are those of the run's manifest."""

    folder: Path
    run: RunConfig
    hashes: Mapping[str, Any]
    choices: Choices
    runtime: Runtime

    def trainee(self, *, tuned: bool) -> TrainingModel:
        """The tuned model, or its base, as training held it."""
        sections = self.sections(tuned=tuned)
        self.require_same_base(tuned=tuned)
        return load_training_model(self.folder, sections, self.runtime.device, self.run.seed, tuned=tuned)

    def sections(self, *, tuned: bool) -> ModelSections:
        """What decides how it is built; its model's path is the local folder of the weights that are read."""
        return sections_of(self.run, self.folder, self.choices, tuned=tuned)

    def require_same_base(self, *, tuned: bool) -> None:
        """An adapter on another base would have a loss too, only not that of the run."""
        expected = self.hashes.get("base")
        if expected is None or not reads_base(self.folder, tuned=tuned):
            return
        if base_fingerprint(self.sections(tuned=tuned).model) != expected:
            raise CheckpointError(
                f"model.path={self.run.model.path}: the weights there are not the base of run={self.folder}: their "
                "hash is not the one in its manifest.json. Give model.path=DIR of the base that was tuned."
            )


def sections_of(run: RunConfig, folder: Path, choices: Choices, *, tuned: bool) -> ModelSections:
    """Of the model that is read from the run in `folder`."""
    return ModelSections(
        model=weights_of(folder, run.model, tuned=tuned),
        task=run.task,
        adapter=run.adapter,
        quantization=run.quantization,
        attention=choices.attention,
        precision=choices.precision,
        recompute=False,
        trained=run.precision.trained,
    )


def lay_subject(run: RunConfig, folder: Path, hashes: Mapping[str, Any], *, tuned: bool) -> Subject:
    """With the runtime started. `tuned`: of the weights that come first."""
    read = replace(run, model=weights_of(folder, run.model, tuned=tuned))
    choices = choose(run.precision, run.attention, partial(attention_needs, read), {})
    return Subject(folder, run, hashes, choices, start(run.launch, choices.precision, run.seed))
