"""Before the first step of a start: all that a run does, once, with the micro-batch that needs most memory.

What does not fit is found here and not in step 3,000, in the first evaluation or after a resume. Nothing is changed but
how deep micro-batches are split: no weight, no state, no random number of the run is another one afterwards.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from app.batch import Batch
from app.config.schema import TrainingConfig
from app.tracking.formatting import format_bytes
from app.training.progress import Progress
from app.training.scores import score
from app.training.train_step import Stepper
from app.training.trainer import Parts

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What it found out. `deepened`: whether micro-batches are split more than before."""

    tokens: int  # of the micro-batch
    depth: int
    deepened: bool
    evaluated: bool
    peak_bytes: int  # most so far, as the device or the system counts it
    seconds: float

    def words(self) -> str:
        """For people."""
        through = "a step and an evaluation" if self.evaluated else "a step"
        fits = (
            f"fits only in parts: from the first step on micro-batches are split by documents, into up to "
            f"{2**self.depth} parts. The gradient is the same, nothing is left out. A smaller batching.tokens "
            "(or batching.rows) with more batching.accumulation is faster"
            if self.deepened
            else "fits" + (f" in up to {2**self.depth} parts, as before" if self.depth else "")
        )
        return (
            f"rehearsed {through} with the largest micro-batch, {self.tokens:,} tokens ({self.seconds:.1f} s, "
            f"{format_bytes(self.peak_bytes)} at most): it {fits}"
        )


def is_due(training: TrainingConfig, device: torch.device) -> bool:
    """A CPU has no error that could be answered, and its first step would come later: there when asked for."""
    return device.type != "cpu" if training.rehearse == AUTO else bool(training.rehearse)


def rehearse(parts: Parts, progress: Progress, largest: Batch, micro_batches: int) -> Rehearsed:
    """All processes together. How deep it had to split is kept, as if a step had found it."""
    begun, stepper, runtime = time.perf_counter(), parts.stepper, parts.runtime
    batches = [largest] * min(micro_batches, 2)  # the second one finds the gradient of the first
    with torch.random.fork_rng([runtime.device] if runtime.device.type == "cuda" else []):
        _through(stepper, batches, parts)
    found = Rehearsed(
        tokens=largest.ids.numel(),
        depth=stepper.depth,
        deepened=stepper.depth > progress.depth,
        evaluated=parts.eval_batches is not None,
        peak_bytes=int(runtime.peers.highest(runtime.peak_memory_bytes())),
        seconds=time.perf_counter() - begun,
    )
    progress.depth = found.depth
    parts.journal.message(found.words())
    return found


def _through(stepper: Stepper, batches: Sequence[Batch], parts: Parts) -> None:
    """States that a checkpoint brought are there already, and are left alone."""
    is_fresh = not stepper.optimizer.state
    if is_fresh:
        stepper.allocate_states()
    stepper.try_out(batches)
    if parts.eval_batches is not None:  # they come longest first
        few = islice(parts.eval_batches(), 1)
        of_whom: dict[str, Any] = {"answers": parts.answers, "classes": parts.classes, "depth": stepper.depth}
        score(stepper.trainee, few, parts.runtime, **of_whom)
    if is_fresh:
        stepper.drop_states()
