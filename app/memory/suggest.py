"""Suggestions of settings that save memory; the savings are those of complete plans."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.config.adapters import ADAPTER_KINDS
from app.config.load import compose_run
from app.config.overrides import key_of
from app.config.quantizations import QUANTIZATION_KINDS
from app.config.schema import RunConfig
from app.errors import ConfigError
from app.memory.planner import Planned, Planner, random_if_missing
from app.training.auto_settings import AUTO, with_parallel

SPEED, NUMBERS, LEARNING = range(3)  # cost of a candidate, in ascending order
COSTS = ("speed", "precision of the numbers", "what is learned")
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
        self._given = overrides

    def alone(self, now: Planned) -> list[Suggestion]:
        """Candidates that save memory by themselves, the cheapest first."""
        suggestions = []
        for candidate in candidates(now.run):
            other = self.plan(now, [candidate])
            saved = 0 if other is None else now.verdict.needed_bytes - other.verdict.needed_bytes
            if other is not None and saved > 0:
                slower = other.seconds / now.seconds - 1
                suggestions.append(Suggestion(candidate, saved, slower, other.verdict.fits))
        return sorted(suggestions, key=lambda s: (s.candidate.costs, max(0.0, round(s.slower_by, 2)), -s.saves_bytes))

    def together(self, now: Planned, alone: Sequence[Suggestion]) -> dict[str, Any] | None:
        """Cheapest combination that fits: suggestions are added in order of cost until the plan fits.

        A combination is planned once its single savings add up to the missing memory. If one suggestion is enough by
        itself, only cheaper ones are combined. Those that save almost nothing come last.
        """
        missing_bytes = now.verdict.needed_bytes - now.verdict.memory_bytes
        least_cost = min((each.candidate.costs for each in alone if each.fits), default=LEARNING + 1)
        cheaper = [each for each in alone if each.candidate.costs < least_cost]
        cheaper.sort(key=lambda each: each.saves_bytes < _MIN_SAVED_SHARE * missing_bytes)
        chosen = self.compatible(cheaper)
        for count in range(2, len(chosen) + 1):
            if count < len(chosen) and sum(each.saves_bytes for each in chosen[:count]) < missing_bytes:
                continue
            combined = [each.candidate for each in chosen[:count]]
            planned = self.plan(now, combined)
            if planned is not None and planned.verdict.fits:
                return {"override": " ".join(_overrides(combined)), "needed_bytes": planned.verdict.needed_bytes}
        return None

    def compatible(self, suggestions: Sequence[Suggestion]) -> list[Suggestion]:
        """Suggestions that can be combined, in order; of those that set the same key, the first."""
        chosen: list[Suggestion] = []
        for each in suggestions:
            others = [other.candidate for other in chosen]
            is_free = all(each.candidate.keys.isdisjoint(other.keys) for other in others)
            if is_free and self.run([*others, each.candidate]) is not None:
                chosen.append(each)
        return chosen

    def run(self, chosen: Sequence[Candidate]) -> RunConfig | None:
        """Configuration with candidates applied; None if they conflict with the command line."""
        keys = {key for candidate in chosen for key in candidate.keys}
        kept = [override for override in self._given if key_of(override) not in keys]
        overrides = [*kept, *_overrides(chosen)]
        try:
            return random_if_missing(compose_run(overrides), overrides)
        except ConfigError:
            return None

    def plan(self, now: Planned, chosen: Sequence[Candidate]) -> Planned | None:
        """Plan candidates with the parallelism and bins that `auto` resolved to."""
        run = self.run(chosen)
        if run is None:
            return None
        try:
            if now.parallel_reason and run.parallel.kind == AUTO:
                run = with_parallel(run, now.run.parallel.kind)
            if now.chosen_bins:  # except sizes that candidates set
                keys, batching = {key for candidate in chosen for key in candidate.keys}, now.run.batching
                sizes = {"tokens": batching.tokens, "accumulation": batching.accumulation}
                kept: dict[str, Any] = {name: size for name, size in sizes.items() if f"batching.{name}" not in keys}
                run = replace(run, batching=replace(run.batching, **kept))
            return self._planner.at(run)
        except ConfigError:  # found only with the model: a base that cannot be quantised
            return None


def _overrides(chosen: Sequence[Candidate]) -> list[str]:
    return [override for candidate in chosen for override in candidate.overrides]


def candidates(run: RunConfig) -> list[Candidate]:
    """Settings that would change this run and may save memory."""
    makers = (_layers, _smaller_micro_batches, _optimizer_states, _weights, _learned)
    return [candidate for make in makers for candidate in make(run)]


def _layers(run: RunConfig) -> Iterator[Candidate]:
    if run.training.recompute is not True and run.training.recompute != "auto":  # which takes all where none fits
        why = "what layers compute is computed again in backward: more arithmetic"
        yield Candidate(("training.recompute=true",), SPEED, why)
    elif not run.training.offload:
        why = "inputs of layers are copied to the memory of the host and back"
        yield Candidate(("training.offload=true",), SPEED, why)
    if run.launch.num_processes != 1 and not run.parallel.divides:
        why = "the model is divided among the processes, and gathered layer by layer"
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
        why = f"a step has {tokens}, in smaller micro-batches that keep a GPU less busy"
        yield Candidate((f"batching.{name}={smaller}", f"batching.accumulation={accumulation}"), SPEED, why)


def _optimizer_states(run: RunConfig) -> Iterator[Candidate]:
    kind, is_full = run.optimizer.kind, run.adapter.kind == "none"
    if is_full and kind in ("adamw", "adamw_apex", "adamw_bnb_32bit", "paged_adamw_32bit", "muon", "sgd"):
        yield Candidate(("optimizer=adamw_8bit",), NUMBERS, "the states of the optimizer are kept in 8 bits")
    if kind in ("adamw", "adamw_8bit", "adamw_apex", "adamw_bnb_32bit", "muon", "sgd"):
        why = "8 bits, and the states move to the host when the GPU is full, which takes time only then"
        yield Candidate(("optimizer=paged_adamw_8bit",), NUMBERS, why)
    needs_whole_gradients = run.batching.accumulation > 1 or run.launch.num_processes != 1
    if is_full and not run.optimizer.in_backward and not needs_whole_gradients:
        why = "each gradient is freed as soon as its weight was stepped, so gradients are not clipped"
        yield Candidate(("optimizer.in_backward=true", "training.clip=0"), LEARNING, why)


def _weights(run: RunConfig) -> Iterator[Candidate]:
    is_full, base = run.adapter.kind == "none", run.quantization
    if is_full and run.precision.trained == "fp32":
        why = "weights and gradients have 16 bits; weights are rounded stochastically"
        yield Candidate(("precision=bf16", "precision.trained=bf16"), NUMBERS, why)
    change, why = QUANTIZATION_KINDS[base.kind].smaller
    if not is_full and change != f"quantization.double_quant={str(base.double_quant).lower()}":
        yield Candidate((change,), NUMBERS, why)


def _learned(run: RunConfig) -> Iterator[Candidate]:
    if run.adapter.kind == "none":
        yield Candidate(("recipe=lora",), LEARNING, "adapters learn in place of the whole model")
        yield Candidate(("recipe=qlora",), LEARNING, "adapters learn, on a frozen base of 4 bits a weight")
    elif ADAPTER_KINDS[run.adapter.kind].has_rank and run.adapter.r > 8:
        yield Candidate(("adapter.r=8",), LEARNING, "adapters of a lower rank learn less")
    shorter, batching = run.dataset.max_length // 2, run.batching
    has_large_bins = batching.packing and batching.bin_tokens > run.dataset.max_length  # they become smaller first
    if shorter >= _MIN_ROW_TOKENS and not has_large_bins:
        bins = (f"batching.tokens={shorter}",) if batching.packing else ()
        why = "longer rows are left out or cut (dataset.on_overflow)"
        yield Candidate((f"dataset.max_length={shorter}", *bins), LEARNING, why)
