"""The assembly of a trainable model, top to bottom."""

from dataclasses import dataclass
from pathlib import Path

import torch

from app.assets import locate
from app.config.schema import AdapterConfig, AttentionConfig, ModelConfig, PrecisionConfig
from app.model.adapter import attach
from app.model.attention import register, select
from app.model.dtypes import DTYPES
from app.model.trainee import Trainee
from app.model.weights import build_on_meta, load_base


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """How many weights there are and how many of them are trained, known before any is loaded."""

    total: int
    trained: int


@dataclass(frozen=True, slots=True)
class ModelSections:
    """The sections of the config that decide what is built."""

    model: ModelConfig
    adapter: AdapterConfig
    attention: AttentionConfig
    precision: PrecisionConfig
    recompute: bool


def build_trainee(sections: ModelSections, device: torch.device, seed: int, base_path: str) -> Trainee:
    """Base weights, adapter, attention and loss, on `device`, ready for training."""
    dtypes = DTYPES[sections.precision.kind]
    attention = register(select(sections.attention, device))
    frozen = sections.adapter.kind != "none"
    lm = load_base(sections.model, dtypes.base if frozen else torch.float32, device, attention, seed)
    torch.manual_seed(seed)  # the adapter starts the same whatever the base drew
    network = attach(sections.adapter, lm, base_path)
    if sections.recompute:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trainee = Trainee(network.to(device), dtypes.compute)
    trainee.train()
    return trainee


def plan_model(sections: ModelSections) -> ModelPlan:
    """Counts from a model without memory; also finds adapter targets that match nothing."""
    lm = build_on_meta(sections.model, "eager")
    total = sum(p.numel() for p in lm.parameters())
    if sections.adapter.kind == "none":
        return ModelPlan(total=total, trained=total)
    network = attach(sections.adapter, lm, sections.model.path)
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    return ModelPlan(total=total, trained=trained)


def base_path(model: ModelConfig, run_base: Path) -> str:
    """What an adapter names as its base: the model's own path, or the folder where a random base is kept."""
    if model.weights == "random":
        return str(run_base.resolve())
    path = locate(model.path)
    return str(Path(path).resolve()) if Path(path).is_dir() else path
