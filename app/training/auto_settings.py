"""What is auto: `batching.packing`, `batching.tokens`, `training.recompute`, `compile.memory_budget` and `parallel`.

batching.packing=auto packs where that is proven for the kind of model, or it is not known; else rows are padded.
batching.tokens=auto leaves a step what it would be without it: `model.suggest.tokens * batching.accumulation` tokens on
each process. They are divided into 1, 2, 4, ... micro-batches of a bin each, the larger the faster.
What fits is found by the memory planner that the command passes in.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from app.base.structure import BaseModel
from app.batch import Batch
from app.config.model_kinds import OWN, PACKED, PADDED
from app.config.rules import problems_of
from app.config.schema import CompileConfig, RunConfig, TrainingConfig
from app.config.validate import convert
from app.distributed.process_group import HostGroup
from app.errors import ConfigError, refuse
from app.layers.partition import BUDGETS
from app.training.choices import Choices, memory_budget, recomputed_layers
from app.training.memory import Predicted

AUTO = "auto"
BINS_CHOICE = "tokens"  # among the choices of a checkpoint
LAYERS_CHOICE = "recompute"
BUDGET_CHOICE = "memory_budget"
PARALLEL_CHOICE = "parallel"

Answer = TypeVar("Answer")


class RunPlanner(Protocol):
    """Interface of the memory planner, which app.train passes in because `memory` imports `training`.

    Values for `auto` come with a remark. `largest` is the largest micro-batch, of `micro_batches` in a step.
    """

    def predict(self, run: RunConfig, choices: Choices, largest: Batch, micro_batches: int, device: str) -> Predicted:
        """Return the estimated peak memory on `cpu` or `cuda`; raise if there is no estimate."""

    def recompute(
        self, run: RunConfig, choices: Choices, largest: Batch, micro_batches: int, layers: int
    ) -> tuple[tuple[int, float], str]:
        """Return the number of recomputed layers and the memory budget of compiled ones."""

    def bin_tokens(self, run: RunConfig, choices: Choices) -> tuple[int, str]:
        """Return the tokens of a bin."""

    def parallel(self, run: RunConfig, choices: Choices) -> tuple[str, str]:
        """Return ddp or fsdp."""


@dataclass(frozen=True, slots=True)
class AutoSettings:
    """Settles `auto`. A continued run keeps the `stored` choices of its checkpoint, else the planner decides."""

    planner: RunPlanner | None
    choices: Choices
    stored: Mapping[str, str]
    host_group: HostGroup
    log: Callable[[str], None]

    def with_parallel(self, run: RunConfig) -> RunConfig:
        """Settle `parallel` of several processes."""
        if run.parallel.kind != AUTO or self.host_group.count == 1:
            return run
        kind = self.stored.get(PARALLEL_CHOICE, AUTO)
        if kind == AUTO:  # also where one process began the run
            kind = self._decide(lambda planner: planner.parallel(run, self.choices), "ddp", "parallel=auto: ddp")
        return with_parallel(run, kind)

    def with_bins(self, run: RunConfig) -> RunConfig:
        """Settle `batching.tokens`."""
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
        """Settle `training.recompute` and `compile.memory_budget`; without a plan all layers are recomputed."""
        count: bool | int = layers
        budget = BUDGETS[0]
        auto_layers, auto_budget = run.training.recompute == AUTO, has_auto_budget(run.compile)
        if LAYERS_CHOICE in self.stored:
            count = convert(self.stored[LAYERS_CHOICE], bool | int)
            budget = float(self.stored.get(BUDGET_CHOICE, budget))
        elif auto_layers or auto_budget:
            accumulation = run.batching.accumulation
            count, budget = self._decide(
                lambda planner: planner.recompute(run, self.choices, largest(), accumulation, layers),
                (count, budget),
                f"training.recompute=auto: all {layers} layers"
                if auto_layers
                else f"compile.memory_budget=auto: {budget}",
            )
        return with_recompute(
            run,
            count if auto_layers else recomputed_layers(run.training),
            budget if auto_budget else memory_budget(run.compile),
        )

    def least_recomputed(self, run: RunConfig, largest: Callable[[], Batch], layers: int) -> int | None:
        """Return how many layers must be recomputed for a run to fit; None without a plan."""

        def ask(planner: RunPlanner) -> tuple[int | None, str]:
            asked = with_recompute(run, AUTO, memory_budget(run.compile))
            (count, _), remark = planner.recompute(asked, self.choices, largest(), run.batching.accumulation, layers)
            return count, remark

        return self._decide(ask, None, "")

    def _decide(self, ask: Callable[[RunPlanner], tuple[Answer, str]], fallback: Answer, otherwise: str) -> Answer:
        """Ask on the first process, for all. `otherwise` says what the fallback means."""
        answer, remark = fallback, ""
        if self.planner is not None and self.host_group.rank == 0:
            try:
                answer, remark = ask(self.planner)
            except ConfigError as reason:
                remark = f"{otherwise}. {reason}"
            except Exception as fault:  # noqa: BLE001  a kind of model that cannot be traced can still be trained
                remark = f"{otherwise}; no plan for this model ({type(fault).__name__})"
        if remark:
            self.log(remark)
        first: Answer = self.host_group.all_gather_object(answer)[0]
        return first


def with_packing(run: RunConfig, base: BaseModel, say: Callable[[str], None] = lambda _note: None) -> RunConfig:
    """Settle `batching.packing` by what is proven for the kind of model, before rows are laid out."""
    tier, given, attention = base.tier, run.batching.packing, run.attention.kind
    kind = f"a model of kind {base.numbers.model_type}"
    if tier.name in {PADDED, OWN} and given is True:
        raise ConfigError(
            f"batching.packing=true: {kind} is trained in padded rows ({tier.reason}). Set batching.packing=auto."
        )
    if tier.name == OWN and attention not in {AUTO, OWN} and given == AUTO:
        raise ConfigError(f"attention={attention}: {kind} is trained with its own ({tier.reason}). Set attention=auto.")
    if given != AUTO:
        return run
    packing = tier.name not in {PADDED, OWN} and attention != OWN  # what is refused is refused with the model
    settled = replace(run, batching=replace(run.batching, packing=packing))
    if packing:
        return settled
    why = f"documents of kind {base.numbers.model_type} cannot be kept apart in one row ({tier.reason})"
    if tier.name == PACKED:
        why = "attention=own keeps no documents apart in one row"
    note = f"padded rows, because {why}"
    refuse(f"{problem} ({note})" for problem in problems_of(settled))
    say(f"note    batching: {note}")
    return settled


def with_parallel(run: RunConfig, kind: str) -> RunConfig:
    """The run with another kind of parallelism."""
    return replace(run, parallel=replace(run.parallel, kind=kind))


def with_recompute(run: RunConfig, count: bool | int | str, budget: float) -> RunConfig:
    """Return the run with a number of recomputed layers and a memory budget of compiled layers."""
    return replace(
        run, training=replace(run.training, recompute=count), compile=replace(run.compile, memory_budget=budget)
    )


def has_auto_budget(config: CompileConfig) -> bool:
    """Whether the memory plan chooses the budget of compiled layers."""
    return config.memory_budget == AUTO and config.partitions


def has_auto_bins(run: RunConfig) -> bool:
    """Whether the size of bins is still to be found."""
    return run.batching.tokens == AUTO


def step_tokens(run: RunConfig) -> int:
    """Tokens of a step on one process."""
    return run.model.suggest.tokens * run.batching.accumulation


def bin_sizes(run: RunConfig) -> list[int]:
    """Sizes that divide a step and hold every row, the largest first."""
    sizes, tokens = list[int](), step_tokens(run)
    while tokens >= run.dataset.max_length:
        sizes.append(tokens)
        if tokens % 2:
            break
        tokens //= 2
    return sizes


def suggested_bin(run: RunConfig) -> int:
    """The model's own size, or the nearest one that a step can be divided into."""
    sizes = bin_sizes(run)
    return next((tokens for tokens in sizes if tokens <= run.model.suggest.tokens), sizes[-1])


def with_bins(run: RunConfig, tokens: int) -> RunConfig:
    """The same step in bins of so many tokens."""
    whole = step_tokens(run)
    if whole % tokens:
        raise ConfigError(
            f"batching.tokens=auto: this run began with bins of {tokens} tokens, and a step of {whole} (model.suggest."
            f"tokens={run.model.suggest.tokens} * batching.accumulation={run.batching.accumulation}) is no multiple of "
            f"them. Give the batching.accumulation that it began with, or batching.tokens={tokens} and another one."
        )
    return replace(run, batching=replace(run.batching, tokens=tokens, accumulation=whole // tokens))


def offload_notes(training: TrainingConfig, device: str) -> Iterator[str]:
    """A remark where training.offload saves nothing."""
    if training.offload and device == "cpu":
        yield "training.offload=true: on a CPU the memory of the host is the same memory, so it saves nothing"


def size_notes(run: RunConfig, base: BaseModel) -> Iterator[str]:
    """A remark where sizes of matrix products leave tensor cores of a GPU partly idle."""
    of_vocabulary = [] if base.task.has_classes else ["vocab_size"]
    names = ["hidden_size", "intermediate_size", "moe_intermediate_size", *of_vocabulary]
    sizes = {name: getattr(base.numbers.get_text_config(), name, None) for name in names}
    if run.batching.packing:  # padded rows are a multiple of 8 wide
        sizes["batching.tokens"] = run.batching.tokens
    missed = [
        f"{name}={size} is {size % by} above one of {by}"
        for name, size in sizes.items()
        if isinstance(size, int) and size % (by := 8 if size % 8 else 64)
    ]
    if missed:
        yield f"matrix products are fastest where sizes are multiples of 64, or at least of 8: {', '.join(missed)}"
