"""Bins as large as fit, with as few recomputed layers as they ask for: the pair of which a token takes the least time.

At each place of a step, what is alive is affine in the tokens of its micro-batch and in the layers that are recomputed.
So the two smallest bins are traced, the others are estimated by the line through them, and what is chosen is confirmed
by a trace of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from app.config.schema import RunConfig
from app.engine.bins import ladder, step_tokens, suggested, with_bins
from app.engine.choices import Choices
from app.engine.layers import AUTO
from app.engine.world import world
from app.plan.depth import Depths
from app.plan.fewest import fewest, judged
from app.plan.known import Known
from app.plan.machine import Machine, machine_of
from app.plan.memory_plan import MemoryPlan
from app.plan.planner import depths_of
from app.plan.speed import seconds_per_token
from app.plan.verdict import Verdict
from app.plan.worst_case import worst_case

# A micro-batch costs as much again as the arithmetic of so many tokens: kernels are started, weights are read, and the
# last tiles of a product are not full. Assumed; that larger bins are faster at all is what matters.
_START = 256
_FEW_LAYERS = 5  # which are traced as they are


@dataclass(frozen=True, slots=True)
class Sized:
    """Bins of so many tokens with so many layers recomputed. `seconds` of a token: only their ratio means anything."""

    tokens: int
    recomputed: int
    verdict: Verdict
    seconds: float
    plan: MemoryPlan  # where it was estimated, only its `phases` are of this size

    def words(self, run: RunConfig, layers: int, machine: Machine) -> str:
        """What was chosen and why."""
        verdict, parts = self.verdict, step_tokens(run) // self.tokens
        needs = f"{verdict.needed_bytes / 1e9:.1f} of {verdict.memory_bytes / 1e9:.1f} GB of {machine.label}"
        again = f", {self.recomputed} of {layers} layers recomputed" if run.training.recompute == AUTO else ""
        divided = "1 micro-batch" if parts == 1 else f"{parts} micro-batches"
        size = f"batching.tokens=auto: {self.tokens:,} tokens, {divided} a step{again}"
        if not verdict.fits:
            return f"{size}, the smallest bins, and the plan does not fit even so ({needs})"
        slow = "; larger ones do not pay on a processor" if machine.device == "cpu" else ""
        return f"{size}, which need{'' if parts > 1 else 's'} {needs}{slow}"


def largest_bins(run: RunConfig, choices: Choices, layers: int) -> tuple[int, str]:
    """Of a run on this machine, and in words how that was found."""
    machine = machine_of(None).shared_by(world().local_size)
    found = largest_on(machine, run, choices, layers, world().size, Known())
    return found.tokens, found.words(run, layers, machine)


def largest_on(
    machine: Machine,
    run: RunConfig,
    choices: Choices,
    layers: int,
    processes: int,
    known: Known,
    *,
    doubtful: bool = False,
) -> Sized:
    """The fastest that fits; where nothing does, what needs least. `doubtful`: that anything fits."""
    return fastest(Plans(machine, run, choices, layers, processes, known), doubtful=doubtful)


def fastest(plans: "Plans", *, doubtful: bool = False) -> Sized:
    """Estimates in the order of their speed are confirmed by traces, until no other can be faster.

    Where it is `doubtful` that anything fits, what needs least is looked at first.
    """
    if doubtful and (least := plans.traced(plans.rungs[-1], plans.most)).verdict.is_hopeless:
        return least
    ideal = plans.traced(plans.rungs[0], plans.least)
    if (
        ideal.verdict.fits
    ):  # the largest bins and the fewest layers: where they fit, nothing else need be traced
        return ideal
    if ideal.verdict.is_hopeless:
        return plans.traced(plans.rungs[-1], plans.most)
    best: Sized | None = None
    for each in sorted(_estimated_to_fit(plans), key=lambda sized: (sized.seconds, -sized.tokens)):
        if best is not None and best.seconds <= each.seconds:
            break
        found = _confirmed(plans, each)
        if found is not None and (best is None or found.seconds < best.seconds):
            best = found
    return best or plans.traced(plans.rungs[-1], plans.most)


def _estimated_to_fit(plans: "Plans") -> Iterator[Sized]:
    """Of each size the fewest layers."""
    for tokens in plans.rungs:
        if not plans.is_beyond(tokens):
            count, verdict = fewest(plans.most, partial(_verdict_at, plans, tokens))
            if verdict.fits:
                yield plans.estimated(tokens, max(plans.least, count))
                if plans.largest_is_best:
                    return


def _verdict_at(plans: "Plans", tokens: int, count: int) -> Verdict:
    return plans.estimated(tokens, max(plans.least, count)).verdict


def _confirmed(plans: "Plans", estimated: Sized) -> Sized | None:
    """With a layer less where the estimate was too cautious, with as many more as are needed where it was not."""
    tokens, count = estimated.tokens, estimated.recomputed
    fitting = [each for each in (count, count - 1) if each >= plans.least and plans.fits(tokens, each)]
    if not fitting and plans.fits(tokens, plans.most):
        more, _ = fewest(plans.most - count, lambda more: plans.traced(tokens, count + more).verdict)
        fitting = [count + more]
    return plans.traced(tokens, min(fitting)) if fitting else None


class Plans:
    """Of one run with bins of different sizes; traced as seldom as possible."""

    def __init__(
        self, machine: Machine, run: RunConfig, choices: Choices, layers: int, processes: int, known: Known
    ) -> None:
        asked = run.training.recompute
        self.least, self.most = (0, layers) if asked == AUTO else (_count(asked, layers),) * 2
        # nothing and everything recomputed are of another sort than what lies between
        self._ends = (
            (2, layers - 2) if self.least != self.most and layers > _FEW_LAYERS else (self.least, self.most)
        )
        rungs = ladder(run)
        self.largest_is_best = machine.device == "cpu"
        self.rungs = [each for each in rungs if each <= suggested(run)] if self.largest_is_best else rungs
        # a step of one micro-batch has no gradients while it computes forward: it is on no line with the others
        self._lonely = step_tokens(run)
        self._anchors = [each for each in self.rungs if each != self._lonely][-2:]
        self._machine, self._run, self._choices, self._processes = machine, run, choices, processes
        self._known = known
        self._depths: dict[int, Depths] = {}

    def fits(self, tokens: int, recomputed: int) -> bool:
        """By a trace."""
        return self.traced(tokens, recomputed).verdict.fits

    def is_beyond(self, tokens: int) -> bool:
        """Whether a step of one micro-batch is so much too large that it need not be traced."""
        if tokens != self._lonely or len(self._anchors) < 2:
            return False
        found = self._on_the_line(tokens, self.most)
        gradients = 0 if found.plan.divided else found.plan.anatomy["trained_weights"]
        return found.verdict.needed_bytes - gradients > found.verdict.memory_bytes

    def estimated(self, tokens: int, recomputed: int) -> Sized:
        """By the traces of other sizes, where there are any."""
        if tokens in self._anchors or tokens == self._lonely or len(self._anchors) < 2:
            return self._between_ends(tokens, recomputed)
        return self._on_the_line(tokens, recomputed)

    def _on_the_line(self, tokens: int, recomputed: int) -> Sized:
        high, low = (self._between_ends(each, recomputed) for each in self._anchors)
        share = (tokens - low.tokens) / (high.tokens - low.tokens)
        of_seconds = (1 / tokens - 1 / low.tokens) / (1 / high.tokens - 1 / low.tokens)
        return replace(_between(low, high, share, of_seconds), tokens=tokens)

    def _between_ends(self, tokens: int, recomputed: int) -> Sized:
        first, last = self._ends
        if first == last:
            return self.traced(tokens, recomputed)
        share = (recomputed - first) / (last - first)
        found = _between(self.traced(tokens, first), self.traced(tokens, last), share, share)
        return replace(found, recomputed=recomputed)

    def traced(self, tokens: int, recomputed: int) -> Sized:
        """By traces of this size."""
        run = with_bins(self._run, tokens)
        run = replace(run, training=replace(run.training, recompute=recomputed))
        if tokens not in self._depths:
            shape, device, count = worst_case(run), self._machine.device, self._processes
            self._depths[tokens] = depths_of(
                run, shape, device, self._choices, known=self._known, processes=count
            )
        plan = self._depths[tokens].planned(recomputed)
        seconds = seconds_per_token(run, plan, tokens, self._machine) * (1 + _START / tokens)
        return Sized(tokens, recomputed, judged(plan, self._machine, self._processes), seconds, plan)


def _between(one: Sized, other: Sized, share: float, of_seconds: float) -> Sized:
    """On the line through both, at each place of a step: the peak may move from one to another."""

    def at(first: float, second: float, part: float = share) -> float:
        return first + part * (second - first)

    small, large = one.plan.phases, other.plan.phases
    phases = {each: round(at(small.get(each, 0), large.get(each, 0))) for each in {**small, **large}}
    verdict = replace(
        other.verdict,
        peak_bytes=max(phases.values()),
        lost_bytes=round(at(one.verdict.lost_bytes, other.verdict.lost_bytes)),
        buckets_bytes=max(one.verdict.buckets_bytes, other.verdict.buckets_bytes),
    )
    seconds = at(one.seconds, other.seconds, of_seconds)
    return replace(other, verdict=verdict, seconds=seconds, plan=replace(other.plan, phases=phases))


def _count(asked: bool | int | str, layers: int) -> int:
    return layers if asked is True else min(int(asked), layers)
