"""A configuration planned and judged."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.config.schema import RunConfig
from app.engine.bins import is_open, with_bins
from app.engine.layers import AUTO, layers_of
from app.engine.limits import within_positions
from app.model.source import folder_at_hand
from app.plan.fewest import fewest, judged
from app.plan.known import Known
from app.plan.largest import largest_on
from app.plan.machine import Machine
from app.plan.memory_plan import MemoryPlan, Shape
from app.plan.planner import depths_of, outline_of, planned_choices
from app.plan.verdict import Verdict
from app.plan.worst_case import worst_case


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


class Look:
    """At runs of a command line, on one machine, in one of `processes`."""

    def __init__(self, overrides: Sequence[str], machine: Machine, processes: int = 1) -> None:
        self.overrides = overrides
        self.machine = machine
        self.processes = processes
        self._known = Known()
        self._doubtful = False  # whether one run of these had too much in weights, gradients and states alone

    def at(self, run: RunConfig, *, exact: bool = False) -> Looked:
        """The largest micro-batch that its settings allow; `exact` traces every layer."""
        found = self._at(run, exact=exact)
        self._doubtful |= found.verdict.is_hopeless
        return found

    def _at(self, run: RunConfig, *, exact: bool) -> Looked:
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
            known=self._known,
            processes=self.processes,
        )
        if layers_are_open:  # as many layers as a run on this machine would recompute
            count, _ = fewest(
                depths.layers, lambda tried: self._judged(depths.planned(tried)), doubtful=self._doubtful
            )
            run = replace(run, training=replace(run.training, recompute=count))
        plan = depths.planned(layers_of(run.training), exact=exact)
        return Looked(run, shape, plan, self._judged(plan), layers_are_open)

    def _in_found_bins(self, run: RunConfig, *, exact: bool) -> Looked:
        """In the bins that a run on this machine would have, and with as many recomputed layers."""
        choices = planned_choices(run.precision, self.machine.device)
        layers = outline_of(run, self.machine.device, choices, self._known).depth
        found = largest_on(
            self.machine, run, choices, layers, self.processes, self._known, doubtful=self._doubtful
        )
        layers_are_open = run.training.recompute == AUTO
        run = replace(
            with_bins(run, found.tokens), training=replace(run.training, recompute=found.recomputed)
        )
        seen = self.at(run, exact=True) if exact else Looked(run, worst_case(run), found.plan, found.verdict)
        return replace(seen, chosen=layers_are_open, chosen_bins=True)

    def _judged(self, plan: MemoryPlan) -> Verdict:
        return judged(plan, self.machine, self.processes)

    def _by_facts(self, run: RunConfig) -> RunConfig:
        """A model whose files are not here, by the numbers of its YAML: as if its weights were to be drawn."""
        model = run.model
        another = any(word.lstrip("+").startswith("model.path=") for word in self.overrides)
        if another or model.weights == "random" or "model_type" not in model.architecture:
            return run
        return run if folder_at_hand(model) else replace(run, model=replace(model, weights="random"))
