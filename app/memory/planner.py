"""Plans of configurations on one machine, and what `auto` means there: recomputed layers, tokens of a bin."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from app.batch import Batch
from app.config.rules import problems_of
from app.config.schema import RunConfig
from app.distributed.environment import world
from app.distributed.process_group import mesh_sizes_of
from app.memory.estimate import Estimate, MemoryPlan, planned_choices
from app.memory.fit import Machine, Verdict, judge, machine_of, seconds_per_token
from app.memory.shape import Shape, worst_case
from app.model.source import folder_at_hand
from app.training.auto_batch import (
    AUTO,
    bin_sizes,
    has_auto_bins,
    recomputed_layers,
    step_tokens,
    suggested_bin,
    with_bins,
    with_parallel,
)
from app.training.choices import Choices
from app.training.resolve import limit_to_positions

# A micro-batch costs as much again as the arithmetic of so many tokens: kernels are started, weights are read, and the
# last tiles of a product are not full. Assumed; that larger bins are faster at all is what matters.
_START_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Planned:
    """One configuration, its largest micro-batch, and whether that fits."""

    run: RunConfig
    shape: Shape
    plan: MemoryPlan
    verdict: Verdict
    seconds: float  # of a token: only their ratio means anything
    layers: int
    chosen: bool = False  # whether it was found here how many layers are recomputed
    chosen_bins: bool = False  # and how large bins are
    chosen_parallel: str = ""  # and why the model is sharded, or not

    @property
    def bins(self) -> list[str]:
        """What to type for bins as large."""
        batching = self.run.batching
        return [f"batching.tokens={batching.tokens}", f"batching.accumulation={batching.accumulation}"]

    @property
    def recomputed(self) -> int:
        """Layers."""
        count = recomputed_layers(self.run.training)
        return self.layers if count is True else int(count)


class Planner:
    """On one machine, of a run in one of `processes`. `choices` are those of a run that has made them."""

    def __init__(
        self,
        machine: Machine,
        processes: int = 1,
        choices: Choices | None = None,
        local_processes: int | None = None,
    ) -> None:
        self.machine = machine
        self.processes = processes
        self._local_processes = local_processes or processes
        self._choices = choices

    def at(self, run: RunConfig, *, exact: bool = False) -> Planned:
        """The largest micro-batch that the settings allow, with what `auto` comes to; `exact` traces every layer."""
        run = limit_to_positions(run, lambda _: None)
        if run.parallel.kind == AUTO and self.processes > 1:
            return self._parallel(run, exact=exact)
        if has_auto_bins(run):
            found = self._largest_bins(run)
            if exact:
                found = replace(self._fewest_layers(found.run, exact=True), chosen=found.chosen)
            return replace(found, chosen_bins=True)
        return self._fewest_layers(run, exact=exact)

    def of_batch(self, run: RunConfig, shape: Shape) -> Planned:
        """The same of a micro-batch that is known."""
        return self._fewest_layers(run, shape)

    def _parallel(self, run: RunConfig, *, exact: bool) -> Planned:
        """With the whole model on each process where that fits, else sharded."""
        whole = self.at(with_parallel(run, "ddp"), exact=exact)
        needs = _needs(whole.verdict, self.machine)
        if whole.verdict.fits:
            return replace(whole, chosen_parallel=f"ddp, which needs {needs}")
        sharded = with_parallel(run, "fsdp")
        if problems_of(sharded):
            return replace(
                whole,
                chosen_parallel=f"ddp, which does not fit ({needs}); fsdp does not go with other settings",
            )
        return replace(self.at(sharded, exact=exact), chosen_parallel=f"fsdp, because ddp needs {needs}")

    def _fewest_layers(self, run: RunConfig, shape: Shape | None = None, *, exact: bool = False) -> Planned:
        """As many recomputed layers as were asked for, or with `auto` as few as fit."""
        shape = shape or worst_case(run)
        choices = self._choices or planned_choices(run.precision, self.machine.device)
        sizes = mesh_sizes_of(run.parallel, self.processes, self._local_processes)
        estimate = Estimate(run, shape, self.machine.device, choices, mesh_sizes=sizes)

        def planned(count: int | bool, *, exact: bool = False) -> Planned:
            other = replace(run, training=replace(run.training, recompute=count))
            plan = estimate.planned(count, exact=exact)
            seconds = seconds_per_token(other, plan, shape.tokens, self.machine)
            verdict = judge(plan, self.machine, 1 if sizes else self.processes)
            return Planned(other, shape, plan, verdict, seconds, estimate.layers)

        if run.training.recompute != AUTO:
            return planned(recomputed_layers(run.training), exact=exact)
        found = fewest(estimate.layers, planned)
        return replace(planned(found.recomputed, exact=True) if exact else found, chosen=True)

    def _largest_bins(self, run: RunConfig) -> Planned:
        """On a processor larger ones than the model suggests do not pay."""
        on_cpu = self.machine.device == "cpu"
        rungs = [each for each in bin_sizes(run) if not on_cpu or each <= suggested_bin(run)]
        return fastest(rungs, lambda tokens: self._fewest_layers(with_bins(run, tokens)), first=on_cpu)


def fewest(layers: int, at: Callable[[int], Planned]) -> Planned:
    """As few recomputed layers as fit: what is kept need not be computed again; all of them where nothing fits.

    Each recomputed layer between the first and the last saves memory, so halving finds it. The last is computed again
    at once and hardly saves any: where all do not fit, all but one may.
    """
    found = at(0)
    if found.verdict.fits or layers == 0:
        return found
    low, high, is_hopeless = 0, layers, found.verdict.is_hopeless
    found = at(high)
    if not found.verdict.fits and high > 1 and not is_hopeless:
        one_less = at(high - 1)
        high, found = (high - 1, one_less) if one_less.verdict.fits else (high, found)
    while found.verdict.fits and high - low > 1:
        middle = (low + high) // 2
        tried = at(middle)
        low, high, found = (low, middle, tried) if tried.verdict.fits else (middle, high, found)
    return found


def fastest(rungs: Sequence[int], at: Callable[[int], Planned], *, first: bool = False) -> Planned:
    """Of bins from the largest to the smallest, those of which a token takes the least time, or the `first` that fit.

    Smaller bins may recompute fewer layers; from where none are recomputed on, still smaller ones are slower. Where
    nothing fits it is the smallest.
    """
    best, least = None, math.inf
    for tokens in rungs:
        found = at(tokens)
        seconds = found.seconds * (1 + _START_TOKENS / tokens)
        if found.verdict.is_hopeless:
            break
        if found.verdict.fits and seconds < least:
            best, least = found, seconds
        if found.verdict.fits and (first or not found.chosen or not found.recomputed):
            break
    return best or at(rungs[-1])


def min_recomputed_layers(
    run: RunConfig, choices: Choices, largest: Batch, micro_batches: int, layers: int
) -> tuple[int, str]:
    """Of a run on this machine, and in words how that was found."""
    planner = _here(choices)
    found = planner.of_batch(run, Shape.of(largest, micro_batches))
    needs = _needs(found.verdict, planner.machine)
    if not found.verdict.fits:
        return found.recomputed, (
            f"training.recompute=auto: all {layers} layers, and the plan does not fit even so ({needs})"
        )
    return found.recomputed, (
        f"training.recompute=auto: {found.recomputed} of {layers} layers, which needs {needs}"
    )


def max_bin_tokens(run: RunConfig, choices: Choices, _layers: int) -> tuple[int, str]:
    """Of a run on this machine, and in words how that was found."""
    planner = _here(choices)
    found = planner.at(run)
    tokens = found.run.batching.bin_tokens
    return tokens, bins_in_words(found, step_tokens(run) // tokens, planner.machine)


def choose_parallel(run: RunConfig, choices: Choices) -> tuple[str, str]:
    """For a run on this machine in several processes: ddp or fsdp, and a remark."""
    found = _here(choices).at(run)
    return found.run.parallel.kind, f"parallel=auto: {found.chosen_parallel}"


def _here(choices: Choices) -> Planner:
    here = world()
    return Planner(machine_of(None).shared_by(here.local_size), here.size, choices, here.local_size)


def bins_in_words(found: Planned, parts: int, machine: Machine) -> str:
    """What was chosen and why."""
    needs = _needs(found.verdict, machine)
    again = f", {found.recomputed} of {found.layers} layers recomputed" if found.chosen else ""
    divided = "1 micro-batch" if parts == 1 else f"{parts} micro-batches"
    size = f"batching.tokens=auto: {found.run.batching.bin_tokens:,} tokens, {divided} a step{again}"
    if not found.verdict.fits:
        return f"{size}, the smallest bins, and the plan does not fit even so ({needs})"
    slow = "; larger ones do not pay on a processor" if machine.device == "cpu" else ""
    return f"{size}, which need{'' if parts > 1 else 's'} {needs}{slow}"


def _needs(verdict: Verdict, machine: Machine) -> str:
    return f"{verdict.needed_bytes / 1e9:.1f} of {verdict.memory_bytes / 1e9:.1f} GB of {machine.label}"


def by_facts(run: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A model whose files are not here, by the numbers of its YAML: as if its weights were to be drawn."""
    model = run.model
    another = any(word.lstrip("+").startswith("model.path=") for word in overrides)
    if another or model.weights == "random" or "model_type" not in model.architecture:
        return run
    return run if folder_at_hand(model) else replace(run, model=replace(model, weights="random"))
