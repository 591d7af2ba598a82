"""The rehearsal before the first step of a start: a step and an evaluation with the largest micro-batch.

What does not fit is found here and not in step 3,000, in the first evaluation or after a resume. Only recomputed layers
and the split depth of micro-batches may change: weights, optimizer states and random numbers stay as they are.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from app.batch import Batch
from app.config.schema import TrainingConfig
from app.distributed.process_group import Runtime
from app.optim.optimizer_state import drop_states
from app.training.train_step import Stepper


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Measurements, as the manifest has them."""

    tokens: int  # of the micro-batch
    depth: int  # how often micro-batches are halved from now on
    deepened: bool  # whether that is more than before
    recomputed_more: int  # layers that training.recompute=auto had not planned
    evaluated: bool
    peak_bytes: int  # so far, as the device or the system counts it
    seconds: float


def is_due(training: TrainingConfig, device: torch.device) -> bool:
    """On a CPU only when asked for: it raises no out-of-memory error, and the first step would come later."""
    return device.type != "cpu" if training.rehearse == "auto" else bool(training.rehearse)


def rehearse(
    stepper: Stepper, runtime: Runtime, largest: Batch, micro_batches: int, try_evaluation: Callable[[], bool]
) -> Rehearsal:
    """Rehearse on all processes together. `try_evaluation`: score a batch; false where none is held out."""
    begun, depth = time.perf_counter(), stepper.split_depth
    batches = [largest] * min(micro_batches, 2)  # the second adds to gradients of the first
    is_fresh = not stepper.optimizer.state
    with torch.random.fork_rng([runtime.device] if runtime.device.type == "cuda" else []):
        if is_fresh:
            stepper.allocate_states()
        stepper.try_out(batches)
        evaluated = try_evaluation()
        stepper.recompute_rest = None
        if is_fresh:  # those that a checkpoint has brought stay
            drop_states(stepper.optimizer)
    return Rehearsal(
        tokens=largest.ids.numel(),
        depth=stepper.split_depth,
        deepened=stepper.split_depth > depth,
        recomputed_more=stepper.recomputed_more,
        evaluated=evaluated,
        peak_bytes=int(runtime.host_group.max(runtime.peak_memory_bytes())),
        seconds=time.perf_counter() - begun,
    )
