"""The assembly of a trainable model, top to bottom."""

import logging
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from app.config.schema import AdapterConfig, CompileConfig, ModelConfig, QuantizationConfig, TaskConfig
from app.model.activation_checkpointing import HostOffload, recompute, repeated_layers, require_layers
from app.model.attention import register
from app.model.compile import compile_blocks
from app.model.dtypes import DTYPES
from app.model.fp8_linear import without_row_rounding
from app.model.fusion import fuse
from app.model.head import keep_head_in_fp32
from app.model.held import Held
from app.model.lora import attach
from app.model.quantization import Quantizer, quantizer_of, require_quantizable
from app.model.source import local_place
from app.model.tasks import task_of
from app.model.training_model import TrainingModel
from app.model.weights import build_on_meta, draw_unpacked, load_base, load_packed


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """How many weights there are and how many of them are trained, known before any is loaded."""

    total: int
    trained: int
    vocabulary: int  # ids that the embedding has a row for
    layers: int  # that can be recomputed

    @property
    def trained_share(self) -> float:
        """Of all weights, the adapter's included."""
        return self.trained / self.total


@dataclass(frozen=True, slots=True)
class ModelSections:
    """The sections of the config that decide what is built, and what was chosen for this machine."""

    model: ModelConfig
    task: TaskConfig
    adapter: AdapterConfig
    quantization: QuantizationConfig
    attention: str  # a key of BACKENDS
    precision: str  # a key of DTYPES
    recompute: bool | int  # all layers, none, or the first so many
    trained: str = "fp32"  # a key of DTYPES: how the weights are held where all of them are trained
    offload: bool = False  # whether what these keep waits on the host
    compile: CompileConfig = field(default_factory=lambda: CompileConfig(kind="none"))

    @property
    def keeps_random_base(self) -> bool:
        """An adapter on a base that no folder or hub has."""
        return self.model.weights == "random" and self.adapter.kind != "none"

    @property
    def quantizer(self) -> Quantizer | None:
        """How the base is packed; its arithmetic is that of the precision."""
        return quantizer_of(self.quantization, self.computed_in)

    @property
    def computed_in(self) -> torch.dtype:
        """What products are made in."""
        dtypes = DTYPES[self.precision]
        return dtypes.compute or dtypes.base

    @property
    def base_dtype(self) -> torch.dtype:
        """Of the base's weights, those beside packed ones included."""
        return DTYPES[self.trained].base if self.trains_base else DTYPES[self.precision].base

    @property
    def trains_base(self) -> bool:
        """Not where an adapter is trained beside it."""
        return self.adapter.kind == "none" and self.quantizer is None


def build_training_model(
    sections: ModelSections, device: torch.device, seed: int, base_path: str
) -> TrainingModel:
    """Base weights, adapter, attention and loss, on `device`, ready for training."""
    lm = build_base(sections, device, seed)
    torch.manual_seed(seed)  # the adapter starts the same whatever the base drew
    network = attach(sections.adapter, task_of(sections.task), lm, base_path)
    compiled = compile_blocks(lm, sections.compile, device)
    recompute(lm, sections.recompute, HostOffload() if sections.offload else None)
    pooled = task_of(sections.task).pooled
    training_model = TrainingModel(network.to(device), DTYPES[sections.precision].compute, pooled=pooled)
    training_model.train()
    training_model.compiled_layers = compiled
    if sections.adapter.fused and compiled is None:  # a compiler sees through no pass by hand
        with without_row_rounding(network):
            training_model.fused = fuse(network, partial(training_model.autocast, device))
    return training_model


def build_base(sections: ModelSections, device: torch.device, seed: int) -> Any:
    """The model without an adapter, its weights as training stores them and its attention ours."""
    import transformers

    transformers.logging.disable_progress_bar()  # one line of ours says what is loaded
    logging.getLogger("transformers.modeling_utils").addFilter(_not_about_masks)
    compiled_on = None if sections.compile.kind == "none" else device
    held = Held(sections.base_dtype, device, register(sections.attention, compiled_on))
    task = task_of(sections.task)
    if sections.quantizer is not None:
        lm = load_packed(sections.model, task, sections.quantizer, held, seed)
    else:
        lm = load_base(sections.model, task, held, seed)
    if task.pooled:
        keep_head_in_fp32(lm)
    return lm


def unpacked_base(sections: ModelSections, device: torch.device, seed: int) -> Any | None:
    """A random base as it was before it was quantised, or None if the training_model has it still."""
    if sections.quantizer is None:
        return None
    held = Held(DTYPES[sections.precision].base, device, "eager")
    return draw_unpacked(sections.model, task_of(sections.task), held, seed)


def _not_about_masks(record: logging.LogRecord) -> bool:
    """We give no mask on purpose: padding on the right is not seen by any token that counts."""
    return "attention_mask" not in record.getMessage()


def plan_model(sections: ModelSections, meta_model: Any = None) -> ModelPlan:
    """Counts from a model without memory, a given one stays as it is; finds adapter targets that match nothing."""
    task = task_of(sections.task)
    lm = build_on_meta(sections.model, task, "eager") if meta_model is None else deepcopy(meta_model)
    require_layers(lm, sections.recompute)
    if sections.quantizer is not None:
        require_quantizable(sections.model, lm, sections.quantizer)
    with torch.device("meta"):  # adapters of a large model would take a gigabyte, and seconds to draw
        network: Any = attach(sections.adapter, task, lm, sections.model.path)
    sizes = [(p.numel(), p.requires_grad) for p in network.parameters()]
    return ModelPlan(
        total=sum(n for n, _ in sizes),
        trained=sum(n for n, trains in sizes if trains),
        vocabulary=network.get_input_embeddings().num_embeddings,
        layers=len(repeated_layers(lm)),
    )


def base_path(model: ModelConfig, run_base: Path) -> str:
    """What an adapter names as its base: the model's own path, or the folder where a random base is kept."""
    if model.weights == "random":
        return str(run_base.resolve())
    place = local_place(model.path)
    return str(place.resolve()) if place.is_dir() else model.path
