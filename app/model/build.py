"""The assembly of a trainable model, top to bottom."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from app.config.schema import AdapterConfig, ModelConfig
from app.model.adapter import attach
from app.model.attention import register
from app.model.dtypes import DTYPES
from app.model.recompute import recompute
from app.model.source import local_place
from app.model.trainee import Trainee
from app.model.weights import build_on_meta, load_base


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """How many weights there are and how many of them are trained, known before any is loaded."""

    total: int
    trained: int
    vocabulary: int  # ids that the embedding has a row for

    @property
    def trained_share(self) -> float:
        """Of all weights, the adapter's included."""
        return self.trained / self.total


@dataclass(frozen=True, slots=True)
class ModelSections:
    """The sections of the config that decide what is built, and what was chosen for this machine."""

    model: ModelConfig
    adapter: AdapterConfig
    attention: str  # a key of BACKENDS
    precision: str  # a key of DTYPES
    recompute: bool

    @property
    def keeps_random_base(self) -> bool:
        """An adapter on a base that no folder or hub has."""
        return self.model.weights == "random" and self.adapter.kind != "none"


def build_trainee(sections: ModelSections, device: torch.device, seed: int, base_path: str) -> Trainee:
    """Base weights, adapter, attention and loss, on `device`, ready for training."""
    import transformers

    transformers.logging.disable_progress_bar()  # one line of ours says what is loaded
    logging.getLogger("transformers.modeling_utils").addFilter(_not_about_masks)
    dtypes = DTYPES[sections.precision]
    attention = register(sections.attention)
    frozen = sections.adapter.kind != "none"
    lm = load_base(sections.model, dtypes.base if frozen else torch.float32, device, attention, seed)
    torch.manual_seed(seed)  # the adapter starts the same whatever the base drew
    network = attach(sections.adapter, lm, base_path)
    if sections.recompute:
        recompute(lm)
    trainee = Trainee(network.to(device), dtypes.compute)
    trainee.train()
    return trainee


def _not_about_masks(record: logging.LogRecord) -> bool:
    """We give no mask on purpose: padding on the right is not seen by any token that counts."""
    return "attention_mask" not in record.getMessage()


def plan_model(sections: ModelSections) -> ModelPlan:
    """Counts from a model without memory; also finds adapter targets that match nothing."""
    network: Any = attach(sections.adapter, build_on_meta(sections.model, "eager"), sections.model.path)
    sizes = [(p.numel(), p.requires_grad) for p in network.parameters()]
    return ModelPlan(
        total=sum(n for n, _ in sizes),
        trained=sum(n for n, trains in sizes if trains),
        vocabulary=network.get_input_embeddings().num_embeddings,
    )


def base_path(model: ModelConfig, run_base: Path) -> str:
    """What an adapter names as its base: the model's own path, or the folder where a random base is kept."""
    if model.weights == "random":
        return str(run_base.resolve())
    place = local_place(model.path)
    return str(place.resolve()) if place.is_dir() else model.path
