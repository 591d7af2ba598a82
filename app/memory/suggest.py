"""The settings that bring a run into less memory, each planned again, so that what it saves is no guess."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.config.load import compose_run
from app.config.schema import RunConfig
from app.errors import ConfigError
from app.memory.planner import Planned, Planner, by_facts
from app.training.auto_batch import AUTO, with_parallel

SPEED, NUMBERS, LEARNING = range(3)  # what a knob costs, the cheapest first
COSTS = ("speed", "precision of the numbers", "what is learned")
_SHORTEST = 256  # tokens of a row, below which none is suggested
_HALF = 2
_AS_FAST = 0.005  # a difference in time that is none
_LITTLE = 0.01  # of what is too much


@dataclass(frozen=True, slots=True)
class Knob:
    """What to type; `costs` is one of the above and `why` says it in words."""

    overrides: tuple[str, ...]
    costs: int
    why: str

    @property
    def sets(self) -> set[str]:
        """Keys and groups."""
        return {_key(word) for word in self.overrides}


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A knob and what it does. `slower_by` is a share of the time of a token: 0.33 is a third more."""

    knob: Knob
    saves_bytes: int
    slower_by: float
    fits: bool


class Suggestions:
    """Of one command line."""

    def __init__(self, planner: Planner, overrides: Sequence[str]) -> None:
        self._planner = planner
        self._overrides = overrides

    def alone(self, now: Planned) -> list[Suggestion]:
        """Those knobs that save memory, the cheapest first."""
        found = []
        for knob in candidates(now.run):
            other = self._planned(now, [knob])
            saved = 0 if other is None else now.verdict.needed_bytes - other.verdict.needed_bytes
            if other is not None and saved > 0:
                slower = other.seconds / now.seconds - 1
                found.append(Suggestion(knob, saved, slower, other.verdict.fits))
        return sorted(found, key=_cost)

    def together(self, now: Planned, alone: Sequence[Suggestion]) -> dict[str, Any] | None:
        """The cheapest, one after the other, until they fit; planned as soon as what each saves adds up to enough.

        Where one is enough alone, only of those that cost less; what saves next to nothing comes last.
        """
        too_much = now.verdict.needed_bytes - now.verdict.memory_bytes
        enough = min((each.knob.costs for each in alone if each.fits), default=LEARNING + 1)
        cheaper = [each for each in alone if each.knob.costs < enough]
        cheaper.sort(key=lambda each: each.saves_bytes < _LITTLE * too_much)
        chosen = self.that_go_together(cheaper)
        for count in range(2, len(chosen) + 1):
            if count < len(chosen) and sum(each.saves_bytes for each in chosen[:count]) < too_much:
                continue
            knobs = [each.knob for each in chosen[:count]]
            found = self._planned(now, knobs)
            if found is not None and found.verdict.fits:
                return {"override": " ".join(words_of(knobs)), "needed_bytes": found.verdict.needed_bytes}
        return None

    def that_go_together(self, suggestions: Sequence[Suggestion]) -> list[Suggestion]:
        """In their order; of those that set the same, the one that saves most."""
        chosen: list[Suggestion] = []
        for each in suggestions:
            alike = (other.saves_bytes for other in suggestions if other.knob.sets == each.knob.sets)
            with_it = [*(other.knob for other in chosen), each.knob]
            if each.saves_bytes == max(alike) and self.run(with_it) is not None:
                chosen.append(each)
        return chosen

    def run(self, knobs: Sequence[Knob]) -> RunConfig | None:
        """None where they do not go with what was typed."""
        words = turned(self._overrides, knobs)
        try:
            return by_facts(compose_run(words), words)
        except ConfigError:
            return None

    def _planned(self, now: Planned, knobs: Sequence[Knob]) -> Planned | None:
        """In the bins that were found."""
        run = self.run(knobs)
        if run is None:
            return None
        try:
            if now.chosen_parallel and run.parallel.kind == AUTO:
                run = with_parallel(run, now.run.parallel.kind)
            return self._planner.at(_in_bins_of(now, run, knobs) if now.chosen_bins else run)
        except ConfigError:  # what only the model tells: a base that cannot be quantised
            return None


def _in_bins_of(now: Planned, run: RunConfig, knobs: Sequence[Knob]) -> RunConfig:
    """But for what knobs set themselves."""
    set_by_knobs = {key for knob in knobs for key in knob.sets}
    found: dict[str, Any] = {
        "tokens": now.run.batching.tokens,
        "accumulation": now.run.batching.accumulation,
    }
    kept = {name: size for name, size in found.items() if f"batching.{name}" not in set_by_knobs}
    return replace(run, batching=replace(run.batching, **kept))


def _cost(each: Suggestion) -> tuple[int, float, int]:
    return each.knob.costs, max(0.0, each.slower_by - _AS_FAST), -each.saves_bytes


def turned(overrides: Sequence[str], knobs: Sequence[Knob]) -> tuple[str, ...]:
    """A command line with knobs turned, as if they had been typed."""
    added = words_of(knobs)
    keys = {_key(word) for word in added}
    return (*(word for word in overrides if _key(word) not in keys), *added)


def words_of(knobs: Sequence[Knob]) -> list[str]:
    """What is typed for all of them; of a key that several set, the last."""
    words: dict[str, str] = {}
    for knob in knobs:
        words |= {_key(word): word for word in knob.overrides}
    return list(words.values())


def _key(word: str) -> str:
    return word.lstrip("+").partition("=")[0]


def candidates(run: RunConfig) -> list[Knob]:
    """All that change something of this run."""
    return [knob for make in _KNOBS for knob in make(run)]


def _recompute(run: RunConfig) -> Iterator[Knob]:
    if run.training.recompute is not True:
        yield Knob(
            ("training.recompute=true",),
            SPEED,
            "what layers compute is computed again in backward: more arithmetic",
        )


def _offload(run: RunConfig) -> Iterator[Knob]:
    if run.training.recompute is True and not run.training.offload:
        yield Knob(
            ("training.offload=true",),
            SPEED,
            "inputs of layers wait in the memory of the host, copied beside the arithmetic",
        )


def _shard(run: RunConfig) -> Iterator[Knob]:
    if run.launch.num_processes != 1 and not run.parallel.divides:
        yield Knob(
            ("parallel=fsdp",), SPEED, "the model is divided among the processes, and gathered layer by layer"
        )


def _smaller_bins(run: RunConfig) -> Iterator[Knob]:
    batching, longest = run.batching, run.dataset.max_length
    if batching.packing and batching.bin_tokens > longest:
        tokens = max(longest, batching.bin_tokens // _HALF)
        yield _divided(f"batching.tokens={tokens}", batching.accumulation * -(-batching.bin_tokens // tokens))


def _fewer_rows(run: RunConfig) -> Iterator[Knob]:
    batching = run.batching
    if not batching.packing and batching.rows > 1:
        rows = batching.rows // _HALF
        yield _divided(f"batching.rows={rows}", batching.accumulation * -(-batching.rows // rows))


def _divided(smaller: str, accumulation: int) -> Knob:
    why = "a step has as many tokens, in smaller micro-batches that keep a GPU less busy"
    return Knob((smaller, f"batching.accumulation={accumulation}"), SPEED, why)


def _states(run: RunConfig) -> Iterator[Knob]:
    kind = run.optimizer.kind
    if kind in ("adamw", "paged_adamw_32bit", "muon", "sgd") and run.adapter.kind == "none":
        yield Knob(("optimizer=adamw_8bit",), NUMBERS, "the states of the optimizer are kept in 8 bits")
    if kind in ("adamw", "adamw_8bit", "muon", "sgd"):
        yield Knob(
            ("optimizer=paged_adamw_8bit",),
            NUMBERS,
            "8 bits, and the states move to the host when the GPU is full, which takes time only then",
        )


def _narrow_weights(run: RunConfig) -> Iterator[Knob]:
    if run.adapter.kind == "none" and run.precision.trained == "fp32":
        why = "weights and gradients have 16 bits; weights are rounded by chance, so that nothing is lost on average"
        yield Knob(("precision=bf16", "precision.trained=bf16"), NUMBERS, why)


def _in_backward(run: RunConfig) -> Iterator[Knob]:
    several = run.batching.accumulation > 1 or run.launch.num_processes != 1
    if run.adapter.kind != "none" or run.optimizer.in_backward or several:
        return
    words, why = ("optimizer.in_backward=true",), "each gradient is let go as soon as its weight was stepped"
    if run.training.clip == 0:
        yield Knob(words, SPEED, why)
    else:
        yield Knob((*words, "training.clip=0"), LEARNING, f"{why}, so gradients are not clipped")


def _four_bits(run: RunConfig) -> Iterator[Knob]:
    if run.adapter.kind != "none" and run.quantization.kind == "none":
        yield Knob(("recipe=qlora",), NUMBERS, "the frozen base has 4 bits a weight, unpacked at each use")
    elif run.quantization.kind == "fp8":
        yield Knob(
            ("quantization=nf4",), NUMBERS, "4 bits a weight in place of two times 8, unpacked at each use"
        )
    elif run.quantization.kind == "nf4" and not run.quantization.double_quant:
        yield Knob(
            ("quantization.double_quant=true",), NUMBERS, "the scales of the 4-bit weights have 8 bits"
        )


def _adapters(run: RunConfig) -> Iterator[Knob]:
    if run.adapter.kind == "none":
        yield Knob(("recipe=lora",), LEARNING, "adapters learn in place of the whole model")
        yield Knob(("recipe=qlora",), LEARNING, "adapters learn, on a frozen base of 4 bits a weight")


def _shorter_rows(run: RunConfig) -> Iterator[Knob]:
    """Where a bin is larger than a row, the bin comes first."""
    longest, batching = run.dataset.max_length // _HALF, run.batching
    if longest < _SHORTEST or (batching.packing and batching.bin_tokens > run.dataset.max_length):
        return
    words: tuple[str, ...] = (f"dataset.max_length={longest}",)
    why = "longer rows are left out or cut (dataset.on_overflow)"
    if batching.packing:
        words, why = (*words, f"batching.tokens={longest}"), f"{why}, and a step has half as many tokens"
    yield Knob(words, LEARNING, why)


def _rank(run: RunConfig) -> Iterator[Knob]:
    if run.adapter.kind != "none" and run.adapter.r > 8:
        yield Knob(("adapter.r=8",), LEARNING, "adapters of a lower rank learn less")


_KNOBS: tuple[Callable[[RunConfig], Iterator[Knob]], ...] = (
    _recompute,
    _offload,
    _shard,
    _smaller_bins,
    _fewer_rows,
    _states,
    _narrow_weights,
    _in_backward,
    _four_bits,
    _adapters,
    _shorter_rows,
    _rank,
)
