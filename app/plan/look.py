"""A configuration planned and judged; and with knobs turned, planned and judged again."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from app.config.schema import RunConfig
from app.engine.bins import is_open, with_bins
from app.engine.ground import sections_of
from app.engine.layers import AUTO, layers_of
from app.engine.limits import within_positions
from app.errors import ConfigError
from app.model.build import plan_model
from app.model.source import folder_at_hand
from app.plan.depth import Depths
from app.plan.fewest import fewest, judged
from app.plan.forked import shared_out
from app.plan.knobs import Knob, candidates, seconds_per_token, turned, words_of
from app.plan.largest import largest_on
from app.plan.machine import Machine
from app.plan.memory_plan import MemoryPlan, Shape
from app.plan.planner import depths_of, planned_choices
from app.plan.verdict import Verdict
from app.plan.worst_case import worst_case

_AS_FAST = 0.005  # a difference in time that is none


@dataclass(frozen=True, slots=True)
class Looked:
    """One configuration, its largest micro-batch, and whether that fits."""

    run: RunConfig
    shape: Shape
    plan: MemoryPlan
    verdict: Verdict
    chosen: bool = False  # whether it was found here how many layers are recomputed
    chosen_bins: bool = False  # and how large bins are

    @property
    def bins(self) -> list[str]:
        """What to type for bins as large."""
        batching = self.run.batching
        return [f"batching.tokens={batching.tokens}", f"batching.accumulation={batching.accumulation}"]


@dataclass(frozen=True, slots=True)
class Turned:
    """A knob and what it does. `slower_by` is a share of the time of a token: 0.33 is a third more."""

    knob: Knob
    saves_bytes: int
    slower_by: float
    fits: bool


class Look:
    """At runs of a command line, on one machine, in one of `processes`."""

    def __init__(self, overrides: Sequence[str], machine: Machine, processes: int = 1) -> None:
        self._overrides = overrides
        self.machine = machine
        self._processes = processes
        self._first: Depths | None = None

    def at(self, run: RunConfig, *, exact: bool = False) -> Looked:
        """The largest micro-batch that its settings allow; `exact` traces every layer."""
        run = within_positions(self._by_facts(run), lambda _: None)
        layers_are_open = run.training.recompute == AUTO
        if is_open(run):
            return self._in_found_bins(run, exact=exact)
        shape, device = worst_case(run), self.machine.device
        depths = depths_of(
            run,
            shape,
            device,
            planned_choices(run.precision, device),
            like=self._first,
            processes=self._processes,
        )
        self._first = self._first or depths
        if layers_are_open:  # as many layers as a run on this machine would recompute
            count, _ = fewest(depths.layers, lambda tried: self._judged(depths.planned(tried)))
            run = replace(run, training=replace(run.training, recompute=count))
        plan = depths.planned(layers_of(run.training), exact=exact)
        return Looked(run, shape, plan, self._judged(plan), layers_are_open)

    def _in_found_bins(self, run: RunConfig, *, exact: bool) -> Looked:
        """In the bins that a run on this machine would have, and with as many recomputed layers."""
        choices = planned_choices(run.precision, self.machine.device)
        layers = plan_model(sections_of(run, choices)).layers
        found = largest_on(self.machine, run, choices, layers, self._processes)
        layers_are_open = run.training.recompute == AUTO
        run = replace(
            with_bins(run, found.tokens), training=replace(run.training, recompute=found.recomputed)
        )
        seen = self.at(run, exact=True) if exact else Looked(run, worst_case(run), found.plan, found.verdict)
        return replace(seen, chosen=layers_are_open, chosen_bins=True)

    def _judged(self, plan: MemoryPlan) -> Verdict:
        return judged(plan, self.machine, self._processes)

    def knobs(self, now: Looked) -> list[Turned]:
        """Those that save memory, the cheapest first."""
        last_first = candidates(now.run, self._processes)[::-1]  # those of other models, which take longest
        tried = shared_out(partial(self._turn, now), last_first)[::-1]
        return sorted((each for each in tried if each is not None), key=_cost)

    def together(self, now: Looked, knobs: Sequence[Turned]) -> dict[str, Any] | None:
        """One after the other, the cheapest first, until it fits."""
        chosen: list[Knob] = []
        for each in knobs:
            run = turned(self.words(now), [*chosen, each.knob])
            if run is None:
                continue
            chosen.append(each.knob)
            verdict = self.at(run).verdict if len(chosen) > 1 else None
            if verdict is not None and verdict.fits:
                return {"override": " ".join(words_of(chosen)), "needed_bytes": verdict.needed_bytes}
        return None

    def _by_facts(self, run: RunConfig) -> RunConfig:
        """A model whose files are not here, by the numbers of its YAML: as if its weights were to be drawn."""
        model = run.model
        another = any(word.lstrip("+").startswith("model.path=") for word in self._overrides)
        if another or model.weights == "random" or "model_type" not in model.architecture:
            return run
        return run if folder_at_hand(model) else replace(run, model=replace(model, weights="random"))

    def words(self, now: Looked) -> list[str]:
        """What was typed; bins that were found stay as they are while knobs are turned."""
        open_keys = ("batching.tokens=", "batching.accumulation=") if now.chosen_bins else ()
        typed = [word for word in self._overrides if not word.lstrip("+").startswith(open_keys)]
        return [*typed, *now.bins] if now.chosen_bins else typed

    def _turn(self, now: Looked, knob: Knob) -> Turned | None:
        run = turned(self.words(now), [knob])
        if run is None:
            return None
        try:
            new = self.at(run)
        except ConfigError:  # of what only the model tells: fewer tensors than processes
            return None
        saved = now.verdict.needed_bytes - new.verdict.needed_bytes
        slower = self._time(new) / self._time(now) - 1
        return Turned(knob, saved, slower, new.verdict.fits) if saved > 0 else None

    def _time(self, looked: Looked) -> float:
        return seconds_per_token(looked.run, looked.plan, looked.shape.tokens, self.machine)


def _cost(each: Turned) -> tuple[int, float, int]:
    return each.knob.costs, max(0.0, each.slower_by - _AS_FAST), -each.saves_bytes
