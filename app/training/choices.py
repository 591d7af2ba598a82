"""What `precision`, `attention` and `compile` of `auto` mean on this machine: chosen at the first start, then kept.

With the choices a run has all sections that decide what is built.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from app.base.structure import BaseModel
from app.config.compile_rules import AUTO, NONE
from app.config.model_kinds import OWN
from app.config.schema import AttentionConfig, CompileConfig, PrecisionConfig, RunConfig, TrainingConfig
from app.distributed.process_group import default_device
from app.errors import refuse
from app.layers.attention import select
from app.layers.attention.requirements import Needs, needs_of
from app.layers.partition import BUDGETS
from app.model.build import DTYPES, ModelSections

_AMPERE = (8, 0)  # compute capability
_CPU_FLAGS_OF_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # the last is aarch64's name


@dataclass(frozen=True, slots=True)
class Choices:
    """Names from the config groups of the same name, never `auto`."""

    precision: str
    attention: str
    compile: str = NONE  # of `auto` settled by `app.training.compile_choice`


def choose(run: RunConfig, base: BaseModel, stored: Mapping[str, str]) -> Choices:
    """Resolve `auto` by the `stored` choices of a checkpoint, else for this machine and model."""
    refuse(_precision_problems(run.precision))
    precision, attention = run.precision, run.attention
    if stored and precision.kind == "auto":
        precision = PrecisionConfig(kind=stored["precision"])
    if stored and attention.kind == "auto":
        attention = AttentionConfig(kind=stored["attention"])
    if base.tier.name == OWN:
        attention = AttentionConfig(kind=OWN)
    name = choose_precision(precision)
    packed = bool(run.batching.packing) or base.is_bidirectional

    def needs() -> Needs:
        return needs_of(base.on_meta(), DTYPES[name].compute, packed=packed)

    compiled = run.compile.kind
    backend = select(attention, default_device(), needs, traces=compiled != NONE)
    return Choices(precision=name, attention=backend, compile=NONE if compiled == AUTO else compiled)


def sections_of(run: RunConfig, choices: Choices) -> ModelSections:
    """The settings that decide which model is built."""
    return ModelSections(
        model=run.model,
        task=run.task,
        adapter=run.adapter,
        quantization=run.quantization,
        attention=choices.attention,
        precision=choices.precision,
        recompute=recomputed_layers(run.training),
        trained=run.precision.trained,
        offload=run.training.offload,
        freeze=tuple(run.training.freeze),
        neftune=run.training.neftune,
        compile=replace(
            run.compile,
            kind=choices.compile if run.compile.kind == AUTO else run.compile.kind,
            memory_budget=memory_budget(run.compile),
        ),
    )


def memory_budget(config: CompileConfig) -> float:
    """Return the largest of `auto`'s budgets while `auto` has not been resolved."""
    return BUDGETS[0] if isinstance(config.memory_budget, str) else config.memory_budget


def recomputed_layers(training: TrainingConfig) -> bool | int:
    """All of them while `auto` has not been resolved."""
    return True if isinstance(training.recompute, str) else training.recompute


def _precision_problems(precision: PrecisionConfig) -> Iterator[str]:
    """Problems of a precision that this machine cannot compute in, with the alternatives."""
    has_gpu = torch.cuda.is_available()
    if precision.kind == "tf32" and not (has_gpu and torch.cuda.get_device_capability() >= _AMPERE):
        yield "precision=tf32 needs an NVIDIA GPU of the Ampere generation or newer. Choose precision=fp32 or bf16."
    elif precision.kind == "bf16" and has_gpu and not _gpu_has_bf16():
        yield "precision=bf16 is not in the hardware of this GPU. Choose precision=fp16 or fp32."


def choose_precision(precision: PrecisionConfig) -> str:
    """Resolve `auto`. A CPU without bf16 instructions is ten times slower in bf16 than in fp32."""
    if precision.kind != "auto":
        return precision.kind
    if torch.cuda.is_available():
        return "bf16" if _gpu_has_bf16() else "fp16"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return "fp32" if _CPU_FLAGS_OF_BF16.isdisjoint(flags.split()) else "bf16"


def _gpu_has_bf16() -> bool:
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))
