"""How many optimizer steps a run has."""

import math
from dataclasses import dataclass

from app.config.schema import TrainingConfig


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Counts of the whole run."""

    steps: int
    steps_per_epoch: int

    def epoch(self, step: int) -> float:
        """Epochs done after `step` steps."""
        return step / self.steps_per_epoch


def plan_steps(training: TrainingConfig, steps_per_epoch: int) -> StepPlan:
    """`epochs`, rounded up to whole steps, cut at `max_steps`."""
    wanted = math.ceil(training.epochs * steps_per_epoch - 1e-9)  # 0.1 * 30 is a little more than 3
    steps = wanted if training.max_steps is None else min(wanted, training.max_steps)
    return StepPlan(steps=max(steps, 1), steps_per_epoch=steps_per_epoch)
