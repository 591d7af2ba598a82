"""Assembly of a trainable model, top to bottom."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from app.adapters.adapters import adapter_of, add_adapter, trained_copies
from app.adapters.lora_inits import Rows
from app.base.base_model import BaseModel, open_base, open_weights, quiet_transformers
from app.base.base_weights import Base, LoadOptions, SourceTensor, put_whole
from app.base.conversion import require_packed_alike
from app.base.text_part import whole_class
from app.batch import Batch
from app.config.adapters import compile_obstacle
from app.config.schema import AdapterConfig, CompileConfig, ModelConfig, QuantizationConfig, TaskConfig
from app.config.tasks import task_of
from app.errors import ConfigError
from app.layers.activation_checkpointing import HostOffload, recompute, repeated_layers, require_layers
from app.layers.attention import register
from app.layers.comparison import Comparison
from app.layers.compile import compile_blocks
from app.layers.experts import RouterLoss, adapted_experts, coefficient_of, compare_experts, stack_layers, take_over
from app.layers.head import keep_head_in_fp32, linear_head
from app.layers.layer_norm import set_norms
from app.layers.quantization import Quantizer, quantizer_of
from app.layers.recurrent import missing_kernels, recurrent_mixers
from app.layers.tiled_mlp import require_tileable, tile_mlps
from app.model.checks import compare_loss_head
from app.model.losses import Loss
from app.model.training_model import TrainingModel, freeze


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Dtypes of a precision: `base` for frozen weights, `compute` for autocast; None: no autocast.

    Trained weights are fp32, or bf16 with `precision.trained`. `optim.optimizers` rounds bf16 weights stochastically:
    most updates of a fine-tune are smaller than the bf16 spacing and would be lost.
    """

    base: torch.dtype
    compute: torch.dtype | None


DTYPES = {
    "fp32": Dtypes(base=torch.float32, compute=None),
    "tf32": Dtypes(base=torch.float32, compute=None),
    "bf16": Dtypes(base=torch.bfloat16, compute=torch.bfloat16),
    "fp16": Dtypes(base=torch.float16, compute=torch.float16),
}


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """Numbers of weights and trained weights, available before loading."""

    base: int  # without the adapter
    total: int
    trained: int
    layers: int  # repeated layers, which can be recomputed

    @property
    def trained_share(self) -> float:
        return self.trained / self.total

    def __str__(self) -> str:
        added = self.total - self.base
        if self.trained == self.total:
            return f"{self.total:,} parameters, all trainable"
        adapter = f" + adapter {added:,}" if added else ""
        trainable = "" if self.trained == added else f", {self.trained:,} trainable"
        return f"{self.base:,} parameters{adapter}{trainable} ({self.trained_share:.1%})"


@dataclass(frozen=True, slots=True)
class ModelSections:
    """Config sections that define the model, and settings resolved for this machine."""

    model: ModelConfig
    task: TaskConfig
    adapter: AdapterConfig
    quantization: QuantizationConfig
    attention: str  # a key of BACKENDS
    precision: str  # a key of DTYPES
    recompute: bool | int  # all layers, none, or the first N
    trained: str = "fp32"  # a key of DTYPES: storage of weights if all are trained
    offload: bool = False  # whether saved inputs of recomputed layers are in host memory
    tile: int = 0  # rows of a tile in gated MLPs; 0: no tiles
    freeze: tuple[str, ...] = ()  # name parts of frozen weights
    neftune: float = 0.0
    compile: CompileConfig = field(default_factory=lambda: CompileConfig(kind="none"))

    @property
    def quantizer(self) -> Quantizer | None:
        """Quantizer of the base, with the compute dtype of the precision."""
        dtypes = DTYPES[self.precision]
        return quantizer_of(self.quantization, dtypes.compute or dtypes.base)

    def bitsandbytes_arguments(self, base: BaseModel) -> dict[str, Any] | None:
        """Return arguments of BitsAndBytesConfig to load the base as in training, as plain values."""
        quantizer = self.quantizer
        return None if quantizer is None else quantizer.bitsandbytes_arguments(base.linear_outside)

    @property
    def base_dtype(self) -> torch.dtype:
        """Dtype of base weights that are not quantized."""
        return DTYPES[self.trained if self.adapter.kind == "none" else self.precision].base


def build_training_model(
    sections: ModelSections,
    loss: Loss,
    device: torch.device,
    seed: int,
    base_path: str,
    sharding: Any = None,
    rows: Rows | None = None,
) -> TrainingModel:
    """Build base, adapter, attention and loss on `device`, ready for training; `sharding` shards them
    (app.distributed.fsdp.Sharding).

    `rows`: micro-batches to initialize a new adapter; None: its weights are loaded later.
    """
    base, method = open_training_base(sections, device, seed), adapter_of(sections.adapter)
    on_meta = method is None or method.on_meta
    lm = base.lm if on_meta else base.whole()
    torch.manual_seed(seed)  # the adapter starts the same for any base initialization
    with torch.device("meta") if on_meta else nullcontext():
        network = add_adapter(sections.adapter, task_of(sections.task), lm, base_path)
    if on_meta and sharding is not None and sections.quantizer is not None:
        sections.quantizer.use_stored_shapes(network)

    def fill() -> None:
        if not on_meta:
            return
        put = put_whole if sharding is None else sharding.put
        base.fill(put, trained_copies(network))
        if method is not None:
            method.draw(network, device, put)
        left = [name for name, weight in network.named_parameters() if weight.is_meta]
        assert not left, f"not filled: {left[:3]}"

    if sharding is not None and method is not None:
        method.require_divisible()
    host = HostOffload() if sections.offload else None
    training_model = assemble(network if on_meta else network.to(device), sections, loss, device, host)
    if not on_meta:
        _begin_adapter(sections, device, seed, rows, training_model)
    if sharding is None:
        fill()
    else:
        training_model.divide(sharding, fill)
    group_experts(training_model, sections, device)
    whole = f"adapter.kind={sections.adapter.kind}: each process loads the whole base before sharding it"
    for remark in (*base.remarks, *([] if on_meta or sharding is None else [whole])):
        training_model.add_remark(remark)
    return training_model


def assemble(
    network: nn.Module,
    sections: ModelSections,
    loss: Loss,
    device: torch.device | None,
    host: HostOffload | None = None,
) -> TrainingModel:
    """Add tiled MLPs, compiled and recomputed layers and a loss to a network with its adapter; shards and weights come
    later.

    `device`: None for a memory plan, on tensors without values: nothing is compiled, and features that a run first
    compares with the model's own computation (grouped experts, a linear head) count as equal.
    """
    is_compiled = sections.compile.kind != "none"
    compute = DTYPES[sections.precision].compute
    set_norms(network, sections.model, compute)
    freeze(network, sections.freeze)
    tile_mlps(network, sections.tile)
    compiled = None if device is None else compile_blocks(network, sections.compile, compile_obstacle(sections.adapter))
    recompute(network, sections.recompute, host)
    task = task_of(sections.task)
    training_model = TrainingModel(
        network, compute, task, loss, sections.attention, sections.quantizer, compiled
    ).train()
    lm = training_model.language_model
    coefficient = coefficient_of(sections.task, sections.adapter, lm)
    if coefficient and not is_compiled:
        training_model.use_router_loss(RouterLoss(lm, coefficient))
    if coefficient and sections.task.router_loss == "auto":
        value = "0 (layers are compiled)" if is_compiled else f"{coefficient:g} (from config.json, at most 0.01)"
        training_model.add_remark(f"task.router_loss=auto: {value}")
    if sections.neftune:
        training_model.use_neftune(sections.neftune)
    missing = missing_kernels(recurrent_mixers(network))
    if missing and device is not None and device.type == "cuda":
        training_model.add_remark(f"recurrent layers: computed in plain PyTorch, slow without {' and '.join(missing)}")
    if device is None and not task.has_classes:
        training_model.use_linear_head(linear_head(lm))
    return training_model


def _begin_adapter(
    sections: ModelSections, device: torch.device, seed: int, rows: Rows | None, model: TrainingModel
) -> None:
    """Initialize the adapter of a filled base, if its init needs rows or unquantized weights."""
    method = adapter_of(sections.adapter)
    if rows is None or method is None or method.begin is None:
        return
    with nullcontext() if model.compiled_layers is None else model.compiled_layers.paused():
        model.add_remark(method.begin(model, rows, partial(_lost_by_packing, sections, device, seed)))


def _lost_by_packing(sections: ModelSections, device: torch.device, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the quantization error [out, in] of base weights, read again one at a time."""
    options, quantizer = LoadOptions(sections.base_dtype, device, "eager"), sections.quantizer
    assert quantizer is not None
    for name, weight in open_weights(sections.model, task_of(sections.task), options, seed).linear_weights():
        whole = weight.to(device)
        yield name, whole - quantizer.rounded(whole.to(sections.base_dtype)).float()


def _with_weights(training_model: TrainingModel, compare: Callable[[Any], list[Comparison]]) -> list[Comparison]:
    """Compare layers, with a context that gathers the weights of a layer if the model is sharded, on all processes."""
    sharding = training_model.sharding
    if sharding is None:
        return compare(nullcontext)
    with sharding.checking():
        return training_model.within(lambda: compare(sharding.gathered))


def group_experts(training_model: TrainingModel, sections: ModelSections, device: torch.device | None) -> None:
    """Use the grouped function for quantized or adapted experts if it passes the comparison."""
    network, quantizer = training_model.network, sections.quantizer
    is_packed = quantizer is not None and bool(stack_layers(network))
    if not (is_packed or adapted_experts(network)):
        return
    autocast = nullcontext if device is None else partial(training_model.autocast, device)
    compared = [] if device is None else _with_weights(training_model, partial(compare_experts, network, autocast))
    for comparison in compared if is_packed else ():
        comparison.or_refuse(
            f"quantization.kind={sections.quantization.kind}: {comparison}, so quantized experts would be trained "
            "wrongly. Set recipe=lora, or choose another model."
        )
    slow = "adapter.experts=true: using the expert computation of the model and PEFT, which is slower: "
    passed = [same for c in compared for same in c.or_leave(lambda cause: training_model.add_remark(slow + cause))]
    if len(passed) == len(compared):
        take_over(network)
    training_model.use_grouped_experts(passed)


def choose_loss_head(training_model: TrainingModel, batch: Batch) -> list[Comparison]:
    """Use a linear head if its loss and gradients equal those of the model's own head."""
    head = None if training_model.has_classes else linear_head(training_model.language_model)
    if head is None:
        return []
    fallback = "loss head: using the model's own head, which takes more memory: "
    comparison = compare_loss_head(training_model, head, batch)
    passed = comparison.or_leave(lambda cause: training_model.add_remark(fallback + cause))
    training_model.use_linear_head(head if passed else None)
    return passed


def build_base(sections: ModelSections, device: torch.device, seed: int) -> Any:
    """Return the model without an adapter, with weights as training stores them and this program's attention."""
    return open_training_base(sections, device, seed).whole()


def open_training_base(sections: ModelSections, device: torch.device, seed: int) -> Base:
    """Return the structure of `build_base`; weights are filled in later."""
    quiet_transformers()
    compiled_on = None if sections.compile.kind == "none" else device
    options = LoadOptions(sections.base_dtype, device, register(sections.attention, compiled_on))
    task = task_of(sections.task)
    base = open_weights(sections.model, task, options, seed, sections.quantizer)
    if task.has_classes:
        keep_head_in_fp32(base.lm)
    return base


def random_base(sections: ModelSections, device: torch.device, seed: int) -> Any:
    """Draw a random base again and return it in host memory, before quantization and sharding."""
    options = LoadOptions(DTYPES[sections.precision].base, device, "eager")
    base = open_weights(sections.model, task_of(sections.task), options, seed)

    def put(module: nn.Module, name: str, tensor: SourceTensor) -> None:
        module._parameters[name] = nn.Parameter(tensor.whole().to("cpu"), requires_grad=False)

    base.fill(put)
    return base.lm.to("cpu")


def count_weights(sections: ModelSections, base: BaseModel | None = None) -> ModelCounts:
    """Return counts from a model on meta, that of `base` if any; refuse adapter targets that match nothing."""
    task = task_of(sections.task)
    base = base or open_base(sections.model, sections.task)
    lm, method = deepcopy(base.on_meta()), adapter_of(sections.adapter)
    is_part = whole_class(lm.config, task) is not None
    if is_part if method is None else not method.of_text_parts and (is_part or base.text_part is not None):
        why = "and only LoRA adapters get the names of the whole model. Set adapter=lora."
        if method is None:
            why = "with the class of the whole model, which cannot be saved without its other towers. Set recipe=lora."
        part = f"only the text part of a model of kind {lm.config.model_type} is loaded"
        raise ConfigError(f"adapter.kind={sections.adapter.kind}: {part}, {why}")
    require_layers(lm, sections.recompute)
    coefficient_of(sections.task, sections.adapter, lm)
    set_norms(lm, sections.model, DTYPES[sections.precision].compute)
    require_packed_alike(sections.model, lm, sections.quantizer)
    if sections.quantizer is not None:
        sections.quantizer.require_quantizable(sections.model, lm)
    size = sum(parameter.numel() for parameter in lm.parameters())
    with torch.device("meta"):  # adapters of a large model would take a gigabyte and seconds to initialize
        network: Any = add_adapter(sections.adapter, task, lm, sections.model.path)
    freeze(network, sections.freeze)
    require_tileable(network, sections.tile)
    sizes = [(p.numel(), p.requires_grad) for p in network.parameters()]
    return ModelCounts(
        base=size,
        total=sum(n for n, _ in sizes),
        trained=sum(n for n, trains in sizes if trains),
        layers=len(repeated_layers(lm)),
    )
