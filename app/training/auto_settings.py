"""Values of `auto` for precision, attention, compile, batching, recompute and parallelism, decided at the first start.

compile=auto compiles on an NVIDIA GPU if every layer can be compiled and the run is long enough to repay the compile
time. batching.packing=auto packs if that is proven for the model type, or the type is unknown; else rows are padded.
batching.tokens=auto keeps the step size: `model.suggest.tokens * batching.accumulation` tokens on each process, split
into 1, 2, 4, ... micro-batches of a bin each, the larger the faster. The memory planner determines what fits.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from app.base.base_model import BaseModel
from app.batch import Batch
from app.config.adapters import compile_obstacle
from app.config.kinds import OWN, PACKED, PADDED
from app.config.rules import BLOCKS, NONE, Obstacle, problems_of, settings_obstacles
from app.config.schema import AttentionConfig, CompileConfig, PrecisionConfig, RunConfig, TrainingConfig
from app.config.validate import convert
from app.distributed.process_group import HostGroup, default_device
from app.errors import ConfigError, refuse
from app.layers.attention import select
from app.layers.attention.exchange import exchange_problems
from app.layers.attention.requirements import Needs, needs_of
from app.layers.compile import BUDGETS, model_obstacles, product_flops
from app.layers.experts import coefficient_of
from app.model.build import DTYPES, ModelSections
from app.training.memory import Predicted

_AMPERE = (8, 0)  # compute capability
_CPU_FLAGS_OF_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # the last is aarch64's name


@dataclass(frozen=True, slots=True)
class Choices:
    """Resolved names of the config groups of the same name, never `auto`."""

    precision: str
    attention: str
    compile: str = NONE  # of `auto` settled by `app.training.auto_settings`


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
    """Return the settings to build the model."""
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
        tile=tile_tokens(run.training),
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
    """Return the number of recomputed layers; all of them while `auto` has not been resolved."""
    return True if isinstance(training.recompute, str) else training.recompute


def tile_tokens(training: TrainingConfig) -> int:
    """Return the tokens of a tile of the MLPs; none while `auto` has not been resolved."""
    return 0 if isinstance(training.tile, str) else training.tile


def _precision_problems(precision: PrecisionConfig) -> Iterator[str]:
    """Yield the problem of a precision that this machine does not support, with the alternatives."""
    has_gpu = torch.cuda.is_available()
    if precision.kind == "tf32" and not (has_gpu and torch.cuda.get_device_capability() >= _AMPERE):
        yield "precision=tf32 needs an NVIDIA GPU of the Ampere generation or newer. Choose precision=fp32 or bf16."
    elif precision.kind == "bf16" and has_gpu and not _gpu_has_bf16():
        yield "precision=bf16 is not supported by this GPU. Choose precision=fp16 or fp32."


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


# ---- compile choice


COMPILE_CHOICE = "compile"  # among the choices of a checkpoint and of a manifest

# Of one process over the whole run. Measured on an H200: the compiler takes 15 s and saves 19 % of the step, so it is
# repaid after 80 s of uncompiled steps, which do 370 TFLOP/s: 65 steps of Llama-3.1-8B with 16,384 tokens.
REPAYING_FLOPS = 3e16


@dataclass(frozen=True, slots=True)
class CompileFacts:
    """Facts for the decision of compile=auto."""

    device: str
    obstacles: tuple[str, ...] = ()  # reasons that rule out compile=blocks
    is_rocm: bool = False
    trains_experts: bool = False  # by adapters
    router_coefficient: float = 0.0
    flops: float = 0.0  # of products in layers that can be compiled: of one process, over the whole run
    stored: str | None = None  # the choice of the checkpoint


class CompileChoice(NamedTuple):
    """Choice of compile=auto. `kind`: blocks or none. `reasons`: against compilation, on a GPU."""

    kind: str
    reasons: tuple[str, ...] = ()


def choose_compile(facts: CompileFacts) -> CompileChoice:
    """Decide compile=auto. A resumed run keeps its choice, unless this machine cannot compile."""
    if facts.device != "cuda":
        return CompileChoice(NONE)
    if facts.stored == NONE:
        return CompileChoice(NONE, ("as in the first start",))
    reasons = list(facts.obstacles)
    if facts.is_rocm:
        reasons.append("not tested on ROCm")
    if facts.trains_experts:
        reasons.append("adapter.experts=true")
    if facts.router_coefficient:
        reasons.append(f"the router loss (coefficient {facts.router_coefficient:g}) reads inside layers")
    if not reasons and not facts.flops:
        reasons.append("every layer has a recurrent mixer, whose rows have many shapes")
    elif not reasons and facts.stored is None and facts.flops < REPAYING_FLOPS:
        of_run, repaying = (flops / 1e15 for flops in (facts.flops, REPAYING_FLOPS))
        reasons.append(f"too few steps to repay compilation ({of_run:.2g} PFLOP, at least {repaying:g})")
    return CompileChoice(NONE, tuple(reasons)) if reasons else CompileChoice(BLOCKS)


def settle_compile(
    run: RunConfig, stored: Mapping[str, str], host_group: HostGroup, facts: Callable[[str | None], CompileFacts]
) -> CompileChoice:
    """Decide `compile` by the `stored` choices of a checkpoint, else by the facts.

    Layers are compiled on all processes or on none.
    """
    if run.compile.kind != AUTO:
        return CompileChoice(run.compile.kind)
    choices = host_group.all_gather_object(choose_compile(facts(stored.get(COMPILE_CHOICE))))
    common: CompileChoice = next((choice for choice in choices if choice.kind == NONE), choices[0])
    return common


def compile_facts(
    run: RunConfig,
    lm: Any,
    device: str,
    obstacles: Iterable[Obstacle] = (),
    steps: int | None = None,
    stored: str | None = None,
) -> CompileFacts:
    """Collect the facts, which only a run on a GPU needs. `lm` may be on meta.

    `obstacles`: in addition to those of the settings and the model. Without `steps` the run counts as long enough.
    """
    if device != "cuda":
        return CompileFacts(device)
    all_obstacles = (*settings_obstacles(run), *model_obstacles(lm), *obstacles)
    flops = product_flops(lm, trains_all=run.adapter.kind == "none")
    if steps is not None and run.batching.packing:
        flops *= run.batching.bin_tokens * run.batching.accumulation * steps
    elif flops:
        flops = math.inf
    return CompileFacts(
        device,
        obstacles=(*filter(None, [compile_obstacle(run.adapter)]), *(obstacle.reason for obstacle in all_obstacles)),
        is_rocm=torch.version.hip is not None,
        trains_experts=run.adapter.kind != "none" and run.adapter.experts,
        router_coefficient=coefficient_of(run.task, run.adapter, lm) if run.task.router_loss == AUTO else 0.0,
        flops=flops,
        stored=stored,
    )


def with_planned_compile(run: RunConfig, lm: Any, device: str, obstacles: Iterable[Obstacle] = ()) -> RunConfig:
    """Decide compile=auto for a memory estimate on gpu or cpu, with the `obstacles` of the planned machine."""
    if run.compile.kind != AUTO:
        return run
    choice = choose_compile(compile_facts(run, lm, "cuda" if device == "gpu" else device, obstacles))
    return with_compile(run, choice.kind)


def with_compile(run: RunConfig, kind: str) -> RunConfig:
    """Return the run with another kind of `compile`."""
    return replace(run, compile=replace(run.compile, kind=kind))


# ---- auto settings


AUTO = "auto"
BINS_CHOICE = "tokens"  # among the choices of a checkpoint
LAYERS_CHOICE = "recompute"
BUDGET_CHOICE = "memory_budget"
PARALLEL_CHOICE = "parallel"
TILE_CHOICE = "tile"

Answer = TypeVar("Answer")


class Savings(NamedTuple):
    """Settings that save activations."""

    recomputed: bool | int
    budget: float
    tile: int


class RunPlanner(Protocol):
    """Interface of the memory planner, which finetune train passes in because `memory` imports `training`.

    Values for `auto` come with a remark. `largest` is the largest micro-batch, of `micro_batches` in a step.
    """

    def predict(self, run: RunConfig, choices: Choices, largest: Batch, micro_batches: int, device: str) -> Predicted:
        """Return the estimated peak memory on `cpu` or `cuda`; raise if there is no estimate."""

    def recompute(
        self, run: RunConfig, choices: Choices, largest: Batch, micro_batches: int, layers: int
    ) -> tuple[Savings, str]:
        """Return the number of recomputed layers, the memory budget of compiled ones, and the tokens of a tile."""

    def bin_tokens(self, run: RunConfig, choices: Choices) -> tuple[int, str]:
        """Return the tokens of a bin."""

    def parallel(self, run: RunConfig, choices: Choices) -> tuple[str, str]:
        """Return ddp or fsdp."""


@dataclass(frozen=True, slots=True)
class AutoSettings:
    """Resolves `auto`. A resumed run keeps the `stored` choices of its checkpoint, else the planner decides."""

    planner: RunPlanner | None
    choices: Choices
    stored: Mapping[str, str]
    host_group: HostGroup
    log: Callable[[str], None]

    def with_parallel(self, run: RunConfig) -> RunConfig:
        """Resolve `parallel` of several processes."""
        if run.parallel.kind != AUTO or self.host_group.count == 1:
            return run
        kind = self.stored.get(PARALLEL_CHOICE, AUTO)
        if kind == AUTO:  # also if the run started with one process
            kind = self._decide(lambda planner: planner.parallel(run, self.choices), "ddp", "parallel=auto: ddp")
        return with_parallel(run, kind)

    def with_bins(self, run: RunConfig) -> RunConfig:
        """Resolve `batching.tokens`."""
        if not has_auto_bins(run):
            return run
        if BINS_CHOICE in self.stored:
            return with_bins(run, int(self.stored[BINS_CHOICE]))
        suggested = suggested_bin(run)
        tokens = self._decide(
            lambda planner: planner.bin_tokens(run, self.choices),
            suggested,
            f"batching.tokens=auto: {suggested} tokens",
        )
        return with_bins(run, tokens)

    def with_recompute(self, run: RunConfig, largest: Callable[[], Batch], layers: int) -> RunConfig:
        """Resolve `training.recompute`, `compile.memory_budget` and `training.tile`; without an estimate all layers are
        recomputed.
        """
        saving = Savings(layers, BUDGETS[0], 0)
        auto_layers, auto_budget = run.training.recompute == AUTO, has_auto_budget(run.compile)
        if LAYERS_CHOICE in self.stored:
            saving = Savings(
                convert(self.stored[LAYERS_CHOICE], bool | int),
                float(self.stored.get(BUDGET_CHOICE, saving.budget)),
                int(self.stored.get(TILE_CHOICE, saving.tile)),
            )
        elif auto_layers or auto_budget or has_auto_tile(run.training):
            accumulation = run.batching.accumulation
            saving = self._decide(
                lambda planner: planner.recompute(run, self.choices, largest(), accumulation, layers),
                saving,
                f"training.recompute=auto: all {layers} layers"
                if auto_layers
                else f"compile.memory_budget=auto: {saving.budget}"
                if auto_budget
                else "training.tile=auto: 0",
            )
        return with_savings(
            run,
            Savings(
                saving.recomputed if auto_layers else recomputed_layers(run.training),
                saving.budget if auto_budget else memory_budget(run.compile),
                saving.tile if has_auto_tile(run.training) else tile_tokens(run.training),
            ),
        )

    def least_recomputed(self, run: RunConfig, largest: Callable[[], Batch], layers: int) -> int | None:
        """Return how many layers must be recomputed for a run to fit; None without an estimate."""

        def ask(planner: RunPlanner) -> tuple[int | None, str]:
            variant = with_recompute(run, AUTO, memory_budget(run.compile))
            (count, *_), remark = planner.recompute(variant, self.choices, largest(), run.batching.accumulation, layers)
            return count, remark

        return self._decide(ask, None, "")

    def _decide(self, ask: Callable[[RunPlanner], tuple[Answer, str]], fallback: Answer, otherwise: str) -> Answer:
        """Ask the planner on rank 0, for all. `otherwise`: the message of the fallback."""
        answer, remark = fallback, ""
        if self.planner is not None and self.host_group.rank == 0:
            try:
                answer, remark = ask(self.planner)
            except ConfigError as reason:
                remark = f"{otherwise}. {reason}"
            except Exception as fault:  # noqa: BLE001  a model that cannot be traced can still be trained
                remark = f"{otherwise}; no estimate for this model ({type(fault).__name__})"
        if remark:
            self.log(remark)
        first: Answer = self.host_group.all_gather_object(answer)[0]
        return first


def with_packing(run: RunConfig, base: BaseModel, say: Callable[[str], None] = lambda _note: None) -> RunConfig:
    """Resolve `batching.packing` by the tested model types, before rows are packed or padded."""
    tier, setting, attention = base.tier, run.batching.packing, run.attention.kind
    kind = f"{base.numbers.model_type} models"
    if tier.name in {PADDED, OWN} and setting is True:
        raise ConfigError(
            f"batching.packing=true is not supported for {kind} ({tier.reason}). Set batching.packing=auto."
        )
    if tier.name == OWN and attention not in {AUTO, OWN} and setting == AUTO:
        raise ConfigError(
            f"attention={attention} is not supported for {kind}, which use their own ({tier.reason}). "
            "Set attention=auto."
        )
    if setting != AUTO:
        return run
    packing = tier.name not in {PADDED, OWN} and attention != OWN  # unsupported models are refused elsewhere
    settled = replace(run, batching=replace(run.batching, packing=packing))
    if packing:
        return settled
    why = f"{kind} do not separate documents in a row ({tier.reason})"
    if tier.name == PACKED:
        why = "attention=own does not separate documents in a row"
    note = f"padded rows, because {why}"
    refuse(f"{problem} ({note})" for problem in problems_of(settled))
    say(f"note    batching: {note}")
    return settled


def require_sliceable(run: RunConfig, base: BaseModel) -> None:
    """Raise if `parallel.context` cannot slice the rows of a model."""
    size = run.parallel.context
    if size == 1:
        return
    lm = base.on_meta()
    refuse(exchange_problems(lm, size, base.attention_chunk))
    coefficient = coefficient_of(run.task, run.adapter, lm)
    if coefficient:
        raise ConfigError(
            f"parallel.context={size}: the router loss (coefficient {coefficient:g}, from config.json) needs all "
            "tokens of a document. Set task.router_loss=0, or parallel.context=1."
        )


def with_parallel(run: RunConfig, kind: str) -> RunConfig:
    """Return the run with another kind of parallelism."""
    return replace(run, parallel=replace(run.parallel, kind=kind))


def with_recompute(run: RunConfig, count: bool | int | str, budget: float) -> RunConfig:
    """Return the run with a number of recomputed layers and a memory budget of compiled layers."""
    return replace(
        run, training=replace(run.training, recompute=count), compile=replace(run.compile, memory_budget=budget)
    )


def with_savings(run: RunConfig, saving: Savings) -> RunConfig:
    """Return the run with all settings that save activations."""
    return with_tile(with_recompute(run, saving.recomputed, saving.budget), saving.tile)


def with_tile(run: RunConfig, tokens: int) -> RunConfig:
    """Return the run with another number of tokens per tile of the MLPs."""
    return replace(run, training=replace(run.training, tile=tokens))


def has_auto_tile(training: TrainingConfig) -> bool:
    """Return whether the memory planner chooses tiles: only where it may recompute all layers."""
    return training.tile == AUTO and (training.recompute == AUTO or training.recompute is True)


def has_auto_budget(config: CompileConfig) -> bool:
    """Return whether the memory planner chooses the budget of compiled layers."""
    return config.memory_budget == AUTO and config.partitions


def has_auto_bins(run: RunConfig) -> bool:
    """Return whether the bin size is not yet resolved."""
    return run.batching.tokens == AUTO


def step_tokens(run: RunConfig) -> int:
    """Return the tokens of a step on one process."""
    return run.model.suggest.tokens * run.batching.accumulation


def bin_sizes(run: RunConfig) -> list[int]:
    """Return the bin sizes that divide a step and fit every row, the largest first."""
    sizes, tokens = list[int](), step_tokens(run)
    while tokens >= run.dataset.max_length:
        sizes.append(tokens)
        if tokens % 2:
            break
        tokens //= 2
    return sizes


def suggested_bin(run: RunConfig) -> int:
    """Return the bin size of the model, or the nearest one that divides a step."""
    sizes = bin_sizes(run)
    return next((tokens for tokens in sizes if tokens <= run.model.suggest.tokens), sizes[-1])


def with_bins(run: RunConfig, tokens: int) -> RunConfig:
    """Return the run with the same step in bins of `tokens` tokens."""
    whole = step_tokens(run)
    if whole % tokens:
        raise ConfigError(
            f"batching.tokens=auto: this run started with bins of {tokens} tokens, and a step of {whole} "
            f"(model.suggest.tokens={run.model.suggest.tokens} * batching.accumulation={run.batching.accumulation}) "
            "is not a multiple. "
            f"Set the original batching.accumulation, or batching.tokens={tokens} and another batching.accumulation."
        )
    return replace(run, batching=replace(run.batching, tokens=tokens, accumulation=whole // tokens))


def offload_notes(training: TrainingConfig, device: str) -> Iterator[str]:
    """Yield a note if training.offload has no effect."""
    if training.offload and device == "cpu":
        yield "training.offload=true has no effect on a CPU"


def size_notes(run: RunConfig, base: BaseModel) -> Iterator[str]:
    """Yield a note on matrix sizes that leave tensor cores of a GPU partly idle, and the FLOPs this adds."""
    of_vocabulary = [] if base.task.has_classes else ["vocab_size"]
    names = ["hidden_size", "intermediate_size", "moe_intermediate_size", *of_vocabulary]
    sizes = {name: getattr(base.numbers.get_text_config(), name, None) for name in names}
    if run.batching.packing:  # padded rows are a multiple of 8 wide
        sizes["batching.tokens"] = run.batching.tokens
    missed = [
        f"{name}={size} is {size % by} above a multiple of {by} "
        f"({size + -size % 64:,} in tiles of 64: {100 * (-size % 64) / size:.2g}% more FLOPs)"
        for name, size in sizes.items()
        if isinstance(size, int) and size % (by := 8 if size % 8 else 64)
    ]
    if missed:
        why = "because partly filled tiles are computed whole"
        yield f"matrix products are fastest if sizes are multiples of 64, or at least of 8, {why}: {', '.join(missed)}"
