"""Memory plans of configurations on one machine, values of `auto`, and suggestions of settings that save memory."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from app.base.base_model import open_base
from app.base.source import random_model_if_missing
from app.batch import Batch
from app.config.adapters import ADAPTER_KINDS
from app.config.kinds import QUANTIZATION_KINDS
from app.config.load import compose_run
from app.config.overrides import key_of
from app.config.rules import problems_of
from app.config.schema import RunConfig
from app.distributed.fsdp import mesh_sizes_of
from app.distributed.launch import world
from app.errors import ConfigError
from app.layers.compile import BUDGETS, SDPA_OBSTACLE
from app.memory.estimate import (
    Estimate,
    Hardware,
    MemoryPlan,
    Verdict,
    check_fit,
    machine_of,
    plan_memory,
    planned_choices,
    seconds_per_token,
)
from app.memory.speedups import MAX_SPEEDUPS, facts_of, speedups
from app.memory.trace import Shape, worst_case
from app.training.auto_settings import (
    AUTO,
    Choices,
    Savings,
    bin_sizes,
    has_auto_bins,
    has_auto_budget,
    has_auto_tile,
    memory_budget,
    recomputed_layers,
    require_sliceable,
    step_tokens,
    suggested_bin,
    tile_tokens,
    with_bins,
    with_packing,
    with_parallel,
    with_planned_compile,
    with_recompute,
    with_tile,
)
from app.training.memory import Predicted
from app.training.rows import with_planned_rows, within_positions

# Fixed cost of a micro-batch in tokens of compute: kernel launches, reads of weights, partly filled tiles. Assumed; its
# only effect is that larger bins are faster.
_MICRO_BATCH_OVERHEAD_TOKENS = 256

# Tokens of a tile that training.tile=auto tries. Every tile reads and dequantizes the weights of its MLP.
_TILES = (8192, 2048)


@dataclass(frozen=True, slots=True)
class Planned:
    """Plan of one configuration, for its largest micro-batch."""

    run: RunConfig
    shape: Shape
    plan: MemoryPlan
    verdict: Verdict
    seconds: float  # per token, meaningful only in comparison
    layers: int
    chosen: bool = False  # whether training.recompute=auto was resolved
    chosen_budget: bool = False  # whether compile.memory_budget=auto was resolved
    chosen_bins: bool = False  # whether batching.tokens=auto was resolved
    chosen_tile: bool = False  # whether training.tile=auto was resolved
    parallel_reason: str = ""  # value of parallel=auto and its reason

    @property
    def recomputed(self) -> int:
        count = recomputed_layers(self.run.training)
        return self.layers if count is True else int(count)


class Planner:
    """Plans runs of `processes` processes on one machine. `choices`: precision and attention, if already resolved."""

    def __init__(
        self, machine: Hardware, processes: int = 1, choices: Choices | None = None, local_processes: int | None = None
    ) -> None:
        self.machine = machine
        self.processes = processes
        self._local_processes = local_processes or processes
        self._choices = choices

    def at(self, run: RunConfig, *, exact: bool = False) -> Planned:
        """Plan the largest micro-batch that the settings allow and resolve `auto`; `exact` traces every layer."""
        base = open_base(run.model, run.task)
        run = with_packing(replace(run, dataset=within_positions(run.dataset, base, lambda _: None)), base)
        require_sliceable(run, base)
        run = with_planned_rows(run)
        obstacles = [SDPA_OBSTACLE] if self.machine.before_ampere and run.batching.packing else []
        run = with_planned_compile(run, base.on_meta(), self.machine.device, obstacles)
        return _with_tile(run, lambda run: self._at(run, exact=exact))

    def _at(self, run: RunConfig, *, exact: bool) -> Planned:
        if run.parallel.kind == AUTO and self.processes > 1:
            return self._parallel(run, exact=exact)
        if has_auto_bins(run):
            planned = self._fastest_bins(run)
            if exact:
                planned = replace(self._of_batch(planned.run, exact=True), chosen=planned.chosen)
            return replace(planned, chosen_bins=True)
        return self._of_batch(run, exact=exact)

    def _parallel(self, run: RunConfig, *, exact: bool) -> Planned:
        """Resolve `parallel=auto`: the whole model on each process if that fits, else sharded."""
        whole = self._at(with_parallel(run, "ddp"), exact=exact)
        needs = _needs(whole.verdict, self.machine)
        if whole.verdict.fits:
            return replace(whole, parallel_reason=f"ddp, which needs {needs}")
        sharded = with_parallel(run, "fsdp")
        if problems_of(sharded):
            reason = f"ddp, which does not fit ({needs}); fsdp does not support other settings of the run"
            return replace(whole, parallel_reason=reason)
        return replace(self._at(sharded, exact=exact), parallel_reason=f"fsdp, because ddp needs {needs}")

    def of_batch(self, run: RunConfig, shape: Shape | None = None) -> Planned:
        """Plan micro-batches of a shape, by default the largest, with as few recomputed layers as fit for `auto`."""
        return _with_tile(run, lambda run: self._of_batch(run, shape))

    def _of_batch(self, run: RunConfig, shape: Shape | None = None, *, exact: bool = False) -> Planned:
        shape = shape or worst_case(run)
        older = self.machine.before_ampere
        choices = self._choices or planned_choices(run, self.machine.device, before_ampere=older)
        sizes = mesh_sizes_of(run.parallel, self.processes, self._local_processes)
        shape = replace(shape, keeps_gradients=self.processes > 1 and sizes is None)
        estimate = Estimate(run, shape, self.machine.device, choices, mesh_sizes=sizes, before_ampere=older)

        def planned(budget: float, count: int | bool, *, exact: bool = False) -> Planned:
            with_count = with_recompute(run, count, budget)
            plan = estimate.planned(count, budget, exact=exact).with_workspaces(self.machine.workspace_bytes)
            seconds = seconds_per_token(with_count, plan, shape.tokens, self.machine)
            verdict = check_fit(plan, self.machine)
            return Planned(with_count, shape, plan, verdict, seconds, estimate.layers)

        auto_layers, auto_budget = run.training.recompute == AUTO, has_auto_budget(run.compile)

        def least(budget: float) -> Planned:
            return planned(budget, 0 if auto_layers else recomputed_layers(run.training))

        def fewest(budget: float) -> Planned:
            if not auto_layers:
                return least(budget)
            return fewest_recomputed(estimate.layers, partial(planned, budget), alike=estimate.has_equal_layers)

        best = best_budget(BUDGETS if auto_budget else (memory_budget(run.compile),), least, fewest)
        if exact:
            best = planned(memory_budget(best.run.compile), recomputed_layers(best.run.training), exact=True)
        return replace(best, chosen=auto_layers, chosen_budget=auto_budget)

    def _fastest_bins(self, run: RunConfig) -> Planned:
        # on a CPU, bins larger than the model suggests are no faster
        on_cpu = self.machine.device == "cpu"
        sizes = [size for size in bin_sizes(run) if not on_cpu or size <= suggested_bin(run)]
        return fastest_bins(sizes, lambda tokens: self._of_batch(with_bins(run, tokens)), first=on_cpu)


def _with_tile(run: RunConfig, plan: Callable[[RunConfig], Planned]) -> Planned:
    """Plan without tiles for `auto` if that fits or the model cannot be tiled, else with the largest tiles that fit."""
    if not has_auto_tile(run.training):
        return plan(with_tile(run, tile_tokens(run.training)))
    best = plan(with_tile(run, 0))
    variants = [with_tile(run, tokens) for tokens in _TILES if tokens < best.shape.tokens]
    for variant in variants if not best.verdict.is_hopeless else ():
        if best.verdict.fits or problems_of(variant):
            break
        try:
            best = plan(variant)
        except ConfigError:  # a model that cannot be tiled
            break
    return replace(best, chosen_tile=True)


def best_budget(
    budgets: Sequence[float], least: Callable[[float], Planned], fewest: Callable[[float], Planned]
) -> Planned:
    """Return the plan with the memory budget that recomputes least and fits, or the smallest plan if nothing fits.

    `budgets` are in descending order. `least` returns the plan with as few recomputed layers as the settings allow,
    `fewest` the one with as few as fit. A budget is skipped if another one needs no more memory and recomputes no more.
    """
    first = least(budgets[0])
    if first.verdict.fits:
        return first
    points, best = [first], fewest(budgets[0])
    for budget in () if best.verdict.is_hopeless else budgets[1:]:
        point = least(budget)
        if any(_dominates(other, point) for other in points) or (best.verdict.fits and point.seconds >= best.seconds):
            continue
        points.append(point)
        planned = point if point.verdict.fits else fewest(budget)
        best = min(best, planned, key=_order)
    return best


def _dominates(one: Planned, other: Planned) -> bool:
    return one.plan.peak_bytes <= other.plan.peak_bytes and one.seconds <= other.seconds


def _order(planned: Planned) -> tuple[bool, float]:
    """Return a sort key: plans that fit by time, others after them by memory."""
    verdict = planned.verdict
    return not verdict.fits, planned.seconds if verdict.fits else verdict.needed_bytes


def fewest_recomputed(layers: int, at: Callable[[int], Planned], *, alike: bool = True) -> Planned:
    """Return the plan with as few recomputed layers as fit, or with all layers recomputed if nothing fits.

    Layers that are not `alike` are recomputed all or none, because every plan traces all of them. Each recomputed layer
    between the first and the last saves memory, so binary search applies. The last layer is recomputed at the start of
    backward and saves little: if all layers do not fit, all but one may.
    """
    best = at(0)
    if best.verdict.fits or layers == 0:
        return best
    low, high, is_hopeless = 0, layers, best.verdict.is_hopeless
    best = at(high)
    if not alike:
        return best
    if not best.verdict.fits and high > 1 and not is_hopeless:
        one_less = at(high - 1)
        high, best = (high - 1, one_less) if one_less.verdict.fits else (high, best)
    while best.verdict.fits and high - low > 1:
        middle = (low + high) // 2
        planned = at(middle)
        low, high, best = (low, middle, planned) if planned.verdict.fits else (middle, high, best)
    return best


def fastest_bins(sizes: Sequence[int], at: Callable[[int], Planned], *, first: bool = False) -> Planned:
    """Return the plan with the fastest bins per token, or the `first` that fit; with the smallest if nothing fits.

    `sizes` are in descending order. Smaller bins may recompute fewer layers; once no layer is recomputed, smaller bins
    are slower.
    """
    best, least_seconds = None, math.inf
    for tokens in sizes:
        planned = at(tokens)
        seconds = planned.seconds * (1 + _MICRO_BATCH_OVERHEAD_TOKENS / tokens)
        if planned.verdict.is_hopeless:
            break
        if planned.verdict.fits and seconds < least_seconds:
            best, least_seconds = planned, seconds
        if planned.verdict.fits and (first or not planned.chosen or not planned.recomputed):
            break
    return best or at(sizes[-1])


class LocalPlanner:
    """The `RunPlanner` of finetune train: plans runs on this machine."""

    def predict(self, run: RunConfig, choices: Choices, largest: Batch, micro_batches: int, device: str) -> Predicted:
        """Predict the peak of a run before its weights are loaded: on a GPU of the run, on a CPU of one step.

        For a GPU, add the faster settings whose memory follows from the plan: a trace would delay the run.
        """
        on_cpu = device == "cpu"
        sizes = mesh_sizes_of(run.parallel, world().size, world().local_size)
        shape = Shape.of(largest, micro_batches).sliced(run.parallel.context)
        shape = replace(shape, keeps_gradients=world().size > 1 and sizes is None)
        plan = plan_memory(run, shape, "cpu" if on_cpu else "gpu", choices=choices, steps_only=on_cpu, mesh_sizes=sizes)
        faster: list[Mapping[str, Any]] = []
        if not on_cpu:
            with suppress(Exception):  # a run does not depend on advice
                options = speedups(run, plan, shape.tokens, machine_of(None))
                faster = [facts_of(option) for option in options if option.needed_bytes is not None]
        return Predicted(plan.peak_bytes, plan.peak_where, plan.anatomy, faster[:MAX_SPEEDUPS])

    def recompute(
        self, run: RunConfig, choices: Choices, largest: Batch, micro_batches: int, layers: int
    ) -> tuple[Savings, str]:
        """Resolve `training.recompute=auto`, `compile.memory_budget=auto` and `training.tile=auto`."""
        planner = _local_planner(choices)
        shape = Shape.of(largest, micro_batches).sliced(run.parallel.context)
        planned = planner.of_batch(run, shape)
        needs = _needs(planned.verdict, planner.machine)
        fits = f"which needs {needs}" if planned.verdict.fits else f"and the run still does not fit ({needs})"
        saving = Savings(planned.recomputed, memory_budget(planned.run.compile), tile_tokens(planned.run.training))
        parts = [f"training.recompute=auto: {planned.recomputed} of {layers} layers"] if planned.chosen else []
        parts += [f"compile.memory_budget=auto: {saving.budget:g}"] if planned.chosen_budget else []
        parts += [f"training.tile=auto: {saving.tile:,} tokens"] if planned.chosen_tile and saving.tile else []
        return saving, f"{', '.join(parts)}, {fits}" if parts else ""

    def bin_tokens(self, run: RunConfig, choices: Choices) -> tuple[int, str]:
        """Resolve `batching.tokens=auto`."""
        planner = _local_planner(choices)
        planned = planner.at(run)
        tokens = planned.run.batching.bin_tokens
        return tokens, describe_bins(planned, step_tokens(run) // tokens, planner.machine)

    def parallel(self, run: RunConfig, choices: Choices) -> tuple[str, str]:
        """Resolve `parallel=auto` to ddp or fsdp."""
        planned = _local_planner(choices).at(run)
        return planned.run.parallel.kind, f"parallel=auto: {planned.parallel_reason}"


def _local_planner(choices: Choices) -> Planner:
    here, machine = world(), machine_of(None)
    if machine.device == "cpu":  # each process has its own GPU, but all share the memory of the host
        machine = replace(machine, memory_bytes=machine.memory_bytes // here.local_size)
    return Planner(machine, here.size, choices, here.local_size)


def describe_bins(planned: Planned, micro_batches: int, machine: Hardware) -> str:
    """Return a remark on the value of `batching.tokens=auto`, for a step of `micro_batches`."""
    needs = _needs(planned.verdict, machine)
    recomputed = f", {planned.recomputed} of {planned.layers} layers recomputed" if planned.chosen else ""
    parts = "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
    size = f"batching.tokens=auto: {planned.run.batching.bin_tokens:,} tokens, {parts} per step{recomputed}"
    if not planned.verdict.fits:
        return f"{size}, the smallest bins, and the run still does not fit ({needs})"
    slow = "; larger bins are no faster on a CPU" if machine.device == "cpu" else ""
    return f"{size}, which need{'' if micro_batches > 1 else 's'} {needs}{slow}"


def _needs(verdict: Verdict, machine: Hardware) -> str:
    return f"{verdict.needed_bytes / 1e9:.1f} of {verdict.memory_bytes / 1e9:.1f} GB of {machine.label}"


def random_if_missing(run: RunConfig) -> RunConfig:
    """Return the run with random weights if the files of its model are missing but its preset has the architecture."""
    return replace(run, model=random_model_if_missing(run.model))


# ---- suggest


SPEED, NUMBERS, LEARNING = range(3)  # cost of a candidate, in ascending order
COSTS = ("speed", "numeric precision", "training result")
_MIN_ROW_TOKENS = 256  # no shorter dataset.max_length is suggested
_MIN_SAVED_SHARE = 0.01  # of the missing memory; smaller savings come last


@dataclass(frozen=True, slots=True)
class Candidate:
    """Overrides to plan; `costs` is SPEED, NUMBERS or LEARNING, `why` the reason shown to the user."""

    overrides: tuple[str, ...]
    costs: int
    why: str

    @property
    def keys(self) -> set[str]:
        """Keys and groups that the overrides set."""
        return {key_of(override) for override in self.overrides}


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Planned effect of a candidate. `slower_by` is relative to the time of a token: 0.33 is a third more."""

    candidate: Candidate
    saves_bytes: int
    slower_by: float
    fits: bool


class Suggestions:
    """Plans candidates on top of the overrides of one command line."""

    def __init__(self, planner: Planner, overrides: Sequence[str]) -> None:
        self._planner = planner
        self._overrides = overrides

    def alone(self, now: Planned) -> list[Suggestion]:
        """Return the candidates that save memory alone, the cheapest first."""
        suggestions = []
        for candidate in candidates(now.run):
            other = self.plan(now, [candidate])
            saved = 0 if other is None else now.verdict.needed_bytes - other.verdict.needed_bytes
            if other is not None and saved > 0:
                slower = other.seconds / now.seconds - 1
                suggestions.append(Suggestion(candidate, saved, slower, other.verdict.fits))
        return sorted(suggestions, key=lambda s: (s.candidate.costs, max(0.0, round(s.slower_by, 2)), -s.saves_bytes))

    def together(self, now: Planned, alone: Sequence[Suggestion]) -> dict[str, Any] | None:
        """Return the cheapest combination that fits: suggestions are added in order of cost until the plan fits.

        A combination is planned once its single savings add up to the missing memory. If one suggestion is enough
        alone, only cheaper ones are combined. Those that save almost nothing come last.
        """
        missing_bytes = now.verdict.needed_bytes - now.verdict.memory_bytes
        least_cost = min((single.candidate.costs for single in alone if single.fits), default=LEARNING + 1)
        cheaper = [single for single in alone if single.candidate.costs < least_cost]
        cheaper.sort(key=lambda single: single.saves_bytes < _MIN_SAVED_SHARE * missing_bytes)
        chosen = self.compatible(cheaper)
        for count in range(2, len(chosen) + 1):
            if count < len(chosen) and sum(single.saves_bytes for single in chosen[:count]) < missing_bytes:
                continue
            combined = [single.candidate for single in chosen[:count]]
            planned = self.plan(now, combined)
            if planned is not None and planned.verdict.fits:
                return {"override": " ".join(_overrides(combined)), "needed_bytes": planned.verdict.needed_bytes}
        return None

    def compatible(self, suggestions: Sequence[Suggestion]) -> list[Suggestion]:
        """Return the suggestions that can be combined, in order; of those that set the same key, the first."""
        chosen: list[Suggestion] = []
        for suggestion in suggestions:
            candidate, others = suggestion.candidate, [other.candidate for other in chosen]
            is_free = all(candidate.keys.isdisjoint(other.keys) for other in others)
            if is_free and self.run([*others, candidate]) is not None:
                chosen.append(suggestion)
        return chosen

    def run(self, chosen: Sequence[Candidate]) -> RunConfig | None:
        """Return the run with candidates applied; None if they conflict with the command line."""
        keys = {key for candidate in chosen for key in candidate.keys}
        unchanged = [override for override in self._overrides if key_of(override) not in keys]
        overrides = [*unchanged, *_overrides(chosen)]
        try:
            return random_if_missing(compose_run(overrides))
        except ConfigError:
            return None

    def plan(self, now: Planned, chosen: Sequence[Candidate]) -> Planned | None:
        """Plan candidates with the parallelism, bins and tiles that `auto` resolved to."""
        run = self.run(chosen)
        if run is None:
            return None
        try:
            if now.parallel_reason and run.parallel.kind == AUTO:
                run = with_parallel(run, now.run.parallel.kind)
            if now.chosen_tile and has_auto_tile(run.training):
                run = with_tile(run, tile_tokens(now.run.training))
            if now.chosen_bins:  # except sizes that candidates set
                keys, batching = {key for candidate in chosen for key in candidate.keys}, now.run.batching
                sizes = {"tokens": batching.tokens, "accumulation": batching.accumulation}
                bins: dict[str, Any] = {name: size for name, size in sizes.items() if f"batching.{name}" not in keys}
                run = replace(run, batching=replace(run.batching, **bins))
            return self._planner.at(run)
        except ConfigError:  # raised only with the model: a base that cannot be quantized
            return None


def _overrides(chosen: Sequence[Candidate]) -> list[str]:
    return [override for candidate in chosen for override in candidate.overrides]


def candidates(run: RunConfig) -> list[Candidate]:
    """Return settings that would change this run and may save memory."""
    makers = (_layers, _smaller_micro_batches, _optimizer_states, _weights, _learned)
    return [candidate for make in makers for candidate in make(run)]


def _layers(run: RunConfig) -> Iterator[Candidate]:
    # auto already recomputes all layers if nothing fits
    if run.training.recompute is not True and run.training.recompute != "auto":
        why = "gradient checkpointing: activations are recomputed in backward, which takes more compute"
        yield Candidate(("training.recompute=true",), SPEED, why)
    elif not run.training.offload:
        why = "layer inputs are copied to CPU RAM and back"
        yield Candidate(("training.offload=true",), SPEED, why)
    if run.launch.num_processes != 1 and not run.parallel.divides:
        why = "the model is sharded over the processes and all-gathered layer by layer"
        yield Candidate(("parallel=fsdp",), SPEED, why)


def _smaller_micro_batches(run: RunConfig) -> Iterator[Candidate]:
    batching, longest = run.batching, run.dataset.max_length
    name, size = ("tokens", batching.bin_tokens) if batching.packing else ("rows", batching.rows)
    least = longest if batching.packing else 1
    if size > least:
        smaller = max(least, size // 2)
        accumulation = batching.accumulation * -(-size // smaller)
        more = accumulation * smaller / (batching.accumulation * size) - 1
        tokens = f"{more:.0%} more tokens" if more else "as many tokens"
        why = f"a step has {tokens}, in smaller micro-batches with lower GPU utilization"
        yield Candidate((f"batching.{name}={smaller}", f"batching.accumulation={accumulation}"), SPEED, why)


def _optimizer_states(run: RunConfig) -> Iterator[Candidate]:
    kind, is_full = run.optimizer.kind, run.adapter.kind == "none"
    if is_full and kind in ("adamw", "adamw_apex", "adamw_bnb_32bit", "paged_adamw_32bit", "muon", "sgd"):
        yield Candidate(("optimizer=adamw_8bit",), NUMBERS, "8-bit optimizer states")
    if kind in ("adamw", "adamw_8bit", "adamw_apex", "adamw_bnb_32bit", "muon", "sgd"):
        why = "8-bit optimizer states, paged to CPU RAM when the GPU is full, which only then takes time"
        yield Candidate(("optimizer=paged_adamw_8bit",), NUMBERS, why)
    needs_whole_gradients = run.batching.accumulation > 1 or run.launch.num_processes != 1
    if is_full and not run.optimizer.in_backward and not needs_whole_gradients:
        why = "gradients are freed as soon as their weights are updated, so they are not clipped"
        yield Candidate(("optimizer.in_backward=true", "training.clip=0"), LEARNING, why)


def _weights(run: RunConfig) -> Iterator[Candidate]:
    is_full, base = run.adapter.kind == "none", run.quantization
    if is_full and run.precision.trained == "fp32":
        why = "16-bit weights and gradients; weights are rounded stochastically"
        yield Candidate(("precision=bf16", "precision.trained=bf16"), NUMBERS, why)
    change, why = QUANTIZATION_KINDS[base.kind].smaller
    if not is_full and change != f"quantization.double_quant={str(base.double_quant).lower()}":
        yield Candidate((change,), NUMBERS, why)


def _learned(run: RunConfig) -> Iterator[Candidate]:
    if run.adapter.kind == "none":
        yield Candidate(("recipe=lora",), LEARNING, "trains an adapter instead of the whole model")
        yield Candidate(("recipe=qlora",), LEARNING, "trains an adapter on a frozen 4-bit base")
    elif ADAPTER_KINDS[run.adapter.kind].has_rank and run.adapter.r > 8:
        yield Candidate(("adapter.r=8",), LEARNING, "adapters of a lower rank have less capacity")
    shorter, batching = run.dataset.max_length // 2, run.batching
    has_large_bins = batching.packing and batching.bin_tokens > run.dataset.max_length  # they become smaller first
    if shorter >= _MIN_ROW_TOKENS and not has_large_bins:
        bins = (f"batching.tokens={shorter}",) if batching.packing else ()
        why = "longer rows are dropped, truncated or split (dataset.on_overflow)"
        yield Candidate((f"dataset.max_length={shorter}", *bins), LEARNING, why)
