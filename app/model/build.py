"""The assembly of a trainable model, top to bottom."""

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
from app.model.checks import compare_loss_head
from app.model.losses import Loss
from app.model.training_model import TrainingModel, freeze


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The numbers of a precision: `base` stores frozen weights, `compute` is what autocast works in; None: no autocast.

    Trained weights are fp32, or bf16 where `precision.trained` says so. Those are rounded by
    `optim.optimizers`: most updates of a fine-tune are smaller than the spacing of these numbers and would be
    lost.
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
    """How many weights there are and how many of them are trained, known before any is loaded."""

    total: int
    trained: int
    layers: int  # that can be recomputed

    @property
    def trained_share(self) -> float:
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
    offload: bool = False  # whether the inputs that recomputed layers save are kept in host memory
    freeze: tuple[str, ...] = ()  # parts of names of weights that are not trained
    neftune: float = 0.0
    compile: CompileConfig = field(default_factory=lambda: CompileConfig(kind="none"))

    @property
    def quantizer(self) -> Quantizer | None:
        """How the base is packed; its arithmetic is that of the precision."""
        dtypes = DTYPES[self.precision]
        return quantizer_of(self.quantization, dtypes.compute or dtypes.base)

    def bitsandbytes_arguments(self, base: BaseModel) -> dict[str, Any] | None:
        """Arguments of BitsAndBytesConfig to load the base as it was trained, as plain values."""
        quantizer = self.quantizer
        return None if quantizer is None else quantizer.bitsandbytes_arguments(base.linear_outside)

    @property
    def base_dtype(self) -> torch.dtype:
        """Data type of the base's weights that are not quantized."""
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
    """Base weights, adapter, attention and loss, on `device`, ready for training; `sharding` divides them among
    processes (app.distributed.fsdp.Sharding).

    `rows`: the micro-batches that a new adapter may begin with; None: its numbers are loaded later.
    """
    base, method = open_training_base(sections, device, seed), adapter_of(sections.adapter)
    on_meta = method is None or method.on_meta
    lm = base.lm if on_meta else base.whole()
    torch.manual_seed(seed)  # the adapter starts the same whatever the base drew
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
        left = [name for name, each in network.named_parameters() if each.is_meta]
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
    """Give a network, its adapter included, compiled and recomputed layers and a loss; shards and weights come later.

    `device`: None for a memory plan, on tensors without values: nothing is compiled, and what a run compares with the
    model's own before it uses it (grouped experts, a linear head) counts as equal.
    """
    is_compiled = sections.compile.kind != "none"
    compute = DTYPES[sections.precision].compute
    set_norms(network, sections.model, compute)
    freeze(network, sections.freeze)
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
        given = "0 (layers are compiled)" if is_compiled else f"{coefficient:g} (from config.json, at most 0.01)"
        training_model.add_remark(f"task.router_loss=auto: {given}")
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
    """Give the adapter of a filled base its first numbers, where its init takes rows or unpacked weights."""
    method = adapter_of(sections.adapter)
    if rows is None or method is None or method.begin is None:
        return
    with nullcontext() if model.compiled_layers is None else model.compiled_layers.paused():
        model.add_remark(method.begin(model, rows, partial(_lost_by_packing, sections, device, seed)))


def _lost_by_packing(sections: ModelSections, device: torch.device, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights [out, in] of the base less what its quantizer makes of them, read once more, one at a time."""
    options, quantizer = LoadOptions(sections.base_dtype, device, "eager"), sections.quantizer
    assert quantizer is not None
    for name, weight in open_weights(sections.model, task_of(sections.task), options, seed).linear_weights():
        whole = weight.to(device)
        yield name, whole - quantizer.rounded(whole.to(sections.base_dtype)).float()


def _with_weights(training_model: TrainingModel, compare: Callable[[Any], list[Comparison]]) -> list[Comparison]:
    """Compare layers, given a context in which one has its weights: those of a sharded model are gathered, the same
    ones by all processes.
    """
    sharding = training_model.sharding
    if sharding is None:
        return compare(nullcontext)
    with sharding.checking():
        return training_model.within(lambda: compare(sharding.gathered))


def group_experts(training_model: TrainingModel, sections: ModelSections, device: torch.device | None) -> None:
    """Let experts that are packed or adapted compute by our function; it is compared before."""
    network, quantizer = training_model.network, sections.quantizer
    is_packed = quantizer is not None and bool(stack_layers(network))
    if not (is_packed or adapted_experts(network)):
        return
    autocast = nullcontext if device is None else partial(training_model.autocast, device)
    found = [] if device is None else _with_weights(training_model, partial(compare_experts, network, autocast))
    for each in found if is_packed else ():
        each.or_refuse(
            f"quantization.kind={sections.quantization.kind}: {each}, so quantized experts would be trained wrongly. "
            "Set recipe=lora, or choose another model."
        )
    slow = "adapter.experts=true: using the expert computation of the model and PEFT, which is slower: "
    passed = [same for each in found for same in each.or_leave(lambda cause: training_model.add_remark(slow + cause))]
    if len(passed) == len(found):
        take_over(network)
    training_model.use_grouped_experts(passed)


def choose_loss_head(training_model: TrainingModel, batch: Batch) -> list[Comparison]:
    """Use a linear head where its loss and gradients are those of the model's own."""
    head = None if training_model.has_classes else linear_head(training_model.language_model)
    if head is None:
        return []
    own_way = "loss head: using the model's own head, which takes more memory: "
    found = compare_loss_head(training_model, head, batch)
    passed = found.or_leave(lambda cause: training_model.add_remark(own_way + cause))
    training_model.use_linear_head(head if passed else None)
    return passed


def build_base(sections: ModelSections, device: torch.device, seed: int) -> Any:
    """The model without an adapter, its weights as training stores them and its attention ours."""
    return open_training_base(sections, device, seed).whole()


def open_training_base(sections: ModelSections, device: torch.device, seed: int) -> Base:
    """The structure of `build_base`; weights are filled in later."""
    quiet_transformers()
    compiled_on = None if sections.compile.kind == "none" else device
    options = LoadOptions(sections.base_dtype, device, register(sections.attention, compiled_on))
    task = task_of(sections.task)
    base = open_weights(sections.model, task, options, seed, sections.quantizer)
    if task.has_classes:
        keep_head_in_fp32(base.lm)
    return base


def random_base(sections: ModelSections, device: torch.device, seed: int) -> Any:
    """A random base drawn once more and kept in memory of the host, as it is before it is quantized or sharded."""
    options = LoadOptions(DTYPES[sections.precision].base, device, "eager")
    base = open_weights(sections.model, task_of(sections.task), options, seed)

    def put(module: nn.Module, name: str, tensor: SourceTensor) -> None:
        module._parameters[name] = nn.Parameter(tensor.whole().to("cpu"), requires_grad=False)

    base.fill(put)
    return base.lm.to("cpu")


def count_weights(sections: ModelSections, base: BaseModel | None = None) -> ModelCounts:
    """Counts from a model without memory, that of `base` if one is given; finds adapter targets that match nothing."""
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
    with torch.device("meta"):  # adapters of a large model would take a gigabyte, and seconds to draw
        network: Any = add_adapter(sections.adapter, task, lm, sections.model.path)
    freeze(network, sections.freeze)
    sizes = [(p.numel(), p.requires_grad) for p in network.parameters()]
    return ModelCounts(
        total=sum(n for n, _ in sizes), trained=sum(n for n, trains in sizes if trains), layers=len(repeated_layers(lm))
    )
